"""Codec `rans-e2m1`: the seed's entropy slot, 4-bit codes in 32 rANS streams per head-page (cold-pool.md)."""

import struct

import numpy as np

from coldkv.codecs.e2m1_g64 import E2m1G64
from coldkv.codecs.entropyslot import (
    HALF_AT,
    HALF_BYTES,
    HALVES,
    HEADER_BYTES,
    MAGIC,
    OFFSETS_IN_HALF,
    STATE_BYTES,
    STREAMS,
    STREAMS_PER_HALF,
    SYMBOLS,
    EntropyLayout,
    check_entropy_slots,
    slot_fields,
    tables,
)
from coldkv.codecs.native import Native
from coldkv.codecs.rawslot import FLAG_VALID, assemble, header_tensor, take_apart
from coldkv.codecs.sized import NEVER, SizedCodec
from coldkv.errors import InputError
from coldkv.geometry import Geometry, round_up

CHUNK_ELEMENTS = 1 << 22  # bounds the oracle's working set


class RansE2m1(SizedCodec):
    """The codes of `e2m1-g64` (for nvfp4 and iso3 planes the stored codes), entropy coded with one 12-bit frequency
    table per half page; scale bytes are stored as they are.

    A head-page with a stream over its share of the slot is refused. Option `slot_bytes`: the seed tried 6688 and 9536
    for 64 x 256; by default each plane gets the size with the fewest bytes in all. Exact on nvfp4 and iso3 planes.
    """

    id = "rans-e2m1"
    version = 1
    formats = ("int8", "nvfp4", "iso3", "bf16", "fp16", "fp8")
    native = "rans_e2m1"

    def least_stride(self, geometry, fmt):
        return round_up(EntropyLayout(geometry).bytes_for(STATE_BYTES), 16)

    @staticmethod
    def _carrier(fmt: str):
        """The raw codec whose codes and scale bytes the slot holds."""
        return Native() if fmt in Native.formats else E2m1G64()

    def lengths_torch(self, plane, geometry):
        import torch

        self.require_fit(plane.format)
        parts = [self._lengths(part, geometry) for part in _chunks(plane, geometry)]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int32)

    def _lengths(self, plane, geometry):
        import torch

        *_, length, valid = self._streams(plane, geometry)
        return torch.where(valid, EntropyLayout(geometry).bytes_for(length.amax(dim=1)), NEVER).to(torch.int32)

    def _streams(self, plane, geometry):
        """(scale bytes `[n, T, G]`, freq `[n, 2, 16]`, stream bytes `[n, 32, W]`, lengths `[n, 32]`, valid `[n]`)."""
        import torch

        from coldkv import minifloat as mf
        from coldkv import rans

        at = EntropyLayout(geometry)
        raw, valid = self._carrier(plane.format).encode_torch(plane, geometry)
        codes, scales = take_apart(geometry, raw)
        symbols = mf.unpack_nibbles(codes).flatten(1)
        n, missing = len(symbols), STREAMS * at.rows * geometry.head_dim - symbols.shape[1]
        symbols = torch.nn.functional.pad(symbols, (0, missing)).reshape(n * STREAMS, at.rows * geometry.head_dim)
        count = torch.tensor(at.counts, device=symbols.device).repeat(n)
        present = torch.arange(symbols.shape[1], device=symbols.device) < count[:, None]
        histogram = torch.zeros((n * HALVES, SYMBOLS), dtype=torch.int64, device=symbols.device)
        half = torch.arange(n * STREAMS, device=symbols.device)[:, None] // STREAMS_PER_HALF
        bins = (half * SYMBOLS + symbols)[present]
        histogram.view(-1).scatter_add_(0, bins, torch.ones_like(bins))
        freq = rans.frequencies(histogram)
        data, length = rans.encode(symbols, count, freq.repeat_interleave(STREAMS_PER_HALF, dim=0))
        shape = (n, STREAMS)
        return scales, freq.view(n, HALVES, SYMBOLS), data.view(*shape, -1), length.view(shape), valid != 0

    def encode_torch(self, plane, geometry):
        import torch

        self.require_fit(plane.format)
        stride = self.slot_bytes(geometry, plane.format)
        parts = [self._encode(part, geometry, stride) for part in _chunks(plane, geometry)]
        if not parts:
            return torch.empty((0, stride), dtype=torch.uint8), torch.empty(0, dtype=torch.int32)
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])

    def _encode(self, plane, geometry, stride):
        import torch

        at = EntropyLayout(geometry)
        scales, freq, data, length, valid = self._streams(plane, geometry)
        n, device = len(scales), scales.device
        valid &= length.amax(dim=1) <= at.budget(stride)
        length = torch.where(valid[:, None], length, 0)  # what is refused leaves no byte outside its own slot
        slots = torch.zeros((n, stride), dtype=torch.uint8, device=device)
        head = struct.pack("<IHH", MAGIC, self.version, FLAG_VALID)
        slots[:, :HALF_AT] = torch.frombuffer(bytearray(head), dtype=torch.uint8).to(device)
        ends = HEADER_BYTES + length.cumsum(dim=1)
        offsets = torch.cat([torch.full((n, 1), HEADER_BYTES, device=device), ends], dim=1)
        for half in range(HALVES):
            first, begin = half * STREAMS_PER_HALF, HALF_AT + half * HALF_BYTES
            _put(slots, begin, freq[:, half].to(torch.int16))
            of_half = offsets[:, first : first + STREAMS_PER_HALF + 1]
            _put(slots, begin + OFFSETS_IN_HALF, of_half.to(torch.int32))
        byte = torch.arange(data.shape[2], device=device)
        there = byte < length[..., None]
        place = torch.arange(n, device=device)[:, None, None] * stride + offsets[:, :-1, None] + byte
        slots.view(-1)[place[there]] = data[there]
        slots[:, stride - at.tail_bytes :] = scales.flatten(1)
        slots *= valid[:, None].to(torch.uint8)
        return slots, valid.to(torch.int32)

    def _raw(self, slots, geometry, fmt):
        """The carrier codec and its raw slots of the same codes and scales. InputError for damaged streams."""
        import torch

        from coldkv import minifloat as mf
        from coldkv import rans

        at, n = EntropyLayout(geometry), len(slots)
        freq, offsets = tables(slots.cpu().numpy())
        base = np.arange(n)[:, None, None] * slots.shape[1]
        begin, end = (torch.from_numpy((base + part).reshape(-1)) for part in (offsets[..., :-1], offsets[..., 1:]))
        count = torch.tensor(at.counts).repeat(n)
        freq = torch.from_numpy(freq.reshape(-1, SYMBOLS)).repeat_interleave(STREAMS_PER_HALF, dim=0)
        arguments = (part.to(slots.device) for part in (begin, end, count, freq))
        symbols, ok = rans.decode(slots.contiguous().view(-1), *arguments)
        if not ok.all():
            index, stream = divmod(int((~ok).nonzero()[0, 0]), STREAMS)
            raise InputError(f"codec {self.id}: slot {index}: stream {stream}: its bytes do not decode: damaged")
        rows = symbols.reshape(n, STREAMS * at.rows, geometry.head_dim)[:, : geometry.page_tokens]
        scales = slots[:, slots.shape[1] - at.tail_bytes :].reshape(n, geometry.page_tokens, geometry.groups(16))
        carrier = self._carrier(fmt)
        header = header_tensor(carrier.version, FLAG_VALID).to(slots.device)
        valid = torch.ones(n, dtype=torch.bool, device=slots.device)
        return carrier, assemble(geometry, header, mf.pack_nibbles(rows), scales, valid)[0]

    def decode_torch(self, slots, geometry, fmt):
        carrier, raw = self._raw(slots, geometry, fmt)
        return carrier.decode_torch(raw, geometry, fmt)

    def restored_format(self, fmt):
        return self._carrier(fmt).restored_format(fmt)

    def restore_torch(self, slots, geometry, fmt):
        carrier, raw = self._raw(slots, geometry, fmt)
        return carrier.restore_torch(raw, geometry, fmt)

    def check_slots(self, slots, geometry, fmt):
        stride = self.slot_bytes(geometry, fmt)
        if slots.ndim != 2 or slots.shape[1] != stride:
            return [(0, f"slot length: expected {stride} bytes, found {slots.shape[-1]}")]
        return check_entropy_slots(slots, geometry, self.version)

    def slot_fields(self, record, geometry, fmt):
        return slot_fields(record, geometry)


def _chunks(plane, geometry: Geometry):
    step = max(1, CHUNK_ELEMENTS // geometry.elements)
    return [plane[i : i + step] for i in range(0, plane.head_pages, step)]


def _put(slots, at: int, words) -> None:
    """Write integers `[n, k]` of any width, little endian, to byte `at` of every slot."""
    import torch

    raw = words.contiguous().view(torch.uint8)
    slots[:, at : at + raw.shape[1]] = raw


CODEC = RansE2m1
