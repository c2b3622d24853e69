"""Which of `capacity` places are used: first-free allocation, batches at once. Torch-free."""

import numpy as np

from coldkv.pool.faults import PoolError, PoolFull

_LOOK = 256  # places looked at first; doubled until enough are free


class Bitmap:
    """A used flag per place. `what` names the places in errors ("page", "slot")."""

    def __init__(self, capacity: int, what: str):
        self.what = what
        self.used = np.zeros(capacity, dtype=bool)
        self.count = 0  # places in use
        self._low = 0  # no place below is free

    @property
    def capacity(self) -> int:
        return len(self.used)

    @property
    def free(self) -> int:
        return len(self.used) - self.count

    def take(self, n: int) -> np.ndarray:
        """The first `n` free places, ascending, int32 `[n]`, now used. PoolFull (and nothing taken) if there are
        fewer."""
        if n > self.free:
            raise PoolFull(f"pool: {n} {self.what}s needed, {self.free} of {self.capacity} free")
        if n == 0:
            return np.empty(0, dtype=np.int32)
        look, found = max(_LOOK, 2 * n), np.empty(0, dtype=np.int64)
        while len(found) < n:
            found = np.flatnonzero(~self.used[self._low : self._low + look])
            look *= 2
        taken = found[:n] + self._low
        self.used[taken] = True
        self.count += n
        self._low = int(taken[-1]) + 1
        return taken.astype(np.int32)

    def give(self, places: np.ndarray) -> None:
        """Free `places`, each of them used and named once; PoolError (and nothing freed) otherwise."""
        if not len(places):
            return
        if places.min() < 0 or places.max() >= self.capacity:
            raise PoolError(f"pool: {self.what} {places.min()}..{places.max()}: only {self.capacity} exist")
        if not self.used[places].all() or len(np.unique(places)) != len(places):
            raise PoolError(f"pool: a {self.what} of {np.sort(places)[:8].tolist()} is freed twice")
        self.used[places] = False
        self.count -= len(places)
        self._low = min(self._low, int(places.min()))
