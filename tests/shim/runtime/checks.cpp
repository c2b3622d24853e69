// Every load and store of a kernel comes through here. The compiler calls the hooks (it believes to call the sanitizers' runtime
// libraries, which are not linked); accesses to a thread's own stack are let through, all others must lie in one region.
#include <string>

#include "machine.h"
#include "memory.h"

namespace cpusim {
namespace {

const char* verb(Access access) { return access == Access::Read ? "reads" : access == Access::Write ? "writes" : "updates atomically"; }

std::string extent(Access access, size_t bytes) { return std::string(verb(access)) + " " + std::to_string(bytes) + " bytes"; }

const Region* find(uintptr_t address, size_t bytes) {
  return in_shared_memory(address) ? shared_region(address, bytes) : device_region(address, bytes);
}

[[noreturn]] void out_of_range(uintptr_t address, size_t bytes, Access access) {
  const std::string near = neighbourhood(address);
  fail("out of range", extent(access, bytes) + (near.empty() ? " at an address in no buffer of this device" : " " + near));
}

bool readable_constant(uintptr_t address, size_t bytes) {
  const Machine& m = machine;
  return (address >= m.parameters && address + bytes <= m.parameters + m.parameter_bytes) || in_library(address, bytes);
}

void check_pending_copies(const Fiber& fiber, uintptr_t address, size_t bytes, Access access) {
  for (const AsyncCopy& copy : fiber.copies) {
    const uintptr_t to = reinterpret_cast<uintptr_t>(copy.to);
    if (address < to + 16 && to < address + bytes) fail("async copy", extent(access, bytes) + " that its async copy has not been waited for");
  }
}

}  // namespace

void touch_now(uintptr_t address, size_t bytes, Access access) {
  Machine& m = machine;
  Fiber& fiber = *m.current;
  if (++m.accesses > m.options.most_accesses)
    fail("does not end", "is one of a block that has made " + std::to_string(m.accesses - 1) + " memory accesses");
  const Region* region = find(address, bytes);
  if (!region) {
    if (access == Access::Read && readable_constant(address, bytes)) return;
    out_of_range(address, bytes, access);
  }
  if (region->shared && !fiber.copies.empty()) check_pending_copies(fiber, address, bytes, access);
  if (!m.options.track_races) return;
  size_t at = 0;
  const std::string clash = note_access(region->cells + (address - region->begin), bytes, region->shared, access, fiber, m.phases, &at);
  if (!clash.empty())
    fail("race", extent(access, bytes) + " at byte " + std::to_string(address - region->begin) + " of " + region->name + ", where " + clash +
                     " byte " + std::to_string(address - region->begin + at) + " and no barrier lies between");
}

void touch(uintptr_t address, size_t bytes, Access access, const void* code) {
  Fiber* fiber = machine.current;
  if (!fiber || address - fiber->stack < kStackBytes || !bytes) return;
  if (machine.options.shuffle && --machine.until_preempted <= 0) {
    machine.until_preempted = static_cast<int>(1 + random_below(256));
    step_back(*fiber);
  }
  machine.code = code;
  touch_now(address, bytes, access);
  machine.code = nullptr;
}

void check_range(const void* address, size_t bytes, bool write) {
  touch(reinterpret_cast<uintptr_t>(address), bytes, write ? Access::Write : Access::Read, __builtin_return_address(0));
}

}  // namespace cpusim

// ---- -fsanitize=thread ------------------------------------------------------------------------------------------------------------

namespace {
inline __attribute__((always_inline)) void plain(void* address, size_t bytes, cpusim::Access access) {
  cpusim::touch(reinterpret_cast<uintptr_t>(address), bytes, access, __builtin_return_address(0));
}
}  // namespace

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
#define CPUSIM_HOOKS(n)                                                                     \
  void __tsan_read##n(void* p) { plain(p, n, cpusim::Access::Read); }                       \
  void __tsan_write##n(void* p) { plain(p, n, cpusim::Access::Write); }                     \
  void __tsan_volatile_read##n(void* p) { plain(p, n, cpusim::Access::Read); }              \
  void __tsan_volatile_write##n(void* p) { plain(p, n, cpusim::Access::Write); }            \
  void __tsan_unaligned_read##n(void* p) { plain(p, n, cpusim::Access::Read); }             \
  void __tsan_unaligned_write##n(void* p) { plain(p, n, cpusim::Access::Write); }           \
  void __tsan_read_write##n(void* p) { plain(p, n, cpusim::Access::Write); }                \
  void __tsan_unaligned_read_write##n(void* p) { plain(p, n, cpusim::Access::Write); }
CPUSIM_HOOKS(1)
CPUSIM_HOOKS(2)
CPUSIM_HOOKS(4)
CPUSIM_HOOKS(8)
CPUSIM_HOOKS(16)
void __tsan_read_range(void* p, size_t bytes) { plain(p, bytes, cpusim::Access::Read); }
void __tsan_write_range(void* p, size_t bytes) { plain(p, bytes, cpusim::Access::Write); }
void* __tsan_memcpy(void* to, const void* from, size_t bytes) {
  cpusim::check_range(from, bytes, false);
  cpusim::check_range(to, bytes, true);
  return __builtin_memcpy(to, from, bytes);
}
void* __tsan_memmove(void* to, const void* from, size_t bytes) {
  cpusim::check_range(from, bytes, false);
  cpusim::check_range(to, bytes, true);
  return __builtin_memmove(to, from, bytes);
}
void* __tsan_memset(void* to, int value, size_t bytes) {
  cpusim::check_range(to, bytes, true);
  return __builtin_memset(to, value, bytes);
}
}

// ---- -fsanitize=alignment, bounds, shift, signed-integer-overflow, integer-divide-by-zero --------------------------------------
// Each hook is given a record that begins with the place in the source. In host code they say nothing: a test of the host build
// is not this tool's job.

namespace {

struct SourcePlace {
  const char* file;
  uint32_t line, column;
};
struct MisalignedRecord {
  SourcePlace at;
  const void* type;
  unsigned char log_alignment, kind;
};

void undefined(const void* record, const std::string& what) {
  if (!cpusim::machine.current) return;
  const SourcePlace& at = *static_cast<const SourcePlace*>(record);
  cpusim::fail("undefined", what + " (" + cpusim::place_text({at.file, static_cast<int>(at.line)}) + ")");
}

}  // namespace

extern "C" {
void __ubsan_handle_type_mismatch_v1(void* record, uintptr_t address) {
  if (!cpusim::machine.current) return;
  const MisalignedRecord& r = *static_cast<const MisalignedRecord*>(record);
  const uintptr_t alignment = uintptr_t{1} << r.log_alignment;
  const std::string where = " (" + cpusim::place_text({r.at.file, static_cast<int>(r.at.line)}) + ")";
  if (!address) cpusim::fail("out of range", "follows a null pointer" + where);
  cpusim::fail("misaligned", "accesses memory " + std::to_string(address % alignment) + " bytes after a multiple of " +
                                 std::to_string(alignment) + ", the alignment of its type" + where);
}
#define CPUSIM_UNDEFINED(name, text) \
  void __ubsan_handle_##name(void* record, uintptr_t, uintptr_t) { undefined(record, text); }
CPUSIM_UNDEFINED(out_of_bounds, "indexes an array outside its bounds")
CPUSIM_UNDEFINED(shift_out_of_bounds, "shifts by more bits than there are, or a bit into the sign")
CPUSIM_UNDEFINED(add_overflow, "overflows a signed addition")
CPUSIM_UNDEFINED(sub_overflow, "overflows a signed subtraction")
CPUSIM_UNDEFINED(mul_overflow, "overflows a signed multiplication")
CPUSIM_UNDEFINED(negate_overflow, "overflows a negation")
CPUSIM_UNDEFINED(divrem_overflow, "divides by zero or overflows a division")
}
