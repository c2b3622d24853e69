// Codec e2m1-g64, the seed's requantization: one E4M3 scale per row and 64 channels, 4-bit codes, in a raw slot of version 1.
// iso3 planes keep their alphabet; every other format becomes E2M1. FORMAT.md is the specification.
#include "e2m1_g64_int8.h"
#include "plane.h"
#if CKV_BUILD_HOST
#include "codec_host.h"
#endif

namespace ckv {
namespace e2m1_g64 {

constexpr uint16_t kVersion = 1;
constexpr unsigned kAccepts = 1u << CKV_BF16 | 1u << CKV_FP16 | 1u << CKV_INT8 | 1u << CKV_FP8 | 1u << CKV_NVFP4 | 1u << CKV_ISO3;

CKV_HD int restored_format(int format) { return format == CKV_INT8 || has_nibbles(format) ? format : CKV_BF16; }

template <int F>
struct AlphabetOf {
  using type = E2M1;
};
template <>
struct AlphabetOf<CKV_ISO3> {
  using type = Iso3;
};

static const RegisterCodec kRegister("e2m1_g64", kAccepts, raw_slot_bytes);

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

#endif  // CKV_BUILD_HOST

}  // namespace e2m1_g64
}  // namespace ckv

using namespace ckv;

#if CKV_BUILD_HOST

extern "C" int ckv_e2m1_g64_encode_cpu(const ckv_plane_desc* d, const void* codes, const void* scales, uint8_t* slots, int64_t stride,
                                       int32_t* valid, int threads) {
  int rc = check_call(d, e2m1_g64::kAccepts, slots, stride);
  if (!rc) rc = check_plane(d, codes, scales);
  if (rc) return rc;
  const SlotShape shape(d->page_tokens, d->head_dim);
  return encode_pages(*d, slots, stride, valid, threads, [&](int64_t i, uint8_t* slot) {
    const PageView page(*d, codes, scales, i);
    write_header(slot, e2m1_g64::kVersion, kFlagValid, 0);
#if CKV_AVX2
    if (d->format == CKV_INT8 && g64_int8::encode_page(page, shape, slot)) return true;
#endif
    bool ok = false;
    with_format(d->format, [&](auto tag) { ok = e2m1_g64::encode_page<decltype(tag)::value>(page, shape, slot); });
    return ok;
  });
}

extern "C" int ckv_e2m1_g64_decode_cpu(const ckv_plane_desc* d, const uint8_t* slots, int64_t stride, float* out, int threads) {
  const int rc = check_call(d, e2m1_g64::kAccepts, slots, stride);
  if (rc || (d->n && !out)) return rc ? rc : CKV_E_NULL;
  const SlotShape shape(d->page_tokens, d->head_dim);
  const int64_t count = static_cast<int64_t>(shape.T) * shape.D;
  return decode_pages(
      *d, slots, stride, threads, e2m1_g64::kVersion, kFlagValid,
      [&](int64_t i, const uint8_t* slot) {
        if (d->format == CKV_ISO3)
          slot_to_float<Iso3>(slot, shape, 1.0f, out + i * count);
        else
          slot_to_float<E2M1>(slot, shape, 1.0f, out + i * count);
      },
      [&](int64_t i) { poison_values(out + i * count, count); });
}

extern "C" int ckv_e2m1_g64_restore_cpu(const ckv_plane_desc* d, const uint8_t* slots, int64_t stride, void* codes, void* scales,
                                        int threads) {
  int rc = check_call(d, e2m1_g64::kAccepts, slots, stride);
  if (rc) return rc;
  ckv_plane_desc restored = *d;
  restored.format = e2m1_g64::restored_format(d->format);
  if ((rc = check_plane(&restored, codes, scales))) return rc;
  const SlotShape shape(d->page_tokens, d->head_dim);
  const auto at = [&](int64_t i) { return PageView(restored, codes, scales, i); };
  return decode_pages(
      *d, slots, stride, threads, e2m1_g64::kVersion, kFlagValid,
      [&](int64_t i, const uint8_t* slot) {
        const PageView page = at(i);
        uint8_t *c = const_cast<uint8_t*>(page.codes), *s = const_cast<uint8_t*>(page.scales);
        if (restored.format == CKV_INT8) {
          e2m1_g64::restore_int8(slot, shape, reinterpret_cast<int8_t*>(c), reinterpret_cast<uint16_t*>(s));
        } else if (has_nibbles(restored.format)) {
          memcpy(c, slot + sizeof(SlotHeader), static_cast<size_t>(shape.scales_at) - sizeof(SlotHeader));
          memcpy(s, slot + shape.scales_at, static_cast<size_t>(shape.payload_end - shape.scales_at));
        } else {
          slot_to_bf16<E2M1>(slot, shape, 1.0f, reinterpret_cast<uint16_t*>(c));
        }
      },
      [&](int64_t i) {
        const PageView page = at(i);
        poison_plane(restored.format, shape.T, shape.D, const_cast<uint8_t*>(page.codes), const_cast<uint8_t*>(page.scales));
      });
}

#endif  // CKV_BUILD_HOST

#if CKV_BUILD_DEVICE
#include "e2m1_g64_device.h"

extern "C" int ckv_e2m1_g64_encode_cuda(const ckv_plane_desc* d, const void* codes, const void* scales, uint8_t* slots, int64_t stride,
                                        int32_t* valid, void* stream) {
  int rc = check_call(d, e2m1_g64::kAccepts, slots, stride);
  if (!rc) rc = check_plane(d, codes, scales);
  if (!rc) rc = check_grid(d);
  if (rc || !d->n) return rc;
  if (!valid) return CKV_E_NULL;
  if (check_aligned(codes, scales, slots)) return CKV_E_ALIGN;
  return e2m1_g64::launch_encode(*d, codes, scales, slots, stride, valid, stream);
}

extern "C" int ckv_e2m1_g64_decode_cuda(const ckv_plane_desc* d, const uint8_t* slots, int64_t stride, float* out, void* stream) {
  int rc = check_call(d, e2m1_g64::kAccepts, slots, stride);
  if (!rc) rc = check_grid(d);
  if (rc) return rc;
  const SlotCheck check = {e2m1_g64::kVersion, kFlagValid};
  return d->format == CKV_ISO3 ? launch_slot_to_float<Iso3>(*d, slots, stride, check, out, stream)
                               : launch_slot_to_float<E2M1>(*d, slots, stride, check, out, stream);
}

extern "C" int ckv_e2m1_g64_restore_cuda(const ckv_plane_desc* d, const uint8_t* slots, int64_t stride, void* codes, void* scales, void* stream) {
  int rc = check_call(d, e2m1_g64::kAccepts, slots, stride);
  if (rc) return rc;
  ckv_plane_desc restored = *d;
  restored.format = e2m1_g64::restored_format(d->format);
  rc = check_plane(&restored, codes, scales);
  if (!rc) rc = check_grid(d);
  if (rc || !d->n) return rc;
  const SlotCheck check = {e2m1_g64::kVersion, kFlagValid};
  if (restored.format == CKV_INT8) return launch_slot_to_int8(*d, slots, stride, check, codes, scales, stream);
  if (has_nibbles(restored.format)) return launch_slot_to_nibbles(*d, slots, stride, check, codes, scales, stream);
  return launch_slot_to_bf16<E2M1>(*d, slots, stride, check, codes, stream);
}
#endif  // CKV_BUILD_DEVICE
