// Copies 16 bytes per thread. Planted: from one element further on.
#include "fault.h"

namespace ckv {
template <bool kPlanted>
CKV_KERNEL misaligned_load_kernel(const int* in, int* out, int n) {
  const int i = static_cast<int>(blockIdx.x * kBlock + threadIdx.x);
  if (4 * i + 4 >= n) return;
  const uint4 q = *reinterpret_cast<const uint4*>(in + 4 * i + kPlanted);
  out[4 * i] = static_cast<int>(q.x);
  out[4 * i + 1] = static_cast<int>(q.y);
  out[4 * i + 2] = static_cast<int>(q.z);
  out[4 * i + 3] = static_cast<int>(q.w);
}
}  // namespace ckv

CKV_FAULT(misaligned_load, ckv::grid_for(n / 4))
