// out[k] = sum over all blocks of their k-th value. Planted: blocks add to global memory without an atomic.
#include "fault.h"

namespace ckv {
template <bool kPlanted>
CKV_KERNEL block_race_kernel(const int* in, int* out, int) {
  const int v = in[blockIdx.x * kBlock + threadIdx.x];
  if constexpr (kPlanted)
    out[threadIdx.x] += v;
  else
    atomicAdd(&out[threadIdx.x], v);
}
}  // namespace ckv

CKV_FAULT(block_race, static_cast<unsigned>(n / ckv::kBlock))
