// What kernels/port.cuh includes in a shim build: the part of CUDA that the kernels use, on top of the runtime beside this file.
// Test-only; never seen by nvcc.
//
// Every CUDA thread is a fiber. Threads, warps and blocks take turns in an order drawn from a seed, also in the middle of a
// stretch between two barriers, so that code which relies on an order gives different results under different seeds.
//
// What surprises:
//  - The launch runs the kernel to its end. Streams are accepted and ignored. One host thread at a time.
//  - Blocks run one after the other, in a shuffled order. A block that waits for another one never ends (and is reported).
//  - Every load and store of a kernel passes the checks of checks.cpp, by way of the compiler's instrumentation
//    (-fsanitize=thread, alignment, ...) with the hooks of this runtime instead of the sanitizer's own.
//  - Shuffles and votes order no memory, as CUDA says; __syncwarp and __syncthreads do. Order between blocks, or by fences and
//    flags, is not understood: such code is reported as a race.
//  - Stricter than CUDA: a mask may not name a lane that has exited, and the lanes of a shuffle or vote must meet at the same
//    line. All threads of a block must meet at the same __syncthreads.
//  - Not modelled: weak memory ordering, bank conflicts, limits on registers, expf and its kin (they differ from the device's).
#pragma once
#ifdef __CUDACC__
#error "cuda_on_cpu.h is for host compilers only"
#endif

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

#include "vector_types.h"

namespace cpusim {

// ---- what runtime and kernels share ---------------------------------------------------------------------------------------------

// One kernel, by template arguments; it announces itself when the library is loaded.
struct KernelInfo {
  const char* pretty;  // __PRETTY_FUNCTION__ of kernel_pretty<Kernel>
  long long launches = 0;
  KernelInfo* next;
  explicit KernelInfo(const char* pretty_function);
};

void launch(KernelInfo& kernel, void (*body)(const void*), const void* parameters, size_t parameter_bytes, dim3 grid, dim3 block,
            size_t shared_bytes);

dim3 thread_index();
dim3 block_index();
dim3 block_size();
dim3 grid_size();

void* shared_array(const void* key, size_t bytes, size_t alignment);
void* dynamic_shared();

enum class WarpOp : uint8_t {
  SyncWarp,
  Shuffle,
  ShuffleUp,
  ShuffleDown,
  ShuffleXor,
  Ballot,
  Any,
  All,
  ReduceAdd,
  ReduceMin,
  ReduceMax,
  ReduceOr,
  ReduceAnd,
  Mma
};
uint64_t warp_call(WarpOp op, unsigned mask, uint64_t value, int operand, int width, const char* file, int line);

enum class BarrierOp : uint8_t { Sync, Count, And, Or };
int block_barrier(BarrierOp op, int predicate, const char* file, int line);

// Checks a range that a kernel is about to read or write by other means than a plain load or store.
void check_range(const void* address, size_t bytes, bool write);

void mma_m16n8k32_s8(int (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const char* file = __builtin_FILE(),
                     int line = __builtin_LINE());
void async_copy16(void* shared, const void* global);
void async_commit();
void async_wait(int pending);

// ---- launches -------------------------------------------------------------------------------------------------------------------

template <auto Kernel>
const char* kernel_pretty() {
  return __PRETTY_FUNCTION__;
}

template <auto Kernel>
KernelInfo kernel_info{kernel_pretty<Kernel>()};

template <class... P>
std::tuple<std::decay_t<P>...> parameters_of(void (*)(P...));

template <auto Kernel, class... A>
void launch_kernel(dim3 grid, dim3 block, size_t shared_bytes, A&&... arguments) {
  using Parameters = decltype(parameters_of(Kernel));
  const Parameters parameters(static_cast<A&&>(arguments)...);
  launch(
      kernel_info<Kernel>, [](const void* p) { std::apply(Kernel, *static_cast<const Parameters*>(p)); }, &parameters, sizeof parameters, grid,
      block, shared_bytes);
}

template <class T>
uint64_t to_bits(T v) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8);
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &v, sizeof v);
  return bits;
}
template <class T>
T from_bits(uint64_t bits) {
  T v;
  __builtin_memcpy(&v, &bits, sizeof v);
  return v;
}

}  // namespace cpusim

// One array for each place in the source and each instantiation around it, as __shared__ gives.
#define CKV_SHARED(T, name, n)                                      \
  T(&name)[n] = *static_cast<T(*)[n]>(cpusim::shared_array(         \
      [] {                                                          \
        static char here;                                           \
        return static_cast<void*>(&here);                           \
      }(),                                                          \
      sizeof(T) * (n), alignof(T)))
#define CKV_DYN_SHARED(T, name) T* const name = static_cast<T*>(cpusim::dynamic_shared())
#define CKV_LAUNCH(kernel, grid, block, stream, ...) CKV_LAUNCH_SHARED(kernel, grid, block, 0, stream, __VA_ARGS__)
#define CKV_LAUNCH_SHARED(kernel, grid, block, bytes, stream, ...) \
  (static_cast<void>(stream), cpusim::launch_kernel<kernel>((grid), (block), (bytes), __VA_ARGS__))

#define threadIdx (cpusim::thread_index())
#define blockIdx (cpusim::block_index())
#define blockDim (cpusim::block_size())
#define gridDim (cpusim::grid_size())
constexpr int warpSize = 32;

// Kernels copy with memcpy. The compiler turns the small ones into loads and stores, which are checked; this one checks the rest.
namespace ckv {
template <class To, class From>
inline __attribute__((always_inline)) void* memcpy(To* to, const From* from, size_t bytes) {
  if (!(__builtin_constant_p(bytes) && (bytes == 1 || bytes == 2 || bytes == 4 || bytes == 8 || bytes == 16))) {
    cpusim::check_range(from, bytes, false);
    cpusim::check_range(to, bytes, true);
  }
  return __builtin_memcpy(to, from, bytes);
}
template <class To>
inline __attribute__((always_inline)) void* memset(To* to, int value, size_t bytes) {
  cpusim::check_range(to, bytes, true);
  return __builtin_memset(to, value, bytes);
}
}  // namespace ckv

#include "intrinsics.h"
#include "runtime_api.h"
