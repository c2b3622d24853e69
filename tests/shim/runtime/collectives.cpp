// Where threads meet: barriers of a block, collectives of a warp, async copies.
#include <cstdio>
#include <cstring>

#include "machine.h"
#include "memory.h"

namespace cpusim {

const char* name_of(WarpOp op) {
  static const char* const names[] = {"__syncwarp",        "__shfl_sync",       "__shfl_up_sync",    "__shfl_down_sync", "__shfl_xor_sync",
                                      "__ballot_sync",     "__any_sync",        "__all_sync",        "__reduce_add_sync", "__reduce_min_sync",
                                      "__reduce_max_sync", "__reduce_or_sync",  "__reduce_and_sync", "mma_m16n8k32_s8"};
  return names[static_cast<int>(op)];
}

const char* name_of(BarrierOp op) {
  static const char* const names[] = {"__syncthreads", "__syncthreads_count", "__syncthreads_and", "__syncthreads_or"};
  return names[static_cast<int>(op)];
}

std::string place_text(const Place& place) {
  const char* slash = strrchr(place.file, '/');
  return std::string(slash ? slash + 1 : place.file) + ":" + std::to_string(place.line);
}

namespace {

bool same_place(const Place& a, const Place& b) { return a.line == b.line && (a.file == b.file || !strcmp(a.file, b.file)); }

// Lane that `lane` reads from, or itself.
unsigned source_lane(const WarpCall& call, unsigned lane) {
  const int width = call.width, first = static_cast<int>(lane) / width * width, mine = static_cast<int>(lane);
  int from = mine;
  switch (call.op) {
    case WarpOp::Shuffle: return static_cast<unsigned>(first + (call.operand & (width - 1)));
    case WarpOp::ShuffleUp: from = mine - call.operand; return static_cast<unsigned>(from < first ? mine : from);
    case WarpOp::ShuffleDown: from = mine + call.operand; return static_cast<unsigned>(from >= first + width ? mine : from);
    // An earlier segment may be read, a later one may not.
    default: from = mine ^ call.operand; return static_cast<unsigned>(from >= first + width ? mine : from);
  }
}

// What a shuffle from a lane outside the mask gives is undefined: something that differs between seeds.
uint64_t undefined_value() { return poison_byte() * 0x0101010101010101u; }

int64_t as_number(uint64_t bits, bool is_signed) {
  return is_signed ? static_cast<int32_t>(static_cast<uint32_t>(bits)) : static_cast<int64_t>(static_cast<uint32_t>(bits));
}

uint64_t reduced(WarpOp op, const Fiber* lanes, unsigned mask) {
  const bool is_signed = lanes[__builtin_ctz(mask)].call.operand != 0;
  int64_t r = as_number(lanes[__builtin_ctz(mask)].call.value, is_signed);
  for (unsigned rest = mask & (mask - 1); rest; rest &= rest - 1) {
    const int64_t v = as_number(lanes[__builtin_ctz(rest)].call.value, is_signed);
    if (op == WarpOp::ReduceAdd) r += v;
    if (op == WarpOp::ReduceMin) r = v < r ? v : r;
    if (op == WarpOp::ReduceMax) r = v > r ? v : r;
    if (op == WarpOp::ReduceOr) r |= v;
    if (op == WarpOp::ReduceAnd) r &= v;
  }
  return static_cast<uint32_t>(r);
}

int8_t byte_of(uint32_t word, int i) { return static_cast<int8_t>(word >> 8 * i); }

// The matrices are put together from the fragments as the PTX manual lays them out, then multiplied by the plain definition.
void multiply(Fiber* lanes) {
  int8_t A[16][32], B[32][8];
  for (int lane = 0; lane < 32; ++lane) {
    const WarpCall& call = lanes[lane].call;
    const int group = lane / 4, first = lane % 4 * 4;
    for (int i = 0; i < 4; ++i) {
      for (int r = 0; r < 4; ++r) A[group + 8 * (r & 1)][first + i + 16 * (r >> 1)] = byte_of(call.a[r], i);
      for (int r = 0; r < 2; ++r) B[first + i + 16 * r][group] = byte_of(call.b[r], i);
    }
  }
  for (int lane = 0; lane < 32; ++lane)
    for (int e = 0; e < 4; ++e) {
      const int row = lane / 4 + 8 * (e >> 1), column = lane % 4 * 2 + (e & 1);
      int& d = lanes[lane].call.d[e];
      for (int k = 0; k < 32; ++k) d += A[row][k] * B[k][column];
    }
}

void order_lanes(Warp& warp, Fiber* lanes, unsigned mask) {
  uint32_t known[32] = {};
  for (unsigned rest = mask; rest; rest &= rest - 1)
    for (int i = 0; i < 32; ++i) {
      const uint32_t theirs = lanes[__builtin_ctz(rest)].known[i];
      if (theirs > known[i]) known[i] = theirs;
    }
  const uint32_t stamp = ++warp.last_stamp;
  for (unsigned rest = mask; rest; rest &= rest - 1) known[__builtin_ctz(rest)] = stamp - 1;
  for (unsigned rest = mask; rest; rest &= rest - 1) {
    Fiber& f = lanes[__builtin_ctz(rest)];
    memcpy(f.known, known, sizeof known);
    f.stamp = stamp;
  }
}

}  // namespace

void complete_warp_call(Warp& warp, const Fiber& last) {
  const unsigned mask = last.call.mask;
  if ((warp.calling & mask) != mask) return;
  Fiber* lanes = &machine.fibers[last.warp * 32];
  for (unsigned rest = mask; rest; rest &= rest - 1) {
    const Fiber& f = lanes[__builtin_ctz(rest)];
    if (f.call.mask != mask || f.call.op != last.call.op) return;
    // Two __syncwarp of a divergent branch may pair; two different shuffles exchange nothing.
    if (last.call.op != WarpOp::SyncWarp && !same_place(f.at, last.at)) return;
  }
  uint64_t together = 0;
  switch (last.call.op) {
    case WarpOp::SyncWarp: order_lanes(warp, lanes, mask); break;
    case WarpOp::Ballot:
    case WarpOp::Any:
    case WarpOp::All:
      for (unsigned rest = mask; rest; rest &= rest - 1) together |= lanes[__builtin_ctz(rest)].call.value << __builtin_ctz(rest);
      if (last.call.op != WarpOp::Ballot) together = last.call.op == WarpOp::Any ? together != 0 : together == mask;
      break;
    case WarpOp::ReduceAdd:
    case WarpOp::ReduceMin:
    case WarpOp::ReduceMax:
    case WarpOp::ReduceOr:
    case WarpOp::ReduceAnd: together = reduced(last.call.op, lanes, mask); break;
    case WarpOp::Mma: multiply(lanes); break;
    default:
      for (unsigned rest = mask; rest; rest &= rest - 1) {
        Fiber& f = lanes[__builtin_ctz(rest)];
        const unsigned from = source_lane(f.call, f.lane);
        f.call.result = mask >> from & 1u ? lanes[from].call.value : undefined_value();
      }
  }
  const bool shuffle = last.call.op >= WarpOp::Shuffle && last.call.op <= WarpOp::ShuffleXor;
  warp.calling &= ~mask;
  for (unsigned rest = mask; rest; rest &= rest - 1) {
    Fiber& f = lanes[__builtin_ctz(rest)];
    if (!shuffle) f.call.result = together;
    make_ready(f);
  }
}

namespace {

void enter_warp_call(Fiber& f, const char* file, int line) {
  Warp& warp = machine.warps[f.warp];
  char text[64];
  snprintf(text, sizeof text, "%s with mask %08x", name_of(f.call.op), f.call.mask);
  f.at = {file, line};
  const std::string where = std::string(text) + " (" + place_text(f.at) + ")";
  if (!(f.call.mask >> f.lane & 1u)) fail("mask", "calls " + where + ", in which its own lane is missing");
  if (f.call.mask & ~warp.present) fail("mask", "calls " + where + ", which names lanes past the end of the block");
  if (f.call.width < 1 || f.call.width > 32 || (f.call.width & (f.call.width - 1)))
    fail("mask", "calls " + where + ", whose width is no power of two up to 32");
  f.state = State::InWarpCall;
  warp.calling |= 1u << f.lane;
  complete_warp_call(warp, f);
  leave(f);
}

}  // namespace

uint64_t warp_call(WarpOp op, unsigned mask, uint64_t value, int operand, int width, const char* file, int line) {
  Fiber& f = *machine.current;
  f.call = {op, mask, value, 0, operand, width, nullptr, nullptr, nullptr};
  enter_warp_call(f, file, line);
  return f.call.result;
}

void mma_m16n8k32_s8(int (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const char* file, int line) {
  Fiber& f = *machine.current;
  f.call = {WarpOp::Mma, 0xFFFFFFFFu, 0, 0, 0, 32, a, b, d};
  enter_warp_call(f, file, line);
}

void complete_barrier() {
  Machine& m = machine;
  if (!m.at_barrier || m.at_barrier + m.exited < m.threads) return;
  int count = 0;
  const Fiber* first = nullptr;
  for (unsigned i = 0; i < m.threads; ++i) {
    const Fiber& f = m.fibers[i];
    if (f.state != State::AtBarrier) continue;
    if (!first) first = &f;
    if (f.barrier != first->barrier || !same_place(f.at, first->at)) return;  // the scheduler finds nobody ready and says so
    count += f.predicate;
  }
  const int waiting = static_cast<int>(m.at_barrier);
  m.at_barrier = 0;
  ++m.phases.now;
  for (unsigned w = 0; w * 32 < m.threads; ++w)
    if (m.warps[w].last_stamp > 1) {
      m.warps[w].last_stamp = 1;
      for (unsigned i = w * 32; i < m.threads && i < w * 32 + 32; ++i) {
        m.fibers[i].stamp = 1;
        memset(m.fibers[i].known, 0, sizeof m.fibers[i].known);
      }
    }
  for (unsigned i = 0; i < m.threads; ++i) {
    Fiber& f = m.fibers[i];
    if (f.state != State::AtBarrier) continue;
    f.barrier_result = f.barrier == BarrierOp::Count ? count : f.barrier == BarrierOp::Or ? count != 0 : count == waiting;
    make_ready(f);
  }
}

int block_barrier(BarrierOp op, int predicate, const char* file, int line) {
  Fiber& f = *machine.current;
  f.barrier = op;
  f.predicate = predicate != 0;
  f.at = {file, line};
  f.state = State::AtBarrier;
  ++machine.at_barrier;
  complete_barrier();
  leave(f);
  return f.barrier_result;
}

// ---- async copies: checked when issued, done when waited for, so that what was not waited for is not there --------------------

void async_copy16(void* shared, const void* global) {
  const uintptr_t to = reinterpret_cast<uintptr_t>(shared), from = reinterpret_cast<uintptr_t>(global);
  if (to % 16 || from % 16)
    fail("misaligned", std::string("copies 16 bytes asynchronously ") + (to % 16 ? "to" : "from") + " an address that is no multiple of 16");
  if (!in_shared_memory(to)) fail("out of range", "copies asynchronously to memory that is not shared memory");
  Fiber& f = *machine.current;
  touch(from, 16, Access::Read, __builtin_return_address(0));
  touch(to, 16, Access::Write, __builtin_return_address(0));
  f.copies.push_back({static_cast<char*>(shared), static_cast<const char*>(global)});
}

void async_commit() {
  Fiber& f = *machine.current;
  size_t grouped = 0;
  for (const size_t group : f.groups) grouped += group;
  f.groups.push_back(f.copies.size() - grouped);
}

void async_wait(int pending) {
  Fiber& f = *machine.current;
  while (f.groups.size() > static_cast<size_t>(pending)) {
    const size_t count = f.groups.front();
    f.groups.erase(f.groups.begin());
    const std::vector<AsyncCopy> done(f.copies.begin(), f.copies.begin() + static_cast<std::ptrdiff_t>(count));
    f.copies.erase(f.copies.begin(), f.copies.begin() + static_cast<std::ptrdiff_t>(count));
    for (const AsyncCopy& copy : done) {
      touch_now(reinterpret_cast<uintptr_t>(copy.from), 16, Access::Read);
      touch_now(reinterpret_cast<uintptr_t>(copy.to), 16, Access::Write);
      memcpy(copy.to, copy.from, 16);
    }
  }
}

}  // namespace cpusim
