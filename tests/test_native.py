"""The compiled kernels against the torch oracle, bit for bit: shapes, odd values, refusals, threads, plain loops."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from coldkv import native
from coldkv.backends import SUMS, CpuBackend, TorchBackend, fitted
from coldkv.codecs import all_codecs, get_codec
from coldkv.errors import InputError, ToolError
from coldkv.formats import FORMATS
from coldkv.geometry import Geometry
from coldkv.tiers import HotPlane

HEAD_DIMS = (64, 80, 96, 128, 192, 256, 512, 576)
KV_HEADS = (1, 2, 4, 8)
PAGE_TOKENS = (16, 64, 256)
PAIRS = [(codec.id, fmt) for codec in all_codecs() for fmt in FORMATS if codec.fits(fmt)]
ORACLE = TorchBackend()


@pytest.fixture(scope="session")
def cpu():
    try:
        return CpuBackend(threads=2)
    except ToolError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread():
    """Small tensors gain nothing from torch's threads, and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def raw(tensor):
    return None if tensor is None else tensor.cpu().flatten().view(torch.uint8)


def same(a, b) -> bool:
    return (a is None and b is None) or torch.equal(raw(a), raw(b))


def assert_same_plane(found: HotPlane, expected: HotPlane) -> None:
    assert found.format == expected.format
    assert same(found.codes, expected.codes) and same(found.scales, expected.scales)


def assert_codec_agrees(backend, codec_id: str, plane: HotPlane, geometry: Geometry) -> torch.Tensor:
    """Encode, decode and restore agree with the oracle; returns the oracle's valid words."""
    codec = get_codec(codec_id)
    if codec.sized:
        assert torch.equal(backend.lengths(codec, plane, geometry), ORACLE.lengths(codec, plane, geometry))
        codec = fitted(codec, plane, geometry, backend)
    slots, valid = ORACLE.encode(codec, plane, geometry)
    found, found_valid = backend.encode(codec, plane, geometry)
    assert torch.equal(found_valid, valid)
    assert torch.equal(found, slots)
    good = slots[valid != 0]
    assert same(backend.decode(codec, good, geometry, plane.format), ORACLE.decode(codec, good, geometry, plane.format))
    assert_same_plane(
        backend.restore(codec, good, geometry, plane.format), ORACLE.restore(codec, good, geometry, plane.format)
    )
    return valid


def values(shape, seed=0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    channels = torch.exp(torch.randn(shape[-1], generator=g))
    rows = torch.exp(2 * torch.randn(*shape[:-1], 1, generator=g))
    return torch.randn(*shape, generator=g) * channels * rows


@pytest.mark.parametrize("page_tokens", PAGE_TOKENS)
@pytest.mark.parametrize("head_dim", (*HEAD_DIMS, 72, 34, 2))
def test_every_shape_agrees(cpu, head_dim, page_tokens):
    """All head counts in turn. The slow oracle of e2m1-g16 sees one format and head count per shape; the golden table
    covers the rest."""
    turn = (*HEAD_DIMS, 72, 34, 2).index(head_dim) + PAGE_TOKENS.index(page_tokens)
    for kv_heads in KV_HEADS:
        geometry = Geometry(head_dim, page_tokens, kv_heads)
        tokens = values((page_tokens, kv_heads, head_dim), seed=head_dim)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            x = ORACLE.load(tokens.to(dtype), geometry)
            assert same(cpu.load(tokens.to(dtype), geometry), x)
        for hot in ("int8", "nvfp4", "iso3"):
            plane = ORACLE.quantize(hot, x)
            assert_same_plane(cpu.quantize(hot, x), plane)
            assert same(cpu.dequantize(plane), ORACLE.dequantize(plane))
            assert assert_codec_agrees(cpu, "e2m1-g64", plane, geometry).all()
            if hot != "int8":
                assert assert_codec_agrees(cpu, "native", plane, geometry).all()
        if kv_heads == KV_HEADS[turn % 4]:
            for fmt in ("int8", ("bf16", "fp8", "fp16")[turn % 3]):
                assert assert_codec_agrees(cpu, "e2m1-g16", ORACLE.quantize(fmt, x)[:1], geometry).all()


@pytest.mark.parametrize("codec_id,fmt", PAIRS)
def test_every_format_agrees_for_short_groups(cpu, codec_id, fmt):
    for head_dim in (2, 18, 34, 72, 80, 100, 256):
        geometry = Geometry(head_dim, 5)
        x = values((3, 5, head_dim), seed=head_dim)
        plane = ORACLE.quantize(fmt, x)
        assert_same_plane(cpu.quantize(fmt, x), plane)
        assert same(cpu.dequantize(plane), ORACLE.dequantize(plane))
        assert_codec_agrees(cpu, codec_id, plane, geometry)


@pytest.mark.parametrize("codec_id,fmt", PAIRS)
def test_no_head_pages_at_all(cpu, codec_id, fmt):
    geometry = Geometry(64, 16)
    plane = cpu.quantize(fmt, torch.empty(0, 16, 64))
    codec = fitted(get_codec(codec_id), plane, geometry, cpu)
    slots, valid = cpu.encode(codec, plane, geometry)
    assert slots.shape == (0, codec.slot_bytes(geometry, fmt)) and valid.shape == (0,)
    assert cpu.decode(codec, slots, geometry, fmt).shape == (0, 16, 64)
    assert cpu.restore(codec, slots, geometry, fmt).codes.shape[0] == 0


BF16_BITS = st.one_of(
    st.integers(0, 0xFFFF),
    st.sampled_from([0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x0080, 0x7F7F, 0xFF7F, 0x3F80, 0x0D80, 0x7B80]),
)
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("fmt,codec_id", [("bf16", "e2m1-g16"), ("bf16", "e2m1-g64"), ("fp16", "e2m1-g16")])
@QUICK
@given(bits=hnp.arrays(np.uint16, (2, 2, 34), elements=BF16_BITS))
def test_any_bit_pattern_agrees(cpu, fmt, codec_id, bits):
    """Zeros of both signs, subnormals, huge values, NaN and infinities: the same slot, or the same refusal."""
    dtype = torch.bfloat16 if fmt == "bf16" else torch.float16
    plane = HotPlane(fmt, torch.from_numpy(bits.view(np.int16).copy()).view(dtype), None, 34)
    assert_codec_agrees(cpu, codec_id, plane, Geometry(34, 2))


@pytest.mark.parametrize("codec_id", ("e2m1-g16", "e2m1-g64", "rans-e2m1"))
@QUICK
@given(
    codes=hnp.arrays(np.int8, (2, 3, 80)),
    scales=hnp.arrays(np.uint16, (2, 3, 2), elements=st.one_of(st.integers(0, 0x7BFF), st.integers(0, 0xFFFF))),
)
def test_any_int8_plane_agrees(cpu, codec_id, codes, scales):
    """-128, zero, subnormal, negative and non-finite scales included."""
    half = torch.from_numpy(scales.view(np.int16).copy()).view(torch.float16)
    assert_codec_agrees(cpu, codec_id, HotPlane("int8", torch.from_numpy(codes), half, 80), Geometry(80, 3))


@pytest.mark.parametrize("fmt", ("nvfp4", "iso3"))
@QUICK
@given(codes=hnp.arrays(np.uint8, (1, 2, 40)), scales=hnp.arrays(np.uint8, (1, 2, 5)))
def test_any_nibble_plane_agrees(cpu, fmt, codes, scales):
    plane = HotPlane(fmt, torch.from_numpy(codes), torch.from_numpy(scales), 80)
    for codec_id in ("e2m1-g64", "native", "rans-e2m1"):
        assert_codec_agrees(cpu, codec_id, plane, Geometry(80, 2))


@pytest.mark.parametrize("fmt", FORMATS)
@QUICK
@given(bits=hnp.arrays(np.uint32, (1, 2, 34), elements=st.integers(0, 0xFFFFFFFF)))
def test_quantizers_agree_on_any_finite_values(cpu, fmt, bits):
    x = np.where((bits & 0x7F800000) == 0x7F800000, bits & 0xBFFFFFFF, bits).astype(np.uint32).view(np.float32)
    plane = ORACLE.quantize(fmt, torch.from_numpy(x))
    assert_same_plane(cpu.quantize(fmt, torch.from_numpy(x)), plane)
    assert same(cpu.dequantize(plane), ORACLE.dequantize(plane))


@pytest.mark.parametrize("fmt", ("bf16", "fp16", "nvfp4", "iso3"))
def test_exact_ties_agree_and_go_up(cpu, fmt):
    """Values at t * s and one ulp below, for every threshold and several scales."""
    thresholds = (0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5) if fmt == "iso3" else (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
    top = 7.0 if fmt == "iso3" else 6.0
    rows = []
    for scale in (1.0, 1.125, 1.875, 2.0**-5, 2.0**-9, 2.0**-8, 240.0):
        row = torch.zeros(16)
        row[:7] = torch.tensor(thresholds) * scale
        row[7:14] = -torch.nextafter(row[:7], torch.zeros(7))
        row[14] = top * scale
        rows.append(row)
    x = torch.stack(rows).unsqueeze(0).repeat(1, 1, 4)
    geometry = Geometry(64, x.shape[1])
    plane = ORACLE.quantize(fmt, x)
    assert_same_plane(cpu.quantize(fmt, x), plane)
    for codec_id, taken in PAIRS:
        if taken == fmt:
            assert_codec_agrees(cpu, codec_id, plane, geometry)
    if fmt in ("bf16", "nvfp4"):
        first = cpu.encode(get_codec("e2m1-g64"), plane, geometry)[0][0, 16:24].tolist()
        assert [n for byte in first[:4] for n in (byte & 15, byte >> 4)][:7] == [1, 2, 3, 4, 5, 6, 7]


def exact_choice(codes: np.ndarray, h: float) -> tuple[float, list[int]]:
    """Scale and signed magnitudes of one e2m1-g16 group by exhaustive search in exact rationals over all of U."""
    v = [Fraction(int(c)) * Fraction(h) for c in codes]
    a = max(abs(x) for x in v)
    magnitudes = [Fraction(m).limit_denominator(2) for m in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]
    thresholds = [Fraction(t) for t in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)]

    def at(s):
        return [magnitudes[sum(abs(x) >= t * s for t in thresholds)] for x in v]

    best = None
    for exponent in range(-40, 30):
        for mantissa in range(8):
            s = Fraction(8 + mantissa, 8) * Fraction(2) ** exponent
            if s * 7 < a or s * Fraction(7, 2) >= a:
                continue
            q = at(s)
            error = sum((abs(x) - m * s) ** 2 for x, m in zip(v, q, strict=True))
            if best is None or error < best[0]:
                best = (error, s, q)
    _, s, q = best
    two_thirds = s * Fraction(2, 3)
    if set(q) <= {0, 1, 2, 4} and (two_thirds / Fraction(2) ** math.floor(math.log2(two_thirds)) * 8).denominator == 1:
        s, q = two_thirds, at(two_thirds)
    return float(s), [float(m) if x >= 0 else -float(m) for x, m in zip(v, q, strict=True)]


def test_g16_on_int8_is_the_exact_optimum(cpu):
    rng = np.random.default_rng(5)
    codes = rng.integers(-127, 128, (8, 4, 64), dtype=np.int8)
    codes[6] = rng.choice([-24, -12, 0, 6, 24], codes[6].shape)  # 0, 1, 2, 4 of a scale: the canonical form matters
    codes[7] = rng.choice([0, 0, 31, -31, 62, 124], codes[7].shape)
    codes[1] //= 9
    codes[2] = rng.choice([-3, -1, 0, 1, 2, 127], codes[2].shape)
    codes[3] = rng.integers(-2, 3, codes[3].shape)
    scales = rng.uniform(0.001, 3, (8, 4, 1)).astype(np.float16)
    plane = HotPlane("int8", torch.from_numpy(codes), torch.from_numpy(scales), 64)
    slots, _ = cpu.encode(get_codec("e2m1-g16"), plane, Geometry(64, 4))
    found = cpu.decode(get_codec("e2m1-g16"), slots, Geometry(64, 4), "int8")
    checked = 0
    for page, row, group in np.ndindex(8, 4, 4):
        part = codes[page, row, 16 * group : 16 * group + 16]
        if part.any():
            s, q = exact_choice(part, float(scales[page, row, 0]))
            expected = [m * s for m in q]
            assert found[page, row, 16 * group : 16 * group + 16].tolist() == expected
            checked += 1
    assert checked > 80


def test_a_page_with_a_non_finite_scale_is_refused_and_its_slot_is_zero(cpu):
    plane = cpu.quantize("int8", values((3, 16, 64)))
    plane.scales[1, 7, 0] = float("inf")
    for codec_id in ("e2m1-g16", "e2m1-g64", "rans-e2m1"):
        codec = fitted(get_codec(codec_id), plane, Geometry(64, 16), cpu)
        slots, valid = cpu.encode(codec, plane, Geometry(64, 16))
        assert valid.tolist() == [1, 0, 1] and not slots[1].any() and slots[0].any()


@pytest.mark.parametrize("codec_id,fmt", PAIRS)
@pytest.mark.parametrize("offset,byte", ((0, 0x53), (4, 9), (6, 0)))
def test_a_slot_with_a_wrong_header_is_an_error_naming_it(cpu, codec_id, fmt, offset, byte):
    geometry, plane = Geometry(64, 16), cpu.quantize(fmt, values((3, 16, 64)))
    codec = fitted(get_codec(codec_id), plane, geometry, cpu)
    slots, _ = cpu.encode(codec, plane, geometry)
    slots[2, offset] = byte
    for backend in (cpu, ORACLE):
        for read in (backend.decode, backend.restore):
            with pytest.raises(InputError, match="slot 2: (magic|version|flags)"):
                read(codec, slots, geometry, fmt)


def test_an_unreadable_slot_leaves_nan_never_zeros(cpu):
    for codec_id, fmt in PAIRS:
        geometry, plane = Geometry(64, 16), cpu.quantize(fmt, values((2, 16, 64)))
        codec = fitted(get_codec(codec_id), plane, geometry, cpu)
        slots, _ = cpu.encode(codec, plane, geometry)
        slots[0, 4] = 77
        out = torch.zeros(2, 16, 64)
        with pytest.raises(InputError):
            cpu.decode(codec, slots, geometry, fmt, out=out)
        assert out[0].isnan().all() and out[1].isfinite().all()


def test_results_do_not_depend_on_threads(cpu):
    x, y = values((24, 64, 128)), values((24, 64, 128), seed=1)
    one, many = CpuBackend(threads=1), CpuBackend(threads=5)
    assert_same_plane(one.quantize("int8", x), many.quantize("int8", x))
    plane = one.quantize("int8", x)
    for codec_id in ("e2m1-g16", "e2m1-g64", "rans-e2m1"):
        codec = fitted(get_codec(codec_id), plane, Geometry(128, 64), many)
        a, b = (backend.encode(codec, plane, Geometry(128, 64)) for backend in (one, many))
        assert torch.equal(a[0], b[0])
    for a, b in zip(one.stats(x, y, 4, channels=True), many.stats(x, y, 4, channels=True), strict=True):
        assert same(a, b)


def test_stats_are_those_of_the_oracle(cpu):
    x, y = values((6, 5, 34)), values((6, 5, 34), seed=1)
    found, channels = cpu.stats(x, y, 3, channels=True)
    expected, expected_channels = ORACLE.stats(x, y, 3, channels=True)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(channels, expected_channels, rtol=1e-11, atol=1e-11)
    assert found[:, SUMS.index("count")].tolist() == [2 * 5 * 34] * 3


def test_plain_loops_give_the_bits_of_the_vector_ones(cpu):
    plain = CpuBackend(threads=2)
    plain._library = native.build_host(("-DCKV_NO_SIMD",))
    x, y = values((4, 16, 208)), values((4, 16, 208), seed=1)
    x[0, 0] *= 1e-7
    geometry = Geometry(208, 16)
    for fmt in FORMATS:
        plane = cpu.quantize(fmt, x)
        assert_same_plane(plain.quantize(fmt, x), plane)
        assert same(plain.dequantize(plane), cpu.dequantize(plane))
        for codec in all_codecs():
            if codec.fits(fmt):
                codec = fitted(codec, plane, geometry, cpu)
                slots, valid = cpu.encode(codec, plane, geometry)
                found, found_valid = plain.encode(codec, plane, geometry)
                assert torch.equal(found, slots) and torch.equal(found_valid, valid)
                assert same(plain.decode(codec, slots, geometry, fmt), cpu.decode(codec, slots, geometry, fmt))
    assert same(plain.stats(x, y, 2)[0], cpu.stats(x, y, 2)[0])


def test_load_takes_views_with_any_stride(cpu):
    wide = torch.randn(32, 3, 2, 40).to(torch.bfloat16)
    geometry = Geometry(40, 16, 3)
    view = wide[:, :, 1]
    assert not view.is_contiguous() and same(cpu.load(view, geometry), ORACLE.load(view, geometry))
    with pytest.raises(InputError, match="whole pages of 16 tokens, found 31"):
        cpu.load(view[:31], geometry)


def test_slot_bytes_of_the_kernels_are_those_of_the_codecs(cpu):
    for codec_id, fmt in PAIRS:
        codec = get_codec(codec_id)
        for head_dim in (2, 34, 256):
            geometry = Geometry(head_dim, 7)
            found = cpu._library.slot_bytes(codec.native, FORMATS[fmt].ident, 7, head_dim)
            stride_error = -4  # the size follows from the data
            assert found == (stride_error if codec.sized else codec.slot_bytes(geometry, fmt))
    assert cpu._library.slot_bytes("e2m1_g16", FORMATS["iso3"].ident, 64, 256) < 0
    assert cpu._library.slot_bytes("no_such_codec", 2, 64, 256) < 0
