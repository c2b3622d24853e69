"""Times every operation of a tier and its codecs against a copy of the same number of bytes, in turns.

On the CPU the copy is memcpy and the clock is the wall's. On a GPU it is the device's own copy, events on the stream
are the clock, and several sets of buffers take turns so that the L2 cache holds none of what comes next.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from coldkv._version import __version__
from coldkv.backends import fitted, get_backend
from coldkv.bench_clock import DeviceCopy, EventClock, Memcpy, wall_seconds
from coldkv.codecs import all_codecs, parse_codec
from coldkv.errors import InputError
from coldkv.formats import FORMATS, tier_formats
from coldkv.geometry import Geometry
from coldkv.results import git_revision
from coldkv.tiers import empty_plane

SCHEMA = "coldkv.bench/1"
DISTINCT_HEAD_PAGES = 64  # generated; the rest repeats them, which the codecs cannot notice


@dataclass
class Operation:
    """Each of `runs` does the work once, on its own set of buffers; `bytes` are those one run reads plus writes."""

    op: str
    codec: str
    format: str
    bytes: int
    runs: list[Callable[[], object]]


def sample_values(head_pages: int, geometry: Geometry, device="cpu") -> torch.Tensor:
    """KV-like bf16 values `[head_pages * T, 1, D]`: normal, unequal channels, token norms over a decade."""
    g = torch.Generator().manual_seed(1)
    tokens = DISTINCT_HEAD_PAGES * geometry.page_tokens
    values = torch.randn(tokens, 1, geometry.head_dim, generator=g)
    values *= torch.exp(0.7 * torch.randn(1, 1, geometry.head_dim, generator=g))
    values *= torch.exp(0.6 * torch.randn(tokens, 1, 1, generator=g))
    repeats = -(-head_pages // DISTINCT_HEAD_PAGES)
    values = values.to(device, torch.bfloat16).repeat(repeats, 1, 1)
    return values[: head_pages * geometry.page_tokens].contiguous()


def run_bench(
    *, codec_ids=(), tier="int8", backend="auto", threads=1, head_dim=256, page_tokens=64, head_pages=4096, repeat=7
) -> dict:
    """One `coldkv.bench/1` document. A row: op, codec, format, backend, threads, head_dim, page_tokens, head_pages,
    bytes; medians gbps, memcpy_gbps (GB/s, read plus written) and memcpy_ratio (median of the rounds' ratios).

    Raises InputError for an unknown codec or tier, ToolError for a backend that cannot run here.
    """
    engine = get_backend(backend, threads=threads)
    geometry = Geometry(head_dim, page_tokens)
    codecs = [parse_codec(text) for text in codec_ids] or all_codecs()
    formats = list(dict.fromkeys(tier_formats(tier).values()))
    if not any(codec.fits(fmt) for codec in codecs for fmt in formats):
        raise InputError(f"bench: none of {', '.join(c.id for c in codecs)} takes planes of tier {tier}")
    rows = []
    with _threads_of_torch(threads):
        for fmt in formats:
            common = fmt == formats[0]
            rows += time_format(
                engine, codecs, fmt, geometry, head_pages, repeat=repeat, threads=threads, common=common
            )
    device = torch.cuda.get_device_name() if engine.device.type == "cuda" else _processor()
    return {"schema": SCHEMA, "run": _run(device, repeat), "rows": rows}


def run_entropy_bench(*, head_dim=256, page_tokens=64, head_pages=256, repeat=7) -> dict:
    """One `coldkv.bench/1` document of `entropy_bench.entropy_rows`."""
    from coldkv.entropy_bench import entropy_rows

    rows = entropy_rows(head_dim, page_tokens, head_pages, repeat)
    return {"schema": SCHEMA, "run": _run(_processor(), repeat), "rows": rows}


def _run(device: str, repeat: int) -> dict:
    return {
        "version": __version__, "git": git_revision(), "device": device, "torch": torch.__version__, "repeat": repeat,
        "time_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "argv": sys.argv[1:],
    }  # fmt: skip


def time_format(
    engine, codecs, fmt: str, geometry: Geometry, head_pages: int, *, repeat: int, threads: int = 1, common: bool = True
) -> list[dict]:
    """Rows of `run_bench` for planes of one format: the tier's operations, then those of every codec that fits.

    `common` False leaves out load and stats, which are the same for every format. Raises InputError when the buffers do
    not fit on the device.
    """
    on_device = engine.device.type == "cuda"
    if on_device:
        engine.check_headers = False  # the kernels are timed, not the wait for the headers
    sets = _sets_of_buffers(codecs, fmt, geometry, head_pages) if on_device else 1
    operations = _operations(engine, codecs, fmt, geometry, head_pages, sets)
    operations = [operation for operation in operations if common or operation.op not in ("load", "stats")]
    copy = DeviceCopy(engine.device, sets) if on_device else Memcpy(threads)
    rows = _time(operations, copy, EventClock(copy) if on_device else wall_seconds, repeat)
    settings = {
        "backend": engine.name, "threads": threads, "head_dim": geometry.head_dim,
        "page_tokens": geometry.page_tokens, "head_pages": head_pages,
    }  # fmt: skip
    return [row | settings for row in rows]


def _sets_of_buffers(codecs, fmt: str, geometry: Geometry, head_pages: int) -> int:
    """How many sets it takes for the smallest operation to go through four times the L2 before it meets a set again.

    Slots whose size is not chosen yet are taken for twice the hot page, more than they will be.
    """
    fitting = [codec for codec in codecs if codec.fits(fmt)]
    hot, fp32 = FORMATS[fmt].bytes(geometry), 4 * geometry.page_tokens * geometry.head_dim
    slots = [2 * hot if codec.needs_stride else codec.slot_bytes(geometry, fmt) for codec in fitting]
    smallest = head_pages * (hot + min(slots, default=fp32))
    back = [FORMATS[codec.restored_format(fmt)].bytes(geometry) for codec in fitting]
    buffers = 2 * fp32 + fp32 // 2 + 2 * hot + sum(2 * size for size in slots) + sum(back)
    one_set = head_pages * (buffers + 2 * fp32)  # and what the copy needs for the largest operation
    wanted = max(2, -(-4 * torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size // smallest))
    torch.cuda.empty_cache()  # what an earlier format used is free again
    free, _ = torch.cuda.mem_get_info()
    if wanted * one_set > 0.8 * free:
        need = f"{wanted} sets of buffers of {head_pages} head-pages take {wanted * one_set / 1e9:.1f} GB"
        raise InputError(f"bench: {need}, the device has {free / 1e9:.1f} GB free", hint="give fewer --head-pages")
    return wanted


def _operations(engine, codecs, fmt: str, geometry: Geometry, head_pages: int, sets: int) -> list[Operation]:
    """Inputs and, for the compiled backends, outputs are allocated once: what is timed is the work."""
    parts = [_one_set(engine, codecs, fmt, geometry, head_pages) for _ in range(sets)]
    return [
        Operation(op, codec, of, size, [part[i][4] for part in parts])
        for i, (op, codec, of, size, _) in enumerate(parts[0])
    ]


def _one_set(engine, codecs, fmt: str, geometry: Geometry, head_pages: int) -> list[tuple]:
    """(op, codec, format, bytes, run) of every operation on one set of buffers."""
    values = sample_values(head_pages, geometry, engine.device)
    x = engine.load(values, geometry)
    hot = engine.quantize(fmt, x)
    y = torch.empty_like(x)
    compiled = engine.name != "torch"

    def out(target) -> dict:
        return {"out": target} if compiled else {}

    copy = empty_plane(fmt, head_pages, geometry, engine.device)
    fp32 = x.nbytes
    operations = [
        ("load", "-", "bf16", values.nbytes + fp32, lambda: engine.load(values, geometry, **out(y))),
        ("quantize", "-", fmt, fp32 + hot.nbytes, lambda: engine.quantize(fmt, x, **out(copy))),
        ("dequantize", "-", fmt, hot.nbytes + fp32, lambda: engine.dequantize(hot, **out(y))),
        ("stats", "-", "fp32", 2 * fp32, lambda: engine.stats(x, y, 1)),
    ]
    for codec in codecs:
        if codec.fits(fmt):
            operations += _codec_operations(engine, codec, hot, geometry, y, out)
    return operations


def _codec_operations(engine, codec, hot, geometry: Geometry, y, out) -> list[tuple]:
    fmt, n = hot.format, hot.head_pages
    codec = fitted(codec, hot, geometry, engine)
    slots, valid = engine.encode(codec, hot, geometry)
    if not bool(valid.all()):
        raise InputError(f"bench: codec {codec.id} refused generated pages of format {fmt}")
    target = (torch.empty_like(slots), torch.empty_like(valid))
    back = codec.restored_format(fmt)
    plane = empty_plane(back, n, geometry, engine.device)
    written = n * FORMATS[back].bytes(geometry)
    read, packed = hot.nbytes, slots.nbytes

    lengths = torch.empty(n, dtype=torch.int32, device=engine.device)

    def measure_lengths():
        engine.lengths(codec, hot, geometry, **out(lengths))

    def encode():
        engine.encode(codec, hot, geometry, **out(target))

    def decode():
        engine.decode(codec, slots, geometry, fmt, **out(y))

    def restore():
        engine.restore(codec, slots, geometry, fmt, **out(plane))

    first = [("lengths", codec.label, fmt, read + lengths.nbytes, measure_lengths)] if codec.sized else []
    return [
        *first,
        ("encode", codec.label, fmt, read + packed, encode),
        ("decode", codec.label, fmt, packed + y.nbytes, decode),
        ("restore", codec.label, fmt, packed + written, restore),
    ]


def _time(operations: list[Operation], copy, seconds, repeat: int) -> list[dict]:
    for operation in operations:
        for run in operation.runs:
            run()
        for run in copy.runs(operation.bytes):
            run()
    times = [[] for _ in operations]
    for _ in range(repeat):
        for operation, found in zip(operations, times, strict=True):
            found.append((seconds(operation.runs), seconds(copy.runs(operation.bytes))))
    rows = []
    for operation, found in zip(operations, times, strict=True):
        rows.append(
            {
                "op": operation.op,
                "codec": operation.codec,
                "format": operation.format,
                "bytes": operation.bytes,
                "gbps": operation.bytes / statistics.median(t for t, _ in found) / 1e9,
                "memcpy_gbps": operation.bytes / statistics.median(m for _, m in found) / 1e9,
                "memcpy_ratio": statistics.median(m / t for t, m in found),
            }
        )
    return rows


class _threads_of_torch:
    """The torch backend must not use more threads than the bench says."""

    def __init__(self, threads: int):
        self.threads = threads

    def __enter__(self):
        self.saved = torch.get_num_threads()
        if self.threads:
            torch.set_num_threads(self.threads)

    def __exit__(self, *_):
        torch.set_num_threads(self.saved)


def _processor() -> str:
    import platform

    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def dumps(document: dict) -> str:
    """JSON text, one line per row so that two files diff well."""
    import json

    rows = ",\n  ".join(json.dumps(row) for row in document["rows"])
    head = json.dumps({"schema": document["schema"], "run": document["run"]}, indent=1).removesuffix("\n}")
    return f'{head},\n "rows": [\n  {rows}\n ]\n}}\n'


def print_table(document: dict) -> None:
    """The rows as a table on stdout."""
    print(f"{'op':<11}{'codec':<10}{'format':<8}{'MB':>8}{'GB/s':>9}{'memcpy GB/s':>13}{'ratio':>8}")
    for row in document["rows"]:
        print(
            f"{row['op']:<11}{row['codec']:<10}{row['format']:<8}{row['bytes'] / 1e6:>8.0f}{row['gbps']:>9.2f}"
            f"{row['memcpy_gbps']:>13.2f}{row['memcpy_ratio']:>8.3f}"
        )
