// Doubles every value. Planted: the first thread waits for a word that nobody will ever write.
#include "fault.h"

namespace ckv {
template <bool kPlanted>
CKV_KERNEL endless_kernel(const int* in, int* out, int n) {
  const int i = static_cast<int>(blockIdx.x * kBlock + threadIdx.x);
  if constexpr (kPlanted)
    if (i == 0)
      while (*static_cast<const volatile int*>(in) != -12345) {
      }
  if (i < n) out[i] = 2 * in[i];
}
}  // namespace ckv

CKV_FAULT(endless, ckv::grid_for(n))
