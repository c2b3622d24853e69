// out[block] = sum of the block's values. Planted: only half of the threads come to the barrier of the tree, the others go on.
#include "fault.h"

namespace ckv {
template <bool kPlanted>
CKV_KERNEL divergent_barrier_kernel(const int* in, int* out, int) {
  CKV_SHARED(int, sums, kBlock);
  const unsigned t = threadIdx.x;
  sums[t] = in[blockIdx.x * kBlock + t];
  __syncthreads();
  for (unsigned half = kBlock / 2; half; half /= 2) {
    if (t < half) {
      sums[t] += sums[t + half];
      if constexpr (kPlanted) __syncthreads();
    }
    if constexpr (!kPlanted) __syncthreads();
  }
  __syncthreads();
  if (t == 0) out[blockIdx.x] = sums[0];
}
}  // namespace ckv

CKV_FAULT(divergent_barrier, static_cast<unsigned>(n / ckv::kBlock))
