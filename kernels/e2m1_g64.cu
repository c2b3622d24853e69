// Codec e2m1-g64, the seed's requantization: one E4M3 scale per row and 64 channels, 4-bit codes, in a raw slot of version 1.
// iso3 planes keep their alphabet; every other format becomes E2M1. FORMAT.md is the specification.
#include "e2m1_g64_page.h"

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
  if (restored.format == CKV_INT8) return e2m1_g64::launch_slot_to_int8(*d, slots, stride, check, codes, scales, stream);
  if (has_nibbles(restored.format)) return launch_slot_to_nibbles(*d, slots, stride, check, codes, scales, stream);
  return launch_slot_to_bf16<E2M1>(*d, slots, stride, check, codes, stream);
}
#endif  // CKV_BUILD_DEVICE
