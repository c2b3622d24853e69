// out[block] = sum of the block's values. Planted: threads add to one word without an atomic.
#include "fault.h"

namespace ckv {
template <bool kPlanted>
CKV_KERNEL race_kernel(const int* in, int* out, int) {
  CKV_SHARED(int, total, 1);
  if (threadIdx.x == 0) total[0] = 0;
  __syncthreads();
  const int v = in[blockIdx.x * kBlock + threadIdx.x];
  if constexpr (kPlanted)
    total[0] = total[0] + v;
  else
    atomicAdd(&total[0], v);
  __syncthreads();
  if (threadIdx.x == 0) out[blockIdx.x] = total[0];
}
}  // namespace ckv

CKV_FAULT(race, static_cast<unsigned>(n / ckv::kBlock))
