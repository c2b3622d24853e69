// What kernels move between device memory and their blocks, counted while a test asks for it.
//
// Bytes: each once per warp and per time that one lane touches it, so that lanes of a warp which read the same byte together count
// once, and a thread that comes back to it counts again. Sectors: of 32 aligned bytes, each once per block, whose first-level cache
// serves repeats; a sector that two blocks share counts twice.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cpusim {

struct Traffic {
  long long read_bytes = 0, written_bytes = 0, read_sectors = 0, written_sectors = 0;
};

void count_traffic(bool on);  // starts at zero
const Traffic& traffic();

// An access of the running thread to device memory. Atomic updates count as reads and as writes.
void note_traffic(uintptr_t address, size_t bytes, bool reads, bool writes);

}  // namespace cpusim
