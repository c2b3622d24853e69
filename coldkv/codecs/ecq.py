"""Codec `ecq`: entropy-coded quantization with one step per page, one scale byte per row and an adaptive model per channel."""

import copy
import ctypes
import re
from functools import cache

import numpy as np

from coldkv.codecs.sized import NEVER, SizedCodec
from coldkv.errors import InputError
from coldkv.geometry import Geometry, ceil_div, round_up

MAGIC = 0x31514345
HEADER = np.dtype([("magic", "<u4"), ("version", "<u2"), ("flags", "u1"), ("head", "u1"), ("step", "<i2"),
                   ("prior", "<i2"), ("words", "<u4")])  # fmt: skip
VALID, ROWS, COARSER, WIDE = 1, 2, 4, 8
LANES = 32
STATES_AT, STREAM_AT = 16, 16 + 4 * LANES
CLASSES, ESCAPE, REACH, TOTAL_BITS = 28, 255, 127, 12
MOST_COARSER, MOST_WORDS = 255, (1 << 24) - 1
BASE_STEP = -22  # sixteenths of an octave: NMSE near 0.0129 on planes whose channels are alike


class EcqParams(ctypes.Structure):
    """`ckv_ecq_params` of kernels/coldkv.h."""

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
        """Torch: fp64 `[kv_heads, head_dim]`, mean |residual| of each channel at the nominal step, which `prior` tells."""
        import torch

        page = _Pages(self, plane, geometry)
        k, _ = page.integers(torch.zeros(page.n, dtype=torch.int64))
        model, total = _Model(torch.zeros_like(k[:, 0])), torch.zeros_like(k[:, 0])
        for t in range(page.T):
            residual = k[:, t] - model.predicted()
            total += residual.abs().clamp(max=REACH)
            model.learn(k[:, t], residual)
        mean = total[:, : page.D].double() / page.T
        return mean.reshape(-1, geometry.kv_heads, page.D).mean(dim=0)

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
            tensors = self._plane.on_device[key]
            p.mean, p.weight, p.gain, p.prior = (t.data_ptr() for t in tensors)
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

    def check_slots(self, slots, geometry, fmt):
        if slots.ndim != 2 or slots.shape[1] < self.least_stride(geometry, fmt):
            return [(0, f"slot length: expected at least {self.least_stride(geometry, fmt)}, found {slots.shape[-1]}")]
        h = self.headers(slots)
        T, problems = geometry.page_tokens, []
        for i, one in enumerate(h):
            words, check = int(one["words"]) & MOST_WORDS, int(one["words"]) >> 24
            end = _stream_at(T, bool(one["flags"] & ROWS)) + 2 * words
            if one["magic"] != MAGIC:
                problems.append((i, f"magic: expected 0x{MAGIC:08x}, found 0x{one['magic']:08x}"))
            elif one["version"] != self.version:
                problems.append((i, f"version: expected {self.version}, found {one['version']}"))
            elif not one["flags"] & VALID or one["flags"] > 15:
                problems.append((i, f"flags: expected an odd number below 16, found {one['flags']}"))
            elif one["head"] >= geometry.kv_heads:
                problems.append((i, f"head: expected 0 to {geometry.kv_heads - 1}, found {one['head']}"))
            elif check != self.check:
                problems.append((i, f"calibration byte: expected {self.check}, found {check}"))
            elif end > slots.shape[1]:
                problems.append((i, f"stream: expected an end within {slots.shape[1]} bytes, found {end}"))
            elif slots[i, end:].any():
                problems.append((i, "padding: expected zero bytes"))
        return problems


def _stream_at(page_tokens: int, rows: bool) -> int:
    return STREAM_AT + (ceil_div(max(0, page_tokens - 2 * LANES), 2) * 2 if rows else 0)


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


def _prior_spread(d):
    import torch

    mantissa = torch.tensor([round(32768 * 2 ** (j / 16)) for j in range(16)], device=d.device)
    e, m = d >> 4, mantissa[d & 15]
    spread = torch.where(e <= 5, m >> (5 - e).clamp(0, 31), m << (e - 5).clamp(0, 1))
    spread = torch.where(d < -160, torch.zeros_like(spread), spread)
    return torch.where(d >= 112, torch.full_like(spread, REACH << 10), spread).clamp(max=REACH << 10)


def _class(spread):
    import torch

    return ((spread + 8).to(torch.float32).view(torch.int32) >> 22).long() - 260


class _Model:
    """Channel states `[n, P]` of one pass over the rows."""

    def __init__(self, spread):
        import torch

        self.mean, self.spread = torch.zeros_like(spread), spread.clone()

    def predicted(self):
        return (self.mean + 512) >> 10

    def learn(self, k, residual):
        self.mean = self.mean + ((k << 7) - (self.mean >> 3))
        self.spread = self.spread + ((residual.abs().clamp(max=REACH) << 6) - (self.spread >> 4))


@cache
def _starts():
    import torch

    f = torch.from_numpy(frequencies().astype(np.int64))
    return f, torch.cumsum(f, 1) - f


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

    def find_step(self, room: int, fill: int):
        """int64 `[n]`: sixteenths above the nominal step, MOST_COARSER + 1 where nothing fits."""
        import torch

        fits_now = self.attempt(torch.zeros(self.n, dtype=torch.int64))[0] <= room
        chosen, below = torch.zeros(self.n, dtype=torch.int64), torch.full((self.n,), -fill - 1)
        while bool((fits_now & (chosen - below > 1)).any()):
            middle = below + torch.div(chosen - below, 2, rounding_mode="floor")
            fits = self.attempt(middle)[0] <= room
            move = fits_now & (chosen - below > 1)
            chosen, below = torch.where(move & fits, middle, chosen), torch.where(move & ~fits, middle, below)
        waiting, coarser = ~fits_now & self.valid, 0
        while bool(waiting.any()) and coarser < MOST_COARSER:
            coarser += 1
            fits = self.attempt(torch.full((self.n,), coarser))[0] <= room
            chosen[waiting & fits] = coarser
            waiting &= ~fits
        chosen[waiting] = MOST_COARSER + 1
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
        model = _Model(_prior_spread(self.prior - prior[:, None]))
        freq_of, start_of = _starts()
        symbols, freqs, starts = [], [], []
        for t in range(self.T):
            residual, cls = k[:, t] - model.predicted(), _class(model.spread)
            s = torch.where(residual.abs() > REACH, torch.full_like(residual, ESCAPE), residual + REACH)
            s = torch.where(freq_of[cls, s] == 0, torch.full_like(s, ESCAPE), s)
            symbols.append(s), freqs.append(freq_of[cls, s]), starts.append(start_of[cls, s])
            model.learn(k[:, t], residual)
        shape = (self.n, -1, LANES)
        s, f, a, kk = (
            torch.stack(x, 1).reshape(shape) for x in (symbols, freqs, starts, [k[:, t] for t in range(self.T)])
        )
        active = (torch.arange(self.P) < self.D).repeat(self.T).reshape(-1, LANES)
        low = torch.nn.functional.pad(self.row_bytes, (0, max(0, 2 * LANES - self.T)))[:, : 2 * LANES].reshape(
            -1, LANES, 2
        )
        x = (1 << 16) + low[..., 0] + (low[..., 1] << 8)
        steps = s.shape[1]
        # forward order of a step: words of the lanes that refill, then escapes
        mask = torch.zeros((self.n, steps, 2, LANES), dtype=torch.bool)
        word = torch.zeros((self.n, steps, 2, LANES), dtype=torch.int64)
        mask[:, :, 1] = (s == ESCAPE) & active
        word[:, :, 1] = kk & 0xFFFF
        for i in range(steps - 1, -1, -1):
            emit = ((x >> 20) >= f[:, i]) & active[i]
            mask[:, i, 0], word[:, i, 0] = emit, x & 0xFFFF
            x = torch.where(emit, x >> 16, x)
            fi = f[:, i].clamp(min=1)
            pushed = (torch.div(x, fi, rounding_mode="floor") << TOTAL_BITS) + x % fi + a[:, i]
            x = torch.where(active[i], pushed, x)
        return mask.sum((1, 2, 3)), (x, mask, word, step, prior, (k.abs() > REACH).any(2).any(1))

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
            out[i, STATES_AT:STREAM_AT] = x[i].numpy().astype("<u4").view(np.uint8)
            extra = self.row_bytes[i, 2 * LANES :].numpy().astype(np.uint8) if self.rows else np.empty(0, np.uint8)
            out[i, STREAM_AT : STREAM_AT + len(extra)] = extra
            stream = word[i][mask[i]].numpy().astype("<u2").view(np.uint8)
            out[i, at : at + len(stream)] = stream
        return torch.from_numpy(out)


def _read(codec: Ecq, slots, geometry: Geometry):
    """Slots -> integers int64 `[n, T, D]`, steps fp32 `[n, T]`, heads int64 `[n]`. InputError: a damaged stream."""
    import torch

    raw = slots.cpu().numpy()
    h, n, T, D = codec.headers(raw), slots.shape[0], geometry.page_tokens, geometry.head_dim
    P, rows = round_up(D, LANES), (h["flags"] & ROWS) != 0
    head = torch.from_numpy(h["head"].astype(np.int64))
    count = torch.from_numpy((h["words"] & MOST_WORDS).astype(np.int64))
    words = torch.zeros((n, (int(count.max()) if n else 0) + 1), dtype=torch.int64)
    for i in range(n):
        at = _stream_at(T, bool(rows[i]))
        stream = raw[i, at : at + 2 * int(count[i])].view("<u2").astype(np.int64)
        words[i, : len(stream)] = torch.from_numpy(stream)
    x = torch.from_numpy(np.ascontiguousarray(raw[:, STATES_AT:STREAM_AT]).view("<u4").astype(np.int64))
    prior = torch.nn.functional.pad(codec.channels(geometry.kv_heads, D, "cpu")[3].long(), (0, P - D))[head]
    model = _Model(_prior_spread(prior - torch.from_numpy(h["prior"].astype(np.int64))[:, None]))
    freq_of, start_of = _starts()
    symbol_at = torch.repeat_interleave(torch.arange(256).repeat(CLASSES), freq_of.flatten()).reshape(CLASSES, -1)
    at, last = torch.zeros(n, dtype=torch.int64), words.shape[1] - 1
    k = torch.zeros((n, T, P), dtype=torch.int64)
    bad = torch.zeros(n, dtype=torch.bool)

    def take(mask):
        nonlocal at, bad
        index = at[:, None] + torch.cumsum(mask, 1) - 1
        found = torch.where(index < count[:, None], words.gather(1, index.clamp(0, last)), torch.zeros_like(index))
        at = at + mask.sum(1)
        bad |= at > count
        return found

    for t in range(T):
        cls, predicted = _class(model.spread), model.predicted()
        for j in range(0, P, LANES):
            lanes = slice(j, min(j + LANES, D))
            active = torch.arange(j, j + LANES) < D
            c = cls[:, j : j + LANES]
            place = x & ((1 << TOTAL_BITS) - 1)
            s = symbol_at[c, place]
            refilled = freq_of[c, s] * (x >> TOTAL_BITS) + place - start_of[c, s]
            x = torch.where(active, refilled, x)
            mask = (x < 1 << 16) & active
            x = torch.where(mask, (x << 16) | take(mask), x)
            escape = (s == ESCAPE) & active
            value = predicted[:, j : j + LANES] + s - REACH
            if bool(escape.any()):
                raw16 = take(escape)
                value = torch.where(escape, torch.where(raw16 >= 1 << 15, raw16 - (1 << 16), raw16), value)
            k[:, t, lanes] = value[:, : lanes.stop - j].clamp(-32767, 32767)
        model.learn(k[:, t], k[:, t] - predicted)
    bad |= (at != count) | ((x >> 16) != 1).any(1)
    low = torch.stack([x & 255, x >> 8 & 255], 2).flatten(1)
    row_bytes = torch.zeros((n, T), dtype=torch.int64)
    row_bytes[:, : 2 * LANES] = low[:, :T]
    rows = torch.from_numpy(rows)
    bad |= (low[:, T:] != 0).any(1) | (~rows & (low != 0).any(1))
    if T > 2 * LANES:
        more = torch.from_numpy(raw[:, STREAM_AT : STREAM_AT + T - 2 * LANES].astype(np.int64))
        row_bytes[:, 2 * LANES :] = torch.where(rows[:, None], more, torch.zeros_like(more))
    if bool(bad.any()):
        first = int(bad.nonzero()[0])
        raise InputError(f"codec ecq: slot {first}: the stream does not end where its header says")
    step = _step_value(torch.from_numpy(h["step"].astype(np.int64))[:, None] - 2 * row_bytes)
    return k[:, :, :D], step, head


CODEC = Ecq
