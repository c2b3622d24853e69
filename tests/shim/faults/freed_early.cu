// Doubles every value by way of a temporary buffer. Planted: the launcher frees it before the kernel that reads it.
#include "fault.h"

namespace ckv {
CKV_KERNEL freed_early_kernel(const int* in, int* out, int n, int factor) {
  const int i = static_cast<int>(blockIdx.x * kBlock + threadIdx.x);
  if (i < n) out[i] = factor * in[i];
}
}  // namespace ckv

extern "C" __attribute__((visibility("default"))) int ckv_fault_freed_early_cuda(int planted, const int* in, int* out, int n, void* stream) {
  void* temporary = nullptr;
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
  if (cudaMallocAsync(&temporary, sizeof(int) * static_cast<size_t>(n), on) != cudaSuccess) return 6;
  CKV_LAUNCH(ckv::freed_early_kernel, ckv::grid_for(n), ckv::kBlock, stream, in, static_cast<int*>(temporary), n, 2);
  if (planted) cudaFreeAsync(temporary, on);
  CKV_LAUNCH(ckv::freed_early_kernel, ckv::grid_for(n), ckv::kBlock, stream, static_cast<const int*>(temporary), out, n, 1);
  if (!planted) cudaFreeAsync(temporary, on);
  return ckv::launch_status();
}
