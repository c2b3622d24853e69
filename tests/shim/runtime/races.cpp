#include "races.h"

#include "machine.h"

namespace cpusim {
namespace {

constexpr uint32_t kIndexMask = (1u << 10) - 1;  // thread or warp
constexpr uint32_t kAtomic = 1u << 10, kManyWarps = 1u << 10;
constexpr int kStampShift = 11;

// Whether `fiber` knows what lanes `lanes` of its own warp have done up to `stamp`.
bool knows(const Fiber& fiber, uint32_t lanes, uint32_t stamp) {
  for (lanes &= ~(1u << fiber.lane); lanes; lanes &= lanes - 1)
    if (fiber.known[__builtin_ctz(lanes)] < stamp) return false;
  return true;
}

std::string thread_text(uint32_t thread) { return "thread " + std::to_string(thread); }

// What an earlier write of this cell means for an access now.
std::string after_write(const Cell& c, bool shared, Access access, const Fiber& fiber, const Phases& p) {
  if (c.write_phase < p.launch || (access == Access::Atomic && (c.write_who & kAtomic))) return {};
  if (c.write_phase < p.block) return shared ? std::string() : "another block of the launch has written";
  if (c.write_phase < p.now) return {};
  const uint32_t thread = c.write_who & kIndexMask;
  if (thread == fiber.index || (thread / 32 == fiber.warp && knows(fiber, 1u << thread % 32, c.write_who >> kStampShift))) return {};
  return thread_text(thread) + " has written";
}

// What earlier reads of this cell mean for a write now.
std::string after_reads(const Cell& c, bool shared, const Fiber& fiber, const Phases& p) {
  if (!shared && (c.read_other_block >= p.launch || (c.read_phase >= p.launch && c.read_phase < p.block)))
    return "another block of the launch has read";
  if (c.read_phase != p.now) return {};
  const uint32_t warp = c.read_who & kIndexMask;
  if (c.read_who & kManyWarps) return "threads of several warps have read";
  const uint32_t others = warp == fiber.warp ? c.read_lanes & ~(1u << fiber.lane) : c.read_lanes;
  if (!others || (warp == fiber.warp && knows(fiber, others, c.read_who >> kStampShift))) return {};
  return thread_text(warp * 32 + static_cast<uint32_t>(__builtin_ctz(others))) + " has read";
}

void note_read(Cell& c, const Fiber& fiber, const Phases& p) {
  const uint32_t lane = 1u << fiber.lane, who = fiber.warp | fiber.stamp << kStampShift;
  if (c.read_phase != p.now) {
    if (c.read_phase >= p.launch && c.read_phase < p.block) c.read_other_block = c.read_phase;
    c.read_phase = p.now;
    c.read_who = who;
    c.read_lanes = lane;
  } else if ((c.read_who & kIndexMask) == fiber.warp) {
    c.read_lanes |= lane;
    if (fiber.stamp > c.read_who >> kStampShift) c.read_who = (c.read_who & kManyWarps) | who;
  } else {
    c.read_who |= kManyWarps;
  }
}

}  // namespace

std::string note_access(Cell* cells, size_t count, bool shared, Access access, const Fiber& fiber, const Phases& phases, size_t* at) {
  const uint32_t writer = fiber.index | (access == Access::Atomic ? kAtomic : 0u) | fiber.stamp << kStampShift;
  for (size_t i = 0; i < count; ++i) {
    Cell& c = cells[i];
    std::string clash;
    if (c.write_phase >= phases.launch) clash = after_write(c, shared, access, fiber, phases);
    if (access == Access::Read) {
      if (clash.empty()) note_read(c, fiber, phases);
    } else {
      if (clash.empty() && (c.read_phase >= phases.launch || c.read_other_block >= phases.launch)) clash = after_reads(c, shared, fiber, phases);
      c.write_phase = phases.now;
      c.write_who = writer;
    }
    if (!clash.empty()) {
      *at = i;
      return clash;
    }
  }
  return {};
}

}  // namespace cpusim
