// Device instructions that C++ has no word for, each with its meaning spelled out for other compilers.
#pragma once

#include "port.cuh"

namespace ckv {

// Byte i of the result: byte (n & 7) of the eight bytes low, high (least significant first), n being nibble i of the selector.
// Where n & 8 is set, all eight bits of the result are that byte's sign bit.
CKV_DEVICE uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selector) {
#if defined(__CUDA_ARCH__)
  uint32_t r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(low), "r"(high), "r"(selector));
  return r;
#else
  uint32_t r = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t n = selector >> 4 * i & 15u, byte = (n & 4u ? high : low) >> 8 * (n & 3u) & 255u;
    r |= (n & 8u ? (byte & 128u ? 255u : 0u) : byte) << 8 * i;
  }
  return r;
#endif
}

// Bits of a where the mask is set, of b elsewhere. One instruction, which compilers miss once they know some of the bits.
template <uint32_t kMask>
CKV_DEVICE uint32_t select_bits(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xE4;" : "=r"(r) : "r"(a), "r"(b), "n"(kMask));
  return r;
#else
  return (a & kMask) | (b & ~kMask);
#endif
}

// sum + the four products of bytes, unsigned.
CKV_DEVICE uint32_t dot_bytes(uint32_t a, uint32_t b, uint32_t sum) {
#if defined(__CUDA_ARCH__)
  return __dp4a(a, b, sum);
#else
  for (int i = 0; i < 4; ++i) sum += (a >> 8 * i & 255u) * (b >> 8 * i & 255u);
  return sum;
#endif
}

// 1 / x within 2^-23 of it, x normal and so is 1 / x.
CKV_DEVICE float near_reciprocal(float x) {
#if defined(__CUDA_ARCH__)
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
#else
  return 1.0f / x;
#endif
}

CKV_DEVICE uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

// Maximum over groups of kLanes neighbouring lanes, a power of two. All 32 lanes of the warp take part.
template <int kLanes>
CKV_DEVICE uint32_t max_of_lanes(uint32_t x) {
  for (int step = 1; step < kLanes; step *= 2) x = larger(x, __shfl_xor_sync(kFullWarp, x, step));
  return x;
}

// Whether the flag is set in any thread of the block.
CKV_DEVICE bool any_in_block(bool flag) { return __syncthreads_count(flag) != 0; }

}  // namespace ckv
