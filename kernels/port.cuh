// The one seam between the kernels and a toolchain; every kernel file includes it and no CUDA header itself.
//
// Three builds of the same sources:
//   host    g++/clang++ -x c++        defines the *_cpu entry points
//   device  nvcc                      defines the *_cuda entry points
//   shim    host compiler, CKV_SHIM   defines the *_cuda entry points on top of a CUDA-on-CPU header (tests only); that header
//                                     supplies __global__, threadIdx, the warp primitives and CKV_LAUNCH
//
// Bit-exactness rests on flags that this file cannot set: no FMA contraction (g++ -ffp-contract=off, nvcc -fmad=false), no
// fast-math, and denormals kept (nvcc's default -ftz=false -prec-div=true).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__FAST_MATH__)
#error "coldkv kernels are bit-exact: build without -ffast-math"
#endif

#if defined(__CUDACC__)
#include <cuda_runtime.h>
#define CKV_HD __host__ __device__ __forceinline__
#define CKV_DEVICE __device__ __forceinline__
#define CKV_DEVICE_CALL static __device__ __noinline__  // large, called from several places: one copy
#define CKV_KERNEL __global__ static void
#define CKV_SHARED(T, name, n) __shared__ T name[n]
#define CKV_LAUNCH(kernel, grid, block, stream, ...) \
  kernel<<<(grid), (block), 0, static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__)
#define CKV_BUILD_DEVICE 1
#define CKV_BUILD_HOST 0
#elif defined(CKV_SHIM)
#include "cuda_on_cpu.h"
#define CKV_HD inline
#define CKV_DEVICE inline
#define CKV_DEVICE_CALL static inline
#define CKV_KERNEL static void
#define CKV_BUILD_DEVICE 1
#define CKV_BUILD_HOST 0
#else
#define CKV_HD inline
#define CKV_BUILD_DEVICE 0
#define CKV_BUILD_HOST 1
#endif

// AVX2 paths compute what the plain loops compute, only faster; CKV_NO_SIMD builds the plain loops for comparison.
#if CKV_BUILD_HOST && defined(__AVX2__) && !defined(CKV_NO_SIMD)
#define CKV_AVX2 1
#include <immintrin.h>
#else
#define CKV_AVX2 0
#endif
#if CKV_BUILD_HOST && defined(__F16C__) && CKV_AVX2
#define CKV_F16C 1
#else
#define CKV_F16C 0
#endif

namespace ckv {

CKV_HD uint32_t bits_of(float x) {
  uint32_t u;
  memcpy(&u, &x, sizeof u);
  return u;
}

CKV_HD float float_of(uint32_t u) {
  float x;
  memcpy(&x, &u, sizeof x);
  return x;
}

}  // namespace ckv

#if CKV_BUILD_DEVICE
namespace ckv {

// A launch that could not start is the only error these launchers can see; 0 when the launch was accepted.
inline int launch_status() { return cudaGetLastError() == cudaSuccess ? 0 : 6 /* CKV_E_LAUNCH */; }

constexpr unsigned kFullWarp = 0xFFFFFFFFu;
constexpr int kBlock = 256;  // threads per block of every kernel; a multiple of 32

// Blocks for `items` threads of work; kernels loop over the rest.
inline unsigned grid_for(int64_t items) {
  const int64_t blocks = (items + kBlock - 1) / kBlock, most = 1 << 20;
  return static_cast<unsigned>(blocks < 1 ? 1 : blocks > most ? most : blocks);
}

}  // namespace ckv
#endif
