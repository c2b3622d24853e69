// Fast host path of the e2m1-g16 scale search for int8 planes, exact in integers.
//
// With v = code * h and q2 = 2q, the squared error of a group at scale s is
//     E(s) = sum v^2 + D(s),   D(s) = s * (s/4 * B - h * A),   A = sum |code| * q2,   B = sum q2^2.
// sum v^2 is common to all candidates; A < 2^15, B < 2^12, h has 11 bits and s 4, so D is exact in fp64, as is E in the
// definition (42 bits at most). The least D is the least E, ties included.
//
// |v| >= t * s is |code| >= ceil(t * s / h) (see e2m1_g64_int8.h). s is a member of U: s / h takes 8 mantissas per octave, so one
// table of 8 x 7 byte thresholds per octave serves all groups that share h. Everything is done at h scaled to [1, 2), which
// moves u by a whole number of octaves. Two candidates share one 32-byte vector.
#pragma once

#include <cmath>

#include "e2m1_g16_core.h"
#include "plane.h"
#include "simd.h"

#if CKV_AVX2
namespace ckv {
namespace g16_int8 {

constexpr int kOctaves = 11;              // s / h from 2^-3 (code 1) to 2^7 (code 127, with the candidates above its lowest one)
constexpr int kBaseU = (127 - 3) << 3;    // u of the first table entry
constexpr int kEntries = 8 * kOctaves;

// U around 1: s of entries r, r+2, r+4, r+6 side by side.
struct ScaleTable {
  alignas(32) double even[kEntries][4];
  ScaleTable() {
    for (int r = 0; r < kEntries; ++r)
      for (int i = 0; i < 4; ++i) even[r][i] = static_cast<double>(g16::u_value(kBaseU + r + 2 * i));
  }
};
inline const ScaleTable& scale_table() {
  static const ScaleTable t;
  return t;
}

// Thresholds of one h: entry r holds bytes T_0..T_6 (less one, biased to signed order) and one unused, twice over: 32 bytes from
// any entry are that candidate's table in the low half and the next one's in the high half, as byte shuffles want them.
struct Thresholds {
  alignas(32) uint8_t bytes[(kEntries + 8) * 16];
  __m256 base[4];  // t = .25 .75 1.25 1.75 over the 8 mantissas, divided by h

  void start(float h) {
    const __m256 mantissa = _mm256_setr_ps(1.0f, 1.125f, 1.25f, 1.375f, 1.5f, 1.625f, 1.75f, 1.875f), d = _mm256_set1_ps(h);
    const float t[4] = {0.25f, 0.75f, 1.25f, 1.75f};
    for (int k = 0; k < 4; ++k) base[k] = _mm256_div_ps(_mm256_mul_ps(mantissa, _mm256_set1_ps(t[k])), d);
  }

  void octave(int o) {
    const __m256 x = _mm256_set1_ps(float_of(static_cast<uint32_t>(o + 124) << 23)), x2 = _mm256_add_ps(x, x), x4 = _mm256_add_ps(x2, x2);
    const auto up = [](__m256 a, __m256 b) { return _mm256_cvtps_epi32(_mm256_ceil_ps(_mm256_mul_ps(a, b))); };
    const __m256i v[7] = {up(base[0], x), up(base[1], x), up(base[2], x), up(base[3], x), up(base[2], x2), up(base[3], x2), up(base[2], x4)};
    const ThresholdColumns c = threshold_columns(v);
    // Doubled: 0 and 4, 1 and 5, ... in the two halves of a vector.
    __m128i* to = reinterpret_cast<__m128i*>(bytes + 128 * o);
    const __m256i doubled[4] = {_mm256_unpacklo_epi64(c.c01_45, c.c01_45), _mm256_unpackhi_epi64(c.c01_45, c.c01_45),
                                _mm256_unpacklo_epi64(c.c23_67, c.c23_67), _mm256_unpackhi_epi64(c.c23_67, c.c23_67)};
    for (int m = 0; m < 4; ++m) {
      _mm_store_si128(to + m, _mm256_castsi256_si128(doubled[m]));
      _mm_store_si128(to + m + 4, _mm256_extracti128_si256(doubled[m], 1));
    }
  }
};

inline int max_byte16(__m128i a) {
  const __m128i inv = _mm_xor_si128(a, _mm_set1_epi8(-1)), pairs = _mm_min_epu8(inv, _mm_srli_epi16(inv, 8));
  return 255 - (_mm_cvtsi128_si32(_mm_minpos_epu16(_mm_and_si128(pairs, _mm_set1_epi16(255)))) & 255);
}

// E2M1 indices of 16 codes at scale u; for the few groups whose scale canonical_even() moves.
__attribute__((noinline, cold)) static __m128i index_at(__m128i code, float h, int u) {
  alignas(16) uint8_t magnitude[16], index[16];
  _mm_store_si128(reinterpret_cast<__m128i*>(magnitude), _mm_abs_epi8(code));
  for (int k = 0; k < 16; ++k) index[k] = static_cast<uint8_t>(E2M1::index(static_cast<float>(magnitude[k]) * h, g16::u_value(u)));
  return _mm_load_si128(reinterpret_cast<const __m128i*>(index));
}

// Searches the four groups of 64 codes (zeros where a row ends earlier) at h in [1, 2): 8 nibble bytes per group, and u at that
// h. Stages run over all four groups in turn, so that the long dependency chains of one group overlap with the next one's.
inline void block(const uint8_t* codes, float h, Thresholds& T, uint8_t* nibbles, int* u) {
  alignas(16) int32_t cmax[4], lo[4];
  __m128i code[4];
  for (int g = 0; g < 4; ++g) {
    code[g] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + 16 * g));
    cmax[g] = max_byte16(_mm_abs_epi8(code[g]));
  }
  const __m128i top = _mm_max_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(cmax)), _mm_set1_epi32(1));
  const __m128 a = _mm_mul_ps(_mm_cvtepi32_ps(top), _mm_set1_ps(h));
  // An exact bound: a has at most 19 bits, so a quotient that is not in U cannot round to a member of U.
  const __m128i base = _mm_set1_epi32(kBaseU);
  const __m128i low = _mm_sub_epi32(
      _mm_srli_epi32(_mm_add_epi32(_mm_castps_si128(_mm_div_ps(a, _mm_set1_ps(7.0f))), _mm_set1_epi32(0xFFFFF)), 20), base);
  _mm_store_si128(reinterpret_cast<__m128i*>(lo), low);

  T.start(h);
  const int first = std::min(std::min(lo[0], lo[1]), std::min(lo[2], lo[3])), last = std::max(std::max(lo[0], lo[1]), std::max(lo[2], lo[3]));
  for (int o = first >> 3; o <= (last + 7) >> 3; ++o) T.octave(o);

  const __m256i q2_of = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0));
  const __m256i ones = _mm256_set1_epi16(1);
  const __m256i three = _mm256_set1_epi8(3);
  alignas(32) uint8_t index[4][8][16];
  alignas(32) __m256i sums[4][4];  // per half: A, A, B, B of one candidate as 32-bit partial sums
  for (int g = 0; g < 4; ++g) {
    const __m256i mag = _mm256_broadcastsi128_si256(_mm_abs_epi8(code[g])), x = _mm256_xor_si256(mag, _mm256_set1_epi8(-128));
    const uint8_t* thresholds = T.bytes + 16 * lo[g];
#pragma GCC unroll 4
    for (int pair = 0; pair < 4; ++pair) {
      const __m256i t = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(thresholds + 32 * pair));
      const __m256i i = thresholds_reached(x, t, _mm256_shuffle_epi8(t, three));
      _mm256_store_si256(reinterpret_cast<__m256i*>(index[g][2 * pair]), i);
      const __m256i q2 = _mm256_shuffle_epi8(q2_of, i);
      const __m256i A = _mm256_madd_epi16(_mm256_maddubs_epi16(mag, q2), ones), B = _mm256_madd_epi16(_mm256_maddubs_epi16(q2, q2), ones);
      sums[g][pair] = _mm256_madd_epi16(_mm256_packs_epi32(A, B), ones);
    }
  }

  const ScaleTable& st = scale_table();
  const __m256d wide_h = _mm256_set1_pd(static_cast<double>(h)), quarter = _mm256_set1_pd(0.25);
  for (int g = 0; g < 4; ++g) {
    const auto join = [&](int p, int q) { return _mm256_madd_epi16(_mm256_packs_epi32(sums[g][p], sums[g][q]), ones); };
    // Halves: even candidates low, odd high; within a half A, B, A, B of pairs p and q.
    const __m256i ab01 = join(0, 1), ab23 = join(2, 3);
    const __m256i As = _mm256_castps_si256(_mm256_shuffle_ps(_mm256_castsi256_ps(ab01), _mm256_castsi256_ps(ab23), 0x88));
    const __m256i Bs = _mm256_castps_si256(_mm256_shuffle_ps(_mm256_castsi256_ps(ab01), _mm256_castsi256_ps(ab23), 0xDD));
    const auto score = [&](__m128i A, __m128i B, const double* s) {
      const __m256d sv = _mm256_load_pd(s);
      return _mm256_mul_pd(sv, _mm256_sub_pd(_mm256_mul_pd(_mm256_mul_pd(sv, quarter), _mm256_cvtepi32_pd(B)), _mm256_mul_pd(wide_h, _mm256_cvtepi32_pd(A))));
    };
    const __m256d even = score(_mm256_castsi256_si128(As), _mm256_castsi256_si128(Bs), st.even[lo[g]]);
    const __m256d odd = score(_mm256_extracti128_si256(As, 1), _mm256_extracti128_si256(Bs, 1), st.even[lo[g] + 1]);
    const __m256d m4 = _mm256_min_pd(even, odd);
    __m128d m = _mm_min_pd(_mm256_castpd256_pd128(m4), _mm256_extractf128_pd(m4, 1));
    m = _mm_min_pd(m, _mm_permute_pd(m, 1));
    const __m256d least = _mm256_broadcastsd_pd(m);
    static const uint8_t spread[16] = {0x00, 0x01, 0x04, 0x05, 0x10, 0x11, 0x14, 0x15, 0x40, 0x41, 0x44, 0x45, 0x50, 0x51, 0x54, 0x55};
    const int hits = spread[_mm256_movemask_pd(_mm256_cmp_pd(even, least, _CMP_EQ_OQ))] |
                     spread[_mm256_movemask_pd(_mm256_cmp_pd(odd, least, _CMP_EQ_OQ))] << 1;
    const int winner = __builtin_ctz(static_cast<unsigned>(hits));  // the smallest s among the best

    __m128i i = _mm_load_si128(reinterpret_cast<const __m128i*>(index[g][winner]));
    int picked = kBaseU + lo[g] + winner;
    if (__builtin_expect(_mm_testz_si128(i, _mm_set1_epi8(1)) != 0, 0) && cmax[g]) {
      picked = g16::canonical_even(picked);
      i = index_at(code[g], h, picked);
    }
    const __m128i negative = _mm_and_si128(_mm_srli_epi16(code[g], 4), _mm_set1_epi8(8));
    const __m128i n = _mm_or_si128(i, _mm_andnot_si128(_mm_cmpeq_epi8(i, _mm_setzero_si128()), negative));
    const __m128i packed = _mm_packus_epi16(_mm_maddubs_epi16(n, _mm_set1_epi16(16 << 8 | 1)), _mm_setzero_si128());
    _mm_storel_epi64(reinterpret_cast<__m128i*>(nibbles + 8 * g), packed);
    u[g] = cmax[g] ? picked : -1;
  }
}

// First pass over one head-page: nibbles of every group and its u. False when a scale is negative or not finite.
inline bool search_page(const PageView& page, const SlotShape& shape, uint8_t* nibbles, uint16_t* u) {
  const int groups = ceil_div(shape.D, 64);
  for (int64_t i = 0; i < static_cast<int64_t>(shape.T) * groups; ++i)
    if (reinterpret_cast<const uint16_t*>(page.scales)[i] > 0x7BFF) return false;
  Thresholds T;
  alignas(16) uint8_t padded[64], out[32];
  int block_u[4];
  for (int row = 0; row < shape.T; ++row)
    for (int g = 0; g < groups; ++g) {
      const int len = std::min(64, shape.D - 64 * g);
      const uint32_t hb = bits_of(fp16_to_float(reinterpret_cast<const uint16_t*>(page.scale(row))[g]));
      const int octaves = static_cast<int>(hb >> 23) - 127;
      const uint8_t* src = page.code(row) + 64 * g;
      uint8_t* to = nibbles + (static_cast<int64_t>(row) * shape.D + 64 * g) / 2;
      if (len < 64 || hb == 0) {  // with a scale of zero every value is zero
        memset(padded, 0, sizeof padded);
        if (hb) memcpy(padded, src, static_cast<size_t>(len));
        src = padded;
      }
      block(src, float_of((hb & 0x7FFFFFu) | 0x3F800000u), T, len < 64 ? out : to, block_u);
      if (len < 64) memcpy(to, out, static_cast<size_t>(len) / 2);
      uint16_t* uo = u + static_cast<int64_t>(row) * shape.g16 + 4 * g;
      for (int k = 0; 16 * k < len; ++k) uo[k] = static_cast<uint16_t>(block_u[k] < 0 ? g16::kZeroGroup : block_u[k] + 8 * octaves);
    }
  return true;
}

}  // namespace g16_int8
}  // namespace ckv
#endif
