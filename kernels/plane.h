// Hot planes as fp32 values: one definition per format (`Source<F>`), used one element at a time by the device kernels and row
// by row on the host.
#pragma once

#include "numerics.h"
#include "slot.h"

namespace ckv {

// scale(row, ch): the fp32 scale of a channel; value(row, ch, scale): the dequantized value. `row` points at that row's codes
// or scales.
template <int F>
struct Source;

template <>
struct Source<CKV_BF16> {
  using Code = uint16_t;
  static constexpr int kGroup = 1 << 30;
  CKV_HD static float scale(const void*, int) { return 1.0f; }
  CKV_HD static float value(const void* codes, int ch, float) { return bf16_to_float(static_cast<const uint16_t*>(codes)[ch]); }
};
template <>
struct Source<CKV_FP16> {
  using Code = uint16_t;
  static constexpr int kGroup = 1 << 30;
  CKV_HD static float scale(const void*, int) { return 1.0f; }
  CKV_HD static float value(const void* codes, int ch, float) { return fp16_to_float(static_cast<const uint16_t*>(codes)[ch]); }
};
template <>
struct Source<CKV_INT8> {
  using Code = int8_t;
  static constexpr int kGroup = 64;
  CKV_HD static float scale(const void* scales, int ch) { return fp16_to_float(static_cast<const uint16_t*>(scales)[ch / 64]); }
  CKV_HD static float value(const void* codes, int ch, float s) {
    return static_cast<float>(static_cast<const int8_t*>(codes)[ch]) * s;
  }
};
template <>
struct Source<CKV_FP8> {
  using Code = uint8_t;
  static constexpr int kGroup = 1 << 30;
  CKV_HD static float scale(const void* scales, int) { return fp16_to_float(*static_cast<const uint16_t*>(scales)); }
  CKV_HD static float value(const void* codes, int ch, float s) { return e4m3_to_float(static_cast<const uint8_t*>(codes)[ch]) * s; }
};
template <class Alphabet>
struct NibbleSource {
  using Code = uint8_t;  // two channels
  static constexpr int kGroup = 16;
  CKV_HD static float scale(const void* scales, int ch) { return e4m3_to_float(static_cast<const uint8_t*>(scales)[ch / 16]); }
  CKV_HD static float value(const void* codes, int ch, float s) {
    return nibble_value<Alphabet>(static_cast<const uint8_t*>(codes)[ch / 2] >> 4 * (ch & 1) & 15u, s);
  }
};
template <>
struct Source<CKV_NVFP4> : NibbleSource<E2M1> {};
template <>
struct Source<CKV_ISO3> : NibbleSource<Iso3> {};

// Calls body(std::integral_constant-like tag) for the format id; formats are compile-time constants inside the body.
template <int F>
struct FormatTag {
  static constexpr int value = F;
};
template <class Body>
void with_format(int format, const Body& body) {
  switch (format) {
    case CKV_BF16: return body(FormatTag<CKV_BF16>{});
    case CKV_FP16: return body(FormatTag<CKV_FP16>{});
    case CKV_INT8: return body(FormatTag<CKV_INT8>{});
    case CKV_FP8: return body(FormatTag<CKV_FP8>{});
    case CKV_NVFP4: return body(FormatTag<CKV_NVFP4>{});
    case CKV_ISO3: return body(FormatTag<CKV_ISO3>{});
    default: return;
  }
}

}  // namespace ckv

#if CKV_BUILD_HOST
#include "plane_host.h"
#endif
