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

#if CKV_AVX2
namespace ckv {
namespace g16_int8 {

constexpr int kOctaves = 11;              // s / h from 2^-3 (code 1) to 2^7 (code 128, plus the unused candidates behind it)
constexpr int kBaseU = (127 - 3) << 3;    // u of the first table entry
constexpr int kEntries = 8 * kOctaves;

// U around 1: s of entries r, r+2, r+4, r+6 side by side, and of one entry.
struct ScaleTable {
  alignas(32) double even[kEntries][4];
  alignas(32) double one[kEntries + 16];
  ScaleTable() {
    for (int r = 0; r < kEntries + 16; ++r) one[r] = static_cast<double>(g16::u_value(kBaseU + r));
    for (int r = 0; r < kEntries; ++r)
      for (int i = 0; i < 4; ++i) even[r][i] = one[r + 2 * i];
  }
};
inline const ScaleTable& scale_table() {
  static const ScaleTable t;
  return t;
}

// Thresholds of one h: entry r holds bytes T_0..T_6 (less one, biased to signed order) and one unused.
struct Thresholds {
  alignas(32) uint8_t bytes[kEntries * 8 + 32];
  __m256 base[4];  // t = .25 .75 1.25 1.75 over the 8 mantissas, divided by h
  uint32_t done;

  void start(float h) {
    done = 0;
    const __m256 mantissa = _mm256_setr_ps(1.0f, 1.125f, 1.25f, 1.375f, 1.5f, 1.625f, 1.75f, 1.875f), d = _mm256_set1_ps(h);
    const float t[4] = {0.25f, 0.75f, 1.25f, 1.75f};
    for (int k = 0; k < 4; ++k) base[k] = _mm256_div_ps(_mm256_mul_ps(mantissa, _mm256_set1_ps(t[k])), d);
  }

  void octave(int o) {
    if (done >> o & 1u) return;
    done |= 1u << o;
    const __m256 x = _mm256_set1_ps(float_of(static_cast<uint32_t>(o + 124) << 23)), x2 = _mm256_add_ps(x, x), x4 = _mm256_add_ps(x2, x2);
    const auto up = [](__m256 a, __m256 b) { return _mm256_cvtps_epi32(_mm256_ceil_ps(_mm256_mul_ps(a, b))); };
    const __m256i k01 = _mm256_packs_epi32(up(base[0], x), up(base[1], x)), k23 = _mm256_packs_epi32(up(base[2], x), up(base[3], x));
    const __m256i k45 = _mm256_packs_epi32(up(base[2], x2), up(base[3], x2)), k67 = _mm256_packs_epi32(up(base[2], x4), _mm256_set1_epi32(255));
    // Bytes k*4 + m (m = 0..3 in the low half, 4..7 in the high half) turned into m*4 + k, then 8 bytes per mantissa.
    const __m256i turn = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    const __m256i bias = _mm256_set1_epi8(static_cast<char>(0x7F));  // less one, then top bit flipped: add 127
    const __m256i low = _mm256_add_epi8(_mm256_shuffle_epi8(_mm256_packus_epi16(k01, k23), turn), bias);
    const __m256i high = _mm256_add_epi8(_mm256_shuffle_epi8(_mm256_packus_epi16(k45, k67), turn), bias);
    const __m256i m01_45 = _mm256_unpacklo_epi32(low, high), m23_67 = _mm256_unpackhi_epi32(low, high);
    __m256i* to = reinterpret_cast<__m256i*>(bytes + 64 * o);
    _mm256_store_si256(to, _mm256_permute2x128_si256(m01_45, m23_67, 0x20));
    _mm256_store_si256(to + 1, _mm256_permute2x128_si256(m01_45, m23_67, 0x31));
  }
};

inline int max_byte16(__m128i a) {
  const __m128i inv = _mm_xor_si128(a, _mm_set1_epi8(-1)), pairs = _mm_min_epu8(inv, _mm_srli_epi16(inv, 8));
  return 255 - (_mm_cvtsi128_si32(_mm_minpos_epu16(_mm_and_si128(pairs, _mm_set1_epi16(255)))) & 255);
}

// Searches one group of 16 codes at h in [1, 2); writes its 8 nibble bytes, returns u at that h.
inline int group(__m128i code, int cmax, float h, Thresholds& T, uint8_t* nibbles) {
  const float a = static_cast<float>(cmax) * h;
  // Exact bounds: a has at most 19 bits, so a quotient that is not in U cannot round to a member of U.
  const int lo = static_cast<int>((bits_of(a / 7.5f) + 0xFFFFFu) >> 20) - kBaseU, hi = static_cast<int>(bits_of(a / 3.5f) >> 20) - kBaseU;
  for (int o = lo >> 3; o <= (lo + 9) >> 3; ++o) T.octave(o);

  const __m256i mag = _mm256_broadcastsi128_si256(_mm_abs_epi8(code)), x = _mm256_xor_si256(mag, _mm256_set1_epi8(-128));
  const __m256i q2_of = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0));
  const __m256i ones = _mm256_set1_epi16(1), upper = _mm256_setr_m128i(_mm_setzero_si128(), _mm_set1_epi8(8));
  alignas(32) uint8_t index[10][16];
  __m256i sums[5];  // per half: A, A, B, B of one candidate as 32-bit partial sums
  for (int pair = 0; pair < 5; ++pair) {
    const __m256i t = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(T.bytes + 8 * (lo + 2 * pair))));
    __m256i i = _mm256_setzero_si256();
    for (int k = 0; k < 7; ++k)
      i = _mm256_sub_epi8(i, _mm256_cmpgt_epi8(x, _mm256_shuffle_epi8(t, _mm256_add_epi8(upper, _mm256_set1_epi8(static_cast<char>(k))))));
    _mm256_store_si256(reinterpret_cast<__m256i*>(index[2 * pair]), i);
    const __m256i q2 = _mm256_shuffle_epi8(q2_of, i);
    const __m256i A = _mm256_madd_epi16(_mm256_maddubs_epi16(mag, q2), ones), B = _mm256_madd_epi16(_mm256_maddubs_epi16(q2, q2), ones);
    sums[pair] = _mm256_madd_epi16(_mm256_packs_epi32(A, B), ones);
  }
  const auto join = [&](int p, int q) { return _mm256_madd_epi16(_mm256_packs_epi32(sums[p], sums[q]), ones); };
  // Halves: even candidates low, odd high; within a half A, B, A, B of pairs p and q.
  const __m256i ab01 = join(0, 1), ab23 = join(2, 3), ab4 = join(4, 4);
  const __m256i As = _mm256_castps_si256(_mm256_shuffle_ps(_mm256_castsi256_ps(ab01), _mm256_castsi256_ps(ab23), 0x88));
  const __m256i Bs = _mm256_castps_si256(_mm256_shuffle_ps(_mm256_castsi256_ps(ab01), _mm256_castsi256_ps(ab23), 0xDD));
  const __m256d wide_h = _mm256_set1_pd(static_cast<double>(h)), quarter = _mm256_set1_pd(0.25);
  const auto score = [&](__m128i A, __m128i B, const double* s) {
    const __m256d sv = _mm256_loadu_pd(s);
    return _mm256_mul_pd(sv, _mm256_sub_pd(_mm256_mul_pd(_mm256_mul_pd(sv, quarter), _mm256_cvtepi32_pd(B)), _mm256_mul_pd(wide_h, _mm256_cvtepi32_pd(A))));
  };
  const ScaleTable& st = scale_table();
  const __m256d even = score(_mm256_castsi256_si128(As), _mm256_castsi256_si128(Bs), st.even[lo]);
  const __m256d odd = score(_mm256_extracti128_si256(As, 1), _mm256_extracti128_si256(Bs, 1), st.even[lo + 1]);
  // Candidates 8 and 9 may lie past the range (8 to 10 candidates occur).
  const __m128i last = _mm_unpacklo_epi32(_mm256_castsi256_si128(ab4), _mm256_extracti128_si256(ab4, 1));  // A8 A9 B8 B9
  const __m128d s89 = _mm_loadu_pd(st.one + lo + 8);
  const __m128d A89 = _mm_cvtepi32_pd(last), B89 = _mm_cvtepi32_pd(_mm_srli_si128(last, 8));
  __m128d tail = _mm_mul_pd(s89, _mm_sub_pd(_mm_mul_pd(_mm_mul_pd(s89, _mm_set1_pd(0.25)), B89), _mm_mul_pd(_mm256_castpd256_pd128(wide_h), A89)));
  alignas(16) static const double past[3][2] = {{1, 1}, {0, 1}, {0, 0}};
  const __m128d drop = _mm_cmp_pd(_mm_load_pd(past[hi - lo - 7]), _mm_setzero_pd(), _CMP_NEQ_OQ);
  tail = _mm_blendv_pd(tail, _mm_set1_pd(HUGE_VAL), drop);

  const __m256d m4 = _mm256_min_pd(even, odd);
  __m128d m = _mm_min_pd(tail, _mm_min_pd(_mm256_castpd256_pd128(m4), _mm256_extractf128_pd(m4, 1)));
  m = _mm_min_pd(m, _mm_permute_pd(m, 1));
  const __m256d least = _mm256_broadcastsd_pd(m);
  static const uint8_t spread[16] = {0x00, 0x01, 0x04, 0x05, 0x10, 0x11, 0x14, 0x15, 0x40, 0x41, 0x44, 0x45, 0x50, 0x51, 0x54, 0x55};
  const int hits = spread[_mm256_movemask_pd(_mm256_cmp_pd(even, least, _CMP_EQ_OQ))] |
                   spread[_mm256_movemask_pd(_mm256_cmp_pd(odd, least, _CMP_EQ_OQ))] << 1 |
                   _mm_movemask_pd(_mm_cmp_pd(tail, _mm256_castpd256_pd128(least), _CMP_EQ_OQ)) << 8;
  const int winner = __builtin_ctz(static_cast<unsigned>(hits));  // the smallest s among the best

  const __m128i i = _mm_load_si128(reinterpret_cast<const __m128i*>(index[winner]));
  const __m128i negative = _mm_and_si128(_mm_srli_epi16(code, 4), _mm_set1_epi8(8));
  const __m128i n = _mm_or_si128(i, _mm_andnot_si128(_mm_cmpeq_epi8(i, _mm_setzero_si128()), negative));
  const __m128i packed = _mm_packus_epi16(_mm_maddubs_epi16(n, _mm_set1_epi16(16 << 8 | 1)), _mm_setzero_si128());
  _mm_storel_epi64(reinterpret_cast<__m128i*>(nibbles), packed);
  return kBaseU + lo + winner;
}

// First pass over one head-page: nibbles of every group and its u. False when a scale is negative or not finite.
inline bool search_page(const PageView& page, const SlotShape& shape, uint8_t* nibbles, uint16_t* u) {
  const int groups = ceil_div(shape.D, 64);
  for (int64_t i = 0; i < static_cast<int64_t>(shape.T) * groups; ++i)
    if (reinterpret_cast<const uint16_t*>(page.scales)[i] > 0x7BFF) return false;
  Thresholds T;
  alignas(16) uint8_t padded[64], out[8];
  for (int row = 0; row < shape.T; ++row)
    for (int g = 0; g < groups; ++g) {
      const int len = std::min(64, shape.D - 64 * g);
      const uint8_t* src = page.code(row) + 64 * g;
      if (len < 64) {
        memset(padded, 0, sizeof padded);
        memcpy(padded, src, static_cast<size_t>(len));
        src = padded;
      }
      const uint32_t hb = bits_of(fp16_to_float(reinterpret_cast<const uint16_t*>(page.scale(row))[g]));
      const int octaves = static_cast<int>(hb >> 23) - 127;
      const float h = float_of((hb & 0x7FFFFFu) | 0x3F800000u);
      T.start(h);
      for (int ch = 0; ch < len; ch += 16) {
        const __m128i code = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + ch));
        const int cmax = hb ? max_byte16(_mm_abs_epi8(code)) : 0;
        uint8_t* to = nibbles + (static_cast<int64_t>(row) * shape.D + 64 * g + ch) / 2;
        const int bytes = std::min(16, len - ch) / 2;
        uint16_t* uo = u + static_cast<int64_t>(row) * shape.g16 + 4 * g + ch / 16;
        if (cmax == 0) {
          memset(to, 0, static_cast<size_t>(bytes));
          *uo = g16::kZeroGroup;
        } else {
          *uo = static_cast<uint16_t>(group(code, cmax, h, T, bytes == 8 ? to : out) + 8 * octaves);
          if (bytes < 8) memcpy(to, out, static_cast<size_t>(bytes));
        }
      }
    }
  return true;
}

}  // namespace g16_int8
}  // namespace ckv
#endif
