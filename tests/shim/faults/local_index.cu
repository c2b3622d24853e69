// out[i] = sum of the first (in[i] & 7) squares. Planted: the table is two entries short.
#include "fault.h"

namespace ckv {
template <bool kPlanted>
CKV_KERNEL local_index_kernel(const int* in, int* out, int n) {
  const int i = static_cast<int>(blockIdx.x * kBlock + threadIdx.x);
  if (i >= n) return;
  int sums[kPlanted ? 6 : 8];
  sums[0] = 0;
  for (int k = 1; k < (kPlanted ? 6 : 8); ++k) sums[k] = sums[k - 1] + k * k;
  out[i] = sums[in[i] & 7];
}
}  // namespace ckv

CKV_FAULT(local_index, ckv::grid_for(n))
