// What all kernels share. NVRTC compiles each `.cu` file without an include directory, so `compiler.rs` puts the text of
// this file and of the other headers in the place of the lines that include them.
//
// The kernels compute the same as `kernels/cpu`, operation by operation. The option `--fmad=false` forbids fused
// multiply-add, so the bits are the CPU's, except for sums with another order and for f64 rounded to half precision,
// which the CPU rounds to f32 first. The order of a sum depends only on sizes. Kernels for tensor cores, whose sums have
// another order, are compiled with fused multiply-add.
// A pointer to `const` is only read: the device double detects races by it.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct bf16 { u16 bits; };
struct f16 { u16 bits; };

enum : u32 { THREADS = 256 };

// A loop over elements, divided over all threads of a launch.
#define EACH(i, count) \
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < (count); i += (u64)gridDim.x * blockDim.x)
#define KERNEL(name) extern "C" __global__ void name

// Expands a macro for each float type.
#define FLOATS(each) each(f32, float) each(f64, double) each(bf16, bf16) each(f16, f16)

// ---- floats ----

// Rounds to the nearest float of another format, ties to even. `exponent` and `mantissa` are numbers of bits. `large`
// is the bit pattern of infinity, which also replaces values that are too large.
template <int to_exponent, int to_mantissa, int exponent, int mantissa, class Word>
__device__ u32 narrowed(Word bits, u32 large) {
  const Word hidden = (Word)1 << mantissa;
  const u32 sign = (u32)(bits >> (exponent + mantissa)) << (to_exponent + to_mantissa);
  const int most = (1 << exponent) - 1, power = (int)(bits >> mantissa) & most;
  Word fraction = bits & (hidden - 1);
  if (power == most && fraction)  // NaN keeps its upper bits
    return sign | large | 1u << (to_mantissa - 1) | (u32)(fraction >> (mantissa - to_mantissa));
  if (power == most) return sign | large;
  // The exponent in the new format. Subnormal numbers have the smallest.
  int scaled = (power ? power : 1) - (1 << (exponent - 1)) + (1 << (to_exponent - 1));
  int drop = mantissa - to_mantissa;
  if (power) fraction |= hidden;
  if (scaled < 1) {
    drop += 1 - scaled;
    scaled = 1;
  }
  if (drop > mantissa + 1) return sign;  // less than half of the smallest number
  const Word rest = fraction & (((Word)1 << drop) - 1), half = (Word)1 << (drop - 1);
  u32 kept = (u32)(fraction >> drop);
  if (rest > half || (rest == half && (kept & 1))) kept++;
  // The leading bit of a normal number adds to the exponent.
  const u32 magnitude = ((u32)(scaled - 1) << to_mantissa) + kept;
  return sign | (magnitude < large ? magnitude : large);
}

inline __device__ u32 bits_of(float x) { return __float_as_uint(x); }
inline __device__ u64 bits_of(double x) { return (u64)__double_as_longlong(x); }
inline __device__ float f32_of(u32 bits) { return __uint_as_float(bits); }
inline __device__ bool is_finite(double x) { return x - x == 0; }

// The type of a float's arithmetic, and its conversions.
template <class T> struct Float;
template <> struct Float<float> {
  typedef float Real;
  static __device__ float get(float x) { return x; }
  static __device__ float put(float x) { return x; }
  static __device__ float put(double x) { return (float)x; }
};
template <> struct Float<double> {
  typedef double Real;
  static __device__ double get(double x) { return x; }
  static __device__ double put(float x) { return x; }
  static __device__ double put(double x) { return x; }
};
template <> struct Float<bf16> {
  typedef float Real;
  static __device__ float get(bf16 x) { return f32_of((u32)x.bits << 16); }
  // The exponent has as many bits as a float's, so rounding is an addition. NaN keeps its upper bits.
  static __device__ bf16 put(float x) {
    const u32 bits = bits_of(x);
    bf16 rounded = {(u16)((x == x ? bits + 0x7fff + (bits >> 16 & 1) : bits | 1u << 22) >> 16)};
    return rounded;
  }
  static __device__ bf16 put(double x) {
    bf16 rounded = {(u16)narrowed<8, 7, 11, 52>(bits_of(x), 0x7f80)};
    return rounded;
  }
};
template <> struct Float<f16> {
  typedef float Real;
  static __device__ float get(f16 x) {
    const u32 sign = (u32)(x.bits >> 15) << 31, power = x.bits >> 10 & 31, fraction = x.bits & 1023;
    if (power == 31) return f32_of(sign | 0x7f800000 | fraction << 13);
    if (power) return f32_of(sign | (power + 112) << 23 | fraction << 13);
    return f32_of(sign | bits_of((float)fraction * 5.9604644775390625e-8f));  // 2^-24
  }
  static __device__ f16 put(float x) {
    f16 rounded = {(u16)narrowed<5, 10, 8, 23>(bits_of(x), 0x7c00)};
    return rounded;
  }
  static __device__ f16 put(double x) {
    f16 rounded = {(u16)narrowed<5, 10, 11, 52>(bits_of(x), 0x7c00)};
    return rounded;
  }
};

// The type of a float's arithmetic.
#define REAL typename Float<T>::Real
