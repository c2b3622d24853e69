"""Clocks of the bench and the copies that it compares with. Both take a list of runs and give seconds per run."""

import ctypes
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

AHEAD_BYTES = 2 << 30  # copied before the timed work, so that the device never waits for the host to enqueue it


class Memcpy:
    """The C library's memcpy of half of `size` bytes, so that read plus written is `size`."""

    def __init__(self, threads: int):
        self.threads = threads or os.cpu_count() or 1
        self.pool = ThreadPoolExecutor(self.threads) if self.threads > 1 else None
        self.buffers = None

    def runs(self, size: int) -> list[Callable[[], object]]:
        half = size // 2
        if self.buffers is None or self.buffers[0].numel() < half:
            # written, not just allocated: untouched pages would all be read from one zero page in the cache
            self.buffers = [torch.full((half,), i, dtype=torch.uint8) for i in (1, 2)]
        source, target = self.buffers
        parts = [(i * half // self.threads, (i + 1) * half // self.threads) for i in range(self.threads)]

        def move(part) -> None:
            start, stop = part
            ctypes.memmove(target.data_ptr() + start, source.data_ptr() + start, stop - start)

        return [lambda: list(self.pool.map(move, parts))] if self.pool else [lambda: move(parts[0])]


class DeviceCopy:
    """The device's own copy of half of `size` bytes, on as many pairs of buffers as the operations have sets."""

    def __init__(self, device: torch.device, sets: int):
        self.device, self.sets, self.pairs = device, sets, []

    def runs(self, size: int) -> list[Callable[[], object]]:
        half = size // 2
        if not self.pairs or self.pairs[0][0].numel() < half:
            self.pairs = [
                [torch.full((half,), i, dtype=torch.uint8, device=self.device) for i in (1, 2)]
                for _ in range(self.sets)
            ]
        return [lambda pair=pair: pair[1][:half].copy_(pair[0][:half]) for pair in self.pairs]


def wall_seconds(runs: list[Callable[[], object]]) -> float:
    start = time.perf_counter()
    for run in runs:
        run()
    return (time.perf_counter() - start) / len(runs)


class EventClock:
    """Device time per run, between two events. Copies ahead of them keep the device busy until all is enqueued."""

    def __init__(self, copy: DeviceCopy):
        self.copy = copy

    def __call__(self, runs: list[Callable[[], object]]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        size = 2 * self.copy.pairs[0][0].numel()
        for _ in range(-(-AHEAD_BYTES // (size * self.copy.sets))):
            for run in self.copy.runs(size):
                run()
        start.record()
        for run in runs:
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / len(runs)
