// Every thread gets its warp's sum of lanes 0..23. Planted: the other lanes do not come to the shuffles, and wait at the barrier.
#include "fault.h"

namespace ckv {
template <bool kPlanted>
CKV_KERNEL missing_lane_kernel(const int* in, int* out, int) {
  CKV_SHARED(int, sums, kBlock / 32);
  const unsigned i = blockIdx.x * kBlock + threadIdx.x, lane = threadIdx.x % 32;
  int v = lane < 24 ? in[i] : 0;
  if (lane < 24 || !kPlanted)
    for (int step = 16; step; step /= 2) v += __shfl_xor_sync(kFullWarp, v, step);
  if (lane == 0) sums[threadIdx.x / 32] = v;
  __syncthreads();
  out[i] = sums[threadIdx.x / 32];
}
}  // namespace ckv

CKV_FAULT(missing_lane, static_cast<unsigned>(n / ckv::kBlock))
