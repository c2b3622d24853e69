// Fast host path of the e2m1-g16 scale search for int8 planes, exact in integers.
//
// With v = code * h and q2 = 2q, the squared error of a group at scale s is
//     E(s) = sum v^2 + D(s),   D(s) = s * (s/4 * B - h * A),   A = sum |code| * q2,   B = sum q2^2.
// sum v^2 is common to all candidates; A < 2^15, B < 2^12, h has 11 bits and s 4, so D is exact in fp64, as is E in the
// definition (42 bits at most). The least D is the least E, ties included.
//
// |v| >= t * s is |code| >= ceil(t * s / h) (see e2m1_g64_int8.h). s is a member of U, so one table of seven byte thresholds per
// member serves all groups that share h. Everything is done at h scaled to [1, 2), which moves u by a whole number of octaves.
// Two candidates share one 32-byte vector.
#pragma once

#include "e2m1_g16_core.h"
#include "plane.h"
#include "simd.h"

#if CKV_AVX2
namespace ckv {
namespace g16_int8 {

constexpr int kBaseU = (127 - 3) << 3;  // u of the first table entry: s / h from 2^-3 (code 1) ...
constexpr int kEntries = 8 * 11;        // ... to 2^7 (code 128, with the candidates above its lowest one)

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

// Thresholds of one h for entries from `first` on: entry r holds bytes T_0..T_6 (less one, biased to signed order) and one unused,
// twice over: 32 bytes from any entry are that candidate's table in the low half and the next one's in the high half, as byte
// shuffles want them.
struct Thresholds {
  alignas(32) uint8_t bytes[(kEntries + 8) * 16];
  int first;

  const uint8_t* entry(int r) const { return bytes + 16 * (r - first); }

  // Eight members of U at a time; the next eight are twice as large, so that only the first need divisions.
  void fill(float h, int first_entry, int last_entry) {
    first = first_entry;
    const __m256i u = _mm256_add_epi32(_mm256_set1_epi32(kBaseU + first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    const __m256 s = _mm256_castsi256_ps(_mm256_slli_epi32(u, 20)), d = _mm256_set1_ps(h);
    const float t[4] = {0.25f, 0.75f, 1.25f, 1.75f};
    __m256 q[7];
    for (int k = 0; k < 4; ++k) q[k] = _mm256_div_ps(_mm256_mul_ps(s, _mm256_set1_ps(t[k])), d);
    q[4] = _mm256_add_ps(q[2], q[2]), q[5] = _mm256_add_ps(q[3], q[3]), q[6] = _mm256_add_ps(q[4], q[4]);
    __m128i* to = reinterpret_cast<__m128i*>(bytes);
    for (int r = first; r <= last_entry; r += 8, to += 8) {
      __m256i v[7];
      for (int k = 0; k < 7; ++k) {
        v[k] = _mm256_cvtps_epi32(_mm256_ceil_ps(q[k]));
        q[k] = _mm256_add_ps(q[k], q[k]);
      }
      const ThresholdColumns c = threshold_columns(v);
      // Doubled: 0 and 4, 1 and 5, ... in the two halves of a vector.
      const __m256i doubled[4] = {_mm256_unpacklo_epi64(c.c01_45, c.c01_45), _mm256_unpackhi_epi64(c.c01_45, c.c01_45),
                                  _mm256_unpacklo_epi64(c.c23_67, c.c23_67), _mm256_unpackhi_epi64(c.c23_67, c.c23_67)};
      for (int m = 0; m < 4; ++m) {
        _mm_store_si128(to + m, _mm256_castsi256_si128(doubled[m]));
        _mm_store_si128(to + m + 4, _mm256_extracti128_si256(doubled[m], 1));
      }
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

// Four groups of 64 codes (zeros where a row ends earlier) on their way through the two steps of the search.
struct Block {
  alignas(32) Thresholds T;
  alignas(16) int32_t cmax[4], lo[4];  // candidates of group g are the eight entries from lo
  alignas(16) uint8_t padded[64];
  const uint8_t* codes;
  float h;         // the block's scale, moved to [1, 2) by whole octaves
  int octaves;     // how many
  uint8_t* nibbles;
  uint16_t* u;
  int len;  // codes that exist, 2..64
};

// Step one: ranges and thresholds. Step two loads the thresholds in other pieces than they are stored in, which stalls while the
// stores are fresh; so the page loop prepares a block before it finishes the one before.
inline void prepare(Block& b) {
  for (int g = 0; g < 4; ++g) b.cmax[g] = max_byte16(_mm_abs_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(b.codes + 16 * g))));
  const __m128i top = _mm_max_epi32(_mm_setr_epi32(b.cmax[0], b.cmax[1], b.cmax[2], b.cmax[3]), _mm_set1_epi32(1));
  const __m128 a = _mm_mul_ps(_mm_cvtepi32_ps(top), _mm_set1_ps(b.h));
  // An exact bound: a has at most 19 bits, so a quotient that is not in U cannot round to a member of U.
  const __m128i low = _mm_sub_epi32(
      _mm_srli_epi32(_mm_add_epi32(_mm_castps_si128(_mm_div_ps(a, _mm_set1_ps(7.0f))), _mm_set1_epi32(0xFFFFF)), 20), _mm_set1_epi32(kBaseU));
  _mm_store_si128(reinterpret_cast<__m128i*>(b.lo), low);
  const __m128i swapped = _mm_shuffle_epi32(low, 0x4E), least = _mm_min_epi32(low, swapped), most = _mm_max_epi32(low, swapped);
  b.T.fill(b.h, std::min(_mm_cvtsi128_si32(least), _mm_extract_epi32(least, 1)),
           std::max(_mm_cvtsi128_si32(most), _mm_extract_epi32(most, 1)) + g16::kCandidates - 1);
}

// Step two: the search proper. Writes the nibbles and u of every group; loops over the four groups let the long dependency chain
// of one overlap with the next one's.
inline void finish(const Block& b) {
  const __m256i q2_of = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0));
  const __m256i ones = _mm256_set1_epi16(1);
  const __m256i three = _mm256_set1_epi8(3);
  alignas(32) uint8_t index[4][g16::kCandidates][16];
  alignas(32) __m256i joined[4][2];  // halves: even candidates low, odd high; within a half A, B, A, B of two candidates
  for (int g = 0; g < 4; ++g) {
    const __m128i code = _mm_loadu_si128(reinterpret_cast<const __m128i*>(b.codes + 16 * g));
    const __m256i mag = _mm256_broadcastsi128_si256(_mm_abs_epi8(code)), x = _mm256_xor_si256(mag, _mm256_set1_epi8(-128));
    const uint8_t* thresholds = b.T.entry(b.lo[g]);
    // Candidates 2p in the low half, 2p + 1 in the high half: A, A, B, B as 32-bit partial sums.
    const auto pair = [&](int p) {
      const __m256i t = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(thresholds + 32 * p));
      const __m256i i = thresholds_reached(x, t, _mm256_shuffle_epi8(t, three));
      _mm256_store_si256(reinterpret_cast<__m256i*>(index[g][2 * p]), i);
      const __m256i q2 = _mm256_shuffle_epi8(q2_of, i);
      const __m256i A = _mm256_madd_epi16(_mm256_maddubs_epi16(mag, q2), ones), B = _mm256_madd_epi16(_mm256_maddubs_epi16(q2, q2), ones);
      return _mm256_madd_epi16(_mm256_packs_epi32(A, B), ones);
    };
    const auto join = [&](__m256i p, __m256i q) { return _mm256_madd_epi16(_mm256_packs_epi32(p, q), ones); };
    joined[g][0] = join(pair(0), pair(1));
    joined[g][1] = join(pair(2), pair(3));
  }

  // D < 0 for every candidate (a scale is below a / 3.5, so the largest value gains), and D has at most 33 significant bits: the
  // low bits of the doubles can carry 7 - candidate. The least number then names the smallest s among equals.
  const ScaleTable& st = scale_table();
  const __m256d h4 = _mm256_set1_pd(static_cast<double>(b.h)), quarter = _mm256_set1_pd(0.25);
  const __m256d even_tags = _mm256_castsi256_pd(_mm256_setr_epi64x(7, 5, 3, 1)), odd_tags = _mm256_castsi256_pd(_mm256_setr_epi64x(6, 4, 2, 0));
  alignas(32) uint8_t best[64];
  for (int g = 0; g < 4; ++g) {
    const __m256 ab01 = _mm256_castsi256_ps(joined[g][0]), ab23 = _mm256_castsi256_ps(joined[g][1]);
    const __m256i As = _mm256_castps_si256(_mm256_shuffle_ps(ab01, ab23, 0x88)), Bs = _mm256_castps_si256(_mm256_shuffle_ps(ab01, ab23, 0xDD));
    const auto score = [&](__m128i A, __m128i B, const double* s) {
      const __m256d sv = _mm256_load_pd(s);
      return _mm256_mul_pd(sv, _mm256_sub_pd(_mm256_mul_pd(_mm256_mul_pd(sv, quarter), _mm256_cvtepi32_pd(B)), _mm256_mul_pd(h4, _mm256_cvtepi32_pd(A))));
    };
    const __m256d even = _mm256_or_pd(score(_mm256_castsi256_si128(As), _mm256_castsi256_si128(Bs), st.even[b.lo[g]]), even_tags);
    const __m256d odd = _mm256_or_pd(score(_mm256_extracti128_si256(As, 1), _mm256_extracti128_si256(Bs, 1), st.even[b.lo[g] + 1]), odd_tags);
    const __m256d m4 = _mm256_min_pd(even, odd);
    __m128d m = _mm_min_pd(_mm256_castpd256_pd128(m4), _mm256_extractf128_pd(m4, 1));
    m = _mm_min_pd(m, _mm_permute_pd(m, 1));
    const int winner = 7 - static_cast<int>(_mm_cvtsi128_si64(_mm_castpd_si128(m)) & 7);
    __m128i i = _mm_load_si128(reinterpret_cast<const __m128i*>(index[g][winner]));
    int picked = kBaseU + b.lo[g] + winner;
    if (__builtin_expect(_mm_testz_si128(i, _mm_set1_epi8(1)) != 0, 0) && b.cmax[g]) {
      picked = g16::canonical_even(picked);
      i = index_at(_mm_loadu_si128(reinterpret_cast<const __m128i*>(b.codes + 16 * g)), b.h, picked);
    }
    _mm_store_si128(reinterpret_cast<__m128i*>(best + 16 * g), i);
    if (16 * g < b.len) b.u[g] = static_cast<uint16_t>(b.cmax[g] ? picked + 8 * b.octaves : g16::kZeroGroup);
  }

  __m256i words[2];
  for (int half = 0; half < 2; ++half) {
    const __m256i i = _mm256_load_si256(reinterpret_cast<const __m256i*>(best + 32 * half));
    const __m256i c = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b.codes + 32 * half));
    const __m256i negative = _mm256_and_si256(_mm256_srli_epi16(c, 4), _mm256_set1_epi8(8));
    const __m256i n = _mm256_or_si256(i, _mm256_andnot_si256(_mm256_cmpeq_epi8(i, _mm256_setzero_si256()), negative));
    words[half] = _mm256_maddubs_epi16(n, _mm256_set1_epi16(16 << 8 | 1));
  }
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi16(words[0], words[1]), 0xD8);
  if (b.len == 64) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(b.nibbles), packed);
  } else {
    alignas(32) uint8_t out[32];
    _mm256_store_si256(reinterpret_cast<__m256i*>(out), packed);
    memcpy(b.nibbles, out, static_cast<size_t>(b.len) / 2);
  }
}

// First pass over one head-page: nibbles of every group and its u. False when a scale is negative or not finite.
inline bool search_page(const PageView& page, const SlotShape& shape, uint8_t* nibbles, uint16_t* u) {
  const int groups = ceil_div(shape.D, 64);
  for (int64_t i = 0; i < static_cast<int64_t>(shape.T) * groups; ++i)
    if (reinterpret_cast<const uint16_t*>(page.scales)[i] > 0x7BFF) return false;
  Block blocks[2];
  int64_t done = 0;
  for (int row = 0; row < shape.T; ++row)
    for (int g = 0; g < groups; ++g) {
      Block& b = blocks[done & 1];
      const uint32_t hb = bits_of(fp16_to_float(reinterpret_cast<const uint16_t*>(page.scale(row))[g]));
      b.octaves = static_cast<int>(hb >> 23) - 127;
      b.h = float_of((hb & 0x7FFFFFu) | 0x3F800000u);
      b.len = std::min(64, shape.D - 64 * g);
      b.codes = page.code(row) + 64 * g;
      if (b.len < 64 || hb == 0) {  // with a scale of zero every value is zero
        memset(b.padded, 0, sizeof b.padded);
        if (hb) memcpy(b.padded, b.codes, static_cast<size_t>(b.len));
        b.codes = b.padded;
      }
      b.nibbles = nibbles + (static_cast<int64_t>(row) * shape.D + 64 * g) / 2;
      b.u = u + static_cast<int64_t>(row) * shape.g16 + 4 * g;
      prepare(b);
      if (done) finish(blocks[(done - 1) & 1]);
      ++done;
    }
  finish(blocks[(done - 1) & 1]);
  return true;
}

}  // namespace g16_int8
}  // namespace ckv
#endif
