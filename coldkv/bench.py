"""Times every operation of a tier and its codecs against memcpy of the same number of bytes, in turns."""

import ctypes
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from coldkv._version import __version__
from coldkv.backends import fitted, get_backend
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
    """`run()` does the work; `bytes` are those read plus those written."""

    op: str
    codec: str
    format: str
    bytes: int
    run: Callable[[], object]


def sample_values(head_pages: int, geometry: Geometry) -> torch.Tensor:
    """KV-like bf16 values `[head_pages * T, 1, D]`: normal, unequal channels, token norms over a decade."""
    g = torch.Generator().manual_seed(1)
    tokens = DISTINCT_HEAD_PAGES * geometry.page_tokens
    values = torch.randn(tokens, 1, geometry.head_dim, generator=g)
    values *= torch.exp(0.7 * torch.randn(1, 1, geometry.head_dim, generator=g))
    values *= torch.exp(0.6 * torch.randn(tokens, 1, 1, generator=g))
    repeats = -(-head_pages // DISTINCT_HEAD_PAGES)
    return values.to(torch.bfloat16).repeat(repeats, 1, 1)[: head_pages * geometry.page_tokens].contiguous()


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
        copy = _Memcpy(engine.device, threads)
        for fmt in formats:
            operations = _operations(engine, codecs, fmt, geometry, head_pages)
            rows += _time(operations, copy, engine, repeat)
    for row in rows:
        row.update(
            backend=engine.name, threads=threads, head_dim=head_dim, page_tokens=page_tokens, head_pages=head_pages
        )
    device = torch.cuda.get_device_name() if engine.device.type == "cuda" else _processor()
    run = {
        "version": __version__, "git": git_revision(), "device": device, "torch": torch.__version__, "repeat": repeat,
        "time_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "argv": sys.argv[1:],
    }  # fmt: skip
    return {"schema": SCHEMA, "run": run, "rows": rows}


def _operations(engine, codecs, fmt: str, geometry: Geometry, head_pages: int) -> list[Operation]:
    """Inputs and, for the compiled backends, outputs are allocated once: what is timed is the work."""
    values = sample_values(head_pages, geometry).to(engine.device)
    x = engine.load(values, geometry)
    hot = engine.quantize(fmt, x)
    y = torch.empty_like(x)
    compiled = engine.name != "torch"

    def out(target) -> dict:
        return {"out": target} if compiled else {}

    copy = empty_plane(fmt, head_pages, geometry, engine.device)
    fp32 = x.nbytes
    operations = [
        Operation("load", "-", "bf16", values.nbytes + fp32, lambda: engine.load(values, geometry, **out(y))),
        Operation("quantize", "-", fmt, fp32 + hot.nbytes, lambda: engine.quantize(fmt, x, **out(copy))),
        Operation("dequantize", "-", fmt, hot.nbytes + fp32, lambda: engine.dequantize(hot, **out(y))),
        Operation("stats", "-", "fp32", 2 * fp32, lambda: engine.stats(x, y, 1)),
    ]
    for codec in codecs:
        if codec.fits(fmt):
            operations += _codec_operations(engine, codec, hot, geometry, y, out)
    return operations


def _codec_operations(engine, codec, hot, geometry: Geometry, y, out) -> list[Operation]:
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

    first = [Operation("lengths", codec.label, fmt, read + lengths.nbytes, measure_lengths)] if codec.sized else []
    return [
        *first,
        Operation("encode", codec.label, fmt, read + packed, encode),
        Operation("decode", codec.label, fmt, packed + y.nbytes, decode),
        Operation("restore", codec.label, fmt, packed + written, restore),
    ]


def _time(operations: list[Operation], copy: "_Memcpy", engine, repeat: int) -> list[dict]:
    clock = _cuda_seconds if engine.device.type == "cuda" else _seconds
    for operation in operations:
        operation.run()
        copy.run(operation.bytes)
    times = [[] for _ in operations]
    for _ in range(repeat):
        for operation, found in zip(operations, times, strict=True):
            found.append((clock(operation.run), clock(lambda size=operation.bytes: copy.run(size))))
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


class _Memcpy:
    """Copies half of `size` bytes, so that read plus written is `size`: the C library's memcpy, or the device's."""

    def __init__(self, device: torch.device, threads: int):
        self.device, self.threads = device, threads or os.cpu_count() or 1
        self.pool = ThreadPoolExecutor(self.threads) if self.threads > 1 else None
        self.buffers = None

    def run(self, size: int) -> None:
        half = size // 2
        if self.buffers is None or self.buffers[0].numel() < half:
            # written, not just allocated: untouched pages would all be read from one zero page in the cache
            self.buffers = [torch.full((half,), i, dtype=torch.uint8, device=self.device) for i in (1, 2)]
        source, target = self.buffers
        if self.device.type == "cuda":
            target[:half].copy_(source[:half])
            return
        parts = [(i * half // self.threads, (i + 1) * half // self.threads) for i in range(self.threads)]

        def move(part) -> None:
            start, stop = part
            ctypes.memmove(target.data_ptr() + start, source.data_ptr() + start, stop - start)

        if self.pool:
            list(self.pool.map(move, parts))
        else:
            move(parts[0])


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _cuda_seconds(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


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
