"""Block tables: per sequence row, the raw entry of every logical page, as attention kernels read them. Torch-free."""

import numpy as np

from coldkv.pool.faults import PoolError
from coldkv.pool.layout import UNMAPPED


class BlockTables:
    """`entries` int32 `[rows, row_pages]`: >= 0 physical page, -1 unmapped, <= -2 cold in slot -2 - entry.

    Written by `publish_indices` alone. `on(device)` gives the same table as a tensor there.
    """

    def __init__(self, rows: int, row_pages: int):
        self.entries = np.full((rows, row_pages), UNMAPPED, dtype=np.int32)
        self._stale: set[int] = set()
        self._copy = None

    def publish_indices(self, row: int, first: int, span: np.ndarray) -> None:
        """Write raw entries of the logical pages `[first, first + len(span))` of one row; `span` int32 `[n]`."""
        if span.dtype != np.int32 or span.ndim != 1:
            raise PoolError(f"publish_indices: expected int32 [n], found {span.dtype} {list(span.shape)}")
        rows, width = self.entries.shape
        if not (0 <= row < rows and 0 <= first and first + len(span) <= width):
            raise PoolError(
                f"publish_indices: row {row}, pages {first} to {first + len(span) - 1}: the table is [{rows}, {width}]"
            )
        self.entries[row, first : first + len(span)] = span
        self._stale.add(row)

    def on(self, device):
        """The table as a torch tensor int32 `[rows, row_pages]` on `device`; only rows that changed are copied."""
        import torch

        if self._copy is None or self._copy.device != torch.device(device):
            self._copy = torch.from_numpy(self.entries).to(device, copy=True)
        elif self._stale:
            rows = sorted(self._stale)
            self._copy[torch.tensor(rows, device=device)] = torch.from_numpy(self.entries[rows]).to(device)
        self._stale.clear()
        return self._copy
