// out[i] = number of positive values in its block. Planted: the counter in shared memory is never set to zero.
#include "fault.h"

namespace ckv {
template <bool kPlanted>
CKV_KERNEL uninitialised_kernel(const int* in, int* out, int) {
  CKV_SHARED(int, count, 1);
  if (threadIdx.x == 0 && !kPlanted) count[0] = 0;
  __syncthreads();
  const unsigned i = blockIdx.x * kBlock + threadIdx.x;
  if (in[i] > 0) atomicAdd(&count[0], 1);
  __syncthreads();
  out[i] = count[0];
}
}  // namespace ckv

CKV_FAULT(uninitialised, static_cast<unsigned>(n / ckv::kBlock))
