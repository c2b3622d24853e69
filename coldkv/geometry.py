"""Shape of one KV plane: head size, page size, heads. Knows no tensor library."""

from dataclasses import asdict, dataclass

from coldkv.errors import InputError

MAX_HEAD_DIM = 1024
MAX_PAGE_TOKENS = 4096


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    return ceil_div(a, b) * b


@dataclass(frozen=True)
class Geometry:
    """Geometry of a plane `[pages, kv_heads, page_tokens, head_dim]` (C order, so one head-page is contiguous).

    Raises InputError where a size is outside what the formats can hold: head_dim even and 2..1024,
    page_tokens 1..4096, kv_heads at least 1.
    """

    head_dim: int
    page_tokens: int = 64
    kv_heads: int = 1

    def __post_init__(self):
        if not (2 <= self.head_dim <= MAX_HEAD_DIM) or self.head_dim % 2:
            raise InputError(f"head_dim: expected an even number from 2 to {MAX_HEAD_DIM}, found {self.head_dim}")
        if not 1 <= self.page_tokens <= MAX_PAGE_TOKENS:
            raise InputError(f"page_tokens: expected 1 to {MAX_PAGE_TOKENS}, found {self.page_tokens}")
        if self.kv_heads < 1:
            raise InputError(f"kv_heads: expected at least 1, found {self.kv_heads}")

    @property
    def elements(self) -> int:
        """Values in one head-page."""
        return self.page_tokens * self.head_dim

    def groups(self, size: int) -> int:
        """Groups of `size` channels in a row; the last one may be shorter."""
        return ceil_div(self.head_dim, size)

    def to_dict(self) -> dict:
        return asdict(self)
