// Codec native: the nibbles and scales of an nvfp4 or iso3 plane, unchanged, in a raw slot of version 3. Exact.
#include "plane.h"
#if CKV_BUILD_HOST
#include "codec_host.h"
#else
#include "codec_device.h"
#endif

namespace ckv {
namespace native {

constexpr uint16_t kVersion = 3;
constexpr unsigned kAccepts = 1u << CKV_NVFP4 | 1u << CKV_ISO3;

CKV_HD uint16_t flags_of(int format) { return format == CKV_ISO3 ? kFlagValid | kFlagIso3 : kFlagValid; }

static const RegisterCodec kRegister("native", kAccepts, raw_slot_bytes);

}  // namespace native
}  // namespace ckv

using namespace ckv;

#if CKV_BUILD_HOST

extern "C" int ckv_native_encode_cpu(const ckv_plane_desc* d, const void* codes, const void* scales, uint8_t* slots, int64_t stride,
                                     int32_t* valid, int threads) {
  int rc = check_call(d, native::kAccepts, slots, stride);
  if (!rc) rc = check_plane(d, codes, scales);
  if (rc) return rc;
  const SlotShape shape(d->page_tokens, d->head_dim);
  const size_t code_bytes = static_cast<size_t>(shape.scales_at) - sizeof(SlotHeader);
  const int scale_bytes = static_cast<int>(shape.payload_end - shape.scales_at);
  return encode_pages(*d, slots, stride, valid, threads, [&](int64_t i, uint8_t* slot) {
    const PageView page(*d, codes, scales, i);
    int bad = 0;
    for (int j = 0; j < scale_bytes; ++j) bad |= not_a_scale(page.scales[j]);
    write_header(slot, native::kVersion, native::flags_of(d->format), 0);
    memcpy(slot + sizeof(SlotHeader), page.codes, code_bytes);
    memcpy(slot + shape.scales_at, page.scales, static_cast<size_t>(scale_bytes));
    return !bad;
  });
}

extern "C" int ckv_native_decode_cpu(const ckv_plane_desc* d, const uint8_t* slots, int64_t stride, float* out, int threads) {
  const int rc = check_call(d, native::kAccepts, slots, stride);
  if (rc || (d->n && !out)) return rc ? rc : CKV_E_NULL;
  const SlotShape shape(d->page_tokens, d->head_dim);
  const int64_t count = static_cast<int64_t>(shape.T) * shape.D;
  return decode_pages(
      *d, slots, stride, threads, native::kVersion, native::flags_of(d->format),
      [&](int64_t i, const uint8_t* slot) {
        if (d->format == CKV_ISO3)
          slot_to_float<Iso3>(slot, shape, 1.0f, out + i * count);
        else
          slot_to_float<E2M1>(slot, shape, 1.0f, out + i * count);
      },
      [&](int64_t i) { poison_values(out + i * count, count); });
}

extern "C" int ckv_native_restore_cpu(const ckv_plane_desc* d, const uint8_t* slots, int64_t stride, void* codes, void* scales, int threads) {
  int rc = check_call(d, native::kAccepts, slots, stride);
  if (!rc) rc = check_plane(d, codes, scales);
  if (rc) return rc;
  const SlotShape shape(d->page_tokens, d->head_dim);
  return decode_pages(
      *d, slots, stride, threads, native::kVersion, native::flags_of(d->format),
      [&](int64_t i, const uint8_t* slot) {
        const PageView page(*d, codes, scales, i);
        memcpy(const_cast<uint8_t*>(page.codes), slot + sizeof(SlotHeader), static_cast<size_t>(shape.scales_at) - sizeof(SlotHeader));
        memcpy(const_cast<uint8_t*>(page.scales), slot + shape.scales_at, static_cast<size_t>(shape.payload_end - shape.scales_at));
      },
      [&](int64_t i) {
        const PageView page(*d, codes, scales, i);
        poison_plane(d->format, shape.T, shape.D, const_cast<uint8_t*>(page.codes), const_cast<uint8_t*>(page.scales));
      });
}

#endif  // CKV_BUILD_HOST

#if CKV_BUILD_DEVICE
namespace ckv {
namespace native {

CKV_KERNEL encode_kernel(const uint8_t* codes, const uint8_t* scales, SlotShape shape, uint16_t flags, uint8_t* slots, int64_t stride, int32_t* valid) {
  const int64_t code_bytes = shape.scales_at - static_cast<int64_t>(sizeof(SlotHeader)), scale_bytes = shape.payload_end - shape.scales_at;
  const uint8_t* page_scales = scales + blockIdx.x * scale_bytes;
  uint8_t* slot = slots + blockIdx.x * stride;
  bool bad = false;
  for (int64_t i = threadIdx.x; i < scale_bytes; i += blockDim.x) bad = bad || not_a_scale(page_scales[i]);
  block_copy(slot + sizeof(SlotHeader), codes + blockIdx.x * code_bytes, code_bytes);
  block_copy(slot + shape.scales_at, page_scales, scale_bytes);
  if (threadIdx.x == 0) write_header(slot, kVersion, flags, 0);
  finish_slot(slot, shape, bad, valid + blockIdx.x);
}

}  // namespace native
}  // namespace ckv

extern "C" int ckv_native_encode_cuda(const ckv_plane_desc* d, const void* codes, const void* scales, uint8_t* slots, int64_t stride,
                                      int32_t* valid, void* stream) {
  int rc = check_call(d, native::kAccepts, slots, stride);
  if (!rc) rc = check_plane(d, codes, scales);
  if (!rc) rc = check_grid(d);
  if (rc || !d->n) return rc;
  if (!valid) return CKV_E_NULL;
  const SlotShape shape(d->page_tokens, d->head_dim);
  CKV_LAUNCH(native::encode_kernel, static_cast<unsigned>(d->n), kBlock, stream, static_cast<const uint8_t*>(codes),
             static_cast<const uint8_t*>(scales), shape, native::flags_of(d->format), slots, stride, valid);
  return launch_status();
}

extern "C" int ckv_native_decode_cuda(const ckv_plane_desc* d, const uint8_t* slots, int64_t stride, float* out, void* stream) {
  int rc = check_call(d, native::kAccepts, slots, stride);
  if (!rc) rc = check_grid(d);
  if (rc) return rc;
  const SlotCheck check = {native::kVersion, native::flags_of(d->format)};
  return d->format == CKV_ISO3 ? launch_slot_to_float<Iso3>(*d, slots, stride, check, out, stream)
                               : launch_slot_to_float<E2M1>(*d, slots, stride, check, out, stream);
}

extern "C" int ckv_native_restore_cuda(const ckv_plane_desc* d, const uint8_t* slots, int64_t stride, void* codes, void* scales, void* stream) {
  int rc = check_call(d, native::kAccepts, slots, stride);
  if (!rc) rc = check_plane(d, codes, scales);
  if (!rc) rc = check_grid(d);
  if (rc || !d->n) return rc;
  return launch_slot_to_nibbles(*d, slots, stride, {native::kVersion, native::flags_of(d->format)}, codes, scales, stream);
}
#endif  // CKV_BUILD_DEVICE
