// Moves each block's values one place up by way of shared memory, the last one lost. Planted: the last one is written past the
// array's end.
#include "fault.h"

namespace ckv {
template <bool kPlanted>
CKV_KERNEL shared_out_of_range_kernel(const int* in, int* out, int) {
  CKV_SHARED(int, values, kBlock);
  const unsigned i = blockIdx.x * kBlock + threadIdx.x;
  int* moved = values + 1;
  if (threadIdx.x == 0) values[0] = 0;
  if (threadIdx.x + 1 < kBlock || kPlanted) moved[threadIdx.x] = in[i];
  __syncthreads();
  out[i] = values[threadIdx.x];
}
}  // namespace ckv

CKV_FAULT(shared_out_of_range, static_cast<unsigned>(n / ckv::kBlock))
