// Host loops of rans-e2m1. A head-page passes through a raw slot in scratch memory, which the loops of the raw codecs fill and read.
#pragma once

#include <atomic>
#include <vector>

#include "codec_host.h"
#include "e2m1_g64_page.h"
#include "entropy_slot.h"

namespace ckv {
namespace rans_e2m1 {

constexpr uint16_t kVersion = 1;

struct Scratch {
  std::vector<uint8_t> raw;
  rans::Symbol symbol[kHalves][rans::kSymbols];
  HalfHeader half[kHalves];
  uint32_t place[rans::kTotal];  // symbol | (frequency - 1) << 4 | (place within the symbol) << 16
};

template <class Body>
void for_pages(const ckv_plane_desc& d, int threads, const Body& body) {
  const SlotShape shape(d.page_tokens, d.head_dim);
  parallel_for(d.n, threads, page_grain(d.page_tokens, d.head_dim), [&](int64_t begin, int64_t end) {
    Scratch scratch;
    scratch.raw.resize(static_cast<size_t>(shape.bytes));
    for (int64_t page = begin; page < end; ++page) body(page, scratch);
  });
}

// Appends to out while there is room, and counts on past it.
struct Append {
  uint8_t* out;
  int64_t capacity, size;
  void operator()(uint8_t byte) {
    if (size < capacity) out[size] = byte;
    ++size;
  }
};

// One stream from `bytes` bytes of nibbles, low nibble first; the number of its bytes, also where they were too many for out.
inline int64_t encode_stream(const uint8_t* nibbles, int64_t bytes, const rans::Symbol* symbol, uint8_t* out, int64_t capacity) {
  Append put = {out, capacity, 0};
  uint32_t x = rans::kLow;
  for (int64_t i = bytes - 1; i >= 0; --i) {
    x = rans::push(x, symbol[nibbles[i] >> 4], put);
    x = rans::push(x, symbol[nibbles[i] & 15], put);
  }
  for (int i = 0; i < rans::kStateBytes; ++i) put(static_cast<uint8_t>(x >> 8 * i));
  return put.size;
}

// Codes and scales of the page into scratch.raw, frequencies and symbols of both halves; false when it cannot be held at all.
inline bool prepare(const ckv_plane_desc& d, const PageView& page, Scratch& scratch) {
  const SlotShape shape(d.page_tokens, d.head_dim);
  const EntropyShape at(d.page_tokens, d.head_dim);
  uint8_t* raw = scratch.raw.data();
  if (has_nibbles(d.format)) {
    memcpy(raw + sizeof(SlotHeader), page.codes, static_cast<size_t>(shape.scales_at) - sizeof(SlotHeader));
    memcpy(raw + shape.scales_at, page.scales, static_cast<size_t>(at.tail));
    for (int64_t i = 0; i < at.tail; ++i)
      if (not_a_scale(page.scales[i])) return false;
  } else if (!e2m1_g64::encode_any_page(d.format, page, shape, raw)) {
    return false;
  }
  for (int half = 0; half < kHalves; ++half) {
    const int64_t row = d.head_dim / 2, first = at.first_row(half * kStreamsPerHalf) * row;
    const int64_t last = at.first_row((half + 1) * kStreamsPerHalf) * row;
    uint32_t pairs[256] = {}, counts[rans::kSymbols] = {};
    for (int64_t i = first; i < last; ++i) ++pairs[raw[sizeof(SlotHeader) + static_cast<size_t>(i)]];
    for (int b = 0; b < 256; ++b) counts[b & 15] += pairs[b], counts[b >> 4] += pairs[b];
    HalfHeader& h = scratch.half[half] = HalfHeader();
    rans::frequencies(counts, h.freq);
    uint32_t start = 0;
    for (int s = 0; s < rans::kSymbols; ++s) {
      scratch.symbol[half][s] = rans::make_symbol(h.freq[s], start);
      start += h.freq[s];
    }
  }
  return true;
}

inline int64_t encode_one(const EntropyShape& at, int g, const Scratch& scratch, uint8_t* out, int64_t capacity) {
  const int64_t row = at.D / 2;
  const uint8_t* nibbles = scratch.raw.data() + sizeof(SlotHeader) + at.first_row(g) * row;
  return encode_stream(nibbles, at.rows_of(g) * row, scratch.symbol[g / kStreamsPerHalf], out, capacity);
}

inline int32_t length_of(const ckv_plane_desc& d, const PageView& page, Scratch& scratch) {
  if (!prepare(d, page, scratch)) return kNeverFits;
  const EntropyShape at(d.page_tokens, d.head_dim);
  int64_t longest = 0;
  for (int g = 0; g < at.streams; ++g) longest = std::max(longest, encode_one(at, g, scratch, nullptr, 0));
  return static_cast<int32_t>(at.bytes_for(longest));
}

inline bool encode_page(const ckv_plane_desc& d, const PageView& page, Scratch& scratch, uint8_t* slot, int64_t stride) {
  if (!prepare(d, page, scratch)) return false;
  const EntropyShape at(d.page_tokens, d.head_dim);
  const int64_t budget = at.budget(stride);
  EntropyHeader header = {kEntropyMagic, kVersion, kFlagValid, {scratch.half[0], scratch.half[1]}, {}};
  int64_t end = sizeof header;
  for (int g = 0; g < kStreams; ++g) {
    uint32_t* offset = header.half[g / kStreamsPerHalf].offset + g % kStreamsPerHalf;
    offset[0] = static_cast<uint32_t>(end);
    if (at.rows_of(g)) {
      const int64_t size = encode_one(at, g, scratch, slot + end, budget);
      if (size > budget) return false;
      end += size;
    }
    offset[1] = static_cast<uint32_t>(end);
  }
  memcpy(slot, &header, sizeof header);
  memset(slot + end, 0, static_cast<size_t>(stride - at.tail - end));
  const SlotShape shape(d.page_tokens, d.head_dim);
  memcpy(slot + stride - at.tail, scratch.raw.data() + shape.scales_at, static_cast<size_t>(at.tail));
  return true;
}

// kTogether streams of the same length in step, so that their chains of dependent steps overlap.
template <int kTogether>
bool decode_streams(const uint8_t* slot, const uint32_t* offset, const uint32_t* place, int64_t bytes, uint8_t* out) {
  uint32_t x[kTogether];
  rans::Tail tail[kTogether];
  for (int k = 0; k < kTogether; ++k)
    if (!rans::open(slot + offset[k], slot + offset[k + 1], bytes, x + k, tail + k)) return false;
  for (int64_t i = 0; i < bytes; ++i)
    for (int k = 0; k < kTogether; ++k) {
      uint32_t byte = 0;
      for (int n = 0; n < 2; ++n) {
        const uint32_t entry = place[x[k] & (rans::kTotal - 1)];
        byte |= (entry & 15u) << 4 * n;
        x[k] = ((entry >> 4 & 4095u) + 1) * (x[k] >> rans::kProbBits) + (entry >> 16);
        // rans::pull without its branches
        for (int turn = 0; turn < 2; ++turn) {
          const bool more = x[k] < rans::kLow && tail[k].at > tail[k].begin;
          x[k] = more ? x[k] << 8 | tail[k].at[-1] : x[k];
          tail[k].at -= more;
        }
      }
      out[k * bytes + i] = static_cast<uint8_t>(byte);
    }
  bool ok = true;
  for (int k = 0; k < kTogether; ++k) ok = ok && rans::sound(x[k], tail[k]);
  return ok;
}

// Slot -> codes and scales in scratch.raw; false where the slot is not one or is damaged.
inline bool decode_page(const EntropyShape& at, const uint8_t* slot, int64_t stride, Scratch& scratch) {
  EntropyHeader header;
  memcpy(&header, slot, sizeof header);
  if (!entropy_header_ok(header, at, kVersion, stride)) return false;
  const int64_t row = at.D / 2;
  for (int half = 0; half < kHalves; ++half) {
    const HalfHeader& h = header.half[half];
    uint32_t start = 0;
    for (uint32_t s = 0; s < rans::kSymbols; ++s)
      for (uint32_t i = 0; i < h.freq[s]; ++i) scratch.place[start++] = s | (h.freq[s] - 1u) << 4 | i << 16;
    for (int t = 0; t < kStreamsPerHalf;) {
      const int g = half * kStreamsPerHalf + t;
      const int64_t bytes = at.rows_of(g) * row;
      if (!bytes) break;
      uint8_t* out = scratch.raw.data() + sizeof(SlotHeader) + at.first_row(g) * row;
      const bool four = t + 4 <= kStreamsPerHalf && at.rows_of(g + 3) == at.rows_of(g);
      if (!(four ? decode_streams<4>(slot, h.offset + t, scratch.place, bytes, out)
                 : decode_streams<1>(slot, h.offset + t, scratch.place, bytes, out)))
        return false;
      t += four ? 4 : 1;
    }
  }
  memcpy(scratch.raw.data() + SlotShape(at.T, at.D).scales_at, slot + stride - at.tail, static_cast<size_t>(at.tail));
  return true;
}

// use(page, raw slot), or poison(page) for a slot that does not decode.
template <class Use, class Poison>
int decode_all(const ckv_plane_desc& d, const uint8_t* slots, int64_t stride, int threads, const Use& use, const Poison& poison) {
  const EntropyShape at(d.page_tokens, d.head_dim);
  std::atomic<bool> bad{false};
  for_pages(d, threads, [&](int64_t i, Scratch& scratch) {
    if (decode_page(at, slots + i * stride, stride, scratch)) {
      use(i, scratch.raw.data());
    } else {
      poison(i);
      bad.store(true, std::memory_order_relaxed);
    }
  });
  return bad.load() ? CKV_E_SLOT : CKV_OK;
}

}  // namespace rans_e2m1
}  // namespace ckv
