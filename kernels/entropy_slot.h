// Byte layout of the entropy slots (FORMAT.md, section 6): header, streams back to back, zeros, scale bytes at the very end.
#pragma once

#include "rans.h"
#include "slot.h"

namespace ckv {

constexpr uint32_t kEntropyMagic = 0x3156524Eu;  // bytes "NRV1"
constexpr int kHalves = 2, kStreamsPerHalf = 16, kStreams = kHalves * kStreamsPerHalf;
constexpr int32_t kNeverFits = 0x7FFFFFFF;  // length of a head-page that no slot holds

struct HalfHeader {
  uint16_t freq[rans::kSymbols];
  uint32_t offset[kStreamsPerHalf + 1];  // from the start of the slot; stream t has [offset[t], offset[t + 1])
  uint8_t reserved[28];
};
struct EntropyHeader {
  uint32_t magic;
  uint16_t version, flags;
  HalfHeader half[kHalves];
  uint8_t reserved[56];
};
static_assert(sizeof(HalfHeader) == 128 && offsetof(HalfHeader, offset) == 32, "half header");
static_assert(sizeof(EntropyHeader) == 320 && offsetof(EntropyHeader, half) == 8, "entropy slot header");

// Stream g has the rows [g * rows, (g + 1) * rows) that exist; the last ones may have none.
struct EntropyShape {
  int T, D, g16;
  int rows, streams;  // rows of a stream; streams that have rows
  int64_t tail;       // scale bytes

  CKV_HD EntropyShape(int page_tokens, int head_dim) : T(page_tokens), D(head_dim), g16(ceil_div(head_dim, 16)) {
    rows = ceil_div(T, kStreams);
    streams = ceil_div(T, rows);
    tail = static_cast<int64_t>(T) * g16;
  }
  CKV_HD int first_row(int g) const { return g * rows < T ? g * rows : T; }
  CKV_HD int rows_of(int g) const { return first_row(g + 1) - first_row(g); }
  CKV_HD int64_t bytes_for(int64_t longest) const { return static_cast<int64_t>(sizeof(EntropyHeader)) + streams * longest + tail; }
  CKV_HD int64_t budget(int64_t stride) const { return (stride - static_cast<int64_t>(sizeof(EntropyHeader)) - tail) / streams; }
};

// Whether everything that addresses a decoder's reads is as it must be: magic, version, flags, frequencies and offsets.
CKV_HD bool entropy_header_ok(const EntropyHeader& h, const EntropyShape& shape, uint16_t version, int64_t stride) {
  if (h.magic != kEntropyMagic || h.version != version || h.flags != kFlagValid) return false;
  uint32_t at = sizeof(EntropyHeader);
  for (int half = 0; half < kHalves; ++half) {
    uint32_t sum = 0;
    bool ok = h.half[half].offset[0] == at;
    for (int s = 0; s < rans::kSymbols; ++s) {
      sum += h.half[half].freq[s];
      ok = ok && h.half[half].freq[s] != 0;
    }
    if (!ok || sum != rans::kTotal) return false;
    for (int t = 0; t < kStreamsPerHalf; ++t) {
      const uint32_t next = h.half[half].offset[t + 1];
      const uint32_t least = shape.rows_of(half * kStreamsPerHalf + t) ? rans::kStateBytes : 0;
      if (next < at || next - at < least || (!least && next != at)) return false;
      at = next;
    }
  }
  return at <= stride - shape.tail;
}

// Checks of a call whose `stride` is the slot's own size.
inline int check_entropy_call(const ckv_plane_desc* d, unsigned accepts, const void* slots, int64_t stride) {
  if (!d) return CKV_E_NULL;
  if (!format_ok(d->format) || !(accepts >> d->format & 1u)) return CKV_E_FORMAT;
  if (!shape_ok(d->n, d->page_tokens, d->head_dim)) return CKV_E_SHAPE;
  if (stride < EntropyShape(d->page_tokens, d->head_dim).bytes_for(rans::kStateBytes) || stride % 16 || stride > 0x7FFFFFF0) return CKV_E_STRIDE;
  if (d->n && !slots) return CKV_E_NULL;
  return CKV_OK;
}

}  // namespace ckv
