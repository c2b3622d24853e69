// Device kernels of rans-e2m1: one warp per head-page, one lane per stream. Warps of a block share nothing, so there is no block-wide
// barrier. A slot with a wrong header or a damaged stream gives NaN, never zeros.
#pragma once

#include "codec_device.h"
#include "e2m1_g64_page.h"
#include "entropy_slot.h"

namespace ckv {
namespace rans_e2m1 {

constexpr uint16_t kVersion = 1;
constexpr int kWarps = kBlock / 32;
static_assert(kStreams == 32, "a lane is a stream");

CKV_DEVICE int lane_id() { return static_cast<int>(threadIdx.x % 32); }
CKV_DEVICE int warp_id() { return static_cast<int>(threadIdx.x / 32); }
CKV_DEVICE int64_t warp_page() { return static_cast<int64_t>(blockIdx.x) * kWarps + warp_id(); }

CKV_DEVICE int64_t warp_max(int64_t x) {
  for (int step = 16; step; step /= 2) {
    const int64_t other = __shfl_xor_sync(kFullWarp, x, step);
    x = other > x ? other : x;
  }
  return x;
}

// ---- encode -----------------------------------------------------------------------------------------------------------------

// Nibbles of 16 channels, four bits each from the low end on. `byte` is the scale byte of the channels.
template <int F, bool kWide>
CKV_DEVICE_CALL uint64_t segment_nibbles(const uint8_t* code_row, const uint8_t* scale_row, int ch, int len, uint8_t byte) {
  if constexpr (F == CKV_NVFP4) {
    uint64_t word = 0;
    if constexpr (kWide) {
      const uint2 q = *reinterpret_cast<const uint2*>(code_row + ch / 2);
      word = static_cast<uint64_t>(q.y) << 32 | q.x;
    } else {
      for (int i = 0; i < len / 2; ++i) word |= static_cast<uint64_t>(code_row[ch / 2 + i]) << 8 * i;
    }
    return word;
  } else {
    float v[16];
    load_segment<F, kWide>(code_row, scale_row, ch, len, v);
    const float s = e4m3_to_float(byte);
    uint32_t word[2] = {0, 0};
    for (int i = 0; i < 16; ++i) word[i / 8] |= nibble_of<E2M1>(v[i], s) << 4 * (i % 8);
    return static_cast<uint64_t>(word[1]) << 32 | word[0];
  }
}

// Largest magnitude (bits) of the channels [ch, ch + 16) of a row.
template <int F, bool kWide>
CKV_DEVICE_CALL uint32_t segment_amax(const uint8_t* code_row, const uint8_t* scale_row, int ch, int len) {
  float v[16];
  load_segment<F, kWide>(code_row, scale_row, ch, len, v);
  return segment_amax_bits(v);
}

// Bytes of one stream, kept while there is room, counted on past it.
struct Append {
  uint8_t* out;
  int64_t capacity, size;
  CKV_DEVICE void operator()(uint8_t byte) {
    if (size < capacity) out[size] = byte;
    ++size;
  }
};

CKV_DEVICE_CALL void frequencies_of(const uint32_t* counts, uint16_t* freq) { rans::frequencies(counts, freq); }

// Nibble counts of the rows [first, last) by the whole warp -> every lane's `counts`; false where a value cannot be held.
template <int F, bool kWide>
CKV_DEVICE bool count_half(const uint8_t* codes, const uint8_t* scales, const EntropyShape& at, int first, int last, uint32_t* shared,
                           uint32_t* counts) {
  const int64_t code_row = code_row_bytes(F, at.D), scale_row = scale_row_bytes(F, at.D);
  const int lane = lane_id(), lanes = 4 * ceil_div(at.D, 64);
  for (int s = 0; s < rans::kSymbols; ++s) shared[32 * s + lane] = 0;
  bool bad = false;
  for (int64_t base = 0; base < static_cast<int64_t>(last - first) * lanes; base += 32) {  // whole warps: four lanes share a group
    const int64_t i = base + lane;
    const int row = first + static_cast<int>(i / lanes), j = static_cast<int>(i % lanes), ch = 16 * j;
    const bool active = row < last && j < at.g16;
    const int len = active ? (at.D - ch < 16 ? at.D - ch : 16) : 0;
    const uint8_t *c = codes + row * code_row, *s = scales + row * scale_row;
    uint8_t byte = 0;
    if constexpr (F == CKV_NVFP4) {
      if (active) bad = bad || not_a_scale(s[j]);
    } else {
      const uint32_t amax = max_of_four_lanes(active ? segment_amax<F, kWide>(c, s, ch, len) : 0);
      bad = bad || not_finite(amax);
      byte = group_scale<E2M1>(float_of(amax));
    }
    if (!active) continue;
    const uint64_t word = segment_nibbles<F, kWide>(c, s, ch, len, byte);
    for (int k = 0; k < len; ++k) ++shared[32 * static_cast<int>(word >> 4 * k & 15u) + lane];
  }
  for (int s = 0; s < rans::kSymbols; ++s) {
    uint32_t sum = shared[32 * s + lane];
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(kFullWarp, sum, step);
    counts[s] = sum;
  }
  return !__any_sync(kFullWarp, bad);
}

// One lane's stream, from its last group of 64 channels to its first; scale bytes go to `tail` unless it is null.
template <int F, bool kWide>
CKV_DEVICE void encode_lane(const uint8_t* codes, const uint8_t* scales, const EntropyShape& at, int g, const rans::Symbol* symbol,
                            uint8_t* tail, Append& put) {
  const int64_t code_row = code_row_bytes(F, at.D), scale_row = scale_row_bytes(F, at.D);
  uint32_t x = rans::kLow;
  for (int row = at.first_row(g + 1) - 1; row >= at.first_row(g); --row) {
    const uint8_t *c = codes + row * code_row, *s = scales + row * scale_row;
    for (int group = (at.g16 - 1) / 4; group >= 0; --group) {
      const int from = 4 * group, to = from + 4 < at.g16 ? from + 4 : at.g16;
      uint8_t byte = 0;
      if constexpr (F != CKV_NVFP4) {
        uint32_t amax = 0;
        for (int j = from; j < to; ++j) {
          const uint32_t a = segment_amax<F, kWide>(c, s, 16 * j, at.D - 16 * j < 16 ? at.D - 16 * j : 16);
          amax = a > amax ? a : amax;
        }
        byte = group_scale<E2M1>(float_of(amax));
      }
      for (int j = to - 1; j >= from; --j) {
        const int len = at.D - 16 * j < 16 ? at.D - 16 * j : 16;
        if constexpr (F == CKV_NVFP4) byte = s[j];
        if (tail) tail[static_cast<int64_t>(row) * at.g16 + j] = byte;
        const uint64_t word = segment_nibbles<F, kWide>(c, s, 16 * j, len, byte);
        for (int k = len - 1; k >= 0; --k) x = rans::push(x, symbol[word >> 4 * k & 15u], put);
      }
    }
  }
  for (int i = 0; i < rans::kStateBytes; ++i) put(static_cast<uint8_t>(x >> 8 * i));
}

// Slots and validity words into `slots` and `found`; without slots, lengths into `found`. One kernel for both, because it takes
// long to compile.
template <int F, bool kWide>
CKV_KERNEL encode_kernel(const uint8_t* codes, const uint8_t* scales, int64_t n, EntropyShape at, uint8_t* slots, int64_t stride, int32_t* found) {
  CKV_SHARED(uint32_t, all_counts, kWarps * rans::kSymbols * 32);
  CKV_SHARED(rans::Symbol, all_symbols, kWarps * kHalves * rans::kSymbols);
  const int64_t page = warp_page();
  if (page >= n) return;
  const int lane = lane_id();
  rans::Symbol* symbols = all_symbols + warp_id() * kHalves * rans::kSymbols;
  const uint8_t* page_codes = codes + page * at.T * code_row_bytes(F, at.D);
  const uint8_t* page_scales = scales + page * at.T * scale_row_bytes(F, at.D);
  uint8_t* slot = slots ? slots + page * stride : nullptr;
  bool ok = true;
  for (int half = 0; half < kHalves; ++half) {
    uint32_t counts[rans::kSymbols];
    uint16_t freq[rans::kSymbols];
    const int first = at.first_row(half * kStreamsPerHalf), last = at.first_row((half + 1) * kStreamsPerHalf);
    ok = count_half<F, kWide>(page_codes, page_scales, at, first, last, all_counts + warp_id() * rans::kSymbols * 32, counts) && ok;
    frequencies_of(counts, freq);
    if (lane == 0) {
      uint32_t start = 0;
      for (int s = 0; s < rans::kSymbols; ++s) {
        symbols[half * rans::kSymbols + s] = rans::make_symbol(freq[s], start);
        start += freq[s];
      }
    }
  }
  __syncwarp();
  // Each stream is written where it can have its whole budget, and moved down to its neighbour once all lengths are known.
  const int64_t budget = slots ? at.budget(stride) : 0, begin = static_cast<int64_t>(sizeof(EntropyHeader)) + lane * budget;
  Append put = {slots ? slot + begin : nullptr, budget, 0};
  if (ok && at.rows_of(lane))
    encode_lane<F, kWide>(page_codes, page_scales, at, lane, symbols + lane / kStreamsPerHalf * rans::kSymbols,
                          slots ? slot + stride - at.tail : nullptr, put);
  const int64_t longest = warp_max(put.size);
  if (!slots) {
    if (lane == 0) found[page] = ok ? static_cast<int32_t>(at.bytes_for(longest)) : kNeverFits;
    return;
  }
  ok = ok && longest <= budget;
  __syncwarp();
  if (!ok) {
    for (int64_t i = lane; i < stride; i += 32) slot[i] = 0;
    if (lane == 0) found[page] = 0;
    return;
  }
  const uint32_t size = static_cast<uint32_t>(put.size);
  uint32_t end = size;  // of this lane's stream, by a scan over the lanes
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t below = __shfl_up_sync(kFullWarp, end, step);
    end += lane >= step ? below : 0;
  }
  end += sizeof(EntropyHeader);
  for (int g = 1; g < at.streams; ++g) {
    const uint32_t bytes = __shfl_sync(kFullWarp, size, g), to = __shfl_sync(kFullWarp, end, g) - bytes;
    const int64_t from = static_cast<int64_t>(sizeof(EntropyHeader)) + g * budget;
    for (uint32_t done = 0; done < bytes; done += 32) {  // never upwards, so 32 bytes at a time are safe
      const bool mine = done + static_cast<uint32_t>(lane) < bytes;
      const uint8_t byte = mine ? slot[from + done + lane] : static_cast<uint8_t>(0);
      __syncwarp();
      if (mine) slot[to + done + lane] = byte;
      __syncwarp();
    }
  }
  const int64_t used = __shfl_sync(kFullWarp, end, 31);
  for (int64_t i = used + lane; i < stride - at.tail; i += 32) slot[i] = 0;
  EntropyHeader* header = reinterpret_cast<EntropyHeader*>(slot);
  HalfHeader& mine = header->half[lane / kStreamsPerHalf];
  const int t = lane % kStreamsPerHalf;
  mine.freq[t] = symbols[lane].freq;
  mine.offset[t] = end - size;
  if (t == kStreamsPerHalf - 1) mine.offset[t + 1] = end;
  for (int i = lane; i < 28 * kHalves; i += 32) header->half[i / 28].reserved[i % 28] = 0;
  for (int i = lane; i < 56; i += 32) header->reserved[i] = 0;
  if (lane == 0) {
    header->magic = kEntropyMagic;
    header->version = kVersion;
    header->flags = kFlagValid;
    found[page] = 1;
  }
}

inline unsigned blocks_for(int64_t n) { return static_cast<unsigned>((n + kWarps - 1) / kWarps); }

inline int launch_encode(const ckv_plane_desc& d, const void* codes, const void* scales, uint8_t* slots, int64_t stride, int32_t* found, void* stream) {
  const EntropyShape at(d.page_tokens, d.head_dim);
  const uint8_t *c = static_cast<const uint8_t*>(codes), *s = static_cast<const uint8_t*>(scales);
  with_format(d.format == CKV_ISO3 ? CKV_NVFP4 : d.format, [&](auto tag) {  // stored nibbles are stored nibbles
    constexpr int F = decltype(tag)::value == CKV_ISO3 ? CKV_NVFP4 : decltype(tag)::value;
    if (d.head_dim % 16 == 0)
      CKV_LAUNCH((encode_kernel<F, true>), blocks_for(d.n), kBlock, stream, c, s, d.n, at, slots, stride, found);
    else
      CKV_LAUNCH((encode_kernel<F, false>), blocks_for(d.n), kBlock, stream, c, s, d.n, at, slots, stride, found);
  });
  return launch_status();
}

// ---- decode -----------------------------------------------------------------------------------------------------------------
// Where decoded nibbles go: put() takes 16 channels of one row (`len` of them exist), scales() the page's scale bytes, poison()
// fills the page with NaN. The last two are called by all lanes of a warp.

template <class Alphabet>
struct FloatOut {
  float* out;
  CKV_DEVICE FloatOut(void* codes, void*, const EntropyShape& at, int64_t page) : out(static_cast<float*>(codes) + page * at.T * at.D) {}
  template <bool kWide>
  CKV_DEVICE void put(const EntropyShape& at, int row, int ch, int len, uint64_t word, uint8_t byte) {
    const float s = e4m3_to_float(byte);
    float* to = out + static_cast<int64_t>(row) * at.D + ch;
    float v[16];
    for (int i = 0; i < 16; ++i) v[i] = nibble_value<Alphabet>(static_cast<uint32_t>(word >> 4 * i) & 15u, s);
    if constexpr (kWide)
      for (int i = 0; i < 16; i += 4) reinterpret_cast<float4*>(to)[i / 4] = make_float4(v[i], v[i + 1], v[i + 2], v[i + 3]);
    else
      for (int i = 0; i < len; ++i) to[i] = v[i];
  }
  CKV_DEVICE void scales(const EntropyShape&, const uint8_t*) {}
  CKV_DEVICE void poison(const EntropyShape& at) {
    for (int64_t i = lane_id(); i < static_cast<int64_t>(at.T) * at.D; i += 32) out[i] = float_of(0x7FC00000u);
  }
};

// Slot values have at most 6 significant bits: dropping the low half is exact.
struct Bf16Out {
  uint16_t* out;
  CKV_DEVICE Bf16Out(void* codes, void*, const EntropyShape& at, int64_t page) : out(static_cast<uint16_t*>(codes) + page * at.T * at.D) {}
  template <bool kWide>
  CKV_DEVICE void put(const EntropyShape& at, int row, int ch, int len, uint64_t word, uint8_t byte) {
    const float s = e4m3_to_float(byte);
    uint16_t* to = out + static_cast<int64_t>(row) * at.D + ch;
    uint32_t pair[8];
    for (int i = 0; i < 8; ++i) {
      const uint32_t low = static_cast<uint32_t>(word >> 8 * i) & 15u, high = static_cast<uint32_t>(word >> (8 * i + 4)) & 15u;
      pair[i] = bits_of(nibble_value<E2M1>(low, s)) >> 16 | (bits_of(nibble_value<E2M1>(high, s)) & 0xFFFF0000u);
    }
    if constexpr (kWide)
      for (int i = 0; i < 2; ++i) reinterpret_cast<uint4*>(to)[i] = make_uint4(pair[4 * i], pair[4 * i + 1], pair[4 * i + 2], pair[4 * i + 3]);
    else
      for (int i = 0; i < len; ++i) to[i] = static_cast<uint16_t>(pair[i / 2] >> 16 * (i % 2));
  }
  CKV_DEVICE void scales(const EntropyShape&, const uint8_t*) {}
  CKV_DEVICE void poison(const EntropyShape& at) {
    for (int64_t i = lane_id(); i < static_cast<int64_t>(at.T) * at.D; i += 32) out[i] = static_cast<uint16_t>(0x7FC0);
  }
};

// Codes 2 * E2M1, scale s / 2.
struct Int8Out {
  uint8_t* out;
  uint16_t* half;
  CKV_DEVICE Int8Out(void* codes, void* scales, const EntropyShape& at, int64_t page)
      : out(static_cast<uint8_t*>(codes) + page * at.T * at.D), half(static_cast<uint16_t*>(scales) + page * at.T * ceil_div(at.D, 64)) {}
  template <bool kWide>
  CKV_DEVICE void put(const EntropyShape& at, int row, int ch, int len, uint64_t word, uint8_t) {
    uint8_t* to = out + static_cast<int64_t>(row) * at.D + ch;
    uint32_t packed[4] = {0, 0, 0, 0};
    for (int i = 0; i < 16; ++i) {
      const uint32_t n = static_cast<uint32_t>(word >> 4 * i) & 15u;
      const int twice = E2M1::twice(static_cast<int>(n & 7u));
      packed[i / 4] |= (static_cast<uint32_t>(n & 8u ? -twice : twice) & 255u) << 8 * (i % 4);
    }
    if constexpr (kWide)
      *reinterpret_cast<uint4*>(to) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
    else
      for (int i = 0; i < len; ++i) to[i] = static_cast<uint8_t>(packed[i / 4] >> 8 * (i % 4));
  }
  CKV_DEVICE void scales(const EntropyShape& at, const uint8_t* bytes) {
    const int groups = ceil_div(at.D, 64);
    for (int64_t i = lane_id(); i < static_cast<int64_t>(at.T) * groups; i += 32) {
      const uint8_t byte = bytes[i / groups * at.g16 + i % groups * 4];
      half[i] = (byte & 0x7Fu) == 0x7Fu ? static_cast<uint16_t>(0x7E00 | (byte & 0x80u) << 8) : fp16_from_float(e4m3_to_float(byte) * 0.5f);
    }
  }
  CKV_DEVICE void poison(const EntropyShape& at) {
    for (int64_t i = lane_id(); i < static_cast<int64_t>(at.T) * at.D; i += 32) out[i] = 0;
    for (int64_t i = lane_id(); i < static_cast<int64_t>(at.T) * ceil_div(at.D, 64); i += 32) half[i] = static_cast<uint16_t>(0x7E00);
  }
};

// nvfp4 and iso3 planes: as they were.
struct NibbleOut {
  uint8_t *out, *bytes;
  CKV_DEVICE NibbleOut(void* codes, void* scales, const EntropyShape& at, int64_t page)
      : out(static_cast<uint8_t*>(codes) + page * at.T * (at.D / 2)), bytes(static_cast<uint8_t*>(scales) + page * at.tail) {}
  template <bool kWide>
  CKV_DEVICE void put(const EntropyShape& at, int row, int ch, int len, uint64_t word, uint8_t) {
    uint8_t* to = out + static_cast<int64_t>(row) * (at.D / 2) + ch / 2;
    if constexpr (kWide)
      *reinterpret_cast<uint2*>(to) = make_uint2(static_cast<uint32_t>(word), static_cast<uint32_t>(word >> 32));
    else
      for (int i = 0; i < len / 2; ++i) to[i] = static_cast<uint8_t>(word >> 8 * i);
  }
  CKV_DEVICE void scales(const EntropyShape& at, const uint8_t* tail) {
    for (int64_t i = lane_id(); i < at.tail; i += 32) bytes[i] = tail[i];
  }
  CKV_DEVICE void poison(const EntropyShape& at) {
    for (int64_t i = lane_id(); i < static_cast<int64_t>(at.T) * (at.D / 2); i += 32) out[i] = 0;
    for (int64_t i = lane_id(); i < at.tail; i += 32) bytes[i] = 0x7F;
  }
};

template <class Out, bool kWide>
CKV_KERNEL decode_kernel(const uint8_t* slots, int64_t stride, int64_t n, EntropyShape at, void* codes, void* scales) {
  constexpr int kPlaces = static_cast<int>(rans::kTotal) / 2;            // two symbols to a byte
  CKV_SHARED(uint8_t, all_places, kWarps * kHalves * kPlaces);           // which symbol a place belongs to
  CKV_SHARED(uint32_t, all_symbols, kWarps * kHalves * rans::kSymbols);  // frequency | start << 16
  const int64_t page = warp_page();
  if (page >= n) return;
  const int lane = lane_id(), half = lane / kStreamsPerHalf, t = lane % kStreamsPerHalf;
  const uint8_t* slot = slots + page * stride;
  const EntropyHeader& header = *reinterpret_cast<const EntropyHeader*>(slot);
  Out out(codes, scales, at, page);
  if (!entropy_header_ok(header, at, kVersion, stride)) return out.poison(at);  // all lanes agree

  uint8_t* places = all_places + (warp_id() * kHalves + half) * kPlaces;
  uint32_t* symbols = all_symbols + (warp_id() * kHalves + half) * rans::kSymbols;
  uint32_t start = 0;
  for (int s = 0; s < t; ++s) start += header.half[half].freq[s];
  symbols[t] = header.half[half].freq[t] | start << 16;
  __syncwarp();
  constexpr int kMine = kPlaces / kStreamsPerHalf;  // each lane fills its share of its half's table
  uint32_t s = 0;
  for (int i = t * kMine; i < (t + 1) * kMine; ++i) {
    uint32_t both = 0;
    for (uint32_t k = 0; k < 2; ++k) {
      while ((symbols[s] >> 16) + (symbols[s] & 0xFFFFu) <= static_cast<uint32_t>(2 * i) + k) ++s;
      both |= s << 4 * k;
    }
    places[i] = static_cast<uint8_t>(both);
  }
  __syncwarp();

  const uint8_t* tail_bytes = slot + stride - at.tail;
  uint32_t x;
  rans::Tail tail;
  bool ok = rans::open(slot + header.half[half].offset[t], slot + header.half[half].offset[t + 1], static_cast<int64_t>(at.rows_of(lane)) * at.D,
                       &x, &tail);
  for (int row = at.first_row(lane); ok && row < at.first_row(lane + 1); ++row)
    for (int j = 0; j < at.g16; ++j) {
      const int len = at.D - 16 * j < 16 ? at.D - 16 * j : 16;
      uint64_t word = 0;
      for (int k = 0; k < len; ++k) {
        const uint32_t place = x & (rans::kTotal - 1), symbol = places[place / 2] >> 4 * (place & 1u) & 15u;
        const uint32_t entry = symbols[symbol];
        x = rans::pull(x, entry & 0xFFFFu, entry >> 16, tail);
        word |= static_cast<uint64_t>(symbol) << 4 * k;
      }
      out.template put<kWide>(at, row, 16 * j, len, word, tail_bytes[static_cast<int64_t>(row) * at.g16 + j]);
    }
  ok = ok && rans::sound(x, tail);
  __syncwarp();
  if (__any_sync(kFullWarp, !ok)) return out.poison(at);
  out.scales(at, tail_bytes);
}

template <class Out>
int launch_decode(const ckv_plane_desc& d, const uint8_t* slots, int64_t stride, void* codes, void* scales, void* stream) {
  const EntropyShape at(d.page_tokens, d.head_dim);
  if (d.head_dim % 16 == 0)
    CKV_LAUNCH((decode_kernel<Out, true>), blocks_for(d.n), kBlock, stream, slots, stride, d.n, at, codes, scales);
  else
    CKV_LAUNCH((decode_kernel<Out, false>), blocks_for(d.n), kBlock, stream, slots, stride, d.n, at, codes, scales);
  return launch_status();
}

}  // namespace rans_e2m1
}  // namespace ckv
