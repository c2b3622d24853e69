// rANS over 16 symbols: 12-bit frequencies, a 32-bit state in [2^23, 2^31), renormalised byte by byte. Host and device.
//
// Surprises first: a stream is encoded from its last symbol to its first. Bytes are appended as they leave the state, then the
// final state, little endian; the decoder starts at the end and reads backwards. Decoding the last symbol brings the state back to
// 2^23 with every byte used, which is what tells a sound stream from a damaged one.
#pragma once

#include "port.cuh"

namespace ckv {
namespace rans {

constexpr int kSymbols = 16, kProbBits = 12, kStateBytes = 4;
constexpr uint32_t kTotal = 1u << kProbBits, kLow = 1u << 23;

// Frequencies of symbol counts: at least 1 each, 4,096 in all. Floor of the share, at least 1; what is missing goes to the largest
// remainders, one each; what is too much comes off the largest frequency, one by one; of equals the smaller symbol. No counts at
// all: 256 each.
CKV_HD void frequencies(const uint32_t* counts, uint16_t* freq) {
  uint64_t total = 0;
  for (int s = 0; s < kSymbols; ++s) total += counts[s];
  int64_t rest[kSymbols];
  int sum = 0;
  for (int s = 0; s < kSymbols; ++s) {
    const uint64_t scaled = static_cast<uint64_t>(counts[s]) * kTotal;
    const uint32_t share = total ? static_cast<uint32_t>(scaled / total) : kTotal / kSymbols;
    rest[s] = share && total ? static_cast<int64_t>(scaled - share * total) : -1;  // one lifted to 1 has had its share
    freq[s] = static_cast<uint16_t>(share ? share : 1u);
    sum += freq[s];
  }
  for (; sum < static_cast<int>(kTotal); ++sum) {
    int best = 0;
    for (int s = 1; s < kSymbols; ++s) best = rest[s] > rest[best] ? s : best;
    ++freq[best];
    rest[best] = -1;
  }
  for (; sum > static_cast<int>(kTotal); --sum) {
    int best = 0;
    for (int s = 1; s < kSymbols; ++s) best = freq[s] > freq[best] ? s : best;
    --freq[best];
  }
}

// A symbol as the encoder needs it. x / freq is a multiplication: with l = ceil(log2 freq) and m = ceil(2^(31+l) / freq), which
// fits 32 bits, floor(x * m / 2^(31+l)) is exact for every x < 2^31 (Granlund and Montgomery).
struct Symbol {
  uint32_t reciprocal;
  uint16_t freq, start;
  uint32_t shift;
};

CKV_HD Symbol make_symbol(uint32_t freq, uint32_t start) {
  uint32_t l = 0;
  while (1u << l < freq) ++l;
  Symbol s;
  s.freq = static_cast<uint16_t>(freq);
  s.start = static_cast<uint16_t>(start);
  s.shift = 31 + l;
  s.reciprocal = static_cast<uint32_t>(((uint64_t{1} << s.shift) + freq - 1) / freq);
  return s;
}

// State after `symbol`; put(byte) takes what leaves it, two bytes at most.
template <class Put>
CKV_HD uint32_t push(uint32_t x, const Symbol& symbol, Put& put) {
  const uint32_t most = static_cast<uint32_t>(symbol.freq) << (23 - kProbBits + 8);
  while (x >= most) {
    put(static_cast<uint8_t>(x));
    x >>= 8;
  }
  const uint32_t q = static_cast<uint32_t>(static_cast<uint64_t>(x) * symbol.reciprocal >> symbol.shift);
  return x + symbol.start + q * (kTotal - symbol.freq);
}

// Bytes [begin, at) that are still to be read, backwards. Past the first one nothing is read any more: the state then stays below
// kLow for good, so such a stream cannot end in kLow.
struct Tail {
  const uint8_t *begin, *at;
};

// State after taking out a symbol of this frequency and start, whose place the low 12 bits of x are.
CKV_HD uint32_t pull(uint32_t x, uint32_t freq, uint32_t start, Tail& tail) {
  x = freq * (x >> kProbBits) + (x & (kTotal - 1)) - start;
  if (x < kLow && tail.at > tail.begin) {
    x = x << 8 | *--tail.at;
    if (x < kLow && tail.at > tail.begin) x = x << 8 | *--tail.at;
  }
  return x;
}

// First state of a stream of `symbols` symbols in [begin, end); false if it cannot be one. An empty stream has no bytes.
CKV_HD bool open(const uint8_t* begin, const uint8_t* end, int64_t symbols, uint32_t* x, Tail* tail) {
  tail->begin = tail->at = begin;
  *x = kLow;
  if (!symbols) return begin == end;
  if (end - begin < kStateBytes) return false;
  uint32_t state = 0;
  for (int i = 1; i <= kStateBytes; ++i) state = state << 8 | end[-i];
  if (state < kLow || state >= kLow << 8) return false;
  *x = state;
  tail->at = end - kStateBytes;
  return true;
}

CKV_HD bool sound(uint32_t x, const Tail& tail) { return x == kLow && tail.at == tail.begin; }

}  // namespace rans
}  // namespace ckv
