// Device kernels of the error statistics. Each block sums its pages into its own place, then one thread per head adds the places
// in order: no atomics, so the result depends on the shape alone. The order differs from the host's; fp64 leaves both within a few
// ulp of the exact sums.
#pragma once

#include "port.cuh"

namespace ckv {
namespace stats {

constexpr int kFigures = 5;  // sum x^2, sum y^2, sum x*y, sum (x-y)^2, max |x-y|
constexpr int kMaxChunks = 256;

CKV_DEVICE void block_reduce(double* shared, double value, bool maximum) {
  shared[threadIdx.x] = value;
  __syncthreads();
  for (int half = kBlock / 2; half; half /= 2) {
    if (static_cast<int>(threadIdx.x) < half) {
      const double a = shared[threadIdx.x], b = shared[threadIdx.x + half];
      shared[threadIdx.x] = maximum ? (a >= b ? a : b) : a + b;
    }
    __syncthreads();
  }
}

// grid (heads, chunks): block (h, c) takes pages c, c + chunks, ... of head h.
CKV_KERNEL sums_kernel(int64_t pages, int heads, int64_t count, const float* x, const float* y, double* partial) {
  CKV_SHARED(double, scratch, kBlock);
  double f[kFigures] = {0, 0, 0, 0, 0};
  for (int64_t page = blockIdx.y; page < pages; page += gridDim.y) {
    const int64_t at = (page * heads + blockIdx.x) * count;
    for (int64_t i = threadIdx.x; i < count; i += kBlock) {
      const double a = static_cast<double>(x[at + i]), b = static_cast<double>(y[at + i]), e = a - b, m = e < 0 ? -e : e;
      f[0] += a * a;
      f[1] += b * b;
      f[2] += a * b;
      f[3] += e * e;
      f[4] = f[4] >= m ? f[4] : m;
    }
  }
  for (int k = 0; k < kFigures; ++k) {
    block_reduce(scratch, f[k], k == 4);
    if (threadIdx.x == 0) partial[(static_cast<int64_t>(blockIdx.x) * gridDim.y + blockIdx.y) * kFigures + k] = scratch[0];
    __syncthreads();
  }
}

CKV_KERNEL finish_kernel(int heads, int chunks, double elements, const double* partial, double* out) {
  const int head = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (head >= heads) return;
  double* o = out + 6 * head;
  for (int c = 0; c < chunks; ++c) {
    const double* p = partial + (static_cast<int64_t>(head) * chunks + c) * kFigures;
    for (int k = 0; k < 4; ++k) o[k] += p[k];
    o[4] = o[4] >= p[4] ? o[4] : p[4];
  }
  o[5] += elements;
}

// grid (heads, ceil(D / 32)), 32 channels x 8 row lanes.
CKV_KERNEL channels_kernel(int64_t pages, int heads, int rows, int D, const float* x, double* sums) {
  CKV_SHARED(double, scratch, kBlock);
  const int lane = static_cast<int>(threadIdx.x % 32), part = static_cast<int>(threadIdx.x / 32), ch = static_cast<int>(blockIdx.y) * 32 + lane;
  double s = 0;
  for (int64_t r = part; ch < D && r < pages * rows; r += kBlock / 32)
    s += static_cast<double>(x[((r / rows * heads + blockIdx.x) * rows + r % rows) * D + ch]);
  scratch[threadIdx.x] = s;
  __syncthreads();
  if (part == 0 && ch < D) {
    for (int p = 1; p < kBlock / 32; ++p) s += scratch[p * 32 + lane];
    sums[static_cast<int64_t>(blockIdx.x) * D + ch] += s;
  }
}

}  // namespace stats
}  // namespace ckv
