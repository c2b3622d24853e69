// Codec ecq: what host and device share. Slot layout, step arithmetic, the adaptive model of one channel, the symbol tables and
// one step of the entropy coder. FORMAT.md is the specification.
#pragma once

#include "numerics.h"
#include "slot.h"

namespace ckv {
namespace ecq {

constexpr unsigned kAccepts = 1u << CKV_BF16 | 1u << CKV_FP16 | 1u << CKV_INT8 | 1u << CKV_FP8 | 1u << CKV_NVFP4 | 1u << CKV_ISO3;
constexpr uint32_t kMagic = 0x31514345u;  // "ECQ1"
constexpr uint16_t kVersion = 1;
constexpr uint8_t kValid = 1, kRows = 2, kCoarser = 4, kWide = 8;  // flags

struct Header {
  uint32_t magic;
  uint16_t version;
  uint8_t flags;   // kValid always; kRows: row bytes present; kCoarser: rate control chose a coarser step; kWide: some |k| > 127
  uint8_t head;    // which head's means, weights and priors apply
  int16_t step;    // step of a row with row byte 0, in sixteenths of an octave
  int16_t prior;   // subtracted from every channel's prior
  uint32_t words;  // 16-bit words of the stream; the top byte is the calibration's check byte
};
static_assert(sizeof(Header) == 16, "ecq header is 16 bytes");

constexpr int kLanes = 32;
constexpr int kStatesAt = 16, kStreamAt = kStatesAt + 4 * kLanes;  // of a slot without extra row bytes
constexpr int kRowsInStates = 2 * kLanes;                          // row bytes that the lanes' first states carry
constexpr uint32_t kMaxWords = (1u << 24) - 1;

// Offsets of a slot for T rows: row bytes beyond the first 64 sit between the states and the stream.
CKV_HD int extra_rows(int T, bool rows) { return rows && T > kRowsInStates ? T - kRowsInStates : 0; }
CKV_HD int stream_at(int T, bool rows) { return kStreamAt + (extra_rows(T, rows) + 1) / 2 * 2; }

// ---- steps ------------------------------------------------------------------------------------------------------------------

constexpr int kMinStep = -1920, kMaxStep = 1920;  // sixteenths of an octave: 2^-120 .. 2^120
constexpr int kMostStep = 1680;                   // of a header: no encoder writes more, and restored values stay finite

CKV_HD float sixteenth(int i) {  // 2^(i/16), i = 0..15, nearest fp32
  static constexpr float k[16] = {0x1p+0f,        0x1.0b5586p+0f, 0x1.172b84p+0f, 0x1.2387a6p+0f, 0x1.306fep+0f,  0x1.3dea64p+0f,
                           0x1.4bfdaep+0f, 0x1.5ab07ep+0f, 0x1.6a09e6p+0f, 0x1.7a1148p+0f, 0x1.8ace54p+0f, 0x1.9c4918p+0f,
                           0x1.ae89fap+0f, 0x1.c199bep+0f, 0x1.d5818ep+0f, 0x1.ea4afap+0f};
  return k[i];
}

// 2^(i/16); i is clamped, so that the step and its reciprocal stay normal numbers.
CKV_HD float step_value(int i) {
  i = i < kMinStep ? kMinStep : i > kMaxStep ? kMaxStep : i;
  return float_of(bits_of(sixteenth(i & 15)) + (static_cast<uint32_t>(i >> 4) << 23));
}

// Eighths of an octave of the root of a mean square: round(4 log2 ms), ties up. ms is a normal positive number.
CKV_HD int level_of(float ms) {
  const uint32_t u = bits_of(ms);
  const float m = float_of((u & 0x7FFFFFu) | 0x3F800000u);
  return 4 * (static_cast<int>(u >> 23) - 127) + (m >= 0x1.172b84p+0f) + (m >= 0x1.4bfdaep+0f) + (m >= 0x1.8ace54p+0f) +
         (m >= 0x1.d5818ep+0f);
}
constexpr float kLeastSquare = 0x1p-100f;  // rows below count as zero rows
constexpr int kNoLevel = -(1 << 20);       // level of a zero row

// ---- model ------------------------------------------------------------------------------------------------------------------

constexpr int kClasses = 28, kSymbols = 256, kEscape = 255, kReach = 127;  // symbol = residual + 127
constexpr int kBits = 12;
constexpr uint32_t kTotal = 1u << kBits;
constexpr int kLargest = 32767;  // of an integer k

// A channel's state, per head-page: `mean` predicts the next integer, `spread` says how far it may be off. Both in 1/1024.
struct Channel {
  int32_t mean, spread;
};
constexpr int32_t kMostSpread = kReach << 10;

// 1024 * 2^(d/16), clamped to 0..kMostSpread: the spread that a prior of d sixteenths of an octave stands for.
CKV_HD int32_t prior_spread(int d) {
  static constexpr uint16_t k[16] = {32768, 34219, 35734, 37316, 38968, 40693, 42495, 44376, 46341, 48393, 50535, 52773, 55109, 57549, 60097, 62757};
  if (d >= 112) return kMostSpread;
  if (d < -160) return 0;
  const int e = d >> 4;
  const int32_t m = k[d & 15];
  const int32_t v = e <= 5 ? m >> (5 - e) : m << (e - 5);
  return v > kMostSpread ? kMostSpread : v;
}

CKV_HD int32_t predicted(const Channel& c) { return (c.mean + 512) >> 10; }
// Two classes per octave of spread.
CKV_HD int class_of(const Channel& c) { return static_cast<int>(bits_of(static_cast<float>(c.spread + 8)) >> 22) - 260; }
CKV_HD void learn(Channel& c, int32_t k, int32_t residual) {
  const int32_t a = residual < 0 ? -residual : residual;
  c.mean += k * 128 - (c.mean >> 3);  // not k << 7, which C++17 leaves open for negative k
  c.spread += (a > kReach ? kReach : a) * 64 - (c.spread >> 4);
}

// Sixteenths of an octave of a mean magnitude a/1024: exponent and the top four mantissa bits, minus the 160 of 1024.
CKV_HD int magnitude_code(int32_t a) { return static_cast<int>(bits_of(static_cast<float>(a + 1)) >> 19) - (127 << 4) - 160; }

// Cumulative frequencies per class, in symbol order -127 .. 127, escape; start[c][256] = 4096.
struct Model {
  uint16_t start[kClasses][kSymbols + 1];
};
constexpr Model make_model() {
  constexpr uint16_t raw[] = {
#include "ecq_tables.h"
  };
  Model m{};
  int at = 0;
  for (int c = 0; c < kClasses; ++c) {
    const int escape = raw[at], count = raw[at + 1];
    uint32_t sum = 0;
    for (int s = 0; s < kSymbols; ++s) {
      const int r = s < kReach ? kReach - s : s - kReach;
      m.start[c][s] = static_cast<uint16_t>(sum);
      sum += s == kEscape ? escape : r < count ? raw[at + 2 + r] : 0;
    }
    m.start[c][kSymbols] = static_cast<uint16_t>(sum);
    at += 2 + count;
  }
  return m;
}

// Symbol of a residual in a class: the escape where the table has no room for it.
CKV_HD int symbol_of(const Model& m, int cls, int32_t residual) {
  if (residual < -kReach || residual > kReach) return kEscape;
  const int s = residual + kReach;
  return m.start[cls][s + 1] > m.start[cls][s] ? s : kEscape;
}

// Integer of a value: sign and floor(|z| + rounding), |k| <= 32767.
CKV_HD int32_t integer_of(float y, float reciprocal, float rounding) {
  const float z = y * reciprocal, a = z < 0 ? -z : z;
  const int32_t k = static_cast<int32_t>((a > 32767.0f ? 32767.0f : a) + rounding);
  return z < 0 ? -k : k;
}

// Integers stay in range also where a stream is damaged, so that every backend reads the same.
CKV_HD int32_t clamp_integer(int32_t k) { return k > kLargest ? kLargest : k < -kLargest ? -kLargest : k; }

// What attention reads: bf16 of mean + (k * step) * weight.
CKV_HD uint16_t restored(int32_t k, float step, float weight, float mean) {
  return bf16_from_float(mean + static_cast<float>(k) * step * weight);
}

// ---- coder: 32-bit rANS states in [2^16, 2^32), 16-bit words ------------------------------------------------------------------

CKV_HD bool must_emit(uint32_t x, uint32_t freq) { return (x >> 20) >= freq; }
CKV_HD uint32_t push(uint32_t x, uint32_t start, uint32_t freq) { return (x / freq << kBits) + x % freq + start; }

CKV_HD Header read_header(const uint8_t* slot) {
  Header h;
  memcpy(&h, slot, sizeof h);
  return h;
}

// Reads beyond a damaged stream give zero.
CKV_HD uint32_t word_at(const uint8_t* stream, uint32_t words, uint32_t i) {
  return i < words ? stream[2 * i] | static_cast<uint32_t>(stream[2 * i + 1]) << 8 : 0;
}

// Whether a slot can be read with these parameters: everything a decoder relies on before it starts.
CKV_HD bool header_ok(const Header& h, int T, int64_t stride, int heads, uint8_t check) {
  if (h.magic != kMagic || h.version != kVersion || !(h.flags & kValid) || h.flags > 15 || h.head >= heads) return false;
  if (h.step < -kMostStep || h.step > kMostStep) return false;
  return h.words >> 24 == check && stream_at(T, h.flags & kRows) + 2 * static_cast<int64_t>(h.words & kMaxWords) <= stride;
}

}  // namespace ecq
}  // namespace ckv
