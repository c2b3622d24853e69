// AVX2 forms of element operations of numerics.h; each gives the same bits as the plain one it names.
#pragma once

#include "numerics.h"

#if CKV_AVX2
namespace ckv {

// e4m3_from_positive() in eight lanes: the byte in each 32-bit lane, and its value.
inline __m256i e4m3_lanes(__m256 r, __m256* value) {
  const __m256 magic = _mm256_set1_ps(8388608.0f);
  const __m256 sub = _mm256_sub_ps(_mm256_add_ps(_mm256_mul_ps(r, _mm256_set1_ps(512.0f)), magic), magic);
  const __m256i sub_code = _mm256_cvtps_epi32(_mm256_min_ps(sub, _mm256_set1_ps(8.0f)));
  __m256i u = _mm256_castps_si256(r);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 20), _mm256_set1_epi32(1));
  u = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFFF))), 20);
  u = _mm256_min_epi32(u, _mm256_set1_epi32(0x7E + (120 << 3)));
  const __m256 normal_value = _mm256_castsi256_ps(_mm256_slli_epi32(u, 20));
  const __m256i normal_code = _mm256_sub_epi32(u, _mm256_set1_epi32(120 << 3));
  const __m256 is_sub = _mm256_cmp_ps(r, _mm256_set1_ps(0x1p-6f), _CMP_LT_OQ);
  *value = _mm256_blendv_ps(normal_value, _mm256_mul_ps(sub, _mm256_set1_ps(kScaleFloor)), is_sub);
  return _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(normal_code), _mm256_castsi256_ps(sub_code), is_sub));
}

// Seven ordered byte thresholds per column: v[k] holds threshold k of columns 0..7 as 32-bit lanes (1..255 after saturation).
// Gives, for columns (0, 1 | 4, 5) and (2, 3 | 6, 7) of the two halves, 8 bytes each: thresholds 0..6, less one, in signed order,
// and one unused. For unsigned codes c and x = c ^ 0x80, c >= T is then x > byte.
struct ThresholdColumns {
  __m256i c01_45, c23_67;
};
inline ThresholdColumns threshold_columns(const __m256i* v) {
  const __m256i k01 = _mm256_packs_epi32(v[0], v[1]), k23 = _mm256_packs_epi32(v[2], v[3]);
  const __m256i k45 = _mm256_packs_epi32(v[4], v[5]), k66 = _mm256_packs_epi32(v[6], v[6]);
  // Bytes k*4 + m (columns m = 0..3 in the low half, 4..7 in the high half) turned into m*4 + k.
  const __m256i turn = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  const __m256i bias = _mm256_set1_epi8(0x7F);  // less one, then the top bit flipped: add 127
  const __m256i low = _mm256_add_epi8(_mm256_shuffle_epi8(_mm256_packus_epi16(k01, k23), turn), bias);
  const __m256i high = _mm256_add_epi8(_mm256_shuffle_epi8(_mm256_packus_epi16(k45, k66), turn), bias);
  return {_mm256_unpacklo_epi32(low, high), _mm256_unpackhi_epi32(low, high)};
}

// How many of the thresholds each byte of x reaches: a binary search, the thresholds looked up by byte shuffles. `t` holds the
// eight bytes of a column at the start of each half, `middle` byte 3 of it everywhere.
inline __m256i thresholds_reached(__m256i x, __m256i t, __m256i middle) {
  const __m256i i4 = _mm256_and_si256(_mm256_cmpgt_epi8(x, middle), _mm256_set1_epi8(4));
  const __m256i over2 = _mm256_cmpgt_epi8(x, _mm256_shuffle_epi8(t, _mm256_add_epi8(i4, _mm256_set1_epi8(1))));
  const __m256i i42 = _mm256_or_si256(i4, _mm256_and_si256(over2, _mm256_set1_epi8(2)));
  return _mm256_sub_epi8(i42, _mm256_cmpgt_epi8(x, _mm256_shuffle_epi8(t, i42)));
}

// Low byte of each 32-bit lane of eight-lane vectors a, b, c, d, in lane order: 32 bytes.
inline __m256i pack_bytes(__m256i a, __m256i b, __m256i c, __m256i d) {
  const __m256i words = _mm256_packus_epi16(_mm256_packus_epi32(a, b), _mm256_packus_epi32(c, d));
  return _mm256_permutevar8x32_epi32(words, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

}  // namespace ckv
#endif
