"""What a live pool raises: the operation that raised has changed nothing."""

from coldkv.errors import ColdkvError


class PoolError(ColdkvError):
    """A call that the pool's state does not allow: an unknown row, a page that is not there, a page freed twice."""


class PoolFull(PoolError):
    """Not enough free pages or rows. The same call may succeed once others have released theirs."""
