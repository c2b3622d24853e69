// Number formats and element quantizers, written once for host and device.
//
// Surprises first: magnitudes are found by comparing |x| >= t * s, never x / s >= t. t * s is exact in fp32 (t has at most 3
// significant bits, s at most 4), so every backend sees the same ties; a quotient would be rounded. An exact tie goes up.
#pragma once

#include <cmath>

#include "port.cuh"

namespace ckv {

constexpr float kScaleFloor = 0x1p-9f;  // smallest positive E4M3 number

// E4M3 (OCP e4m3fn) of a finite x >= 0: nearest, ties to even, saturating at 448 (0x7E).
CKV_HD uint8_t e4m3_from_positive(float x) {
  if (x < 0x1p-6f) {  // subnormal: a multiple of 2^-9; adding 2^23 rounds to an integer, ties to even
    const float r = (x * 512.0f + 8388608.0f) - 8388608.0f;
    return static_cast<uint8_t>(r);
  }
  uint32_t u = bits_of(x);
  u += 0x7FFFFu + (u >> 20 & 1u);
  const int code = static_cast<int>(u >> 20) - (120 << 3);
  return static_cast<uint8_t>(code > 0x7E ? 0x7E : code);
}

CKV_HD uint8_t e4m3_from_float(float x) {
  const uint32_t u = bits_of(x);
  return static_cast<uint8_t>((u >> 24 & 0x80u) | e4m3_from_positive(float_of(u & 0x7FFFFFFFu)));
}

// Device builds move the bits under a larger exponent and scale, which takes subnormals along; hosts trap on fp32 subnormals.
CKV_HD float e4m3_to_float(uint8_t c) {
#if CKV_BUILD_DEVICE
  const uint32_t bits = (c & 0x80u) << 24 | (c & 0x7Fu) << 20;
  return (c & 0x7Fu) == 0x7Fu ? float_of(bits | 0x7FC00000u) : float_of(bits) * 0x1p120f;
#else
  const uint32_t sign = static_cast<uint32_t>(c & 0x80u) << 24, e = c >> 3 & 15u, m = c & 7u;
  if ((c & 0x7Fu) == 0x7Fu) return float_of(sign | 0x7FC00000u);
  if (e) return float_of(sign | (e + 120u) << 23 | m << 20);
  return float_of(sign | bits_of(static_cast<float>(m) * 0x1p-9f));
#endif
}

CKV_HD float fp16_to_float(uint16_t h) {
#if defined(__CUDA_ARCH__)
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
  return x;
#else
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, e = h >> 10 & 31u, m = h & 1023u;
  if (e == 31u) return float_of(sign | 0x7F800000u | m << 13);
  if (e) return float_of(sign | (e + 112u) << 23 | m << 13);
  return float_of(sign | bits_of(static_cast<float>(m) * 0x1p-24f));
#endif
}

// Nearest fp16, ties to even, overflow to infinity. x is not NaN.
CKV_HD uint16_t fp16_from_float(float x) {
#if defined(__CUDA_ARCH__)
  uint16_t h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
  return h;
#else
  const uint32_t u = bits_of(x), a = u & 0x7FFFFFFFu;
  const uint16_t sign = static_cast<uint16_t>(u >> 16 & 0x8000u);
  if (a >= 0x477FF000u) return sign | 0x7C00u;  // >= 65520
  if (a < 0x38800000u) {                        // < 2^-14: a multiple of 2^-24
    const float r = (float_of(a) * 0x1p24f + 8388608.0f) - 8388608.0f;
    return static_cast<uint16_t>(sign | static_cast<uint16_t>(r));
  }
  return static_cast<uint16_t>(sign | (((a + 0xFFFu + (a >> 13 & 1u)) >> 13) - (112u << 10)));
#endif
}

constexpr float kLargestFp16 = 65504.0f;
CKV_HD float clamp_fp16(float x) { return x > kLargestFp16 ? kLargestFp16 : x < -kLargestFp16 ? -kLargestFp16 : x; }

// fp16 scale of a group: nearest, clamped to the largest finite number.
CKV_HD uint16_t fp16_scale(float x) {
  const uint16_t h = fp16_from_float(x);
  return h > 0x7BFFu ? static_cast<uint16_t>(0x7BFF) : h;
}

CKV_HD float bf16_to_float(uint16_t b) { return float_of(static_cast<uint32_t>(b) << 16); }

CKV_HD uint16_t bf16_from_float(float x) {
  const uint32_t u = bits_of(x);
  return static_cast<uint16_t>((u + 0x7FFFu + (u >> 16 & 1u)) >> 16);
}

// ---- 4-bit alphabets --------------------------------------------------------------------------------------------------------
// A magnitude index is 0..7; bit 3 of a nibble is the sign. E2M1 magnitudes are 0 .5 1 1.5 2 3 4 6, iso3 magnitudes 0..7.

struct E2M1 {
  static constexpr float kDivisor = 6.0f;
  static constexpr bool kNegativeZero = true;  // nibble 8 is written for a negative value that rounds to zero
  CKV_HD static int index(float a, float s) {
    return (a >= 0.25f * s) + (a >= 0.75f * s) + (a >= 1.25f * s) + (a >= 1.75f * s) + (a >= 2.5f * s) + (a >= 3.5f * s) +
           (a >= 5.0f * s);
  }
  // Twice the magnitude, an integer: 0 1 2 3 4 6 8 12.
  CKV_HD static int twice(int i) { return static_cast<int>(0xC8643210u >> 4 * i & 15u); }
  CKV_HD static float magnitude(int i) { return 0.5f * static_cast<float>(twice(i)); }
};

struct E2M1NoNegativeZero : E2M1 {
  static constexpr bool kNegativeZero = false;
};

struct Iso3 {
  static constexpr float kDivisor = 7.0f;
  static constexpr bool kNegativeZero = false;
  CKV_HD static int index(float a, float s) {
    return (a >= 0.5f * s) + (a >= 1.5f * s) + (a >= 2.5f * s) + (a >= 3.5f * s) + (a >= 4.5f * s) + (a >= 5.5f * s) +
           (a >= 6.5f * s);
  }
  CKV_HD static float magnitude(int i) { return static_cast<float>(i); }
};

template <class Alphabet>
CKV_HD uint32_t nibble_of(float x, float s) {
  const float a = float_of(bits_of(x) & 0x7FFFFFFFu);
  const uint32_t i = static_cast<uint32_t>(Alphabet::index(a, s));
  const bool negative = x < 0.0f && (Alphabet::kNegativeZero || i);
  return i | (negative ? 8u : 0u);
}

// amax / kDivisor, correctly rounded. The device's division is a call of some twenty instructions; with the reciprocal known, one
// correction of the rounded product gives the same (a test compares all mantissas). Quotients below 2^-126 may differ, which the
// floor of group_scale hides.
template <class Alphabet>
CKV_HD float over_divisor(float amax) {
#if CKV_BUILD_DEVICE
  constexpr float inverse = 1.0f / Alphabet::kDivisor;
  const float q = amax * inverse;
  return fmaf(fmaf(-Alphabet::kDivisor, q, amax), inverse, q);
#else
  return amax / Alphabet::kDivisor;
#endif
}

// Scale byte of a group whose largest magnitude is `amax`, finite.
template <class Alphabet>
CKV_HD uint8_t group_scale(float amax) {
  const float r = over_divisor<Alphabet>(amax);
  return e4m3_from_positive(r > kScaleFloor ? r : kScaleFloor);
}

template <class Alphabet>
CKV_HD float nibble_value(uint32_t nibble, float s) {
  const float v = Alphabet::magnitude(static_cast<int>(nibble & 7u)) * s;
  return float_of(bits_of(v) ^ (nibble & 8u) << 28);
}

CKV_HD bool not_finite(uint32_t abs_bits) { return abs_bits >= 0x7F800000u; }

}  // namespace ckv
