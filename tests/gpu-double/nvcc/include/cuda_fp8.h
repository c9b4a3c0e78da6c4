// Floats of 8 bits: rounded to nearest, ties to even; what is too large becomes the largest, as CUDA's classes have it.
#pragma once
#include "cuda_bf16.h"
#include "cuda_fp16.h"

enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };
enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE };
typedef unsigned char __nv_fp8_storage_t;

namespace engine {

struct E4m3 {
  static constexpr int digits = 3, bias = 7;
  static constexpr unsigned char largest = 0x7e, beyond = 0x7f, nan = 0x7f;  // has no infinity
};
struct E5m2 {
  static constexpr int digits = 2, bias = 15;
  static constexpr unsigned char largest = 0x7b, beyond = 0x7c, nan = 0x7f;
};

template <class F> static inline unsigned char to_fp8(double x, bool saturate) {
  unsigned char sign = std::signbit(x) ? 0x80 : 0;
  double size = std::fabs(x);
  if (x != x) return sign | F::nan;
  if (size >= 65536 * 2) return sign | (saturate ? F::largest : F::beyond);
  const double least_normal = std::ldexp(1.0, 1 - F::bias);
  int exponent = size < least_normal ? 1 - F::bias : std::ilogb(size);
  int steps = (int)std::nearbyint(std::ldexp(size, F::digits - exponent));
  // A number below the normal ones has fewer than `1 << digits` steps and the exponent's code 0.
  int code = ((exponent + F::bias) << F::digits) + steps - (1 << F::digits);
  if (code > F::largest) code = saturate ? F::largest : F::beyond;
  return sign | code;
}
template <class F> static inline float of_fp8(unsigned char bits) {
  int exponent = (bits & 0x7f) >> F::digits, steps = bits & ((1 << F::digits) - 1);
  float size;
  if ((bits & 0x7f) > F::largest) size = F::beyond != F::nan && (bits & 0x7f) == F::beyond ? INFINITY : NAN;
  else if (exponent == 0) size = std::ldexp((float)steps, 1 - F::bias - F::digits);
  else size = std::ldexp((float)(steps + (1 << F::digits)), exponent - F::bias - F::digits);
  return bits & 0x80 ? -size : size;
}

template <class F> struct Fp8 {
  __nv_fp8_storage_t __x;
  Fp8() = default;
  template <class T, class = std::enable_if_t<std::is_convertible_v<T, float>>> explicit Fp8(T x) {
    if constexpr (std::is_arithmetic_v<T>) __x = to_fp8<F>((double)x, true);
    else __x = to_fp8<F>((float)x, true);
  }
  explicit operator float() const { return of_fp8<F>(__x); }
  explicit operator double() const { return of_fp8<F>(__x); }
  explicit operator __half() const { return of_fp8<F>(__x); }
  explicit operator __nv_bfloat16() const { return of_fp8<F>(__x); }
};
template <class F> struct Value<Fp8<F>> : Value<unsigned char> {};

}  // namespace engine

using __nv_fp8_e4m3 = engine::Fp8<engine::E4m3>;
using __nv_fp8_e5m2 = engine::Fp8<engine::E5m2>;

static inline __nv_fp8_storage_t __nv_cvt_double_to_fp8(double x, __nv_saturation_t how, __nv_fp8_interpretation_t as) {
  return as == __NV_E4M3 ? engine::to_fp8<engine::E4m3>(x, how == __NV_SATFINITE)
                         : engine::to_fp8<engine::E5m2>(x, how == __NV_SATFINITE);
}
static inline __nv_fp8_storage_t __nv_cvt_float_to_fp8(float x, __nv_saturation_t how, __nv_fp8_interpretation_t as) {
  return __nv_cvt_double_to_fp8(x, how, as);
}
static inline __half_raw __nv_cvt_fp8_to_halfraw(__nv_fp8_storage_t bits, __nv_fp8_interpretation_t as) {
  float x = as == __NV_E4M3 ? engine::of_fp8<engine::E4m3>(bits) : engine::of_fp8<engine::E5m2>(bits);
  return {engine::Binary16::from(x)};
}
