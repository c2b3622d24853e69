// Lanes 0..23 of every warp count themselves. Planted: lane 23 is missing in its own mask.
#include "fault.h"

namespace ckv {
template <bool kPlanted>
CKV_KERNEL wrong_mask_kernel(const int* in, int* out, int) {
  const unsigned i = blockIdx.x * kBlock + threadIdx.x;
  out[i] = 0;
  if (threadIdx.x % 32 < 24) out[i] = __popc(__ballot_sync(kPlanted ? 0x007FFFFFu : 0x00FFFFFFu, in[i] > 0));
}
}  // namespace ckv

CKV_FAULT(wrong_mask, static_cast<unsigned>(n / ckv::kBlock))
