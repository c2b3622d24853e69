// Reverses each block's values by way of async copies into shared memory. Planted: the copies are not waited for.
#include "fault.h"

namespace ckv {
template <bool kPlanted>
CKV_KERNEL missing_async_wait_kernel(const int* in, int* out, int) {
  CKV_SHARED(uint4, staged, kBlock / 4);
  if (threadIdx.x < kBlock / 4) async_copy16(&staged[threadIdx.x], in + blockIdx.x * kBlock + 4 * threadIdx.x);
  async_commit();
  if constexpr (!kPlanted) async_wait<0>();
  __syncthreads();
  out[blockIdx.x * kBlock + threadIdx.x] = reinterpret_cast<const int*>(staged)[kBlock - 1 - threadIdx.x];
}
}  // namespace ckv

CKV_FAULT(missing_async_wait, static_cast<unsigned>(n / ckv::kBlock))
