"""Codec rans-e2m1: the bytes against a reader written from FORMAT.md alone, budgets, refusals, damage, fixed sizes."""

import json
import struct
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from clirun import coldkv
from guardkit import refusals
from hypothesis import given, settings
from hypothesis import strategies as st
from poolkit import make_dump, pack_dump

from coldkv import rans
from coldkv.backends import CpuBackend, TorchBackend, fitted
from coldkv.codecs import get_codec, parse_codec
from coldkv.errors import InputError, ToolError
from coldkv.geometry import Geometry
from coldkv.tiers import HotPlane, quantize

ORACLE = TorchBackend()
CARRIER = {"nvfp4": "native", "iso3": "native"}  # whose codes and scales the slot holds; else e2m1-g64
SEED = Geometry(256, 64)
SHAPES = [(256, 64), (64, 16), (80, 33), (34, 5), (2, 100), (18, 1), (40, 96)]  # head_dim, page_tokens


def backends():
    try:
        return [ORACLE, CpuBackend(threads=2)]
    except ToolError:
        return [ORACLE]


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def plane_of(fmt, geometry, n=3, seed=0, spread=1.0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, geometry.page_tokens, geometry.head_dim, generator=g)
    return quantize(fmt, x * torch.exp(spread * torch.randn(geometry.head_dim, generator=g)))


def raw(tensor):
    return tensor.flatten().view(torch.uint8)


def read_slot(slot: bytes, tokens: int, channels: int) -> tuple[list[list[int]], bytes]:
    """(codes of each row, scale bytes): FORMAT.md section 6 in plain Python, one symbol after the other."""
    assert struct.unpack_from("<IHH", slot) == (0x3156524E, 1, 1)
    per_stream, groups = -(-tokens // 32), -(-channels // 16)
    tail = len(slot) - tokens * groups
    rows, at = [[] for _ in range(tokens)], 320
    for half in (0, 1):
        begin = 8 + 128 * half
        freq = struct.unpack_from("<16H", slot, begin)
        offset = struct.unpack_from("<17I", slot, begin + 32)
        assert slot[begin + 100 : begin + 128] == bytes(28) and min(freq) >= 1 and sum(freq) == 4096
        code_of = [code for code in range(16) for _ in range(freq[code])]
        start = [sum(freq[:code]) for code in range(16)]
        counts = Counter()
        for t in range(16):
            first = min(tokens, (16 * half + t) * per_stream)
            last = min(tokens, first + per_stream)
            assert offset[t] == at
            at = offset[t + 1]
            if first == last:
                assert offset[t] == at
                continue
            data = list(slot[offset[t] : at])
            x = int.from_bytes(bytes(data[-4:]), "little")
            del data[-4:]
            for row in range(first, last):
                for _ in range(channels):
                    assert 1 << 23 <= x < 1 << 31
                    code = code_of[x % 4096]
                    x = freq[code] * (x // 4096) + x % 4096 - start[code]
                    while x < 1 << 23:
                        x = 256 * x + data.pop()
                    rows[row].append(code)
            assert x == 1 << 23 and data == []
            counts.update(code for row in rows[first:last] for code in row)
        assert list(freq) == expected_frequencies([counts[code] for code in range(16)])
    assert slot[264:320] == bytes(56) and slot[at:tail] == bytes(tail - at)
    return rows, slot[tail:]


def expected_frequencies(counts: list[int]) -> list[int]:
    """In exact rationals."""
    if not sum(counts):
        return [256] * 16
    share = [Fraction(4096 * c, sum(counts)) for c in counts]
    freq = [max(1, int(s)) for s in share]
    missing = 4096 - sum(freq)
    if missing > 0:
        order = sorted((code for code in range(16) if share[code] >= 1), key=lambda code: (-(share[code] % 1), code))
        for code in order[:missing]:
            freq[code] += 1
    for _ in range(-missing):
        freq[max(range(16), key=lambda code: (freq[code], -code))] -= 1
    return freq


@pytest.mark.parametrize("fmt", ["int8", "nvfp4", "iso3", "bf16", "fp16", "fp8"])
@pytest.mark.parametrize("head_dim,page_tokens", SHAPES)
def test_slots_are_what_the_specification_says(fmt, head_dim, page_tokens):
    """All backends alike; codes, scale bytes, values and restored planes are those of the raw codec, bit for bit."""
    geometry = Geometry(head_dim, page_tokens)
    if fmt not in ("int8", "nvfp4") and (head_dim, page_tokens) == (256, 64):
        pytest.skip("two formats are enough at full size")
    plane = plane_of(fmt, geometry)
    carrier = get_codec(CARRIER.get(fmt, "e2m1-g64"))
    expected, _ = ORACLE.encode(carrier, plane, geometry)
    codes_end = 16 + geometry.elements // 2
    found = []
    for backend in backends():
        codec = fitted(get_codec("rans-e2m1"), plane, geometry, backend)
        slots, valid = backend.encode(codec, plane, geometry)
        assert valid.all() and codec.check_slots(slots.numpy(), geometry, fmt) == []
        for ours, theirs in zip(slots, expected, strict=True):
            rows, scales = read_slot(ours.numpy().tobytes(), page_tokens, head_dim)
            codes = np.array(rows, dtype=np.uint8).reshape(-1, 2)
            assert (codes[:, 0] | codes[:, 1] << 4).tobytes() == theirs[16:codes_end].numpy().tobytes()
            assert scales == theirs[codes_end : codes_end + len(scales)].numpy().tobytes()
        assert torch.equal(raw(backend.decode(codec, slots, geometry, fmt)),
                           raw(ORACLE.decode(carrier, expected, geometry, fmt)))  # fmt: skip
        mine, theirs = (b.restore(c, s, geometry, fmt) for b, c, s in
                        ((backend, codec, slots), (ORACLE, carrier, expected)))  # fmt: skip
        assert mine.format == theirs.format and torch.equal(raw(mine.codes), raw(theirs.codes))
        assert mine.scales is None or torch.equal(raw(mine.scales), raw(theirs.scales))
        found.append(slots)
    assert all(torch.equal(slots, found[0]) for slots in found)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 3), st.integers(0, 1 << 21)), min_size=16, max_size=16))
def test_frequencies_are_the_exact_ones(counts):
    assert rans.frequencies(torch.tensor([counts]))[0].tolist() == expected_frequencies(counts)


@pytest.mark.parametrize(
    "counts", [[0] * 16, [1] + [0] * 15, [1 << 21] + [1] * 15, [1 << 17] * 16, [3, 3, 3] + [0] * 13]
)
def test_frequencies_at_the_ends(counts):
    assert rans.frequencies(torch.tensor([counts]))[0].tolist() == expected_frequencies(counts)


def test_the_budget_is_the_seeds_and_one_byte_over_it_refuses_the_page():
    """(slot_bytes - 1,344) / 32 per stream; a length is the smallest size that holds the page."""
    plane = plane_of("int8", SEED, n=6, spread=2.0)
    for backend in backends():
        lengths = backend.lengths(get_codec("rans-e2m1"), plane, SEED)
        assert len(set(lengths.tolist())) > 2
        for index, length in enumerate(lengths.tolist()):
            for size, holds in ((length, True), (length - 32, False)):
                codec = parse_codec(f"rans-e2m1:slot_bytes={size}")
                slots, valid = backend.encode(codec, plane, SEED)
                assert bool(valid[index]) == holds
                assert torch.equal(valid != 0, lengths <= size)
                assert not slots[valid == 0].any() and slots[valid != 0].any(dim=1).all()
                record = slots[index].numpy().tobytes()
                longest = max(np.diff(struct.unpack_from("<17I", record, at)).max() for at in (40, 168))
                assert longest == ((size - 1344) // 32 if holds else 0)


def test_pages_of_one_value_and_of_rare_codes_hold():
    """A code that is alone costs next to nothing, one that is rare up to 12 bits and two bytes at a time."""
    plane = plane_of("nvfp4", SEED, n=3)
    plane.codes[0] = 0x33
    plane.codes[1] = 0x22
    plane.codes[1, 5, ::7] = 0x9F
    for backend in backends():
        codec = fitted(get_codec("rans-e2m1"), plane, SEED, backend)
        slots, valid = backend.encode(codec, plane, SEED)
        assert valid.all()
        back = backend.restore(codec, slots, SEED, "nvfp4")
        assert torch.equal(back.codes, plane.codes) and torch.equal(back.scales, plane.scales)
        lengths = backend.lengths(codec, plane, SEED).tolist()
        # 512 codes of probability 4081/4096 are 2.8 bits; the state takes 4 bytes
        assert lengths[0] <= 1344 + 32 * 5 and lengths[0] < lengths[1] < lengths[2]


def test_scales_that_no_tier_writes_and_values_that_are_not_finite_never_fit():
    nibbles, ints = plane_of("iso3", SEED), plane_of("int8", SEED)
    nibbles.scales[1, 3, 2] = 0x7F
    ints.scales[2, 9, 1] = float("nan")
    for backend in backends():
        for plane, bad in ((nibbles, 1), (ints, 2)):
            lengths = backend.lengths(get_codec("rans-e2m1"), plane, SEED).tolist()
            assert [i for i, length in enumerate(lengths) if length == 2**31 - 1] == [bad]
            codec = fitted(get_codec("rans-e2m1"), plane, SEED, backend)
            assert codec.slot_bytes(SEED, plane.format) < 20_000
            assert backend.encode(codec, plane, SEED)[1].tolist() == [int(i != bad) for i in range(3)]


def test_a_size_below_the_fixed_part_is_an_error_and_so_is_one_off_the_grid():
    codec = parse_codec("rans-e2m1:slot_bytes=1456")
    with pytest.raises(InputError, match="slot_bytes: expected at least 1472 for 64 tokens x 256 channels"):
        codec.slot_bytes(SEED, "int8")
    with pytest.raises(InputError, match="positive multiple of 16, found 6690"):
        parse_codec("rans-e2m1:slot_bytes=6690")
    assert parse_codec("rans-e2m1:slot_bytes=6688").label == "rans-e2m1:slot_bytes=6688"


# ---- damage --------------------------------------------------------------------------------------------------------


def u16(value):
    return list(struct.pack("<H", value))


def u32(value):
    return list(struct.pack("<I", value))


@pytest.fixture(scope="module")
def sound():
    plane = plane_of("int8", SEED, n=3)
    codec = fitted(get_codec("rans-e2m1"), plane, SEED, ORACLE)
    slots, _ = ORACLE.encode(codec, plane, SEED)
    return codec, slots


@pytest.mark.parametrize(
    "at,data,problem",
    [
        (0, [0x52], "magic: expected 0x3156524e"),
        (4, u16(2), "version: expected 1, found 2"),
        (6, u16(3), "flags: expected 1, found 3"),
        (108, [1], "reserved bytes of the header: expected zero"),
        (319, [1], "reserved bytes of the header: expected zero"),
        (8, u16(0), "half 0: frequencies: expected at least 1 each, 4096 in all, found"),
        (136 + 30, u16(4000), "half 1: frequencies"),
        (40, u32(324), "half 0: offset 0: expected 320, found 324"),
        (168, u32(0), "half 1: offset 0: expected"),
        (40 + 4, u32(300), "half 0: offset 1: expected 324.."),
        (40 + 4, u32(321), "half 0: offset 1: expected 324.."),
        (40 + 20, u32(0xFFFFFFFF), "half 0: offset 5: expected"),
        (168 + 64, u32(1 << 31), "half 1: offset 16: expected"),
    ],
)
def test_every_damaged_field_of_the_header_is_named(sound, at, data, problem):
    codec, slots = sound
    bad = slots.clone()
    bad[1, at : at + len(data)] = torch.tensor(data, dtype=torch.uint8)
    found = codec.check_slots(bad.numpy(), SEED, "int8")
    assert [index for index, _ in found] == [1] and problem in found[0][1]
    for backend in backends():
        for read in (backend.decode, backend.restore):
            if "reserved" not in problem or backend is ORACLE:
                with pytest.raises(InputError, match="slot 1: "):
                    read(codec, bad, SEED, "int8")


def test_damage_behind_the_header_is_found(sound):
    codec, slots = sound
    end = int(struct.unpack_from("<I", slots[1].numpy().tobytes(), 44)[0])
    for at, value, problem in (
        (end - 1, 0xFF, "half 0: stream 0: state"),
        (slots.shape[1] - 1025, 1, "between streams and scales"),
        (slots.shape[1] - 1, 0x7F, "scale at row 63, group 15"),
    ):
        bad = slots.clone()
        bad[1, at] = value
        if "between" in problem and slots[1, at]:
            continue  # the slot is full to its last byte
        (found,) = codec.check_slots(bad.numpy(), SEED, "int8")
        assert found[0] == 1 and problem in found[1]
    bad = slots.clone()
    bad[1, 340] ^= 0x55  # inside stream 0: only decoding can see it
    assert codec.check_slots(bad.numpy(), SEED, "int8") == []
    for backend in backends():
        for read in (backend.decode, backend.restore):
            with pytest.raises(InputError, match="slot 1: stream 0: its bytes do not decode: damaged"):
                read(codec, bad, SEED, "int8")
    assert "slot length" in codec.check_slots(slots[:, :-16].numpy(), SEED, "int8")[0][1]


RULES = """
ORACLE_EVERY, UNREAD = 40, ("reserved", "between", "scale at")

def damage(bad, attempt):
    random_bytes(bad, attempt, 8, 320)

def accepted(out):
    pass
"""


@pytest.mark.parametrize("head_dim,page_tokens,tries", [(256, 64, 600), (64, 16, 1500), (34, 5, 1500), (2, 100, 1500)])
def test_damaged_slots_never_make_a_decoder_read_outside(head_dim, page_tokens, tries):
    """The slot lies against memory that may not be touched; a read outside would end the process."""
    if len(backends()) == 1:
        pytest.skip("no compiler")
    refused = refusals("rans-e2m1", RULES, head_dim, page_tokens, tries)
    assert tries // 4 < refused < tries


# ---- what it gives -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sample_rows():
    codecs = ["rans-e2m1", "rans-e2m1:slot_bytes=6688", "rans-e2m1:slot_bytes=9536", "e2m1-g64"]
    done = coldkv("measure", "--sample", *(x for codec in codecs for x in ("--codec", codec)), "--json")
    assert done.code == 0, done.err
    rows = json.loads(done.out)["rows"]
    return {codec: [row for row in rows if row["codec"] == codec] for codec in codecs}


def test_the_sample_shows_what_the_seeds_slot_gives(sample_rows):
    """6,688 bytes hold no page, as the seed found; sized by length the slot is no better than the raw one."""

    def total(codec, column):
        return sum(row[column] for row in sample_rows[codec])

    assert total("rans-e2m1:slot_bytes=6688", "invalid_pages") == total("rans-e2m1", "pages") == 140
    assert 0 < total("rans-e2m1:slot_bytes=9536", "invalid_pages") < 70
    ratio = total("rans-e2m1", "hot_bytes") / total("rans-e2m1", "cold_bytes")
    assert 1.75 < ratio < 16896 / 9232 and total("rans-e2m1", "invalid_pages") == 0
    for ours, raw_codec in zip(sample_rows["rans-e2m1"], sample_rows["e2m1-g64"], strict=True):
        assert ours["nmse_hot"] == raw_codec["nmse_hot"] and ours["logit_rmse"] == raw_codec["logit_rmse"]


def test_refused_pages_are_said_and_show_no_error_as_kept_claim(tmp_path):
    done = coldkv("measure", "--sample", "--layers", "0", "--codec", "rans-e2m1:slot_bytes=6688", "--results",
                  tmp_path / "r.json")  # fmt: skip
    assert "rans-e2m1:slot_bytes=6688 on int8: 20 of 20 head-pages could not be packed and stay hot" in done.out
    claims = json.loads((tmp_path / "r.json").read_text())["summary"]["claims"]
    nmse = [claim for claim in claims if claim["claim"].startswith("NMSE")]
    assert len(nmse) == 2 and all(claim["measured"] is None and claim["holds"] is None for claim in nmse)


def test_a_pool_with_a_fixed_size_keeps_what_does_not_fit_hot(tmp_path):
    """A page of bell-shaped values needs more than the size, one of few values does not."""

    def change(tensors):
        for name, tensor in tensors.items():
            tensor.copy_(torch.sign(tensor.float()) * (1 if ".k" in name else 2))
        tensors["layers.0.v"][32:48, 1] = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))

    make_dump(tmp_path / "d.safetensors", {0: {}, 1: {}}, change=change)
    fixed = pack_dump(tmp_path / "d.safetensors", tmp_path / "f.ckv", codecs=["rans-e2m1:slot_bytes=544"])
    assert fixed.counts == {"cold": 10, "invalid": 2, "recent": 2}
    assert any("1 pages" in line and "layer 0, plane v, page 2, head 1" in line for line in fixed.warnings)
    free = pack_dump(tmp_path / "d.safetensors", tmp_path / "p.ckv", codecs=["rans-e2m1"])
    assert free.counts == {"cold": 12, "recent": 2}
    # on such small pages the header alone is more than half of what it replaces
    assert any("is larger than the 544 bytes in int8" in line or "as large as" in line for line in free.warnings)


def test_inspect_shows_the_header_of_an_entropy_slot(tmp_path):
    pool = tmp_path / "p.ckv"
    assert coldkv("pack", "--sample", "--layers", "0", "--codec", "rans-e2m1", "-o", pool).code == 0
    shown = coldkv("inspect", pool, "--slot", "0:v:4:0", "--json")
    found = json.loads(shown.out)
    assert found["codec"] == "rans-e2m1" and found["problems"] == []
    fields = {field["name"]: field for field in found["fields"]}
    assert (fields["half 1 offsets"]["at"], fields["half 1 offsets"]["bytes"]) == (168, 68)
    assert fields["scales"]["at"] == found["bytes"] - 1024
    assert sum(field["bytes"] for field in found["fields"]) == found["bytes"]
    text = coldkv("inspect", pool, "--slot", "0:v:4:0").out
    assert "entropy slot" in text and "bits per code" in text

    from coldkv.pool.info import read_slot_record

    slot = tmp_path / "one.bin"
    slot.write_bytes(read_slot_record(str(pool), 0, "v", 4, 0).record)
    alone = json.loads(coldkv("inspect", slot, "--json").out)
    assert alone["codec"] == "rans-e2m1" and alone["fields"] == found["fields"]
    slot.write_bytes(slot.read_bytes()[:46] + b"\1" + slot.read_bytes()[47:])
    assert "problem: half 0: offset 1: expected" in coldkv("inspect", slot).out


def test_an_empty_plane_gives_the_least_slot():
    plane = HotPlane("int8", torch.empty(0, 64, 256, dtype=torch.int8), torch.empty(0, 64, 4, dtype=torch.float16), 256)
    for backend in backends():
        codec = fitted(get_codec("rans-e2m1"), plane, SEED, backend)
        assert codec.slot_bytes(SEED, "int8") == 1472 == backend.encode(codec, plane, SEED)[0].shape[1]
