// One head-page of e2m1-g64 on the host: the codes and scale bytes that its own slot and rans-e2m1 hold.
#pragma once

#include "e2m1_g64_int8.h"
#include "plane.h"
#if CKV_BUILD_HOST
#include "codec_host.h"
#endif

namespace ckv {
namespace e2m1_g64 {

template <int F>
struct AlphabetOf {
  using type = E2M1;
};
template <>
struct AlphabetOf<CKV_ISO3> {
  using type = Iso3;
};

CKV_HD int restored_format(int format) { return format == CKV_INT8 || has_nibbles(format) ? format : CKV_BF16; }

#if CKV_BUILD_HOST

// Any plane, by value.
template <int F>
bool encode_page(const PageView& page, const SlotShape& shape, uint8_t* slot) {
  using Alphabet = typename AlphabetOf<F>::type;
  float row_values[1024];
  uint8_t *nibbles = slot + sizeof(SlotHeader), *scales = slot + shape.scales_at;
  for (int row = 0; row < shape.T; ++row) {
    row_to_float<F>(page.code(row), page.scale(row), shape.D, row_values);
    for (int ch = 0; ch < shape.D; ch += 64) {
      const int len = std::min(64, shape.D - ch);
      const uint32_t amax = max_abs_bits(row_values + ch, len);
      if (not_finite(amax)) return false;
      const uint8_t byte = group_scale<Alphabet>(float_of(amax));
      encode_nibbles<Alphabet>(row_values + ch, len, tables().e4m3[byte], nibbles + (static_cast<int64_t>(row) * shape.D + ch) / 2);
      memset(scales + static_cast<int64_t>(row) * shape.g16 + ch / 16, byte, static_cast<size_t>(ceil_div(len, 16)));
    }
  }
  return true;
}

// Nibbles and scales of any head-page into a raw slot; false when a value is not finite. The header is the caller's business.
inline bool encode_any_page(int format, const PageView& page, const SlotShape& shape, uint8_t* slot) {
#if CKV_AVX2
  if (format == CKV_INT8 && g64_int8::encode_page(page, shape, slot)) return true;
#endif
  bool ok = false;
  with_format(format, [&](auto tag) { ok = encode_page<decltype(tag)::value>(page, shape, slot); });
  return ok;
}

// Twice the E2M1 magnitude is an integer, so the slot is an exact int8 plane with scale s / 2. Nibble 8 becomes 0.
inline void restore_int8(const uint8_t* slot, const SlotShape& shape, int8_t* codes, uint16_t* scales) {
  const uint8_t* nibbles = slot + sizeof(SlotHeader);
  const int64_t bytes = static_cast<int64_t>(shape.T) * shape.D / 2;
  alignas(16) static const int8_t twice[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  int64_t i = 0;
#if CKV_AVX2
  const __m256i lut = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(twice))), low = _mm256_set1_epi8(15);
  for (; i + 32 <= bytes; i += 32) {
    const __m256i b = _mm256_permute4x64_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(nibbles + i)), 0xD8);
    const __m256i even = _mm256_shuffle_epi8(lut, _mm256_and_si256(b, low));
    const __m256i odd = _mm256_shuffle_epi8(lut, _mm256_and_si256(_mm256_srli_epi16(b, 4), low));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + 2 * i), _mm256_unpacklo_epi8(even, odd));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + 2 * i + 32), _mm256_unpackhi_epi8(even, odd));
  }
#endif
  for (; i < bytes; ++i) {
    codes[2 * i] = twice[nibbles[i] & 15];
    codes[2 * i + 1] = twice[nibbles[i] >> 4];
  }
  const int groups = ceil_div(shape.D, 64);
  const uint16_t* half = tables().half_fp16;
  const uint8_t* scale_bytes = slot + shape.scales_at;
  for (int row = 0; row < shape.T; ++row)
    for (int g = 0; g < groups; ++g)
      scales[static_cast<int64_t>(row) * groups + g] = half[scale_bytes[static_cast<int64_t>(row) * shape.g16 + 4 * g]];
}

// Values of a raw slot, and the plane they restore to (`format` is the restored one).
inline void page_to_float(int format, const uint8_t* slot, const SlotShape& shape, float* out) {
  if (format == CKV_ISO3)
    slot_to_float<Iso3>(slot, shape, 1.0f, out);
  else
    slot_to_float<E2M1>(slot, shape, 1.0f, out);
}

inline void restore_page(int format, const uint8_t* slot, const SlotShape& shape, uint8_t* codes, uint8_t* scales) {
  if (format == CKV_INT8) {
    restore_int8(slot, shape, reinterpret_cast<int8_t*>(codes), reinterpret_cast<uint16_t*>(scales));
  } else if (has_nibbles(format)) {
    memcpy(codes, slot + sizeof(SlotHeader), static_cast<size_t>(shape.scales_at) - sizeof(SlotHeader));
    memcpy(scales, slot + shape.scales_at, static_cast<size_t>(shape.payload_end - shape.scales_at));
  } else {
    slot_to_bf16<E2M1>(slot, shape, 1.0f, reinterpret_cast<uint16_t*>(codes));
  }
}

#endif  // CKV_BUILD_HOST

}  // namespace e2m1_g64
}  // namespace ckv
