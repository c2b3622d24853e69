// Host loops shared by the codecs: head-pages over threads, header checks, what an unreadable slot turns into.
#pragma once

#include <atomic>

#include "parallel.h"
#include "plane.h"

namespace ckv {

// encode(page index, slot) -> false when the head-page holds a non-finite value; the slot is then all zero.
template <class Encode>
int encode_pages(const ckv_plane_desc& d, uint8_t* slots, int64_t stride, int32_t* valid, int threads, const Encode& encode) {
  if (d.n && !valid) return CKV_E_NULL;
  const SlotShape shape(d.page_tokens, d.head_dim);
  parallel_for(d.n, threads, page_grain(d.page_tokens, d.head_dim), [&](int64_t begin, int64_t end) {
    for (int64_t page = begin; page < end; ++page) {
      uint8_t* slot = slots + page * stride;
      valid[page] = encode(page, slot) ? 1 : 0;
      if (valid[page])
        memset(slot + shape.payload_end, 0, static_cast<size_t>(shape.bytes - shape.payload_end));
      else
        memset(slot, 0, static_cast<size_t>(shape.bytes));
    }
  });
  return CKV_OK;
}

// decode(page index, slot), or poison(page index) where the header is wrong.
template <class Decode, class Poison>
int decode_pages(const ckv_plane_desc& d, const uint8_t* slots, int64_t stride, int threads, uint16_t version, uint16_t flags,
                 const Decode& decode, const Poison& poison) {
  std::atomic<bool> bad{false};
  parallel_for(d.n, threads, page_grain(d.page_tokens, d.head_dim), [&](int64_t begin, int64_t end) {
    for (int64_t page = begin; page < end; ++page) {
      const uint8_t* slot = slots + page * stride;
      if (header_ok(slot, version, flags)) {
        decode(page, slot);
      } else {
        poison(page);
        bad.store(true, std::memory_order_relaxed);
      }
    }
  });
  return bad.load() ? CKV_E_SLOT : CKV_OK;
}

// NaN in every value of the head-page. An unreadable slot must never look like zeros.
inline void poison_values(float* x, int64_t count) { std::fill(x, x + count, float_of(0x7FC00000u)); }

inline void poison_plane(int format, int page_tokens, int head_dim, void* codes, void* scales) {
  const int64_t code_bytes = page_tokens * code_row_bytes(format, head_dim), scale_bytes = page_tokens * scale_row_bytes(format, head_dim);
  if (format == CKV_BF16) {
    std::fill(static_cast<uint16_t*>(codes), static_cast<uint16_t*>(codes) + code_bytes / 2, uint16_t{0x7FC0});
  } else {
    memset(codes, 0, static_cast<size_t>(code_bytes));
    if (format == CKV_INT8)
      std::fill(static_cast<uint16_t*>(scales), static_cast<uint16_t*>(scales) + scale_bytes / 2, uint16_t{0x7E00});
    else
      memset(scales, 0x7F, static_cast<size_t>(scale_bytes));
  }
}

// Whole slot to fp32; `row_scales` of one row are at scales_at + row * g16.
template <class Alphabet>
void slot_to_float(const uint8_t* slot, const SlotShape& shape, float page_scale, float* out) {
  const uint8_t *nibbles = slot + sizeof(SlotHeader), *scales = slot + shape.scales_at;
  for (int row = 0; row < shape.T; ++row)
    nibble_row_to_float<Alphabet>(nibbles + static_cast<int64_t>(row) * shape.D / 2, scales + static_cast<int64_t>(row) * shape.g16,
                                  page_scale, shape.D, out + static_cast<int64_t>(row) * shape.D);
}

// Same as bf16. Slot values have at most 6 significant bits, so dropping the low half is exact.
template <class Alphabet>
void slot_to_bf16(const uint8_t* slot, const SlotShape& shape, float page_scale, uint16_t* out) {
  const uint8_t *nibbles = slot + sizeof(SlotHeader), *scales = slot + shape.scales_at;
  float row_values[1024];
  for (int row = 0; row < shape.T; ++row) {
    nibble_row_to_float<Alphabet>(nibbles + static_cast<int64_t>(row) * shape.D / 2, scales + static_cast<int64_t>(row) * shape.g16,
                                  page_scale, shape.D, row_values);
    uint16_t* o = out + static_cast<int64_t>(row) * shape.D;
    for (int ch = 0; ch < shape.D; ++ch) o[ch] = static_cast<uint16_t>(bits_of(row_values[ch]) >> 16);
  }
}

}  // namespace ckv
