// Reverses each block's values by way of shared memory. Planted: no barrier between the writes and the reads.
#include "fault.h"

namespace ckv {
template <bool kPlanted>
CKV_KERNEL missing_barrier_kernel(const int* in, int* out, int) {
  CKV_SHARED(int, values, kBlock);
  const unsigned i = blockIdx.x * kBlock + threadIdx.x;
  values[threadIdx.x] = in[i];
  if constexpr (!kPlanted) __syncthreads();
  out[i] = values[kBlock - 1 - threadIdx.x];
}
}  // namespace ckv

CKV_FAULT(missing_barrier, static_cast<unsigned>(n / ckv::kBlock))
