"""Codec ecq: slots against a reader written from FORMAT.md alone, the coder against another, damage, rate control."""

import json
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from clirun import ROOT, coldkv
from golden_table import calibration
from guardkit import refusals
from poolkit import make_dump

from coldkv.backends import CpuBackend, TorchBackend, fitted
from coldkv.codecs import get_codec, parse_codec
from coldkv.codecs.ecq import BASE_STEP
from coldkv.codecs.ecqoracle import frequencies
from coldkv.codecs.ecqslot import headers
from coldkv.errors import InputError, ToolError
from coldkv.geometry import Geometry
from coldkv.tiers import dequantize, quantize

ORACLE = TorchBackend()
SHAPES = [(256, 64), (64, 16), (80, 33), (34, 5), (2, 100), (18, 1), (40, 97)]  # head_dim, page_tokens
SMALL = Geometry(64, 16, 2)
STEPS = [2 ** (j / 16) for j in range(16)]


def backends():
    try:
        return [ORACLE, CpuBackend(threads=2)]
    except ToolError:
        return [ORACLE]


def cpu_or_skip(threads=1):
    try:
        return CpuBackend(threads=threads)
    except ToolError as error:
        pytest.skip(str(error))


def values(geometry, n=4, seed=0, spread=1.0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, geometry.page_tokens, geometry.head_dim, generator=g)
    x *= torch.exp(spread * torch.randn(geometry.head_dim, generator=g))
    return x * torch.exp(0.5 * torch.randn(n, geometry.page_tokens, 1, generator=g))


def plane_of(fmt, geometry, **how):
    return quantize(fmt, values(geometry, **how))


def raw(tensor):
    return tensor.flatten().view(torch.uint8)


# ---- FORMAT.md, section 7, in plain Python ---------------------------------------------------------------------------


def step_of(i):
    i = max(-1920, min(1920, i))
    return np.float32(np.float32(STEPS[i % 16]) * 2.0 ** (i // 16))


def classes_of_the_file():
    lines = [line for line in (ROOT / "kernels/ecq_tables.h").read_text().splitlines() if not line.startswith("//")]
    found = []
    for line in lines:
        escape, n, *f = map(int, re.findall(r"\d+", line))
        assert len(f) == n
        table = [0] * 256
        for m, share in enumerate(f):
            table[127 + m] = table[127 - m] = share
        table[255] = escape
        assert sum(table) == 4096
        found.append(table)
    return found


def bits(x):
    return struct.unpack("<I", struct.pack("<f", x))[0]


def first_spread(d):
    if d < -160:
        return 0
    if d >= 112:
        return 130048
    e, m = d // 16, round(32768 * STEPS[d % 16])
    return min(130048, m >> (5 - e) if e <= 5 else m << (e - 5))


class ReadChannel:
    def __init__(self, spread):
        self.mean, self.spread = 0, spread

    def predicted(self):
        return (self.mean + 512) >> 10

    def cls(self):
        return (bits(float(self.spread + 8)) >> 22) - 260

    def learn(self, k):
        residual = k - self.predicted()
        self.mean += 128 * k - (self.mean >> 3)
        self.spread += 64 * min(abs(residual), 127) - (self.spread >> 4)


def read_slot(slot: bytes, T, D, prior=None, mean=None, weight=None):
    """(bf16 bits [T, D], integers, row bytes, header, symbols with their class) of one slot."""
    magic, version, flags, head, step, less, packed = struct.unpack_from("<IHBBhhI", slot)
    assert (magic, version, flags & 1, flags >> 4) == (0x31514345, 1, 1, 0)
    rows, W = flags >> 1 & 1, packed & 0xFFFFFF
    x = list(struct.unpack_from("<32I", slot, 16))
    extra = max(0, T - 64) if rows else 0
    at = 144 + extra + extra % 2
    stream = list(struct.unpack_from(f"<{W}H", slot, at))
    assert not any(slot[at + 2 * W :]) and not any(slot[144 + extra : at])
    prior = np.zeros((head + 1, D), int) if prior is None else prior
    channel = [ReadChannel(first_spread(int(prior[head][c]) - less)) for c in range(D)]
    tables = classes_of_the_file()
    starts = [np.cumsum([0, *t]).tolist() for t in tables]
    symbol_of = [np.repeat(np.arange(256), t).tolist() for t in tables]
    k, coded, taken = [[0] * D for _ in range(T)], [], 0
    for t in range(T):
        for j in range(0, D, 32):
            lanes = range(min(32, D - j))
            symbols = []
            for lane in lanes:
                c = channel[j + lane].cls()
                s = symbol_of[c][x[lane] % 4096]
                x[lane] = tables[c][s] * (x[lane] // 4096) + x[lane] % 4096 - starts[c][s]
                symbols.append(s)
                coded.append((c, s))
            for lane in lanes:
                if x[lane] < 65536:
                    x[lane] = 65536 * x[lane] + stream[taken]
                    taken += 1
            for lane in lanes:
                if symbols[lane] == 255:
                    k[t][j + lane] = stream[taken] - 65536 * (stream[taken] >> 15)
                    taken += 1
                else:
                    k[t][j + lane] = channel[j + lane].predicted() + symbols[lane] - 127
                channel[j + lane].learn(k[t][j + lane])
    assert taken == W
    assert all(state >> 16 == 1 for state in x)
    ends = [byte for state in x for byte in (state & 255, state >> 8 & 255)]
    assert not any(ends[T if rows else 0 :])
    row_bytes = (ends[:T] + list(slot[144 : 144 + extra])) if rows else [0] * T
    f = np.float32
    m = np.zeros(D, f) if mean is None else mean[head]
    u = np.ones(D, f) if weight is None else weight[head]
    restored = [
        m + (np.array(k[t], f) * step_of(step - 2 * row_bytes[t])).astype(f) * u for t in range(T)
    ]  # each operation rounds to fp32
    wide = any(abs(v) > 127 for row in k for v in row)
    assert flags >> 3 == wide
    bf16 = torch.from_numpy(np.stack(restored)).to(torch.bfloat16)
    return bf16, k, row_bytes, (flags, head, step, less, W), coded


def expected_integers(v, T, D, nominal, coarser, rows, rounding, mean=None, gain=None):
    """(integers, row bytes, header step, mean magnitude code) of a page v fp32 [T, D]."""
    f = np.float32
    y = v if mean is None else ((v - mean).astype(f) * gain).astype(f)
    y = np.pad(y, ((0, 0), (0, -D % 32)))
    squares, levels = [], []

    def level(ms):
        if ms < f(2.0**-100):
            return None
        exponent = int(np.frexp(ms)[1]) - 1
        return 4 * exponent + sum(f(STEPS[j]) <= f(np.ldexp(ms, -exponent)) for j in (2, 6, 10, 14))

    for row in y:
        lane = np.zeros(32, f)
        for j in range(0, len(row), 32):
            square = row[j : j + 32] * row[j : j + 32]
            lane = square if j == 0 else lane + square
        for d in (16, 8, 4, 2, 1):
            lane[:d] = lane[:d] + lane[d : 2 * d]
        squares.append(lane[0] / f(D))
        levels.append(level(squares[-1]))
    if rows:
        top = max((one for one in levels if one is not None), default=0)
        row_bytes = [255 if one is None else min(255, top - one) for one in levels]
    else:
        total = f(0)
        for ms in squares:
            total = f(total + ms)
        top, row_bytes = level(f(total / f(T))) or 0, [0] * T
    step = nominal + 2 * top + coarser
    k = []
    for row, byte in zip(y[:, :D], row_bytes, strict=True):
        z = row * (f(1) / step_of(step - 2 * byte))
        a = np.floor(np.minimum(np.abs(z), f(32767)) + f(rounding)).astype(int)
        k.append(np.where(z < 0, -a, a).tolist())
    a = 1024 * sum(min(abs(v), 127) for row in k for v in row) // (T * D)
    return k, row_bytes, step, 160 + 2032 - (bits(float(a + 1)) >> 19)


@pytest.mark.parametrize("options", ["", "rows=off", "rounding=0.375,step=30", "step=-60"])
@pytest.mark.parametrize("head_dim,page_tokens", SHAPES)
def test_slots_are_what_the_specification_says(head_dim, page_tokens, options):
    """Integers, row bytes and header follow from the values alone; the values read are those of every backend."""
    if head_dim == 256 and options:
        pytest.skip("one set of options is enough at full size")
    geometry = Geometry(head_dim, page_tokens)
    x = values(geometry, n=3)
    x[1, 0] = 0
    x[2] *= 2.0**-90 if page_tokens % 2 else 2.0**9
    plane = quantize("bf16" if page_tokens % 2 else "int8", x)
    v = dequantize(plane).numpy()
    found = []
    for backend in backends():
        codec = fitted(parse_codec(f"ecq:{options}"), plane, geometry, backend)
        slots, valid = backend.encode(codec, plane, geometry)
        assert valid.all() and codec.check_slots(slots.numpy(), geometry, plane.format) == []
        found.append((slots, backend.decode(codec, slots, geometry, plane.format)))
        restored = backend.restore(codec, slots, geometry, plane.format)
        assert restored.format == "bf16" and torch.equal(raw(restored.codes), raw(found[-1][1].to(torch.bfloat16)))
    assert all(torch.equal(slots, found[0][0]) and torch.equal(raw(out), raw(found[0][1])) for slots, out in found)
    for slot, out, page in zip(*found[0], v, strict=True):
        bf16, k, row_bytes, (flags, head, step, less, _), _ = read_slot(slot.numpy().tobytes(), page_tokens, head_dim)
        assert torch.equal(raw(bf16.float()), raw(out)) and head == 0
        nominal = BASE_STEP + codec.step
        _, _, flat, _ = expected_integers(page, page_tokens, head_dim, nominal, 0, codec.rows == "on", codec.rounding)
        coarser = step - flat
        assert -codec.fill <= coarser <= 255 and (flags >> 2 & 1) == (coarser > 0)
        expected = expected_integers(page, page_tokens, head_dim, nominal, coarser, codec.rows == "on", codec.rounding)
        assert (k, row_bytes, step, less) == expected


def test_calibrated_slots_are_what_the_specification_says():
    from safetensors.numpy import load_file

    path = calibration(2, 64)
    parts = {name.rpartition(".")[2]: tensor for name, tensor in load_file(path).items()}
    mean, weight, prior = parts["mean"], parts["weight"], parts["prior"]
    plane = plane_of("int8", SMALL)
    v = dequantize(plane).numpy()
    for backend in backends():
        codec = parse_codec(f"ecq:calib={path}").bind(0, "k", "int8", SMALL)
        codec = fitted(codec, plane, SMALL, backend)
        slots, valid = backend.encode(codec, plane, SMALL)
        out = backend.decode(codec, slots, SMALL, "int8")
        assert valid.all()
        for i, slot in enumerate(slots):
            bf16, k, row_bytes, (_, head, step, less, _), _ = read_slot(
                slot.numpy().tobytes(), 16, 64, prior, mean, weight
            )
            assert head == i % 2 and torch.equal(raw(bf16.float()), raw(out[i]))
            gain = np.float32(1) / weight[head]
            how = (16, 64, -19), (True, 0.5, mean[head], gain)
            flat = expected_integers(v[i], *how[0], 0, *how[1])[2]
            expected = expected_integers(v[i], *how[0], step - flat, *how[1])
            assert (k, row_bytes, step, less) == (*expected[:3], -19 + step - flat)
            assert slot[15] == int(codec.calib_sha256[:2], 16)


# ---- the coder -------------------------------------------------------------------------------------------------------


def test_the_coder_loses_next_to_nothing_to_its_model_and_to_another_rans_coder():
    """Same symbols, same probabilities: words against the model's entropy and against the package constriction."""
    constriction = pytest.importorskip("constriction")
    backend, geometry = backends()[-1], Geometry(128, 64)
    plane = plane_of("int8", geometry, n=2, seed=3)
    codec = fitted(get_codec("ecq"), plane, geometry, backend)
    slots, _ = backend.encode(codec, plane, geometry)
    tables = frequencies().astype(np.float64) / 4096
    models = [constriction.stream.model.Categorical(np.maximum(p, 1e-9), perfect=False) for p in tables]
    for slot in slots:
        *_, (_, _, _, _, words), coded = read_slot(slot.numpy().tobytes(), 64, 128)
        escapes = sum(s == 255 for _, s in coded)
        ideal = sum(-np.log2(tables[c][s]) for c, s in coded) + 16 * escapes
        ours = 16 * words + 32 * 32 - 16 * 32  # the states hold 16 bits each beyond those they start with
        assert ideal <= ours + 32 * 16 and ours < 1.015 * ideal + 32 * 16
        coder = constriction.stream.stack.AnsCoder()
        for c, s in reversed(coded):
            coder.encode_reverse(np.array([s], dtype=np.int32), models[c])
        theirs = coder.num_bits() + 16 * escapes
        assert abs(16 * words - theirs) < 0.015 * theirs + 32 * 16
        assert [int(coder.decode(models[c], 1)[0]) for c, _ in coded[:200]] == [s for _, s in coded[:200]]


def test_the_sample_meets_its_promises(tmp_path):
    """Uncalibrated, rows off: NMSE at most 0.0129 for K and V at 2.9x, on every plane and head."""
    out = tmp_path / "r.json"
    done = coldkv("measure", "--sample", "--codec", "ecq", "--codec", "ecq:rows=off", "--results", out)
    assert done.code == 0, done.err
    rows = json.loads(out.read_text())["rows"]
    for codec in ("ecq", "ecq:rows=off"):
        of = [row for row in rows if row["codec"] == codec]
        assert max(row["nmse_hot"] for row in of) <= 0.0129
        assert sum(row["hot_bytes"] for row in of) >= 2.9 * sum(row["cold_bytes"] for row in of)
        assert sum(row["invalid_pages"] for row in of) == 0


# ---- rate control and hard values ------------------------------------------------------------------------------------


def test_a_small_slot_makes_pages_coarser_and_a_large_one_finer():
    plane = plane_of("int8", SMALL, n=6)
    hot = dequantize(plane)
    for backend in backends():
        lengths = backend.lengths(get_codec("ecq"), plane, SMALL)
        mean = fitted(get_codec("ecq"), plane, SMALL, backend).slot_bytes(SMALL, "int8")
        assert mean == -(-int(np.ceil(float(lengths.double().mean()))) // 16) * 16
        errors = []
        for stride in (160, 272, mean, 2 * mean):
            codec = parse_codec(f"ecq:slot_bytes={stride}")
            slots, valid = backend.encode(codec, plane, SMALL)
            assert valid.all() and slots.shape[1] == stride
            coarser = torch.from_numpy(headers(slots.numpy())["flags"] & 4 != 0)
            assert torch.equal(coarser, lengths > stride)
            errors.append(float(((backend.decode(codec, slots, SMALL, "int8") - hot) ** 2).sum()))
        assert errors == sorted(errors, reverse=True) and errors[-1] < 0.5 * errors[2]
        plain = parse_codec(f"ecq:fill=0,slot_bytes={2 * mean}")
        slots, _ = backend.encode(plain, plane, SMALL)
        error = float(((backend.decode(plain, slots, SMALL, "int8") - hot) ** 2).sum())
        assert error > 1.5 * errors[-1]  # the room is not used


@pytest.mark.parametrize("case", ["zero", "negative zero", "tiny", "huge", "one", "biased", "denormal"])
def test_hard_values(case):
    g = Geometry(64, 16)
    x = values(g, n=2)
    if case in ("zero", "negative zero"):
        x = torch.zeros_like(x) if case == "zero" else -torch.zeros_like(x)
    x = {"tiny": x * 2.0**-48, "huge": x * 2.0**55, "denormal": x * 2.0**-130, "biased": x + 1000.0}.get(case, x)
    if case == "one":
        x = torch.zeros_like(x)
        x[:, 3, 5] = -7.0
    plane = quantize("bf16", x)
    v = dequantize(plane)
    found = []
    for backend in backends():
        codec = fitted(get_codec("ecq"), plane, g, backend)
        slots, valid = backend.encode(codec, plane, g)
        assert valid.all()
        found.append((slots, backend.decode(codec, slots, g, "bf16")))
    assert all(torch.equal(slots, found[0][0]) and torch.equal(raw(out), raw(found[0][1])) for slots, out in found)
    out = found[0][1]
    assert out.isfinite().all()
    if case in ("zero", "negative zero", "denormal"):
        assert not out.any()
    else:
        assert ((out.double() - v) ** 2).sum() < 0.05 * (v.double() ** 2).sum()


def test_values_that_cannot_be_coded_are_refused_alone():
    x = values(SMALL, n=4)
    for i, bad in enumerate((float("inf"), float("nan"), 1e30)):
        x[i, 7, 9] = bad
    from coldkv.tiers import HotPlane

    plane = HotPlane("bf16", x.to(torch.bfloat16), None, 64)
    for backend in backends():
        for options in ("", ",rows=off"):
            codec = parse_codec(f"ecq:slot_bytes=640{options}")
            assert backend.lengths(codec, plane, SMALL)[:3].tolist() == [2**31 - 1] * 3
            slots, valid = backend.encode(codec, plane, SMALL)
            assert valid.tolist() == [0, 0, 0, 1] and not slots[:3].any()


def test_escapes_of_every_size():
    g = Geometry(64, 16)
    x = torch.zeros(1, 16, 64)
    x[0, ::3, ::5] = torch.exp2(torch.arange(6 * 13).reshape(6, 13) / 5.0) * torch.tensor([1.0, -1.0] * 39).reshape(
        6, 13
    )
    plane = quantize("bf16", x)
    found = []
    for backend in backends():
        codec = fitted(parse_codec("ecq:step=-200,rows=off,fill=0"), plane, g, backend)
        slots, valid = backend.encode(codec, plane, g)
        assert valid.all()
        found.append(slots)
        out = backend.decode(codec, slots, g, "bf16")
        assert headers(slots.numpy())["flags"][0] & 8
    assert all(torch.equal(slots, found[0]) for slots in found)
    bf16, k, *_ = read_slot(found[0][0].numpy().tobytes(), 16, 64)
    assert torch.equal(raw(bf16.float()), raw(out[0]))
    assert max(abs(v) for row in k for v in row) == 32767


def test_threads_and_formats_do_not_matter_and_the_plain_build_is_the_same():
    from coldkv import native

    plain = cpu_or_skip()
    plain._library = native.build_host(("-DCKV_NO_SIMD",))
    for fmt in ("int8", "bf16", "fp16", "fp8", "nvfp4", "iso3"):
        plane = plane_of(fmt, Geometry(80, 33, 3), n=9)
        codec = fitted(get_codec("ecq"), plane, Geometry(80, 33, 3), CpuBackend(threads=1))
        every = [CpuBackend(threads=1), CpuBackend(threads=3), plain, ORACLE]
        slots = [backend.encode(codec, plane, Geometry(80, 33, 3))[0] for backend in every]
        values_read = [backend.decode(codec, slots[0], Geometry(80, 33, 3), fmt) for backend in every]
        assert all(torch.equal(other, slots[0]) for other in slots)
        assert all(torch.equal(raw(other), raw(values_read[0])) for other in values_read)


# ---- damage ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sound():
    plane = plane_of("int8", SMALL, n=4)
    codec = fitted(get_codec("ecq"), plane, SMALL, ORACLE)
    return codec, ORACLE.encode(codec, plane, SMALL)[0]


@pytest.mark.parametrize(
    "at,data,problem",
    [
        (0, b"\x52", "magic: expected 0x31514345"),
        (4, b"\2\0", "version: expected 1, found 2"),
        (6, b"\2", "flags: expected an odd number below 16, found 2"),
        (6, b"\x13", "flags: expected an odd number below 16, found 19"),
        (7, b"\2", "head: expected 0 to 1, found 2"),
        (8, struct.pack("<h", 1681), "step: expected -1680 to 1680, found 1681"),
        (8, struct.pack("<h", -32768), "step: expected -1680 to 1680, found -32768"),
        (12, b"\xff\xff\0", "stream: expected an end within"),
        (15, b"\1", "calibration byte: expected 0, found 1"),
        (-1, b"\1", "padding: expected zero bytes"),
    ],
)
def test_every_damaged_field_is_named(sound, at, data, problem):
    codec, slots = sound
    bad = slots.clone()
    at %= bad.shape[1]
    if "padding" in problem:
        bad = torch.nn.functional.pad(bad, (0, 16))
        codec, at = codec.with_stride(bad.shape[1]), at + 16
    bad[1, at : at + len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    found = codec.check_slots(bad.numpy(), SMALL, "int8")
    assert [index for index, _ in found] == [1] and problem in found[0][1]
    for backend in backends():
        if "padding" in problem and backend is not ORACLE:
            continue  # decoding does not need it
        for read in (backend.decode, backend.restore):
            with pytest.raises(InputError, match="slot 1: "):
                read(codec, bad, SMALL, "int8")


def test_damaged_streams_are_refused_or_read_alike(sound):
    """A flipped bit of states or stream nearly always ends elsewhere; what no reader can see reads alike and finite."""
    codec, slots = sound
    generator = torch.Generator().manual_seed(5)
    refused = 0
    for attempt in range(120):
        bad = slots[:1].clone()
        at = 10 + attempt % 2 if attempt < 8 else int(torch.randint(16, slots.shape[1], (1,), generator=generator))
        bad[0, at] ^= 1 << int(torch.randint(0, 8, (1,), generator=generator))
        found = []
        for backend in backends():
            try:
                found.append(backend.decode(codec, bad, SMALL, "int8"))
            except InputError as error:
                assert "slot 0: " in str(error)
                found.append(None)
        refused += found[0] is None
        if None in found:
            padding = any("padding" in problem for _, problem in codec.check_slots(bad.numpy(), SMALL, "int8"))
            assert padding or found == [None] * len(found)
        else:
            assert all(torch.equal(raw(out), raw(found[0])) and out.isfinite().all() for out in found)
    assert refused > 100
    with pytest.raises(InputError, match="slot 0: the stream does not end where its header says"):
        short = slots[:1].clone()
        words = int(headers(short.numpy())["words"][0]) - 1
        short[0, 12:15] = torch.tensor(list(words.to_bytes(3, "little")), dtype=torch.uint8)
        short[0, 144 + 2 * words :] = 0
        backends()[-1].decode(codec, short, SMALL, "int8")


RULES = """
ORACLE_EVERY, UNREAD = 20, ("padding",)

def damage(bad, attempt):
    random_bytes(bad, attempt, 6, 16)
    if attempt % 3 == 0:
        bad[0, 16:144] = torch.randint(0, 256, (128,), generator=generator, dtype=torch.uint8)
    if attempt % 9 == 0:
        bad[0, 144:] = torch.randint(0, 256, (stride - 144,), generator=generator, dtype=torch.uint8)

def accepted(out):
    assert out.isfinite().all()
"""


@pytest.mark.parametrize("head_dim,page_tokens,tries", [(256, 64, 200), (64, 16, 600), (34, 5, 600), (2, 100, 600)])
def test_damaged_slots_never_make_a_decoder_read_outside(head_dim, page_tokens, tries):
    """The slot lies against memory that may not be touched; a read outside would end the process."""
    cpu_or_skip()
    refused = refusals("ecq", RULES, head_dim, page_tokens, tries)
    assert tries // 2 < refused <= tries


# ---- pools and inspect -----------------------------------------------------------------------------------------------


def test_options_that_make_no_sense_are_errors():
    for options, problem in (
        ("step=301", "step: expected an integer from -300 to 300"),
        ("fill=64", "fill: expected an integer from 0 to 63"),
        ("rows=maybe", "rows: expected on or off"),
        ("rounding=0.7", "rounding: expected a number from 0 to 0.5"),
        ("calib=/nowhere/c.safetensors", "calibration /nowhere/c.safetensors: cannot be read"),
    ):
        with pytest.raises(InputError, match=problem):
            parse_codec(f"ecq:{options}")
    codec = parse_codec("ecq:rows=off,step=3,fill=0,rounding=0.4")
    assert (
        codec.label == "ecq:step=3,rows=off,fill=0,rounding=0.4"
        and get_codec("ecq", codec.config).config == codec.config
    )
    with pytest.raises(InputError, match="slot_bytes: expected at least 144 for 16 tokens x 64"):
        parse_codec("ecq:slot_bytes=128").slot_bytes(SMALL, "int8")


@pytest.fixture
def calibrated(tmp_path):
    """A dump of one plane-pair and a calibration file for it, beside each other."""
    make_dump(tmp_path / "d.safetensors", {0: {"tokens": 64, "head_dim": 64}})
    text = Path(calibration(2, 64)).read_bytes()
    length = int.from_bytes(text[:8], "little")
    header = json.loads(text[8 : 8 + length])
    for name in [name for name in header if ".k." in name]:
        header[name.replace(".k.", ".v.")] = header[name]
    body = text[8 + length :]
    header = {name: entry for name, entry in header.items() if ".k." in name or name.startswith("__")}
    size = len(body)
    for name in [name for name in header if ".k." in name]:
        begin, end = header[name]["data_offsets"]
        header[name.replace(".k.", ".v.")] = header[name] | {"data_offsets": [begin + size, end + size]}
    header["__metadata__"] = {"coldkv.calibration": json.dumps({"version": 1, "steps": {"0": {"k": -19, "v": -21}}})}
    head = json.dumps(header).encode()
    (tmp_path / "c.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + body + body)
    return tmp_path


def test_a_calibrated_pool_goes_round_and_needs_its_file(calibrated):
    dump, calib, pool = (str(calibrated / name) for name in ("d.safetensors", "c.safetensors", "p.ckv"))
    done = coldkv("pack", dump, "--codec", f"ecq:calib={calib}", "--cold-keep-tokens", "0", "--cold-sink-tokens", "0",
                  "--tier", "int8", "-o", pool)  # fmt: skip
    assert done.code == 0, done.err
    assert coldkv("verify", pool, "--against", dump).code == 0
    back = [str(calibrated / name) for name in ("one.safetensors", "two.safetensors")]
    for path, backend in zip(back, ("torch", "auto"), strict=True):
        done = coldkv("restore", pool, "--backend", backend, "-o", path)
        assert done.code == 0, done.err
    from safetensors.torch import load_file

    one, two = map(load_file, back)
    assert all(torch.equal(one[name].view(torch.uint8), two[name].view(torch.uint8)) for name in one)
    shown = json.loads(coldkv("inspect", pool, "--slot", "0:v:1:1", "--json").out)
    assert shown["codec"] == "ecq" and shown["problems"] == []

    text = (calibrated / "c.safetensors").read_bytes()
    (calibrated / "c.safetensors").write_bytes(text[:-1] + bytes([text[-1] ^ 1]))
    done = coldkv("restore", pool, "-o", back[0])
    assert done.code == 2 and "c.safetensors: expected sha256" in done.err and len(done.err.splitlines()) <= 2
    done = coldkv("verify", pool)
    assert done.code == 1 and "c.safetensors: expected sha256" in done.out
    (calibrated / "c.safetensors").unlink()
    done = coldkv("restore", pool, "-o", back[0])
    assert done.code == 2 and "c.safetensors: cannot be read" in done.err


def test_inspect_shows_the_fields_of_a_slot(tmp_path):
    pool = tmp_path / "p.ckv"
    assert coldkv("pack", "--sample", "--layers", "0", "--codec", "ecq", "-o", pool).code == 0
    found = json.loads(coldkv("inspect", pool, "--slot", "0:v:4:0", "--json").out)
    assert found["codec"] == "ecq" and found["problems"] == []
    fields = {field["name"]: field for field in found["fields"]}
    assert (fields["states"]["at"], fields["states"]["bytes"]) == (16, 128)
    assert (fields["step"]["at"], fields["stream"]["at"]) == (8, 144)
    assert sum(field["bytes"] for field in found["fields"]) == found["bytes"]
    text = coldkv("inspect", pool, "--slot", "0:v:4:0").out
    assert "bits per value" in text and "row bytes" in text

    from coldkv.pool.info import read_slot_record

    slot = tmp_path / "one.bin"
    slot.write_bytes(read_slot_record(str(pool), 0, "v", 4, 0).record)
    alone = json.loads(coldkv("inspect", slot, "--json").out)
    assert alone["codec"] == "ecq" and alone["fields"] == found["fields"]
    slot.write_bytes(slot.read_bytes()[:15] + b"\1" + slot.read_bytes()[16:])
    assert "problem: calibration byte: expected 0, found 1" in coldkv("inspect", slot).out


def test_the_coder_alone_gives_back_integers_of_every_size():
    """`ckv_ecq_code_cpu` and `ckv_ecq_integers_cpu`; a damaged slot is marked."""
    import ctypes

    from coldkv.native import KernelError, PlaneDesc

    cpu = cpu_or_skip()
    generator = np.random.default_rng(7)
    for T, D in ((64, 80), (16, 34), (1, 2)):
        k = np.round(generator.standard_t(1.2, (3, T, D)) * 3).clip(-32767, 32767).astype(np.int16)
        desc, one = ctypes.byref(PlaneDesc(0, T, D, 0, 3)), ctypes.c_int(1)
        slots, words = np.zeros((3, (T * D * 4 + 160) // 16 * 16), np.uint8), np.zeros(3, np.int32)
        size = ctypes.c_int64(slots.shape[1])
        cpu._library.call("ecq_code", desc, k.ctypes, slots.ctypes, size, words.ctypes, one)
        back, how = np.zeros_like(k), get_codec("ecq").native_params(Geometry(D, T), "int8", "cpu")
        cpu._library.call("ecq_integers", desc, slots.ctypes, size, back.ctypes, *how, one)
        assert (back == k).all() and (words > 0).any() == (T > 1)
        slots[1, 0] ^= 1
        with pytest.raises(KernelError):
            cpu._library.call("ecq_integers", desc, slots.ctypes, size, back.ctypes, *how, one)
        assert (back[1] == -32768).all() and (back[[0, 2]] == k[[0, 2]]).all()


def test_bench_entropy_prints_both_coders():
    pytest.importorskip("zstandard")
    cpu_or_skip()
    done = coldkv("bench", "--entropy", "--head-pages", "8", "--repeat", "1", "--json")
    assert done.code == 0, done.err
    rows = json.loads(done.out)["rows"]
    assert [(row["op"], row["coder"]) for row in rows] == [
        (op, coder) for op in ("encode", "decode") for coder in ("ecq", "zstd -1")
    ]
    assert rows[0]["bytes"] < rows[1]["bytes"]
