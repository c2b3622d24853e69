"""What the tests run through the kernels of kernels/, each case under every schedule.

A case takes the backend, runs kernels and asserts. The golden rows come from the codec registry, so a new codec needs
no case; a kernel that belongs to no codec needs one here, and a test fails until it has one.
"""

import ctypes
import re

import golden_table
import torch

from coldkv import native
from coldkv.backends import CpuBackend, TorchBackend, fitted
from coldkv.codecs import get_codec, parse_codec
from coldkv.codecs.ecqslot import headers
from coldkv.errors import InputError, ToolError
from coldkv.formats import FORMATS
from coldkv.geometry import Geometry
from coldkv.native import KernelError
from coldkv.tiers import HotPlane, empty_plane

ORACLE = TorchBackend()
CASES = {}
LARGEST_ROW = 100_000  # elements; larger golden rows run the same code in more blocks
LARGEST_CODED_ROW = 20_000


def case(run):
    CASES[run.__name__] = run
    return run


def kernel_names(source: str) -> set[str]:
    """Names of the kernels that a source text defines."""
    start, bounds = r"(?:CKV_KERNEL|__global__[\w\s]*\bvoid)\s+", r"(?:__launch_bounds__\([^)]*\)\s*)?"
    return set(re.findall(rf"{start}{bounds}(\w+)\s*\(", source))


def kernels_in_sources() -> set[str]:
    files = [path for path in native.kernels_dir().iterdir() if path.suffix in (".cu", ".cuh", ".h")]
    return set().union(*(kernel_names(path.read_text()) for path in files))


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * torch.exp(torch.randn(shape[-1], generator=generator))


def same(a, b) -> bool:
    return torch.equal(*(x.contiguous().flatten().view(torch.uint8) for x in (a, b)))


def same_plane(a: HotPlane, b: HotPlane) -> bool:
    return same(a.codes, b.codes) and (a.scales is None or same(a.scales, b.scales))


# ---- the golden table ------------------------------------------------------------------------------------------------


def golden_rows(codec_id: str, fmt: str, seed: int) -> list[dict]:
    """The table's small rows: the odd shapes, and a third of the others for each seed, a sixth where there are options.
    A coder goes symbol by symbol, so that small is smaller there."""
    rows = golden_table.read(codec_id, fmt)
    most = LARGEST_CODED_ROW if codec_id in golden_table.VARIANTS else LARGEST_ROW
    small = [r for r in rows if r["head_dim"] * r["kv_heads"] * r["page_tokens"] <= most]
    odd = [r for r in small if not r.get("options") and _shape(r) in golden_table.ODD_SHAPES]
    usual = [r for r in small if r not in odd]
    every = 6 if codec_id in golden_table.VARIANTS else 3
    return usual[seed % every :: every] + odd


def _shape(row: dict) -> tuple[int, int, int]:
    return row["head_dim"], row["kv_heads"], row["page_tokens"]


def replay(codec_id: str, fmt: str):
    def run(backend) -> None:
        for expected in golden_rows(codec_id, fmt, backend.shim.seed):
            options = (expected["options"], expected["share"]) if "options" in expected else ()
            assert golden_table.row(backend, codec_id, fmt, _shape(expected), *options) == expected, _shape(expected)

    return run


for _codec_id, _fmt in golden_table.PAIRS:
    if get_codec(_codec_id).native is not None:
        CASES[f"golden-{_codec_id}-{_fmt}"] = replay(_codec_id, _fmt)


# ---- what belongs to no codec ----------------------------------------------------------------------------------------


@case
def load(backend) -> None:
    """Every dtype, from a view with gaps between its rows and heads."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for head_dim in (34, 80):
            view = values(32, 3, 2, head_dim).to(dtype)[:, :, 1]
            geometry = Geometry(head_dim, 16, 3)
            assert same(backend.load(view, geometry), ORACLE.load(view, geometry))


@case
def quantize_and_dequantize(backend) -> None:
    for fmt in FORMATS:
        for shape in ((3, 16, 64), (2, 5, 34), (1, 7, 80), (1, 3, 2)):
            x = values(*shape, seed=shape[-1])
            x[0, 1] = 0
            plane = ORACLE.quantize(fmt, x)
            assert same_plane(backend.quantize(fmt, x), plane)
            assert same(backend.dequantize(plane), ORACLE.dequantize(plane))


_stats: dict[int, tuple] = {}  # of the first schedule, by head_dim


@case
def stats(backend) -> None:
    """fp64 sums in a fixed order: within a few ulp of the oracle's, and the same bits under every schedule."""
    for head_dim in (34, 80, 1022):
        x, y = values(12, 5, head_dim), values(12, 5, head_dim, seed=1)
        sums, channels = backend.stats(x, y, 3, channels=True)
        expected, expected_channels = ORACLE.stats(x, y, 3, channels=True)
        torch.testing.assert_close(sums, expected, rtol=1e-12, atol=0)
        torch.testing.assert_close(channels, expected_channels, rtol=1e-11, atol=1e-11)
        first = _stats.setdefault(head_dim, (sums, channels))
        assert same(sums, first[0]) and same(channels, first[1])
        assert same(backend.stats(x, y, 3)[0], sums)


# ---- what codecs must do beside the golden rows ----------------------------------------------------------------------


def native_codecs(geometry: Geometry):
    """(codec, format) of all that have kernels and slots of one size."""
    for codec_id, fmt in golden_table.PAIRS:
        codec = get_codec(codec_id)
        try:
            codec.slot_bytes(geometry, fmt)
        except ToolError:
            continue  # it chooses the size when it has seen the data
        if codec.native is not None:
            yield codec, fmt


@case
def refused_pages(backend) -> None:
    """A page with a value that is not finite gives an all-zero slot and valid 0; its neighbours are as ever."""
    geometry = Geometry(80, 16)
    for codec, fmt in native_codecs(geometry):
        plane = ORACLE.quantize(fmt, values(3, 16, 80))
        if fmt in ("bf16", "fp16"):
            plane.codes[1, 7, 3] = float("nan")
        elif fmt in ("int8", "fp8"):
            plane.scales[1, 7, 0] = float("inf")
        else:
            plane.scales[1, 7, 0] = 0x7F
        expected, found = ORACLE.encode(codec, plane, geometry), backend.encode(codec, plane, geometry)
        assert found[1].tolist() == [1, 0, 1] and not found[0][1].any()
        assert same(found[0], expected[0])


@case
def unreadable_slots(backend) -> None:
    """The kernels fill what a slot with a wrong header should have held with NaN, and read the others."""
    geometry = Geometry(64, 16)
    for codec, fmt in native_codecs(geometry):
        slots, _ = ORACLE.encode(codec, ORACLE.quantize(fmt, values(3, 16, 64)), geometry)
        bad = slots.clone()
        bad[1, 4] = 77
        stride, desc = ctypes.c_int64(slots.shape[1]), backend._desc(fmt, 3, geometry)
        out = backend._empty((3, 16, 64), torch.float32)
        backend._call(f"{codec.native}_decode", desc, bad, stride, out)
        expected = ORACLE.decode(codec, slots, geometry, fmt)
        assert out[1].isnan().all() and same(out[::2], expected[::2])


@case
def groups_out_of_the_ordinary(backend) -> None:
    """Scales that no quantizer writes (negative, zero, subnormal), saturated groups, -128, -0, decades in a page."""
    geometry = Geometry(64, 16)
    for codec, fmt in native_codecs(geometry):
        plane = ORACLE.quantize(fmt, values(2, 16, 64) * torch.exp2(-3 * torch.arange(16.0))[:, None])
        if fmt == "int8":
            plane.scales[1, :6, 0] = torch.tensor([-0.5, 0.0, -0.0, 6e-8, 65504, 3e-6], dtype=torch.float16)
            plane.codes[:, :, 5] = -128
        elif plane.codes.is_floating_point():
            plane.codes[1] *= 2.0**14
            plane.codes[0, 3] *= -0.0
        expected, found = ORACLE.encode(codec, plane, geometry), backend.encode(codec, plane, geometry)
        assert same(found[0], expected[0]) and same(found[1], expected[1]), (codec.id, fmt)


@case
def pages_of_many_groups(backend) -> None:
    """More groups of 16 channels than a block keeps at once."""
    for head_dim, fmt in ((48, "int8"), (34, "bf16")):
        geometry = Geometry(head_dim, 4096)
        plane = ORACLE.quantize(fmt, values(1, 4096, head_dim) * torch.exp2(-torch.arange(4096.0) / 200)[:, None])
        for codec in map(get_codec, ("e2m1-g16", "e2m1-g64")):
            expected, found = CpuBackend(1).encode(codec, plane, geometry), backend.encode(codec, plane, geometry)
            assert same(found[0], expected[0]) and found[1].tolist() == [1]


@case
def slots_with_a_pitch(backend) -> None:
    """Bytes between one slot's end and the next one's start are left alone."""
    geometry = Geometry(72, 16)
    for codec, fmt in native_codecs(geometry):
        plane = ORACLE.quantize(fmt, values(3, 16, 72))
        expected, _ = ORACLE.encode(codec, plane, geometry)
        size, pitch = expected.shape[1], expected.shape[1] + 48
        slots, valid = torch.full((3, pitch), 0x3C, dtype=torch.uint8), torch.zeros(3, dtype=torch.int32)
        scales = ctypes.c_void_p(None) if plane.scales is None else plane.scales
        desc = backend._desc(fmt, 3, geometry)
        backend._call(f"{codec.native}_encode", desc, plane.codes, scales, slots, ctypes.c_int64(pitch), valid)
        assert same(slots[:, :size], expected) and (slots[:, size:] == 0x3C).all() and valid.tolist() == [1, 1, 1]
        out = backend._empty((3, 16, 72), torch.float32)
        backend._call(f"{codec.native}_decode", desc, slots, ctypes.c_int64(pitch), out)
        assert same(out, ORACLE.decode(codec, expected, geometry, fmt))


@case
def no_pages(backend) -> None:
    geometry = Geometry(64, 16)
    for codec, fmt in native_codecs(geometry):
        plane = backend.quantize(fmt, torch.empty(0, 16, 64))
        slots, valid = backend.encode(codec, plane, geometry)
        assert slots.shape[0] == valid.shape[0] == 0
        assert backend.decode(codec, slots, geometry, fmt).shape == (0, 16, 64)
        assert backend.restore(codec, slots, geometry, fmt).codes.shape[0] == 0


# ---- slots sized by length -------------------------------------------------------------------------------------------


def sized_codecs():
    """(codec, format) of all that have kernels and slots sized by length; ecq, whose oracle is slow, in few formats."""
    for codec_id, fmt in golden_table.PAIRS:
        codec = get_codec(codec_id)
        if codec.sized and codec.native is not None and (codec_id != "ecq" or fmt in ("int8", "iso3")):
            yield codec, fmt


@case
def pages_that_need_more_than_the_stride(backend) -> None:
    """Lengths are the oracle's; a head-page over the stride is refused with an all-zero slot, or coded coarser."""
    geometry = Geometry(72, 37)
    for codec, fmt in sized_codecs():
        x = values(9, 37, 72)
        x[::2, :, ::3] = 0
        plane = ORACLE.quantize(fmt, x)
        lengths = ORACLE.lengths(codec, plane, geometry)
        assert same(backend.lengths(codec, plane, geometry), lengths)
        tight = codec.with_stride(int(lengths.float().median()) // 16 * 16)
        expected, found = ORACLE.encode(tight, plane, geometry), backend.encode(tight, plane, geometry)
        assert codec.id == "ecq" or 0 < int(expected[1].sum()) < 9
        assert same(found[1], expected[1]) and same(found[0], expected[0])


@case
def damaged_streams(backend) -> None:
    """Damaged bytes: NaN in the whole head-page or the oracle's values, and no access outside."""
    generator = torch.Generator().manual_seed(backend.shim.seed)
    geometry = Geometry(64, 40)
    for codec, fmt in sized_codecs():
        plane = ORACLE.quantize(fmt, values(24, 40, 64))
        codec = fitted(codec, plane, geometry, ORACLE)
        slots, _ = ORACLE.encode(codec, plane, geometry)
        expected = ORACLE.decode(codec, slots, geometry, fmt)
        bad = slots.clone()
        for page in range(1, 24):
            most = (320, 264, slots.shape[1])[page % 3]
            for _ in range(page % 4):
                at = int(torch.randint(most, (1,), generator=generator))
                bad[page, at] = int(torch.randint(256, (1,), generator=generator))
        out = backend._empty((24, 40, 64), torch.float32)
        stride, desc = ctypes.c_int64(slots.shape[1]), backend._desc(fmt, 24, geometry)
        params = codec.native_params(geometry, fmt, backend.device)
        backend._call(f"{codec.native}_decode", desc, bad, stride, out, *params)
        for page in range(24):
            if out[page].isnan().all():
                assert not same(bad[page], slots[page])
                continue
            try:
                assert same(out[page], ORACLE.decode(codec, bad[page : page + 1], geometry, fmt)[0])
            except InputError as error:  # the oracle also looks at bytes that decoding does not need
                assert any(word in str(error) for word in ("reserved", "between", "scale at", "padding")), error
        assert same(out[0], expected[0]) and out.flatten(1).isnan().all(dim=1).any()
        back = codec.restored_format(fmt)
        restored = empty_plane(back, 24, geometry)
        scales = ctypes.c_void_p(None) if restored.scales is None else restored.scales
        backend._call(f"{codec.native}_restore", desc, bad, stride, restored.codes, scales, *params)
        assert torch.equal(ORACLE.dequantize(restored)[0], expected[0])  # but for -0, which int8 has not


# ---- ecq -------------------------------------------------------------------------------------------------------------


def ecq_planes(options: str, shapes, share: int = 16):
    """(geometry, codec, plane, slots) with the host's slots of `share` sixteenths of the size that suits the plane.
    Loud rows and channels make escapes at small steps."""
    cpu = CpuBackend(1)
    for head_dim, page_tokens, heads in shapes:
        geometry = Geometry(head_dim, page_tokens, heads)
        text = options.replace("CALIB", golden_table.calibration(heads, head_dim))
        codec = parse_codec(f"ecq:{text}").bind(0, "k", "bf16", geometry)
        x = values(3 * heads, page_tokens, head_dim)
        x[0, 3 % page_tokens] *= 100
        x[1, 1, :5] *= 3000
        plane = cpu.quantize("bf16", x)
        codec = fitted(codec, plane, geometry, cpu)
        size = codec.slot_bytes(geometry, "bf16") * share // 256 * 16
        codec = codec.with_stride(max(size, codec.least_stride(geometry, "bf16")))
        yield geometry, codec, plane, cpu.encode(codec, plane, geometry)[0]


ECQ_SHAPES = ((64, 16, 2), (96, 5, 1), (128, 16, 1), (192, 5, 2), (256, 64, 1), (32, 16, 1), (34, 65, 1), (72, 256, 1),
              (80, 16, 2), (576, 5, 1), (2, 64, 1))  # fmt: skip


@case
def ecq_options(backend) -> None:
    """Calibrated or not, with row scales or without, with escapes, slots too small and too large: the host's bits."""
    cpu = CpuBackend(1)
    options = (("", 16), ("rows=off", 18), ("calib=CALIB,step=-60,fill=3", 16), ("calib=CALIB,rows=off", 9))
    for i, (text, share) in enumerate(options):
        shapes = ECQ_SHAPES[(i + backend.shim.seed) % 3 :: 3] + ECQ_SHAPES[4:5]
        for geometry, codec, plane, expected in ecq_planes(text, shapes, share):
            what = (text, geometry)
            assert same(backend.lengths(codec, plane, geometry), cpu.lengths(codec, plane, geometry)), what
            slots, valid = backend.encode(codec, plane, geometry)
            assert same(slots, expected) and valid.all(), what
            assert same(backend.decode(codec, slots, geometry, "bf16"), cpu.decode(codec, slots, geometry, "bf16")), (
                what
            )
            restored, wanted = (b.restore(codec, slots, geometry, "bf16") for b in (backend, cpu))
            assert same(restored.codes, wanted.codes), what


@case
def ecq_reads_as_the_host_does(backend) -> None:
    """All head_dims, and slots that no encoder writes: large integers without a flag, the raw -32768, damage."""
    generator = torch.Generator().manual_seed(backend.shim.seed)
    cpu, shapes = CpuBackend(1), [shape for shape in ECQ_SHAPES if shape[0] * shape[1] < 3000] + [(256, 5, 2)]
    for geometry, codec, _, slots in ecq_planes("calib=CALIB,step=-60", shapes):
        heads, slots = headers(slots.numpy()), slots.repeat(4, 1)
        n = len(slots) // 4
        slots[n : 2 * n, 6] &= 7
        for i in range(n):
            end = 144 + (max(geometry.page_tokens - 64, 0) + 1) // 2 * 2 + 2 * int(heads["words"][i] & 0xFFFFFF)
            slots[2 * n + i, end - 2 : end] = torch.tensor([0, 0x80], dtype=torch.uint8)
            at = int(torch.randint(end, (1,), generator=generator))
            slots[3 * n + i, at] ^= 1 << int(torch.randint(8, (1,), generator=generator))
        stride, desc = ctypes.c_int64(slots.shape[1]), backend._desc("bf16", len(slots), geometry)
        shape = (len(slots), geometry.page_tokens, geometry.head_dim)
        for what, dtype, extra in (
            ("decode", torch.float32, ()),
            ("restore", torch.bfloat16, (ctypes.c_void_p(None),)),
        ):
            found, expected = backend._empty(shape, dtype), torch.empty(shape, dtype=dtype)
            for runner, out in ((backend, found), (cpu, expected)):
                params = codec.native_params(geometry, "bf16", runner.device)
                try:
                    runner._call(f"ecq_{what}", desc, slots, stride, out, *extra, *params)
                except KernelError as error:
                    assert runner is cpu and "slot" in str(error).lower(), error
            assert same(found, expected), (what, geometry)
            assert found[: 2 * n].isfinite().all()
