// Codec e2m1-g16: per 16 channels an E4M3 scale relative to one page scale, chosen for the least squared error, in a raw slot of
// version 2. FORMAT.md is the specification; e2m1_g16_core.h explains the search.
#include "e2m1_g16_core.h"
#include "e2m1_g16_int8.h"
#include "plane.h"
#if CKV_BUILD_HOST
#include <vector>

#include "codec_host.h"
#endif

namespace ckv {
namespace e2m1_g16 {

constexpr uint16_t kVersion = 2;
constexpr unsigned kAccepts = 1u << CKV_BF16 | 1u << CKV_FP16 | 1u << CKV_INT8 | 1u << CKV_FP8;

static const RegisterCodec kRegister("e2m1_g16", kAccepts, raw_slot_bytes);

#if CKV_BUILD_HOST

// First pass by value: nibbles and u of every group, and the page's largest magnitude (bits). False when not finite or too large.
template <int F>
bool search_page(const PageView& page, const SlotShape& shape, uint8_t* nibbles, uint16_t* u, uint32_t* page_amax) {
  float row_values[1024 + 16], magnitude[16];
  *page_amax = 0;
  for (int row = 0; row < shape.T; ++row) {
    row_to_float<F>(page.code(row), page.scale(row), shape.D, row_values);
    for (int ch = 0; ch < shape.D; ch += 16) {
      const int len = std::min(16, shape.D - ch);
      const uint32_t amax = max_abs_bits(row_values + ch, len);
      if (amax > bits_of(g16::kHuge)) return false;  // also what is not finite
      *page_amax = std::max(*page_amax, amax);
      for (int i = 0; i < 16; ++i) magnitude[i] = i < len ? float_of(bits_of(row_values[ch + i]) & 0x7FFFFFFFu) : 0.0f;
      const int pick = g16::pick_free(magnitude, float_of(amax));
      u[static_cast<int64_t>(row) * shape.g16 + ch / 16] = static_cast<uint16_t>(pick);
      uint8_t* to = nibbles + (static_cast<int64_t>(row) * shape.D + ch) / 2;
      if (pick >= g16::kFirstU)
        encode_nibbles<E2M1NoNegativeZero>(row_values + ch, len, g16::u_value(pick), to);
      else
        memset(to, 0, static_cast<size_t>(len) / 2);
    }
  }
  return true;
}

// Groups below the normal E4M3 range of the page, found again by value.
template <int F>
void recode_group(const PageView& page, const SlotShape& shape, int row, int j, float P, uint8_t* nibbles, uint8_t* scale) {
  float row_values[1024], magnitude[16];
  row_to_float<F>(page.code(row), page.scale(row), shape.D, row_values);
  const int ch = 16 * j, len = std::min(16, shape.D - ch);
  for (int i = 0; i < 16; ++i) magnitude[i] = i < len ? float_of(bits_of(row_values[ch + i]) & 0x7FFFFFFFu) : 0.0f;
  *scale = g16::pick_coded(magnitude, float_of(max_abs_bits(row_values + ch, len)), P);
  encode_nibbles<E2M1NoNegativeZero>(row_values + ch, len, tables().e4m3[*scale] * P, nibbles + (static_cast<int64_t>(row) * shape.D + ch) / 2);
}

template <int F>
bool encode_page(const PageView& page, const SlotShape& shape, uint8_t* slot, std::vector<uint16_t>& u) {
  uint8_t *nibbles = slot + sizeof(SlotHeader), *scales = slot + shape.scales_at;
  const int64_t groups = static_cast<int64_t>(shape.T) * shape.g16;
  uint32_t page_amax = bits_of(1.0f);
  bool searched = false;
#if CKV_AVX2
  if constexpr (F == CKV_INT8) searched = g16_int8::search_page(page, shape, nibbles, u.data());
#endif
  if (!searched && !search_page<F>(page, shape, nibbles, u.data(), &page_amax)) return false;
  int u_max = 0;
  for (int64_t i = 0; i < groups; ++i) u_max = std::max<int>(u_max, u[static_cast<size_t>(i)]);
  if (u_max < g16::kFirstU || float_of(page_amax) < g16::kTiny) {
    write_header(slot, kVersion, kFlagValid, bits_of(1.0f));
    memset(nibbles, 0, static_cast<size_t>(shape.scales_at) - sizeof(SlotHeader));
    memset(scales, g16::kZeroByte, static_cast<size_t>(groups));
    return true;
  }
  const int exponent = g16::page_exponent(u_max);
  const float P = g16::page_scale(exponent);
  write_header(slot, kVersion, kFlagValid, bits_of(P));
  int64_t below = 0;
  for (int64_t i = 0; i < groups; ++i) {
    scales[i] = u[static_cast<size_t>(i)] == g16::kZeroGroup ? g16::kZeroByte : g16::normal_byte(u[static_cast<size_t>(i)], exponent);
    below += scales[i] == 0;
  }
  if (below)
    for (int64_t i = 0; i < groups; ++i)
      if (scales[i] == 0) recode_group<F>(page, shape, static_cast<int>(i / shape.g16), static_cast<int>(i % shape.g16), P, nibbles, scales + i);
  return true;
}

#endif  // CKV_BUILD_HOST

}  // namespace e2m1_g16
}  // namespace ckv

using namespace ckv;

#if CKV_BUILD_HOST

extern "C" int ckv_e2m1_g16_encode_cpu(const ckv_plane_desc* d, const void* codes, const void* scales, uint8_t* slots, int64_t stride,
                                       int32_t* valid, int threads) {
  int rc = check_call(d, e2m1_g16::kAccepts, slots, stride);
  if (!rc) rc = check_plane(d, codes, scales);
  if (rc) return rc;
  const SlotShape shape(d->page_tokens, d->head_dim);
  return encode_pages(*d, slots, stride, valid, threads, [&](int64_t i, uint8_t* slot) {
    static thread_local std::vector<uint16_t> u;
    u.resize(static_cast<size_t>(shape.T) * static_cast<size_t>(shape.g16));
    const PageView page(*d, codes, scales, i);
    switch (d->format) {
      case CKV_BF16: return e2m1_g16::encode_page<CKV_BF16>(page, shape, slot, u);
      case CKV_FP16: return e2m1_g16::encode_page<CKV_FP16>(page, shape, slot, u);
      case CKV_FP8: return e2m1_g16::encode_page<CKV_FP8>(page, shape, slot, u);
      default: return e2m1_g16::encode_page<CKV_INT8>(page, shape, slot, u);
    }
  });
}

namespace {
float page_scale_of(const uint8_t* slot) {
  SlotHeader h;
  memcpy(&h, slot, sizeof h);
  return h.page_scale;
}
}  // namespace

extern "C" int ckv_e2m1_g16_decode_cpu(const ckv_plane_desc* d, const uint8_t* slots, int64_t stride, float* out, int threads) {
  const int rc = check_call(d, e2m1_g16::kAccepts, slots, stride);
  if (rc || (d->n && !out)) return rc ? rc : CKV_E_NULL;
  const SlotShape shape(d->page_tokens, d->head_dim);
  const int64_t count = static_cast<int64_t>(shape.T) * shape.D;
  return decode_pages(
      *d, slots, stride, threads, e2m1_g16::kVersion, kFlagValid,
      [&](int64_t i, const uint8_t* slot) { slot_to_float<E2M1>(slot, shape, page_scale_of(slot), out + i * count); },
      [&](int64_t i) { poison_values(out + i * count, count); });
}

// Every format restores to bf16, exactly.
extern "C" int ckv_e2m1_g16_restore_cpu(const ckv_plane_desc* d, const uint8_t* slots, int64_t stride, void* codes, void*, int threads) {
  const int rc = check_call(d, e2m1_g16::kAccepts, slots, stride);
  if (rc || (d->n && !codes)) return rc ? rc : CKV_E_NULL;
  const SlotShape shape(d->page_tokens, d->head_dim);
  const int64_t count = static_cast<int64_t>(shape.T) * shape.D;
  uint16_t* out = static_cast<uint16_t*>(codes);
  return decode_pages(
      *d, slots, stride, threads, e2m1_g16::kVersion, kFlagValid,
      [&](int64_t i, const uint8_t* slot) { slot_to_bf16<E2M1>(slot, shape, page_scale_of(slot), out + i * count); },
      [&](int64_t i) { poison_plane(CKV_BF16, shape.T, shape.D, out + i * count, nullptr); });
}

#endif  // CKV_BUILD_HOST

#if CKV_BUILD_DEVICE
#include "e2m1_g16_device.h"

extern "C" int ckv_e2m1_g16_encode_cuda(const ckv_plane_desc* d, const void* codes, const void* scales, uint8_t* slots, int64_t stride,
                                        int32_t* valid, void* stream) {
  int rc = check_call(d, e2m1_g16::kAccepts, slots, stride);
  if (!rc) rc = check_plane(d, codes, scales);
  if (!rc) rc = check_grid(d);
  if (rc || !d->n) return rc;
  if (!valid) return CKV_E_NULL;
  if (check_aligned(codes, scales, slots)) return CKV_E_ALIGN;
  return e2m1_g16::launch_encode(*d, codes, scales, slots, stride, valid, stream);
}

extern "C" int ckv_e2m1_g16_decode_cuda(const ckv_plane_desc* d, const uint8_t* slots, int64_t stride, float* out, void* stream) {
  int rc = check_call(d, e2m1_g16::kAccepts, slots, stride);
  if (!rc) rc = check_grid(d);
  return rc ? rc : launch_slot_to_float<E2M1>(*d, slots, stride, {e2m1_g16::kVersion, kFlagValid}, out, stream);
}

extern "C" int ckv_e2m1_g16_restore_cuda(const ckv_plane_desc* d, const uint8_t* slots, int64_t stride, void* codes, void*, void* stream) {
  int rc = check_call(d, e2m1_g16::kAccepts, slots, stride);
  if (!rc) rc = check_grid(d);
  return rc ? rc : launch_slot_to_bf16<E2M1>(*d, slots, stride, {e2m1_g16::kVersion, kFlagValid}, codes, stream);
}
#endif  // CKV_BUILD_DEVICE
