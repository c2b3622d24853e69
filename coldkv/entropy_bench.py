"""Times the coder of `ecq` against zstd level 1 on the same integers, in turns, on one thread."""

import ctypes
import statistics
import time

import torch

from coldkv.backends import CpuBackend, fitted
from coldkv.codecs import get_codec
from coldkv.errors import ToolError
from coldkv.geometry import Geometry


def entropy_rows(head_dim: int = 256, page_tokens: int = 64, head_pages: int = 256, repeat: int = 7) -> list[dict]:
    """Rows op (encode, decode), coder, bytes (of the coded integers), symbols, bits_per_symbol, mb_per_s (int8 bytes of
    integers) and zstd_ratio: how many times as fast as zstd -1, the median over rounds. zstd gets all head-pages as
    one buffer.

    The integers are those of `ecq` at its defaults. Raises ToolError without the package zstandard or a compiler.
    """
    try:
        import zstandard
    except ImportError:
        raise ToolError(
            "bench --entropy: the package zstandard is not installed", hint="pip install zstandard"
        ) from None
    from coldkv.bench import sample_values
    from coldkv.native import PlaneDesc

    engine, geometry = CpuBackend(threads=1), Geometry(head_dim, page_tokens)
    hot = engine.quantize("int8", engine.load(sample_values(head_pages, geometry), geometry))
    codec = fitted(get_codec("ecq"), hot, geometry, engine)
    slots, _ = engine.encode(codec, hot, geometry)
    n, stride = slots.shape
    desc = PlaneDesc(0, page_tokens, head_dim, 0, n)
    k = torch.empty((n, page_tokens, head_dim), dtype=torch.int16)
    params = codec.native_params(geometry, "int8", "cpu")
    one = ctypes.c_int(1)

    def pointer(tensor):
        return ctypes.c_void_p(tensor.data_ptr())

    def decode(source=slots, size=stride, how=params):
        engine._library.call(
            "ecq_integers", ctypes.byref(desc), pointer(source), ctypes.c_int64(size), pointer(k), *how, one
        )

    decode()
    room = 144 + 4 * geometry.elements
    coded = torch.empty((n, room - room % 16), dtype=torch.uint8)
    words = torch.empty(n, dtype=torch.int32)
    integers = k.clone()

    def encode():
        engine._library.call(
            "ecq_code", ctypes.byref(desc), pointer(integers), pointer(coded), ctypes.c_int64(coded.shape[1]),
            pointer(words), one,
        )  # fmt: skip

    if int(integers.abs().max()) > 127:
        raise ToolError("bench --entropy: an integer does not fit int8")
    plain = integers.to(torch.int8).numpy().tobytes()
    compressor, decompressor = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
    packed = compressor.compress(plain)
    encode()
    decode(coded, coded.shape[1])
    assert torch.equal(k, integers) and decompressor.decompress(packed) == plain
    ours = 144 * n + 2 * int(words.sum())
    rows = []
    for op, mine, theirs in (
        ("encode", encode, lambda: compressor.compress(plain)),
        ("decode", lambda: decode(coded, coded.shape[1]), lambda: decompressor.decompress(packed)),
    ):
        times = [(_seconds(mine), _seconds(theirs)) for _ in range(repeat)]
        for coder, size, which in (("ecq", ours, 0), ("zstd -1", len(packed), 1)):
            rows.append(
                {
                    "op": op,
                    "coder": coder,
                    "symbols": len(plain),
                    "bytes": size,
                    "bits_per_symbol": 8 * size / len(plain),
                    "mb_per_s": len(plain) / statistics.median(t[which] for t in times) / 1e6,
                    "zstd_ratio": statistics.median(t[1] / t[which] for t in times),
                }
            )
    return rows


def _seconds(work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def print_rows(rows: list[dict]) -> None:
    """The rows as a table on stdout."""
    print(f"{'op':<8}{'coder':<9}{'MB of int8':>11}{'bits/symbol':>13}{'MB/s':>9}{'x zstd -1':>11}")
    for row in rows:
        print(
            f"{row['op']:<8}{row['coder']:<9}{row['symbols'] / 1e6:>11.1f}{row['bits_per_symbol']:>13.3f}"
            f"{row['mb_per_s']:>9.0f}{row['zstd_ratio']:>11.2f}"
        )
