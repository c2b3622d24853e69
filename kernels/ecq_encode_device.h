// Encoding of codec ecq on the device: one warp per head-page, lane = lane of the coder, channels a multiple of 32 apart.
//
// The search for a step codes a page several times. Its centred values, its symbols and its row levels stay in scratch memory for
// that, one piece per warp of a grid that loops over the pages. Only the last attempt is written, once its length is known.
#pragma once

#include "ecq_model_device.h"
#include "plane_device.h"

namespace ckv {
namespace ecq {

constexpr int kEncodeWarps = 8;                      // of a block
constexpr int64_t kMostScratch = int64_t{256} << 20;  // bytes

// One warp's piece of scratch memory.
struct EncodeScratch {
  float* y;           // [T][steps][32] centred, weighted values; 0 beyond the last channel
  uint32_t* symbol;   // [T][steps][32] integer << 16 | class << 8 | symbol
  int32_t* level;     // [T]
  float* reciprocal;  // [T] of the step of a row in this attempt
  CKV_HD static int64_t bytes(int T, int steps) { return 8 * static_cast<int64_t>(T) * (steps * kLanes + 1); }
  CKV_DEVICE EncodeScratch(uint8_t* at, int T, int steps) {
    const int64_t cells = static_cast<int64_t>(T) * steps * kLanes;
    y = reinterpret_cast<float*>(at), symbol = reinterpret_cast<uint32_t*>(y + cells);
    level = reinterpret_cast<int32_t*>(symbol + cells), reciprocal = reinterpret_cast<float*>(level + T);
  }
};

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

struct WarpEncoder {
  const DeviceParams& p;
  const uint32_t* entries;  // [kClasses][kEntries]
  EncodeScratch scratch;
  int T, D, steps, head, lane;
  int reference = 0, step = 0, prior = 0;
  bool wide = false;
  uint32_t state = 0;

  CKV_DEVICE int64_t cell(int t, int j) const { return (static_cast<int64_t>(t) * steps + j) * kLanes + lane; }

  CKV_DEVICE int row_byte(int t) const {
    if (!p.rows || t >= T) return 0;
    const int level = scratch.level[t], byte = reference - level;
    return level == kNoLevel || byte > 255 ? 255 : byte;
  }

  // Values and levels of the rows; false where the page cannot be coded. The same for all lanes.
  CKV_DEVICE bool load(const ckv_plane_desc& d, const uint8_t* codes, const uint8_t* scales) {
    const int64_t code_row = code_row_bytes(d.format, D), scale_row = scale_row_bytes(d.format, D);
    float total = 0;
    int most = kNoLevel;
    for (int t = 0; t < T; ++t) {
      float sum = 0;
      for (int j = 0; j < steps; ++j) {
        const int c = j * kLanes + lane, at = head * D + c;
        float y = 0;
        if (c < D) {
          y = value_at(d.format, codes + t * code_row, scales + t * scale_row, c);
          if (p.mean) y = (y - p.mean[at]) * p.gain[at];
        }
        scratch.y[cell(t, j)] = y;
        sum = j ? sum + y * y : y * y;
      }
      for (int far = kLanes / 2; far; far /= 2) sum = sum + __shfl_xor_sync(kFullWarp, sum, far);
      const float ms = sum / static_cast<float>(D);
      if (!(ms <= 0x1.fffffep+127f)) return false;  // also NaN
      total = total + ms;
      const int level = ms < kLeastSquare ? kNoLevel : level_of(ms);
      most = level > most ? level : most;
      if (lane == 0) scratch.level[t] = level;
    }
    __syncwarp();
    if (!p.rows) {
      const float ms = total / static_cast<float>(T);
      if (!(ms <= 0x1.fffffep+127f)) return false;
      most = ms < kLeastSquare ? kNoLevel : level_of(ms);
    }
    reference = most == kNoLevel ? 0 : most;
    return true;
  }

  // Chooses the symbols of the page with a step `coarser` sixteenths of an octave above the nominal one.
  CKV_DEVICE void quantize(int coarser) {
    step = p.step + 2 * reference + coarser;
    __syncwarp();  // the attempt before has read its reciprocals
    for (int t = lane; t < T; t += kLanes) scratch.reciprocal[t] = 1.0f / step_value(step - 2 * row_byte(t));
    __syncwarp();
    prior = p.mean ? p.step + coarser : -magnitude_code(mean_magnitude());
    bool far = false;
    for (int j = 0; j < steps; ++j) {  // a lane keeps one channel's state at a time
      const int c = j * kLanes + lane;
      Channel s{0, prior_spread((p.prior && c < D ? p.prior[head * D + c] : 0) - prior)};
      for (int t = 0; t < T; ++t) {
        const int32_t k = integer_of(scratch.y[cell(t, j)], scratch.reciprocal[t], p.rounding), residual = k - predicted(s);
        const uint32_t cls = static_cast<uint32_t>(class_of(s));
        const uint32_t symbol = residual < -kReach || residual > kReach ? kEscape : static_cast<uint32_t>(residual + kReach);
        scratch.symbol[cell(t, j)] = static_cast<uint32_t>(k) << 16 | cls << 8 | symbol;
        learn(s, k, residual);
        far = far || k > kReach || k < -kReach;
      }
    }
    wide = __any_sync(kFullWarp, far);
  }

  // In 1/1024.
  CKV_DEVICE int32_t mean_magnitude() const {
    uint32_t sum = 0;
    for (int t = 0; t < T; ++t)
      for (int j = 0; j < steps; ++j) {
        const int32_t k = integer_of(scratch.y[cell(t, j)], scratch.reciprocal[t], p.rounding), a = k < 0 ? -k : k;
        sum += static_cast<uint32_t>(a > kReach ? kReach : a);
      }
    for (int far = kLanes / 2; far; far /= 2) sum += __shfl_xor_sync(kFullWarp, sum, far);
    const uint32_t count = static_cast<uint32_t>(T * D), whole = sum / count;  // 1024 * sum / count in 32 bits: the rest is below 2^22
    return static_cast<int32_t>((whole << 10) + ((sum - whole * count) << 10) / count);
  }

  // Codes the symbols, last ones first; the number of words. kWrite: to the `words` words in front of `end`.
  template <bool kWrite>
  CKV_DEVICE uint32_t code(uint16_t* end) {
    state = 1u << 16 | static_cast<uint32_t>(row_byte(2 * lane)) | static_cast<uint32_t>(row_byte(2 * lane + 1)) << 8;
    const uint32_t not_below = ~((1u << lane) - 1u);  // this lane and those above it
    uint32_t words = 0;
    for (int t = T - 1; t >= 0; --t)
      for (int j = steps - 1; j >= 0; --j) {
        const bool active = j * kLanes + lane < D;
        const uint32_t symbol = scratch.symbol[cell(t, j)], e = entries[(symbol >> 8 & 255u) * kEntries + (symbol & 255u)];
        const uint32_t width = e >> kStartShift, own = e & (kTotal - 1), freq = own ? own : width;
        const bool escape = active && !own;
        const uint32_t escapes = __ballot_sync(kFullWarp, escape);
        if (kWrite && escape) *(end - words - __popc(escapes & not_below)) = static_cast<uint16_t>(symbol >> 16);
        words += static_cast<uint32_t>(__popc(escapes));
        const bool full = active && must_emit(state, freq);
        const uint32_t emits = __ballot_sync(kFullWarp, full);
        if (kWrite && full) *(end - words - __popc(emits & not_below)) = static_cast<uint16_t>(state);
        words += static_cast<uint32_t>(__popc(emits));
        if (full) state >>= 16;
        if (active) state = push(state, kTotal - width, freq);
      }
    return words;
  }
};

// Slots and validity words; with `lengths` given, slot bytes at the nominal step.
CKV_KERNEL __launch_bounds__(kEncodeWarps * 32) encode_kernel(ckv_plane_desc d, const uint8_t* codes, const uint8_t* scales, uint8_t* slots,
                                                              int64_t stride, int32_t* valid, int32_t* lengths, DeviceParams p, uint8_t* scratch) {
  CKV_SHARED(uint32_t, entries, kClasses * kEntries);
  for (unsigned i = threadIdx.x; i < kClasses * kEntries; i += blockDim.x) entries[i] = kDecodeTables.entry[i];
  __syncthreads();
  const int lane = lane_id(), steps = ceil_div(d.head_dim, kLanes), T = d.page_tokens, at = stream_at(T, p.rows != 0);
  const int64_t piece = EncodeScratch::bytes(T, steps), warps = static_cast<int64_t>(gridDim.x) * (blockDim.x / kLanes);
  for (int64_t warp = static_cast<int64_t>(blockIdx.x) * (blockDim.x / kLanes) + threadIdx.x / kLanes, page = warp; page < d.n; page += warps) {
    const int head = static_cast<int>(static_cast<uint32_t>(page) % static_cast<uint32_t>(p.heads));
    WarpEncoder encoder{p, entries, EncodeScratch(scratch + warp * piece, T, steps), T, d.head_dim, steps, head, lane};
    const bool good = encoder.load(d, codes + page * T * code_row_bytes(d.format, d.head_dim),
                                   scales + page * T * scale_row_bytes(d.format, d.head_dim));
    uint32_t words = 0;
    const auto attempt = [&](int coarser) {
      encoder.quantize(coarser);
      return words = encoder.code<false>(nullptr);
    };
    // For its length a page is coded once: with room for everything and nothing to fill.
    const uint32_t room = lengths ? 0xFFFFFFFFu : room_of(stride, T, p.rows != 0);
    const int coarser = good ? find_step(room, lengths ? 0 : p.fill, attempt) : kMostCoarser + 1;
    if (lengths) {
      if (lane == 0) lengths[page] = !good || words > kMaxWords ? kNever : static_cast<int32_t>(at + 2 * words);
    } else {
      uint8_t* slot = slots + page * stride;
      if (coarser > kMostCoarser) {
        for (int64_t i = lane; i < stride / 4; i += kLanes) reinterpret_cast<uint32_t*>(slot)[i] = 0;
      } else {
        uint16_t* end = reinterpret_cast<uint16_t*>(slot + at) + words;
        encoder.code<true>(end);
        for (int64_t i = lane; i < (stride - at) / 2 - words; i += kLanes) end[i] = 0;
        for (int i = lane; i < at - kStreamAt; i += kLanes) slot[kStreamAt + i] = static_cast<uint8_t>(encoder.row_byte(kRowsInStates + i));
        reinterpret_cast<uint32_t*>(slot + kStatesAt)[lane] = encoder.state;
        if (lane == 0) {
          const int flags = kValid | (p.rows ? kRows : 0) | (coarser > 0 ? kCoarser : 0) | (encoder.wide ? kWide : 0);
          *reinterpret_cast<Header*>(slot) = {kMagic, kVersion, static_cast<uint8_t>(flags), static_cast<uint8_t>(head),
                                              static_cast<int16_t>(encoder.step), static_cast<int16_t>(encoder.prior),
                                              words | static_cast<uint32_t>(p.check) << 24};
        }
      }
      if (lane == 0) valid[page] = coarser <= kMostCoarser;
    }
    __syncwarp();  // the next page's scratch
  }
}

inline int launch_encode(const ckv_plane_desc& d, const void* codes, const void* scales, uint8_t* slots, int64_t stride, int32_t* valid,
                         int32_t* lengths, const DeviceParams& p, void* stream) {
  const int64_t piece = EncodeScratch::bytes(d.page_tokens, ceil_div(d.head_dim, kLanes));
  const int per_block = warps_per_block(d.n, kEncodeWarps);
  int64_t most = kMostScratch / (piece * per_block);
  const int64_t resident = 4 * static_cast<int64_t>(processors()), needed = (d.n + per_block - 1) / per_block;
  most = most < 1 ? 1 : most > resident ? resident : most;
  const int64_t blocks = needed < most ? needed : most;
  void* scratch = nullptr;
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
  if (cudaMallocAsync(&scratch, static_cast<size_t>(piece * per_block * blocks), on) != cudaSuccess) {
    (void)cudaGetLastError();
    return CKV_E_LAUNCH;
  }
  CKV_LAUNCH(encode_kernel, static_cast<unsigned>(blocks), static_cast<unsigned>(per_block * kLanes), stream, d, static_cast<const uint8_t*>(codes),
             static_cast<const uint8_t*>(scales), slots, stride, valid, lengths, p, static_cast<uint8_t*>(scratch));
  const int rc = launch_status();
  (void)cudaFreeAsync(scratch, on);
  return rc;
}

}  // namespace ecq
}  // namespace ckv
