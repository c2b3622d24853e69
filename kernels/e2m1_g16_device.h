// Device kernels of codec e2m1-g16: plane to slots, one block per head-page, one thread per group of 16 channels at a time.
//
// The page scale, and with it every scale byte, is known only once all groups have chosen their scale. The nibbles are not: they
// follow from the group's own scale. So the plane is read once and nibbles are written at once; u of every group waits in shared
// memory. Only groups below the page's normal range, rare in real data, are read again, as are pages of more groups than kKept.
//
// The search itself is made cheap in two ways, both with the same outcome as squared_error() for all eight candidates.
//   int8 codes: with q2 = 2q, E(s) = sum v^2 + s * (s/4 * B - h * A), A = sum |code| * q2, B = sum q2^2, in integers: A and B
//     are byte dot products. With s = S * 2^i and h = H * 2^j, E orders like S * (S * 2^k * B - 4 * H * A), below 2^34.
//   other formats: E in fp32 first, which errs by less than 2^-19 of it; candidates within 2^-17 of the least are decided in fp64.
#pragma once

#include "codec_device.h"
#include "e2m1_g16_core.h"

namespace ckv {
namespace e2m1_g16 {

constexpr int kKept = 8192;  // groups of a page: 128 x 1024 channels, 256 x 512

struct Choice {
  int u;             // as g16::pick_free
  uint32_t word[2];  // nibbles at that scale
};

// Groups of one sign bit for every nibble that is not zero.
CKV_DEVICE uint32_t with_signs(uint32_t index, uint32_t signs) {
  const uint32_t some = (index | index >> 1 | index >> 2) & 0x11111111u;
  return index | (signs & some << 3);
}

// ---- int8 codes -------------------------------------------------------------------------------------------------------------

// As index_word(), for values up to 7.5 scales.
CKV_DEVICE uint32_t clamped_index_word(const float* tiny, float ratio, ShiftFactors by) {
  float x[8];
  for (int i = 0; i < 8; ++i) x[i] = fminf(float_of(bits_of(tiny[i] * ratio) & 0x7FFFFFFFu), 6.0f * kDown126);
  return index_word(x, 1.0f, by);
}

// 16 codes whose scale is h, finite; nibbles and u.
CKV_DEVICE Choice choose(const uint32_t* codes, float h, ShiftFactors by) {
  float tiny[16];
  for (int i = 0; i < 4; ++i) codes_to_tiny(codes[i], tiny + 4 * i);
  const uint32_t h_bits = bits_of(h) & 0x7FFFFFFFu;
  const float scale = float_of(h_bits), a = largest_code(tiny) * scale;
  Choice best = {g16::kZeroGroup, {0u, 0u}};
  if (a == 0.0f) return best;
  uint32_t magnitude[4];
  for (int i = 0; i < 4; ++i) {
    const uint32_t negative = permute_bytes(codes[i], 0u, 0xBA98u);  // 255 for each negative code
    magnitude[i] = (codes[i] ^ negative) + (negative & 0x01010101u);
  }
  const int lo = g16::free_low(a), shift = (lo >> 3) - static_cast<int>(h_bits >> 23) + 7;  // k above, 4..12
  const int H = static_cast<int>(((h_bits & 0x7FFFFFu) | 0x800000u) >> 13);  // fp16's 11 bits
  int64_t least = INT64_MAX;
  for (int j = 0; j < g16::kCandidates; ++j) {
    const int u = lo + j;
    const float ratio = scale * raised_reciprocal(g16::u_value(u));
    uint32_t word[2], A = 0, B = 0;
    for (int half = 0; half < 2; ++half) {
      word[half] = j ? index_word(tiny + 8 * half, ratio, by) : clamped_index_word(tiny + 8 * half, ratio, by);
      for (int part = 0; part < 2; ++part) {
        const uint32_t q2 = permute_bytes(0x03020100u, 0x0C080604u, word[half] >> 16 * part);
        A = dot_bytes(q2, magnitude[2 * half + part], A);
        B = dot_bytes(q2, q2, B);
      }
    }
    const int S = (8 + (u & 7)) << ((u >> 3) - (lo >> 3));
    const int64_t error = static_cast<int64_t>((S * static_cast<int>(B) << shift) - 4 * H * static_cast<int>(A)) * S;
    if (error < least) {
      least = error;
      best.u = u, best.word[0] = word[0], best.word[1] = word[1];
    }
  }
  if (((best.word[0] | best.word[1]) & 0x11111111u) == 0) {
    const int u = g16::canonical_even(best.u);
    if (u != best.u) {
      const float ratio = scale * raised_reciprocal(g16::u_value(u));
      best.u = u, best.word[0] = clamped_index_word(tiny, ratio, by), best.word[1] = clamped_index_word(tiny + 8, ratio, by);
    }
  }
  const uint32_t flip = h < 0.0f ? 0x88888888u : 0u;
  best.word[0] = with_signs(best.word[0], sign_word(codes[0], codes[1]) ^ flip);
  best.word[1] = with_signs(best.word[1], sign_word(codes[2], codes[3]) ^ flip);
  return best;
}

// ---- values -----------------------------------------------------------------------------------------------------------------

// 2^-126 * q of a magnitude at the scale that r belongs to; up to 7.5 scales.
CKV_DEVICE float tiny_magnitude(float magnitude, float r) {
  return float_of(e2m1_bits(fminf(magnitude * r, 6.0f) * kDown126) & 0xFFC00000u);
}

CKV_DEVICE void index_words(const float* magnitude, float s, uint32_t* word) {
  const float r = raised_reciprocal(s);
  word[0] = word[1] = 0;
  for (int i = 0; i < 16; ++i) word[i / 8] |= bits_of(tiny_magnitude(magnitude[i], r)) >> 22 << 4 * (i % 8);
}

CKV_DEVICE float with_margin(float error) { return error * (1.0f + 0x1p-17f) + 0x1p-140f; }

// squared_error() of e2m1_g16_core.h: each difference has at most 20 bits, so that it is exact in fp32 and its square in fp64.
CKV_DEVICE double exact_error(const float* magnitude, float s) {
  const float r = raised_reciprocal(s);
  double sum = 0.0;
  for (int i = 0; i < 16; ++i) {
    const double e = static_cast<double>(fmaf(-(tiny_magnitude(magnitude[i], r) * kUp126), s, magnitude[i]));
    sum = fma(e, e, sum);
  }
  return sum;
}

// Candidate of the least squared error, its distance from `lo`. Magnitudes are scaled by a power of two, so that squares neither
// overflow nor, where they matter, underflow.
CKV_DEVICE int best_of(const float* magnitude, int lo) {
  const int octaves = 127 - (lo >> 3);
  const float scale = float_of(static_cast<uint32_t>(127 + octaves) << 23);
  float v[16], least = 0x1p100f;
  unsigned close = 0;  // candidates that may be the best, and perhaps some more
  for (int i = 0; i < 16; ++i) v[i] = magnitude[i] * scale;
#pragma unroll 1
  for (int j = 0; j < g16::kCandidates; ++j) {
    const float s = g16::u_value(lo + 8 * octaves + j), r = raised_reciprocal(s);
    float error = 0.0f;
    for (int i = 0; i < 16; ++i) {
      const float e = fmaf(-(tiny_magnitude(v[i], r) * kUp126), s, v[i]);
      error = fmaf(e, e, error);
    }
    if (error > with_margin(least)) continue;
    close = (with_margin(error) < least ? 0u : close) | 1u << j;
    least = fminf(least, error);
  }
  if (!(close & (close - 1u))) return 31 - __clz(static_cast<int>(close));
  int best = 0;
  double least_exact = 0.0;
  bool none = true;
#pragma unroll 1
  for (int j = 0; j < g16::kCandidates; ++j) {
    if (!(close >> j & 1u)) continue;
    const double e = exact_error(magnitude, g16::u_value(lo + j));
    if (none || e < least_exact) least_exact = e, best = j;
    none = false;
  }
  return best;
}

CKV_DEVICE Choice choose(const float* v) {
  float magnitude[16];
  uint32_t signs[2] = {0u, 0u};
  for (int i = 0; i < 16; ++i) {
    magnitude[i] = float_of(bits_of(v[i]) & 0x7FFFFFFFu);
    signs[i / 8] |= (bits_of(v[i]) >> 28 & 8u) << 4 * (i % 8);
  }
  const float a = float_of(segment_amax_bits(v));
  Choice best = {a == 0.0f ? g16::kZeroGroup : g16::kTinyGroup, {0u, 0u}};
  if (a < g16::kTiny) return best;
  const int lo = g16::free_low(a);
  best.u = lo + best_of(magnitude, lo);
  index_words(magnitude, g16::u_value(best.u), best.word);
  if (((best.word[0] | best.word[1]) & 0x11111111u) == 0) {
    const int u = g16::canonical_even(best.u);
    if (u != best.u) index_words(magnitude, g16::u_value(u), best.word);
    best.u = u;
  }
  best.word[0] = with_signs(best.word[0], signs[0]);
  best.word[1] = with_signs(best.word[1], signs[1]);
  return best;
}

// ---- pages ------------------------------------------------------------------------------------------------------------------

// The page's groups. kWide: rows are multiples of 16 channels, and group i is 16 channels from 16 * i on.
template <int F, bool kWide>
struct Groups {
  const uint8_t *codes, *scales;
  int D, lanes;

  CKV_DEVICE Groups(const uint8_t* all_codes, const uint8_t* all_scales, const SlotShape& shape) : D(shape.D), lanes(shape.g16) {
    codes = all_codes + static_cast<int64_t>(blockIdx.x) * shape.T * code_row_bytes(F, shape.D);
    scales = all_scales + static_cast<int64_t>(blockIdx.x) * shape.T * scale_row_bytes(F, shape.D);
  }
  CKV_DEVICE int length(int i) const { return kWide ? 16 : D - i % lanes * 16 < 16 ? D - i % lanes * 16 : 16; }
  CKV_DEVICE int nibbles_at(int i) const { return kWide ? 8 * i : (i / lanes * D + i % lanes * 16) / 2; }

  CKV_DEVICE void values(int i, float* v) const {
    if constexpr (kWide) {
      Packed<F> q;
      q.load(codes + i * Packed<F>::kBytes);
      q.values(scale_value<F>(load_scale<F>(scales, scale_index<F>(i, lanes))), v);
    } else {
      const int row = i / lanes;
      load_short_segment<F>(codes + row * code_row_bytes(F, D), scales + row * scale_row_bytes(F, D), i % lanes * 16, length(i), v);
    }
  }
};

// What the search has loaded ahead of its use.
template <int F, bool kWide>
struct Loaded {
  Packed<F> q;
  uint32_t raw_scale;

  CKV_DEVICE void load(const Groups<F, kWide>& page, int i) {
    q.load(page.codes + i * Packed<F>::kBytes);
    raw_scale = load_scale<F>(page.scales, scale_index<F>(i, page.lanes));
  }
  // Largest magnitude of the group (bits); `choice` is set where that is finite and not too large.
  CKV_DEVICE uint32_t search(const Groups<F, kWide>&, int, ShiftFactors by, Choice* choice) const {
    const float s = scale_value<F>(raw_scale);
    if constexpr (F == CKV_INT8) {
      float tiny[16];
      for (int i = 0; i < 4; ++i) codes_to_tiny(q.word[i], tiny + 4 * i);
      const uint32_t amax = bits_of(largest_code(tiny) * s) & 0x7FFFFFFFu;
      if (!not_finite(amax)) *choice = choose(q.word, s, by);
      return amax;
    } else {
      float v[16];
      q.values(s, v);
      const uint32_t amax = segment_amax_bits(v);
      if (amax <= bits_of(g16::kHuge)) *choice = choose(v);
      return amax;
    }
  }
};
template <int F>
struct Loaded<F, false> {
  CKV_DEVICE void load(const Groups<F, false>&, int) {}
  CKV_DEVICE uint32_t search(const Groups<F, false>& page, int i, ShiftFactors, Choice* choice) const {
    float v[16];
    page.values(i, v);
    const uint32_t amax = segment_amax_bits(v);
    if (amax <= bits_of(g16::kHuge)) *choice = choose(v);
    return amax;
  }
};

// A group below the page's normal range chooses again among the E4M3 numbers. Writes its nibbles, returns its scale byte.
template <int F, bool kWide>
CKV_DEVICE uint8_t recode(const Groups<F, kWide>& page, int i, float P, uint8_t* nibbles) {
  float v[16], magnitude[16];
  uint32_t word[2], signs[2] = {0u, 0u};
  page.values(i, v);
  for (int c = 0; c < 16; ++c) {
    magnitude[c] = float_of(bits_of(v[c]) & 0x7FFFFFFFu);
    signs[c / 8] |= (bits_of(v[c]) >> 28 & 8u) << 4 * (c % 8);
  }
  const g16::Range range = g16::coded_range(float_of(segment_amax_bits(v)), P);
  int best = range.lo;
  double least = 0.0;
#pragma unroll 1
  for (int c = range.lo; c <= range.hi; ++c) {
    const double e = exact_error(magnitude, e4m3_to_float(static_cast<uint8_t>(c)) * P);
    if (c == range.lo || e < least) least = e, best = c;
  }
  index_words(magnitude, e4m3_to_float(static_cast<uint8_t>(best)) * P, word);
  for (int half = 0; half < 2; ++half) word[half] = with_signs(word[half], signs[half]);
  store_nibbles<kWide>(word, page.length(i), nibbles + page.nibbles_at(i));
  return static_cast<uint8_t>(best);
}

template <int F, bool kWide>
CKV_KERNEL encode_kernel(const uint8_t* codes, const uint8_t* scales, SlotShape shape, ShiftFactors by, uint8_t* slots, int64_t stride,
                         int32_t* valid) {
  CKV_SHARED(uint16_t, kept, kKept);
  CKV_SHARED(int, u_max, 1);
  CKV_SHARED(int, page_amax, 1);
  if (threadIdx.x == 0) u_max[0] = 0, page_amax[0] = 0;
  __syncthreads();
  const Groups<F, kWide> page(codes, scales, shape);
  uint8_t *slot = slots + blockIdx.x * stride, *nibbles = slot + sizeof(SlotHeader), *scale_bytes = slot + shape.scales_at;
  const int total = shape.T * shape.g16, thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const bool words = shape.scales_at % 4 == 0;
  bool refused = false, zero = false;
  int exponent = 0;
  float P = 1.0f;
  // One turn, unless the page has more groups than can be kept: then those of later turns are searched once more.
#pragma unroll 1
  for (int begin = 0; begin < total && !refused; begin += kKept) {
    const int kept_end = total - begin < kKept ? total : begin + kKept, end = begin ? kept_end : total;
    uint32_t my_u = 0, my_amax = 0;
    Loaded<F, kWide> now, next;
    if (begin + thread < end) now.load(page, begin + thread);
#pragma unroll 1
    for (int i = begin + thread; i < end; i += threads) {
      if (i + threads < end) next.load(page, i + threads);  // under way while this group is searched
      Choice choice = {g16::kTinyGroup, {0u, 0u}};
      my_amax = larger(my_amax, now.search(page, i, by, &choice));
      my_u = larger(my_u, static_cast<uint32_t>(choice.u));
      store_nibbles<kWide>(choice.word, page.length(i), nibbles + page.nibbles_at(i));
      if (i < kept_end) kept[i - begin] = static_cast<uint16_t>(choice.u);
      now = next;
    }
    my_u = max_of_lanes<32>(my_u), my_amax = max_of_lanes<32>(my_amax);
    if (thread % 32 == 0) {
      atomicMax(u_max, static_cast<int>(my_u));
      atomicMax(page_amax, static_cast<int>(my_amax));
    }
    __syncthreads();
    refused = static_cast<uint32_t>(page_amax[0]) > bits_of(g16::kHuge), zero = u_max[0] < g16::kFirstU;
    exponent = zero ? 127 : g16::page_exponent(u_max[0]);
    P = g16::page_scale(exponent);
    // Four scale bytes per thread, in one store where they are aligned.
#pragma unroll 1
    for (int first = begin + 4 * thread; first < kept_end && !refused; first += 4 * threads) {
      uint32_t bytes = 0;
      const int count = kept_end - first < 4 ? kept_end - first : 4;
#pragma unroll 1
      for (int k = 0; k < count; ++k) {
        const int u = kept[first + k - begin];
        uint8_t byte = u == g16::kZeroGroup || zero ? g16::kZeroByte : g16::normal_byte(u, exponent);
        if (!byte) byte = recode<F, kWide>(page, first + k, P, nibbles);
        bytes |= static_cast<uint32_t>(byte) << 8 * k;
        if (!words || count < 4) scale_bytes[first + k] = byte;
      }
      if (words && count == 4) *reinterpret_cast<uint32_t*>(scale_bytes + first) = bytes;
    }
    __syncthreads();  // before u of the next turn
  }
  if (thread == 0) store_header(slot, kVersion, kFlagValid, bits_of(P));
  finish_slot(slot, shape, refused, valid + blockIdx.x);
}

inline int launch_encode(const ckv_plane_desc& d, const void* codes, const void* scales, uint8_t* slots, int64_t stride, int32_t* valid,
                         void* stream) {
  const SlotShape shape(d.page_tokens, d.head_dim);
  const uint8_t *c = static_cast<const uint8_t*>(codes), *s = static_cast<const uint8_t*>(scales);
  const unsigned grid = static_cast<unsigned>(d.n), block = block_for(static_cast<int64_t>(shape.T) * shape.g16, 2);
  with_format(d.format, [&](auto tag) {
    constexpr int F = decltype(tag)::value;
    if constexpr ((kAccepts >> F & 1u) != 0) {
      if (shape.D % 16 == 0)
        CKV_LAUNCH((encode_kernel<F, true>), grid, block, stream, c, s, shape, ShiftFactors{}, slots, stride, valid);
      else
        CKV_LAUNCH((encode_kernel<F, false>), grid, block, stream, c, s, shape, ShiftFactors{}, slots, stride, valid);
    }
  });
  return launch_status();
}

}  // namespace e2m1_g16
}  // namespace ckv
