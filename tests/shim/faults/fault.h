// A planted fault: one kernel in two versions, `kPlanted` with the fault and sound without. All are called alike:
//   int ckv_fault_<file>_cuda(int planted, const int* in, int* out, int n, void* stream)
// in and out hold n ints; test_shim_faults.py knows what out should be.
#pragma once

#include "port.cuh"

#define CKV_FAULT(name, grid)                                                                                               \
  extern "C" __attribute__((visibility("default"))) int ckv_fault_##name##_cuda(int planted, const int* in, int* out, int n, void* stream) { \
    if (planted)                                                                                                            \
      CKV_LAUNCH((ckv::name##_kernel<true>), (grid), ckv::kBlock, stream, in, out, n);                                      \
    else                                                                                                                    \
      CKV_LAUNCH((ckv::name##_kernel<false>), (grid), ckv::kBlock, stream, in, out, n);                                     \
    return ckv::launch_status();                                                                                            \
  }
