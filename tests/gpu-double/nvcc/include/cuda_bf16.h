// bfloat16.
#pragma once
#include "half.h"

using __nv_bfloat16 = engine::Half<engine::Brain16>;
using __nv_bfloat162 = engine::Pair<engine::Brain16>;
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;

static inline float __bfloat162float(__nv_bfloat16 a) { return a; }
static inline __nv_bfloat16 __float2bfloat16(float a) { return a; }
static inline __nv_bfloat16 __float2bfloat16_rn(float a) { return a; }
static inline __nv_bfloat16 __double2bfloat16(double a) { return a; }
static inline __nv_bfloat16 __int2bfloat16_rn(int a) { return a; }
static inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 a) { return a.__x; }
static inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return engine::bits_of<__nv_bfloat16>(bits); }
static inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
static inline __nv_bfloat162 make_bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
static inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 x) { return {x, x}; }
static inline __nv_bfloat162 __float2bfloat162_rn(float x) { return {x, x}; }
static inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {x, y}; }
static inline __nv_bfloat162 __float22bfloat162_rn(float2 a) { return {a.x, a.y}; }
static inline float2 __bfloat1622float2(__nv_bfloat162 a) { return {a.x, a.y}; }
