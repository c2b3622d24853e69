// Device kernels shared by the raw-slot codecs: slots to values, to bf16 and to int8 planes, and plane copies. One block works on
// one head-page. A slot with a wrong header gives NaN, never zeros: kernels cannot return an error without synchronising.
#pragma once

#include "plane_device.h"

namespace ckv {

struct SlotCheck {
  uint16_t version, flags;
};

CKV_DEVICE float slot_page_scale(const uint8_t* slot, uint16_t version) {
  return version == 2 ? reinterpret_cast<const SlotHeader*>(slot)->page_scale : 1.0f;
}

// Sum of the flags over the block is zero when every thread agrees that all is well.
CKV_DEVICE bool any_in_block(bool flag) { return __syncthreads_count(flag) != 0; }

// Ends an encode: valid word, padding, and an all-zero slot when `bad`. All threads call it after their last write.
CKV_DEVICE void finish_slot(uint8_t* slot, const SlotShape& shape, bool bad, int32_t* valid) {
  const bool refused = any_in_block(bad);
  if (refused)
    block_fill(slot, 0, shape.bytes);
  else
    block_fill(slot + shape.payload_end, 0, shape.bytes - shape.payload_end);
  if (threadIdx.x == 0) *valid = refused ? 0 : 1;
}

// fp32 values: kChannels (4 or 2) neighbouring channels per thread, one store of 16 or 8 bytes.
template <class Alphabet, int kChannels>
CKV_KERNEL slot_to_float_kernel(const uint8_t* slots, int64_t stride, SlotShape shape, SlotCheck check, float* out) {
  const uint8_t* slot = slots + blockIdx.x * stride;
  const bool ok = header_ok(slot, check.version, check.flags);
  const float page_scale = ok ? slot_page_scale(slot, check.version) : float_of(0x7FC00000u);
  float* page = out + static_cast<int64_t>(blockIdx.x) * shape.T * shape.D;
  for (int i = threadIdx.x; i < shape.T * shape.D / kChannels; i += blockDim.x) {
    const int row = i * kChannels / shape.D, ch = i * kChannels % shape.D;
    const uint8_t* nibbles = slot + sizeof(SlotHeader) + i * kChannels / 2;
    // A NaN page scale times any finite scale is NaN, and so is every product with it.
    const float s = ok ? e4m3_to_float(slot[shape.scales_at + row * shape.g16 + ch / 16]) * page_scale : page_scale;
    float v[kChannels];
    for (int c = 0; c < kChannels; ++c) v[c] = nibble_value<Alphabet>(nibbles[c / 2] >> 4 * (c & 1) & 15u, s);
    if constexpr (kChannels == 4)
      reinterpret_cast<float4*>(page)[i] = make_float4(v[0], v[1], v[2], v[3]);
    else
      reinterpret_cast<float2*>(page)[i] = make_float2(v[0], v[1]);
  }
}

// bf16 values: kChannels (8 or 2) per thread. Slot values have at most 6 significant bits: dropping the low half is exact.
template <class Alphabet, int kChannels>
CKV_KERNEL slot_to_bf16_kernel(const uint8_t* slots, int64_t stride, SlotShape shape, SlotCheck check, uint16_t* out) {
  const uint8_t* slot = slots + blockIdx.x * stride;
  const bool ok = header_ok(slot, check.version, check.flags);
  const float page_scale = ok ? slot_page_scale(slot, check.version) : float_of(0x7FC00000u);
  uint16_t* page = out + static_cast<int64_t>(blockIdx.x) * shape.T * shape.D;
  for (int i = threadIdx.x; i < shape.T * shape.D / kChannels; i += blockDim.x) {
    const int row = i * kChannels / shape.D, ch = i * kChannels % shape.D;
    const uint8_t* nibbles = slot + sizeof(SlotHeader) + i * kChannels / 2;
    const float s = ok ? e4m3_to_float(slot[shape.scales_at + row * shape.g16 + ch / 16]) * page_scale : page_scale;
    uint32_t pair[kChannels / 2];
    for (int c = 0; c < kChannels; c += 2) {
      const uint32_t low = bits_of(nibble_value<Alphabet>(nibbles[c / 2] & 15u, s)), high = bits_of(nibble_value<Alphabet>(nibbles[c / 2] >> 4, s));
      pair[c / 2] = low >> 16 | (high & 0xFFFF0000u);
    }
    if constexpr (kChannels == 8)
      reinterpret_cast<uint4*>(page)[i] = make_uint4(pair[0], pair[1], pair[2], pair[3]);
    else
      reinterpret_cast<uint32_t*>(page)[i] = pair[0];
  }
}

// Exact int8 plane of an E2M1 slot whose scale is shared by 64 channels: codes 2 * E2M1, scale s / 2.
template <int kChannels>
CKV_KERNEL slot_to_int8_kernel(const uint8_t* slots, int64_t stride, SlotShape shape, SlotCheck check, int8_t* codes, uint16_t* scales) {
  const uint8_t* slot = slots + blockIdx.x * stride;
  const bool ok = header_ok(slot, check.version, check.flags);
  uint8_t* page = reinterpret_cast<uint8_t*>(codes) + static_cast<int64_t>(blockIdx.x) * shape.T * shape.D;
  for (int i = threadIdx.x; i < shape.T * shape.D / kChannels; i += blockDim.x) {
    const uint8_t* nibbles = slot + sizeof(SlotHeader) + i * kChannels / 2;
    uint32_t word[(kChannels + 3) / 4] = {};
    for (int c = 0; c < kChannels; ++c) {
      const uint32_t n = nibbles[c / 2] >> 4 * (c & 1) & 15u;
      const int twice = ok ? E2M1::twice(static_cast<int>(n & 7u)) : 0;
      word[c / 4] |= (static_cast<uint32_t>(n & 8u ? -twice : twice) & 255u) << 8 * (c % 4);
    }
    if constexpr (kChannels == 16)
      reinterpret_cast<uint4*>(page)[i] = make_uint4(word[0], word[1], word[2], word[3]);
    else
      reinterpret_cast<uint16_t*>(page)[i] = static_cast<uint16_t>(word[0]);
  }
  const int groups = ceil_div(shape.D, 64);
  uint16_t* page_scales = scales + static_cast<int64_t>(blockIdx.x) * shape.T * groups;
  for (int i = threadIdx.x; i < shape.T * groups; i += blockDim.x) {
    const uint8_t byte = slot[shape.scales_at + i / groups * shape.g16 + i % groups * 4];
    const bool number = ok && (byte & 0x7Fu) != 0x7Fu;
    page_scales[i] = number ? fp16_from_float(e4m3_to_float(byte) * 0.5f) : static_cast<uint16_t>(0x7E00);
  }
}

// Nibbles and scale bytes as they are.
CKV_KERNEL slot_to_nibbles_kernel(const uint8_t* slots, int64_t stride, SlotShape shape, SlotCheck check, uint8_t* codes, uint8_t* scales) {
  const uint8_t* slot = slots + blockIdx.x * stride;
  const int64_t code_bytes = shape.scales_at - static_cast<int64_t>(sizeof(SlotHeader)), scale_bytes = shape.payload_end - shape.scales_at;
  uint8_t *c = codes + blockIdx.x * code_bytes, *s = scales + blockIdx.x * scale_bytes;
  if (header_ok(slot, check.version, check.flags)) {
    block_copy(c, slot + sizeof(SlotHeader), code_bytes);
    block_copy(s, slot + shape.scales_at, scale_bytes);
  } else {
    block_fill(c, 0, code_bytes);
    block_fill(s, 0x7F, scale_bytes);
  }
}

// ---- launchers --------------------------------------------------------------------------------------------------------------

template <class Alphabet>
int launch_slot_to_float(const ckv_plane_desc& d, const uint8_t* slots, int64_t stride, SlotCheck check, float* out, void* stream) {
  if (!d.n) return CKV_OK;
  if (!out) return CKV_E_NULL;
  const SlotShape shape(d.page_tokens, d.head_dim);
  const unsigned grid = static_cast<unsigned>(d.n);
  if (d.head_dim % 4 == 0)
    CKV_LAUNCH((slot_to_float_kernel<Alphabet, 4>), grid, kBlock, stream, slots, stride, shape, check, out);
  else
    CKV_LAUNCH((slot_to_float_kernel<Alphabet, 2>), grid, kBlock, stream, slots, stride, shape, check, out);
  return launch_status();
}

template <class Alphabet>
int launch_slot_to_bf16(const ckv_plane_desc& d, const uint8_t* slots, int64_t stride, SlotCheck check, void* out, void* stream) {
  if (!d.n) return CKV_OK;
  if (!out) return CKV_E_NULL;
  const SlotShape shape(d.page_tokens, d.head_dim);
  const unsigned grid = static_cast<unsigned>(d.n);
  uint16_t* to = static_cast<uint16_t*>(out);
  if (d.head_dim % 8 == 0)
    CKV_LAUNCH((slot_to_bf16_kernel<Alphabet, 8>), grid, kBlock, stream, slots, stride, shape, check, to);
  else
    CKV_LAUNCH((slot_to_bf16_kernel<Alphabet, 2>), grid, kBlock, stream, slots, stride, shape, check, to);
  return launch_status();
}

inline int launch_slot_to_int8(const ckv_plane_desc& d, const uint8_t* slots, int64_t stride, SlotCheck check, void* codes, void* scales, void* stream) {
  const SlotShape shape(d.page_tokens, d.head_dim);
  const unsigned grid = static_cast<unsigned>(d.n);
  int8_t* c = static_cast<int8_t*>(codes);
  uint16_t* s = static_cast<uint16_t*>(scales);
  if (d.head_dim % 16 == 0)
    CKV_LAUNCH((slot_to_int8_kernel<16>), grid, kBlock, stream, slots, stride, shape, check, c, s);
  else
    CKV_LAUNCH((slot_to_int8_kernel<2>), grid, kBlock, stream, slots, stride, shape, check, c, s);
  return launch_status();
}

inline int launch_slot_to_nibbles(const ckv_plane_desc& d, const uint8_t* slots, int64_t stride, SlotCheck check, void* codes, void* scales, void* stream) {
  const SlotShape shape(d.page_tokens, d.head_dim);
  CKV_LAUNCH(slot_to_nibbles_kernel, static_cast<unsigned>(d.n), kBlock, stream, slots, stride, shape, check, static_cast<uint8_t*>(codes),
             static_cast<uint8_t*>(scales));
  return launch_status();
}

// Refuses what one grid cannot hold, beside the checks shared with the host.
inline int check_grid(const ckv_plane_desc* d) { return d->n > 0x7FFFFFFF ? CKV_E_SHAPE : CKV_OK; }

}  // namespace ckv
