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

// Low byte of each 32-bit lane of eight-lane vectors a, b, c, d, in lane order: 32 bytes.
inline __m256i pack_bytes(__m256i a, __m256i b, __m256i c, __m256i d) {
  const __m256i words = _mm256_packus_epi16(_mm256_packus_epi32(a, b), _mm256_packus_epi32(c, d));
  return _mm256_permutevar8x32_epi32(words, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

}  // namespace ckv
#endif
