"""Reference quantizers of the hot tiers: exact sizes, exact conversions, ties, and edge values."""

import pytest
import torch

from coldkv import minifloat as mf
from coldkv.errors import InputError
from coldkv.formats import FORMATS, tier_formats
from coldkv.geometry import Geometry
from coldkv.tiers import dequantize, empty_plane, quantize


@pytest.mark.parametrize(
    "fmt,size", [("bf16", 32768), ("fp16", 32768), ("int8", 16896), ("fp8", 16512), ("nvfp4", 9216), ("iso3", 9216)]
)
def test_head_page_bytes_of_the_seed_geometry(fmt, size):
    assert FORMATS[fmt].bytes(Geometry(256, 64)) == size
    assert empty_plane(fmt, 3, Geometry(256, 64)).nbytes == 3 * size


@pytest.mark.parametrize("head_dim", (64, 80, 96, 128, 192, 256, 512, 576, 72, 34))
@pytest.mark.parametrize("fmt", FORMATS)
def test_quantize_matches_the_declared_bytes_and_error(fmt, head_dim):
    x = torch.randn((3, 16, head_dim), generator=torch.Generator().manual_seed(1))
    plane = quantize(fmt, x)
    assert plane.nbytes == 3 * FORMATS[fmt].bytes(Geometry(head_dim, 16))
    y = dequantize(plane)
    nmse = float((x - y).square().sum() / x.square().sum())
    bound = {"bf16": 1e-5, "fp16": 1e-6, "int8": 1e-4, "fp8": 1e-3, "nvfp4": 0.0105, "iso3": 0.0105}[fmt]
    assert 0 < nmse < bound
    assert torch.equal(dequantize(quantize(fmt, y)), y) or fmt in ("int8", "fp8")  # scales of these may move by an ulp


def test_e4m3_round_trip_and_ties_over_all_codes():
    bits = torch.arange(0, 127, dtype=torch.uint8)
    values = mf.e4m3_decode(bits)
    assert values[1] == 2.0**-9 and values[126] == 448.0 and values[8] == 2.0**-6
    assert torch.equal(mf.e4m3_encode(values), bits)
    middle = (values[:-1] + values[1:]) / 2
    even = torch.where(bits[:-1] % 2 == 0, bits[:-1], bits[1:])
    assert torch.equal(mf.e4m3_encode(middle), even)
    assert mf.e4m3_encode(torch.tensor([1e30, 449.0])).tolist() == [126, 126]


def test_e2m1_ties_go_up_and_negative_zero_is_the_seeds():
    s = torch.tensor(0.40625)  # an E4M3 number with a full mantissa
    t = torch.tensor(mf.E2M1_THRESHOLDS)
    assert mf.e2m1_nibbles(t * s, s).tolist() == [1, 2, 3, 4, 5, 6, 7]
    below = torch.nextafter(t * s, torch.zeros(7))
    assert mf.e2m1_nibbles(below, s).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert mf.e2m1_nibbles(torch.tensor([-1e-6, -0.0, 0.0, 1e9]), s).tolist() == [8, 0, 0, 7]
    assert mf.iso3_nibbles(torch.tensor([-1e-6, -0.0, -0.5, 6.6]), torch.tensor(1.0)).tolist() == [0, 0, 9, 7]


def test_nibble_order_is_even_channel_low():
    packed = mf.pack_nibbles(torch.tensor([[1, 2, 3, 4]], dtype=torch.uint8))
    assert packed.tolist() == [[0x21, 0x43]]
    assert mf.unpack_nibbles(packed).tolist() == [[1, 2, 3, 4]]


def test_int8_zero_group_and_clamp():
    x = torch.zeros((1, 1, 128))
    x[0, 0, 64:] = 1.0
    x[0, 0, 64] = -1.0
    plane = quantize("int8", x)
    assert plane.scales[0, 0, 0] == 0 and not plane.codes[0, 0, :64].any()
    assert plane.codes[0, 0, 64] == -127 and plane.codes[0, 0, 65] == 127
    assert quantize("int8", torch.full((1, 1, 64), 3e38)).scales.isfinite().all()


def test_nvfp4_layer_has_iso3_values():
    assert tier_formats("nvfp4") == {"k": "nvfp4", "v": "iso3"}
    with pytest.raises(InputError, match="tier: expected one of .* found 'int7'"):
        tier_formats("int7")


def test_odd_head_dim_and_wrong_dtype_are_errors():
    with pytest.raises(InputError, match="even head_dim"):
        quantize("nvfp4", torch.zeros((1, 1, 33)))
    with pytest.raises(InputError, match="fp32"):
        quantize("int8", torch.zeros((1, 1, 32), dtype=torch.bfloat16))
    with pytest.raises(InputError, match="head_dim: expected an even number"):
        Geometry(33)
