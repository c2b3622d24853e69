// The memory a kernel may touch: guarded device buffers, the shared arrays of the running block, its parameters. Each place knows
// its exact size, and device and shared bytes carry a record of who touched them last (races.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace cpusim {

struct Cell;

struct Region {
  uintptr_t begin = 0;
  size_t bytes = 0;
  Cell* cells = nullptr;  // one per byte; nullptr for memory that is only read
  bool shared = false;
  std::string name;

  bool holds(uintptr_t address, size_t size) const { return address >= begin && size <= bytes && address - begin <= bytes - size; }
};

// ---- device buffers -------------------------------------------------------------------------------------------------------------

constexpr size_t kGuardBytes = size_t{64} << 20;  // address space, not memory, on either side of every buffer

// A buffer aligned as cudaMalloc aligns, filled with the poison byte. nullptr when the system gives none.
void* allocate(size_t bytes, const std::string& name);
// False when `pointer` is not the start of a live buffer.
bool release(void* pointer);
long long live_buffers();
const Region* device_region(uintptr_t address, size_t size);

// What an address that is in no region is near to, in words: "4 bytes past the end of ...", or empty.
std::string neighbourhood(uintptr_t address);

// Memory of zeros that costs nothing until it is touched; nullptr when the system gives none.
void* reserve(size_t bytes);
void unreserve(void* start, size_t bytes);

// ---- shared memory of the running block -----------------------------------------------------------------------------------------

constexpr size_t kStaticSharedBytes = size_t{48} << 10;   // what a kernel gets without asking
constexpr size_t kLargestSharedBytes = size_t{99} << 10;  // of the smallest architecture we build for (sm_120)

void forget_shared();  // at the start of a block
// The array declared at `key`, poisoned when it is new in this block. nullptr when shared memory is over its limit.
void* shared_array_at(const void* key, size_t bytes, size_t alignment);
const Region* shared_region(uintptr_t address, size_t size);
bool in_shared_memory(uintptr_t address);
void set_dynamic_shared(size_t bytes);
void* dynamic_shared_start();

// Constants of the loaded library itself; a kernel may read them.
bool in_library(uintptr_t address, size_t size);
uintptr_t library_offset(uintptr_t address);  // of an address in it, as tools that read the file count

// Byte that fresh memory is filled with. It differs between seeds, so that a result which depends on it does too.
uint8_t poison_byte();
void set_poison(uint8_t byte);

}  // namespace cpusim
