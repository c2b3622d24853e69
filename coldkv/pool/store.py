"""The logical KV store: what is known of every page of content, wherever its bytes are. Torch-free."""

import numpy as np

from coldkv.pool.bitmap import Handles
from coldkv.pool.layout import NO_REPLICA, UNMAPPED

NOBODY = -1


class LogicalStore:
    """One record per logical page, by its id; rows that share a prefix hold the same ids.

    `entry` int32: raw block table entry (>= 0 physical page, -1 on the host only, <= -2 cold slot -2 - entry);
    `refs` int32: rows that hold the page; `writer` int32: row that is writing it, or -1; `pins` int32: while above 0
    the page stays hot; `epoch` int64: rises whenever the bytes that attention would read change, and never falls, so
    that an id used anew is not taken for its predecessor; `replica` int32: exact copy in host memory, or -1;
    `refused` bool: the codec refused this content.
    """

    def __init__(self, capacity: int):
        self.ids = Handles(capacity, "logical page")
        self.entry = np.full(capacity, UNMAPPED, dtype=np.int32)
        self.refs = np.zeros(capacity, dtype=np.int32)
        self.writer = np.full(capacity, NOBODY, dtype=np.int32)
        self.pins = np.zeros(capacity, dtype=np.int32)
        self.epoch = np.zeros(capacity, dtype=np.int64)
        self.replica = np.full(capacity, NO_REPLICA, dtype=np.int32)
        self.refused = np.zeros(capacity, dtype=bool)

    def create(self, pages: np.ndarray) -> np.ndarray:
        """Ids of new content in the physical `pages`, one reference each, int32 `[n]`."""
        ids = self.ids.take(len(pages))
        self.entry[ids] = pages
        self.refs[ids] = 1
        self.epoch[ids] += 1
        return ids

    def forget(self, ids: np.ndarray) -> None:
        """Free the records of `ids`. Everything but the epoch is as if the id had never been used."""
        self.ids.give(ids)
        self.entry[ids] = UNMAPPED
        self.refs[ids] = 0
        self.writer[ids] = NOBODY
        self.pins[ids] = 0
        self.replica[ids] = NO_REPLICA
        self.refused[ids] = False

    def hot(self, ids: np.ndarray) -> np.ndarray:
        """Bool `[n]`: the page is in a physical page of the device."""
        return self.entry[ids] >= 0

    def slots(self, ids: np.ndarray) -> np.ndarray:
        """Slots of pages that are cold, int32 `[n]`."""
        return -2 - self.entry[ids]
