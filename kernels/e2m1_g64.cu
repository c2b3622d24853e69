// Codec e2m1-g64, the seed's requantization: one E4M3 scale per row and 64 channels, 4-bit codes, in a raw slot of version 1.
// iso3 planes keep their alphabet; every other format becomes E2M1. FORMAT.md is the specification.
#include "e2m1_g64_page.h"
#if CKV_BUILD_DEVICE
#include "codec_device.h"
#endif

namespace ckv {
namespace e2m1_g64 {

constexpr uint16_t kVersion = 1;
constexpr unsigned kAccepts = 1u << CKV_BF16 | 1u << CKV_FP16 | 1u << CKV_INT8 | 1u << CKV_FP8 | 1u << CKV_NVFP4 | 1u << CKV_ISO3;

static const RegisterCodec kRegister("e2m1_g64", kAccepts, raw_slot_bytes);

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
    return e2m1_g64::encode_any_page(d->format, page, shape, slot);
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
        e2m1_g64::page_to_float(d->format, slot, shape, out + i * count);
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
        e2m1_g64::restore_page(restored.format, slot, shape, c, s);
      },
      [&](int64_t i) {
        const PageView page = at(i);
        poison_plane(restored.format, shape.T, shape.D, const_cast<uint8_t*>(page.codes), const_cast<uint8_t*>(page.scales));
      });
}

#endif  // CKV_BUILD_HOST

#if CKV_BUILD_DEVICE
namespace ckv {
namespace e2m1_g64 {

// One block per head-page, one thread per 16 channels; four neighbouring lanes share a group's maximum.
template <int F, bool kWide>
CKV_KERNEL encode_kernel(const uint8_t* codes, const uint8_t* scales, SlotShape shape, uint8_t* slots, int64_t stride, int32_t* valid) {
  using Alphabet = typename AlphabetOf<F>::type;
  const int64_t code_row = code_row_bytes(F, shape.D), scale_row = scale_row_bytes(F, shape.D);
  const uint8_t* page_codes = codes + static_cast<int64_t>(blockIdx.x) * shape.T * code_row;
  const uint8_t* page_scales = scales + static_cast<int64_t>(blockIdx.x) * shape.T * scale_row;
  uint8_t *slot = slots + blockIdx.x * stride, *nibbles = slot + sizeof(SlotHeader), *scale_bytes = slot + shape.scales_at;
  const int lanes = 4 * ceil_div(shape.D, 64), total = shape.T * lanes;
  bool bad = false;
  for (int base = 0; base < total; base += kBlock) {  // every thread takes every turn: the shuffles need whole warps
    const int i = base + static_cast<int>(threadIdx.x), row = i / lanes, j = i % lanes, ch = 16 * j;
    const bool active = i < total && j < shape.g16;
    const int len = active ? (shape.D - ch < 16 ? shape.D - ch : 16) : 0;
    float v[16] = {};
    if (active) load_segment<F, kWide>(page_codes + row * code_row, page_scales + row * scale_row, ch, len, v);
    const uint32_t amax = max_of_four_lanes(segment_amax_bits(v));
    if (!active) continue;
    if (not_finite(amax)) {
      bad = true;
      continue;
    }
    const uint8_t byte = group_scale<Alphabet>(float_of(amax));
    store_nibbles<Alphabet, kWide>(v, len, e4m3_to_float(byte), nibbles + (row * shape.D + ch) / 2);
    scale_bytes[row * shape.g16 + j] = byte;
  }
  if (threadIdx.x == 0) write_header(slot, kVersion, kFlagValid, 0);
  finish_slot(slot, shape, bad, valid + blockIdx.x);
}

}  // namespace e2m1_g64
}  // namespace ckv

extern "C" int ckv_e2m1_g64_encode_cuda(const ckv_plane_desc* d, const void* codes, const void* scales, uint8_t* slots, int64_t stride,
                                        int32_t* valid, void* stream) {
  int rc = check_call(d, e2m1_g64::kAccepts, slots, stride);
  if (!rc) rc = check_plane(d, codes, scales);
  if (!rc) rc = check_grid(d);
  if (rc || !d->n) return rc;
  if (!valid) return CKV_E_NULL;
  const SlotShape shape(d->page_tokens, d->head_dim);
  const uint8_t *c = static_cast<const uint8_t*>(codes), *s = static_cast<const uint8_t*>(scales);
  with_format(d->format, [&](auto tag) {
    constexpr int F = decltype(tag)::value;
    if (shape.D % 16 == 0)
      CKV_LAUNCH((e2m1_g64::encode_kernel<F, true>), static_cast<unsigned>(d->n), kBlock, stream, c, s, shape, slots, stride, valid);
    else
      CKV_LAUNCH((e2m1_g64::encode_kernel<F, false>), static_cast<unsigned>(d->n), kBlock, stream, c, s, shape, slots, stride, valid);
  });
  return launch_status();
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
