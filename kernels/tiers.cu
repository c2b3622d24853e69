// Hot tiers: fp32 head-pages <-> hot planes, and the gather from a dump's [tokens, heads, head_dim] into head-pages.
#include <cmath>

#include "plane.h"
#include "simd.h"
#if CKV_BUILD_HOST
#include "parallel.h"
#else
#include "tiers_device.h"
#endif

#if CKV_BUILD_HOST
namespace ckv {
namespace tiers {

// code = clamp(rint(x / h), -127, 127), ties to even; clamping first gives the same and keeps the conversion in range.
inline void int8_codes(const float* x, int n, float h, int8_t* out) {
  int i = 0;
#if CKV_AVX2
  const __m256 scale = _mm256_set1_ps(h), top = _mm256_set1_ps(127.0f), bottom = _mm256_set1_ps(-127.0f);
  const auto code = [&](int at) {
    const __m256 q = _mm256_div_ps(_mm256_loadu_ps(x + at), scale);
    return _mm256_cvtps_epi32(_mm256_max_ps(_mm256_min_ps(q, top), bottom));
  };
  for (; i + 32 <= n; i += 32) {
    const __m256i words = _mm256_packs_epi16(_mm256_packs_epi32(code(i), code(i + 8)), _mm256_packs_epi32(code(i + 16), code(i + 24)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm256_permutevar8x32_epi32(words, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
  }
#endif
  for (; i < n; ++i) out[i] = static_cast<int8_t>(std::nearbyintf(std::max(std::min(x[i] / h, 127.0f), -127.0f)));
}

inline void fp8_codes(const float* x, int n, float h, uint8_t* out) {
  int i = 0;
#if CKV_AVX2
  const __m256 scale = _mm256_set1_ps(h), magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF));
  const auto code = [&](int at) {
    const __m256 q = _mm256_div_ps(_mm256_loadu_ps(x + at), scale);
    __m256 value;
    const __m256i c = e4m3_lanes(_mm256_and_ps(q, magnitude), &value);
    return _mm256_or_si256(c, _mm256_slli_epi32(_mm256_srli_epi32(_mm256_castps_si256(q), 31), 7));
  };
  for (; i + 32 <= n; i += 32)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), pack_bytes(code(i), code(i + 8), code(i + 16), code(i + 24)));
#endif
  for (; i < n; ++i) out[i] = e4m3_from_float(x[i] / h);
}

template <class Alphabet>
void nibble_row(const float* x, int D, uint8_t* codes, uint8_t* scales) {
  for (int ch = 0; ch < D; ch += 16) {
    const int len = std::min(16, D - ch);
    const uint8_t byte = group_scale<Alphabet>(float_of(max_abs_bits(x + ch, len)));
    scales[ch / 16] = byte;
    encode_nibbles<Alphabet>(x + ch, len, tables().e4m3[byte], codes + ch / 2);
  }
}

template <int F>
void quantize_row(const float* x, int D, void* codes, void* scales) {
  if constexpr (F == CKV_BF16) {
    for (int ch = 0; ch < D; ++ch) static_cast<uint16_t*>(codes)[ch] = bf16_from_float(x[ch]);
  } else if constexpr (F == CKV_FP16) {
    int ch = 0;
#if CKV_F16C
    const __m256 top = _mm256_set1_ps(kLargestFp16), bottom = _mm256_set1_ps(-kLargestFp16);
    for (; ch + 8 <= D; ch += 8) {
      const __m256 v = _mm256_max_ps(_mm256_min_ps(_mm256_loadu_ps(x + ch), top), bottom);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(static_cast<uint16_t*>(codes) + ch), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
    }
#endif
    for (; ch < D; ++ch) static_cast<uint16_t*>(codes)[ch] = fp16_from_float(clamp_fp16(x[ch]));
  } else if constexpr (F == CKV_INT8) {
    for (int ch = 0; ch < D; ch += 64) {
      const int len = std::min(64, D - ch);
      const uint16_t h = fp16_scale(float_of(max_abs_bits(x + ch, len)) / 127.0f);
      static_cast<uint16_t*>(scales)[ch / 64] = h;
      int8_t* out = static_cast<int8_t*>(codes) + ch;
      if (h)
        int8_codes(x + ch, len, fp16_to_float(h), out);
      else
        memset(out, 0, static_cast<size_t>(len));
    }
  } else if constexpr (F == CKV_FP8) {
    const uint16_t h = fp16_scale(float_of(max_abs_bits(x, D)) / 448.0f);
    *static_cast<uint16_t*>(scales) = h;
    if (h)
      fp8_codes(x, D, fp16_to_float(h), static_cast<uint8_t*>(codes));
    else
      memset(codes, 0, static_cast<size_t>(D));
  } else if constexpr (F == CKV_NVFP4) {
    nibble_row<E2M1>(x, D, static_cast<uint8_t*>(codes), static_cast<uint8_t*>(scales));
  } else {
    nibble_row<Iso3>(x, D, static_cast<uint8_t*>(codes), static_cast<uint8_t*>(scales));
  }
}

}  // namespace tiers
}  // namespace ckv

using namespace ckv;

extern "C" int ckv_quantize_cpu(const ckv_plane_desc* d, const float* x, void* codes, void* scales, int threads) {
  const int rc = check_plane(d, codes, scales);
  if (rc || (d->n && !x)) return rc ? rc : CKV_E_NULL;
  const int64_t rows = d->n * d->page_tokens, code_row = code_row_bytes(d->format, d->head_dim), scale_row = scale_row_bytes(d->format, d->head_dim);
  with_format(d->format, [&](auto tag) {
    parallel_for(rows, threads, page_grain(1, d->head_dim), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        tiers::quantize_row<decltype(tag)::value>(x + row * d->head_dim, d->head_dim, static_cast<uint8_t*>(codes) + row * code_row,
                                                  scale_row ? static_cast<uint8_t*>(scales) + row * scale_row : nullptr);
    });
  });
  return CKV_OK;
}

extern "C" int ckv_dequantize_cpu(const ckv_plane_desc* d, const void* codes, const void* scales, float* x, int threads) {
  const int rc = check_plane(d, codes, scales);
  if (rc || (d->n && !x)) return rc ? rc : CKV_E_NULL;
  const int64_t rows = d->n * d->page_tokens, code_row = code_row_bytes(d->format, d->head_dim), scale_row = scale_row_bytes(d->format, d->head_dim);
  with_format(d->format, [&](auto tag) {
    parallel_for(rows, threads, page_grain(1, d->head_dim), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        row_to_float<decltype(tag)::value>(static_cast<const uint8_t*>(codes) + row * code_row,
                                           scale_row ? static_cast<const uint8_t*>(scales) + row * scale_row : nullptr, d->head_dim,
                                           x + row * d->head_dim);
    });
  });
  return CKV_OK;
}

extern "C" int ckv_load_cpu(int32_t dtype, const void* src, int64_t token_stride, int64_t head_stride, int64_t pages, int32_t heads,
                            int32_t page_tokens, int32_t head_dim, float* out, int threads) {
  if (dtype < 0 || dtype > 2) return CKV_E_DTYPE;
  if (heads < 1 || !shape_ok(pages, page_tokens, head_dim)) return CKV_E_SHAPE;
  if (pages && (!src || !out)) return CKV_E_NULL;
  const size_t D = static_cast<size_t>(head_dim);
  parallel_for(pages * heads, threads, page_grain(page_tokens, head_dim), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      for (int t = 0; t < page_tokens; ++t) {
        const int64_t from = (i / heads * page_tokens + t) * token_stride + i % heads * head_stride;
        float* to = out + (i * page_tokens + t) * head_dim;
        if (dtype == 0)
          row_to_float<CKV_BF16>(static_cast<const uint16_t*>(src) + from, nullptr, head_dim, to);
        else if (dtype == 1)
          row_to_float<CKV_FP16>(static_cast<const uint16_t*>(src) + from, nullptr, head_dim, to);
        else
          memcpy(to, static_cast<const float*>(src) + from, D * sizeof(float));
      }
  });
  return CKV_OK;
}
#endif  // CKV_BUILD_HOST

#if CKV_BUILD_DEVICE
using namespace ckv;

extern "C" int ckv_quantize_cuda(const ckv_plane_desc* d, const float* x, void* codes, void* scales, void* stream) {
  const int rc = check_plane(d, codes, scales);
  if (rc || !d->n) return rc;
  if (!x) return CKV_E_NULL;
  if (check_grid(d)) return CKV_E_SHAPE;
  if (check_aligned(x, codes, scales)) return CKV_E_ALIGN;
  uint8_t *c = static_cast<uint8_t*>(codes), *s = static_cast<uint8_t*>(scales);
  switch (d->format) {
    case CKV_INT8: tiers::launch_quantize<CKV_INT8>(*d, x, c, s, stream); break;
    case CKV_NVFP4: tiers::launch_quantize<CKV_NVFP4>(*d, x, c, s, stream); break;
    case CKV_ISO3: tiers::launch_quantize<CKV_ISO3>(*d, x, c, s, stream); break;
    case CKV_FP8: tiers::launch_fp8(*d, x, c, reinterpret_cast<uint16_t*>(s), stream); break;
    default: {
      const int64_t count = d->n * d->page_tokens * d->head_dim;
      CKV_LAUNCH(tiers::round_kernel, grid_for((count + 15) / 16), kBlock, stream, d->format, x, static_cast<uint32_t*>(codes), count);
    }
  }
  return launch_status();
}

extern "C" int ckv_dequantize_cuda(const ckv_plane_desc* d, const void* codes, const void* scales, float* x, void* stream) {
  const int rc = check_plane(d, codes, scales);
  if (rc || !d->n) return rc;
  if (!x) return CKV_E_NULL;
  if (check_grid(d)) return CKV_E_SHAPE;
  if (check_aligned(x, codes, scales)) return CKV_E_ALIGN;
  const uint8_t *c = static_cast<const uint8_t*>(codes), *s = static_cast<const uint8_t*>(scales);
  with_format(d->format, [&](auto tag) { tiers::launch_dequantize<decltype(tag)::value>(*d, c, s, x, stream); });
  return launch_status();
}

extern "C" int ckv_load_cuda(int32_t dtype, const void* src, int64_t token_stride, int64_t head_stride, int64_t pages, int32_t heads,
                             int32_t page_tokens, int32_t head_dim, float* out, void* stream) {
  if (dtype < 0 || dtype > 2) return CKV_E_DTYPE;
  if (heads < 1 || !shape_ok(pages, page_tokens, head_dim) || pages > 0x7FFFFFFF / heads) return CKV_E_SHAPE;
  if (!pages) return CKV_OK;
  if (!src || !out) return CKV_E_NULL;
  if (check_aligned(out, nullptr, nullptr)) return CKV_E_ALIGN;
  const unsigned grid = static_cast<unsigned>(pages * heads);
  if (dtype == 0)
    tiers::launch_load<0>(src, token_stride, head_stride, grid, heads, page_tokens, head_dim, out, stream);
  else if (dtype == 1)
    tiers::launch_load<1>(src, token_stride, head_stride, grid, heads, page_tokens, head_dim, out, stream);
  else
    tiers::launch_load<2>(src, token_stride, head_stride, grid, heads, page_tokens, head_dim, out, stream);
  return launch_status();
}
#endif  // CKV_BUILD_DEVICE
