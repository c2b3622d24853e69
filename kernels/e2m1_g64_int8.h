// Fast host path of e2m1-g64 for int8 planes: integer thresholds instead of floating-point values.
//
// A value is code * h, so |v| >= t * s is |code| >= t * s / h, that is |code| >= T with T = ceil(t * s / h). The quotient of
// t * s (a 9-bit integer times a power of two) by h (11 bits) is an integer or, below 256, at least 1 / 2047 away from one, far
// more than 2^-20 of it and the fp32 rounding errors, so that ceil() of a product which is by 2^-20 too small is exact. Seven byte
// thresholds per (row, 64 channels) then serve 64 codes with byte compares. Every scale of the page must be positive or +0.
#pragma once

#include "plane.h"
#include "simd.h"

#if CKV_AVX2
namespace ckv {
namespace g64_int8 {

// A unit is 64 codes that share a scale; eight of them, 512 codes in a row, are worked on at once. What is per unit has a lane.

// Largest of the 32 bytes of each of eight vectors, in its lane.
inline __m256i largest_bytes(const __m256i* m) {
  const auto halves = [](__m256i x, __m256i y) { return _mm256_max_epu8(_mm256_unpacklo_epi64(x, y), _mm256_unpackhi_epi64(x, y)); };
  const auto quarters = [](__m256i x, __m256i y) {
    const __m256 a = _mm256_castsi256_ps(x), b = _mm256_castsi256_ps(y);
    return _mm256_max_epu8(_mm256_castps_si256(_mm256_shuffle_ps(a, b, 0x88)), _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xDD)));
  };
  const __m256i low = quarters(halves(m[0], m[1]), halves(m[2], m[3])), high = quarters(halves(m[4], m[5]), halves(m[6], m[7]));
  __m256i x = _mm256_max_epu8(_mm256_permute2x128_si256(low, high, 0x20), _mm256_permute2x128_si256(low, high, 0x31));
  x = _mm256_max_epu8(x, _mm256_srli_epi32(x, 16));
  return _mm256_and_si256(_mm256_max_epu8(x, _mm256_srli_epi32(x, 8)), _mm256_set1_epi32(255));
}

inline __m256 eight_scales(const uint16_t* h) {
#if CKV_F16C
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(h)));
#else
  alignas(32) float x[8];
  for (int u = 0; u < 8; ++u) x[u] = fp16_to_float(h[u]);
  return _mm256_load_ps(x);
#endif
}

inline __m256i nibble_index(__m256i code, __m256i t, __m256i middle, __m256i sign_mask) {
  const __m256i x = _mm256_xor_si256(_mm256_abs_epi8(code), _mm256_set1_epi8(-128));  // unsigned order as signed order
  return _mm256_or_si256(thresholds_reached(x, t, middle), _mm256_and_si256(_mm256_srli_epi16(code, 4), sign_mask));
}

// 8 units of 64 codes, their fp16 scales -> 8 * 32 bytes of nibbles, 8 words of four equal scale bytes.
inline void encode_units(const uint8_t* codes, const uint16_t* scales, uint8_t* nibbles, uint8_t* scale_words) {
  const __m256i* c = reinterpret_cast<const __m256i*>(codes);
  __m256i m[8];
  for (int u = 0; u < 8; ++u)
    m[u] = _mm256_max_epu8(_mm256_abs_epi8(_mm256_loadu_si256(c + 2 * u)), _mm256_abs_epi8(_mm256_loadu_si256(c + 2 * u + 1)));
  const __m256 h = eight_scales(scales), zero = _mm256_cmp_ps(h, _mm256_setzero_ps(), _CMP_EQ_OQ);
  const __m256 a = _mm256_mul_ps(_mm256_cvtepi32_ps(largest_bytes(m)), h);
  __m256 s;
  const __m256i byte = e4m3_lanes(_mm256_max_ps(_mm256_div_ps(a, _mm256_set1_ps(E2M1::kDivisor)), _mm256_set1_ps(kScaleFloor)), &s);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(scale_words),
                      _mm256_shuffle_epi8(byte, _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12))));
  // T = ceil(t * s / h), from one quotient a little too small. h = 0: it is infinite, so no code reaches any threshold, and signs are
  // masked off.
  const __m256 ratio = _mm256_mul_ps(_mm256_div_ps(s, h), _mm256_set1_ps(1.0f - 0x1p-20f));
  const float t[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
  __m256i v[7];
  for (int k = 0; k < 7; ++k)
    v[k] = _mm256_cvttps_epi32(_mm256_ceil_ps(_mm256_min_ps(_mm256_mul_ps(ratio, _mm256_set1_ps(t[k])), _mm256_set1_ps(255.0f))));
  const ThresholdColumns columns = threshold_columns(v);
  alignas(32) uint32_t signs[8];
  alignas(32) uint64_t T[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(T), _mm256_permute2x128_si256(columns.c01_45, columns.c23_67, 0x20));
  _mm256_store_si256(reinterpret_cast<__m256i*>(T + 4), _mm256_permute2x128_si256(columns.c01_45, columns.c23_67, 0x31));
  _mm256_store_si256(reinterpret_cast<__m256i*>(signs), _mm256_andnot_si256(_mm256_castps_si256(zero), _mm256_set1_epi32(0x08080808)));
  const __m256i weights = _mm256_set1_epi16(16 << 8 | 1);
  for (int u = 0; u < 8; ++u) {
    const __m256i table = _mm256_set1_epi64x(static_cast<long long>(T[u])), middle = _mm256_shuffle_epi8(table, _mm256_set1_epi8(3));
    const __m256i sign = _mm256_set1_epi32(static_cast<int>(signs[u]));
    const __m256i low = _mm256_maddubs_epi16(nibble_index(_mm256_loadu_si256(c + 2 * u), table, middle, sign), weights);
    const __m256i high = _mm256_maddubs_epi16(nibble_index(_mm256_loadu_si256(c + 2 * u + 1), table, middle, sign), weights);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(nibbles) + u, _mm256_permute4x64_epi64(_mm256_packus_epi16(low, high), 0xD8));
  }
}

// Units that do not lie in a row, or fewer than eight: through copies.
struct Scattered {
  alignas(32) uint8_t codes[8][64], nibbles[8][32], scale_words[8][4];
  uint16_t scales[8];
  uint8_t *nibbles_to[8], *scales_to[8];
  int len[8], used = 0;

  void add(const uint8_t* from, int length, uint16_t scale, uint8_t* nibbles_at, uint8_t* scales_at) {
    memset(codes[used], 0, 64);
    memcpy(codes[used], from, static_cast<size_t>(length));
    scales[used] = scale, len[used] = length, nibbles_to[used] = nibbles_at, scales_to[used] = scales_at;
    if (++used == 8) flush();
  }
  void flush() {
    for (int u = used; u < 8; ++u) memset(codes[u], 0, 64), scales[u] = 0;
    encode_units(codes[0], scales, nibbles[0], scale_words[0]);
    for (int u = 0; u < used; ++u) {
      memcpy(nibbles_to[u], nibbles[u], static_cast<size_t>(len[u] / 2));
      memcpy(scales_to[u], scale_words[u], static_cast<size_t>(ceil_div(len[u], 16)));
    }
    used = 0;
  }
};

// One head-page; false when this path does not apply (a negative or non-finite scale).
inline bool encode_page(const PageView& page, const SlotShape& shape, uint8_t* slot) {
  const int groups = ceil_div(shape.D, 64), units = shape.T * groups;
  const uint16_t* unit_scales = reinterpret_cast<const uint16_t*>(page.scales);
  uint16_t largest = 0;
  for (int i = 0; i < units; ++i) largest = std::max(largest, unit_scales[i]);
  if (largest > 0x7BFF) return false;
  uint8_t *nibbles = slot + sizeof(SlotHeader), *scales = slot + shape.scales_at;
  int done = 0;
  if (shape.D % 64 == 0)
    for (; done + 8 <= units; done += 8)
      encode_units(page.codes + 64 * static_cast<int64_t>(done), unit_scales + done, nibbles + 32 * static_cast<int64_t>(done),
                   scales + 4 * static_cast<int64_t>(done));
  Scattered rest;
  for (int i = done; i < units; ++i) {
    const int row = i / groups, g = i % groups;
    rest.add(page.code(row) + 64 * g, std::min(64, shape.D - 64 * g), unit_scales[i], nibbles + (static_cast<int64_t>(row) * shape.D + 64 * g) / 2,
             scales + static_cast<int64_t>(row) * shape.g16 + 4 * g);
  }
  if (rest.used) rest.flush();
  return true;
}

}  // namespace g64_int8
}  // namespace ckv
#endif
