// Device-side access to planes: segments of 16 channels in registers, 16-byte accesses where the row layout allows them.
#pragma once

#include "plane.h"

namespace ckv {

// 16 channels of one row from `ch` on; channels past `len` are zero. kWide: rows are multiples of 16 channels, so that a segment
// is 8, 16 or 32 aligned bytes.
template <int F, bool kWide>
CKV_DEVICE void load_segment(const uint8_t* code_row, const uint8_t* scale_row, int ch, int len, float* v) {
  const float s = Source<F>::scale(scale_row, ch);
  if constexpr (kWide) {
    typename Source<F>::Code raw[16];  // memcpy, not a cast: the registers change their type here
    const uint8_t* from = code_row + code_row_bytes(F, ch);
    if constexpr (F == CKV_NVFP4 || F == CKV_ISO3) {
      const uint2 q = *reinterpret_cast<const uint2*>(from);
      memcpy(raw, &q, sizeof q);
    } else {
      for (unsigned part = 0; part < sizeof raw / sizeof(uint4); ++part) {
        const uint4 q = reinterpret_cast<const uint4*>(from)[part];
        memcpy(reinterpret_cast<uint8_t*>(raw) + sizeof q * part, &q, sizeof q);
      }
    }
    for (int i = 0; i < 16; ++i) v[i] = Source<F>::value(raw, i, s);
  } else {
    for (int i = 0; i < 16; ++i) v[i] = i < len ? Source<F>::value(code_row, ch + i, s) : 0.0f;
  }
}

template <bool kWide>
CKV_DEVICE void load_values(const float* row, int ch, int len, float* v) {
  if constexpr (kWide) {
    for (int i = 0; i < 4; ++i) {
      const float4 q = reinterpret_cast<const float4*>(row + ch)[i];
      v[4 * i] = q.x, v[4 * i + 1] = q.y, v[4 * i + 2] = q.z, v[4 * i + 3] = q.w;
    }
  } else {
    for (int i = 0; i < 16; ++i) v[i] = i < len ? row[ch + i] : 0.0f;
  }
}

CKV_DEVICE uint32_t segment_amax_bits(const float* v) {
  uint32_t most = 0;
  for (int i = 0; i < 16; ++i) {
    const uint32_t a = bits_of(v[i]) & 0x7FFFFFFFu;
    most = a > most ? a : most;
  }
  return most;
}

// Maximum over the four lanes that hold one group of 64 channels. All 32 lanes of the warp take part.
CKV_DEVICE uint32_t max_of_four_lanes(uint32_t x) {
  for (int step = 1; step < 4; step *= 2) {
    const uint32_t other = __shfl_xor_sync(kFullWarp, x, step);
    x = other > x ? other : x;
  }
  return x;
}

// Nibbles of a segment to `out` (its first byte); len is even.
template <class Alphabet, bool kWide>
CKV_DEVICE void store_nibbles(const float* v, int len, float s, uint8_t* out) {
  uint32_t word[2] = {0, 0};
  for (int i = 0; i < 16; ++i) word[i / 8] |= nibble_of<Alphabet>(v[i], s) << 4 * (i % 8);
  if constexpr (kWide) {
    *reinterpret_cast<uint2*>(out) = make_uint2(word[0], word[1]);
  } else {
    for (int i = 0; i < 8; ++i)  // constant bounds: `word` must stay in registers
      if (2 * i < len) out[i] = static_cast<uint8_t>(word[i / 4] >> 8 * (i % 4));
  }
}

// Block-wide copy and fill; 16 bytes at a time where both ends are aligned.
CKV_DEVICE void block_copy(uint8_t* to, const uint8_t* from, int64_t bytes) {
  int64_t done = 0;
  if (((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) & 15u) == 0) {
    done = bytes / 16 * 16;
    for (int64_t i = threadIdx.x; i < bytes / 16; i += blockDim.x) reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
  }
  for (int64_t i = done + threadIdx.x; i < bytes; i += blockDim.x) to[i] = from[i];
}
CKV_DEVICE void block_fill(uint8_t* to, uint8_t value, int64_t bytes) {
  for (int64_t i = threadIdx.x; i < bytes; i += blockDim.x) to[i] = value;
}

}  // namespace ckv
