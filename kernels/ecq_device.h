// Codec ecq on the device: one warp per head-page, its lanes are the coder's lanes. A slot that cannot be read gives NaN.
#pragma once

#include "plane_device.h"

namespace ckv {
namespace ecq {

constexpr int kWarps = kBlock / kLanes;
constexpr int64_t kMostEncoders = 1024;  // warps that encode at a time: their scratch stays in the L2

// Cumulative frequencies as make_model() computes them on the host, compiled into the device's memory.
struct DeviceModel {
  Model m;
};
__device__ constexpr DeviceModel kDeviceModel = {make_model()};

struct DeviceParams {
  const float *mean, *weight, *gain;
  const int16_t* prior;
  int heads, step, rows, fill;
  float rounding;
  uint8_t check;
};
inline DeviceParams device_params(const ckv_ecq_params& p) {
  return {p.mean, p.weight, p.gain, p.prior, p.heads, p.step, p.rows, p.fill, p.rounding, check_byte(p)};
}

CKV_DEVICE int lane_id() { return static_cast<int>(threadIdx.x) % kLanes; }
CKV_DEVICE uint32_t lanes_below(int lane) { return (1u << lane) - 1u; }

CKV_DEVICE float value_at(int format, const uint8_t* codes, const uint8_t* scales, int ch) {
  switch (format) {
    case CKV_BF16: return Source<CKV_BF16>::value(codes, ch, 1.0f);
    case CKV_FP16: return Source<CKV_FP16>::value(codes, ch, 1.0f);
    case CKV_INT8: return Source<CKV_INT8>::value(codes, ch, Source<CKV_INT8>::scale(scales, ch));
    case CKV_FP8: return Source<CKV_FP8>::value(codes, ch, Source<CKV_FP8>::scale(scales, ch));
    case CKV_NVFP4: return Source<CKV_NVFP4>::value(codes, ch, Source<CKV_NVFP4>::scale(scales, ch));
    default: return Source<CKV_ISO3>::value(codes, ch, Source<CKV_ISO3>::scale(scales, ch));
  }
}

// ---- encode -----------------------------------------------------------------------------------------------------------------

// One head-page in the hands of one warp. `symbols` [T * steps, 32] and `levels` [T] are its scratch.
struct WarpEncoder {
  const ckv_plane_desc d;
  const DeviceParams& p;
  const Model& model;
  const uint8_t *codes, *scales;
  uint16_t* symbols;
  int32_t* levels;
  int head, lane, steps;
  int reference = 0, step = 0, prior = 0;
  bool wide = false;
  uint32_t state = 0;

  CKV_DEVICE float y_at(int t, int c) const {
    if (c >= d.head_dim) return 0.0f;
    const float v = value_at(d.format, codes + t * code_row_bytes(d.format, d.head_dim), scales + t * scale_row_bytes(d.format, d.head_dim), c);
    const int at = head * d.head_dim + c;
    return p.mean ? (v - p.mean[at]) * p.gain[at] : v;
  }

  CKV_DEVICE int row_byte(int t) const {
    if (!p.rows) return 0;
    const int level = levels[t], byte = reference - level;
    return level == kNoLevel || byte > 255 ? 255 : byte;
  }

  // Levels of the rows; false where the page cannot be coded. The same for all lanes.
  CKV_DEVICE bool load() {
    float total = 0;
    int most = kNoLevel;
    for (int t = 0; t < d.page_tokens; ++t) {
      float sum = 0;
      for (int j = 0; j < steps; ++j) {
        const float y = y_at(t, j * kLanes + lane);
        sum = j ? sum + y * y : y * y;
      }
      for (int far = kLanes / 2; far; far /= 2) sum = sum + __shfl_xor_sync(kFullWarp, sum, far);
      const float ms = sum / static_cast<float>(d.head_dim);
      if (!(ms <= 0x1.fffffep+127f)) return false;
      total = total + ms;
      const int level = ms < kLeastSquare ? kNoLevel : level_of(ms);
      most = level > most ? level : most;
      if (lane == 0) levels[t] = level;
    }
    __syncwarp();
    if (!p.rows) {
      const float ms = total / static_cast<float>(d.page_tokens);
      if (!(ms <= 0x1.fffffep+127f)) return false;
      most = ms < kLeastSquare ? kNoLevel : level_of(ms);
    }
    reference = most == kNoLevel ? 0 : most;
    return true;
  }

  CKV_DEVICE int32_t integer_at(int t, int c) const {
    return integer_of(y_at(t, c), 1.0f / step_value(step - 2 * row_byte(t)), p.rounding);
  }

  CKV_DEVICE int32_t mean_magnitude() const {
    uint32_t sum = 0;
    for (int t = 0; t < d.page_tokens; ++t)
      for (int j = 0; j < steps; ++j) {
        const int32_t k = integer_at(t, j * kLanes + lane), a = k < 0 ? -k : k;
        sum += static_cast<uint32_t>(a > kReach ? kReach : a);
      }
    for (int far = kLanes / 2; far; far /= 2) sum += __shfl_xor_sync(kFullWarp, sum, far);
    return static_cast<int32_t>((static_cast<int64_t>(sum) << 10) / (static_cast<int64_t>(d.page_tokens) * d.head_dim));
  }

  // Codes the page; words needed. They end at out[room - 1], as far as they fit; out may be null.
  CKV_DEVICE uint32_t attempt(int coarser, uint16_t* out, uint32_t room) {
    step = p.step + 2 * reference + coarser;
    prior = p.mean ? p.step + coarser : -magnitude_code(mean_magnitude());
    bool far = false;
    for (int j = 0; j < steps; ++j) {  // channel by channel: a lane keeps one state at a time
      const int c = j * kLanes + lane;
      if (c < d.head_dim) {
        Channel s{0, prior_spread((p.mean ? p.prior[head * d.head_dim + c] : 0) - prior)};
        for (int t = 0; t < d.page_tokens; ++t) {
          const int32_t k = integer_at(t, c), residual = k - predicted(s);
          const int cls = class_of(s);
          symbols[(static_cast<int64_t>(t) * steps + j) * kLanes + lane] = static_cast<uint16_t>(cls << 8 | symbol_of(model, cls, residual));
          learn(s, k, residual);
          far = far || k > kReach || k < -kReach;
        }
      }
    }
    wide = __any_sync(kFullWarp, far);
    const int low = 2 * lane, high = low + 1;
    state = 1u << 16 | static_cast<uint32_t>(low < d.page_tokens ? row_byte(low) : 0) |
            static_cast<uint32_t>(high < d.page_tokens ? row_byte(high) : 0) << 8;
    uint32_t count = 0;
    for (int64_t i = static_cast<int64_t>(d.page_tokens) * steps - 1; i >= 0; --i) {
      const int t = static_cast<int>(i / steps), c = static_cast<int>(i % steps) * kLanes + lane;
      const bool active = c < d.head_dim;
      const uint32_t e = active ? symbols[i * kLanes + lane] : 0;
      const int cls = static_cast<int>(e >> 8), symbol = static_cast<int>(e & 255u);
      const uint32_t start = model.start[cls][symbol], freq = active ? model.start[cls][symbol + 1] - start : 1;
      const bool escape = active && symbol == kEscape;
      const uint32_t escapes = __ballot_sync(kFullWarp, escape);
      if (escapes) emit(out, room, count, escapes, escape, escape ? static_cast<uint16_t>(integer_at(t, c)) : uint16_t{0});
      const bool full = active && must_emit(state, freq);
      const uint32_t emits = __ballot_sync(kFullWarp, full);
      emit(out, room, count, emits, full, static_cast<uint16_t>(state));
      if (full) state >>= 16;
      if (active) state = push(state, start, freq);
    }
    return count;
  }

  // Words of the lanes in `mask`, in lane order, in front of the `count` words there are.
  CKV_DEVICE void emit(uint16_t* out, uint32_t room, uint32_t& count, uint32_t mask, bool mine, uint16_t word) const {
    count += static_cast<uint32_t>(__popc(mask));
    const uint32_t behind = count - static_cast<uint32_t>(__popc(mask & lanes_below(lane)));  // from the end, 1 is the last word
    if (mine && out && behind <= room) out[room - behind] = word;
  }
};

CKV_KERNEL encode_kernel(ckv_plane_desc d, const uint8_t* codes, const uint8_t* scales, uint8_t* slots, int64_t stride, int32_t* valid,
                         int32_t* lengths, DeviceParams p, uint16_t* symbols, int32_t* levels) {
  CKV_SHARED(Model, model, 1);
  for (unsigned i = threadIdx.x; i < sizeof(Model) / sizeof(uint16_t); i += blockDim.x)
    (&model[0].start[0][0])[i] = (&kDeviceModel.m.start[0][0])[i];
  __syncthreads();
  const int lane = lane_id(), steps = ceil_div(d.head_dim, kLanes), T = d.page_tokens;
  const int64_t warp = blockIdx.x * static_cast<int64_t>(kWarps) + threadIdx.x / kLanes, warps = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t page = warp; page < d.n; page += warps) {
    WarpEncoder encoder{d, p, model[0], codes + page * T * code_row_bytes(d.format, d.head_dim),
                        scales ? scales + page * T * scale_row_bytes(d.format, d.head_dim) : nullptr,
                        symbols + warp * T * steps * kLanes, levels + warp * T, static_cast<int>(page % p.heads), lane, steps};
    const bool good = encoder.load();
    const int at = stream_at(T, p.rows != 0);
    if (lengths) {
      const uint32_t words = good ? encoder.attempt(0, nullptr, 0) : 0;
      if (lane == 0) lengths[page] = !good || words > kMaxWords ? kNever : static_cast<int32_t>(at + 2 * words);
      __syncwarp();
      continue;
    }
    uint8_t* slot = slots + page * stride;
    uint16_t* stream = reinterpret_cast<uint16_t*>(slot + at);
    const uint32_t room = room_of(stride, T, p.rows != 0);
    uint32_t words = 0;
    const int coarser = good ? find_step(room, p.fill, [&](int c) { return words = encoder.attempt(c, stream, room); }) : kMostCoarser + 1;
    __syncwarp();
    if (coarser > kMostCoarser) {
      for (int64_t i = lane; i < stride; i += kLanes) slot[i] = 0;
    } else {
      for (uint32_t base = 0; base < words; base += kLanes) {  // to the front; a chunk is read before it is written
        const uint32_t i = base + static_cast<uint32_t>(lane);
        const uint16_t word = i < words ? stream[room - words + i] : 0;
        __syncwarp();
        if (i < words) stream[i] = word;
        __syncwarp();
      }
      for (int64_t i = at + 2 * static_cast<int64_t>(words) + lane; i < stride; i += kLanes) slot[i] = 0;
      for (int i = lane; i < at - kStreamAt; i += kLanes)
        slot[kStreamAt + i] = kRowsInStates + i < T ? static_cast<uint8_t>(encoder.row_byte(kRowsInStates + i)) : 0;
      reinterpret_cast<uint32_t*>(slot + kStatesAt)[lane] = encoder.state;
      if (lane == 0) {
        const Header h{kMagic, kVersion, static_cast<uint8_t>(kValid | (p.rows ? kRows : 0) | (coarser > 0 ? kCoarser : 0) | (encoder.wide ? kWide : 0)),
                       static_cast<uint8_t>(encoder.head), static_cast<int16_t>(encoder.step), static_cast<int16_t>(encoder.prior),
                       words | static_cast<uint32_t>(p.check) << 24};
        memcpy(slot, &h, sizeof h);
      }
    }
    if (lane == 0) valid[page] = coarser <= kMostCoarser;
    __syncwarp();
  }
}

// ---- decode -----------------------------------------------------------------------------------------------------------------

// Values as fp32 or as bf16 bits. Until the row bytes are known, at the end of the stream, the output holds the integers.
struct FloatOut {
  using Cell = float;
  CKV_DEVICE static float hold(int32_t k) { return float_of(static_cast<uint32_t>(k)); }
  CKV_DEVICE static int32_t held(float x) { return static_cast<int32_t>(bits_of(x)); }
  CKV_DEVICE static float make(uint16_t bf16) { return bf16_to_float(bf16); }
};
struct Bf16Out {
  using Cell = uint16_t;
  CKV_DEVICE static uint16_t hold(int32_t k) { return static_cast<uint16_t>(k); }
  CKV_DEVICE static int32_t held(uint16_t x) { return static_cast<int16_t>(x); }
  CKV_DEVICE static uint16_t make(uint16_t bf16) { return bf16; }
};

// kSteps: channels per lane that the registers hold; head_dim <= 32 * kSteps.
template <class Out, int kSteps>
CKV_KERNEL decode_kernel(ckv_plane_desc d, const uint8_t* slots, int64_t stride, typename Out::Cell* out, DeviceParams p) {
  CKV_SHARED(Model, model, 1);
  CKV_SHARED(uint8_t, coarse, kClasses * 256);  // symbol of the first of 16 neighbouring slots
  for (unsigned i = threadIdx.x; i < sizeof(Model) / sizeof(uint16_t); i += blockDim.x)
    (&model[0].start[0][0])[i] = (&kDeviceModel.m.start[0][0])[i];
  __syncthreads();
  for (unsigned i = threadIdx.x; i < kClasses * 256; i += blockDim.x) {
    const uint16_t* start = model[0].start[i / 256];
    int low = 0, high = kSymbols - 1;  // the last symbol that starts at or below the slot
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (start[middle] <= i % 256 * 16)
        low = middle;
      else
        high = middle - 1;
    }
    coarse[i] = static_cast<uint8_t>(low);
  }
  __syncthreads();
  const int lane = lane_id(), steps = ceil_div(d.head_dim, kLanes), T = d.page_tokens;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t page = blockIdx.x * static_cast<int64_t>(kWarps) + threadIdx.x / kLanes; page < d.n; page += warps) {
    const uint8_t* slot = slots + page * stride;
    typename Out::Cell* to = out + page * T * d.head_dim;
    const Header h = read_header(slot);
    bool good = header_ok(h, T, stride, p.heads, p.check);
    if (good) {
      const bool rows = h.flags & kRows;
      const uint32_t words = h.words & kMaxWords;
      const uint16_t* stream = reinterpret_cast<const uint16_t*>(slot + stream_at(T, rows));
      const int parameters = h.head * d.head_dim;
      uint32_t x = reinterpret_cast<const uint32_t*>(slot + kStatesAt)[lane], at = 0;
      Channel channel[kSteps];
      for (int j = 0; j < kSteps; ++j) {
        const int c = j * kLanes + lane;
        channel[j] = {0, prior_spread((p.mean && c < d.head_dim ? p.prior[parameters + c] : 0) - h.prior)};
      }
      for (int t = 0; t < T && good; ++t) {
#pragma unroll(kSteps <= 8 ? kSteps : 1)
        for (int j = 0; j < kSteps; ++j) {
          if (j >= steps) break;
          const int c = j * kLanes + lane;
          const bool active = c < d.head_dim;
          const uint16_t* start = model[0].start[class_of(channel[j])];
          const uint32_t place = x & (kTotal - 1);
          int symbol = coarse[class_of(channel[j]) * 256 + static_cast<int>(place >> 4)];
          while (start[symbol + 1] <= place) ++symbol;
          if (active) x = (start[symbol + 1] - start[symbol]) * (x >> kBits) + place - start[symbol];
          const bool refill = active && x < 1u << 16;
          const uint32_t refills = __ballot_sync(kFullWarp, refill);
          if (refill) {
            const uint32_t i = at + static_cast<uint32_t>(__popc(refills & lanes_below(lane)));
            x = x << 16 | (i < words ? stream[i] : 0u);
          }
          at += static_cast<uint32_t>(__popc(refills));
          const int32_t before = predicted(channel[j]);
          int32_t k = before + symbol - kReach;
          const bool escape = active && symbol == kEscape;
          const uint32_t escapes = __ballot_sync(kFullWarp, escape);
          if (escapes) {
            const uint32_t i = at + static_cast<uint32_t>(__popc(escapes & lanes_below(lane)));
            if (escape) k = static_cast<int16_t>(i < words ? stream[i] : 0u);
            at += static_cast<uint32_t>(__popc(escapes));
          }
          const int32_t residual = k - before;
          k = clamp_integer(k);
          learn(channel[j], k, residual);
          if (active) to[static_cast<int64_t>(t) * d.head_dim + c] = Out::hold(k);
        }
        good = at <= words;
      }
      const int low = 2 * lane, high = low + 1;
      const bool clean = (rows || !(x & 0xFFFFu)) && (low < T || !(x & 0xFFu)) && (high < T || !(x >> 8 & 0xFFu));
      good = __all_sync(kFullWarp, good && at == words && x >> 16 == 1u && clean);
      for (int t = 0; good && t < T; ++t) {
        const uint32_t pair = __shfl_sync(kFullWarp, x, t / 2 % kLanes);
        const int byte = t < kRowsInStates ? static_cast<int>(pair >> 8 * (t & 1) & 255u) : rows ? slot[kStreamAt + t - kRowsInStates] : 0;
        const float step = step_value(h.step - 2 * byte);
        for (int c = lane; c < d.head_dim; c += kLanes) {
          typename Out::Cell* cell = to + static_cast<int64_t>(t) * d.head_dim + c;
          *cell = Out::make(restored(Out::held(*cell), step, p.mean ? p.weight[parameters + c] : 1.0f, p.mean ? p.mean[parameters + c] : 0.0f));
        }
      }
    }
    if (!good)
      for (int64_t i = lane; i < static_cast<int64_t>(T) * d.head_dim; i += kLanes) to[i] = Out::make(0x7FC0);
    __syncwarp();
  }
}

// ---- launchers --------------------------------------------------------------------------------------------------------------

inline int launch_encode(const ckv_plane_desc& d, const void* codes, const void* scales, uint8_t* slots, int64_t stride, int32_t* valid,
                         int32_t* lengths, const ckv_ecq_params& params, void* stream) {
  const int64_t blocks = (d.n < kMostEncoders ? d.n + kWarps - 1 : kMostEncoders) / kWarps, warps = blocks * kWarps;
  const int64_t symbols = static_cast<int64_t>(d.page_tokens) * ceil_div(d.head_dim, kLanes) * kLanes;
  const size_t symbol_bytes = static_cast<size_t>(warps * symbols * 2 + 15) / 16 * 16;
  void* scratch = nullptr;
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
  if (cudaMallocAsync(&scratch, symbol_bytes + static_cast<size_t>(warps) * d.page_tokens * 4, on) != cudaSuccess) {
    (void)cudaGetLastError();
    return CKV_E_LAUNCH;
  }
  CKV_LAUNCH(encode_kernel, static_cast<unsigned>(blocks), kBlock, stream, d, static_cast<const uint8_t*>(codes),
             static_cast<const uint8_t*>(scales), slots, stride, valid, lengths, device_params(params), static_cast<uint16_t*>(scratch),
             reinterpret_cast<int32_t*>(static_cast<uint8_t*>(scratch) + symbol_bytes));
  const int rc = launch_status();
  (void)cudaFreeAsync(scratch, on);
  return rc;
}

template <class Out>
int launch_decode(const ckv_plane_desc& d, const uint8_t* slots, int64_t stride, typename Out::Cell* out, const ckv_ecq_params& params, void* stream) {
  const unsigned grid = grid_for(d.n * kLanes);
  const DeviceParams p = device_params(params);
  if (d.head_dim <= 128)
    CKV_LAUNCH((decode_kernel<Out, 4>), grid, kBlock, stream, d, slots, stride, out, p);
  else if (d.head_dim <= 256)
    CKV_LAUNCH((decode_kernel<Out, 8>), grid, kBlock, stream, d, slots, stride, out, p);
  else
    CKV_LAUNCH((decode_kernel<Out, 32>), grid, kBlock, stream, d, slots, stride, out, p);
  return launch_status();
}

}  // namespace ecq
}  // namespace ckv

extern "C" int ckv_ecq_encode_cuda(const ckv_plane_desc* d, const void* codes, const void* scales, uint8_t* slots, int64_t stride,
                                   int32_t* valid, const ckv_ecq_params* params, void* stream) {
  int rc = ecq::check_all(d, slots, stride, params);
  if (!rc) rc = check_plane(d, codes, scales);
  if (rc || !d->n) return rc;
  if (!valid) return CKV_E_NULL;
  return ecq::launch_encode(*d, codes, scales, slots, stride, valid, nullptr, *params, stream);
}

extern "C" int ckv_ecq_lengths_cuda(const ckv_plane_desc* d, const void* codes, const void* scales, int32_t* lengths,
                                    const ckv_ecq_params* params, void* stream) {
  int rc = check_plane(d, codes, scales);
  if (!rc) rc = ecq::check_params(params);
  if (rc || !d->n) return rc;
  if (!lengths) return CKV_E_NULL;
  return ecq::launch_encode(*d, codes, scales, nullptr, 0, nullptr, lengths, *params, stream);
}

extern "C" int ckv_ecq_decode_cuda(const ckv_plane_desc* d, const uint8_t* slots, int64_t stride, float* out, const ckv_ecq_params* params,
                                   void* stream) {
  const int rc = ecq::check_all(d, slots, stride, params);
  if (rc || !d->n) return rc;
  if (!out) return CKV_E_NULL;
  return ecq::launch_decode<ecq::FloatOut>(*d, slots, stride, out, *params, stream);
}

extern "C" int ckv_ecq_restore_cuda(const ckv_plane_desc* d, const uint8_t* slots, int64_t stride, void* codes, void*,
                                    const ckv_ecq_params* params, void* stream) {
  const int rc = ecq::check_all(d, slots, stride, params);
  if (rc || !d->n) return rc;
  if (!codes) return CKV_E_NULL;
  return ecq::launch_decode<ecq::Bf16Out>(*d, slots, stride, static_cast<uint16_t*>(codes), *params, stream);
}
