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
        if n <= 1:
            return self._take_one() if n else np.empty(0, dtype=np.int32)
        look, found = max(_LOOK, 2 * n), np.empty(0, dtype=np.int64)
        while len(found) < n:
            found = np.flatnonzero(~self.used[self._low : self._low + look])
            look *= 2
        taken = found[:n] + self._low
        self.used[taken] = True
        self.count += n
        self._low = int(taken[-1]) + 1
        return taken.astype(np.int32)

    def _take_one(self) -> np.ndarray:
        at = self._low + int(self.used[self._low :].argmin())
        self.used[at] = True
        self.count += 1
        self._low = at + 1
        return np.array([at], dtype=np.int32)

    def give(self, places: np.ndarray) -> None:
        """Free `places`, each of them used and named once; PoolError (and nothing freed) otherwise."""
        if not len(places):
            return
        low, high = int(places.min()), int(places.max())
        if low < 0 or high >= self.capacity:
            raise PoolError(f"pool: {self.what} {low}..{high}: only {self.capacity} exist")
        if not self.used[places].all() or (len(places) > 1 and not _each_once(places)):
            raise PoolError(f"pool: a {self.what} of {np.sort(places)[:8].tolist()} is freed twice")
        self.used[places] = False
        self.count -= len(places)
        self._low = min(self._low, low)


def _each_once(places: np.ndarray) -> bool:
    ordered = np.sort(places)
    return bool((ordered[1:] != ordered[:-1]).all())
