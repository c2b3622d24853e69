// Codec rans-e2m1, the seed's entropy slot: the 4-bit codes of e2m1-g64 (of an nvfp4 or iso3 plane: its own codes) in 32 rANS
// streams with one frequency table per half page. FORMAT.md is the specification.
//
// A head-page is refused (valid 0, all-zero slot) where a stream has more bytes than its share of the slot; lengths() says what
// each head-page would need. `stride` is the size of the slot, not a pitch: the scale bytes end there.
#include "e2m1_g64_page.h"
#include "entropy_slot.h"
#if CKV_BUILD_HOST
#include "rans_e2m1_host.h"
#else
#include "rans_e2m1_device.h"
#endif

namespace ckv {
namespace rans_e2m1 {

constexpr unsigned kAccepts = 1u << CKV_BF16 | 1u << CKV_FP16 | 1u << CKV_INT8 | 1u << CKV_FP8 | 1u << CKV_NVFP4 | 1u << CKV_ISO3;

static const RegisterCodec kRegister("rans_e2m1", kAccepts, slot_bytes_by_data);

// lengths() has no slots to check.
inline int check_lengths(const ckv_plane_desc* d, const void* codes, const void* scales, const int32_t* lengths) {
  const int rc = check_plane(d, codes, scales);
  return rc ? rc : d->n && !lengths ? CKV_E_NULL : CKV_OK;
}

inline ckv_plane_desc restored_plane(const ckv_plane_desc& d) {
  ckv_plane_desc restored = d;
  restored.format = e2m1_g64::restored_format(d.format);
  return restored;
}

}  // namespace rans_e2m1
}  // namespace ckv

using namespace ckv;

#if CKV_BUILD_HOST

extern "C" int ckv_rans_e2m1_lengths_cpu(const ckv_plane_desc* d, const void* codes, const void* scales, int32_t* lengths, int threads) {
  const int rc = rans_e2m1::check_lengths(d, codes, scales, lengths);
  if (rc) return rc;
  rans_e2m1::for_pages(*d, threads, [&](int64_t i, rans_e2m1::Scratch& scratch) {
    lengths[i] = rans_e2m1::length_of(*d, PageView(*d, codes, scales, i), scratch);
  });
  return CKV_OK;
}

extern "C" int ckv_rans_e2m1_encode_cpu(const ckv_plane_desc* d, const void* codes, const void* scales, uint8_t* slots, int64_t stride,
                                        int32_t* valid, int threads) {
  int rc = check_entropy_call(d, rans_e2m1::kAccepts, slots, stride);
  if (!rc) rc = check_plane(d, codes, scales);
  if (rc) return rc;
  if (d->n && !valid) return CKV_E_NULL;
  rans_e2m1::for_pages(*d, threads, [&](int64_t i, rans_e2m1::Scratch& scratch) {
    uint8_t* slot = slots + i * stride;
    valid[i] = rans_e2m1::encode_page(*d, PageView(*d, codes, scales, i), scratch, slot, stride) ? 1 : 0;
    if (!valid[i]) memset(slot, 0, static_cast<size_t>(stride));
  });
  return CKV_OK;
}

extern "C" int ckv_rans_e2m1_decode_cpu(const ckv_plane_desc* d, const uint8_t* slots, int64_t stride, float* out, int threads) {
  const int rc = check_entropy_call(d, rans_e2m1::kAccepts, slots, stride);
  if (rc || (d->n && !out)) return rc ? rc : CKV_E_NULL;
  const SlotShape shape(d->page_tokens, d->head_dim);
  const int64_t count = static_cast<int64_t>(shape.T) * shape.D;
  return rans_e2m1::decode_all(
      *d, slots, stride, threads, [&](int64_t i, const uint8_t* raw) { e2m1_g64::page_to_float(d->format, raw, shape, out + i * count); },
      [&](int64_t i) { poison_values(out + i * count, count); });
}

extern "C" int ckv_rans_e2m1_restore_cpu(const ckv_plane_desc* d, const uint8_t* slots, int64_t stride, void* codes, void* scales,
                                         int threads) {
  int rc = check_entropy_call(d, rans_e2m1::kAccepts, slots, stride);
  if (rc) return rc;
  const ckv_plane_desc restored = rans_e2m1::restored_plane(*d);
  if ((rc = check_plane(&restored, codes, scales))) return rc;
  const SlotShape shape(d->page_tokens, d->head_dim);
  const auto page_codes = [&](int64_t i) { return const_cast<uint8_t*>(PageView(restored, codes, scales, i).codes); };
  const auto page_scales = [&](int64_t i) { return const_cast<uint8_t*>(PageView(restored, codes, scales, i).scales); };
  return rans_e2m1::decode_all(
      *d, slots, stride, threads,
      [&](int64_t i, const uint8_t* raw) { e2m1_g64::restore_page(restored.format, raw, shape, page_codes(i), page_scales(i)); },
      [&](int64_t i) { poison_plane(restored.format, shape.T, shape.D, page_codes(i), page_scales(i)); });
}

#endif  // CKV_BUILD_HOST

#if CKV_BUILD_DEVICE

extern "C" int ckv_rans_e2m1_lengths_cuda(const ckv_plane_desc* d, const void* codes, const void* scales, int32_t* lengths, void* stream) {
  int rc = rans_e2m1::check_lengths(d, codes, scales, lengths);
  if (!rc) rc = check_grid(d);
  if (rc || !d->n) return rc;
  return rans_e2m1::launch_encode(*d, codes, scales, nullptr, 0, lengths, stream);
}

extern "C" int ckv_rans_e2m1_encode_cuda(const ckv_plane_desc* d, const void* codes, const void* scales, uint8_t* slots, int64_t stride,
                                         int32_t* valid, void* stream) {
  int rc = check_entropy_call(d, rans_e2m1::kAccepts, slots, stride);
  if (!rc) rc = check_plane(d, codes, scales);
  if (!rc) rc = check_grid(d);
  if (rc || !d->n) return rc;
  if (!valid) return CKV_E_NULL;
  return rans_e2m1::launch_encode(*d, codes, scales, slots, stride, valid, stream);
}

extern "C" int ckv_rans_e2m1_decode_cuda(const ckv_plane_desc* d, const uint8_t* slots, int64_t stride, float* out, void* stream) {
  int rc = check_entropy_call(d, rans_e2m1::kAccepts, slots, stride);
  if (!rc) rc = check_grid(d);
  if (rc || !d->n) return rc;
  if (!out) return CKV_E_NULL;
  if (d->format == CKV_ISO3) return rans_e2m1::launch_decode<rans_e2m1::FloatOut<Iso3>>(*d, slots, stride, out, nullptr, stream);
  return rans_e2m1::launch_decode<rans_e2m1::FloatOut<E2M1>>(*d, slots, stride, out, nullptr, stream);
}

extern "C" int ckv_rans_e2m1_restore_cuda(const ckv_plane_desc* d, const uint8_t* slots, int64_t stride, void* codes, void* scales, void* stream) {
  int rc = check_entropy_call(d, rans_e2m1::kAccepts, slots, stride);
  if (rc) return rc;
  const ckv_plane_desc restored = rans_e2m1::restored_plane(*d);
  rc = check_plane(&restored, codes, scales);
  if (!rc) rc = check_grid(d);
  if (rc || !d->n) return rc;
  if (restored.format == CKV_INT8) return rans_e2m1::launch_decode<rans_e2m1::Int8Out>(*d, slots, stride, codes, scales, stream);
  if (has_nibbles(restored.format)) return rans_e2m1::launch_decode<rans_e2m1::NibbleOut>(*d, slots, stride, codes, scales, stream);
  return rans_e2m1::launch_decode<rans_e2m1::Bf16Out>(*d, slots, stride, codes, nullptr, stream);
}

#endif  // CKV_BUILD_DEVICE
