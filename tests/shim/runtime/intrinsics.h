// Device intrinsics under their CUDA names: warp collectives, barriers, bit operations, atomics, cached loads. What a host
// compiler could not express under the CUDA name (dp4a, mma, cp.async) has a wrapper in kernels/port.cuh instead.
#pragma once

// The caller's place, for reports and for telling one collective from another.
#define CPUSIM_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

// ---- barriers -------------------------------------------------------------------------------------------------------------------

inline void __syncthreads(CPUSIM_HERE) { cpusim::block_barrier(cpusim::BarrierOp::Sync, 0, file, line); }
inline int __syncthreads_count(int predicate, CPUSIM_HERE) { return cpusim::block_barrier(cpusim::BarrierOp::Count, predicate, file, line); }
inline int __syncthreads_and(int predicate, CPUSIM_HERE) { return cpusim::block_barrier(cpusim::BarrierOp::And, predicate, file, line); }
inline int __syncthreads_or(int predicate, CPUSIM_HERE) { return cpusim::block_barrier(cpusim::BarrierOp::Or, predicate, file, line); }
inline void __syncwarp(unsigned mask = 0xFFFFFFFFu, CPUSIM_HERE) { cpusim::warp_call(cpusim::WarpOp::SyncWarp, mask, 0, 0, 32, file, line); }

// A memory fence makes other threads' order visible only together with a flag; flags between threads are not understood here.
inline void __threadfence() {}
inline void __threadfence_block() {}

// ---- warp collectives -----------------------------------------------------------------------------------------------------------

template <class T>
T __shfl_sync(unsigned mask, T v, int source, int width = 32, CPUSIM_HERE) {
  return cpusim::from_bits<T>(cpusim::warp_call(cpusim::WarpOp::Shuffle, mask, cpusim::to_bits(v), source, width, file, line));
}
template <class T>
T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = 32, CPUSIM_HERE) {
  return cpusim::from_bits<T>(cpusim::warp_call(cpusim::WarpOp::ShuffleUp, mask, cpusim::to_bits(v), static_cast<int>(delta), width, file, line));
}
template <class T>
T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = 32, CPUSIM_HERE) {
  return cpusim::from_bits<T>(cpusim::warp_call(cpusim::WarpOp::ShuffleDown, mask, cpusim::to_bits(v), static_cast<int>(delta), width, file, line));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T v, int bits, int width = 32, CPUSIM_HERE) {
  return cpusim::from_bits<T>(cpusim::warp_call(cpusim::WarpOp::ShuffleXor, mask, cpusim::to_bits(v), bits, width, file, line));
}
inline unsigned __ballot_sync(unsigned mask, int predicate, CPUSIM_HERE) {
  return static_cast<unsigned>(cpusim::warp_call(cpusim::WarpOp::Ballot, mask, predicate != 0, 0, 32, file, line));
}
inline int __any_sync(unsigned mask, int predicate, CPUSIM_HERE) {
  return static_cast<int>(cpusim::warp_call(cpusim::WarpOp::Any, mask, predicate != 0, 0, 32, file, line));
}
inline int __all_sync(unsigned mask, int predicate, CPUSIM_HERE) {
  return static_cast<int>(cpusim::warp_call(cpusim::WarpOp::All, mask, predicate != 0, 0, 32, file, line));
}
// Which lanes happen to run together is no fact a kernel may build on.
unsigned __activemask() = delete;

#define CPUSIM_REDUCE(name, op, T)                                                                                             \
  inline T name(unsigned mask, T v, CPUSIM_HERE) {                                                                             \
    return cpusim::from_bits<T>(cpusim::warp_call(cpusim::WarpOp::op, mask, cpusim::to_bits(v), std::is_signed_v<T>, 32, file, line)); \
  }
CPUSIM_REDUCE(__reduce_add_sync, ReduceAdd, unsigned)
CPUSIM_REDUCE(__reduce_add_sync, ReduceAdd, int)
CPUSIM_REDUCE(__reduce_min_sync, ReduceMin, unsigned)
CPUSIM_REDUCE(__reduce_min_sync, ReduceMin, int)
CPUSIM_REDUCE(__reduce_max_sync, ReduceMax, unsigned)
CPUSIM_REDUCE(__reduce_max_sync, ReduceMax, int)
CPUSIM_REDUCE(__reduce_or_sync, ReduceOr, unsigned)
CPUSIM_REDUCE(__reduce_and_sync, ReduceAnd, unsigned)
#undef CPUSIM_REDUCE

// ---- bits -----------------------------------------------------------------------------------------------------------------------

inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __clz(int v) { return v ? __builtin_clz(static_cast<unsigned>(v)) : 32; }
inline int __clzll(long long v) { return v ? __builtin_clzll(static_cast<unsigned long long>(v)) : 64; }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __ffsll(long long v) { return __builtin_ffsll(v); }
inline unsigned __brev(unsigned v) {
  unsigned r = 0;
  for (int i = 0; i < 32; ++i) r |= (v >> i & 1u) << (31 - i);
  return r;
}
inline unsigned long long __brevll(unsigned long long v) {
  return static_cast<unsigned long long>(__brev(static_cast<unsigned>(v))) << 32 | __brev(static_cast<unsigned>(v >> 32));
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>(((static_cast<uint64_t>(high) << 32 | low) << (shift & 31u)) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> (shift & 31u));
}
inline unsigned __funnelshift_lc(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) << (shift < 32u ? shift : 32u) >> 32);
}
inline unsigned __funnelshift_rc(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> (shift < 32u ? shift : 32u));
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  unsigned r = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned s = selector >> 4 * i & 15u, byte = static_cast<unsigned>(bytes >> 8 * (s & 7u)) & 255u;
    r |= (s & 8u ? (byte & 128u ? 255u : 0u) : byte) << 8 * i;
  }
  return r;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32); }
inline int __mulhi(int a, int b) { return static_cast<int>(static_cast<int64_t>(a) * b >> 32); }

inline unsigned __float_as_uint(float v) { return cpusim::from_bits<unsigned>(cpusim::to_bits(v)); }
inline int __float_as_int(float v) { return cpusim::from_bits<int>(cpusim::to_bits(v)); }
inline float __uint_as_float(unsigned v) { return cpusim::from_bits<float>(cpusim::to_bits(v)); }
inline float __int_as_float(int v) { return cpusim::from_bits<float>(cpusim::to_bits(v)); }

// Rounded to nearest and never contracted, as the build flags say for the plain operators too.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline int __float2int_rn(float v) { return static_cast<int>(std::nearbyintf(v)); }

// ---- loads and stores with a cache hint -----------------------------------------------------------------------------------------

#define CPUSIM_LOAD(name)  \
  template <class T>       \
  T name(const T* from) {  \
    return *from;          \
  }
CPUSIM_LOAD(__ldg)
CPUSIM_LOAD(__ldca)
CPUSIM_LOAD(__ldcg)
CPUSIM_LOAD(__ldcs)
CPUSIM_LOAD(__ldcv)
CPUSIM_LOAD(__ldlu)
#undef CPUSIM_LOAD
#define CPUSIM_STORE(name)                                                \
  template <class T>                                                      \
  void name(T* to, std::common_type_t<T> value) {                         \
    *to = value;                                                          \
  }
CPUSIM_STORE(__stwb)
CPUSIM_STORE(__stcg)
CPUSIM_STORE(__stcs)
CPUSIM_STORE(__stwt)
#undef CPUSIM_STORE

// ---- atomics: the overloads CUDA has, so that what compiles here compiles there -----------------------------------------------

#define CPUSIM_ATOMIC(name, T) T name(T* address, T value);
#define CPUSIM_ATOMIC_INTEGERS(name) CPUSIM_ATOMIC(name, int) CPUSIM_ATOMIC(name, unsigned) CPUSIM_ATOMIC(name, unsigned long long)
CPUSIM_ATOMIC_INTEGERS(atomicAdd)
CPUSIM_ATOMIC(atomicAdd, float)
CPUSIM_ATOMIC(atomicAdd, double)
CPUSIM_ATOMIC(atomicSub, int)
CPUSIM_ATOMIC(atomicSub, unsigned)
CPUSIM_ATOMIC_INTEGERS(atomicMax)
CPUSIM_ATOMIC_INTEGERS(atomicMin)
CPUSIM_ATOMIC_INTEGERS(atomicAnd)
CPUSIM_ATOMIC_INTEGERS(atomicOr)
CPUSIM_ATOMIC_INTEGERS(atomicXor)
CPUSIM_ATOMIC_INTEGERS(atomicExch)
CPUSIM_ATOMIC(atomicExch, float)
#undef CPUSIM_ATOMIC
#undef CPUSIM_ATOMIC_INTEGERS
int atomicCAS(int* address, int compare, int value);
unsigned atomicCAS(unsigned* address, unsigned compare, unsigned value);
unsigned long long atomicCAS(unsigned long long* address, unsigned long long compare, unsigned long long value);

#undef CPUSIM_HERE
