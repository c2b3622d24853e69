// E2M1 and iso3 indices from a few instructions per value, and the same bits as the comparisons |v| >= t * s of numerics.h.
//
// E2M1: 2^-126 * x is a subnormal fp32 number for x < 1 and a normal one from 1 on: its bits stop halving their step exactly where
// E2M1 does. So with x = |v| / s, the index is the top of the bits of 2^-126 * x once half of bit 22 is added: bits 22..24.
// iso3: the index is x rounded to an integer, which adding 2^23 does.
//
// Why a rounded quotient will do, although |v| >= t * s is normative: v is an integer below 2^18 times a power of two (11 bits of
// an fp16 scale times 7 of a code, and -128; all other formats have fewer), and t * s is one below 2^9. So where the two differ,
// they differ by 2^-18 of either at least. x is computed as |v| * r with r = (1 + 2^-20) / s, which errs by less than
//   2^-23 (reciprocal) + 3 * 2^-24 (products) + 2^-22 (a subnormal's last bit, at the lowest threshold) < 2^-20
// of itself. A tie therefore lands on the threshold or above it, as it should, and what lies below a threshold, by 2^-18 or more,
// is raised by less than 2^-20 + 2^-20 and stays below.
#pragma once

#include "bits_device.h"
#include "numerics.h"

namespace ckv {

constexpr float kDown126 = 0x1p-126f, kUp126 = 0x1p126f;
constexpr float kRaise = 1.0f + 0x1p-20f;

// r above; s is a member of U or an E4M3 number, of at most 4 significant bits and far from the ends of fp32's range.
CKV_DEVICE float raised_reciprocal(float s) { return near_reciprocal(s) * kRaise; }

// Groups whose largest magnitude is at most this many scales cannot run past index 7; the others take the comparisons.
template <class Alphabet>
struct Reach {
  static constexpr float kScales = 6.5f;
};
template <>
struct Reach<Iso3> {
  static constexpr float kScales = 7.4375f;
};

// Bits 22..24 hold the E2M1 index of the value whose 2^-126 * |v| / s is |x|; all above is 0, but for the sign bit of x.
CKV_DEVICE uint32_t e2m1_bits(float x) { return bits_of(x) + 0x200000u; }

template <class Alphabet>
CKV_DEVICE uint32_t quick_nibble(float v, float r) {
  const uint32_t sign = bits_of(v + 0.0f) >> 28 & 8u;  // adding 0 makes -0 a +0: a nibble's sign is that of v < 0
  const float x = float_of(bits_of(v) & 0x7FFFFFFFu) * r;
  const uint32_t i = e2m1_bits(x * kDown126) >> 22;
  return i | (Alphabet::kNegativeZero || i ? sign : 0u);
}
template <>
CKV_DEVICE uint32_t quick_nibble<Iso3>(float v, float r) {
  const uint32_t sign = bits_of(v) >> 28 & 8u;
  const uint32_t i = bits_of(float_of(bits_of(v) & 0x7FFFFFFFu) * r + 8388608.0f) & 7u;
  return i | (i ? sign : 0u);
}

// Nibbles of 16 finite values at scale s, the first in the lowest bits of word[0]; no magnitude may be beyond the reach.
template <class Alphabet>
CKV_DEVICE void quick_nibbles(const float* v, float s, uint32_t* word) {
  const float r = raised_reciprocal(s);
  word[0] = word[1] = 0;
  for (int i = 0; i < 16; ++i) word[i / 8] |= quick_nibble<Alphabet>(v[i], r) << 4 * (i % 8);
}
// The same by comparisons, for any magnitude.
template <class Alphabet>
CKV_DEVICE void plain_nibbles(const float* v, float s, uint32_t* word) {
  word[0] = word[1] = 0;
  for (int i = 0; i < 16; ++i) word[i / 8] |= nibble_of<Alphabet>(v[i], s) << 4 * (i % 8);
}

// ---- int8 codes -------------------------------------------------------------------------------------------------------------

// 2^-126 * code of the four codes of a word, exact: bytes are put under the exponent of 2^-103, whose last bit is 2^-126.
CKV_DEVICE void codes_to_tiny(uint32_t codes, float* x) {
  const uint32_t offset = codes ^ 0x80808080u;  // code + 128
  for (uint32_t i = 0; i < 4; ++i) x[i] = float_of(permute_bytes(offset, 0x0C000000u, 0x7540u + i)) - float_of(0x0C000080u);
}

// Largest |code| of 16, as a float.
CKV_DEVICE float largest_code(const float* tiny) {
  float most = fabsf(tiny[0]);
  for (int i = 1; i < 16; ++i) most = fmaxf(most, fabsf(tiny[i]));
  return most * kUp126;
}

// Shifts to the left by 2 and by 6, as factors. They come to a kernel as an argument: a constant would be turned into a shift, and
// shifts compete with all the other integer instructions for one pipe, while multiplications go to the less busy one.
struct ShiftFactors {
  uint32_t two = 4, six = 64;
};

// E2M1 indices of eight codes, one in each nibble. ratio = scale of the codes * raised reciprocal of s; no |code| may be 6.5 s.
CKV_DEVICE uint32_t index_word(const float* tiny, float ratio, ShiftFactors by) {
  uint32_t pair[4];
  for (int i = 0; i < 4; ++i) {  // the even code's index goes to bits 24..26, the odd one's to 28..30; what is below does not matter
    const uint32_t even = bits_of(tiny[2 * i] * ratio) * by.two + 0x00800000u, odd = bits_of(tiny[2 * i + 1] * ratio) * by.six + 0x08000000u;
    pair[i] = select_bits<0x0FFFFFFFu>(even, odd);
  }
  return permute_bytes(permute_bytes(pair[0], pair[1], 0x0073u), permute_bytes(pair[2], pair[3], 0x7300u), 0x7610u);
}

// Sign bits of eight codes at bit 3 of each nibble.
CKV_DEVICE uint32_t sign_word(uint32_t first, uint32_t second) {
  const uint32_t even = permute_bytes(first, second, 0x6420u), odd = permute_bytes(first, second, 0x7531u);
  return (even >> 4 & 0x08080808u) | (odd & 0x80808080u);
}

// ---- back to values ---------------------------------------------------------------------------------------------------------

// Signed E2M1 value of the lowest nibble of n, times 2^-126.
template <class Alphabet>
CKV_DEVICE float nibble_times(uint32_t n, float s) {
  return float_of((n << 22 & 0x01C00000u) | (n << 28 & 0x80000000u)) * kUp126 * s;
}
template <>
CKV_DEVICE float nibble_times<Iso3>(uint32_t n, float s) {
  const float magnitude = float_of(0x4B000000u | (n & 7u)) - 8388608.0f;
  return float_of(bits_of(magnitude) | (n << 28 & 0x80000000u)) * s;
}

// Four int8 codes, twice the E2M1 values of the nibbles in the low half of n; nibble 8 gives 0. Two lookups, one of them blind to
// negative nibbles and one to the others, since a selector's bit 3 replaces the byte by its sign, which is 0 for the whole table.
CKV_DEVICE uint32_t twice_codes(uint32_t n) {
  const uint32_t positive = permute_bytes(0x03020100u, 0x0C080604u, n), negative = permute_bytes(0x03020100u, 0x0C080604u, n ^ 0x8888u);
  return ((positive | 0x80808080u) - negative) ^ 0x80808080u;  // no byte borrows from the next
}

}  // namespace ckv
