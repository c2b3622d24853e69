// Device kernels of codec e2m1-g64: plane to slots in one pass, slots to int8 planes. One block per head-page, one thread per 16 or 32 channels at a time;
// neighbouring lanes share a group's maximum.
#pragma once

#include "codec_device.h"

namespace ckv {
namespace e2m1_g64 {

enum Outcome { kDone, kBeyondReach, kNotFinite };

// The part of a group that one lane holds, kLanes lanes making a whole one: the group's scale byte, and the nibbles of this part
// unless they need the comparisons. All lanes of a warp take part.
template <int F, int kLanes>
CKV_DEVICE Outcome encode_part(const Packed<F>* q, const uint32_t* raw_scale, ShiftFactors by, uint32_t* word, uint8_t* byte) {
  using Alphabet = typename AlphabetOf<F>::type;
  constexpr int kSegments = 4 / kLanes;
  if constexpr (F == CKV_INT8) {
    const float h = scale_value<F>(raw_scale[0]);
    float tiny[16 * kSegments], most = 0.0f;
    for (int i = 0; i < 4 * kSegments; ++i) codes_to_tiny(q[i / 4].word[i % 4], tiny + 4 * i);
    for (int k = 0; k < kSegments; ++k) most = fmaxf(most, largest_code(tiny + 16 * k));
    const float amax = fabsf(float_of(max_of_lanes<kLanes>(bits_of(most))) * h);
    if (not_finite(bits_of(amax))) return kNotFinite;
    *byte = group_scale<Alphabet>(amax);
    const float s = e4m3_to_float(*byte);
    if (!(h > 0.0f && amax <= Reach<Alphabet>::kScales * s)) return kBeyondReach;  // also scales that no quantizer writes
    const float ratio = h * raised_reciprocal(s);
    for (int i = 0; i < 2 * kSegments; ++i)
      word[i] = index_word(tiny + 8 * i, ratio, by) | sign_word(q[i / 2].word[i % 2 * 2], q[i / 2].word[i % 2 * 2 + 1]);
  } else {
    float v[16 * kSegments];
    uint32_t most = 0;
    for (int k = 0; k < kSegments; ++k) {
      q[k].values(scale_value<F>(raw_scale[k]), v + 16 * k);
      most = larger(most, segment_amax_bits(v + 16 * k));
    }
    most = max_of_lanes<kLanes>(most);
    if (not_finite(most)) return kNotFinite;
    *byte = group_scale<Alphabet>(float_of(most));
    const float s = e4m3_to_float(*byte);
    if (float_of(most) > Reach<Alphabet>::kScales * s) return kBeyondReach;
    for (int k = 0; k < kSegments; ++k) quick_nibbles<Alphabet>(v + 16 * k, s, word + 2 * k);
  }
  return kDone;
}

template <int F>
CKV_DEVICE void encode_beyond_reach(const Packed<F>& q, uint32_t raw_scale, uint8_t byte, uint32_t* word) {
  float v[16];
  q.values(scale_value<F>(raw_scale), v);
  plain_nibbles<typename AlphabetOf<F>::type>(v, e4m3_to_float(byte), word);
}

// What one thread encodes at once where rows are multiples of 64 channels: 32 int8 codes, 16 channels of other formats (their values
// take more registers).
template <int F>
struct Item {
  static constexpr int kSegments = F == CKV_INT8 ? 2 : 1, kLanes = 4 / kSegments, kBytes = kSegments * Packed<F>::kBytes;
  Packed<F> q[kSegments];
  uint32_t raw[kSegments];

  // Item i of a page; `row_items` make a row.
  CKV_DEVICE void load(const uint8_t* page_codes, const uint8_t* page_scales, unsigned i, unsigned row_items) {
    for (int k = 0; k < kSegments; ++k) q[k].load(page_codes + i * kBytes + k * Packed<F>::kBytes);
    if constexpr (F == CKV_INT8 || F == CKV_FP8) {
      raw[0] = load_scale<F>(page_scales, static_cast<int>(F == CKV_INT8 ? i / kLanes : i / row_items));
      for (int k = 1; k < kSegments; ++k) raw[k] = raw[0];
    } else {
      for (int k = 0; k < kSegments; ++k) raw[k] = load_scale<F>(page_scales, static_cast<int>(i * kSegments) + k);
    }
  }
  CKV_DEVICE static void store(const uint32_t* word, uint8_t* nibbles, unsigned i) {
    if constexpr (kSegments == 2)
      reinterpret_cast<uint4*>(nibbles)[i] = make_uint4(word[0], word[1], word[2], word[3]);
    else
      reinterpret_cast<uint2*>(nibbles)[i] = make_uint2(word[0], word[1]);
  }
};

// Rows are multiples of 64 channels: nothing depends on where a row ends.
template <int F>
CKV_KERNEL encode_linear_kernel(const uint8_t* codes, const uint8_t* scales, SlotShape shape, ShiftFactors by, uint8_t* slots, int64_t stride,
                                int32_t* valid) {
  constexpr int kSegments = Item<F>::kSegments, kAtOnce = Item<F>::kBytes == 32 ? 2 : 4;
  const unsigned row_items = static_cast<unsigned>(shape.g16) / kSegments, total = static_cast<unsigned>(shape.T) * row_items;
  const uint8_t* page_codes = codes + static_cast<int64_t>(blockIdx.x) * total * Item<F>::kBytes;
  const uint8_t* page_scales = scales + static_cast<int64_t>(blockIdx.x) * shape.T * scale_row_bytes(F, shape.D);
  uint8_t *slot = slots + blockIdx.x * stride, *nibbles = slot + sizeof(SlotHeader), *scale_bytes = slot + shape.scales_at;
  if (threadIdx.x == 0) store_header(slot, kVersion, kFlagValid, 0);
  bool bad = false;
  for (unsigned base = 0; base < total; base += kAtOnce * blockDim.x) {
    const unsigned mine = base + threadIdx.x;
    Item<F> item[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const unsigned i = mine + u * blockDim.x;
      item[u].load(page_codes, page_scales, i < total ? i : total - 1, row_items);
    }
    uint32_t beyond = 0, beyond_bytes = 0;  // items that need the comparisons: one bit each, and their scale bytes
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      if (base + u * blockDim.x >= total) continue;  // the same for the whole block
      const unsigned i = mine + u * blockDim.x;
      uint32_t word[2 * kSegments];
      uint8_t byte = 0;
      const Outcome outcome = encode_part<F, Item<F>::kLanes>(item[u].q, item[u].raw, by, word, &byte);
      if (i >= total) continue;
      bad = bad || outcome == kNotFinite;
      if (outcome == kBeyondReach) beyond |= 1u << u, beyond_bytes |= static_cast<uint32_t>(byte) << 8 * u;
      if (outcome == kDone) Item<F>::store(word, nibbles, i);
      if (i % Item<F>::kLanes == 0) *reinterpret_cast<uint32_t*>(scale_bytes + i * kSegments) = byte * 0x01010101u;
    }
#pragma unroll 1
    for (unsigned i = mine; beyond; i += blockDim.x, beyond >>= 1, beyond_bytes >>= 8) {
      if (!(beyond & 1u)) continue;
      Item<F> again;
      uint32_t word[2 * kSegments];
      again.load(page_codes, page_scales, i, row_items);
      for (int k = 0; k < kSegments; ++k) encode_beyond_reach<F>(again.q[k], again.raw[k], static_cast<uint8_t>(beyond_bytes), word + 2 * k);
      Item<F>::store(word, nibbles, i);
    }
  }
  finish_slot(slot, shape, bad, valid + blockIdx.x);
}

// Rows of any length. kWide: multiples of 16 channels.
template <int F, bool kWide>
CKV_KERNEL encode_rows_kernel(const uint8_t* codes, const uint8_t* scales, SlotShape shape, ShiftFactors by, uint8_t* slots, int64_t stride,
                                int32_t* valid) {
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
    Outcome outcome = kDone;
    if constexpr (kWide) {
      Packed<F> q;
      uint32_t raw = 0;
      q.clear();
      if (active) {
        q.load(page_codes + row * code_row + j * Packed<F>::kBytes);
        raw = load_scale<F>(page_scales + row * scale_row, scale_index<F>(j, lanes));
      }
      outcome = encode_part<F, 4>(&q, &raw, by, word, &byte);
      if (outcome == kBeyondReach) encode_beyond_reach<F>(q, raw, byte, word);
    } else {
      using Alphabet = typename AlphabetOf<F>::type;
      float v[16] = {};
      if (active) load_short_segment<F>(page_codes + row * code_row, page_scales + row * scale_row, ch, len, v);
      const uint32_t amax = max_of_lanes<4>(segment_amax_bits(v));
      outcome = not_finite(amax) ? kNotFinite : kDone;
      if (outcome == kDone) {
        byte = group_scale<Alphabet>(float_of(amax));
        plain_nibbles<Alphabet>(v, e4m3_to_float(byte), word);
      }
    }
    bad = bad || outcome == kNotFinite;
    if (outcome != kNotFinite && active) {
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
  const unsigned grid = static_cast<unsigned>(d.n), block = block_for(static_cast<int64_t>(shape.T) * shape.g16, 4);
  with_format(d.format, [&](auto tag) {
    constexpr int F = decltype(tag)::value;
    if (shape.D % 64 == 0)
      CKV_LAUNCH((encode_linear_kernel<F>), grid, block, stream, c, s, shape, ShiftFactors{}, slots, stride, valid);
    else if (shape.D % 16 == 0)
      CKV_LAUNCH((encode_rows_kernel<F, true>), grid, kBlock, stream, c, s, shape, ShiftFactors{}, slots, stride, valid);
    else
      CKV_LAUNCH((encode_rows_kernel<F, false>), grid, kBlock, stream, c, s, shape, ShiftFactors{}, slots, stride, valid);
  });
  return launch_status();
}

// ---- restore to int8 --------------------------------------------------------------------------------------------------------

// fp16 scale s / 2 of an int8 plane.
CKV_DEVICE uint16_t half_scale(uint8_t byte, bool ok) {
  const bool number = ok && (byte & 0x7Fu) != 0x7Fu;
  return number ? fp16_from_float(e4m3_to_float(byte) * 0.5f) : static_cast<uint16_t>(0x7E00);
}

// Exact int8 plane of an E2M1 slot whose scale is shared by 64 channels: codes 2 * E2M1, scale s / 2.
template <bool kLinear>
CKV_KERNEL slot_to_int8_kernel(const uint8_t* slots, int64_t stride, SlotShape shape, SlotCheck check, int8_t* codes, uint16_t* scales) {
  const SlotReader slot(slots + blockIdx.x * stride, shape);
  uint8_t* page = reinterpret_cast<uint8_t*>(codes) + static_cast<int64_t>(blockIdx.x) * shape.T * shape.D;
  const int groups = ceil_div(shape.D, 64), threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
  uint16_t* page_scales = scales + static_cast<int64_t>(blockIdx.x) * shape.T * groups;
  if constexpr (kLinear) {
    const int items = shape.T * shape.D / 16, scale_count = items / 4;
    uint32_t first_scale = 0;  // the scale bytes of a group are equal: one word holds them. Its load goes ahead of the codes'
    if (thread < scale_count) first_scale = reinterpret_cast<const uint32_t*>(slot.scales)[thread];
    for (int base = thread; base < items; base += kUnroll * threads) {
      Packed<CKV_NVFP4> q[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        if (base + u * threads < items) q[u].load(slot.nibbles + 8 * (base + u * threads));
      const uint32_t keep = check.accepts(slot.header) ? ~0u : 0u;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (base + u * threads >= items) continue;
        const uint32_t a = q[u].word[0] & keep, b = q[u].word[1] & keep;
        reinterpret_cast<uint4*>(page)[base + u * threads] =
            make_uint4(twice_codes(a), twice_codes(a >> 16), twice_codes(b), twice_codes(b >> 16));
      }
    }
    const bool ok = check.accepts(slot.header);
    for (int i = thread; i < scale_count; i += threads) {
      const uint32_t bytes = i == thread ? first_scale : reinterpret_cast<const uint32_t*>(slot.scales)[i];
      page_scales[i] = half_scale(static_cast<uint8_t>(bytes), ok);
    }
  } else {
    const bool ok = check.accepts(slot.header);
    for (int i = thread; i < shape.T * shape.D / 2; i += threads)
      reinterpret_cast<uint16_t*>(page)[i] = static_cast<uint16_t>(ok ? twice_codes(slot.nibbles[i]) : 0u);
    for (int i = thread; i < shape.T * groups; i += threads)
      page_scales[i] = half_scale(slot.scales[i / groups * shape.g16 + i % groups * 4], ok);
  }
}

inline int launch_slot_to_int8(const ckv_plane_desc& d, const uint8_t* slots, int64_t stride, SlotCheck check, void* codes, void* scales, void* stream) {
  if (check_aligned(slots, codes, scales)) return CKV_E_ALIGN;
  const SlotShape shape(d.page_tokens, d.head_dim);
  const unsigned grid = static_cast<unsigned>(d.n), block = block_for(static_cast<int64_t>(shape.T) * shape.D / 16, kUnroll);
  int8_t* c = static_cast<int8_t*>(codes);
  uint16_t* s = static_cast<uint16_t*>(scales);
  if (d.head_dim % 64 == 0)
    CKV_LAUNCH((slot_to_int8_kernel<true>), grid, block, stream, slots, stride, shape, check, c, s);
  else
    CKV_LAUNCH((slot_to_int8_kernel<false>), grid, kBlock, stream, slots, stride, shape, check, c, s);
  return launch_status();
}

}  // namespace e2m1_g64
}  // namespace ckv
