// Every primitive that kernels may use, each in a kernel whose result test_shim_primitives.py knows. Compiles with nvcc too, and the
// results hold on a GPU. All entry points: int ckv_primitive_<name>_cuda(const int* in, int* out, void* stream), one launch.
#include "port.cuh"

namespace ckv {

// 4 warps; 10 results per thread, [10][128].
CKV_KERNEL shuffles_kernel(const int* in, int* out) {
  const int t = static_cast<int>(threadIdx.x), lane = t % 32, v = in[t];
  out[t] = __shfl_sync(kFullWarp, v, lane * 5 + 3);
  out[128 + t] = __shfl_sync(kFullWarp, v, lane / 2, 8);
  out[256 + t] = __shfl_up_sync(kFullWarp, v, 3);
  out[384 + t] = __shfl_up_sync(kFullWarp, v, 3, 16);
  out[512 + t] = __shfl_down_sync(kFullWarp, v, 5);
  out[640 + t] = __shfl_down_sync(kFullWarp, v, 5, 8);
  out[768 + t] = __shfl_xor_sync(kFullWarp, v, 21);
  out[896 + t] = __shfl_xor_sync(kFullWarp, v, 12, 8);  // reaches into the next segment from below: own value, but not from above
  if (lane < 12)  // the two sides of a branch, each with its own lanes
    out[1024 + t] = __shfl_sync(0x00000FFFu, v, 11 - lane);
  else
    out[1024 + t] = __shfl_xor_sync(0xFFFFF000u, v, 3);
  const double wide = __shfl_down_sync(kFullWarp, v + 0.5, 1);
  out[1152 + t] = static_cast<int>(wide * 2);
}

// Lanes leave a loop one by one, as those of an entropy coder do when their streams end; warps are at different turns meanwhile.
CKV_KERNEL votes_kernel(const int* in, int* out) {
  const int t = static_cast<int>(threadIdx.x), lane = t % 32;
  const unsigned below = (1u << lane) - 1u;
  unsigned mask = kFullWarp;
  int left = in[t] & 15, code = 1;
  for (;;) {
    const unsigned going = __ballot_sync(mask, left > 0);
    if (left <= 0) break;
    mask = going;
    const unsigned odd = __ballot_sync(mask, left & 1);
    code = (code * 33 + __popc(odd & below)) & 0xFFFFFF;
    if (__any_sync(mask, left == 7)) code ^= 0x100;
    if (__all_sync(mask, left < 9)) code ^= 0x200;
    --left;
  }
  out[t] = code;
}

// Inclusive scan of 256 values: shuffles inside a warp, shared memory between warps.
CKV_KERNEL scan_kernel(const int* in, int* out) {
  CKV_SHARED(int, warp_sums, kBlock / 32);
  const int t = static_cast<int>(threadIdx.x), lane = t % 32;
  int v = in[t];
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(kFullWarp, v, static_cast<unsigned>(step));
    if (lane >= step) v += before;
  }
  if (lane == 31) warp_sums[t / 32] = v;
  __syncthreads();
  for (int w = 0; w < t / 32; ++w) v += warp_sums[w];
  out[t] = v;
}

// Rotates values inside each half warp through shared memory, ordered by __syncwarp with half masks alone.
CKV_KERNEL half_warps_kernel(const int* in, int* out) {
  CKV_SHARED(int, values, kBlock);
  const int t = static_cast<int>(threadIdx.x);
  const unsigned mask = t % 32 < 16 ? 0x0000FFFFu : 0xFFFF0000u;
  int v = in[t];
  for (int turn = 0; turn < 3 + t / 16 % 5; ++turn) {
    values[t] = v;
    __syncwarp(mask);
    v = values[t / 16 * 16 + (t + 1) % 16];
    __syncwarp(mask);
  }
  __syncwarp();
  out[t] = v + values[t ^ 31];
}

CKV_KERNEL barriers_kernel(const int* in, int* out) {
  const int t = static_cast<int>(threadIdx.x), v = in[t];
  const int odd = __syncthreads_count(v & 1), all = __syncthreads_and(v >= 0), any = __syncthreads_or(v == in[17] && t == 17);
  out[t] = odd * 4 + (all != 0) * 2 + (any != 0);
}

CKV_KERNEL reductions_kernel(const int* in, int* out) {
  const int t = static_cast<int>(threadIdx.x), v = in[t];
  const unsigned u = static_cast<unsigned>(v), mask = t % 32 < 8 ? 0x000000FFu : 0xFFFFFF00u;
  out[t] = __reduce_add_sync(mask, v);
  out[128 + t] = __reduce_min_sync(mask, v);
  out[256 + t] = __reduce_max_sync(mask, v);
  out[384 + t] = static_cast<int>(__reduce_max_sync(mask, u));
  out[512 + t] = static_cast<int>(__reduce_or_sync(mask, u));
  out[640 + t] = static_cast<int>(__reduce_and_sync(mask, u));
}

CKV_KERNEL bits_kernel(const int* in, int* out) {
  const int t = static_cast<int>(threadIdx.x);
  const unsigned a = static_cast<unsigned>(in[t]), b = static_cast<unsigned>(in[(t + 1) % 128]), s = a % 40;
  const unsigned long long wide = static_cast<unsigned long long>(a) << 32 | b;
  const unsigned results[] = {static_cast<unsigned>(__popc(a)),
                              static_cast<unsigned>(__clz(static_cast<int>(a >> s % 32))),
                              static_cast<unsigned>(__ffs(static_cast<int>(a))),
                              __brev(a),
                              __funnelshift_l(a, b, s),
                              __funnelshift_r(a, b, s),
                              __funnelshift_lc(a, b, s),
                              __funnelshift_rc(a, b, s),
                              __byte_perm(a, b, a >> 3),
                              static_cast<unsigned>(__popcll(wide)),
                              static_cast<unsigned>(__clzll(static_cast<long long>(wide >> s))),
                              static_cast<unsigned>(__ffsll(static_cast<long long>(wide))),
                              __umulhi(a, b),
                              __float_as_uint(static_cast<float>(in[t])),
                              static_cast<unsigned>(__float2int_rn(__uint_as_float(0x3F800000u | a >> 9) * 8.0f))};
  for (int i = 0; i < 15; ++i) out[128 * i + t] = static_cast<int>(results[i]);
}

// out: words for the int and unsigned operations, two per 64-bit one; then what atomicAdd returned to each thread.
// Words start at 0, word 7 at all ones.
CKV_KERNEL atomics_kernel(const int* in, int* out) {
  const int t = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x), v = in[t];
  const unsigned u = static_cast<unsigned>(v);
  unsigned* words = reinterpret_cast<unsigned*>(out);
  atomicAdd(out, v);
  atomicMax(out + 1, v);
  atomicMin(out + 2, v);
  atomicAdd(words + 3, u);
  atomicMax(words + 4, u);
  atomicOr(words + 5, u);
  atomicXor(words + 6, u);
  atomicAnd(words + 7, u | 0xFFFF0000u);
  atomicSub(out + 8, 3);
  for (int seen = 0, was = -1; was != seen; ) {  // a product, by compare and swap
    was = seen;
    seen = atomicCAS(out + 9, was, (was * 3 + 1) & 0xFFFF);
  }
  unsigned long long* wide = reinterpret_cast<unsigned long long*>(out + 10);
  atomicAdd(wide, static_cast<unsigned long long>(u) << 8);
  atomicMax(wide + 1, static_cast<unsigned long long>(u) << 8);
  atomicAdd(reinterpret_cast<float*>(out + 14), 0.25f);
  atomicExch(out + 15, 77);
  out[16 + t] = atomicAdd(out + 16 + 512, 1);
}

CKV_KERNEL dp4a_kernel(const int* in, int* out) {
  const int t = static_cast<int>(threadIdx.x);
  out[t] = dp4a_s8(in[t], in[128 + t], in[256 + t]);
}

// C[16x8] += A[16x64] * B[64x8] for each of 4 warps, in two steps of k = 32. Bytes: A row by row, then B column by column.
CKV_KERNEL mma_kernel(const int* in, int* out) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  const int8_t* A = reinterpret_cast<const int8_t*>(in) + warp * (16 * 64 + 64 * 8);
  const int8_t* B = A + 16 * 64;
  const auto word = [](const int8_t* from) { return *reinterpret_cast<const uint32_t*>(from); };
  int d[4] = {1, 2, 3, 4};
  for (int k = 0; k < 64; k += 32) {
    const uint32_t a[4] = {word(A + g * 64 + k + 4 * t), word(A + (g + 8) * 64 + k + 4 * t), word(A + g * 64 + k + 4 * t + 16),
                           word(A + (g + 8) * 64 + k + 4 * t + 16)};
    const uint32_t b[2] = {word(B + g * 64 + k + 4 * t), word(B + g * 64 + k + 4 * t + 16)};
    mma_m16n8k32_s8(d, a, b);
  }
  int* C = out + warp * 128;
  C[g * 8 + 2 * t] = d[0];
  C[g * 8 + 2 * t + 1] = d[1];
  C[(g + 8) * 8 + 2 * t] = d[2];
  C[(g + 8) * 8 + 2 * t + 1] = d[3];
}

// Sums 8 tiles of 128 values per lane position, two tiles in flight.
CKV_KERNEL async_kernel(const int* in, int* out) {
  CKV_SHARED(uint4, tiles, 2 * 32);
  const int t = static_cast<int>(threadIdx.x);
  const auto fetch = [&](int tile) {
    if (tile < 8 && t < 32) async_copy16(&tiles[tile % 2 * 32 + t], in + tile * 128 + 4 * t);
    async_commit();
  };
  fetch(0);
  int sum = 0;
  for (int tile = 0; tile < 8; ++tile) {
    fetch(tile + 1);
    async_wait<1>();
    __syncthreads();
    sum += reinterpret_cast<const int*>(tiles)[tile % 2 * 128 + 127 - t];
    __syncthreads();
  }
  out[t] = sum;
}

// 64 KiB of dynamic shared memory: transposes 128 x 128 values.
CKV_KERNEL dynamic_kernel(const int* in, int* out) {
  CKV_DYN_SHARED(int, values);
  for (int i = static_cast<int>(threadIdx.x); i < 128 * 128; i += kBlock) values[i] = in[i];
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < 128 * 128; i += kBlock) out[i] = values[i % 128 * 128 + i / 128];
}

// Grid (3, 2, 2) of blocks (4, 8, 3): every thread writes its own coordinates.
CKV_KERNEL indices_kernel(const int*, int* out) {
  const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
  out[block * threads + thread] = static_cast<int>(block * 1000 + thread);
}

// Vector and hinted loads and stores; a memcpy of a length that only the caller knows.
CKV_KERNEL vectors_kernel(const int* in, int* out) {
  const int t = static_cast<int>(threadIdx.x);
  const uint4 q = __ldg(reinterpret_cast<const uint4*>(in) + t);
  const float2 f = make_float2(static_cast<float>(q.x & 255u), 0.5f);
  reinterpret_cast<uint2*>(out)[2 * t] = make_uint2(q.w, q.z);
  __stcs(reinterpret_cast<uint2*>(out) + 2 * t + 1, make_uint2(q.y, static_cast<unsigned>(f.x * f.y * 2)));
  memcpy(out + 512 + 4 * t, in + 4 * t, static_cast<size_t>(4 * (t % 4)));
}

}  // namespace ckv

#define CKV_PRIMITIVE(name, grid, block, shared)                                                                                     \
  extern "C" __attribute__((visibility("default"))) int ckv_primitive_##name##_cuda(const int* in, int* out, void* stream) {         \
    CKV_LAUNCH_SHARED(ckv::name##_kernel, dim3 grid, dim3 block, shared, stream, in, out);                                           \
    return ckv::launch_status();                                                                                                     \
  }

CKV_PRIMITIVE(shuffles, (1), (128), 0)
CKV_PRIMITIVE(votes, (1), (128), 0)
CKV_PRIMITIVE(scan, (1), (256), 0)
CKV_PRIMITIVE(half_warps, (1), (256), 0)
CKV_PRIMITIVE(barriers, (1), (128), 0)
CKV_PRIMITIVE(reductions, (1), (128), 0)
CKV_PRIMITIVE(bits, (1), (128), 0)
CKV_PRIMITIVE(atomics, (4), (128), 0)
CKV_PRIMITIVE(dp4a, (1), (128), 0)
CKV_PRIMITIVE(mma, (1), (128), 0)
CKV_PRIMITIVE(async, (1), (128), 0)
CKV_PRIMITIVE(dynamic, (1), (256), 64 * 1024)
CKV_PRIMITIVE(indices, (3, 2, 2), (4, 8, 3), 0)
CKV_PRIMITIVE(vectors, (1), (128), 0)
