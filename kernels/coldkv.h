/* coldkv kernels, C ABI version 1. No framework types: plain pointers, sizes and error codes.
 *
 * Layouts (C order, contiguous, little endian). A head-page is one page of one KV head: [page_tokens, head_dim] values.
 *
 *   format        codes                           scales
 *   0 bf16        uint16 [n, T, D]                none
 *   1 fp16        uint16 [n, T, D]                none
 *   2 int8        int8   [n, T, D]                fp16 [n, T, ceil(D/64)]
 *   3 fp8         uint8  [n, T, D]   E4M3         fp16 [n, T, 1]
 *   4 nvfp4       uint8  [n, T, D/2] E2M1         uint8 [n, T, ceil(D/16)] E4M3
 *   5 iso3        uint8  [n, T, D/2] 0..7 + sign  uint8 [n, T, ceil(D/16)] E4M3
 *
 * Nibbles: even channel in the low four bits, odd channel in the high four. head_dim is even, 2..1024; page_tokens 1..4096.
 *
 * Every function with a _cpu suffix also exists with a _cuda suffix in the device build: the pointers are then device
 * pointers and the last argument is `void* stream` (a cudaStream_t) in place of `int threads`. Those only launch; they never
 * synchronise, so the only failure they report is a launch that could not start. threads <= 0 means all hardware threads; the
 * result never depends on the number of threads.
 */
#ifndef COLDKV_H
#define COLDKV_H

#include <stdint.h>

#if defined(_WIN32)
#define CKV_API __declspec(dllexport)
#else
#define CKV_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum {
  CKV_OK = 0,
  CKV_E_SHAPE = 1,  /* head_dim, page_tokens, heads or n outside what the formats hold */
  CKV_E_FORMAT = 2, /* unknown plane format, or one that this codec does not take */
  CKV_E_NULL = 3,   /* a pointer that this format needs is NULL */
  CKV_E_STRIDE = 4, /* slot stride smaller than the slot, or not a multiple of 16 */
  CKV_E_SLOT = 5,   /* a slot with a wrong header or damaged streams; its output is filled with NaN, never with zeros */
  CKV_E_LAUNCH = 6, /* the device refused the launch */
  CKV_E_DTYPE = 7   /* unknown dtype id given to load */
};

enum { CKV_BF16 = 0, CKV_FP16 = 1, CKV_INT8 = 2, CKV_FP8 = 3, CKV_NVFP4 = 4, CKV_ISO3 = 5 };

typedef struct ckv_plane_desc {
  int32_t format;      /* CKV_BF16 ... CKV_ISO3 */
  int32_t page_tokens; /* T: rows of one head-page */
  int32_t head_dim;    /* D: channels of one row */
  int32_t reserved;    /* 0 */
  int64_t n;           /* head-pages */
} ckv_plane_desc;

CKV_API int ckv_abi_version(void);
/* One English line for an error code; never NULL. */
CKV_API const char* ckv_strerror(int code);
/* Bytes of one slot of this codec (stem such as "e2m1_g64"), or -CKV_E_...; -CKV_E_STRIDE where they depend on the data. */
CKV_API int64_t ckv_slot_bytes(const char* codec_stem, int32_t format, int32_t page_tokens, int32_t head_dim);

/* Hot tier quantizer: x fp32 [n, T, D], all finite -> codes, scales of desc->format. */
CKV_API int ckv_quantize_cpu(const ckv_plane_desc* desc, const float* x, void* codes, void* scales, int threads);
CKV_API int ckv_dequantize_cpu(const ckv_plane_desc* desc, const void* codes, const void* scales, float* x, int threads);
/* Gathers [tokens, heads, D] with element strides into head-pages: out fp32 [pages * heads, T, D], head-page = page * heads + head.
 * dtype 0 bf16, 1 fp16, 2 fp32. Token of page p, row t is p * T + t; only whole pages. */
CKV_API int ckv_load_cpu(int32_t dtype, const void* src, int64_t token_stride, int64_t head_stride, int64_t pages, int32_t heads,
                         int32_t page_tokens, int32_t head_dim, float* out, int threads);
/* Error statistics over x, y fp32 [n, rows, D], n = pages * heads. out fp64 [heads][6]: += sum x^2, sum y^2, sum x*y,
 * sum (x-y)^2, max |x-y| (kept as a maximum), count. channel_sums fp64 [heads][D] += sum x, or NULL. Accumulated in fp64 in an
 * order that depends on the shape alone. */
CKV_API int ckv_stats_cpu(int64_t n, int32_t heads, int32_t rows, int32_t head_dim, const float* x, const float* y, double* out,
                          double* channel_sums, int threads);

/* The three functions of one codec. encode: valid[i] = 1, or 0 with an all-zero slot when head-page i holds a non-finite value.
 * Bytes between the slot's size and `stride` are left alone. decode: fp32 [n, T, D] of what attention reads. restore: the hot
 * plane, in the codec's restored format (FORMAT.md). */
#define CKV_DECLARE_CODEC(stem)                                                                                                   \
  CKV_API int ckv_##stem##_encode_cpu(const ckv_plane_desc* desc, const void* codes, const void* scales, uint8_t* slots,          \
                                      int64_t stride, int32_t* valid, int threads);                                               \
  CKV_API int ckv_##stem##_decode_cpu(const ckv_plane_desc* desc, const uint8_t* slots, int64_t stride, float* out, int threads); \
  CKV_API int ckv_##stem##_restore_cpu(const ckv_plane_desc* desc, const uint8_t* slots, int64_t stride, void* codes,             \
                                       void* scales, int threads);                                                                \
  CKV_API int ckv_##stem##_encode_cuda(const ckv_plane_desc* desc, const void* codes, const void* scales, uint8_t* slots,         \
                                       int64_t stride, int32_t* valid, void* stream);                                             \
  CKV_API int ckv_##stem##_decode_cuda(const ckv_plane_desc* desc, const uint8_t* slots, int64_t stride, float* out,              \
                                       void* stream);                                                                             \
  CKV_API int ckv_##stem##_restore_cuda(const ckv_plane_desc* desc, const uint8_t* slots, int64_t stride, void* codes,            \
                                        void* scales, void* stream);

/* Codec ecq: parameters of one layer's plane. head-page i of a call belongs to head i % heads. The four arrays are all NULL
 * (uncalibrated: mean 0, weight 1, prior 0) or all given; device pointers in the _cuda functions, the struct itself is always in
 * host memory. */
typedef struct ckv_ecq_params {
  const float* mean;     /* [heads, D] subtracted before quantization */
  const float* weight;   /* [heads, D] u > 0: restored = mean + k * step * u */
  const float* gain;     /* [heads, D] 1 / u in fp32 */
  const int16_t* prior;  /* [heads, D] 16 log2 of the mean magnitude of residuals at step 1, per channel */
  int32_t heads;         /* 1..256 */
  int32_t step;          /* sixteenths of an octave, -400..400, relative to the root mean square of a row (of the page without rows) */
  int32_t rows;          /* 1: every row has its own scale; 0: one scale for the page */
  int32_t fill;          /* 0..63: how many sixteenths of an octave finer a page may be coded where its slot has room */
  float rounding;        /* |k| = floor(|z| + rounding); 0.5 is nearest */
  uint32_t check;        /* low 8 bits: stored in slots, compared when they are read */
} ckv_ecq_params;

CKV_DECLARE_CODEC(e2m1_g64)
CKV_DECLARE_CODEC(e2m1_g16)
CKV_DECLARE_CODEC(native)

/* encode: a page that does not fit `stride` is coded with a coarser step; valid[i] = 0 with an all-zero slot only for values that
 * cannot be coded at all (not finite, or a row whose mean square overflows), or where even the coarsest step does not fit. lengths:
 * slot bytes of each head-page at the nominal step, INT32_MAX where it cannot be coded. decode, restore: CKV_E_SLOT as in the
 * other codecs; also for a slot that was written with another calibration (`check`). Restored planes are bf16, without scales. */
#define CKV_DECLARE_ECQ(suffix, tail)                                                                                             \
  CKV_API int ckv_ecq_encode_##suffix(const ckv_plane_desc* desc, const void* codes, const void* scales, uint8_t* slots,          \
                                      int64_t stride, int32_t* valid, const ckv_ecq_params* params, tail);                        \
  CKV_API int ckv_ecq_lengths_##suffix(const ckv_plane_desc* desc, const void* codes, const void* scales, int32_t* lengths,       \
                                       const ckv_ecq_params* params, tail);                                                       \
  CKV_API int ckv_ecq_decode_##suffix(const ckv_plane_desc* desc, const uint8_t* slots, int64_t stride, float* out,               \
                                      const ckv_ecq_params* params, tail);                                                        \
  CKV_API int ckv_ecq_restore_##suffix(const ckv_plane_desc* desc, const uint8_t* slots, int64_t stride, void* codes,             \
                                       void* scales, const ckv_ecq_params* params, tail);
CKV_DECLARE_ECQ(cpu, int threads)
CKV_DECLARE_ECQ(cuda, void* stream)

/* A codec whose slots are sized by what the data needs has a fourth function. lengths: int32 [n], the slot bytes that each
 * head-page needs, INT32_MAX where no size would do. From them the caller chooses one stride for a plane, a multiple of 16, and
 * passes it to the other three: there `stride` is the size of the slot itself. A head-page that needs more is refused as above;
 * a damaged slot (CKV_E_SLOT) is one whose header or whose streams do not decode. ckv_slot_bytes gives -CKV_E_STRIDE. */
#define CKV_DECLARE_SIZED_CODEC(stem)                                                                                        \
  CKV_DECLARE_CODEC(stem)                                                                                                    \
  CKV_API int ckv_##stem##_lengths_cpu(const ckv_plane_desc* desc, const void* codes, const void* scales, int32_t* lengths, \
                                       int threads);                                                                         \
  CKV_API int ckv_##stem##_lengths_cuda(const ckv_plane_desc* desc, const void* codes, const void* scales, int32_t* lengths, \
                                        void* stream);

CKV_DECLARE_SIZED_CODEC(rans_e2m1)

CKV_API int ckv_quantize_cuda(const ckv_plane_desc* desc, const float* x, void* codes, void* scales, void* stream);
CKV_API int ckv_dequantize_cuda(const ckv_plane_desc* desc, const void* codes, const void* scales, float* x, void* stream);
CKV_API int ckv_load_cuda(int32_t dtype, const void* src, int64_t token_stride, int64_t head_stride, int64_t pages, int32_t heads,
                          int32_t page_tokens, int32_t head_dim, float* out, void* stream);
CKV_API int ckv_stats_cuda(int64_t n, int32_t heads, int32_t rows, int32_t head_dim, const float* x, const float* y, double* out,
                           double* channel_sums, void* stream);

#ifdef __cplusplus
}
#endif
#endif
