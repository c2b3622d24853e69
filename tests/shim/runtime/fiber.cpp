#include "fiber.h"

#include <cstdint>

#ifdef CKV_SHIM_UCONTEXT

namespace cpusim {

void prepare(Context& context, char* stack, size_t stack_bytes, void (*entry)()) {
  getcontext(&context.saved);
  context.saved.uc_stack.ss_sp = stack;
  context.saved.uc_stack.ss_size = stack_bytes;
  context.saved.uc_link = nullptr;
  makecontext(&context.saved, entry, 0);
}

void change(Context& from, Context& to) { swapcontext(&from.saved, &to.saved); }

}  // namespace cpusim

#else

// Saves the registers that a function must preserve on the old stack, takes them from the new one and returns there. Floating
// point control words are the same in every fiber.
asm(R"(
.text
.globl cpusim_change
.hidden cpusim_change
.type cpusim_change, @function
cpusim_change:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cpusim_change, .-cpusim_change
)");
extern "C" void cpusim_change(void** save_stack_pointer, void* stack_pointer);

namespace cpusim {

void prepare(Context& context, char* stack, size_t stack_bytes, void (*entry)()) {
  uintptr_t top = (reinterpret_cast<uintptr_t>(stack) + stack_bytes) / 16 * 16;
  void** frame = reinterpret_cast<void**>(top) - 8;  // six registers, the entry as return address, and no caller above it
  for (int i = 0; i < 6; ++i) frame[i] = nullptr;
  frame[6] = reinterpret_cast<void*>(entry);
  frame[7] = nullptr;
  context.stack_pointer = frame;
}

void change(Context& from, Context& to) { cpusim_change(&from.stack_pointer, to.stack_pointer); }

}  // namespace cpusim

#endif
