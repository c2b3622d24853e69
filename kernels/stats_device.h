// Device kernels of the error statistics: both planes are read once, also for the channel sums. Every block adds up its pages in
// its own place, then one thread per sum adds the places in order: no atomics, so the result depends on the shape alone. The order
// differs from the host's; fp64 leaves both within a few ulp of the exact sums.
#pragma once

#include "plane_device.h"

namespace ckv {
namespace stats {

constexpr int kFigures = 5;  // sum x^2, sum y^2, sum x*y, sum (x-y)^2, max |x-y|
constexpr int kMaxChunks = 256;
constexpr int kUnroll = 2;

CKV_DEVICE double join(double a, double b, bool maximum) { return maximum ? (a >= b ? a : b) : a + b; }

// Ends with a barrier, so that `shared` can be used again.
CKV_DEVICE double block_reduce(double* shared, double value, bool maximum) {
  shared[threadIdx.x] = value;
  __syncthreads();
  for (int half = kBlock / 2; half; half /= 2) {
    if (static_cast<int>(threadIdx.x) < half) shared[threadIdx.x] = join(shared[threadIdx.x], shared[threadIdx.x + half], maximum);
    __syncthreads();
  }
  const double all = shared[0];
  __syncthreads();
  return all;
}

template <int kChannels>
struct Values {
  float v[kChannels];
  CKV_DEVICE void load(const float* from) {
    if constexpr (kChannels == 4) {
      const float4 q = *reinterpret_cast<const float4*>(from);
      v[0] = q.x, v[1] = q.y, v[2] = q.z, v[3] = q.w;
    } else {
      const float2 q = *reinterpret_cast<const float2*>(from);
      v[0] = q.x, v[1] = q.y;
    }
  }
};

// grid (heads, chunks): block (h, c) takes pages c, c + chunks, ... of head h. A thread stays with kChannels channels and takes every
// lanes-th row of them. channel_partial: [heads][chunks][D], or NULL.
template <int kChannels>
CKV_KERNEL sums_kernel(int64_t pages, int heads, int rows, int D, const float* x, const float* y, double* partial, double* channel_partial) {
  CKV_SHARED(double, scratch, kBlock);
  const int columns = D / kChannels, thread = static_cast<int>(threadIdx.x);
  const int64_t place = static_cast<int64_t>(blockIdx.x) * gridDim.y + blockIdx.y;
  double f[kFigures] = {0, 0, 0, 0, 0};
  for (int first = 0; first < columns; first += kBlock) {  // one turn unless rows are longer than a block is wide
    const int width = columns - first < kBlock ? columns - first : kBlock, lanes = kBlock / width;
    const int column = first + thread % width, lane = thread / width;
    double channel[kChannels] = {};
    for (int64_t page = blockIdx.y; page < pages && lane < lanes; page += gridDim.y) {
      const int64_t at = (page * heads + blockIdx.x) * rows * D + column * kChannels;
      for (int row = lane; row < rows; row += kUnroll * lanes) {
        Values<kChannels> a[kUnroll], b[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u)
          if (row + u * lanes < rows) {
            a[u].load(x + at + static_cast<int64_t>(row + u * lanes) * D);
            b[u].load(y + at + static_cast<int64_t>(row + u * lanes) * D);
          }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u)
          if (row + u * lanes < rows)
            for (int c = 0; c < kChannels; ++c) {
              const double p = static_cast<double>(a[u].v[c]), q = static_cast<double>(b[u].v[c]), e = p - q;
              f[0] += p * p;
              f[1] += q * q;
              f[2] += p * q;
              f[3] += e * e;
              f[4] = join(f[4], e < 0 ? -e : e, true);
              channel[c] += p;
            }
      }
    }
    if (!channel_partial) continue;
    for (int c = 0; c < kChannels; ++c) {
      scratch[thread] = channel[c];
      __syncthreads();
      if (lane == 0) {
        double sum = channel[c];
        for (int l = 1; l < lanes; ++l) sum += scratch[l * width + thread];
        channel_partial[place * D + column * kChannels + c] = sum;
      }
      __syncthreads();
    }
  }
  for (int k = 0; k < kFigures; ++k) {
    const double all = block_reduce(scratch, f[k], k == 4);
    if (thread == 0) partial[place * kFigures + k] = all;
  }
}

CKV_KERNEL finish_kernel(int heads, int chunks, double elements, const double* partial, double* out) {
  const int head = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (head >= heads) return;
  double* o = out + 6 * head;
  for (int c = 0; c < chunks; ++c) {
    const double* p = partial + (static_cast<int64_t>(head) * chunks + c) * kFigures;
    for (int k = 0; k < kFigures; ++k) o[k] = join(o[k], p[k], k == 4);
  }
  o[5] += elements;
}

// One thread per head and channel.
CKV_KERNEL finish_channels_kernel(int heads, int chunks, int D, const double* channel_partial, double* sums) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i >= static_cast<int64_t>(heads) * D) return;
  const double* p = channel_partial + i / D * chunks * D + i % D;
  for (int c = 0; c < chunks; ++c) sums[i] += p[static_cast<int64_t>(c) * D];
}

}  // namespace stats
}  // namespace ckv
