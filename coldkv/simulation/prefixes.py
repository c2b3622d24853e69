"""Which rows hold which prompt blocks, so that a new request can start from them. Torch-free."""

from coldkv.simulation.traces import Request


class PrefixIndex:
    """Block id -> rows that hold it (a block id stands for all before it too). Blocks count only if they are whole."""

    def __init__(self, page_tokens: int):
        self.page_tokens = page_tokens
        self._rows: dict[int | str, dict[int, None]] = {}
        self._blocks: dict[int, tuple] = {}

    @staticmethod
    def _whole(request: Request) -> tuple:
        return request.prefix[: request.input_tokens // request.block_tokens]

    def find(self, request: Request) -> tuple[int, int]:
        """(row, tokens) of the longest shared prefix, whole pages and short of the whole prompt; (-1, 0) if none.

        The last token of a prompt is always computed anew, since it gives the first token of the answer.
        """
        blocks = self._whole(request)
        low, high = 0, len(blocks)  # a row that holds a block holds all before it, so the held ones come first
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if blocks[middle - 1] in self._rows else (low, middle - 1)
        if not low:
            return -1, 0
        tokens = min(low * request.block_tokens, request.input_tokens - 1)
        return next(iter(self._rows[blocks[low - 1]])), tokens // self.page_tokens * self.page_tokens

    def add(self, row: int, request: Request) -> None:
        """Note that `row` holds the whole prompt of `request`."""
        self._blocks[row] = self._whole(request)
        for block in self._blocks[row]:
            self._rows.setdefault(block, {})[row] = None

    def remove(self, row: int) -> None:
        for block in self._blocks.pop(row, ()):
            rows = self._rows[block]
            del rows[row]
            if not rows:
                del self._rows[block]
