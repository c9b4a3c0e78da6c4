// CUDA's arithmetic beyond <cmath>. The approximate functions (`__expf`) are exact here.
#pragma once

using std::isfinite, std::isinf, std::isnan, std::signbit;

// Of two types, the one that C's arithmetic would take, as CUDA's overloads do.
template <class A, class B, class C = std::common_type_t<A, B>, class = std::enable_if_t<std::is_arithmetic_v<C>>>
static inline C min(A a, B b) {
  if constexpr (std::is_floating_point_v<C>) return std::fmin((C)a, (C)b);
  else return (C)b < (C)a ? (C)b : (C)a;
}
template <class A, class B, class C = std::common_type_t<A, B>, class = std::enable_if_t<std::is_arithmetic_v<C>>>
static inline C max(A a, B b) {
  if constexpr (std::is_floating_point_v<C>) return std::fmax((C)a, (C)b);
  else return (C)a < (C)b ? (C)b : (C)a;
}

static inline float rsqrtf(float x) { return 1 / sqrtf(x); }
static inline double rsqrt(double x) { return 1 / sqrt(x); }
static inline float normcdff(float x) { return 0.5f * erfcf(-x * 0.70710678f); }
static inline double normcdf(double x) { return 0.5 * erfc(-x * 0.7071067811865476); }
static inline float __saturatef(float x) { return x > 0 ? x < 1 ? x : 1 : 0; }

// Names that the host's C library has taken for itself.
#define __expf expf
#define __exp10f exp10f
#define __logf logf
#define __log2f log2f
#define __log10f log10f
#define __powf powf
#define __sinf sinf
#define __cosf cosf
#define __tanf tanf

static inline float __fdividef(float x, float y) { return x / y; }
static inline float __fadd_rn(float x, float y) { return x + y; }
static inline float __fsub_rn(float x, float y) { return x - y; }
static inline float __fmul_rn(float x, float y) { return x * y; }
static inline float __fdiv_rn(float x, float y) { return x / y; }
static inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
static inline float __frcp_rn(float x) { return 1 / x; }
static inline float __fsqrt_rn(float x) { return sqrtf(x); }
static inline float __frsqrt_rn(float x) { return 1 / sqrtf(x); }
static inline double __dadd_rn(double x, double y) { return x + y; }
static inline double __dmul_rn(double x, double y) { return x * y; }
static inline double __fma_rn(double x, double y, double z) { return fma(x, y, z); }

namespace engine {
template <class To, class From> static inline To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
// A float to an integer as the device does it: NaN gives 0, what is too large gives the largest.
template <class To, class From> static inline To saturated(From x) {
  if (x != x) return 0;
  if (x <= (From)std::numeric_limits<To>::min()) return std::numeric_limits<To>::min();
  if (x >= (From)std::numeric_limits<To>::max()) return std::numeric_limits<To>::max();
  return (To)x;
}
}  // namespace engine

static inline int __float2int_rn(float x) { return engine::saturated<int>(rintf(x)); }
static inline int __float2int_rz(float x) { return engine::saturated<int>(truncf(x)); }
static inline int __float2int_rd(float x) { return engine::saturated<int>(floorf(x)); }
static inline int __float2int_ru(float x) { return engine::saturated<int>(ceilf(x)); }
static inline unsigned __float2uint_rn(float x) { return engine::saturated<unsigned>(rintf(x)); }
static inline unsigned __float2uint_rz(float x) { return engine::saturated<unsigned>(truncf(x)); }
static inline float __int2float_rn(int x) { return (float)x; }
static inline float __uint2float_rn(unsigned x) { return (float)x; }
static inline float __double2float_rn(double x) { return (float)x; }
static inline unsigned __float_as_uint(float x) { return engine::bits_of<unsigned>(x); }
static inline int __float_as_int(float x) { return engine::bits_of<int>(x); }
static inline float __uint_as_float(unsigned x) { return engine::bits_of<float>(x); }
static inline float __int_as_float(int x) { return engine::bits_of<float>(x); }
static inline long long __double_as_longlong(double x) { return engine::bits_of<long long>(x); }
static inline double __longlong_as_double(long long x) { return engine::bits_of<double>(x); }

static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
static inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline unsigned __umulhi(unsigned x, unsigned y) { return (uint64_t)x * y >> 32; }
static inline int __mulhi(int x, int y) { return (int64_t)x * y >> 32; }
static inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
  return (unsigned __int128)x * y >> 64;
}

// Four signed bytes in a word.
namespace engine {
static inline int byte_of(int word, int which) { return (signed char)(word >> 8 * which); }
}  // namespace engine
static inline int __dp4a(int x, int y, int sum) {
  for (int i = 0; i < 4; i++) sum += engine::byte_of(x, i) * engine::byte_of(y, i);
  return sum;
}
static inline int __vsubss4(int x, int y) {
  unsigned all = 0;
  for (int i = 0; i < 4; i++) {
    int one = engine::byte_of(x, i) - engine::byte_of(y, i);
    all |= (unsigned)(unsigned char)(one < -128 ? -128 : one > 127 ? 127 : one) << 8 * i;
  }
  return all;
}
