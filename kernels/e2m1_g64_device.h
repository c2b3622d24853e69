// Device kernels of codec e2m1-g64: plane to slots in one pass. One block per head-page, one thread per 16 channels at a time;
// four neighbouring lanes share a group's maximum.
#pragma once

#include "codec_device.h"

namespace ckv {
namespace e2m1_g64 {

// One segment: its nibbles, and the scale byte of its group; false when the group holds what is not finite. All lanes of a warp
// take part, those without a segment with zeros.
template <int F>
CKV_DEVICE bool encode_segment(const Packed<F>& q, uint32_t raw_scale, uint32_t* word, uint8_t* byte) {
  using Alphabet = typename AlphabetOf<F>::type;
  const float h = scale_value<F>(raw_scale);
  if constexpr (F == CKV_INT8) {
    float tiny[16];
    for (int i = 0; i < 4; ++i) codes_to_tiny(q.word[i], tiny + 4 * i);
    const float most = float_of(max_of_lanes<4>(bits_of(largest_code(tiny)))), amax = float_of(bits_of(most * h) & 0x7FFFFFFFu);
    if (not_finite(bits_of(amax))) return false;
    *byte = group_scale<Alphabet>(amax);
    const float s = e4m3_to_float(*byte);
    if (h > 0.0f && amax <= Reach<Alphabet>::kScales * s) {
      const float ratio = h * raised_reciprocal(s);
      word[0] = index_word(tiny, ratio) | sign_word(q.word[0], q.word[1]);
      word[1] = index_word(tiny + 8, ratio) | sign_word(q.word[2], q.word[3]);
      return true;
    }
    float v[16];  // scales that no quantizer writes, or that saturate
    q.values(h, v);
    nibbles_of<Alphabet>(v, amax, s, word);
  } else {
    float v[16];
    q.values(h, v);
    const uint32_t amax = max_of_lanes<4>(segment_amax_bits(v));
    if (not_finite(amax)) return false;
    *byte = group_scale<Alphabet>(float_of(amax));
    nibbles_of<Alphabet>(v, float_of(amax), e4m3_to_float(*byte), word);
  }
  return true;
}

// Rows are multiples of 64 channels: segment i of the page is 16 channels from 16 * i on, whatever its row.
template <int F>
CKV_KERNEL encode_linear_kernel(const uint8_t* codes, const uint8_t* scales, SlotShape shape, uint8_t* slots, int64_t stride, int32_t* valid) {
  const int lanes = shape.g16, total = shape.T * lanes, threads = static_cast<int>(blockDim.x);
  const uint8_t* page_codes = codes + static_cast<int64_t>(blockIdx.x) * total * Packed<F>::kBytes;
  const uint8_t* page_scales = scales + static_cast<int64_t>(blockIdx.x) * shape.T * scale_row_bytes(F, shape.D);
  uint8_t *slot = slots + blockIdx.x * stride, *nibbles = slot + sizeof(SlotHeader), *scale_bytes = slot + shape.scales_at;
  if (threadIdx.x == 0) store_header(slot, kVersion, kFlagValid, 0);
  bool bad = false;
  for (int base = 0; base < total; base += kUnroll * threads) {
    Packed<F> q[kUnroll];
    uint32_t raw[kUnroll];
    for (int u = 0; u < kUnroll; ++u) {
      const int i = base + u * threads + static_cast<int>(threadIdx.x);
      q[u].clear(), raw[u] = 0;
      if (i < total) {
        q[u].load(page_codes + i * Packed<F>::kBytes);
        raw[u] = load_scale<F>(page_scales, scale_index<F>(i, lanes));
      }
    }
    for (int u = 0; u < kUnroll; ++u) {
      const int first = base + u * threads, i = first + static_cast<int>(threadIdx.x);
      if (first >= total) break;  // the same for the whole block
      uint32_t word[2];
      uint8_t byte = 0;
      const bool ok = encode_segment<F>(q[u], raw[u], word, &byte);
      bad = bad || !ok;
      if (ok && i < total) {
        store_nibbles<true>(word, 16, nibbles + 8 * i);
        if (i % 4 == 0) *reinterpret_cast<uint32_t*>(scale_bytes + i) = byte * 0x01010101u;
      }
    }
  }
  finish_slot(slot, shape, bad, valid + blockIdx.x);
}

// Rows of any length. kWide: multiples of 16 channels.
template <int F, bool kWide>
CKV_KERNEL encode_rows_kernel(const uint8_t* codes, const uint8_t* scales, SlotShape shape, uint8_t* slots, int64_t stride, int32_t* valid) {
  using Alphabet = typename AlphabetOf<F>::type;
  const int code_row = static_cast<int>(code_row_bytes(F, shape.D)), scale_row = static_cast<int>(scale_row_bytes(F, shape.D));
  const uint8_t* page_codes = codes + static_cast<int64_t>(blockIdx.x) * shape.T * code_row;
  const uint8_t* page_scales = scales + static_cast<int64_t>(blockIdx.x) * shape.T * scale_row;
  uint8_t *slot = slots + blockIdx.x * stride, *nibbles = slot + sizeof(SlotHeader), *scale_bytes = slot + shape.scales_at;
  const int lanes = 4 * ceil_div(shape.D, 64), total = shape.T * lanes;
  if (threadIdx.x == 0) store_header(slot, kVersion, kFlagValid, 0);
  bool bad = false;
  for (int base = 0; base < total; base += static_cast<int>(blockDim.x)) {  // every thread takes every turn: the shuffles need whole warps
    const int i = base + static_cast<int>(threadIdx.x), row = i / lanes, j = i % lanes, ch = 16 * j;
    const bool active = i < total && j < shape.g16;
    const int len = active ? (shape.D - ch < 16 ? shape.D - ch : 16) : 0;
    uint32_t word[2];
    uint8_t byte = 0;
    bool ok = true;
    if constexpr (kWide) {
      Packed<F> q;
      uint32_t raw = 0;
      q.clear();
      if (active) {
        q.load(page_codes + row * code_row + j * Packed<F>::kBytes);
        raw = load_scale<F>(page_scales + row * scale_row, scale_index<F>(j, lanes));
      }
      ok = encode_segment<F>(q, raw, word, &byte);
    } else {
      float v[16] = {};
      if (active) load_short_segment<F>(page_codes + row * code_row, page_scales + row * scale_row, ch, len, v);
      const uint32_t amax = max_of_lanes<4>(segment_amax_bits(v));
      ok = !not_finite(amax);
      if (ok) {
        byte = group_scale<Alphabet>(float_of(amax));
        nibbles_of<Alphabet>(v, float_of(amax), e4m3_to_float(byte), word);
      }
    }
    bad = bad || !ok;
    if (ok && active) {
      store_nibbles<kWide>(word, len, nibbles + (row * shape.D + ch) / 2);
      scale_bytes[row * shape.g16 + j] = byte;
    }
  }
  finish_slot(slot, shape, bad, valid + blockIdx.x);
}

inline int launch_encode(const ckv_plane_desc& d, const void* codes, const void* scales, uint8_t* slots, int64_t stride, int32_t* valid,
                         void* stream) {
  const SlotShape shape(d.page_tokens, d.head_dim);
  const uint8_t *c = static_cast<const uint8_t*>(codes), *s = static_cast<const uint8_t*>(scales);
  const unsigned grid = static_cast<unsigned>(d.n), block = block_for(static_cast<int64_t>(shape.T) * shape.g16, kUnroll);
  with_format(d.format, [&](auto tag) {
    constexpr int F = decltype(tag)::value;
    if (shape.D % 64 == 0)
      CKV_LAUNCH((encode_linear_kernel<F>), grid, block, stream, c, s, shape, slots, stride, valid);
    else if (shape.D % 16 == 0)
      CKV_LAUNCH((encode_rows_kernel<F, true>), grid, kBlock, stream, c, s, shape, slots, stride, valid);
    else
      CKV_LAUNCH((encode_rows_kernel<F, false>), grid, kBlock, stream, c, s, shape, slots, stride, valid);
  });
  return launch_status();
}

}  // namespace e2m1_g64
}  // namespace ckv
