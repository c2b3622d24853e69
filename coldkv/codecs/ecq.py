"""Codec `ecq`: entropy-coded quantization, a step per page, a scale byte per row, an adaptive model per channel."""

import copy
import ctypes
import re
from functools import cache

import numpy as np

from coldkv.codecs.sized import NEVER, SizedCodec
from coldkv.errors import InputError
from coldkv.geometry import Geometry, round_up

MAGIC = 0x31514345
HEADER = np.dtype([("magic", "<u4"), ("version", "<u2"), ("flags", "u1"), ("head", "u1"), ("step", "<i2"),
                   ("prior", "<i2"), ("words", "<u4")])  # fmt: skip
VALID, ROWS, COARSER, WIDE = 1, 2, 4, 8
LANES = 32
STATES_AT, STREAM_AT = 16, 16 + 4 * LANES
CLASSES, ESCAPE, REACH, TOTAL_BITS = 28, 255, 127, 12
MOST_COARSER, MOST_WORDS = 255, (1 << 24) - 1
MOST_STEP = 1680  # of a header: beyond what any encoder writes, and small enough that restored values stay finite
BASE_STEP = -23  # sixteenths of an octave: the coarsest with an NMSE of at most 0.0129 on every plane of the sample


class EcqParams(ctypes.Structure):
    """`ckv_ecq_params` of kernels/coldkv.h; `tensors` are what its pointers point to, by field."""

    tensors: dict = {}

    _fields_ = [
        ("mean", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("gain", ctypes.c_void_p),
        ("prior", ctypes.c_void_p),
        ("heads", ctypes.c_int32),
        ("step", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("fill", ctypes.c_int32),
        ("rounding", ctypes.c_float),
        ("check", ctypes.c_uint32),
    ]


@cache
def frequencies() -> np.ndarray:
    """uint16 `[28, 256]`: frequency of every symbol (residual + 127, then the escape) in every class, of 4,096."""
    from coldkv.native import kernels_dir

    text = re.sub(r"//.*", "", (kernels_dir() / "ecq_tables.h").read_text())
    raw = [int(word) for word in re.findall(r"\d+", text)]
    table, at = np.zeros((CLASSES, 256), dtype=np.uint16), 0
    for row in table:
        escape, count = raw[at : at + 2]
        per = raw[at + 2 : at + 2 + count]
        row[REACH : REACH + count] = per
        row[REACH - count + 1 : REACH + 1] = per[::-1]
        row[ESCAPE] = escape
        at += 2 + count
    return table


class Ecq(SizedCodec):
    """Integers of a uniform quantizer, coded by 32 interleaved rANS lanes (kernels/FORMAT.md).

    Options: `step`, added to the step of the calibration or to the default, in sixteenths of an octave (positive is
    coarser); `rows` "on" or "off"; `fill`, how many sixteenths finer a page may be where its slot has room;
    `rounding`, 0.5 for nearest; `calib`, a calibration file of `coldkv tune`; `slot_bytes` for every plane.
    """

    id = "ecq"
    version = 1
    formats = ("int8", "bf16", "fp16", "fp8", "nvfp4", "iso3")
    native = "ecq"
    head_bytes = HEADER.itemsize

    def __init__(
        self,
        step: int = 0,
        rows: str = "on",
        fill: int = 15,
        rounding: float = 0.5,
        calib: str | None = None,
        calib_sha256: str | None = None,
        slot_bytes: int | None = None,
    ):
        super().__init__(slot_bytes)
        for name, value, low, high in (("step", step, -300, 300), ("fill", fill, 0, 63)):
            if type(value) is not int or not low <= value <= high:
                raise InputError(f"codec ecq: {name}: expected an integer from {low} to {high}, found {value!r}")
        if rows not in ("on", "off"):
            raise InputError(f"codec ecq: rows: expected on or off, found {rows!r}")
        if isinstance(rounding, bool) or not isinstance(rounding, int | float) or not 0 <= rounding <= 0.5:
            raise InputError(f"codec ecq: rounding: expected a number from 0 to 0.5, found {rounding!r}")
        self.step, self.rows, self.fill, self.rounding = step, rows, fill, float(rounding)
        self.calib, self.calib_sha256 = calib, calib_sha256
        self._plane = None  # PlaneCalibration of the plane this codec is bound to
        if calib is not None:
            from coldkv.calibration import open_calibration

            self.calib_sha256 = open_calibration(calib, calib_sha256).sha256

    @property
    def config(self):
        options = {
            "step": (self.step, 0),
            "rows": (self.rows, "on"),
            "fill": (self.fill, 15),
            "rounding": (self.rounding, 0.5),
            "calib": (self.calib, None),
        }
        found = {key: value for key, (value, default) in options.items() if value != default}
        if self.calib is not None:
            found["calib_sha256"] = self.calib_sha256
        return {**found, **super().config}

    @property
    def label(self):
        asked = copy.copy(self)
        asked.calib_sha256 = None
        return super(Ecq, asked).label.replace(",calib_sha256=null", "")

    def bind(self, layer, plane, fmt, geometry):
        if self.calib is None:
            return self
        from coldkv.calibration import open_calibration

        bound = copy.copy(self)
        bound._plane = open_calibration(self.calib, self.calib_sha256).plane(layer, plane, geometry)
        return bound

    # ---- sizes

    def least_stride(self, geometry, fmt):
        return round_up(_stream_at(geometry.page_tokens, True), 16)

    def choose_stride(self, lengths, geometry, fmt, *, overflow_bytes=None):
        """The mean of what head-pages need at the nominal step: shorter ones are coded finer, longer ones coarser."""
        lengths = lengths[lengths != NEVER]
        least = self.least_stride(geometry, fmt)
        return max(least, round_up(int(np.ceil(lengths.mean())), 16)) if len(lengths) else least

    def lengths_torch(self, plane, geometry):
        import torch

        self.require_fit(plane.format)
        page = _Pages(self, plane, geometry)
        words, _ = page.attempt(torch.zeros(page.n, dtype=torch.int64))
        need = _stream_at(geometry.page_tokens, page.rows) + 2 * words
        never = ~page.valid | (words > MOST_WORDS)
        return torch.where(never, torch.full_like(need, NEVER), need).to(torch.int32)

    def residual_magnitudes(self, plane, geometry):
        """Mean |residual| of each channel at the nominal step, which `prior` tells; fp64 `[kv_heads, head_dim]`."""
        import torch

        page = _Pages(self, plane, geometry)
        rows = page.integers(torch.zeros(page.n, dtype=torch.int64))[0].transpose(0, 1).cpu().numpy()
        model, total = _Model(np.zeros_like(rows[0])), np.zeros_like(rows[0])
        for k in rows:
            residual = k - model.predicted()
            total += np.abs(residual).clip(max=REACH)
            model.learn(k, residual)
        mean = total[:, : page.D] / page.T
        return torch.from_numpy(mean.reshape(-1, geometry.kv_heads, page.D).mean(axis=0))

    # ---- parameters

    @property
    def nominal_step(self) -> int:
        """Sixteenths of an octave relative to a row's root mean square."""
        return self.step + (BASE_STEP if self._plane is None else self._plane.step)

    @property
    def check(self) -> int:
        """Byte in every slot that tells calibrations apart; 0 without one."""
        return int(self.calib_sha256[:2], 16) if self._plane is not None else 0

    def _require_bound(self) -> None:
        if self.calib is not None and self._plane is None:
            raise InputError("codec ecq: with a calibration it works on planes of a known layer; call bind first")

    def channels(self, heads: int, head_dim: int, device):
        """Torch: (mean, weight, gain fp32, prior int32), each `[heads, head_dim]`."""
        import torch

        self._require_bound()
        if self._plane is None:
            one = torch.ones(heads, head_dim, device=device)
            return 0 * one, one, one, torch.zeros(heads, head_dim, dtype=torch.int32, device=device)
        p = self._plane
        arrays = (p.mean, p.weight, np.float32(1) / p.weight, p.prior.astype(np.int32))
        return tuple(torch.from_numpy(a.copy()).to(device) for a in arrays)

    def native_params(self, geometry, fmt, device):
        import torch

        self._require_bound()
        p = EcqParams(
            None, None, None, None, geometry.kv_heads, self.nominal_step, int(self.rows == "on"), self.fill,
            self.rounding, self.check,
        )  # fmt: skip
        if self._plane is not None:
            key = str(device)
            if key not in self._plane.on_device:
                c = self._plane
                arrays = (c.mean, c.weight, np.float32(1) / c.weight, c.prior)
                self._plane.on_device[key] = [torch.from_numpy(a.copy()).to(device) for a in arrays]
            p.tensors = dict(zip(("mean", "weight", "gain", "prior"), self._plane.on_device[key], strict=True))
            for name, tensor in p.tensors.items():
                setattr(p, name, tensor.data_ptr())
        return (ctypes.byref(p),)

    # ---- slots

    def encode_torch(self, plane, geometry):
        import torch

        self.require_fit(plane.format)
        page = _Pages(self, plane, geometry)
        stride = self.slot_bytes(geometry, plane.format)
        room = min(MOST_WORDS, (stride - _stream_at(geometry.page_tokens, page.rows)) // 2)
        coarser = page.find_step(room, self.fill)
        valid = page.valid & (coarser <= MOST_COARSER)
        words, coded = page.attempt(coarser.clamp(max=MOST_COARSER))
        slots = page.slots(coded, words, coarser, stride)
        slots *= valid[:, None].to(torch.uint8)
        return slots, valid.to(torch.int32)

    def decode_torch(self, slots, geometry, fmt):
        k, step, head = _read(self, slots, geometry)
        mean, weight, _, _ = (a[head] for a in self.channels(geometry.kv_heads, geometry.head_dim, slots.device))
        import torch

        values = mean[:, None] + k.float() * step[:, :, None] * weight[:, None]
        return values.to(torch.bfloat16).float()

    def restored_format(self, fmt):
        return "bf16"

    def restore_torch(self, slots, geometry, fmt):
        import torch

        from coldkv.tiers import HotPlane

        values = self.decode_torch(slots, geometry, fmt).to(torch.bfloat16)
        return HotPlane("bf16", values, None, geometry.head_dim)

    def headers(self, slots: np.ndarray) -> np.ndarray:
        """Structured array of HEADER, one per slot."""
        return np.ascontiguousarray(slots[:, : HEADER.itemsize]).view(HEADER)[:, 0]

    def slot_fields(self, record, geometry, fmt):
        return _slot_fields(self, record, geometry)

    def odd_heads(self, heads, geometry, stride):
        h = self.headers(heads)
        words, flags = h["words"].astype(np.int64), h["flags"]
        starts = np.where(flags & ROWS, _stream_at(geometry.page_tokens, True), STREAM_AT)
        sound = (h["magic"] == MAGIC) & (h["version"] == self.version) & (flags & VALID != 0) & (flags < 16)
        sound &= (h["head"] < geometry.kv_heads) & (np.abs(h["step"].astype(np.int64)) <= MOST_STEP)
        sound &= (words >> 24 == self.check) & (starts + 2 * (words & MOST_WORDS) <= stride)
        return not sound.all()

    def check_slots(self, slots, geometry, fmt):
        if slots.ndim != 2 or slots.shape[1] < self.least_stride(geometry, fmt):
            return [(0, f"slot length: expected at least {self.least_stride(geometry, fmt)}, found {slots.shape[-1]}")]
        h = self.headers(slots)
        T, problems = geometry.page_tokens, []
        for i, one in enumerate(h):
            words, check = int(one["words"]) & MOST_WORDS, int(one["words"]) >> 24
            start = _stream_at(T, bool(one["flags"] & ROWS))
            end = start + 2 * words
            if one["magic"] != MAGIC:
                problems.append((i, f"magic: expected 0x{MAGIC:08x}, found 0x{one['magic']:08x}"))
            elif one["version"] != self.version:
                problems.append((i, f"version: expected {self.version}, found {one['version']}"))
            elif not one["flags"] & VALID or one["flags"] > 15:
                problems.append((i, f"flags: expected an odd number below 16, found {one['flags']}"))
            elif one["head"] >= geometry.kv_heads:
                problems.append((i, f"head: expected 0 to {geometry.kv_heads - 1}, found {one['head']}"))
            elif abs(int(one["step"])) > MOST_STEP:
                problems.append((i, f"step: expected -{MOST_STEP} to {MOST_STEP}, found {one['step']}"))
            elif check != self.check:
                problems.append((i, f"calibration byte: expected {self.check}, found {check}"))
            elif end > slots.shape[1]:
                problems.append((i, f"stream: expected an end within {slots.shape[1]} bytes, found {end}"))
            elif slots[i, end:].any() or slots[i, STREAM_AT + _extra_rows(T, bool(one["flags"] & ROWS)) : start].any():
                problems.append((i, "padding: expected zero bytes"))
        return problems


def _row_byte_text(codec: "Ecq", record: bytes, geometry: Geometry) -> str:
    """The row bytes that the lanes end with, which only decoding finds."""
    slot = np.frombuffer(record, np.uint8)[None]
    if not codec.headers(slot)["flags"][0] & ROWS:
        return "no row bytes: one scale for the page"
    heads = Geometry(geometry.head_dim, geometry.page_tokens, 256)
    known = record[15] == 0 or codec._plane is not None
    if not known or codec.check_slots(slot, heads, "int8"):
        return "the row bytes come out at the end of decoding"
    prior = np.zeros((256, geometry.head_dim), np.int64) if codec._plane is None else codec._plane.prior
    _, row_bytes, bad = _integers(slot, codec.headers(slot), prior, geometry)
    if bad[0]:
        return "the stream does not end where its header says: damaged"
    low, middle, high = (int(part) for part in np.percentile(row_bytes, (0, 50, 100)))
    return (
        f"row bytes at the end of decoding: {low} to {high}, median {middle} eighths of an octave below the largest row"
    )


def _slot_fields(codec: "Ecq", record: bytes, geometry: Geometry) -> list[tuple[int, int, str, str]]:
    h = np.frombuffer(record, HEADER, 1)[0]
    flags, words = int(h["flags"]), int(h["words"]) & MOST_WORDS
    names = ((VALID, "valid"), (ROWS, "row bytes"), (COARSER, "coarser than nominal"), (WIDE, "integers beyond int8"))
    said = [name for bit, name in names if flags & bit] + ([f"unknown bits {flags & ~15:#x}"] if flags > 15 else [])
    T, rows = geometry.page_tokens, bool(flags & ROWS)
    extra, start = _extra_rows(T, rows), _stream_at(T, rows)
    end = min(len(record), start + 2 * words)
    found = [
        (0, 4, "magic", "ecq slot" if h["magic"] == MAGIC else f"expected {MAGIC:#010x}, found {h['magic']:#010x}"),
        (4, 2, "version", str(h["version"])),
        (6, 1, "flags", ", ".join(said) or "not valid"),
        (7, 1, "head", str(h["head"])),
        (8, 2, "step", f"{h['step']}: 2^({h['step']}/16) = {2 ** (int(h['step']) / 16):.6g}, of a row with row byte 0"),
        (10, 2, "prior", f"{h['prior']}: taken from every channel's prior"),
        (12, 3, "words", f"{words:,}"),
        (15, 1, "calibration", "none" if not record[15] else f"sha256 begins with {record[15]:02x}"),
        (STATES_AT, 4 * LANES, "states", f"{LANES} lanes; {_row_byte_text(codec, record, geometry)}"),
    ]
    if extra:
        beyond = record[STREAM_AT : STREAM_AT + extra]
        found.append((STREAM_AT, extra, "row bytes", f"rows {2 * LANES}..{T - 1}: {min(beyond)} to {max(beyond)}"))
    if start > STREAM_AT + extra:
        found.append((STREAM_AT + extra, start - STREAM_AT - extra, "unused", "zero"))
    found.append((start, end - start, "stream", f"{8 * (end - start) / geometry.elements:.3f} bits per value"))
    return found + ([(end, len(record) - end, "unused", "zero")] if end < len(record) else [])


def _extra_rows(page_tokens: int, rows: bool) -> int:
    return max(0, page_tokens - 2 * LANES) if rows else 0


def _stream_at(page_tokens: int, rows: bool) -> int:
    return STREAM_AT + round_up(_extra_rows(page_tokens, rows), 2)


# ---- the oracle: everything below works on all head-pages of a plane side by side ---------------------------------


def _step_value(i):
    """int64 tensor of sixteenths of an octave -> fp32 steps, clamped to 2^-120 .. 2^120."""
    import torch

    i = i.clamp(-1920, 1920)
    mantissa = torch.tensor([np.float32(2 ** (j / 16)) for j in range(16)], device=i.device).view(torch.int32)
    return (mantissa[i & 15] + ((i >> 4).to(torch.int32) << 23)).view(torch.float32)


def _level(ms):
    """fp32 mean squares -> eighths of an octave of their roots; zero rows get a very low level."""
    import torch

    u = ms.view(torch.int32)
    m = ((u & 0x7FFFFF) | 0x3F800000).view(torch.float32)
    level = 4 * ((u >> 23) - 127).long()
    for j in (1, 3, 5, 7):
        level = level + (m >= float(np.float32(2 ** (j / 8)))).long()
    return torch.where(ms < 2.0**-100, torch.full_like(level, -(1 << 20)), level)


# The coder and its model are numpy: small steps one after the other, of which torch would mostly pay the dispatch.


def _prior_spread(d: np.ndarray) -> np.ndarray:
    mantissa = np.array([round(32768 * 2 ** (j / 16)) for j in range(16)], dtype=np.int64)
    e, m = d >> 4, mantissa[d & 15]
    spread = np.where(e <= 5, m >> (5 - e).clip(0, 31), m << (e - 5).clip(0, 1))
    return np.where(d < -160, 0, np.where(d >= 112, REACH << 10, spread)).clip(max=REACH << 10)


def _class(spread: np.ndarray) -> np.ndarray:
    return ((spread + 8).astype(np.float32).view(np.int32) >> 22).astype(np.int64) - 260


class _Model:
    """Channel states int64 `[n, P]` of one pass over the rows."""

    def __init__(self, spread: np.ndarray):
        self.mean, self.spread = np.zeros_like(spread), spread

    def predicted(self):
        return (self.mean + 512) >> 10

    def learn(self, k, residual):
        self.mean = self.mean + ((k << 7) - (self.mean >> 3))
        self.spread = self.spread + ((np.abs(residual).clip(max=REACH) << 6) - (self.spread >> 4))


@cache
def _starts() -> tuple[np.ndarray, np.ndarray]:
    """(frequency, start) int64 `[28, 256]`."""
    f = frequencies().astype(np.int64)
    return f, np.cumsum(f, 1) - f


class _Pages:
    """Head-pages on their way into slots."""

    def __init__(self, codec: Ecq, plane, geometry: Geometry):
        import torch

        from coldkv.tiers import dequantize

        v = dequantize(plane)
        self.codec, self.n, self.T, self.D = codec, v.shape[0], v.shape[1], v.shape[2]
        self.rows, self.P = codec.rows == "on", round_up(self.D, LANES)
        self.head = torch.arange(self.n, device=v.device) % geometry.kv_heads
        mean, _, gain, prior = (a[self.head] for a in codec.channels(geometry.kv_heads, self.D, v.device))
        self.y = torch.nn.functional.pad((v - mean[:, None]) * gain[:, None], (0, self.P - self.D))
        self.prior = torch.nn.functional.pad(prior.long(), (0, self.P - self.D))
        ms = self._mean_squares()
        total = torch.zeros_like(ms[:, 0])
        for t in range(self.T):
            total = total + ms[:, t]
        self.valid = (ms <= torch.finfo(torch.float32).max).all(dim=1)
        level = _level(ms)
        if self.rows:
            reference = level.amax(dim=1)
        else:
            page = total / float(self.T)
            self.valid &= page <= torch.finfo(torch.float32).max
            reference = _level(page)
        self.reference = torch.where(reference == -(1 << 20), torch.zeros_like(reference), reference)
        bytes_ = (self.reference[:, None] - level).clamp(0, 255)
        self.row_bytes = bytes_ if self.rows else torch.zeros_like(bytes_)
        self.y = torch.where(self.valid[:, None, None], self.y, torch.zeros_like(self.y))
        self.reference = torch.where(self.valid, self.reference, torch.zeros_like(self.reference))

    def _mean_squares(self):
        lanes = (self.y * self.y).reshape(self.n, self.T, -1, LANES)
        s = lanes[:, :, 0]
        for j in range(1, lanes.shape[2]):
            s = s + lanes[:, :, j]
        d = LANES // 2
        while d:
            s = s[..., :d] + s[..., d : 2 * d]
            d //= 2
        return s[..., 0] / float(self.D)

    def part(self, index) -> "_Pages":
        """The head-pages `index` (int64) alone."""
        found = copy.copy(self)
        found.n = len(index)
        for name in ("head", "y", "prior", "valid", "reference", "row_bytes"):
            setattr(found, name, getattr(self, name)[index])
        return found

    def fits(self, index, coarser, room: int):
        return self.part(index).attempt(coarser[index])[0] <= room

    def find_step(self, room: int, fill: int):
        """int64 `[n]`: sixteenths above the nominal step, MOST_COARSER + 1 where nothing fits."""
        import torch

        chosen, below = torch.zeros(self.n, dtype=torch.int64), torch.full((self.n,), -fill - 1)
        able = self.valid.nonzero()[:, 0]
        fits_now = torch.zeros(self.n, dtype=torch.bool)
        fits_now[able] = self.fits(able, chosen, room)
        while len(open_ := (fits_now & (chosen - below > 1)).nonzero()[:, 0]):
            middle = below + torch.div(chosen - below, 2, rounding_mode="floor")
            good = self.fits(open_, middle, room)
            chosen[open_[good]], below[open_[~good]] = middle[open_[good]], middle[open_[~good]]
        waiting = (~fits_now & self.valid).nonzero()[:, 0]
        for coarser in range(1, MOST_COARSER + 2):
            chosen[waiting] = coarser
            if not len(waiting) or coarser > MOST_COARSER:
                break
            waiting = waiting[~self.fits(waiting, chosen, room)]
        return chosen

    def integers(self, coarser):
        """Integers int64 `[n, T, P]` and header steps int64 `[n]` with steps `coarser` (int64 `[n]`) above nominal."""
        import torch

        step = self.codec.nominal_step + 2 * self.reference + coarser
        q = 1.0 / _step_value(step[:, None] - 2 * self.row_bytes)
        z = self.y * q[:, :, None]
        k = (z.abs().clamp(max=32767.0) + torch.tensor(self.codec.rounding, dtype=torch.float32)).long()
        return torch.where(z < 0, -k, k), step

    def attempt(self, coarser):
        """(words needed int64 `[n]`, what `slots` needs) with steps `coarser` (int64 `[n]`) above the nominal one."""
        import torch

        codec = self.codec
        k, step = self.integers(coarser)
        if codec._plane is None:
            sums = k.abs().clamp(max=REACH).sum((1, 2))
            a = torch.div(sums << 10, self.T * self.D, rounding_mode="floor") + 1
            prior = -((a.to(torch.float32).view(torch.int32) >> 19).long() - (127 << 4) - 160)
        else:
            prior = codec.nominal_step + coarser
        model = _Model(_prior_spread((self.prior - prior[:, None]).cpu().numpy()))
        rows = k.transpose(0, 1).cpu().numpy()
        freq_of, start_of = _starts()
        s, f, a = (np.empty((self.T, self.n, self.P), dtype=np.int64) for _ in range(3))
        for t, kt in enumerate(rows):
            residual, cls = kt - model.predicted(), _class(model.spread)
            found = np.where(np.abs(residual) > REACH, ESCAPE, residual + REACH)
            found[freq_of[cls, found] == 0] = ESCAPE
            s[t], f[t], a[t] = found, freq_of[cls, found], start_of[cls, found]
            model.learn(kt, residual)
        s, f, a, kk = (
            np.ascontiguousarray(part.reshape(self.T, self.n, -1, LANES).swapaxes(1, 2)).reshape(-1, self.n, LANES)
            for part in (s, f, a, rows)
        )
        active = (np.arange(self.P) < self.D).reshape(-1, LANES)
        low = np.zeros((self.n, 2 * LANES), dtype=np.int64)
        low[:, : self.T] = self.row_bytes[:, : 2 * LANES].cpu().numpy()
        x = (1 << 16) + low[:, ::2] + (low[:, 1::2] << 8)
        # forward order of a step: words of the lanes that refill, then escapes
        mask = np.zeros((len(s), 2, self.n, LANES), dtype=bool)
        word = np.zeros((len(s), 2, self.n, LANES), dtype=np.int64)
        mask[:, 1] = (s == ESCAPE) & np.tile(active, (self.T, 1))[:, None]
        word[:, 1] = kk
        for i in range(len(s) - 1, -1, -1):
            lanes = active[i % len(active)]
            emit = (x >> 20 >= f[i]) & lanes
            mask[i, 0], word[i, 0] = emit, x
            x = np.where(emit, x >> 16, x)
            whole, rest = np.divmod(x, f[i])
            pushed = (whole << TOTAL_BITS) + rest + a[i]
            x = pushed if lanes.all() else np.where(lanes, pushed, x)
        words = torch.from_numpy(mask.sum((0, 1, 3)))
        return words, (x, mask, word, step, prior, (k.abs() > REACH).any(2).any(1))

    def slots(self, coded, words, coarser, stride: int):
        import torch

        x, mask, word, step, prior, wide = coded
        out = np.zeros((self.n, stride), dtype=np.uint8)
        at = _stream_at(self.T, self.rows)
        for i in range(self.n):
            if not self.valid[i] or int(coarser[i]) > MOST_COARSER:
                continue
            flags = VALID | ROWS * self.rows | COARSER * bool(coarser[i] > 0) | WIDE * bool(wide[i])
            total = int(words[i]) | self.codec.check << 24
            head = np.array(
                [(MAGIC, self.codec.version, flags, int(self.head[i]), int(step[i]), int(prior[i]), total)], HEADER
            )
            out[i, : HEADER.itemsize] = head.view(np.uint8)
            out[i, STATES_AT:STREAM_AT] = x[i].astype("<u4").view(np.uint8)
            extra = self.row_bytes[i, 2 * LANES :].numpy().astype(np.uint8) if self.rows else np.empty(0, np.uint8)
            out[i, STREAM_AT : STREAM_AT + len(extra)] = extra
            stream = word[:, :, i][mask[:, :, i]].astype("<u2").view(np.uint8)
            out[i, at : at + len(stream)] = stream
        return torch.from_numpy(out)


def _read(codec: Ecq, slots, geometry: Geometry):
    """Slots -> integers int64 `[n, T, D]`, steps fp32 `[n, T]`, heads int64 `[n]`. InputError: a damaged stream."""
    import torch

    raw, device = slots.cpu().numpy(), slots.device
    h = codec.headers(raw)
    prior = codec.channels(geometry.kv_heads, geometry.head_dim, "cpu")[3].numpy()
    k, row_bytes, bad = _integers(raw, h, prior, geometry)
    if bad.any():
        raise InputError(f"codec ecq: slot {bad.argmax()}: the stream does not end where its header says")
    step = _step_value(torch.from_numpy(h["step"].astype(np.int64)[:, None] - 2 * row_bytes))
    return torch.from_numpy(k).to(device), step.to(device), torch.from_numpy(h["head"].astype(np.int64)).to(device)


def _integers(raw: np.ndarray, h: np.ndarray, priors: np.ndarray, geometry: Geometry):
    """Slots with sound headers, priors `[heads, D]` -> integers int64 `[n, T, D]`, row bytes int64 `[n, T]`, and
    bool `[n]`: streams that do not end as they must."""
    n, T, D = len(raw), geometry.page_tokens, geometry.head_dim
    P, rows = round_up(D, LANES), (h["flags"] & ROWS) != 0
    count = (h["words"] & MOST_WORDS).astype(np.int64)
    words = np.zeros((n, int(count.max(initial=0)) + 1), dtype=np.int64)
    for i in range(n):
        at = _stream_at(T, bool(rows[i]))
        words[i, : count[i]] = raw[i, at : at + 2 * int(count[i])].view("<u2")
    x = np.ascontiguousarray(raw[:, STATES_AT:STREAM_AT]).view("<u4").astype(np.int64)
    prior = np.zeros((n, P), dtype=np.int64)
    prior[:, :D] = priors[h["head"]]
    model = _Model(_prior_spread(prior - h["prior"].astype(np.int64)[:, None]))
    freq_of, start_of = _starts()
    symbol_at = np.repeat(np.tile(np.arange(256), CLASSES), freq_of.flatten()).reshape(CLASSES, -1)
    at, bad = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=bool)
    k = np.zeros((n, T, P), dtype=np.int64)

    def take(mask):
        nonlocal at, bad
        index = at[:, None] + np.cumsum(mask, 1) - 1
        found = np.where(index < count[:, None], np.take_along_axis(words, index.clip(0, words.shape[1] - 1), 1), 0)
        at = at + mask.sum(1)
        bad |= at > count
        return found

    for t in range(T):
        cls, predicted = _class(model.spread), model.predicted()
        read = np.zeros_like(predicted)
        for j in range(0, P, LANES):
            lanes, active = slice(j, j + LANES), np.arange(j, j + LANES) < D
            place, c = x & ((1 << TOTAL_BITS) - 1), cls[:, lanes]
            s = symbol_at[c, place]
            x = np.where(active, freq_of[c, s] * (x >> TOTAL_BITS) + place - start_of[c, s], x)
            mask = (x < 1 << 16) & active
            x = np.where(mask, (x << 16) | take(mask), x)
            value = predicted[:, lanes] + s - REACH
            escape = (s == ESCAPE) & active
            if escape.any():
                value = np.where(escape, take(escape).astype(np.uint16).view(np.int16), value)
            read[:, lanes] = np.where(active, value, 0)
        k[:, t] = read.clip(-32767, 32767)
        model.learn(k[:, t], read - predicted)
    bad |= (at != count) | ((x >> 16) != 1).any(1)
    low = np.stack([x & 255, x >> 8 & 255], 2).reshape(n, -1)
    row_bytes = np.zeros((n, T), dtype=np.int64)
    row_bytes[:, : 2 * LANES] = low[:, :T]
    bad |= (low[:, T:] != 0).any(1) | (~rows & (low != 0).any(1))
    if T > 2 * LANES:
        row_bytes[:, 2 * LANES :] = raw[:, STREAM_AT : STREAM_AT + T - 2 * LANES] * rows[:, None]
    return k[:, :, :D], row_bytes, bad


CODEC = Ecq
