// Fast host path of e2m1-g64 for int8 planes: integer thresholds instead of floating-point values.
//
// A value is code * h, so |v| >= t * s is |code| >= t * s / h, that is |code| >= T with T = ceil(t * s / h). The quotient of
// t * s (a 7-bit integer times a power of two) by h (11 bits) is an integer or, below 256, at least 1 / 2047 away from one, far
// more than an fp32 rounding error, so ceil() of the rounded quotient is exact. Seven byte thresholds per (row, 64 channels)
// then serve 64 codes with byte compares. Requires every scale of the page to be positive or +0.
#pragma once

#include "plane.h"
#include "simd.h"

#if CKV_AVX2
namespace ckv {
namespace g64_int8 {

// Eight (row, group) units at once: one lane per unit wherever the work is per unit.
struct Batch {
  const uint8_t* src[8];  // 64 codes each
  uint8_t* dst[8];        // 32 bytes of nibbles each
  uint8_t* scale[8];      // where this unit's scale byte goes, `copies` times
  int copies[8];
  uint16_t h[8];
};

inline int max_byte(__m256i a, __m256i b) {
  const __m256i m = _mm256_max_epu8(a, b);
  const __m128i inv = _mm_xor_si128(_mm_max_epu8(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1)), _mm_set1_epi8(-1));
  const __m128i words = _mm_min_epu8(inv, _mm_srli_epi16(inv, 8));  // low byte of each word: min of the pair
  return 255 - (_mm_cvtsi128_si32(_mm_minpos_epu16(_mm_and_si128(words, _mm_set1_epi16(255)))) & 255);
}

inline __m256i nibble_index(__m256i code, __m256i t, __m256i middle, __m256i sign_mask) {
  const __m256i x = _mm256_xor_si256(_mm256_abs_epi8(code), _mm256_set1_epi8(-128));  // unsigned order as signed order
  return _mm256_or_si256(thresholds_reached(x, t, middle), _mm256_and_si256(_mm256_srli_epi16(code, 4), sign_mask));
}

inline void encode_batch(const Batch& b) {
  alignas(32) int32_t amax[8];
  for (int u = 0; u < 8; ++u) {
    const __m256i* c = reinterpret_cast<const __m256i*>(b.src[u]);
    amax[u] = max_byte(_mm256_abs_epi8(_mm256_loadu_si256(c)), _mm256_abs_epi8(_mm256_loadu_si256(c + 1)));
  }
  alignas(32) float hf[8];
  for (int u = 0; u < 8; ++u) hf[u] = fp16_to_float(b.h[u]);
  const __m256 h = _mm256_load_ps(hf), zero = _mm256_cmp_ps(h, _mm256_setzero_ps(), _CMP_EQ_OQ);
  const __m256 a = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(amax))), h);
  __m256 s;
  const __m256i byte = e4m3_lanes(_mm256_max_ps(_mm256_div_ps(a, _mm256_set1_ps(E2M1::kDivisor)), _mm256_set1_ps(kScaleFloor)), &s);
  // h = 0: the quotients are infinite, so no code reaches any threshold, and signs are masked off.
  const float t[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
  __m256i v[7];
  for (int k = 0; k < 7; ++k) {
    const __m256 q = _mm256_div_ps(_mm256_mul_ps(_mm256_set1_ps(t[k]), s), h);
    v[k] = _mm256_cvttps_epi32(_mm256_ceil_ps(_mm256_min_ps(q, _mm256_set1_ps(255.0f))));
  }
  const ThresholdColumns c = threshold_columns(v);
  alignas(32) uint32_t signs[8], bytes[8];
  alignas(32) uint64_t T[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(T), _mm256_permute2x128_si256(c.c01_45, c.c23_67, 0x20));
  _mm256_store_si256(reinterpret_cast<__m256i*>(T + 4), _mm256_permute2x128_si256(c.c01_45, c.c23_67, 0x31));
  _mm256_store_si256(reinterpret_cast<__m256i*>(signs), _mm256_andnot_si256(_mm256_castps_si256(zero), _mm256_set1_epi32(0x08080808)));
  _mm256_store_si256(reinterpret_cast<__m256i*>(bytes), byte);
  for (int u = 0; u < 8; ++u) {
    const __m256i table = _mm256_set1_epi64x(static_cast<long long>(T[u])), middle = _mm256_shuffle_epi8(table, _mm256_set1_epi8(3));
    const __m256i sign = _mm256_set1_epi32(static_cast<int>(signs[u])), weights = _mm256_set1_epi16(16 << 8 | 1);
    const __m256i* c = reinterpret_cast<const __m256i*>(b.src[u]);
    const __m256i lo = _mm256_maddubs_epi16(nibble_index(_mm256_loadu_si256(c), table, middle, sign), weights);
    const __m256i hi = _mm256_maddubs_epi16(nibble_index(_mm256_loadu_si256(c + 1), table, middle, sign), weights);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(b.dst[u]), _mm256_permute4x64_epi64(_mm256_packus_epi16(lo, hi), 0xD8));
    const uint32_t four = bytes[u] * 0x01010101u;
    if (b.copies[u] == 4)
      memcpy(b.scale[u], &four, 4);
    else
      for (int i = 0; i < b.copies[u]; ++i) b.scale[u][i] = static_cast<uint8_t>(bytes[u]);
  }
}

// One head-page; false when this path does not apply (a negative or non-finite scale).
inline bool encode_page(const PageView& page, const SlotShape& shape, uint8_t* slot) {
  const int groups = ceil_div(shape.D, 64);
  for (int64_t i = 0; i < static_cast<int64_t>(shape.T) * groups; ++i)
    if (reinterpret_cast<const uint16_t*>(page.scales)[i] > 0x7BFF) return false;
  alignas(32) uint8_t in[8][64], out[8][32];
  uint8_t *nibbles = slot + sizeof(SlotHeader), *scales = slot + shape.scales_at;
  Batch b;
  uint8_t* tail_to[8];
  int tail_len[8], used = 0, tails = 0;
  const auto flush = [&] {
    for (int u = used; u < 8; ++u) {  // idle lanes repeat the first unit into scratch
      b.src[u] = b.src[0], b.h[u] = b.h[0], b.dst[u] = out[u], b.copies[u] = 0;
      tail_len[u] = 0;
    }
    encode_batch(b);
    if (tails)
      for (int u = 0; u < used; ++u)
        if (tail_len[u]) memcpy(tail_to[u], out[u], static_cast<size_t>(tail_len[u]));
    used = tails = 0;
  };
  for (int row = 0; row < shape.T; ++row)
    for (int g = 0; g < groups; ++g) {
      const int len = std::min(64, shape.D - 64 * g);
      const uint8_t* src = page.code(row) + 64 * g;
      uint8_t* dst = nibbles + (static_cast<int64_t>(row) * shape.D + 64 * g) / 2;
      b.h[used] = reinterpret_cast<const uint16_t*>(page.scale(row))[g];
      b.scale[used] = scales + static_cast<int64_t>(row) * shape.g16 + 4 * g;
      b.copies[used] = ceil_div(len, 16);
      b.src[used] = src, b.dst[used] = dst, tail_len[used] = 0;
      if (len < 64) {
        memset(in[used], 0, 64);
        memcpy(in[used], src, static_cast<size_t>(len));
        b.src[used] = in[used], b.dst[used] = out[used], tail_to[used] = dst, tail_len[used] = len / 2;
        ++tails;
      }
      if (++used == 8) flush();
    }
  if (used) flush();
  return true;
}

}  // namespace g64_int8
}  // namespace ckv
#endif
