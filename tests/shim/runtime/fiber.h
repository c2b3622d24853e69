// A stack and a place in it: what a thread of a kernel needs to be left and taken up again. Own code on x86-64 (about 2 ns a
// switch), ucontext elsewhere or with -DCKV_SHIM_UCONTEXT (two system calls a switch).
#pragma once

#include <cstddef>

#if !defined(__x86_64__)
#define CKV_SHIM_UCONTEXT 1
#endif
#ifdef CKV_SHIM_UCONTEXT
#include <ucontext.h>
#endif

namespace cpusim {

struct Context {
#ifdef CKV_SHIM_UCONTEXT
  ucontext_t saved;
#else
  void* stack_pointer;
#endif
};

// A context that starts at `entry`, which must never return.
void prepare(Context& context, char* stack, size_t stack_bytes, void (*entry)());

// Leaves `from` here and goes on where `to` was left.
void change(Context& from, Context& to);

}  // namespace cpusim
