// Codec ecq on the device: parameters, the symbol tables of both directions, and how pages are spread over blocks.
#pragma once

#include "ecq_core.h"

namespace ckv {
namespace ecq {

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

// The model. The entry of a symbol: frequency (12 bits; 0 stands for the escape) | (4096 - start) << 19.
// Symbols above a class's largest are the escape too; the one beyond the last symbol starts nowhere.
constexpr int kEntries = kSymbols + 1, kBins = 1024, kStartShift = 19;
struct alignas(16) DecodeTables {
  uint32_t entry[kClasses * kEntries];
  uint8_t first[kClasses * kBins];  // symbol of the first of four neighbouring places
};
static_assert(sizeof(DecodeTables) % 16 == 0, "copied 16 bytes at a time");

constexpr DecodeTables make_decode_tables() {
  const Model m = make_model();
  DecodeTables t{};
  for (int c = 0; c < kClasses; ++c) {
    for (int s = 0; s < kSymbols; ++s) {
      const uint32_t own = m.start[c][s + 1] - m.start[c][s];
      const bool used = own && s != kEscape;
      t.entry[c * kEntries + s] = (used ? own : 0) | (kTotal - m.start[c][used ? s : kEscape]) << kStartShift;
    }
    int s = 0;
    for (int bin = 0; bin < kBins; ++bin) {
      while (m.start[c][s + 1] <= 4 * bin) ++s;
      t.first[c * kBins + bin] = static_cast<uint8_t>(s);
    }
  }
  return t;
}
__device__ constexpr DecodeTables kDecodeTables = make_decode_tables();

CKV_DEVICE int lane_id() { return static_cast<int>(threadIdx.x) % kLanes; }

// Head-pages are counted in 31 bits, as in the other codecs' device functions.
inline int check_count(const ckv_plane_desc* d) { return d->n > 0x7FFFFFFF ? CKV_E_SHAPE : CKV_OK; }

inline int processors() {
  int device = 0, count = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

// Up to `most` warps, fewer where the pages would not reach all processors.
inline int warps_per_block(int64_t pages, int most) {
  const int64_t share = (pages + processors() - 1) / processors();
  return share < 2 ? 2 : share > most ? most : static_cast<int>(share);
}

}  // namespace ecq
}  // namespace ckv
