// Device-side access to planes and slots: 16 channels at a time in registers, 16-byte accesses where the layout allows them.
// Every kernel works on one head-page per block, so that offsets inside a page fit 32 bits.
#pragma once

#include "bits_device.h"
#include "plane.h"

namespace ckv {

// 16 channels as they lie in memory: 8, 16 or 32 aligned bytes. Rows are multiples of 16 channels.
template <int F>
struct Packed {
  static constexpr int kBytes = F == CKV_NVFP4 || F == CKV_ISO3 ? 8 : F <= CKV_FP16 ? 32 : 16;
  uint32_t word[kBytes / 4];

  CKV_DEVICE void load(const uint8_t* from) {
    if constexpr (kBytes == 8) {
      const uint2 q = *reinterpret_cast<const uint2*>(from);
      word[0] = q.x, word[1] = q.y;
    } else {
      for (int i = 0; i < kBytes / 16; ++i) {
        const uint4 q = reinterpret_cast<const uint4*>(from)[i];
        word[4 * i] = q.x, word[4 * i + 1] = q.y, word[4 * i + 2] = q.z, word[4 * i + 3] = q.w;
      }
    }
  }
  CKV_DEVICE void clear() {
    for (int i = 0; i < kBytes / 4; ++i) word[i] = 0;
  }
  CKV_DEVICE void values(float s, float* v) const {
    typename Source<F>::Code raw[16];  // memcpy, not a cast: the registers change their type here
    memcpy(raw, word, kBytes);
    for (int i = 0; i < 16; ++i) v[i] = Source<F>::value(raw, i, s);
  }
};

// Where the scale of segment i (16 channels) of a page is: its index among the page's scales. `lanes` segments make a row.
template <int F>
CKV_DEVICE int scale_index(int i, int lanes) {
  if constexpr (F == CKV_INT8) return i / lanes * ((lanes + 3) / 4) + i % lanes / 4;
  if constexpr (F == CKV_FP8) return i / lanes;
  return i;
}

// The scale as it lies in memory, apart from its value, so that many loads can be under way at once.
template <int F>
CKV_DEVICE uint32_t load_scale(const uint8_t* page_scales, int index) {
  if constexpr (F == CKV_INT8 || F == CKV_FP8) return reinterpret_cast<const uint16_t*>(page_scales)[index];
  if constexpr (F == CKV_NVFP4 || F == CKV_ISO3) return page_scales[index];
  return 0;
}
template <int F>
CKV_DEVICE float scale_value(uint32_t raw) {
  if constexpr (F == CKV_INT8 || F == CKV_FP8) return fp16_to_float(static_cast<uint16_t>(raw));
  if constexpr (F == CKV_NVFP4 || F == CKV_ISO3) return e4m3_to_float(static_cast<uint8_t>(raw));
  return 1.0f;
}

// Rows of any even length: element by element, channels past `len` are zero.
template <int F>
CKV_DEVICE void load_short_segment(const uint8_t* code_row, const uint8_t* scale_row, int ch, int len, float* v) {
  const float s = Source<F>::scale(scale_row, ch);
  for (int i = 0; i < 16; ++i) v[i] = i < len ? Source<F>::value(code_row, ch + i, s) : 0.0f;
}

// 16 channels of one row from `ch` on; kWide: rows are multiples of 16 channels.
template <int F, bool kWide>
CKV_DEVICE void load_segment(const uint8_t* code_row, const uint8_t* scale_row, int ch, int len, float* v) {
  if constexpr (kWide) {
    Packed<F> q;
    q.load(code_row + code_row_bytes(F, ch));
    q.values(Source<F>::scale(scale_row, ch), v);
  } else {
    load_short_segment<F>(code_row, scale_row, ch, len, v);
  }
}

CKV_DEVICE uint32_t segment_amax_bits(const float* v) {
  uint32_t most = 0;
  for (int i = 0; i < 16; ++i) most = larger(most, bits_of(v[i]) & 0x7FFFFFFFu);
  return most;
}

// Nibbles of a segment to `out`, its first byte; len is even. kWide: 16 channels, at a multiple of 8 bytes.
template <bool kWide>
CKV_DEVICE void store_nibbles(const uint32_t* word, int len, uint8_t* out) {
  if constexpr (kWide) {
    *reinterpret_cast<uint2*>(out) = make_uint2(word[0], word[1]);
  } else {
    for (int i = 0; i < 8; ++i)  // constant bounds: `word` must stay in registers
      if (2 * i < len) out[i] = static_cast<uint8_t>(word[i / 4] >> 8 * (i % 4));
  }
}

// ---- slots: they start at multiples of 16 bytes -----------------------------------------------------------------------------

CKV_DEVICE void store_header(uint8_t* slot, uint16_t version, uint16_t flags, uint32_t page_scale_bits) {
  *reinterpret_cast<uint4*>(slot) = make_uint4(kSlotMagic, version | static_cast<uint32_t>(flags) << 16, page_scale_bits, 0u);
}

struct SlotCheck {
  uint16_t version, flags;

  CKV_DEVICE bool accepts(uint4 header) const {
    return header.x == kSlotMagic && header.y == (version | static_cast<uint32_t>(flags) << 16);
  }
};

// ---- block-wide copies ------------------------------------------------------------------------------------------------------

CKV_DEVICE bool aligned16(const void* a, const void* b) {
  return ((reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b)) & 15u) == 0;
}

// Copies `bytes` and hands every word (or, at an unaligned end, every byte) to `look` on the way.
template <class Look>
CKV_DEVICE void block_copy(uint8_t* to, const uint8_t* from, int bytes, const Look& look) {
  constexpr int kAtOnce = 4;
  const int whole = aligned16(to, from) ? bytes / 16 : 0, threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
  for (int base = thread; base < whole; base += kAtOnce * threads) {
    uint4 q[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u)
      if (base + u * threads < whole) q[u] = reinterpret_cast<const uint4*>(from)[base + u * threads];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u)
      if (base + u * threads < whole) {
        look(q[u].x, 4), look(q[u].y, 4), look(q[u].z, 4), look(q[u].w, 4);
        reinterpret_cast<uint4*>(to)[base + u * threads] = q[u];
      }
  }
#pragma unroll 1
  for (int i = 16 * whole + thread; i < bytes; i += threads) {
    look(from[i], 1);
    to[i] = from[i];
  }
}
CKV_DEVICE void block_copy(uint8_t* to, const uint8_t* from, int bytes) {
  block_copy(to, from, bytes, [](uint32_t, int) {});
}

CKV_DEVICE void block_fill(uint8_t* to, uint8_t value, int bytes) {
  const uint32_t word = value * 0x01010101u;
  const int whole = aligned16(to, to) ? bytes / 16 : 0, threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
#pragma unroll 1
  for (int i = thread; i < whole; i += threads) reinterpret_cast<uint4*>(to)[i] = make_uint4(word, word, word, word);
#pragma unroll 1
  for (int i = 16 * whole + thread; i < bytes; i += threads) to[i] = value;
}

// ---- launches ---------------------------------------------------------------------------------------------------------------

// Device pointers must be what the 16-byte accesses need; cudaMalloc gives more.
inline int check_aligned(const void* a, const void* b, const void* c) {
  const uintptr_t all = reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b) | reinterpret_cast<uintptr_t>(c);
  return all & 15u ? CKV_E_ALIGN : CKV_OK;
}

// Refuses what one grid cannot hold, beside the checks shared with the host.
inline int check_grid(const ckv_plane_desc* d) { return d->n > 0x7FFFFFFF ? CKV_E_SHAPE : CKV_OK; }

// Threads of a block that has `items` per page and takes `unroll` of them per thread at once. Small pages get small blocks, so
// that as many bytes are under way on a multiprocessor.
inline unsigned block_for(int64_t items, int unroll) {
  const int64_t threads = (items + unroll - 1) / unroll;
  return static_cast<unsigned>(threads >= kBlock ? kBlock : (threads + 31) / 32 * 32);
}

}  // namespace ckv
