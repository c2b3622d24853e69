// Atomics. Nothing runs between the load and the store of one.
#include "machine.h"

namespace {

template <class T, class Change>
T update(T* address, const void* code, const Change& change) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(address);
  if (at % sizeof(T)) cpusim::fail("misaligned", "updates atomically an address that is no multiple of " + std::to_string(sizeof(T)));
  cpusim::touch(at, sizeof(T), cpusim::Access::Atomic, code);
  const T old = *address;
  *address = change(old);
  return old;
}

// Two's complement, as the device wraps.
template <class T>
T wrapped_add(T a, T b) {
  if constexpr (std::is_same_v<T, int>)
    return static_cast<int>(static_cast<unsigned>(a) + static_cast<unsigned>(b));
  else
    return a + b;
}

}  // namespace

#define CPUSIM_ATOMIC(name, T, result) \
  T name(T* address, T value) { return update(address, __builtin_return_address(0), [value](T old) -> T { return result; }); }
#define CPUSIM_ATOMIC_INTEGERS(name, result) \
  CPUSIM_ATOMIC(name, int, result) CPUSIM_ATOMIC(name, unsigned, result) CPUSIM_ATOMIC(name, unsigned long long, result)

CPUSIM_ATOMIC_INTEGERS(atomicAdd, wrapped_add(old, value))
CPUSIM_ATOMIC(atomicAdd, float, old + value)
CPUSIM_ATOMIC(atomicAdd, double, old + value)
CPUSIM_ATOMIC(atomicSub, int, static_cast<int>(static_cast<unsigned>(old) - static_cast<unsigned>(value)))
CPUSIM_ATOMIC(atomicSub, unsigned, old - value)
CPUSIM_ATOMIC_INTEGERS(atomicMax, old > value ? old : value)
CPUSIM_ATOMIC_INTEGERS(atomicMin, old < value ? old : value)
CPUSIM_ATOMIC_INTEGERS(atomicAnd, old & value)
CPUSIM_ATOMIC_INTEGERS(atomicOr, old | value)
CPUSIM_ATOMIC_INTEGERS(atomicXor, old ^ value)
CPUSIM_ATOMIC_INTEGERS(atomicExch, (static_cast<void>(old), value))
CPUSIM_ATOMIC(atomicExch, float, (static_cast<void>(old), value))

#define CPUSIM_CAS(T) \
  T atomicCAS(T* address, T compare, T value) {                                                                    \
    return update(address, __builtin_return_address(0), [=](T old) { return old == compare ? value : old; });      \
  }
CPUSIM_CAS(int)
CPUSIM_CAS(unsigned)
CPUSIM_CAS(unsigned long long)
