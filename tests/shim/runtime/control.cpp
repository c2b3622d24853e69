// The CUDA runtime calls of launchers, and what the tests call: seeds, buffers, what went wrong, which kernels ran.
#include <cstring>

#include "machine.h"
#include "memory.h"

namespace cpusim {
KernelInfo* first_kernel();
}

using cpusim::machine;

cudaError_t cudaGetLastError() {
  return machine.fault.empty() ? cudaSuccess : cudaErrorLaunchFailure;  // the fault stays until ckv_shim_begin
}

const char* cudaGetErrorString(cudaError_t error) { return error == cudaSuccess ? "no error" : machine.fault.c_str(); }

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  *pointer = cpusim::allocate(bytes, "a buffer allocated by a launcher");
  return *pointer ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t) { return cudaMalloc(pointer, bytes); }

cudaError_t cudaFree(void* pointer) {
  if (!pointer || cpusim::release(pointer)) return cudaSuccess;
  if (machine.fault.empty()) machine.fault = "free: of a pointer that is not a live buffer";
  return cudaErrorInvalidValue;
}
cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return cudaFree(pointer); }

cudaError_t cudaMemset(void* pointer, int value, size_t bytes) {
  if (!cpusim::device_region(reinterpret_cast<uintptr_t>(pointer), bytes)) {
    if (machine.fault.empty()) machine.fault = "memset: of " + std::to_string(bytes) + " bytes that are not in one buffer";
    return cudaErrorInvalidValue;
  }
  memset(pointer, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* pointer, int value, size_t bytes, cudaStream_t) { return cudaMemset(pointer, value, bytes); }

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 3;
  return cudaSuccess;
}

#define SHIM_API extern "C" __attribute__((visibility("default")))

// Starts afresh: forgets the fault, and the launches that follow are scheduled by `seed` and their number alone. shuffle 0: all in
// order. track_races 0: races show in results only.
SHIM_API void ckv_shim_begin(uint64_t seed, int shuffle, int track_races) {
  static const uint8_t poisons[] = {0xA5, 0xFF, 0x5A, 0x81};  // 0xFF is a NaN in every format; none is 0
  machine.fault.clear();
  machine.options.seed = seed;
  machine.options.shuffle = shuffle != 0;
  machine.options.track_races = track_races != 0;
  machine.launches_since_seed = 0;
  cpusim::set_poison(poisons[seed % 4]);
}
SHIM_API const char* ckv_shim_fault() { return machine.fault.c_str(); }
SHIM_API void ckv_shim_limit(long long most_accesses_per_block) { machine.options.most_accesses = most_accesses_per_block; }

SHIM_API void* ckv_shim_allocate(size_t bytes, const char* name) { return cpusim::allocate(bytes, name); }
SHIM_API int ckv_shim_release(void* pointer) { return cpusim::release(pointer) ? 0 : 1; }
SHIM_API long long ckv_shim_live_buffers() { return cpusim::live_buffers(); }

// launches, blocks, threads, memory accesses since the library was loaded
SHIM_API void ckv_shim_totals(long long* out) {
  const cpusim::Totals& t = machine.totals;
  out[0] = t.launches, out[1] = t.blocks, out[2] = t.threads, out[3] = t.accesses;
}

// Kernel number `index` of those in the library: copies its name, returns how often it has been launched, -1 past the end. A
// kernel in a header stands here once for each file that includes it.
SHIM_API long long ckv_shim_kernel(int index, char* name, size_t room) {
  for (cpusim::KernelInfo* k = cpusim::first_kernel(); k; k = k->next)
    if (!index--) {
      const std::string text = cpusim::kernel_name(*k);
      strncpy(name, text.c_str(), room - 1);
      name[room - 1] = 0;
      return k->launches;
    }
  return -1;
}
