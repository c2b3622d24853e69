"""Codec `ecq`: entropy-coded quantization, a step per page, a scale byte per row, an adaptive model per channel."""

import copy
import ctypes

import numpy as np

from coldkv.codecs.ecqoracle import MOST_COARSER, REACH, Model, Pages, integers, read
from coldkv.codecs.ecqslot import (
    COARSER,
    HEADER,
    LANES,
    MAGIC,
    MOST_STEP,
    MOST_WORDS,
    ROWS,
    STATES_AT,
    STREAM_AT,
    VALID,
    WIDE,
    extra_rows,
    headers,
    stream_at,
)
from coldkv.codecs.sized import NEVER, SizedCodec
from coldkv.errors import InputError
from coldkv.geometry import Geometry, round_up

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
        return round_up(stream_at(geometry.page_tokens, True), 16)

    def choose_stride(self, lengths, geometry, fmt, *, overflow_bytes=None):
        """The mean of what head-pages need at the nominal step: shorter ones are coded finer, longer ones coarser."""
        lengths = lengths[lengths != NEVER]
        least = self.least_stride(geometry, fmt)
        return max(least, round_up(int(np.ceil(lengths.mean())), 16)) if len(lengths) else least

    def lengths_torch(self, plane, geometry):
        import torch

        self.require_fit(plane.format)
        page = Pages(self, plane, geometry)
        words, _ = page.attempt(torch.zeros(page.n, dtype=torch.int64))
        need = stream_at(geometry.page_tokens, page.rows) + 2 * words
        never = ~page.valid | (words > MOST_WORDS)
        return torch.where(never, torch.full_like(need, NEVER), need).to(torch.int32)

    def residual_magnitudes(self, plane, geometry):
        """Mean |residual| of each channel at the nominal step, which `prior` tells; fp64 `[kv_heads, head_dim]`."""
        import torch

        page = Pages(self, plane, geometry)
        rows = page.integers(torch.zeros(page.n, dtype=torch.int64))[0].transpose(0, 1).cpu().numpy()
        model, total = Model(np.zeros_like(rows[0])), np.zeros_like(rows[0])
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
        arrays = (p.mean, p.weight, p.gain, p.prior.astype(np.int32))
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
                arrays = (c.mean, c.weight, c.gain, c.prior)
                self._plane.on_device[key] = [torch.from_numpy(a.copy()).to(device) for a in arrays]
            p.tensors = dict(zip(("mean", "weight", "gain", "prior"), self._plane.on_device[key], strict=True))
            for name, tensor in p.tensors.items():
                setattr(p, name, tensor.data_ptr())
        return (ctypes.byref(p),)

    # ---- slots

    def encode_torch(self, plane, geometry):
        import torch

        self.require_fit(plane.format)
        page = Pages(self, plane, geometry)
        stride = self.slot_bytes(geometry, plane.format)
        room = min(MOST_WORDS, (stride - stream_at(geometry.page_tokens, page.rows)) // 2)
        coarser = page.find_step(room, self.fill)
        valid = page.valid & (coarser <= MOST_COARSER)
        words, coded = page.attempt(coarser.clamp(max=MOST_COARSER))
        slots = page.slots(coded, words, coarser, stride)
        slots *= valid[:, None].to(torch.uint8)
        return slots, valid.to(torch.int32)

    def decode_torch(self, slots, geometry, fmt):
        k, step, head = read(self, slots, geometry)
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

    def slot_fields(self, record, geometry, fmt):
        return _slot_fields(self, record, geometry)

    def odd_heads(self, heads, geometry, stride):
        h = headers(heads)
        words, flags = h["words"].astype(np.int64), h["flags"]
        starts = np.where(flags & ROWS, stream_at(geometry.page_tokens, True), STREAM_AT)
        sound = (h["magic"] == MAGIC) & (h["version"] == self.version) & (flags & VALID != 0) & (flags < 16)
        sound &= (h["head"] < geometry.kv_heads) & (np.abs(h["step"].astype(np.int64)) <= MOST_STEP)
        sound &= (words >> 24 == self.check) & (starts + 2 * (words & MOST_WORDS) <= stride)
        return not sound.all()

    def check_slots(self, slots, geometry, fmt):
        if slots.ndim != 2 or slots.shape[1] < self.least_stride(geometry, fmt):
            return [(0, f"slot length: expected at least {self.least_stride(geometry, fmt)}, found {slots.shape[-1]}")]
        h = headers(slots)
        T, problems = geometry.page_tokens, []
        for i, one in enumerate(h):
            words, check = int(one["words"]) & MOST_WORDS, int(one["words"]) >> 24
            start = stream_at(T, bool(one["flags"] & ROWS))
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
            elif slots[i, end:].any() or slots[i, STREAM_AT + extra_rows(T, bool(one["flags"] & ROWS)) : start].any():
                problems.append((i, "padding: expected zero bytes"))
        return problems


def _row_byte_text(codec: "Ecq", record: bytes, geometry: Geometry) -> str:
    """The row bytes that the lanes end with, which only decoding finds."""
    slot = np.frombuffer(record, np.uint8)[None]
    if not headers(slot)["flags"][0] & ROWS:
        return "no row bytes: one scale for the page"
    heads = Geometry(geometry.head_dim, geometry.page_tokens, 256)
    known = record[15] == 0 or codec._plane is not None
    if not known or codec.check_slots(slot, heads, "int8"):
        return "the row bytes come out at the end of decoding"
    prior = np.zeros((256, geometry.head_dim), np.int64) if codec._plane is None else codec._plane.prior
    _, row_bytes, bad = integers(slot, headers(slot), prior, geometry)
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
    extra, start = extra_rows(T, rows), stream_at(T, rows)
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


CODEC = Ecq
