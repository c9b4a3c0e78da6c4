// Half precision.
#pragma once
#include "half.h"

using __half = engine::Half<engine::Binary16>;
using __half2 = engine::Pair<engine::Binary16>;
using half = __half;
using half2 = __half2;
struct __half_raw { unsigned short x; };

static inline float __half2float(__half a) { return a; }
static inline float __half2float(__half_raw a) { return engine::Binary16::to_float(a.x); }
static inline __half __float2half(float a) { return a; }
static inline __half __float2half_rn(float a) { return a; }
static inline __half __double2half(double a) { return a; }
static inline __half __int2half_rn(int a) { return a; }
static inline unsigned short __half_as_ushort(__half a) { return a.__x; }
static inline __half __ushort_as_half(unsigned short bits) { return engine::bits_of<__half>(bits); }
static inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
static inline __half2 make_half2(__half x, __half y) { return {x, y}; }
static inline __half2 __half2half2(__half x) { return {x, x}; }
static inline __half2 __float2half2_rn(float x) { return {x, x}; }
static inline __half2 __floats2half2_rn(float x, float y) { return {x, y}; }
static inline __half2 __float22half2_rn(float2 a) { return {a.x, a.y}; }
static inline float2 __half22float2(__half2 a) { return {a.x, a.y}; }
