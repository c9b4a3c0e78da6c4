// 16-bit floats: each operation is done in float and rounded once, to nearest and ties to even. A float has more than
// twice their digits and two, so the sums, products, quotients and roots are those of the exact result.
#pragma once
#include "device.h"

namespace engine {

// A double to the float that keeps what a later rounding must know: towards zero, the last bit set if it was inexact.
static inline float to_odd(double x) {
  float near = (float)x;
  if ((double)near == x || near != near) return near;
  unsigned bits = bits_of<unsigned>(near);
  if (std::fabs((double)near) > std::fabs(x)) bits--;
  return bits_of<float>(bits | 1);
}

struct Binary16 {
  static float to_float(unsigned short bits) { return (float)bits_of<_Float16>(bits); }
  static unsigned short from(float x) { return bits_of<unsigned short>((_Float16)x); }
};
struct Brain16 {
  static float to_float(unsigned short bits) { return bits_of<float>((unsigned)bits << 16); }
  static unsigned short from(float x) {
    unsigned bits = bits_of<unsigned>(x);
    if (x != x) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  }
};

template <class Format> struct alignas(2) Half {
  unsigned short __x;
  Half() = default;
  template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>> Half(T x) {
    if constexpr (std::is_same_v<T, float>) __x = Format::from(x);
    else __x = Format::from(to_odd((double)x));
  }
  operator float() const { return Format::to_float(__x); }

  friend Half operator+(Half a, Half b) { return (float)a + (float)b; }
  friend Half operator-(Half a, Half b) { return (float)a - (float)b; }
  friend Half operator*(Half a, Half b) { return (float)a * (float)b; }
  friend Half operator/(Half a, Half b) { return (float)a / (float)b; }
  friend Half operator-(Half a) {
    a.__x ^= 0x8000;
    return a;
  }
  friend Half& operator+=(Half& a, Half b) { return a = a + b; }
  friend Half& operator-=(Half& a, Half b) { return a = a - b; }
  friend Half& operator*=(Half& a, Half b) { return a = a * b; }
  friend Half& operator/=(Half& a, Half b) { return a = a / b; }
  friend bool operator==(Half a, Half b) { return (float)a == (float)b; }
  friend bool operator!=(Half a, Half b) { return (float)a != (float)b; }
  friend bool operator<(Half a, Half b) { return (float)a < (float)b; }
  friend bool operator>(Half a, Half b) { return (float)a > (float)b; }
  friend bool operator<=(Half a, Half b) { return (float)a <= (float)b; }
  friend bool operator>=(Half a, Half b) { return (float)a >= (float)b; }
};
template <class F> struct alignas(4) Pair { Half<F> x, y; };
template <class F> struct Value<Half<F>> : Value<unsigned short> {};
template <class F> struct Value<Pair<F>> : Value<unsigned> {};

}  // namespace engine

#define GPU_DOUBLE_OF_HALF(name, result) \
  template <class F> static inline engine::Half<F> name(engine::Half<F> a) { \
    float x = a; \
    return result; \
  }
GPU_DOUBLE_OF_HALF(hsqrt, sqrtf(x))
GPU_DOUBLE_OF_HALF(hrsqrt, 1 / sqrtf(x))
GPU_DOUBLE_OF_HALF(hrcp, 1 / x)
GPU_DOUBLE_OF_HALF(hcos, cosf(x))
GPU_DOUBLE_OF_HALF(hsin, sinf(x))
GPU_DOUBLE_OF_HALF(hlog, logf(x))
GPU_DOUBLE_OF_HALF(hexp, expf(x))
GPU_DOUBLE_OF_HALF(htanh, tanhf(x))
GPU_DOUBLE_OF_HALF(hceil, ceilf(x))
GPU_DOUBLE_OF_HALF(hfloor, floorf(x))
GPU_DOUBLE_OF_HALF(hrint, rintf(x))
GPU_DOUBLE_OF_HALF(htrunc, truncf(x))
GPU_DOUBLE_OF_HALF(__habs, fabsf(x))
GPU_DOUBLE_OF_HALF(__hneg, -x)
#undef GPU_DOUBLE_OF_HALF

template <class F> static inline bool __hisnan(engine::Half<F> a) { return isnan((float)a); }
template <class F> static inline int __hisinf(engine::Half<F> a) { return isinf((float)a) ? (float)a > 0 ? 1 : -1 : 0; }

#define GPU_DOUBLE_OF_HALVES(name, result) \
  template <class F> static inline engine::Half<F> __h##name(engine::Half<F> a, engine::Half<F> b) { return result; } \
  template <class F> static inline engine::Pair<F> __h##name##2(engine::Pair<F> a, engine::Pair<F> b) { \
    return {__h##name(a.x, b.x), __h##name(a.y, b.y)}; \
  }
GPU_DOUBLE_OF_HALVES(add, a + b)
GPU_DOUBLE_OF_HALVES(sub, a - b)
GPU_DOUBLE_OF_HALVES(mul, a * b)
GPU_DOUBLE_OF_HALVES(div, a / b)
GPU_DOUBLE_OF_HALVES(max, engine::Half<F>(fmaxf(a, b)))
GPU_DOUBLE_OF_HALVES(min, engine::Half<F>(fminf(a, b)))
#undef GPU_DOUBLE_OF_HALVES
// A product of two halves is exact in double, and so the sum is rounded once.
template <class F> static inline engine::Half<F> __hfma(engine::Half<F> a, engine::Half<F> b, engine::Half<F> c) {
  return engine::Half<F>(engine::to_odd((double)(float)a * (double)(float)b + (double)(float)c));
}
template <class F> static inline engine::Pair<F> __hfma2(engine::Pair<F> a, engine::Pair<F> b, engine::Pair<F> c) {
  return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}
template <class F> static inline engine::Half<F> __hmax_nan(engine::Half<F> a, engine::Half<F> b) {
  return __hisnan(a) || __hisnan(b) ? engine::Half<F>(NAN) : __hmax(a, b);
}
template <class F> static inline engine::Half<F> __hmin_nan(engine::Half<F> a, engine::Half<F> b) {
  return __hisnan(a) || __hisnan(b) ? engine::Half<F>(NAN) : __hmin(a, b);
}
#define GPU_DOUBLE_COMPARE(name, with) \
  template <class F> static inline bool name(engine::Half<F> a, engine::Half<F> b) { return a with b; }
GPU_DOUBLE_COMPARE(__heq, ==)
GPU_DOUBLE_COMPARE(__hne, !=)
GPU_DOUBLE_COMPARE(__hlt, <)
GPU_DOUBLE_COMPARE(__hle, <=)
GPU_DOUBLE_COMPARE(__hgt, >)
GPU_DOUBLE_COMPARE(__hge, >=)
#undef GPU_DOUBLE_COMPARE

template <class F> static inline engine::Half<F> __low2half(engine::Pair<F> a) { return a.x; }
template <class F> static inline engine::Half<F> __high2half(engine::Pair<F> a) { return a.y; }
template <class F> static inline float __low2float(engine::Pair<F> a) { return a.x; }
template <class F> static inline float __high2float(engine::Pair<F> a) { return a.y; }

template <class F> static inline engine::Pair<F> atomicAdd(engine::Pair<F>* at, engine::Pair<F> x) {
  return engine::atomic(at, [&](engine::Pair<F> old) { return __hadd2(old, x); });
}
