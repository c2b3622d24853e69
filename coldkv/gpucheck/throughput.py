"""Throughput of every kernel over sizes past the L2, beside the device's own copy."""

import torch

from coldkv import bench
from coldkv.bench_clock import DeviceCopy, EventClock
from coldkv.codecs import all_codecs
from coldkv.errors import InputError
from coldkv.geometry import Geometry
from coldkv.gpucheck.clock import Deadline

GEOMETRY = Geometry(256, 64)
# (format, head-pages): the measured case first, at two sizes; 8,192 head-pages of int8 are 138 MB
CASES = (("int8", 8192), ("int8", 32768), *((fmt, 8192) for fmt in ("nvfp4", "iso3", "bf16", "fp8", "fp16")))
REPEAT = 20
COPY_BYTES = 4 << 30


def device_copy_gbps(repeat: int = REPEAT) -> float:
    """GB/s, read plus written, of a device-to-device copy of 2 GiB: the best of `repeat` runs."""
    free, _ = torch.cuda.mem_get_info()
    size = min(COPY_BYTES, free // 4)
    copy = DeviceCopy(torch.device("cuda"), 1)
    runs = copy.runs(size)
    clock = EventClock(copy)
    return size / min(clock(runs) for _ in range(repeat)) / 1e9


def measure(engine, deadline: Deadline, *, cases=CASES, geometry=GEOMETRY, repeat: int = REPEAT) -> tuple[list, list]:
    """(rows as in `coldkv bench`, texts of what was skipped); no new case begins after the deadline."""
    rows, skipped, sizes = [], [], set()
    for fmt, head_pages in cases:
        name = f"timing of {fmt}, {head_pages} head-pages"
        if deadline.passed():
            skipped.append(f"{name}: no time left")
            continue
        try:
            common = head_pages not in sizes
            rows += bench.time_format(engine, all_codecs(), fmt, geometry, head_pages, repeat=repeat, common=common)
            sizes.add(head_pages)
        except InputError as error:  # a device with little memory
            skipped.append(f"{name}: {error.one_line()}")
    return rows, skipped
