// Who touched a byte last, and whether that is ordered before what a thread does now.
//
// Order comes from __syncthreads (all threads of a block), from __syncwarp (its lanes) and from one launch following another.
// The time between two __syncthreads of a block is a phase, numbered through the whole process, so that the phase alone tells
// "earlier launch", "other block of this launch", "before the last barrier" and "now" apart. Within a phase, lanes of one warp
// are ordered by stamps: all begin with stamp 1 and know of nothing; the n-th __syncwarp of a warp gives its lanes the stamp
// n + 1 and tells each of them that the others have done everything stamped up to n. Atomics conflict with plain accesses, not
// with each other, and order nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace cpusim {

struct Fiber;

enum class Access : uint8_t { Read, Write, Atomic };

struct Cell {
  uint32_t write_phase, write_who;  // who: thread | kAtomic | stamp << kStampShift
  uint32_t read_phase, read_who;    // who: warp | kManyWarps | stamp << kStampShift
  uint32_t read_lanes;              // of that warp
  uint32_t read_other_block;        // last phase in which a block before the reading one has read it
};

struct Phases {
  uint32_t launch, block, now;  // first phase of the launch and of the block, the running one
};

// Notes the access in `count` cells. Returns an empty text, or what it races with: "thread 3 has written", with the index of the
// first such cell in *at. `shared`: memory that every block has for itself.
std::string note_access(Cell* cells, size_t count, bool shared, Access access, const Fiber& fiber, const Phases& phases, size_t* at);

}  // namespace cpusim
