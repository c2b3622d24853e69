// Row conversions of the host build: whole rows between hot codes, nibbles and fp32.
#pragma once

#include <algorithm>

#include "numerics.h"
#include "plane.h"

namespace ckv {

// Decoding tables, filled once from the element definitions.
struct Tables {
  float e4m3[256];         // value
  uint16_t half_fp16[256];  // fp16 bits of value / 2, exact for every E4M3 number
  float e2m1[16], iso3[16];
  Tables() {
    for (int c = 0; c < 256; ++c) {
      e4m3[c] = e4m3_to_float(static_cast<uint8_t>(c));
      half_fp16[c] = (c & 0x7F) == 0x7F ? static_cast<uint16_t>((c & 0x80) << 8 | 0x7E00) : fp16_from_float(e4m3[c] * 0.5f);
    }
    for (uint32_t i = 0; i < 16; ++i) {
      e2m1[i] = nibble_value<E2M1>(i, 1.0f);
      iso3[i] = nibble_value<Iso3>(i, 1.0f);
    }
  }
};
inline const Tables& tables() {
  static const Tables t;
  return t;
}
template <class Alphabet>
const float* alphabet_table();
template <>
inline const float* alphabet_table<E2M1>() { return tables().e2m1; }
template <>
inline const float* alphabet_table<Iso3>() { return tables().iso3; }

// 16 channels: 8 bytes of nibbles times one scale. The sign of a nibble is the sign bit of the result, also for zero.
template <class Alphabet>
inline void nibbles16_to_float(const uint8_t* nibbles, float s, float* out) {
#if CKV_AVX2
  const __m128i b = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(nibbles)), low = _mm_set1_epi8(15);
  const __m128i idx = _mm_unpacklo_epi8(_mm_and_si128(b, low), _mm_and_si128(_mm_srli_epi16(b, 4), low));
  const __m256 mags = _mm256_loadu_ps(alphabet_table<Alphabet>()), scale = _mm256_set1_ps(s);
  for (int half = 0; half < 2; ++half) {
    const __m256i i = _mm256_cvtepu8_epi32(half ? _mm_srli_si128(idx, 8) : idx);
    const __m256 sign = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_srli_epi32(i, 3), 31));
    _mm256_storeu_ps(out + 8 * half, _mm256_xor_ps(_mm256_mul_ps(_mm256_permutevar8x32_ps(mags, i), scale), sign));
  }
#else
  const float* table = alphabet_table<Alphabet>();
  for (int i = 0; i < 8; ++i) {
    out[2 * i] = table[nibbles[i] & 15] * s;
    out[2 * i + 1] = table[nibbles[i] >> 4] * s;
  }
#endif
}

// One row of nibbles with one E4M3 byte per 16 channels; the scale is value(byte) * page_scale.
template <class Alphabet>
inline void nibble_row_to_float(const uint8_t* nibbles, const uint8_t* scales, float page_scale, int D, float* out) {
  const float* e4m3 = tables().e4m3;
  int ch = 0;
  for (; ch + 16 <= D; ch += 16) nibbles16_to_float<Alphabet>(nibbles + ch / 2, e4m3[scales[ch / 16]] * page_scale, out + ch);
  if (ch < D) {
    uint8_t pad[8] = {};
    float tail[16];
    memcpy(pad, nibbles + ch / 2, static_cast<size_t>(D - ch) / 2);
    nibbles16_to_float<Alphabet>(pad, e4m3[scales[ch / 16]] * page_scale, tail);
    memcpy(out + ch, tail, sizeof(float) * static_cast<size_t>(D - ch));
  }
}

template <int F>
inline void row_to_float(const void* codes, const void* scales, int D, float* out) {
  if constexpr (F == CKV_NVFP4) {
    nibble_row_to_float<E2M1>(static_cast<const uint8_t*>(codes), static_cast<const uint8_t*>(scales), 1.0f, D, out);
  } else if constexpr (F == CKV_ISO3) {
    nibble_row_to_float<Iso3>(static_cast<const uint8_t*>(codes), static_cast<const uint8_t*>(scales), 1.0f, D, out);
  } else if constexpr (F == CKV_FP8) {
    const float s = Source<F>::scale(scales, 0), *e4m3 = tables().e4m3;
    for (int ch = 0; ch < D; ++ch) out[ch] = e4m3[static_cast<const uint8_t*>(codes)[ch]] * s;
  } else {
    int ch = 0;
#if CKV_F16C
    if constexpr (F == CKV_FP16)
      for (; ch + 8 <= D; ch += 8)
        _mm256_storeu_ps(out + ch, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const uint16_t*>(codes) + ch))));
#endif
    while (ch < D) {
      const int end = std::min(D - ch, Source<F>::kGroup) + ch;
      const float s = Source<F>::scale(scales, ch);
      for (; ch < end; ++ch) out[ch] = Source<F>::value(codes, ch, s);
    }
  }
}

// Bit pattern of the largest |x|; patterns of finite numbers order like the numbers, anything not finite is larger.
inline uint32_t max_abs_bits(const float* x, int n) {
  uint32_t most = 0;
  for (int i = 0; i < n; ++i) most = std::max(most, bits_of(x[i]) & 0x7FFFFFFFu);
  return most;
}

// Nibbles of n (even) values that share one scale.
template <class Alphabet>
inline void encode_nibbles(const float* x, int n, float s, uint8_t* out) {
  int i = 0;
#if CKV_AVX2
  for (; i + 16 <= n; i += 16) {
    __m256i index[2];
    for (int half = 0; half < 2; ++half) {
      int32_t lane[8];
      for (int j = 0; j < 8; ++j) lane[j] = static_cast<int32_t>(nibble_of<Alphabet>(x[i + 8 * half + j], s));
      index[half] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lane));
    }
    // 16 words in channel order, then low | high << 4 of each pair.
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(index[0], index[1]), 0xD8);
    const __m256i pairs = _mm256_madd_epi16(words, _mm256_set1_epi32(16 << 16 | 1));
    const __m256i packed = _mm256_packus_epi16(_mm256_packs_epi32(pairs, pairs), pairs);
    const uint32_t lo = static_cast<uint32_t>(_mm256_extract_epi32(packed, 0)), hi = static_cast<uint32_t>(_mm256_extract_epi32(packed, 4));
    memcpy(out + i / 2, &lo, 4);
    memcpy(out + i / 2 + 4, &hi, 4);
  }
#endif
  for (; i < n; i += 2)
    out[i / 2] = static_cast<uint8_t>(nibble_of<Alphabet>(x[i], s) | nibble_of<Alphabet>(x[i + 1], s) << 4);
}

// Rows, codes and scales of one head-page inside a plane.
struct PageView {
  const uint8_t* codes;
  const uint8_t* scales;
  int64_t code_row, scale_row;
  PageView(const ckv_plane_desc& d, const void* c, const void* s, int64_t page)
      : code_row(code_row_bytes(d.format, d.head_dim)), scale_row(scale_row_bytes(d.format, d.head_dim)) {
    codes = static_cast<const uint8_t*>(c) + page * d.page_tokens * code_row;
    scales = scale_row ? static_cast<const uint8_t*>(s) + page * d.page_tokens * scale_row : nullptr;
  }
  const uint8_t* code(int row) const { return codes + row * code_row; }
  const uint8_t* scale(int row) const { return scales ? scales + row * scale_row : nullptr; }
};

}  // namespace ckv
