// Device kernels of the hot tiers: quantize, dequantize, gather. One block per head-page (round_kernel: flat); fp32 goes through as
// 16 bytes per thread where rows are multiples of 4 channels, as 8 elsewhere (kChannels 4 or 2), several loads ahead of their use.
#pragma once

#include <type_traits>

#include "plane_device.h"

namespace ckv {
namespace tiers {

constexpr int kUnroll = 4;

template <int kChannels>
CKV_DEVICE void load_floats(const float* from, float* v) {
  if constexpr (kChannels == 4) {
    const float4 q = *reinterpret_cast<const float4*>(from);
    v[0] = q.x, v[1] = q.y, v[2] = q.z, v[3] = q.w;
  } else {
    const float2 q = *reinterpret_cast<const float2*>(from);
    v[0] = q.x, v[1] = q.y;
  }
}
template <int kChannels>
CKV_DEVICE void store_floats(const float* v, float* to) {
  if constexpr (kChannels == 4)
    *reinterpret_cast<float4*>(to) = make_float4(v[0], v[1], v[2], v[3]);
  else
    *reinterpret_cast<float2*>(to) = make_float2(v[0], v[1]);
}
// The lowest kBytes (1, 2 or 4) of `word`.
template <int kBytes>
CKV_DEVICE void store_bytes(uint32_t word, uint8_t* to) {
  if constexpr (kBytes == 4) *reinterpret_cast<uint32_t*>(to) = word;
  if constexpr (kBytes == 2) *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(word);
  if constexpr (kBytes == 1) *to = static_cast<uint8_t>(word);
}
template <int kChannels>
CKV_DEVICE uint32_t amax_bits(const float* v) {
  uint32_t most = 0;
  for (int c = 0; c < kChannels; ++c) most = larger(most, bits_of(v[c]) & 0x7FFFFFFFu);
  return most;
}

CKV_HD uint32_t round_pair(int format, float a, float b) {
  return format == CKV_BF16 ? bf16_from_float(a) | static_cast<uint32_t>(bf16_from_float(b)) << 16
                            : fp16_from_float(clamp_fp16(a)) | static_cast<uint32_t>(fp16_from_float(clamp_fp16(b))) << 16;
}

// bf16, fp16: four values per thread at a time; `count` values in all, an even number.
CKV_KERNEL round_kernel(int format, const float* x, uint32_t* codes, int64_t count) {
  const int64_t quads = count / 4, step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t base = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; base < quads; base += kUnroll * step) {
    float v[kUnroll][4];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u)
      if (base + u * step < quads) load_floats<4>(x + 4 * (base + u * step), v[u]);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u)
      if (base + u * step < quads)
        reinterpret_cast<uint2*>(codes)[base + u * step] = make_uint2(round_pair(format, v[u][0], v[u][1]), round_pair(format, v[u][2], v[u][3]));
  }
  if (count % 4 && blockIdx.x == 0 && threadIdx.x == 0) codes[count / 2 - 1] = round_pair(format, x[count - 2], x[count - 1]);
}

CKV_DEVICE uint32_t int8_code(float x, float s) {
  return static_cast<uint32_t>(static_cast<int>(rintf(fminf(fmaxf(x / s, -127.0f), 127.0f)))) & 255u;
}

// How the values of a format are made from a group's largest magnitude.
template <int F>
struct Grouped {  // nvfp4, iso3
  using Alphabet = typename std::conditional<F == CKV_ISO3, Iso3, E2M1>::type;
  static constexpr int kGroup = 16, kBits = 4;
  uint8_t byte;
  float s;
  CKV_DEVICE explicit Grouped(uint32_t amax) : byte(group_scale<Alphabet>(float_of(amax))), s(e4m3_to_float(byte)) {}
  CKV_DEVICE uint32_t code(float x) const { return nibble_of<Alphabet>(x, s); }
  CKV_DEVICE void store_scale(uint8_t* scales, int index) const { scales[index] = byte; }
};
template <>
struct Grouped<CKV_INT8> {
  static constexpr int kGroup = 64, kBits = 8;
  uint16_t h;
  float s;
  CKV_DEVICE explicit Grouped(uint32_t amax) : h(fp16_scale(float_of(amax) / 127.0f)), s(fp16_to_float(h)) {}
  CKV_DEVICE uint32_t code(float x) const { return h ? int8_code(x, s) : 0u; }
  CKV_DEVICE void store_scale(uint8_t* scales, int index) const { reinterpret_cast<uint16_t*>(scales)[index] = h; }
};

// int8, nvfp4, iso3: neighbouring lanes share a group. kLinear: rows are multiples of a group.
template <int F, int kChannels, bool kLinear>
CKV_KERNEL quantize_kernel(const float* x, uint8_t* codes, uint8_t* scales, int T, int D) {
  using Group = Grouped<F>;
  constexpr int kLanes = Group::kGroup / kChannels;
  const int groups = ceil_div(D, Group::kGroup), row_lanes = groups * kLanes, total = T * row_lanes, threads = static_cast<int>(blockDim.x);
  const float* page = x + static_cast<int64_t>(blockIdx.x) * T * D;
  uint8_t* page_codes = codes + static_cast<int64_t>(blockIdx.x) * T * code_row_bytes(F, D);
  uint8_t* page_scales = scales + static_cast<int64_t>(blockIdx.x) * T * scale_row_bytes(F, D);
  for (int base = 0; base < total; base += kUnroll * threads) {  // every thread takes every turn: the shuffles need whole warps
    float v[kUnroll][kChannels];
    int at[kUnroll];  // first value in the page, or -1
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int i = base + u * threads + static_cast<int>(threadIdx.x);
      at[u] = i < total ? i * kChannels : -1;
      if constexpr (!kLinear) {
        const int ch = i % row_lanes * kChannels;
        at[u] = i < total && ch < D ? i / row_lanes * D + ch : -1;
      }
      for (int c = 0; c < kChannels; ++c) v[u][c] = 0.0f;
      if (at[u] >= 0) load_floats<kChannels>(page + at[u], v[u]);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int first = base + u * threads;
      if (first >= total) continue;  // the same for the whole block
      const Group group(max_of_lanes<kLanes>(amax_bits<kChannels>(v[u])));
      if (at[u] < 0) continue;
      uint32_t word = 0;
      for (int c = 0; c < kChannels; ++c) word |= group.code(v[u][c]) << Group::kBits * c;
      store_bytes<kChannels * Group::kBits / 8>(word, page_codes + at[u] * Group::kBits / 8);
      const int i = first + static_cast<int>(threadIdx.x);  // lanes come in whole groups, also at the end of a short row
      if (i % kLanes == 0) group.store_scale(page_scales, i / kLanes);
    }
  }
}

// fp8: one warp per row, which it keeps in registers; kSteps times kChannels channels per lane hold the longest row.
template <int kChannels, int kSteps>
CKV_KERNEL fp8_kernel(const float* x, uint8_t* codes, uint16_t* scales, int T, int D) {
  const int lane = static_cast<int>(threadIdx.x % 32), warps = static_cast<int>(blockDim.x / 32);
  for (int row = static_cast<int>(threadIdx.x / 32); row < T; row += warps) {
    const int64_t at = (static_cast<int64_t>(blockIdx.x) * T + row) * D;
    float v[kSteps][kChannels];
    uint32_t most = 0;
    for (int k = 0; k < kSteps; ++k) {
      const int ch = (32 * k + lane) * kChannels;
      for (int c = 0; c < kChannels; ++c) v[k][c] = 0.0f;
      if (ch < D) load_floats<kChannels>(x + at + ch, v[k]);
    }
    for (int k = 0; k < kSteps; ++k) most = larger(most, amax_bits<kChannels>(v[k]));
    const uint16_t h = fp16_scale(float_of(max_of_lanes<32>(most)) / 448.0f);
    const float s = fp16_to_float(h);
    if (lane == 0) scales[static_cast<int64_t>(blockIdx.x) * T + row] = h;
    for (int k = 0; k < kSteps; ++k) {
      const int ch = (32 * k + lane) * kChannels;
      uint32_t word = 0;
      for (int c = 0; c < kChannels; ++c) word |= (h ? e4m3_from_float(v[k][c] / s) : 0u) << 8 * c;
      if (ch < D) store_bytes<kChannels>(word, codes + at + ch);
    }
  }
}

// Codes of kChannels channels as they lie in memory.
template <int F, int kChannels>
struct Codes {
  static constexpr int kBytes = (F <= CKV_FP16 ? 2 * kChannels : F == CKV_NVFP4 || F == CKV_ISO3 ? kChannels / 2 : kChannels);
  uint32_t word[(kBytes + 3) / 4];
  CKV_DEVICE void load(const uint8_t* from) {
    if constexpr (kBytes == 8) {
      const uint2 q = *reinterpret_cast<const uint2*>(from);
      word[0] = q.x, word[1] = q.y;
    }
    if constexpr (kBytes == 4) word[0] = *reinterpret_cast<const uint32_t*>(from);
    if constexpr (kBytes == 2) word[0] = *reinterpret_cast<const uint16_t*>(from);
    if constexpr (kBytes == 1) word[0] = *from;
  }
  CKV_DEVICE float value(int c, float s) const {
    typename Source<F>::Code raw[sizeof(word) / sizeof(typename Source<F>::Code)];
    memcpy(raw, word, sizeof word);
    return Source<F>::value(raw, c, s);
  }
};

// Every format to fp32. kLinear: rows are multiples of a group of scales.
template <int F, int kChannels, bool kLinear>
CKV_KERNEL dequantize_kernel(const uint8_t* codes, const uint8_t* scales, float* x, int T, int D) {
  constexpr int kAtOnce = 2 * kUnroll, kPerScale = F == CKV_INT8 ? 64 : 16;
  const int total = T * D / kChannels, threads = static_cast<int>(blockDim.x), row_scales = ceil_div(D, kPerScale);
  const uint8_t* page_codes = codes + static_cast<int64_t>(blockIdx.x) * T * code_row_bytes(F, D);
  const uint8_t* page_scales = scales + static_cast<int64_t>(blockIdx.x) * T * scale_row_bytes(F, D);
  float* page = x + static_cast<int64_t>(blockIdx.x) * T * D;
  for (int base = static_cast<int>(threadIdx.x); base < total; base += kAtOnce * threads) {
    Codes<F, kChannels> q[kAtOnce];
    uint32_t raw[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int i = base + u * threads, at = i * kChannels;
      if (i >= total) continue;
      q[u].load(page_codes + i * Codes<F, kChannels>::kBytes);
      const int index = F == CKV_FP8 ? at / D : kLinear ? at / kPerScale : at / D * row_scales + at % D / kPerScale;
      raw[u] = load_scale<F>(page_scales, index);
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int i = base + u * threads;
      if (i >= total) continue;
      const float s = scale_value<F>(raw[u]);
      float v[kChannels];
      for (int c = 0; c < kChannels; ++c) v[c] = q[u].value(c, s);
      store_floats<kChannels>(v, page + i * kChannels);
    }
  }
}

// Gather of the dump's rows. Four channels at once where the source's strides keep them aligned; else element loads, since a view's
// strides promise nothing.
template <int kDtype, int kChannels>
CKV_KERNEL load_kernel(const void* src, int64_t token_stride, int64_t head_stride, int heads, int T, int D, float* out) {
  constexpr int F = kDtype == 1 ? CKV_FP16 : CKV_BF16;
  const int per_row = D / kChannels, total = T * per_row, threads = static_cast<int>(blockDim.x);
  const int64_t page = blockIdx.x / static_cast<unsigned>(heads), head = blockIdx.x % static_cast<unsigned>(heads);
  const int64_t first = page * T * token_stride + head * head_stride;
  float* to = out + static_cast<int64_t>(blockIdx.x) * T * D;
  for (int base = static_cast<int>(threadIdx.x); base < total; base += kUnroll * threads) {
    float v[kUnroll][kChannels];
    Codes<F, kChannels> q[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int i = base + u * threads;
      if (i >= total) continue;
      const int64_t at = first + i / per_row * token_stride + i % per_row * kChannels;
      if constexpr (kDtype == 2 && kChannels == 4) load_floats<4>(static_cast<const float*>(src) + at, v[u]);
      if constexpr (kDtype != 2 && kChannels == 4) q[u].load(reinterpret_cast<const uint8_t*>(static_cast<const uint16_t*>(src) + at));
      if constexpr (kChannels == 2)
        for (int c = 0; c < 2; ++c)
          v[u][c] = kDtype == 2 ? static_cast<const float*>(src)[at + c] : Source<F>::value(static_cast<const uint16_t*>(src) + at, c, 1.0f);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int i = base + u * threads;
      if (i >= total) continue;
      if constexpr (kDtype != 2 && kChannels == 4)
        for (int c = 0; c < 4; ++c) v[u][c] = q[u].value(c, 1.0f);
      store_floats<kChannels>(v[u], to + i * kChannels);
    }
  }
}

// ---- launchers --------------------------------------------------------------------------------------------------------------

template <int F>
void launch_quantize(const ckv_plane_desc& d, const float* x, uint8_t* codes, uint8_t* scales, void* stream) {
  const int T = d.page_tokens, D = d.head_dim;
  const unsigned grid = static_cast<unsigned>(d.n), block = block_for(static_cast<int64_t>(T) * D / 4, kUnroll);
  if (D % Grouped<F>::kGroup == 0)
    CKV_LAUNCH((quantize_kernel<F, 4, true>), grid, block, stream, x, codes, scales, T, D);
  else if (D % 4 == 0)
    CKV_LAUNCH((quantize_kernel<F, 4, false>), grid, kBlock, stream, x, codes, scales, T, D);
  else
    CKV_LAUNCH((quantize_kernel<F, 2, false>), grid, kBlock, stream, x, codes, scales, T, D);
}

inline void launch_fp8(const ckv_plane_desc& d, const float* x, uint8_t* codes, uint16_t* scales, void* stream) {
  const int T = d.page_tokens, D = d.head_dim;
  const unsigned grid = static_cast<unsigned>(d.n), block = block_for(32 * static_cast<int64_t>(T), 1);
  if (D % 4 == 0 && D <= 256)
    CKV_LAUNCH((fp8_kernel<4, 2>), grid, block, stream, x, codes, scales, T, D);
  else if (D % 4 == 0)
    CKV_LAUNCH((fp8_kernel<4, 8>), grid, block, stream, x, codes, scales, T, D);
  else
    CKV_LAUNCH((fp8_kernel<2, 16>), grid, block, stream, x, codes, scales, T, D);
}

template <int F>
void launch_dequantize(const ckv_plane_desc& d, const uint8_t* codes, const uint8_t* scales, float* x, void* stream) {
  constexpr int kGroup = F == CKV_INT8 ? 64 : F == CKV_NVFP4 || F == CKV_ISO3 ? 16 : 4;
  const int T = d.page_tokens, D = d.head_dim;
  const unsigned grid = static_cast<unsigned>(d.n), block = block_for(static_cast<int64_t>(T) * D / 4, 2 * kUnroll);
  if (D % kGroup == 0)
    CKV_LAUNCH((dequantize_kernel<F, 4, true>), grid, block, stream, codes, scales, x, T, D);
  else
    CKV_LAUNCH((dequantize_kernel<F, 2, false>), grid, kBlock, stream, codes, scales, x, T, D);
}

template <int kDtype>
void launch_load(const void* src, int64_t token_stride, int64_t head_stride, unsigned grid, int heads, int T, int D, float* out, void* stream) {
  constexpr unsigned kAligned = kDtype == 2 ? 16 : 8;  // four elements
  const bool wide = D % 4 == 0 && token_stride % 4 == 0 && head_stride % 4 == 0 && reinterpret_cast<uintptr_t>(src) % kAligned == 0;
  if (wide)
    CKV_LAUNCH((load_kernel<kDtype, 4>), grid, block_for(static_cast<int64_t>(T) * D / 4, kUnroll), stream, src, token_stride, head_stride, heads, T,
               D, out);
  else
    CKV_LAUNCH((load_kernel<kDtype, 2>), grid, kBlock, stream, src, token_stride, head_stride, heads, T, D, out);
}

}  // namespace tiers
}  // namespace ckv
