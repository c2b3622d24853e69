// Doubles every value. Planted: writes one element past the end.
#include "fault.h"

namespace ckv {
template <bool kPlanted>
CKV_KERNEL out_of_range_write_kernel(const int* in, int* out, int n) {
  const int i = static_cast<int>(blockIdx.x * kBlock + threadIdx.x);
  if (i < n + kPlanted) out[i] = i < n ? 2 * in[i] : 0;
}
}  // namespace ckv

CKV_FAULT(out_of_range_write, ckv::grid_for(n + 1))
