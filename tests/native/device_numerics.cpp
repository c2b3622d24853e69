// Exhaustive checks of kernels/e2m1_device.h and numerics.h as device builds have them, compiled for the host. Each function returns
// how many cases are wrong; *cases is how many there were.
#include <cmath>
#include <cstdlib>
#include <initializer_list>

#include "e2m1_device.h"

using namespace ckv;

#define CHECK_API extern "C" __attribute__((visibility("default"))) long long

namespace {

// The reciprocal of the hardware may be off by 2^-23 of itself either way.
float reciprocal(float s, int ulps) { return float_of(bits_of(1.0f / s) + static_cast<uint32_t>(ulps)) * kRaise; }

// Every value of at most 18 bits between an eighth of s and the alphabet's reach, every s of 4 bits.
template <class Alphabet>
long long nibbles(long long* cases) {
  long long wrong = 0;
  *cases = 0;
  for (int mantissa = 8; mantissa < 16; ++mantissa)
    for (int exponent = -13; exponent <= 4; exponent += 17)
      for (int ulps = -1; ulps <= 1; ++ulps) {
        const float s = std::ldexp(static_cast<float>(mantissa), exponent), r = reciprocal(s, ulps);
        for (uint32_t v18 = 1u << 17; v18 < 1u << 18; ++v18)
          for (int shift = exponent - 17; shift <= exponent - 10; ++shift) {
            const float v = std::ldexp(static_cast<float>(v18), shift);
            if (v < 0.125f * s || v > Reach<Alphabet>::kScales * s) continue;
            ++*cases;
            wrong += quick_nibble<Alphabet>(v, r) != nibble_of<Alphabet>(v, s);
            wrong += quick_nibble<Alphabet>(-v, r) != nibble_of<Alphabet>(-v, s);
          }
      }
  return wrong;
}

}  // namespace

CHECK_API check_e2m1(long long* cases) { return nibbles<E2M1>(cases); }
CHECK_API check_iso3(long long* cases) { return nibbles<Iso3>(cases); }

// Zeros of both signs, and values that underflow on the way: the sign is that of v < 0.
CHECK_API check_signs_of_nothing(long long* cases) {
  long long wrong = 0;
  *cases = 0;
  for (const float v : {0.0f, -0.0f, 0x1p-149f, -0x1p-149f, 0x1p-126f, -0x1p-126f, 0x1p-30f, -0x1p-30f})
    for (const float s : {0x1p-9f, 1.875f, 448.0f}) {
      ++*cases;
      wrong += quick_nibble<E2M1>(v, raised_reciprocal(s)) != nibble_of<E2M1>(v, s);
      wrong += quick_nibble<Iso3>(v, raised_reciprocal(s)) != nibble_of<Iso3>(v, s);
    }
  return wrong;
}

// Whole words of codes: every code in every place, scales of fp16 from subnormal to large.
CHECK_API check_words_of_codes(long long* cases) {
  long long wrong = 0;
  *cases = 0;
  for (uint32_t h16 = 1; h16 < 0x7C00; h16 += 97) {
    const float h = fp16_to_float(static_cast<uint16_t>(h16));
    for (int code = -128; code < 128; ++code)
      for (int place = 0; place < 8; ++place) {
        const float s = e4m3_to_float(group_scale<E2M1>(std::fabs(static_cast<float>(code)) * h));
        if (std::fabs(static_cast<float>(code)) * h > Reach<E2M1>::kScales * s) continue;
        const int filler = place % 2 ? 1 : -1;
        uint32_t word[2] = {0, 0}, expected = 0;
        for (int i = 0; i < 8; ++i) {
          const int c = i == place ? code : filler * (std::abs(code) < 2 ? 0 : 1);
          word[i / 4] |= (static_cast<uint32_t>(c) & 255u) << 8 * (i % 4);
          expected |= nibble_of<E2M1>(static_cast<float>(c) * h, s) << 4 * i;
        }
        float tiny[8];
        codes_to_tiny(word[0], tiny), codes_to_tiny(word[1], tiny + 4);
        ++*cases;
        wrong += (index_word(tiny, h * raised_reciprocal(s), ShiftFactors{}) | sign_word(word[0], word[1])) != expected;
      }
  }
  return wrong;
}

// Division by 6 and 7: every mantissa, over two octaves.
CHECK_API check_division(long long* cases) {
  long long wrong = 0;
  *cases = 0;
  for (uint32_t bits = 127u << 23; bits < 129u << 23; ++bits) {
    const float a = float_of(bits);
    *cases += 2;
    wrong += over_divisor<E2M1>(a) != a / 6.0f;
    wrong += over_divisor<Iso3>(a) != a / 7.0f;
  }
  return wrong;
}

CHECK_API check_decoding(long long* cases) {
  long long wrong = 0;
  *cases = 0;
  for (int c = 0; c < 256; ++c) {
    const int e = c >> 3 & 15, m = c & 7;
    const float magnitude = e ? std::ldexp(8.0f + static_cast<float>(m), e - 10) : std::ldexp(static_cast<float>(m), -9);
    const float found = e4m3_to_float(static_cast<uint8_t>(c));
    ++*cases;
    wrong += (c & 127) == 127 ? !std::isnan(found) : bits_of(found) != bits_of(c & 128 ? -magnitude : magnitude);
    for (uint32_t n = 0; n < 16; ++n) {
      *cases += 2;
      wrong += (c & 127) != 127 && bits_of(nibble_times<E2M1>(n, found)) != bits_of(nibble_value<E2M1>(n, found));
      wrong += (c & 127) != 127 && bits_of(nibble_times<Iso3>(n, found)) != bits_of(nibble_value<Iso3>(n, found));
    }
  }
  for (uint32_t n = 0; n < 65536; ++n) {
    uint32_t expected = 0;
    for (int i = 0; i < 4; ++i) {
      const int twice = E2M1::twice(static_cast<int>(n >> 4 * i & 7u));
      expected |= (static_cast<uint32_t>(n >> 4 * i & 8u ? -twice : twice) & 255u) << 8 * i;
    }
    ++*cases;
    wrong += twice_codes(n) != expected;
  }
  return wrong;
}
