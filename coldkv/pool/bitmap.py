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
        first = self._low + int(self.used[self._low :].argmin())
        if not self.used[first : first + n].any() and first + n <= self.capacity:  # mostly they lie together
            self.used[first : first + n] = True
            self.count += n
            self._low = first + n
            return np.arange(first, first + n, dtype=np.int32)
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
        one_by_one = places.tolist()
        low, high = min(one_by_one), max(one_by_one)
        if low < 0 or high >= self.capacity:
            raise PoolError(f"pool: {self.what} {low}..{high}: only {self.capacity} exist")
        if not self.used[places].all() or len(set(one_by_one)) != len(one_by_one):
            raise PoolError(f"pool: a {self.what} of {sorted(one_by_one)[:8]} is freed twice")
        self._give(places, low)

    def _give(self, places: np.ndarray, low: int) -> None:
        self.used[places] = False
        self.count -= len(places)
        self._low = min(self._low, low)


class Handles(Bitmap):
    """Places whose order does not matter: the one freed last is taken first, without a search."""

    def __init__(self, capacity: int, what: str):
        super().__init__(capacity, what)
        self._stack = np.arange(capacity, dtype=np.int32)[::-1].copy()  # the free ones are its first `free`

    def take(self, n: int) -> np.ndarray:
        free = self.free
        if n > free:
            raise PoolFull(f"pool: {n} {self.what}s needed, {free} of {self.capacity} free")
        taken = self._stack[free - n : free].copy()
        self.used[taken] = True
        self.count += n
        return taken

    def _give(self, places: np.ndarray, low: int) -> None:
        free = self.free
        self._stack[free : free + len(places)] = places
        self.used[places] = False
        self.count -= len(places)
