// The state of the running launch: its block, its fibers and whose turn it is.
#pragma once

#include <string>
#include <vector>

#include "cuda_on_cpu.h"
#include "fiber.h"
#include "races.h"

namespace cpusim {

constexpr unsigned kMaxThreads = 1024, kMaxWarps = kMaxThreads / 32;
constexpr size_t kStackBytes = 64 << 10;
constexpr size_t kStackPitch = kStackBytes + 4096 + 320;  // an odd multiple of cache lines, or all stacks share a few cache sets

struct Place {
  const char* file = "";
  int line = 0;
};

enum class State : uint8_t { Ready, InWarpCall, AtBarrier, Exited };

// What a thread published when it entered a warp collective.
struct WarpCall {
  WarpOp op;
  unsigned mask;
  uint64_t value, result;
  int operand, width;
  const uint32_t *a, *b;  // mma fragments
  int* d;
};

struct AsyncCopy {
  char* to;
  const char* from;
};

struct Fiber {
  Context context;
  uintptr_t stack = 0;
  unsigned index = 0, warp = 0, lane = 0;
  dim3 thread;
  State state = State::Exited;
  Place at;
  WarpCall call;
  BarrierOp barrier;
  int predicate = 0, barrier_result = 0;
  std::vector<AsyncCopy> copies;  // issued, in order
  std::vector<size_t> groups;     // number of copies in each committed group that has not been waited for
  uint32_t stamp = 1;             // see races.h
  uint32_t known[32];
};

struct Warp {
  unsigned present = 0, ready = 0, calling = 0, exited = 0;  // lanes
  uint32_t last_stamp = 1;
};

struct Options {
  uint64_t seed = 0;
  bool shuffle = true;     // false: blocks and threads in order, each as far as it gets
  bool track_races = true;
  long long most_accesses = 100'000'000;  // of one block, to global and shared memory; beyond it "does not end"
};

struct Totals {
  long long launches = 0, blocks = 0, threads = 0, accesses = 0;
};

struct Machine {
  Options options;
  Totals totals;
  std::string fault;  // what went wrong first; launches refuse to run while it is set
  long long launches_since_seed = 0;

  KernelInfo* kernel = nullptr;
  uintptr_t parameters = 0;
  size_t parameter_bytes = 0;
  void (*body)(const void*) = nullptr;
  dim3 grid, block, at_block;
  unsigned threads = 0, exited = 0, at_barrier = 0;
  Phases phases{0, 0, 0};
  long long accesses = 0;  // of this block
  uint64_t random = 0;
  int until_preempted = 0;
  unsigned ready_warps = 0;        // bits by rank
  unsigned rank_of[kMaxWarps], warp_of[kMaxWarps];
  bool by_rank = false, by_lane = false;  // how this block picks who runs next

  Fiber* current = nullptr;    // nullptr while host code runs
  const void* code = nullptr;  // where the running thread's access is made, for reports
  Fiber* preempted = nullptr;  // ready again when somebody else has had a turn
  Context scheduler;
  Fiber fibers[kMaxThreads];
  Warp warps[kMaxWarps];
};

extern Machine machine;

uint32_t random_below(uint32_t bound);  // of the launch's own generator

void make_ready(Fiber& fiber);

// Leaves the running thread; it comes back when it is ready and its turn has come.
void leave(Fiber& fiber);
// The same for a thread that could go on: another one that can runs first.
void step_back(Fiber& fiber);

// Ends the launch with "KIND: kernel K block (x,y,z) thread T TEXT", and " [+0xOFFSET]" in this library where the code is known.
// Does not return to the thread that calls it.
[[noreturn]] void fail(const char* kind, const std::string& text);
// Same without a thread, for what a whole block has come to.
void fail_block(const std::string& text);

void complete_warp_call(Warp& warp, const Fiber& last);  // if all lanes of `last`'s mask have arrived
void complete_barrier();                                 // if all threads that still run have arrived
std::string deadlock_text();

std::string kernel_name(const KernelInfo& kernel);
std::string place_text(const Place& place);
const char* name_of(WarpOp op);
const char* name_of(BarrierOp op);

// Checks, notes and possibly preempts; returns when the access may happen. `code`: the return address of the hook.
void touch(uintptr_t address, size_t bytes, Access access, const void* code = nullptr);
// The same for an access that has been issued earlier and happens now: no preemption.
void touch_now(uintptr_t address, size_t bytes, Access access);

}  // namespace cpusim
