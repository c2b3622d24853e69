// Device kernels shared by the raw-slot codecs: slots to values, to bf16 planes, and plane copies. One block works on one head-page.
// A slot with a wrong header gives NaN, never zeros: kernels cannot return an error without synchronising.
//
// kLinear kernels are for rows that are multiples of 16 channels (a group of scales): then nothing depends on where a row ends, and
// offsets are those of the page. Loads of several items are issued before the first is used; stores are 16 bytes per thread.
#pragma once

#include "e2m1_device.h"
#include "plane_device.h"

namespace ckv {

constexpr int kUnroll = 4;

// Ends an encode: valid word, padding, and an all-zero slot when `bad`. All threads call it after their last write.
CKV_DEVICE void finish_slot(uint8_t* slot, const SlotShape& shape, bool bad, int32_t* valid) {
  const bool refused = any_in_block(bad);
  if (refused)
    block_fill(slot, 0, static_cast<int>(shape.bytes));
  else
    block_fill(slot + shape.payload_end, 0, static_cast<int>(shape.bytes - shape.payload_end));
  if (threadIdx.x == 0) *valid = refused ? 0 : 1;
}

// A slot as a reader sees it: the header is loaded with the first items, and NaN takes the place of every scale if it is wrong.
struct SlotReader {
  const uint8_t *nibbles, *scales;
  uint4 header;

  CKV_DEVICE SlotReader(const uint8_t* slot, const SlotShape& shape)
      : nibbles(slot + sizeof(SlotHeader)), scales(slot + shape.scales_at), header(*reinterpret_cast<const uint4*>(slot)) {}
  CKV_DEVICE float page_scale(const SlotCheck& check) const {
    return !check.accepts(header) ? float_of(0x7FC00000u) : check.version == 2 ? float_of(header.z) : 1.0f;
  }
};

// Index of the scale byte of channel ch16 * 16 of a row, from the channel's place in the page.
template <bool kLinear>
CKV_DEVICE int scale_byte_index(int channel, const SlotShape& shape) {
  if constexpr (kLinear) return channel / 16;
  return channel / shape.D * shape.g16 + channel % shape.D / 16;
}

// Values of kChannels nibbles (the lowest ones of `n`) at one scale, stored as fp32 or bf16 in one access.
template <class Alphabet>
struct FloatOutput {
  using Element = float;
  template <int kChannels>
  CKV_DEVICE static void store(uint32_t n, float s, float* to) {
    float v[kChannels];
    for (int c = 0; c < kChannels; ++c) v[c] = nibble_times<Alphabet>(n >> 4 * c, s);
    if constexpr (kChannels == 4)
      *reinterpret_cast<float4*>(to) = make_float4(v[0], v[1], v[2], v[3]);
    else
      *reinterpret_cast<float2*>(to) = make_float2(v[0], v[1]);
  }
};

// Slot values have at most 6 significant bits: dropping the low half of an fp32 number is exact.
template <class Alphabet>
struct Bf16Output {
  using Element = uint16_t;
  template <int kChannels>
  CKV_DEVICE static void store(uint32_t n, float s, uint16_t* to) {
    uint32_t pair[kChannels / 2];
    for (int c = 0; c < kChannels; c += 2)
      pair[c / 2] = permute_bytes(bits_of(nibble_times<Alphabet>(n >> 4 * c, s)), bits_of(nibble_times<Alphabet>(n >> 4 * c + 4, s)), 0x7632u);
    if constexpr (kChannels == 8)
      *reinterpret_cast<uint4*>(to) = make_uint4(pair[0], pair[1], pair[2], pair[3]);
    else
      *reinterpret_cast<uint32_t*>(to) = pair[0];
  }
};

template <int kChannels>
CKV_DEVICE uint32_t load_nibbles(const uint8_t* from) {
  if constexpr (kChannels == 8) return *reinterpret_cast<const uint32_t*>(from);
  if constexpr (kChannels == 4) return *reinterpret_cast<const uint16_t*>(from);
  return *from;
}

template <class Output, int kChannels, bool kLinear>
CKV_KERNEL slot_to_values_kernel(const uint8_t* slots, int64_t stride, SlotShape shape, SlotCheck check, typename Output::Element* out) {
  constexpr int kAtOnce = 2 * kUnroll;
  const SlotReader slot(slots + blockIdx.x * stride, shape);
  typename Output::Element* page = out + static_cast<int64_t>(blockIdx.x) * shape.T * shape.D;
  const int items = shape.T * shape.D / kChannels, threads = static_cast<int>(blockDim.x);
  for (int base = static_cast<int>(threadIdx.x); base < items; base += kAtOnce * threads) {
    uint32_t n[kAtOnce];
    uint8_t byte[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int i = base + u * threads;
      if (i >= items) continue;
      n[u] = load_nibbles<kChannels>(slot.nibbles + i * (kChannels / 2));
      byte[u] = slot.scales[scale_byte_index<kLinear>(i * kChannels, shape)];
    }
    const float page_scale = slot.page_scale(check);  // NaN times anything is NaN
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int i = base + u * threads;
      if (i < items) Output::template store<kChannels>(n[u], e4m3_to_float(byte[u]) * page_scale, page + i * kChannels);
    }
  }
}

// Nibbles and scale bytes as they are.
CKV_KERNEL slot_to_nibbles_kernel(const uint8_t* slots, int64_t stride, SlotShape shape, SlotCheck check, uint8_t* codes, uint8_t* scales) {
  const SlotReader slot(slots + blockIdx.x * stride, shape);
  const int code_bytes = shape.T * shape.D / 2, scale_bytes = shape.T * shape.g16;
  uint8_t *c = codes + static_cast<int64_t>(blockIdx.x) * code_bytes, *s = scales + static_cast<int64_t>(blockIdx.x) * scale_bytes;
  if (check.accepts(slot.header)) {
    block_copy(c, slot.nibbles, code_bytes);
    block_copy(s, slot.scales, scale_bytes);
  } else {
    block_fill(c, 0, code_bytes);
    block_fill(s, 0x7F, scale_bytes);
  }
}

// ---- launchers --------------------------------------------------------------------------------------------------------------

template <class Output, int kChannels>
int launch_slot_to_values(const ckv_plane_desc& d, const uint8_t* slots, int64_t stride, SlotCheck check, void* out, void* stream) {
  if (!d.n) return CKV_OK;
  if (!out) return CKV_E_NULL;
  if (check_aligned(slots, out, nullptr)) return CKV_E_ALIGN;
  const SlotShape shape(d.page_tokens, d.head_dim);
  const unsigned grid = static_cast<unsigned>(d.n);
  typename Output::Element* to = static_cast<typename Output::Element*>(out);
  const int64_t items = static_cast<int64_t>(shape.T) * shape.D / kChannels;
  if (d.head_dim % 16 == 0)
    CKV_LAUNCH((slot_to_values_kernel<Output, kChannels, true>), grid, block_for(items, 2 * kUnroll), stream, slots, stride, shape, check, to);
  else
    CKV_LAUNCH((slot_to_values_kernel<Output, 2, false>), grid, kBlock, stream, slots, stride, shape, check, to);
  return launch_status();
}

template <class Alphabet>
int launch_slot_to_float(const ckv_plane_desc& d, const uint8_t* slots, int64_t stride, SlotCheck check, float* out, void* stream) {
  return launch_slot_to_values<FloatOutput<Alphabet>, 4>(d, slots, stride, check, out, stream);
}

template <class Alphabet>
int launch_slot_to_bf16(const ckv_plane_desc& d, const uint8_t* slots, int64_t stride, SlotCheck check, void* out, void* stream) {
  return launch_slot_to_values<Bf16Output<Alphabet>, 8>(d, slots, stride, check, out, stream);
}

inline int launch_slot_to_nibbles(const ckv_plane_desc& d, const uint8_t* slots, int64_t stride, SlotCheck check, void* codes, void* scales, void* stream) {
  if (check_aligned(slots, codes, scales)) return CKV_E_ALIGN;
  const SlotShape shape(d.page_tokens, d.head_dim);
  CKV_LAUNCH(slot_to_nibbles_kernel, static_cast<unsigned>(d.n), block_for(shape.bytes / 16, kUnroll), stream, slots, stride, shape, check,
             static_cast<uint8_t*>(codes), static_cast<uint8_t*>(scales));
  return launch_status();
}

}  // namespace ckv
