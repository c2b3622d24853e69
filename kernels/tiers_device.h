// Device kernels of the hot tiers.
#pragma once

#include "plane_device.h"

namespace ckv {
namespace tiers {

CKV_HD uint32_t round_pair(int format, float a, float b) {
  return format == CKV_BF16 ? bf16_from_float(a) | static_cast<uint32_t>(bf16_from_float(b)) << 16
                            : fp16_from_float(clamp_fp16(a)) | static_cast<uint32_t>(fp16_from_float(clamp_fp16(b))) << 16;
}

// bf16, fp16: two values per thread.
CKV_KERNEL round_kernel(int format, const float2* x, uint32_t* codes, int64_t pairs) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kBlock) + threadIdx.x; i < pairs; i += static_cast<int64_t>(gridDim.x) * kBlock)
    codes[i] = round_pair(format, x[i].x, x[i].y);
}

// int8: one thread per 16 channels, four neighbouring lanes share a scale.
template <bool kWide>
CKV_KERNEL int8_kernel(const float* x, int8_t* codes, uint16_t* scales, int64_t rows, int D) {
  const int groups = ceil_div(D, 64), lanes = 4 * groups;
  const int64_t total = rows * lanes, step = static_cast<int64_t>(gridDim.x) * kBlock;
  for (int64_t base = blockIdx.x * static_cast<int64_t>(kBlock); base < total; base += step) {
    const int64_t i = base + threadIdx.x, row = i / lanes;
    const int j = static_cast<int>(i % lanes), ch = 16 * j;
    const bool active = i < total && ch < D;
    const int len = active ? (D - ch < 16 ? D - ch : 16) : 0;
    float v[16] = {};
    if (active) load_values<kWide>(x + row * D, ch, len, v);
    const uint16_t h = fp16_scale(float_of(max_of_four_lanes(segment_amax_bits(v))) / 127.0f);
    if (!active) continue;
    if (j % 4 == 0) scales[row * groups + j / 4] = h;
    const float s = fp16_to_float(h);
    uint32_t word[4] = {0, 0, 0, 0};
    for (int k = 0; k < 16; ++k) {
      const float q = h ? v[k] / s : 0.0f;
      const int code = static_cast<int>(rintf(fminf(fmaxf(q, -127.0f), 127.0f)));
      word[k / 4] |= (static_cast<uint32_t>(code) & 255u) << 8 * (k % 4);
    }
    int8_t* to = codes + row * D + ch;
    if constexpr (kWide)
      *reinterpret_cast<uint4*>(to) = make_uint4(word[0], word[1], word[2], word[3]);
    else
      for (int k = 0; k < 16; ++k)  // constant bounds: `word` must stay in registers
        if (k < len) to[k] = static_cast<int8_t>(word[k / 4] >> 8 * (k % 4));
  }
}

// fp8: one warp per row.
CKV_KERNEL fp8_kernel(const float* x, uint8_t* codes, uint16_t* scales, int64_t rows, int D) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (kBlock / 32);
  for (int64_t row = blockIdx.x * static_cast<int64_t>(kBlock / 32) + threadIdx.x / 32; row < rows; row += warps) {
    const float* v = x + row * D;
    uint32_t most = 0;
    for (int ch = lane; ch < D; ch += 32) {
      const uint32_t a = bits_of(v[ch]) & 0x7FFFFFFFu;
      most = a > most ? a : most;
    }
    for (int step = 16; step; step /= 2) {
      const uint32_t other = __shfl_xor_sync(kFullWarp, most, step);
      most = other > most ? other : most;
    }
    const uint16_t h = fp16_scale(float_of(most) / 448.0f);
    if (lane == 0) scales[row] = h;
    const float s = fp16_to_float(h);
    for (int ch = lane; ch < D; ch += 32) codes[row * D + ch] = h ? e4m3_from_float(v[ch] / s) : static_cast<uint8_t>(0);
  }
}

// nvfp4, iso3: one thread per group.
template <class Alphabet, bool kWide>
CKV_KERNEL nibble_kernel(const float* x, uint8_t* codes, uint8_t* scales, int64_t rows, int D) {
  const int g16 = ceil_div(D, 16);
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kBlock) + threadIdx.x; i < rows * g16; i += static_cast<int64_t>(gridDim.x) * kBlock) {
    const int64_t row = i / g16;
    const int ch = static_cast<int>(i % g16) * 16, len = D - ch < 16 ? D - ch : 16;
    float v[16];
    load_values<kWide>(x + row * D, ch, len, v);
    const uint8_t byte = group_scale<Alphabet>(float_of(segment_amax_bits(v)));
    scales[i] = byte;
    store_nibbles<Alphabet, kWide>(v, len, e4m3_to_float(byte), codes + (row * D + ch) / 2);
  }
}

// Every format to fp32: kChannels (4 or 2) neighbouring channels per thread.
template <int F, int kChannels>
CKV_KERNEL dequantize_kernel(const uint8_t* codes, const uint8_t* scales, float* x, int64_t rows, int D) {
  const int64_t code_row = code_row_bytes(F, D), scale_row = scale_row_bytes(F, D), chunks = D / kChannels;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kBlock) + threadIdx.x; i < rows * chunks; i += static_cast<int64_t>(gridDim.x) * kBlock) {
    const int64_t row = i / chunks;
    const int ch = static_cast<int>(i % chunks) * kChannels;
    const float s = Source<F>::scale(scales + row * scale_row, ch);
    float v[kChannels];
    for (int c = 0; c < kChannels; ++c) v[c] = Source<F>::value(codes + row * code_row, ch + c, s);
    if constexpr (kChannels == 4)
      reinterpret_cast<float4*>(x)[i] = make_float4(v[0], v[1], v[2], v[3]);
    else
      reinterpret_cast<float2*>(x)[i] = make_float2(v[0], v[1]);
  }
}

// Gather of the dump's rows; element loads, since a view's strides promise no alignment.
template <int kDtype>
CKV_KERNEL load_kernel(const void* src, int64_t token_stride, int64_t head_stride, int heads, int T, int D, float2* out, int64_t pairs) {
  const int per_row = D / 2;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kBlock) + threadIdx.x; i < pairs; i += static_cast<int64_t>(gridDim.x) * kBlock) {
    const int64_t row = i / per_row, head_page = row / T;
    const int64_t at = (head_page / heads * T + row % T) * token_stride + head_page % heads * head_stride + i % per_row * 2;
    float v[2];
    for (int c = 0; c < 2; ++c) {
      if constexpr (kDtype == 0) v[c] = bf16_to_float(static_cast<const uint16_t*>(src)[at + c]);
      if constexpr (kDtype == 1) v[c] = fp16_to_float(static_cast<const uint16_t*>(src)[at + c]);
      if constexpr (kDtype == 2) v[c] = static_cast<const float*>(src)[at + c];
    }
    out[i] = make_float2(v[0], v[1]);
  }
}

}  // namespace tiers
}  // namespace ckv
