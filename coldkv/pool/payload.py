"""What a live pool asks of the bytes behind it, and the pool without any: bookkeeping alone. Torch-free.

All arguments are int32 arrays `[n]` of physical pages, slots or replicas, on the host; every method may raise, and then
what it was to write counts as unwritten.
"""

import numpy as np


class NoPayload:
    """No bytes: every page can be packed. `regions.Regions` is the payload that has them."""

    def pack(self, pages: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Encode physical `pages` of all layers into `slots` -> bool `[n]`: every record of the slot is valid."""
        return np.ones(len(pages), dtype=bool)

    def unpack(self, slots: np.ndarray, pages: np.ndarray) -> None:
        """Restore `slots` of all layers into physical `pages`."""

    def copy(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copy physical pages `source` to `target`."""

    def to_host(self, pages: np.ndarray, replicas: np.ndarray) -> None:
        """Copy physical `pages` exactly into host `replicas`."""

    def from_host(self, replicas: np.ndarray, pages: np.ndarray) -> None:
        """Copy host `replicas` back into physical `pages`."""

    def drop(self, slots: np.ndarray) -> None:
        """Mark `slots` invalid: their pages are gone."""


class KnownRefusals(NoPayload):
    """Bookkeeping for a plan: the physical pages in `refused` are those that a codec cannot hold."""

    def __init__(self, refused):
        self.refused = np.array(sorted(refused), dtype=np.int64)

    def pack(self, pages, slots):
        return ~np.isin(pages, self.refused)
