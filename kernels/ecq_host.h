// Codec ecq on the host: one head-page at a time, 32 lanes abreast. The AVX2 steps compute what the plain steps compute.
#pragma once

#include <algorithm>
#include <vector>

#include "ecq_core.h"
#include "plane.h"

namespace ckv {
namespace ecq {

// The model as the two directions want it: per class and symbol for encoding, per class and slot for decoding.
struct HostModel {
  // start | freq << 12, and bit 31 where the symbol is coded as the escape
  uint32_t encode[kClasses][kSymbols];
  // symbol | (freq - 1) << 8 | (slot - start) << 20
  uint32_t decode[kClasses][kTotal];
  HostModel() {
    constexpr Model m = make_model();
    for (int c = 0; c < kClasses; ++c)
      for (int s = 0; s < kSymbols; ++s) {
        const uint32_t own = m.start[c][s + 1] - m.start[c][s];
        const int used = own ? s : kEscape;
        const uint32_t start = m.start[c][used], freq = m.start[c][used + 1] - start;
        encode[c][s] = start | freq << kBits | (used == kEscape ? 1u << 31 : 0);
        for (uint32_t i = 0; i < own; ++i) decode[c][start + i] = static_cast<uint32_t>(s) | (own - 1) << 8 | i << 20;
      }
  }
};
inline const HostModel& host_model() {
  static const HostModel m;
  return m;
}

// Per-channel parameters of one head, padded to whole steps of 32 lanes.
struct HeadParams {
  std::vector<float> mean, gain, weight;
  std::vector<int16_t> prior;
};

inline std::vector<HeadParams> head_params(const ckv_ecq_params& p, int D) {
  const size_t padded = static_cast<size_t>(ceil_div(D, kLanes) * kLanes), d = static_cast<size_t>(D);
  std::vector<HeadParams> heads(static_cast<size_t>(p.heads));
  for (size_t h = 0; h < heads.size(); ++h) {
    HeadParams& to = heads[h];
    to.mean.assign(padded, 0.0f), to.gain.assign(padded, 1.0f), to.weight.assign(padded, 1.0f), to.prior.assign(padded, 0);
    if (!p.mean) continue;
    std::copy_n(p.mean + h * d, d, to.mean.begin());
    std::copy_n(p.gain + h * d, d, to.gain.begin());
    std::copy_n(p.weight + h * d, d, to.weight.begin());
    std::copy_n(p.prior + h * d, d, to.prior.begin());
  }
  return heads;
}

// Buffers of one thread, kept from page to page.
struct Workspace {
  std::vector<float> y;           // weighted, centred values [T, padded]
  std::vector<int> level;         // of each row
  std::vector<uint8_t> row_byte;  // of each row
  std::vector<uint32_t> entry;    // coder entries in step order [T, padded]; 0 where there is no channel
  std::vector<int16_t> k;         // integers [T, padded]
  std::vector<int32_t> mean, spread;
  std::vector<uint16_t> words;    // stream, written from the back
};

// Squares of one row, summed as FORMAT.md says: per lane, then over lanes 16, 8, 4, 2 and 1 apart.
inline float mean_square(const float* y, int padded, int D) {
  float lane[kLanes];
  for (int l = 0; l < kLanes; ++l) lane[l] = y[l] * y[l];
  for (int c = kLanes; c < padded; c += kLanes)
    for (int l = 0; l < kLanes; ++l) lane[l] = lane[l] + y[c + l] * y[c + l];
  for (int d = kLanes / 2; d; d /= 2)
    for (int l = 0; l < d; ++l) lane[l] = lane[l] + lane[l + d];
  return lane[0] / static_cast<float>(D);
}

class PageEncoder {
 public:
  PageEncoder(const ckv_ecq_params& params, const HeadParams& head, int T, int D, Workspace& work)
      : p_(params), head_(head), w_(work), T_(T), D_(D), padded_(ceil_div(D, kLanes) * kLanes) {
    w_.y.resize(static_cast<size_t>(T) * padded_), w_.level.resize(T), w_.row_byte.resize(T), w_.k.resize(w_.y.size());
    w_.entry.resize(w_.y.size()), w_.mean.resize(padded_), w_.spread.resize(padded_);
    w_.words.resize(2 * w_.y.size() + 2 * kLanes);
  }

  // Values, levels and row bytes; false where the page holds what cannot be coded.
  template <int F>
  bool load(const uint8_t* codes, const uint8_t* scales) {
    const int64_t code_row = code_row_bytes(F, D_), scale_row = scale_row_bytes(F, D_);
    float total = 0;
    int most = kNoLevel;
    for (int t = 0; t < T_; ++t) {
      float* y = w_.y.data() + static_cast<size_t>(t) * padded_;
      row_to_float<F>(codes + t * code_row, scales + t * scale_row, D_, y);
      std::fill(y + D_, y + padded_, 0.0f);
      for (int c = 0; c < padded_; ++c) y[c] = (y[c] - head_.mean[c]) * head_.gain[c];
      const float ms = mean_square(y, padded_, D_);
      if (!(ms <= 0x1.fffffep+127f)) return false;  // also NaN
      total = total + ms;
      w_.level[t] = ms < kLeastSquare ? kNoLevel : level_of(ms);
      most = std::max(most, w_.level[t]);
    }
    if (!p_.rows) {
      const float ms = total / static_cast<float>(T_);
      if (!(ms <= 0x1.fffffep+127f)) return false;
      most = ms < kLeastSquare ? kNoLevel : level_of(ms);
    }
    reference_ = most == kNoLevel ? 0 : most;
    for (int t = 0; t < T_; ++t)
      w_.row_byte[t] = p_.rows ? static_cast<uint8_t>(w_.level[t] == kNoLevel ? 255 : std::min(255, reference_ - w_.level[t])) : 0;
    return true;
  }

  // Codes the page `coarser` sixteenths of an octave above the nominal step; words needed.
  uint32_t attempt(int coarser) {
    step_ = p_.step + 2 * reference_ + coarser;
    quantize();
    prior_ = p_.mean ? p_.step + coarser : -magnitude_code(static_cast<int32_t>((magnitudes_ << 10) / (static_cast<int64_t>(T_) * D_)));
    choose_symbols();
    code();
    return static_cast<uint32_t>(w_.words.data() + w_.words.size() - at_);
  }

  // Codes given integers [T, D]; words needed.
  uint32_t code_integers(const int16_t* k) {
    int64_t sum = 0;
    int most = 0;
    for (int t = 0; t < T_; ++t, k += D_) {
      int16_t* to = w_.k.data() + static_cast<size_t>(t) * padded_;
      int row = 0;
      for (int c = 0; c < D_; ++c) {
        const int a = k[c] < 0 ? -k[c] : k[c];
        to[c] = k[c], row += a < kReach ? a : kReach, most = a > most ? a : most;
      }
      std::fill(to + D_, to + padded_, int16_t{0});
      sum += row;
    }
    std::fill(w_.row_byte.begin(), w_.row_byte.end(), uint8_t{0});
    step_ = 0, wide_ = most > kReach;
    prior_ = -magnitude_code(static_cast<int32_t>((sum << 10) / (static_cast<int64_t>(T_) * D_)));
    choose_symbols();
    code();
    return static_cast<uint32_t>(w_.words.data() + w_.words.size() - at_);
  }

  // Slot of the last attempt.
  void write(uint8_t* slot, int64_t slot_bytes, int head, bool coarser) const {
    const uint32_t words = static_cast<uint32_t>(w_.words.data() + w_.words.size() - at_);
    Header h{kMagic, kVersion, static_cast<uint8_t>(kValid | (p_.rows ? kRows : 0) | (coarser ? kCoarser : 0) | (wide_ ? kWide : 0)),
             static_cast<uint8_t>(head), static_cast<int16_t>(step_), static_cast<int16_t>(prior_), words | static_cast<uint32_t>(p_.check) << 24};
    memcpy(slot, &h, sizeof h);
    memcpy(slot + kStatesAt, state_, sizeof state_);
    const int extra = extra_rows(T_, p_.rows != 0), at = stream_at(T_, p_.rows != 0);
    memset(slot + kStreamAt, 0, static_cast<size_t>(at - kStreamAt));
    if (extra) memcpy(slot + kStreamAt, w_.row_byte.data() + kRowsInStates, static_cast<size_t>(extra));
    memcpy(slot + at, at_, 2 * static_cast<size_t>(words));
    memset(slot + at + 2 * static_cast<int64_t>(words), 0, static_cast<size_t>(slot_bytes - at - 2 * static_cast<int64_t>(words)));
  }

 private:
  void quantize() {
    int64_t sum = 0;
    int most = 0;
    for (int t = 0; t < T_; ++t) {
      const float q = 1.0f / step_value(step_ - 2 * w_.row_byte[t]);
      const float* y = w_.y.data() + static_cast<size_t>(t) * padded_;
      int16_t* k = w_.k.data() + static_cast<size_t>(t) * padded_;
      int row = 0, c = 0;
#if CKV_AVX2
      __m256i sums = _mm256_setzero_si256(), largest = sums;
      const __m256 sign = _mm256_set1_ps(-0.0f);
      for (; c < padded_; c += 16) {
        __m256i v[2];
        for (int half = 0; half < 2; ++half) {
          const __m256 z = _mm256_mul_ps(_mm256_loadu_ps(y + c + 8 * half), _mm256_set1_ps(q));
          const __m256 size = _mm256_min_ps(_mm256_andnot_ps(sign, z), _mm256_set1_ps(32767.0f));
          const __m256i a = _mm256_cvttps_epi32(_mm256_add_ps(size, _mm256_set1_ps(p_.rounding)));
          sums = _mm256_add_epi32(sums, _mm256_min_epi32(a, _mm256_set1_epi32(kReach)));
          largest = _mm256_max_epi32(largest, a);
          const __m256i negative = _mm256_srai_epi32(_mm256_castps_si256(z), 31);
          v[half] = _mm256_sub_epi32(_mm256_xor_si256(a, negative), negative);
        }
        const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(v[0], v[1]), 0xD8);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(k + c), packed);
      }
      alignas(32) int32_t lanes[16];
      _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), sums);
      _mm256_store_si256(reinterpret_cast<__m256i*>(lanes + 8), largest);
      for (int l = 0; l < 8; ++l) row += lanes[l], most = std::max(most, lanes[l + 8]);
#endif
      for (; c < padded_; ++c) {
        const int32_t v = integer_of(y[c], q, p_.rounding), a = v < 0 ? -v : v;
        k[c] = static_cast<int16_t>(v);
        row += a < kReach ? a : kReach;
        most = a > most ? a : most;
      }
      sum += row;
    }
    magnitudes_ = sum;
    wide_ = most > kReach;
  }

  void choose_symbols() {
    const HostModel& model = host_model();
    for (int c = 0; c < padded_; ++c) w_.mean[c] = 0, w_.spread[c] = prior_spread(head_.prior[c] - prior_);
    for (int t = 0; t < T_; ++t) {
      const int16_t* ks = w_.k.data() + static_cast<size_t>(t) * padded_;
      uint32_t* entry = w_.entry.data() + static_cast<size_t>(t) * padded_;
      int c = 0;
#if CKV_AVX2
      const __m256i reach = _mm256_set1_epi32(kReach);
      for (; c + 8 <= D_; c += 8) {
        const __m256i k = _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(ks + c)));
        __m256i* mp = reinterpret_cast<__m256i*>(w_.mean.data() + c);
        __m256i* sp = reinterpret_cast<__m256i*>(w_.spread.data() + c);
        const __m256i mean = _mm256_loadu_si256(mp), spread = _mm256_loadu_si256(sp);
        const __m256i residual = _mm256_sub_epi32(k, _mm256_srai_epi32(_mm256_add_epi32(mean, _mm256_set1_epi32(512)), 10));
        const __m256i a = _mm256_min_epi32(_mm256_abs_epi32(residual), reach);
        const __m256i cls = class8(spread);
        const __m256i far = _mm256_cmpgt_epi32(_mm256_abs_epi32(residual), reach);
        const __m256i symbol = _mm256_blendv_epi8(_mm256_add_epi32(residual, reach), _mm256_set1_epi32(kEscape), far);
        const __m256i index = _mm256_add_epi32(_mm256_slli_epi32(cls, 8), symbol);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(entry + c), _mm256_i32gather_epi32(reinterpret_cast<const int*>(model.encode[0]), index, 4));
        _mm256_storeu_si256(mp, learn_mean8(mean, k));
        _mm256_storeu_si256(sp, learn_spread8(spread, a));
      }
#endif
      for (; c < D_; ++c) {
        Channel state{w_.mean[c], w_.spread[c]};
        const int32_t residual = ks[c] - predicted(state);
        const int symbol = residual < -kReach || residual > kReach ? kEscape : residual + kReach;
        entry[c] = model.encode[class_of(state)][symbol];
        learn(state, ks[c], residual);
        w_.mean[c] = state.mean, w_.spread[c] = state.spread;
      }
      for (; c < padded_; ++c) entry[c] = 0;
    }
  }

  // Backwards over the steps: a decoder reads forwards.
  void code() {
    for (int l = 0; l < kLanes; ++l) {
      const uint32_t low = 2 * l < T_ ? w_.row_byte[2 * l] : 0, high = 2 * l + 1 < T_ ? w_.row_byte[2 * l + 1] : 0;
      state_[l] = 1u << 16 | low | high << 8;
    }
    at_ = w_.words.data() + w_.words.size();
#if CKV_AVX2
    __m256i x[4];
    for (int v = 0; v < 4; ++v) x[v] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(state_ + 8 * v));
    for (int64_t i = static_cast<int64_t>(w_.entry.size()) - kLanes; i >= 0; i -= kLanes) {
      const uint32_t* entry = w_.entry.data() + i;
      __m256i e[4];
      for (int v = 0; v < 4; ++v) e[v] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(entry + 8 * v));
      if (_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_or_si256(_mm256_or_si256(e[0], e[1]), _mm256_or_si256(e[2], e[3])))))
        emit_escapes(entry, i);
      for (int v = 3; v >= 0; --v) push8(x[v], e[v]);
    }
    for (int v = 0; v < 4; ++v) _mm256_storeu_si256(reinterpret_cast<__m256i*>(state_ + 8 * v), x[v]);
#else
    for (int64_t i = static_cast<int64_t>(w_.entry.size()) - kLanes; i >= 0; i -= kLanes) {
      const uint32_t* entry = w_.entry.data() + i;
      emit_escapes(entry, i);
      for (int l = kLanes - 1; l >= 0; --l) {
        const uint32_t start = entry[l] & (kTotal - 1), freq = entry[l] >> kBits & 0x1FFFu;
        if (!freq) continue;
        uint32_t& x = state_[l];
        if (must_emit(x, freq)) *--at_ = static_cast<uint16_t>(x), x >>= 16;
        x = push(x, start, freq);
      }
    }
#endif
  }

  void emit_escapes(const uint32_t* entry, int64_t i) {
    for (int l = kLanes - 1; l >= 0; --l)
      if (entry[l] >> 31) *--at_ = static_cast<uint16_t>(w_.k[static_cast<size_t>(i + l)]);
  }

#if CKV_AVX2
 public:
  static __m256i class8(__m256i spread) {
    const __m256 f = _mm256_cvtepi32_ps(_mm256_add_epi32(spread, _mm256_set1_epi32(8)));
    return _mm256_sub_epi32(_mm256_srli_epi32(_mm256_castps_si256(f), 22), _mm256_set1_epi32(260));
  }
  static __m256i learn_mean8(__m256i mean, __m256i k) {
    return _mm256_add_epi32(mean, _mm256_sub_epi32(_mm256_slli_epi32(k, 7), _mm256_srai_epi32(mean, 3)));
  }
  static __m256i learn_spread8(__m256i spread, __m256i a) {
    return _mm256_add_epi32(spread, _mm256_sub_epi32(_mm256_slli_epi32(a, 6), _mm256_srai_epi32(spread, 4)));
  }

 private:
  void push8(__m256i& x, __m256i e) {
    const __m256i start = _mm256_and_si256(e, _mm256_set1_epi32(kTotal - 1));
    const __m256i freq = _mm256_and_si256(_mm256_srli_epi32(e, kBits), _mm256_set1_epi32(0x1FFF));
    const __m256i idle = _mm256_cmpeq_epi32(freq, _mm256_setzero_si256());
    const __m256i keep = _mm256_or_si256(idle, _mm256_cmpgt_epi32(freq, _mm256_srli_epi32(x, 20)));
    const unsigned emit = static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(keep))) ^ 255u;
    // words of the emitting lanes, moved to the upper end in lane order; what lands below them is overwritten later
    const __m256i low = _mm256_permutevar8x32_epi32(_mm256_and_si256(x, _mm256_set1_epi32(0xFFFF)), to_end()[emit]);
    const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at_ - 8), packed);
    at_ -= __builtin_popcount(emit);
    const __m256i y = _mm256_blendv_epi8(_mm256_srli_epi32(x, 16), x, keep);
    // y < freq << 20, so that the quotient is below 2^20 and exact in double
    const __m256i flipped = _mm256_xor_si256(y, _mm256_set1_epi32(static_cast<int>(0x80000000u)));
    const __m256d bias = _mm256_set1_pd(2147483648.0);
    const __m256d y0 = _mm256_add_pd(_mm256_cvtepi32_pd(_mm256_castsi256_si128(flipped)), bias);
    const __m256d y1 = _mm256_add_pd(_mm256_cvtepi32_pd(_mm256_extracti128_si256(flipped, 1)), bias);
    const __m256d f0 = _mm256_cvtepi32_pd(_mm256_castsi256_si128(freq)), f1 = _mm256_cvtepi32_pd(_mm256_extracti128_si256(freq, 1));
    const __m256i q = _mm256_set_m128i(_mm256_cvttpd_epi32(_mm256_div_pd(y1, f1)), _mm256_cvttpd_epi32(_mm256_div_pd(y0, f0)));
    const __m256i rest = _mm256_sub_epi32(y, _mm256_mullo_epi32(q, freq));
    const __m256i pushed = _mm256_add_epi32(_mm256_add_epi32(_mm256_slli_epi32(q, kBits), rest), start);
    x = _mm256_blendv_epi8(pushed, x, idle);
  }

  static const __m256i* to_end() {
    struct Table {
      __m256i of[256];
      Table() {
        for (int mask = 0; mask < 256; ++mask) {
          alignas(32) int32_t index[8] = {};
          int at = 8 - __builtin_popcount(static_cast<unsigned>(mask));
          for (int l = 0; l < 8; ++l)
            if (mask >> l & 1) index[at++] = l;
          of[mask] = _mm256_load_si256(reinterpret_cast<const __m256i*>(index));
        }
      }
    };
    static const Table table;
    return table.of;
  }
#endif

  const ckv_ecq_params& p_;
  const HeadParams& head_;
  Workspace& w_;
  const int T_, D_, padded_;
  int reference_ = 0, step_ = 0, prior_ = 0;
  int64_t magnitudes_ = 0;
  bool wide_ = false;
  uint16_t* at_ = nullptr;
  uint32_t state_[kLanes];
};

// Integers [T, padded] and row bytes of a slot whose header was checked; false where the stream does not end as it must.
inline bool read_page(const uint8_t* slot, const Header& h, const HeadParams& head, int T, int D, Workspace& w) {
  const HostModel& model = host_model();
  const int padded = ceil_div(D, kLanes) * kLanes;
  const bool rows = h.flags & kRows;
  const uint32_t words = h.words & kMaxWords;
  w.k.resize(static_cast<size_t>(T) * padded), w.row_byte.assign(static_cast<size_t>(T), 0);
  w.mean.assign(padded, 0), w.spread.resize(padded);
  for (int c = 0; c < padded; ++c) w.spread[c] = prior_spread(head.prior[c] - h.prior);
  // room behind the stream, so that a damaged one is noticed at the end of a step and not read past
  w.words.assign(words + 3 * kLanes, 0);
  memcpy(w.words.data(), slot + stream_at(T, rows), 2 * static_cast<size_t>(words));
  uint32_t x[kLanes], at = 0;
  memcpy(x, slot + kStatesAt, sizeof x);
#if CKV_AVX2
  struct Spread {
    __m256i of[256];
    Spread() {
      for (int mask = 0; mask < 256; ++mask) {
        alignas(32) int32_t index[8] = {};
        for (int l = 0, i = 0; l < 8; ++l)
          if (mask >> l & 1) index[l] = i++;
        of[mask] = _mm256_load_si256(reinterpret_cast<const __m256i*>(index));
      }
    }
  };
  static const Spread from_front;
  __m256i s[4];
  for (int v = 0; v < 4; ++v) s[v] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + 8 * v));
#endif
  for (int t = 0; t < T; ++t)
    for (int j = 0; j < padded; j += kLanes) {
      int16_t* k = w.k.data() + static_cast<size_t>(t) * padded + j;
#if CKV_AVX2
      if (j + kLanes <= D) {
        __m256i value[4], residual[4];
        unsigned escapes = 0;
        for (int v = 0; v < 4; ++v) {
          const __m256i mean = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w.mean.data() + j + 8 * v));
          const __m256i spread = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w.spread.data() + j + 8 * v));
          const __m256i place = _mm256_and_si256(s[v], _mm256_set1_epi32(kTotal - 1));
          const __m256i index = _mm256_add_epi32(_mm256_slli_epi32(PageEncoder::class8(spread), kBits), place);
          const __m256i e = _mm256_i32gather_epi32(reinterpret_cast<const int*>(model.decode[0]), index, 4);
          const __m256i symbol = _mm256_and_si256(e, _mm256_set1_epi32(255));
          const __m256i freq = _mm256_add_epi32(_mm256_and_si256(_mm256_srli_epi32(e, 8), _mm256_set1_epi32(kTotal - 1)), _mm256_set1_epi32(1));
          __m256i y = _mm256_add_epi32(_mm256_mullo_epi32(freq, _mm256_srli_epi32(s[v], kBits)), _mm256_srli_epi32(e, 20));
          const __m256i low = _mm256_cmpeq_epi32(_mm256_srli_epi32(y, 16), _mm256_setzero_si256());
          const unsigned mask = static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(low)));
          const __m256i next = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w.words.data() + at)));
          const __m256i word = _mm256_permutevar8x32_epi32(next, from_front.of[mask]);
          s[v] = _mm256_blendv_epi8(y, _mm256_or_si256(_mm256_slli_epi32(y, 16), word), low);
          at += static_cast<unsigned>(__builtin_popcount(mask));
          residual[v] = _mm256_sub_epi32(symbol, _mm256_set1_epi32(kReach));
          value[v] = _mm256_add_epi32(residual[v], _mm256_srai_epi32(_mm256_add_epi32(mean, _mm256_set1_epi32(512)), 10));
          escapes |= static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(symbol, _mm256_set1_epi32(kEscape))))) << 8 * v;
        }
        if (escapes) {
          alignas(32) int32_t ks[kLanes], rs[kLanes];
          for (int v = 0; v < 4; ++v) _mm256_store_si256(reinterpret_cast<__m256i*>(ks + 8 * v), value[v]);
          for (int v = 0; v < 4; ++v) _mm256_store_si256(reinterpret_cast<__m256i*>(rs + 8 * v), residual[v]);
          for (int l = 0; l < kLanes; ++l)
            if (escapes >> l & 1) {
              const int32_t before = ks[l] - rs[l];
              ks[l] = static_cast<int16_t>(w.words[at++]), rs[l] = ks[l] - before;
            }
          for (int v = 0; v < 4; ++v) value[v] = _mm256_load_si256(reinterpret_cast<const __m256i*>(ks + 8 * v));
          for (int v = 0; v < 4; ++v) residual[v] = _mm256_load_si256(reinterpret_cast<const __m256i*>(rs + 8 * v));
        }
        for (int v = 0; v < 4; ++v) {
          value[v] = _mm256_max_epi32(_mm256_min_epi32(value[v], _mm256_set1_epi32(kLargest)), _mm256_set1_epi32(-kLargest));
          __m256i* mean = reinterpret_cast<__m256i*>(w.mean.data() + j + 8 * v);
          __m256i* spread = reinterpret_cast<__m256i*>(w.spread.data() + j + 8 * v);
          _mm256_storeu_si256(mean, PageEncoder::learn_mean8(_mm256_loadu_si256(mean), value[v]));
          const __m256i a = _mm256_min_epi32(_mm256_abs_epi32(residual[v]), _mm256_set1_epi32(kReach));
          _mm256_storeu_si256(spread, PageEncoder::learn_spread8(_mm256_loadu_si256(spread), a));
          const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(value[v], value[v]), 8);
          _mm_storeu_si128(reinterpret_cast<__m128i*>(k + 8 * v), _mm256_castsi256_si128(packed));
        }
        if (at > words) return false;
        continue;
      }
      for (int v = 0; v < 4; ++v) _mm256_storeu_si256(reinterpret_cast<__m256i*>(x + 8 * v), s[v]);
#endif
      const int lanes = std::min(kLanes, D - j);
      int symbol[kLanes];
      for (int l = 0; l < lanes; ++l) {
        const Channel state{w.mean[j + l], w.spread[j + l]};
        const uint32_t e = model.decode[class_of(state)][x[l] & (kTotal - 1)];
        symbol[l] = static_cast<int>(e & 255u);
        x[l] = ((e >> 8 & (kTotal - 1)) + 1) * (x[l] >> kBits) + (e >> 20);
        if (x[l] < 1u << 16) x[l] = x[l] << 16 | w.words[at++];
      }
      for (int l = 0; l < lanes; ++l) {
        Channel state{w.mean[j + l], w.spread[j + l]};
        const int32_t value = symbol[l] == kEscape ? static_cast<int16_t>(w.words[at++]) : predicted(state) + symbol[l] - kReach;
        const int32_t held = clamp_integer(value);
        k[l] = static_cast<int16_t>(held);
        learn(state, held, value - predicted(state));
        w.mean[j + l] = state.mean, w.spread[j + l] = state.spread;
      }
      for (int l = lanes; l < kLanes; ++l) k[l] = 0;
#if CKV_AVX2
      for (int v = 0; v < 4; ++v) s[v] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + 8 * v));
#endif
      if (at > words) return false;
    }
#if CKV_AVX2
  for (int v = 0; v < 4; ++v) _mm256_storeu_si256(reinterpret_cast<__m256i*>(x + 8 * v), s[v]);
#endif
  bool good = at == words;
  for (int l = 0; l < kLanes; ++l) {
    const uint8_t low = static_cast<uint8_t>(x[l]), high = static_cast<uint8_t>(x[l] >> 8);
    good = good && x[l] >> 16 == 1u && (rows || !(x[l] & 0xFFFFu));
    if (2 * l < T) w.row_byte[2 * l] = low; else good = good && !low;
    if (2 * l + 1 < T) w.row_byte[2 * l + 1] = high; else good = good && !high;
  }
  for (int t = kRowsInStates; rows && t < T; ++t) w.row_byte[t] = slot[kStreamAt + t - kRowsInStates];
  return good;
}

// One row as attention reads it, in bf16.
inline void restore_row(const Workspace& w, const Header& h, const HeadParams& head, int t, int D, uint16_t* out) {
  const int padded = ceil_div(D, kLanes) * kLanes;
  const float step = step_value(h.step - 2 * w.row_byte[t]);
  const int16_t* k = w.k.data() + static_cast<size_t>(t) * padded;
  for (int c = 0; c < D; ++c) out[c] = restored(k[c], step, head.weight[c], head.mean[c]);
}

}  // namespace ecq
}  // namespace ckv
