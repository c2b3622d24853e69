// The one seam between the kernels and a toolchain; every kernel file includes it and no CUDA header itself.
//
// Three builds of the same sources:
//   host    g++/clang++ -x c++        defines the *_cpu entry points
//   device  nvcc                      defines the *_cuda entry points
//   shim    host compiler, CKV_SHIM   defines the *_cuda entry points on top of a CUDA-on-CPU header (tests only); that header
//                                     supplies __global__, threadIdx, the warp primitives, CKV_SHARED and CKV_LAUNCH
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
#define CKV_DYN_SHARED(T, name)                                   \
  extern __shared__ __align__(16) unsigned char ckv_dyn_shared[]; \
  T* const name = reinterpret_cast<T*>(ckv_dyn_shared)
#define CKV_LAUNCH(kernel, grid, block, stream, ...) \
  kernel<<<(grid), (block), 0, static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__)
// With `bytes` of dynamic shared memory; above 48 KiB a kernel has to ask for it.
#define CKV_LAUNCH_SHARED(kernel, grid, block, bytes, stream, ...)                                                               \
  do {                                                                                                                           \
    if ((bytes) > 48 * 1024) cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)); \
    kernel<<<(grid), (block), (bytes), static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__);                                        \
  } while (0)
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

// ---- primitives that a host compiler does not know; everything else keeps its CUDA name --------------------------------------

// c + the dot product of four signed bytes with four signed bytes.
CKV_DEVICE int dp4a_s8(int a, int b, int c) {
#if defined(__CUDA_ARCH__)
  return __dp4a(a, b, c);
#else
  uint32_t sum = static_cast<uint32_t>(c);  // wraps, as the instruction does
  for (int i = 0; i < 32; i += 8) sum += static_cast<uint32_t>(static_cast<int8_t>(a >> i) * static_cast<int8_t>(b >> i));
  return static_cast<int>(sum);
#endif
}

// Two finite numbers as bf16, nearest, ties to even: `low` in the lower half.
CKV_DEVICE uint32_t bf16_pair(float low, float high) {
#if defined(__CUDA_ARCH__)
  uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
#else
  const auto rounded = [](float x) { return (bits_of(x) + 0x7FFFu + (bits_of(x) >> 16 & 1u)) >> 16; };
  return rounded(low) | rounded(high) << 16;
#endif
}

// D[16x8] += A[16x32] * B[32x8], int8 in, int32 out, by one whole warp. With g = lane / 4, t = lane % 4, and four neighbouring
// values of k per register, lowest byte first: a[0], a[1] hold rows g, g + 8 at k = 4t; a[2], a[3] the same rows at k = 4t + 16;
// b[0], b[1] hold column g at k = 4t, 4t + 16; d[0], d[1] are row g, columns 2t, 2t + 1; d[2], d[3] row g + 8.
CKV_DEVICE void mma_m16n8k32_s8(int (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if defined(__CUDA_ARCH__)
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#elif defined(CKV_SHIM)
  cpusim::mma_m16n8k32_s8(d, a, b);
#endif
}

// Copies of 16 aligned bytes from global to shared memory that run beside the thread. A thread's copies since its last
// async_commit form a group; async_wait<N> returns when all of its groups but the newest N have arrived. Other threads see the
// bytes after a barrier that follows the wait.
CKV_DEVICE void async_copy16(void* shared, const void* global) {
#if defined(__CUDA_ARCH__)
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
#elif defined(CKV_SHIM)
  cpusim::async_copy16(shared, global);
#endif
}
CKV_DEVICE void async_commit() {
#if defined(__CUDA_ARCH__)
  asm volatile("cp.async.commit_group;" ::: "memory");
#elif defined(CKV_SHIM)
  cpusim::async_commit();
#endif
}
template <int kPending>
CKV_DEVICE void async_wait() {
#if defined(__CUDA_ARCH__)
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#elif defined(CKV_SHIM)
  cpusim::async_wait(kPending);
#endif
}

}  // namespace ckv
#endif
