// Each warp reverses its values by way of shared memory. Planted: a shuffle stands where __syncwarp must; it orders no memory.
#include "fault.h"

namespace ckv {
template <bool kPlanted>
CKV_KERNEL warp_order_kernel(const int* in, int* out, int) {
  CKV_SHARED(int, values, kBlock);
  const unsigned i = blockIdx.x * kBlock + threadIdx.x;
  values[threadIdx.x] = in[i];
  int add = 0;
  if constexpr (kPlanted)
    add = __shfl_sync(kFullWarp, 0, 0);
  else
    __syncwarp();
  out[i] = values[threadIdx.x ^ 31u] + add;
}
}  // namespace ckv

CKV_FAULT(warp_order, static_cast<unsigned>(n / ckv::kBlock))
