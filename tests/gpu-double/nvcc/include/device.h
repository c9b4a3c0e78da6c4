// What every CUDA source finds without an `#include`: the stand-in `nvcc` puts it before each of them.
#pragma once
#include <cmath>
#include <math.h>  // `sqrt` and the like of a float are floats, as CUDA has them
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include "kernel.h"
#include "warp.h"

// `__global__` and `__shared__` stay words: `nvcc` rewrites them, see there.
#define __device__
#define __host__
#define __constant__ static
#define __managed__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __restrict__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __builtin_align__(bytes) __attribute__((aligned(bytes)))
#define __CUDA_ALIGN__(bytes) __attribute__((aligned(bytes)))
#define CUDART_INF_F INFINITY
#define CUDART_NAN_F NAN
#undef assert
#define assert(holds) ((holds) ? (void)0 : engine::fault("assertion `%s` failed at %s:%d", #holds, __FILE__, __LINE__))
static inline void __trap() { engine::fault("__trap()"); }

static inline void __threadfence() {}
static inline void __threadfence_block() {}
static inline void __threadfence_system() {}
template <class T> T __ldg(const T* at) { return *at; }

#define GPU_DOUBLE_VECTORS(Name, Type) \
  struct Name##1 { Type x; }; \
  struct alignas(2 * sizeof(Type)) Name##2 { Type x, y; }; \
  struct Name##3 { Type x, y, z; }; \
  struct alignas(4 * sizeof(Type) < 16 ? 4 * sizeof(Type) : 16) Name##4 { Type x, y, z, w; }; \
  static inline Name##2 make_##Name##2(Type x, Type y) { return {x, y}; } \
  static inline Name##3 make_##Name##3(Type x, Type y, Type z) { return {x, y, z}; } \
  static inline Name##4 make_##Name##4(Type x, Type y, Type z, Type w) { return {x, y, z, w}; } \
  GPU_DOUBLE_VALUE(Name##1) GPU_DOUBLE_VALUE(Name##2) GPU_DOUBLE_VALUE(Name##3) GPU_DOUBLE_VALUE(Name##4)
#define uint3 uint3_of_vectors  // `uint3` is declared with threadIdx
GPU_DOUBLE_VECTORS(uint, unsigned)
#undef uint3
GPU_DOUBLE_VECTORS(char, signed char)
GPU_DOUBLE_VECTORS(uchar, unsigned char)
GPU_DOUBLE_VECTORS(short, short)
GPU_DOUBLE_VECTORS(ushort, unsigned short)
GPU_DOUBLE_VECTORS(int, int)
GPU_DOUBLE_VECTORS(longlong, long long)
GPU_DOUBLE_VECTORS(ulonglong, unsigned long long)
GPU_DOUBLE_VECTORS(float, float)
GPU_DOUBLE_VECTORS(double, double)
GPU_DOUBLE_VALUE(dim3)

#include "arithmetic.h"
#include "atomics.h"
