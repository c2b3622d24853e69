// Scale search of codec e2m1-g16, host and device.
//
// U is the set of positive normal fp32 numbers with 3 mantissa bits: E4M3's precision with fp32's range. Its members are
// numbered by u = bits >> 20, so u + 1 is the next larger one. A group's scale is the s in U with 3.5 s < a <= 7 s (a = largest
// magnitude; always 8 candidates) that leaves the least squared error; a tie goes to the smaller s, and canonical() settles the
// one case where the same values have a second form. Only then is the page scale P known, a power of two that puts the page's largest s at 128..240 in E4M3. Groups whose s/P falls below the
// normal E4M3 range search again, among the E4M3 numbers themselves.
#pragma once

#include "numerics.h"

namespace ckv {
namespace g16 {

constexpr int kFirstU = 8;         // smallest normal exponent
constexpr int kZeroGroup = 1;      // stands in for u: every value is zero
constexpr int kTinyGroup = 0;      // stands in for u: values below kTiny
constexpr uint8_t kZeroByte = 1;   // scale byte of a zero group
constexpr int kCandidates = 8;
constexpr float kTiny = 0x1p-100f;  // pages below are stored as zeros; groups below take no part in choosing P
constexpr float kHuge = 0x1p120f;   // pages above are refused: restored values could leave the range of bf16

CKV_HD float u_value(int u) { return float_of(static_cast<uint32_t>(u) << 20); }

struct Range {
  int lo, hi;  // inclusive; empty when lo > hi
};

// The lowest candidate; the highest is 7 above it, just under twice its value. kTiny <= a <= kHuge.
CKV_HD int free_low(float a) {
  int lo = static_cast<int>(bits_of(a * (1.0f / 7.0f)) >> 20);
  // The product is within an ulp of the quotient; these steps make the bound exact.
  while (u_value(lo - 1) * 7.0f >= a) --lo;
  while (u_value(lo) * 7.0f < a) ++lo;
  return lo;
}

// E4M3 codes for a group below the normal range of a page with scale P.
CKV_HD Range coded_range(float a, float P) {
  Range r = {1, 1};
  while (r.lo < 126 && e4m3_to_float(static_cast<uint8_t>(r.lo)) * P * 7.0f < a) ++r.lo;
  r.hi = r.lo;
  while (r.hi < 126 && e4m3_to_float(static_cast<uint8_t>(r.hi + 1)) * P * 3.5f < a) ++r.hi;
  return r;
}

// Sum of squared errors of 16 magnitudes at scale s, in index order. Short groups are padded with zeros, which add nothing.
CKV_HD double squared_error(const float* magnitude, float s) {
  double sum = 0.0;
  for (int i = 0; i < 16; ++i) {
    const double q = static_cast<double>(E2M1::magnitude(E2M1::index(magnitude[i], s)));
    const double e = static_cast<double>(magnitude[i]) - q * static_cast<double>(s);
    sum += e * e;
  }
  return sum;
}

#if CKV_BUILD_HOST
// Index of the least squared_error() among the scales s; candidates side by side, so that the inner loop vectorizes.
inline int best_candidate(const float* magnitude, const float* s) {
  double sum[kCandidates] = {};
  float limit[7][kCandidates];
  double wide[kCandidates];
  const float t[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
  for (int c = 0; c < kCandidates; ++c) {
    wide[c] = static_cast<double>(s[c]);
    for (int k = 0; k < 7; ++k) limit[k][c] = t[k] * s[c];
  }
  for (int i = 0; i < 16; ++i) {
    const float a = magnitude[i];
    float q[kCandidates];
    for (int c = 0; c < kCandidates; ++c) {
      float step = 0.0f;  // E2M1 magnitude as a sum of its steps
      step += a >= limit[0][c] ? 0.5f : 0.0f;
      step += a >= limit[1][c] ? 0.5f : 0.0f;
      step += a >= limit[2][c] ? 0.5f : 0.0f;
      step += a >= limit[3][c] ? 0.5f : 0.0f;
      step += a >= limit[4][c] ? 1.0f : 0.0f;
      step += a >= limit[5][c] ? 1.0f : 0.0f;
      step += a >= limit[6][c] ? 2.0f : 0.0f;
      q[c] = step;
    }
    for (int c = 0; c < kCandidates; ++c) {
      const double e = static_cast<double>(a) - static_cast<double>(q[c]) * wide[c];
      sum[c] += e * e;
    }
  }
  int best = 0;
  for (int c = 1; c < kCandidates; ++c)
    if (sum[c] < sum[best]) best = c;
  return best;
}
#endif

// Scale for a group whose E2M1 indices at u are all even, that is of values 0, 1, 2, 4. Where 2/3 of it is in U too (mantissas
// 9/8, 12/8, 15/8) those values are also 0, 1.5, 3, 6 of that smaller scale, which encoding the restored page would pick as
// the smaller of two exact ones. Taking it at once keeps the slot a fixed point, and the error does not grow.
CKV_HD int canonical_even(int u) {
  const int mantissa = u & 7;
  return mantissa == 4 ? u - 4 : mantissa == 1 || mantissa == 7 ? u - 5 : u;
}

CKV_HD int canonical(const float* magnitude, int u) {
  const float s = u_value(u);
  int any_odd = 0;
  for (int i = 0; i < 16; ++i) any_odd |= E2M1::index(magnitude[i], s) & 1;
  return any_odd ? u : canonical_even(u);
}

// u of the group's scale, or kZeroGroup, or kTinyGroup. a <= kHuge.
CKV_HD int pick_free(const float* magnitude, float a) {
  if (a == 0.0f) return kZeroGroup;
  if (a < kTiny) return kTinyGroup;
  const int lo = free_low(a);
#if CKV_BUILD_HOST
  float s[kCandidates];
  for (int c = 0; c < kCandidates; ++c) s[c] = u_value(lo + c);
  const int best = lo + best_candidate(magnitude, s);
#else
  int best = lo;
  double least = squared_error(magnitude, u_value(lo));
  for (int u = lo + 1; u < lo + kCandidates; ++u) {
    const double e = squared_error(magnitude, u_value(u));
    if (e < least) least = e, best = u;
  }
#endif
  return canonical(magnitude, best);
}

// Scale byte of a group below the normal range.
CKV_HD uint8_t pick_coded(const float* magnitude, float a, float P) {
  const Range r = coded_range(a, P);
  int best = r.lo;
  double least = squared_error(magnitude, e4m3_to_float(static_cast<uint8_t>(r.lo)) * P);
  for (int c = r.lo + 1; c <= r.hi; ++c) {
    const double e = squared_error(magnitude, e4m3_to_float(static_cast<uint8_t>(c)) * P);
    if (e < least) least = e, best = c;
  }
  return static_cast<uint8_t>(best);
}

// Exponent field of P for the page's largest u (at least kFirstU).
CKV_HD int page_exponent(int u_max) { return (u_max >> 3) - 7; }
CKV_HD float page_scale(int exponent) { return float_of(static_cast<uint32_t>(exponent) << 23); }

// E4M3 byte of s / P, or 0 when s / P is below the normal range.
CKV_HD uint8_t normal_byte(int u, int exponent) {
  const int e = (u >> 3) - exponent + 7;  // E4M3 exponent field
  return e >= 1 ? static_cast<uint8_t>(e << 3 | (u & 7)) : static_cast<uint8_t>(0);
}

}  // namespace g16
}  // namespace ckv
