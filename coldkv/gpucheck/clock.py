"""How long the check may take."""

import time


class Deadline:
    """Counts from its making; `budget_s` seconds in all."""

    def __init__(self, budget_s: float):
        self.budget_s, self._start = budget_s, time.monotonic()

    def used(self) -> float:
        return time.monotonic() - self._start

    def left(self) -> float:
        return self.budget_s - self.used()

    def passed(self) -> bool:
        return self.left() <= 0

    def part(self, seconds: float) -> "Deadline":
        """A deadline `seconds` from now, but not after this one."""
        return Deadline(min(seconds, self.left()))
