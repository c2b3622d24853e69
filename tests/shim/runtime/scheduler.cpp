// Launches, blocks and turns. A thread runs until it waits, is preempted (checks.cpp) or returns; who comes next is drawn among
// the ready ones, in one of several manners drawn per block: by chance, or warps in a fixed random order of precedence, so that
// one runs as far ahead of the others as the barriers let it.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "machine.h"
#include "memory.h"

namespace cpusim {

Machine machine;

namespace {

char* stacks = nullptr;
KernelInfo* kernels = nullptr;

uint64_t mix(uint64_t x) {  // splitmix64
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return x ^ x >> 31;
}

void enter_thread() {
  machine.body(reinterpret_cast<const void*>(machine.parameters));
  Fiber& fiber = *machine.current;
  fiber.state = State::Exited;
  machine.warps[fiber.warp].exited |= 1u << fiber.lane;
  ++machine.exited;
  complete_barrier();
  leave(fiber);
  abort();  // an exited thread is never resumed
}

unsigned rotated_pick(unsigned bits) {  // a set bit of `bits`
  const unsigned turn = random_below(32), rotated = turn ? bits >> turn | bits << (32 - turn) : bits;
  return (static_cast<unsigned>(__builtin_ctz(rotated)) + turn) % 32;
}

Fiber& next_fiber() {
  Machine& m = machine;
  Fiber* late = m.preempted;
  m.preempted = nullptr;
  if (late && !m.ready_warps) return *late;
  const bool shuffle = m.options.shuffle;
  const unsigned rank = shuffle && !m.by_rank ? rotated_pick(m.ready_warps) : static_cast<unsigned>(__builtin_ctz(m.ready_warps));
  Warp& warp = m.warps[m.warp_of[rank]];
  const unsigned lane = shuffle && !m.by_lane ? rotated_pick(warp.ready) : static_cast<unsigned>(__builtin_ctz(warp.ready));
  warp.ready &= ~(1u << lane);
  if (!warp.ready) m.ready_warps &= ~(1u << rank);
  if (late) make_ready(*late);
  return m.fibers[m.warp_of[rank] * 32 + lane];
}

void set_up_block() {
  Machine& m = machine;
  m.phases.block = ++m.phases.now;
  forget_shared();
  m.preempted = nullptr;
  m.exited = m.at_barrier = 0;
  m.accesses = 0;
  const unsigned warps = (m.threads + 31) / 32;
  for (unsigned i = 0; i < warps; ++i) m.warp_of[i] = i;
  if (m.options.shuffle)
    for (unsigned i = warps; i > 1; --i) {
      const unsigned j = random_below(i), kept = m.warp_of[i - 1];
      m.warp_of[i - 1] = m.warp_of[j];
      m.warp_of[j] = kept;
    }
  for (unsigned i = 0; i < warps; ++i) m.rank_of[m.warp_of[i]] = i;
  const unsigned manner = random_below(4);
  m.by_rank = manner >= 2;
  m.by_lane = manner == 3;
  m.until_preempted = static_cast<int>(1 + random_below(256));
  for (unsigned w = 0; w < warps; ++w) {
    const unsigned lanes = m.threads - 32 * w < 32 ? m.threads - 32 * w : 32;
    m.warps[w] = Warp();
    m.warps[w].present = lanes == 32 ? ~0u : (1u << lanes) - 1;
  }
  m.ready_warps = 0;
  for (unsigned i = 0; i < m.threads; ++i) {
    Fiber& f = m.fibers[i];
    f.index = i;
    f.warp = i / 32;
    f.lane = i % 32;
    f.thread = dim3(i % m.block.x, i / m.block.x % m.block.y, i / (m.block.x * m.block.y));
    f.copies.clear();
    f.groups.clear();
    f.stamp = 1;
    memset(f.known, 0, sizeof f.known);
    f.stack = reinterpret_cast<uintptr_t>(stacks + i * kStackPitch);
    prepare(f.context, stacks + i * kStackPitch, kStackBytes, enter_thread);
    make_ready(f);
  }
}

void run_block() {
  Machine& m = machine;
  set_up_block();
  while (m.exited < m.threads && m.fault.empty()) {
    if (!m.ready_warps && !m.preempted) return fail_block(deadlock_text());
    Fiber& fiber = next_fiber();
    m.current = &fiber;
    change(m.scheduler, fiber.context);
    m.current = nullptr;
  }
  ++m.totals.blocks;
  m.totals.threads += m.threads;
  m.totals.accesses += m.accesses;
}

std::string block_text() {
  const dim3& b = machine.at_block;
  return "kernel " + kernel_name(*machine.kernel) + " block (" + std::to_string(b.x) + "," + std::to_string(b.y) + "," + std::to_string(b.z) + ")";
}

// Number `i` of a random permutation of 0..n-1 that needs no memory: a Feistel network over the next even power of two, walked
// until it stays inside.
uint64_t permuted(uint64_t i, uint64_t n, uint64_t key) {
  int half = 1;
  while (uint64_t{1} << 2 * half < n) ++half;
  const uint64_t low = (uint64_t{1} << half) - 1;
  do {
    uint64_t left = i >> half, right = i & low;
    for (uint64_t round = 0; round < 4; ++round) {
      const uint64_t next = left ^ (mix(right ^ key ^ round << 56) & low);
      left = right;
      right = next;
    }
    i = left << half | right;
  } while (i >= n);
  return i;
}

}  // namespace

KernelInfo::KernelInfo(const char* pretty_function) : pretty(pretty_function), next(kernels) { kernels = this; }

KernelInfo* first_kernel() { return kernels; }

std::string kernel_name(const KernelInfo& kernel) {
  std::string name = kernel.pretty;
  const size_t start = name.find("Kernel = ");
  if (start != std::string::npos) name = name.substr(start + 9);
  if (!name.empty() && name.back() == ']') name.pop_back();
  if (!name.empty() && name.front() == '&') name.erase(0, 1);
  return name;
}

uint32_t random_below(uint32_t bound) {
  machine.random = mix(machine.random);
  return static_cast<uint32_t>((machine.random >> 32) * bound >> 32);
}

void make_ready(Fiber& fiber) {
  Machine& m = machine;
  fiber.state = State::Ready;
  m.warps[fiber.warp].ready |= 1u << fiber.lane;
  m.ready_warps |= 1u << m.rank_of[fiber.warp];
}

void leave(Fiber& fiber) { change(fiber.context, machine.scheduler); }

void step_back(Fiber& fiber) {
  machine.preempted = &fiber;
  leave(fiber);
}

void fail(const char* kind, const std::string& text) {
  Machine& m = machine;
  m.fault = std::string(kind) + ": " + block_text() + " thread " + std::to_string(m.current->index) + " " + text;
  if (m.code) {
    char offset[32];  // of the call itself, which ends where it returns to
    snprintf(offset, sizeof offset, " [+0x%zx]", static_cast<size_t>(library_offset(reinterpret_cast<uintptr_t>(m.code)) - 1));
    m.fault += offset;
    m.code = nullptr;
  }
  leave(*m.current);  // the scheduler sees the fault and takes up no thread again
  abort();
}

void fail_block(const std::string& text) { machine.fault = text; }

std::string deadlock_text() {
  const Machine& m = machine;
  const Fiber* first = nullptr;
  bool barriers_only = true;
  for (unsigned i = 0; i < m.threads; ++i) {
    const Fiber& f = m.fibers[i];
    if (f.state == State::Exited) continue;
    if (f.state != State::AtBarrier) barriers_only = false;
    // A thread in a warp collective tells more than those that wait for it at the next barrier.
    if (!first || (first->state == State::AtBarrier && f.state == State::InWarpCall)) first = &f;
  }
  std::string text = "deadlock: " + block_text() + " thread " + std::to_string(first->index) + " waits at ";
  const auto waits_at = [](const Fiber& f) {
    return std::string(f.state == State::AtBarrier ? name_of(f.barrier) : name_of(f.call.op)) + " (" + place_text(f.at) + ")";
  };
  text += waits_at(*first);
  unsigned others = 0;
  const Fiber* other = nullptr;
  for (unsigned i = 0; i < m.threads; ++i) {
    const Fiber& f = m.fibers[i];
    if (f.state == State::Exited || &f == first) continue;
    ++others;
    if (!other && waits_at(f) != waits_at(*first)) other = &f;
  }
  if (first->state == State::InWarpCall) {
    const Warp& warp = m.warps[first->warp];
    char mask[16];
    snprintf(mask, sizeof mask, "%08x", first->call.mask);
    text += " for lanes " + std::string(mask);
    if (const unsigned missing = first->call.mask & warp.exited) {
      text += "; lane " + std::to_string(__builtin_ctz(missing)) + " has exited";
      other = nullptr;
    }
  }
  if (other) text += "; thread " + std::to_string(other->index) + " waits at " + waits_at(*other);
  if (barriers_only && !other) text += "; the barriers differ";
  if (others) text += "; " + std::to_string(others) + " other threads wait";
  return text;
}

void launch(KernelInfo& kernel, void (*body)(const void*), const void* parameters, size_t parameter_bytes, dim3 grid, dim3 block,
            size_t shared_bytes) {
  Machine& m = machine;
  if (!m.fault.empty()) return;
  m.kernel = &kernel;
  const uint64_t blocks = uint64_t{grid.x} * grid.y * grid.z;
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (!blocks || !threads || threads > kMaxThreads || grid.x > 0x7FFFFFFFu || grid.y > 65535 || grid.z > 65535 || block.z > 64 ||
      shared_bytes > kLargestSharedBytes) {
    m.fault = "launch: kernel " + kernel_name(kernel) + ": a grid of " + std::to_string(blocks) + " blocks of " + std::to_string(threads) +
              " threads with " + std::to_string(shared_bytes) + " bytes of shared memory is beyond the limits";
    return;
  }
  if (!stacks) stacks = static_cast<char*>(reserve(kMaxThreads * kStackPitch));
  if (!stacks) {
    m.fault = "launch: no memory for the threads' stacks";
    return;
  }
  ++kernel.launches;
  ++m.totals.launches;
  m.body = body;
  m.parameters = reinterpret_cast<uintptr_t>(parameters);
  m.parameter_bytes = parameter_bytes;
  m.grid = grid;
  m.block = block;
  m.threads = static_cast<unsigned>(threads);
  set_dynamic_shared(shared_bytes);
  m.random = mix(m.options.seed * 1000003u + static_cast<uint64_t>(++m.launches_since_seed));
  const uint64_t key = mix(m.random);
  m.phases.launch = m.phases.now + 1;  // that of its first block
  for (uint64_t i = 0; i < blocks && m.fault.empty(); ++i) {
    const uint64_t b = m.options.shuffle ? permuted(i, blocks, key) : i;
    m.at_block = dim3(static_cast<unsigned>(b % grid.x), static_cast<unsigned>(b / grid.x % grid.y), static_cast<unsigned>(b / grid.x / grid.y));
    run_block();
  }
  m.parameters = 0;
  m.parameter_bytes = 0;
}

dim3 thread_index() { return machine.current->thread; }
dim3 block_index() { return machine.at_block; }
dim3 block_size() { return machine.block; }
dim3 grid_size() { return machine.grid; }

void* shared_array(const void* key, size_t bytes, size_t alignment) {
  void* array = shared_array_at(key, bytes, alignment);
  if (!array) fail("launch", "declares more shared memory than a block may have");
  return array;
}

void* dynamic_shared() {
  void* array = dynamic_shared_start();
  if (!array) fail("launch", "declares more shared memory than a block may have");
  return array;
}

}  // namespace cpusim
