// out[i] = in[i + 1], 0 at the end. Planted: reads in[n].
#include "fault.h"

namespace ckv {
template <bool kPlanted>
CKV_KERNEL out_of_range_read_kernel(const int* in, int* out, int n) {
  const int i = static_cast<int>(blockIdx.x * kBlock + threadIdx.x);
  if (i < n) out[i] = i + 1 < n || kPlanted ? in[i + 1] : 0;
}
}  // namespace ckv

CKV_FAULT(out_of_range_read, ckv::grid_for(n))
