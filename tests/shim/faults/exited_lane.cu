// Lanes 0..23 of every warp count themselves. Planted: the others have returned, but the mask names them.
#include "fault.h"

namespace ckv {
template <bool kPlanted>
CKV_KERNEL exited_lane_kernel(const int* in, int* out, int) {
  const unsigned i = blockIdx.x * kBlock + threadIdx.x;
  out[i] = 0;
  if (threadIdx.x % 32 >= 24) return;
  out[i] = __popc(__ballot_sync(kPlanted ? kFullWarp : 0x00FFFFFFu, in[i] > 0));
}
}  // namespace ckv

CKV_FAULT(exited_lane, static_cast<unsigned>(n / ckv::kBlock))
