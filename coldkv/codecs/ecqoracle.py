"""Codec `ecq` in plain torch and numpy, all head-pages of a plane side by side: what the kernels are compared with."""

import copy
import re
from functools import cache

import numpy as np

from coldkv.codecs.ecqslot import (
    COARSER,
    HEADER,
    LANES,
    MAGIC,
    MOST_WORDS,
    ROWS,
    STATES_AT,
    STREAM_AT,
    VALID,
    WIDE,
    headers,
    stream_at,
)
from coldkv.errors import InputError
from coldkv.geometry import Geometry, round_up

CLASSES, ESCAPE, REACH, TOTAL_BITS = 28, 255, 127, 12
MOST_COARSER = 255


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


def step_value(i):
    """int64 tensor of sixteenths of an octave -> fp32 steps, clamped to 2^-120 .. 2^120."""
    import torch

    i = i.clamp(-1920, 1920)
    mantissa = torch.tensor([np.float32(2 ** (j / 16)) for j in range(16)], device=i.device).view(torch.int32)
    return (mantissa[i & 15] + ((i >> 4).to(torch.int32) << 23)).view(torch.float32)


def level_of(ms):
    """fp32 mean squares -> eighths of an octave of their roots; zero rows get a very low level."""
    import torch

    u = ms.view(torch.int32)
    m = ((u & 0x7FFFFF) | 0x3F800000).view(torch.float32)
    level = 4 * ((u >> 23) - 127).long()
    for j in (1, 3, 5, 7):
        level = level + (m >= float(np.float32(2 ** (j / 8)))).long()
    return torch.where(ms < 2.0**-100, torch.full_like(level, -(1 << 20)), level)


# The coder and its model are numpy: small steps one after the other, of which torch would mostly pay the dispatch.


def prior_spread(d: np.ndarray) -> np.ndarray:
    mantissa = np.array([round(32768 * 2 ** (j / 16)) for j in range(16)], dtype=np.int64)
    e, m = d >> 4, mantissa[d & 15]
    spread = np.where(e <= 5, m >> (5 - e).clip(0, 31), m << (e - 5).clip(0, 1))
    return np.where(d < -160, 0, np.where(d >= 112, REACH << 10, spread)).clip(max=REACH << 10)


def class_of(spread: np.ndarray) -> np.ndarray:
    return ((spread + 8).astype(np.float32).view(np.int32) >> 22).astype(np.int64) - 260


class Model:
    """Channel states int64 `[n, P]` of one pass over the rows."""

    def __init__(self, spread: np.ndarray):
        self.mean, self.spread = np.zeros_like(spread), spread

    def predicted(self):
        return (self.mean + 512) >> 10

    def learn(self, k, residual):
        self.mean = self.mean + ((k << 7) - (self.mean >> 3))
        self.spread = self.spread + ((np.abs(residual).clip(max=REACH) << 6) - (self.spread >> 4))


@cache
def starts() -> tuple[np.ndarray, np.ndarray]:
    """(frequency, start) int64 `[28, 256]`."""
    f = frequencies().astype(np.int64)
    return f, np.cumsum(f, 1) - f


class Pages:
    """Head-pages on their way into slots."""

    def __init__(self, codec, plane, geometry: Geometry):
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
        level = level_of(ms)
        if self.rows:
            reference = level.amax(dim=1)
        else:
            page = total / float(self.T)
            self.valid &= page <= torch.finfo(torch.float32).max
            reference = level_of(page)
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

    def part(self, index) -> "Pages":
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
        q = 1.0 / step_value(step[:, None] - 2 * self.row_bytes)
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
        model = Model(prior_spread((self.prior - prior[:, None]).cpu().numpy()))
        rows = k.transpose(0, 1).cpu().numpy()
        freq_of, start_of = starts()
        s, f, a = (np.empty((self.T, self.n, self.P), dtype=np.int64) for _ in range(3))
        for t, kt in enumerate(rows):
            residual, cls = kt - model.predicted(), class_of(model.spread)
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
        at = stream_at(self.T, self.rows)
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


def read(codec, slots, geometry: Geometry):
    """Slots -> integers int64 `[n, T, D]`, steps fp32 `[n, T]`, heads int64 `[n]`. InputError: a damaged stream."""
    import torch

    raw, device = slots.cpu().numpy(), slots.device
    h = headers(raw)
    prior = codec.channels(geometry.kv_heads, geometry.head_dim, "cpu")[3].numpy()
    k, row_bytes, bad = integers(raw, h, prior, geometry)
    if bad.any():
        raise InputError(f"codec ecq: slot {bad.argmax()}: the stream does not end where its header says")
    step = step_value(torch.from_numpy(h["step"].astype(np.int64)[:, None] - 2 * row_bytes))
    return torch.from_numpy(k).to(device), step.to(device), torch.from_numpy(h["head"].astype(np.int64)).to(device)


def integers(raw: np.ndarray, h: np.ndarray, priors: np.ndarray, geometry: Geometry):
    """Slots with sound headers, priors `[heads, D]` -> integers int64 `[n, T, D]`, row bytes int64 `[n, T]`, and
    bool `[n]`: streams that do not end as they must."""
    n, T, D = len(raw), geometry.page_tokens, geometry.head_dim
    P, rows = round_up(D, LANES), (h["flags"] & ROWS) != 0
    count = (h["words"] & MOST_WORDS).astype(np.int64)
    words = np.zeros((n, int(count.max(initial=0)) + 1), dtype=np.int64)
    for i in range(n):
        at = stream_at(T, bool(rows[i]))
        words[i, : count[i]] = raw[i, at : at + 2 * int(count[i])].view("<u2")
    x = np.ascontiguousarray(raw[:, STATES_AT:STREAM_AT]).view("<u4").astype(np.int64)
    prior = np.zeros((n, P), dtype=np.int64)
    prior[:, :D] = priors[h["head"]]
    model = Model(prior_spread(prior - h["prior"].astype(np.int64)[:, None]))
    freq_of, start_of = starts()
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
        cls, predicted = class_of(model.spread), model.predicted()
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
