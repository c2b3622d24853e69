// CUDA's vector types, with CUDA's alignment: a vector access at a lesser address is an error there and is reported here.
#pragma once

#define CPUSIM_VECTOR2(name, T)              \
  struct alignas(2 * sizeof(T)) name {       \
    T x, y;                                  \
  };                                         \
  inline name make_##name(T x, T y) { return {x, y}; }
#define CPUSIM_VECTOR4(name, T, alignment)   \
  struct alignas(alignment) name {           \
    T x, y, z, w;                            \
  };                                         \
  inline name make_##name(T x, T y, T z, T w) { return {x, y, z, w}; }

CPUSIM_VECTOR2(char2, signed char)
CPUSIM_VECTOR2(uchar2, unsigned char)
CPUSIM_VECTOR2(short2, short)
CPUSIM_VECTOR2(ushort2, unsigned short)
CPUSIM_VECTOR2(int2, int)
CPUSIM_VECTOR2(uint2, unsigned)
CPUSIM_VECTOR2(float2, float)
CPUSIM_VECTOR2(double2, double)
CPUSIM_VECTOR2(longlong2, long long)
CPUSIM_VECTOR2(ulonglong2, unsigned long long)
CPUSIM_VECTOR4(char4, signed char, 4)
CPUSIM_VECTOR4(uchar4, unsigned char, 4)
CPUSIM_VECTOR4(short4, short, 8)
CPUSIM_VECTOR4(ushort4, unsigned short, 8)
CPUSIM_VECTOR4(int4, int, 16)
CPUSIM_VECTOR4(uint4, unsigned, 16)
CPUSIM_VECTOR4(float4, float, 16)

#undef CPUSIM_VECTOR2
#undef CPUSIM_VECTOR4
