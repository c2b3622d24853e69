// Decoding of codec ecq on the device: one warp per head-page, lane = lane of the coder. A slot that cannot be read gives NaN.
//
// A page is read once. Its row scales are known only at the end of its stream, so that the integers wait in the page's own output:
// as bytes at the end of it where they fit a byte, as the output's cells elsewhere. A second pass turns them into values.
#pragma once

#include "ecq_model_device.h"

namespace ckv {
namespace ecq {

constexpr int kDecodeWarps = 16;             // of a block
constexpr int64_t kMostShared = 99 << 10;  // bytes that a block can have on the smallest device

// A channel's state with the rounding of predicted() already in its mean.
struct Expectation {
  int32_t mean, spread;
  CKV_DEVICE Expectation(int32_t prior) : mean(512), spread(prior_spread(prior)) {}
  CKV_DEVICE Expectation() {}
  CKV_DEVICE int32_t predicted() const { return mean >> 10; }
  // class_of() of the spread, counted from kClassBias: the float of an integer below 2^23, without a conversion.
  CKV_DEVICE uint32_t biased_class() const {
    return bits_of(float_of(0x4B000008u + static_cast<uint32_t>(spread)) - 8388608.0f) >> 22;
  }
  CKV_DEVICE void learn(int32_t k, int32_t magnitude) {
    mean += k * 128 + 64 - (mean >> 3);
    spread += magnitude * 64 - (spread >> 4);
  }
};
constexpr int kClassBias = 260;

// One lane's end of a page's stream.
struct StreamReader {
  const DecodeTables& tables;
  const uint16_t* words;  // of the slot, from its start
  uint32_t at, last;      // the next word; the slot's last one, beyond which a damaged stream does not lead
  uint32_t x;             // coder state
  uint32_t below;         // lanes below this one

  CKV_DEVICE uint32_t word(uint32_t lanes) const {
    const uint32_t i = at + static_cast<uint32_t>(__popc(lanes & below));
    return words[i < last ? i : last];
  }

  CKV_DEVICE void refill(bool active) {
    const bool low = active && x < 1u << 16;
    const uint32_t lanes = __ballot_sync(kFullWarp, low);
    if (low) x = x << 16 | word(lanes);
    at += static_cast<uint32_t>(__popc(lanes));
  }

  // The next integer of a channel, by all lanes; idle where the channel does not exist. kClamp: see clamp_integer().
  template <bool kClamp>
  CKV_DEVICE int32_t next(Expectation& channel, bool active) {
    const uint32_t cls = channel.biased_class(), place = x & (kTotal - 1);
    uint32_t symbol = tables.first[(cls * kBins + (place >> 2)) - kClassBias * kBins];
    const uint32_t* entry = &tables.entry[cls * kEntries - kClassBias * kEntries];
    if ((entry[symbol + 1] >> kStartShift) + place >= kTotal) ++symbol;
    uint32_t e = entry[symbol], freq = e & (kTotal - 1), offset = (e >> kStartShift) + place - kTotal;
    const int32_t before = channel.predicted();
    int32_t k, magnitude;
    if (__any_sync(kFullWarp, offset >= freq)) {  // an escape, or the third or fourth symbol of four places
      while (freq && offset >= freq) e = entry[++symbol], freq = e & (kTotal - 1), offset = (e >> kStartShift) + place - kTotal;
      const bool escape = active && !freq;
      if (active) x = (freq ? freq : e >> kStartShift) * (x >> kBits) + offset;
      refill(active);
      k = before + static_cast<int32_t>(symbol) - kReach;
      const uint32_t escapes = __ballot_sync(kFullWarp, escape);
      if (escape) k = static_cast<int16_t>(word(escapes));
      at += static_cast<uint32_t>(__popc(escapes));
      const int32_t residual = k - before, a = residual < 0 ? -residual : residual;
      magnitude = a > kReach ? kReach : a;
    } else {
      if (active) x = freq * (x >> kBits) + offset;
      refill(active);
      const int32_t residual = static_cast<int32_t>(symbol) - kReach;
      k = before + residual;
      magnitude = residual < 0 ? -residual : residual;
    }
    if (kClamp) k = clamp_integer(k);
    channel.learn(k, magnitude);
    return k;
  }
};

// ---- a page's output ----------------------------------------------------------------------------------------------------------
// pair(): two values, rounded to bf16, as two cells.

struct FloatCells {
  using Cell = uint32_t;  // fp32
  static constexpr Cell kNaN = 0x7FC00000u;
  CKV_DEVICE static Cell hold(int32_t k) { return static_cast<Cell>(k); }
  CKV_DEVICE static int32_t held(Cell cell) { return static_cast<int32_t>(cell); }
  CKV_DEVICE static void pair(float a, float b, Cell& low, Cell& high) {
    const uint32_t both = bf16_pair(a, b);
    low = both << 16, high = both & 0xFFFF0000u;
  }
};
struct Bf16Cells {
  using Cell = uint16_t;
  static constexpr Cell kNaN = 0x7FC0u;
  CKV_DEVICE static Cell hold(int32_t k) { return static_cast<Cell>(k); }
  CKV_DEVICE static int32_t held(Cell cell) { return static_cast<int16_t>(cell); }
  CKV_DEVICE static void pair(float a, float b, Cell& low, Cell& high) {
    const uint32_t both = bf16_pair(a, b);
    low = static_cast<Cell>(both), high = static_cast<Cell>(both >> 16);
  }
};

// How a page's rows are scaled, lanes side by side: 32 rows at a time.
struct RowSteps {
  const uint8_t* slot;
  uint32_t x;  // the lanes' last states: row bytes of the first 64 rows
  int T, step;
  bool rows;
  CKV_DEVICE float of(int t) const {
    const uint32_t pair = __shfl_sync(kFullWarp, x, t / 2 % kLanes);
    const uint32_t byte = t < kRowsInStates ? pair >> 8 * (t & 1) & 255u : rows && t < T ? slot[kStreamAt + t - kRowsInStates] : 0u;
    return step_value(step - 2 * static_cast<int>(byte));
  }
};

// Bytes a lane holds per row, in words; pages of kSteps * 32 channels.
template <int kSteps>
struct Held {
  static constexpr int kWords = (kSteps + 3) / 4;
  static constexpr bool kFits = kSteps > 1;  // in a row of bf16
  uint32_t word[kWords];
};

// Integers + 128 to `held` [T][32 lanes]; false where one of them is no byte.
template <int kSteps>
CKV_DEVICE bool read_bytes(StreamReader& in, Expectation (&channel)[kSteps], int T, uint32_t* held) {
  constexpr int kWords = Held<kSteps>::kWords;
  uint32_t outside = 0;
  for (int t = 0; t < T; ++t) {
    uint32_t word[kWords];
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      const uint32_t k = static_cast<uint32_t>(in.next<false>(channel[j], true) + 128);
      outside |= k;
      word[j / 4] = j % 4 ? word[j / 4] + (k << 8 * (j % 4)) : k;
    }
    uint32_t* to = held + static_cast<int64_t>(t) * kWords * kLanes;
    if constexpr (kWords == 2)
      *reinterpret_cast<uint2*>(to) = make_uint2(word[0], word[1]);
    else
      *to = word[0];
  }
  return !__any_sync(kFullWarp, outside > 255u);
}

// Rows from first to last: a row of output never reaches beyond the bytes of the same row.
template <class Cells, int kSteps>
CKV_DEVICE void scale_bytes(const RowSteps& steps, const uint32_t* held, const float (&weight)[kSteps], const float (&mean)[kSteps],
                            typename Cells::Cell* out) {
  constexpr int kWords = Held<kSteps>::kWords, kBatch = 4;
  const int lane = lane_id();
  for (int base = 0; base < steps.T; base += kLanes) {
    const float mine = steps.of(base + lane);
    const int count = steps.T - base < kLanes ? steps.T - base : kLanes;
    for (int first = 0; first < count; first += kBatch) {
      uint32_t word[kBatch][kWords];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int t = base + (first + i < count ? first + i : count - 1);
        const uint32_t* from = held + static_cast<int64_t>(t) * kWords * kLanes;
        if constexpr (kWords == 2) {
          const uint2 q = *reinterpret_cast<const uint2*>(from);
          word[i][0] = q.x, word[i][1] = q.y;
        } else {
          word[i][0] = *from;
        }
      }
      __syncwarp();  // the rows may be overwritten now
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (first + i >= count) break;
        const float step = __shfl_sync(kFullWarp, mine, first + i);
        typename Cells::Cell* row = out + static_cast<int64_t>(base + first + i) * kSteps * kLanes;
        float value[kSteps + 1];
#pragma unroll
        for (int j = 0; j < kSteps; ++j) {
          const float k = static_cast<float>(word[i][j / 4] >> 8 * (j % 4) & 255u) - 128.0f;
          value[j] = mean[j] + k * step * weight[j];
        }
        value[kSteps] = 0.0f;
#pragma unroll
        for (int j = 0; j < kSteps; j += 2) {
          typename Cells::Cell low, high;
          Cells::pair(value[j], value[j + 1], low, high);
          row[j * kLanes] = low;
          if (j + 1 < kSteps) row[(j + 1) * kLanes] = high;
        }
      }
    }
  }
}

// ---- the kernel ----------------------------------------------------------------------------------------------------------------

// kSteps: channels of a lane, with their states in registers; 0: any number, states in shared memory behind the tables.
template <class Cells, int kSteps>
CKV_KERNEL __launch_bounds__(kDecodeWarps * 32, 2) decode_kernel(ckv_plane_desc d, const uint8_t* slots, int64_t stride,
                                                                  typename Cells::Cell* all, DeviceParams p) {
  CKV_DYN_SHARED(DecodeTables, tables);
  for (unsigned i = threadIdx.x; i < sizeof(DecodeTables) / sizeof(uint4); i += blockDim.x)
    reinterpret_cast<uint4*>(tables)[i] = reinterpret_cast<const uint4*>(&kDecodeTables)[i];
  __syncthreads();
  using Cell = typename Cells::Cell;
  const int lane = lane_id(), T = d.page_tokens, D = d.head_dim;
  const int count = kSteps ? kSteps : ceil_div(D, kLanes);
  const int64_t cells = static_cast<int64_t>(T) * D, warps = static_cast<int64_t>(gridDim.x) * (blockDim.x / kLanes);
  Expectation* shared = reinterpret_cast<Expectation*>(tables + 1) + threadIdx.x / kLanes * count * kLanes + lane;
  for (int64_t page = static_cast<int64_t>(blockIdx.x) * (blockDim.x / kLanes) + threadIdx.x / kLanes; page < d.n; page += warps) {
    const uint8_t* slot = slots + page * stride;
    Cell* out = all + page * cells + lane;
    const Header h = read_header(slot);
    const bool readable = header_ok(h, T, stride, p.heads, p.check), rows = h.flags & kRows;
    bool good = readable, bytes = kSteps > 1 && D == kSteps * kLanes && !(h.flags & kWide);
    const uint32_t begin = static_cast<uint32_t>(stream_at(T, rows)) / 2, end = begin + (h.words & kMaxWords);
    StreamReader in{*tables, reinterpret_cast<const uint16_t*>(slot), begin, static_cast<uint32_t>(stride / 2 - 1), 0, (1u << lane) - 1u};
    const auto expect = [&](int j) {
      const int c = j * kLanes + lane;
      return Expectation((p.prior && c < D ? p.prior[h.head * D + c] : 0) - h.prior);
    };
    uint32_t* held = nullptr;
    if constexpr (kSteps > 1) {
      constexpr int kWords = Held<kSteps>::kWords;
      if (good && bytes) {
        Expectation channel[kSteps];
#pragma unroll
        for (int j = 0; j < kSteps; ++j) channel[j] = expect(j);
        in.x = reinterpret_cast<const uint32_t*>(slot + kStatesAt)[lane];
        held = reinterpret_cast<uint32_t*>(all + (page + 1) * cells) - static_cast<int64_t>(T) * kWords * kLanes + kWords * lane;
        bytes = read_bytes<kSteps>(in, channel, T, held);
      }
    }
    if (good && !bytes) {  // any head_dim, any integers
      __syncwarp();
      in.at = begin, in.x = reinterpret_cast<const uint32_t*>(slot + kStatesAt)[lane];
      if constexpr (kSteps > 0) {
        Expectation channel[kSteps];
#pragma unroll
        for (int j = 0; j < kSteps; ++j) channel[j] = expect(j);
        for (int t = 0; t < T; ++t)
#pragma unroll
          for (int j = 0; j < kSteps; ++j) {
            const bool active = j * kLanes + lane < D;
            const int32_t k = in.next<true>(channel[j], active);
            if (active) out[static_cast<int64_t>(t) * D + j * kLanes] = Cells::hold(k);
          }
      } else {
        for (int j = 0; j < count; ++j) shared[j * kLanes] = expect(j);
        for (int t = 0; t < T; ++t)
          for (int j = 0; j < count; ++j) {
            const bool active = j * kLanes + lane < D;
            const int32_t k = in.next<true>(shared[j * kLanes], active);
            if (active) out[static_cast<int64_t>(t) * D + j * kLanes] = Cells::hold(k);
          }
      }
    }
    const bool unused = (rows || !(in.x & 0xFFFFu)) && (2 * lane < T || !(in.x & 0xFFu)) && (2 * lane + 1 < T || !(in.x & 0xFF00u));
    good = __all_sync(kFullWarp, good && in.at == end && in.x >> 16 == 1u && unused);
    const auto weight_at = [&](int c) { return p.weight && c < D ? p.weight[h.head * D + c] : 1.0f; };
    const auto mean_at = [&](int c) { return p.mean && c < D ? p.mean[h.head * D + c] : 0.0f; };
    const RowSteps steps{slot, in.x, T, h.step, rows};
    __syncwarp();
    if (!good) {
      for (int64_t i = 0; i < cells - lane; i += kLanes) out[i] = Cells::kNaN;
    } else if (!bytes) {
      for (int base = 0; base < T; base += kLanes) {
        const float mine = steps.of(base + lane);
        for (int t = base; t < T && t < base + kLanes; ++t) {
          const float step = __shfl_sync(kFullWarp, mine, t - base);
          for (int c = lane; c < D; c += kLanes) {
            Cell* cell = out + static_cast<int64_t>(t) * D + (c - lane);
            Cell unused_cell;
            Cells::pair(mean_at(c) + static_cast<float>(Cells::held(*cell)) * step * weight_at(c), 0.0f, *cell, unused_cell);
          }
        }
      }
    } else {
      if constexpr (kSteps > 1) {
        float weight[kSteps], mean[kSteps];
#pragma unroll
        for (int j = 0; j < kSteps; ++j) weight[j] = weight_at(j * kLanes + lane), mean[j] = mean_at(j * kLanes + lane);
        scale_bytes<Cells, kSteps>(steps, held, weight, mean, out);
      }
    }
  }
}

template <class Cells, int kSteps>
int launch_decode_kernel(const ckv_plane_desc& d, const uint8_t* slots, int64_t stride, void* out, const DeviceParams& p, void* stream) {
  int64_t warps = warps_per_block(d.n, kDecodeWarps);
  const int64_t states = kSteps ? 0 : static_cast<int64_t>(sizeof(Expectation)) * kLanes * ceil_div(d.head_dim, kLanes);
  while (warps > 1 && warps * states > kMostShared - static_cast<int64_t>(sizeof(DecodeTables))) --warps;
  const int64_t needed = (d.n + warps - 1) / warps, most = 2 * static_cast<int64_t>(processors());
  const size_t shared = sizeof(DecodeTables) + static_cast<size_t>(warps * states);
  CKV_LAUNCH_SHARED((decode_kernel<Cells, kSteps>), static_cast<unsigned>(needed < most ? needed : most), static_cast<unsigned>(warps * kLanes),
                    shared, stream, d, slots, stride, static_cast<typename Cells::Cell*>(out), p);
  return launch_status();
}

template <class Cells>
int launch_decode(const ckv_plane_desc& d, const uint8_t* slots, int64_t stride, void* out, const DeviceParams& p, void* stream) {
  switch (ceil_div(d.head_dim, kLanes)) {
    case 1: return launch_decode_kernel<Cells, 1>(d, slots, stride, out, p, stream);
    case 2: return launch_decode_kernel<Cells, 2>(d, slots, stride, out, p, stream);
    case 3: return launch_decode_kernel<Cells, 3>(d, slots, stride, out, p, stream);
    case 4: return launch_decode_kernel<Cells, 4>(d, slots, stride, out, p, stream);
    case 6: return launch_decode_kernel<Cells, 6>(d, slots, stride, out, p, stream);
    case 8: return launch_decode_kernel<Cells, 8>(d, slots, stride, out, p, stream);
    default: return launch_decode_kernel<Cells, 0>(d, slots, stride, out, p, stream);
  }
}

}  // namespace ecq
}  // namespace ckv
