// Copies, sums, casts, norms of gradients, and optimizers.
#include "prelude.cuh"
#include "float8.cuh"
#include "packs.cuh"

// ---- copies, sums, scales and casts ----

// A thread for each element. Rows run along y.
template <class T>
static __device__ void copy_rows(const T* from, T* to, u64 rows, u64 width, u64 from_stride, u64 to_stride) {
  for (u64 row = (u64)blockIdx.y * blockDim.y + threadIdx.y; row < rows; row += (u64)gridDim.y * blockDim.y)
    EACH(at, width) to[row * to_stride + at] = from[row * from_stride + at];
}
#define COPY_ROWS(bytes, T) \
  KERNEL(copy_rows_##bytes)(const T* from, T* to, u64 rows, u64 width, u64 from_stride, u64 to_stride) { \
    copy_rows(from, to, rows, width, from_stride, to_stride); \
  }
COPY_ROWS(1, u8)
COPY_ROWS(2, u16)
COPY_ROWS(4, u32)
COPY_ROWS(8, u64)
struct alignas(16) Words { u64 at[2]; };
COPY_ROWS(16, Words)

template <int N, class T> static __device__ void add(T* sum, const T* more, u64 count) {
  typedef Float<T> F;
  EACH_PACK(at, count) {
    Pack<T, N> sums = load<N>(sum + at);
    const Pack<T, N> others = load<N>(more + at);
    for (int i = 0; i < N; i++) sums.at[i] = F::put(F::get(sums.at[i]) + F::get(others.at[i]));
    store(sum + at, sums);
  }
}
template <class T> static __device__ T scaled(T value, REAL factor) {
  return Float<T>::put(Float<T>::get(value) * factor);
}
template <int N, class T> static __device__ void scale(T* values, u64 count, REAL factor) {
  EACH_PACK(at, count) {
    Pack<T, N> pack = load<N>(values + at);
    for (int i = 0; i < N; i++) pack.at[i] = scaled(pack.at[i], factor);
    store(values + at, pack);
  }
}
#define ADD_AND_SCALE(name, T) \
  KERNEL(add_##name)(T* sum, const T* more, u64 count) { \
    BY_PACKS(are_packs<PACK>(sum, more), count, add, sum, more, count); \
  } \
  KERNEL(scale_##name)(T* values, u64 count, double factor) { \
    BY_PACKS(are_packs<PACK>(values), count, scale, values, count, (Float<T>::Real)factor); \
  }
FLOATS(ADD_AND_SCALE)

template <int N, class A, class B> static __device__ void cast(const A* from, B* to, u64 count) {
  EACH_PACK(at, count) {
    const Pack<A, N> values = load<N>(from + at);
    Pack<B, N> converted;
    for (int i = 0; i < N; i++) converted.at[i] = Float<B>::put(Float<A>::get(values.at[i]));
    store(to + at, converted);
  }
}
#define CAST(a, A, b, B) \
  KERNEL(cast_##a##_##b)(const A* from, B* to, u64 count) { \
    BY_PACKS(are_packs<PACK>(from, to), count, cast, from, to, count); \
  }
#define CASTS_FROM(a, A) CAST(a, A, f32, float) CAST(a, A, f64, double) CAST(a, A, bf16, bf16) CAST(a, A, f16, f16)
FLOATS(CASTS_FROM)

// `more` is converted to the type of the values' arithmetic.
template <int N, class A, class B>
static __device__ void mix(A* values, const B* more, u64 count, typename Float<A>::Real kept,
                           typename Float<A>::Real taken) {
  typedef Float<A> F;
  EACH_PACK(at, count) {
    Pack<A, N> mixed = load<N>(values + at);
    const Pack<B, N> others = load<N>(more + at);
    for (int i = 0; i < N; i++)
      mixed.at[i] = F::put(kept * F::get(mixed.at[i]) + taken * (typename F::Real)Float<B>::get(others.at[i]));
    store(values + at, mixed);
  }
}
#define MIX(a, A, b, B) \
  KERNEL(mix_##a##_##b)(A* values, const B* more, u64 count, double kept, double taken) { \
    typedef Float<A>::Real R; \
    BY_PACKS(are_packs<PACK>(values, more), count, mix, values, more, count, (R)kept, (R)taken); \
  }
#define MIXES_OF(a, A) MIX(a, A, f32, float) MIX(a, A, f64, double) MIX(a, A, bf16, bf16) MIX(a, A, f16, f16)
FLOATS(MIXES_OF)

// ---- norms ----

// The term of each value in a reduction. The numbers are those of `Reduction` in `mod.rs`.
enum : u32 { SQUARES, MAGNITUDES, LARGEST, POWERS, NON_FINITE };

static __device__ double share(double value, u32 of, double p) {
  const double magnitude = value < 0 ? -value : value;
  if (of == NON_FINITE) return is_finite(value) ? 0 : 1;
  if (of == SQUARES) return magnitude * magnitude;
  return of == POWERS ? pow(magnitude, p) : magnitude;
}

static __device__ double combined(double a, double b, u32 of) {
  if (of != LARGEST) return a + b;
  return b > a || b != b ? b : a;  // NaN stays
}

// Combines the values of a block's threads. Every thread calls it, once.
static __device__ void combine_block(double mine, double* result, u32 of) {
  __shared__ double shares[THREADS];
  shares[threadIdx.x] = mine;
  for (u32 half = THREADS / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) shares[threadIdx.x] = combined(shares[threadIdx.x], shares[threadIdx.x + half], of);
  }
  if (threadIdx.x == 0) *result = shares[0];
}

// Writes a partial result for each block. A thread has the same elements at any address.
template <class T> static __device__ void powers(const T* values, u64 count, u32 of, double p, double* shares) {
  double mine = 0;
  const auto include = [&](T value) { mine = combined(mine, share((double)Float<T>::get(value), of, p), of); };
  const bool packed = of == SQUARES && are_packs<PACK>(values);
  EACH(pack, count / PACK) {
    const T* from = values + pack * PACK;
    if (packed) {
      const Pack<T, PACK> together = load<PACK>(from);
      for (int i = 0; i < PACK; i++) {
        const double value = (double)Float<T>::get(together.at[i]);
        mine += value * value;
      }
    } else {
      _Pragma("unroll 1") for (int i = 0; i < PACK; i++) include(from[i]);
    }
  }
  EACH(i, count % PACK) include(values[count - count % PACK + i]);
  combine_block(mine, shares + blockIdx.x, of);
}
#define POWERS_OF(name, T) \
  KERNEL(powers_##name)(const T* values, u64 count, u32 of, double p, double* shares) { \
    powers(values, count, of, p, shares); \
  }
FLOATS(POWERS_OF)

// Combines all partial results, in one block.
KERNEL(total)(const double* shares, u64 count, u32 of, double* result) {
  double mine = 0;
  EACH(i, count) mine = combined(mine, shares[i], of);
  combine_block(mine, result, of);
}

// ---- optimizers ----

// `factor` multiplies gradients, with the rounding of `scale`.

template <int N, class T>
static __device__ void adam(T* param, const T* grad, T* means, T* squares, u64 count, REAL factor, REAL l2, REAL decay,
                            REAL beta1, REAL rest1, REAL beta2, REAL rest2, REAL step_size, REAL root, REAL eps) {
  typedef Float<T> F;
  typedef typename F::Real R;
  EACH_PACK(at, count) {
    Pack<T, N> values = load<N>(param + at), firsts = load<N>(means + at), seconds = load<N>(squares + at);
    const Pack<T, N> grads = load<N>(grad + at);
    for (int i = 0; i < N; i++) {
      R g = F::get(scaled(grads.at[i], factor));
      if (l2 != 0) g = g + l2 * F::get(values.at[i]);
      const R mean = beta1 * F::get(firsts.at[i]) + rest1 * g;
      const R square = beta2 * F::get(seconds.at[i]) + rest2 * g * g;
      firsts.at[i] = F::put(mean);
      seconds.at[i] = F::put(square);
      values.at[i] = F::put(F::get(values.at[i]) * decay - step_size * mean / (sqrt(square) / root + eps));
    }
    store(means + at, firsts);
    store(squares + at, seconds);
    store(param + at, values);
  }
}
#define ADAM(name, T) \
  KERNEL(adam_##name)(T* param, const T* grad, T* means, T* squares, u64 count, double factor, double l2, \
                      double decay, double beta1, double rest1, double beta2, double rest2, double step_size, \
                      double root, double eps) { \
    typedef Float<T>::Real R; \
    BY_PACKS(are_packs<PACK>(param, grad, means, squares), count, adam, param, grad, means, squares, count, \
             (R)factor, (R)l2, (R)decay, (R)beta1, (R)rest1, (R)beta2, (R)rest2, (R)step_size, (R)root, (R)eps); \
  }
FLOATS(ADAM)

template <int N, class T>
static __device__ void sgd(T* param, const T* grad, u64 count, REAL factor, REAL l2, REAL lr) {
  typedef Float<T> F;
  EACH_PACK(at, count) {
    Pack<T, N> values = load<N>(param + at);
    const Pack<T, N> grads = load<N>(grad + at);
    for (int i = 0; i < N; i++) {
      REAL g = F::get(scaled(grads.at[i], factor));
      if (l2 != 0) g = g + l2 * F::get(values.at[i]);
      values.at[i] = F::put(F::get(values.at[i]) - lr * g);
    }
    store(param + at, values);
  }
}
template <int N, class T>
static __device__ void momentum(T* param, const T* grad, T* buffers, u64 count, bool is_nesterov, REAL factor, REAL l2,
                                REAL kept, REAL taken, REAL nesterov, REAL lr) {
  typedef Float<T> F;
  EACH_PACK(at, count) {
    Pack<T, N> values = load<N>(param + at), moments = load<N>(buffers + at);
    const Pack<T, N> grads = load<N>(grad + at);
    for (int i = 0; i < N; i++) {
      REAL g = F::get(scaled(grads.at[i], factor));
      if (l2 != 0) g = g + l2 * F::get(values.at[i]);
      const REAL moment = kept * F::get(moments.at[i]) + taken * g;
      moments.at[i] = F::put(moment);
      values.at[i] = F::put(F::get(values.at[i]) - lr * (is_nesterov ? g + nesterov * moment : moment));
    }
    store(buffers + at, moments);
    store(param + at, values);
  }
}
#define SGD(name, T) \
  KERNEL(sgd_##name)(T* param, const T* grad, u64 count, double factor, double l2, double lr) { \
    typedef Float<T>::Real R; \
    BY_PACKS(are_packs<PACK>(param, grad), count, sgd, param, grad, count, (R)factor, (R)l2, (R)lr); \
  } \
  KERNEL(momentum_##name)(T* param, const T* grad, T* buffers, u64 count, u32 is_nesterov, double factor, double l2, \
                          double kept, double taken, double nesterov, double lr) { \
    typedef Float<T>::Real R; \
    BY_PACKS(are_packs<PACK>(param, grad, buffers), count, momentum, param, grad, buffers, count, is_nesterov != 0, \
             (R)factor, (R)l2, (R)kept, (R)taken, (R)nesterov, (R)lr); \
  }
FLOATS(SGD)

// ---- 8 bits ----

// Computes the largest magnitude of each run of `width` values, as bits. The bits of floats that are not negative are
// in order, and NaN is above all. `largest` starts as zeros. The blocks of threads of a run follow one another.
KERNEL(largest)(const float* values, u32* largest, u64 count, u64 width, u64 blocks_each) {
  const u64 stretch = blockIdx.x / blocks_each, begin = stretch * width;
  const u64 end = begin + width < count ? begin + width : count;
  u32 mine = 0;
  for (u64 i = begin + blockIdx.x % blocks_each * blockDim.x + threadIdx.x; i < end; i += blocks_each * blockDim.x) {
    const u32 bits = bits_of(values[i]) & 0x7fffffff;
    mine = bits > mine ? bits : mine;
  }
  atomicMax(largest + stretch, mine);
}

// Converts each largest magnitude to a scale, in place.
KERNEL(scales_of)(u32* largest, u64 count, float most, float of_zeros, float least) {
  EACH(i, count) {
    const u32 bits = largest[i];
    float scale = f32_of(0x7fc00000);
    if (bits == 0) scale = of_zeros;
    else if (bits < 0x7f800000) scale = f32_of(bits) / most < least ? least : f32_of(bits) / most;
    largest[i] = bits_of(scale);
  }
}

KERNEL(quantise_e4m3)(const float* values, const float* scales, u8* codes, u64 count, u64 width) {
  EACH(i, count) codes[i] = code_e4m3(values[i] / scales[i / width]);
}

// Magnitudes from 0 to 1, as in `eight_bits.rs`. The first decade has two, and each decade has twice as many as the one
// before.
__device__ const double UNITS[7] = {1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1};

template <u32 first, u32 last> struct Magnitudes {
  float values[last + 1], middles[last + 1];

  // Every thread of a block calls it.
  __device__ void fill() {
    for (u32 code = threadIdx.x; code <= last; code += blockDim.x) values[code] = value_of(code);
    __syncthreads();
    for (u32 code = threadIdx.x; code < last; code += blockDim.x) middles[code] = (values[code] + values[code + 1]) / 2;
    __syncthreads();
  }

  static __device__ float value_of(u32 code) {
    if (code == 0 || code == last) return code ? 1.0f : 0.0f;
    u32 at = code - 1, count = 2, decade = first;
    for (; at >= count; count *= 2, decade++) at -= count;
    const double step = 0.9 / (double)count;
    return (float)(UNITS[decade] * (0.1 + ((double)at + 0.5) * step));
  }

  // Returns the code of the nearest magnitude: the number of middles below.
  __device__ u8 nearest(float number) const {
    u32 low = 0, high = last;
    while (low < high) {
      const u32 at = (low + high) / 2;
      if (number > middles[at]) low = at + 1;
      else high = at;
    }
    return (u8)low;
  }
};
struct Signed : Magnitudes<1, 127> {
  __device__ float of(u8 code) const { return code > 127 ? -values[code & 127] : values[code]; }
  __device__ u8 code(float value, float inverse) const {
    const float number = value * inverse;
    return (u8)(nearest(number < 0 ? -number : number) | (value < 0 ? 128 : 0));
  }
};
struct Unsigned : Magnitudes<0, 255> {
  __device__ float of(u8 code) const { return values[code]; }
  __device__ u8 code(float value, float inverse) const { return nearest(value * inverse); }
};
static __device__ float inverse_of(float scale) { return scale > 0 ? 1 / scale : 0; }

#define MAGNITUDES(name, M) \
  KERNEL(quantise_##name)(const float* values, const float* scales, u8* codes, u64 count, u64 width) { \
    __shared__ M magnitudes; \
    magnitudes.fill(); \
    EACH(i, count) codes[i] = magnitudes.code(values[i], inverse_of(scales[i / width])); \
  }
MAGNITUDES(signed, Signed)
MAGNITUDES(unsigned, Unsigned)

#define FROM_MAGNITUDES_AS(bits, M, name, T) \
  KERNEL(dequantise_##bits##_##name)(const u8* codes, const float* scales, T* values, u64 count, u64 width) { \
    __shared__ M magnitudes; \
    magnitudes.fill(); \
    EACH(i, count) values[i] = Float<T>::put(magnitudes.of(codes[i]) * scales[i / width]); \
  }
#define FROM_MAGNITUDES(name, T) \
  FROM_MAGNITUDES_AS(signed, Signed, name, T) FROM_MAGNITUDES_AS(unsigned, Unsigned, name, T)
FLOATS(FROM_MAGNITUDES)

static __device__ float e4m3_of(u8 code) {
  const u32 power = code >> 3 & 15, fraction = code & 7;
  const float magnitude = (float)(power ? fraction + 8 : fraction) * f32_of((power ? power + 117 : 118u) << 23);
  return f32_of((u32)(code >> 7) << 31 | ((code & 127) == 127 ? 0x7fc00000 : bits_of(magnitude)));
}
#define DEQUANTISE(name, T) \
  KERNEL(dequantise_e4m3_##name)(const u8* codes, const float* scales, T* values, u64 count, u64 width) { \
    EACH(i, count) values[i] = Float<T>::put(e4m3_of(codes[i]) * scales[i / width]); \
  }
FLOATS(DEQUANTISE)

// ---- weights in blocks of 64, as in fsdp-core's `block_format.rs` ----

__device__ const float NF4_LEVELS[16] = {
    -1.0f, -0.6961928f, -0.52507305f, -0.3949175f, -0.28444138f, -0.18477343f, -0.091050036f, 0.0f,
    0.0795803f, 0.1609302f, 0.2461123f, 0.33791524f, 0.44070983f, 0.562617f, 0.72295684f, 1.0f};

// A block is a scale in BF16 and its codes, and has an even number of bytes. A thread decodes two values.
struct Nf4 {
  static const u32 BYTES = 34;
  static __device__ float level(const u8* codes, u32 at) { return NF4_LEVELS[at & 1 ? codes[at / 2] & 15 : codes[at / 2] >> 4]; }
};
struct Int8 {
  static const u32 BYTES = 66;
  static __device__ float level(const u8* codes, u32 at) { return (float)(signed char)codes[at]; }
};
template <class Format, class T> static __device__ void decode(const u8* blocks, T* values, u64 pairs) {
  EACH(i, pairs) {
    const u8* block = blocks + i / 32 * Format::BYTES;
    const float scale = f32_of((u32)*(const u16*)block << 16);
    const u32 at = (u32)(i % 32 * 2);
    values[2 * i] = Float<T>::put(Format::level(block + 2, at) * scale);
    values[2 * i + 1] = Float<T>::put(Format::level(block + 2, at + 1) * scale);
  }
}
#define DECODE(name, T) \
  KERNEL(decode_nf4_##name)(const u8* blocks, T* values, u64 pairs) { decode<Nf4>(blocks, values, pairs); } \
  KERNEL(decode_int8_##name)(const u8* blocks, T* values, u64 pairs) { decode<Int8>(blocks, values, pairs); }
FLOATS(DECODE)

// ---- AdamW with moments of 8 bits ----

// Returns the largest magnitude of a block's threads, or NaN if one is not finite. Every thread calls it.
static __device__ float largest_of_block(float mine) {
  __shared__ u32 largest;
  if (threadIdx.x == 0) largest = 0;
  __syncthreads();
  atomicMax(&largest, bits_of(mine) & 0x7fffffff);
  __syncthreads();
  const u32 bits = largest;
  __syncthreads();
  return bits < 0x7f800000 ? f32_of(bits) : f32_of(0x7fc00000);
}

// Runs a block of threads for each block of values that shares a scale.
template <class T>
static __device__ void adam_8bit(T* param, const T* grad, u8* codes1, float* scales1, u8* codes2, float* scales2,
                                 u64 count, float factor, float decay, float beta1, float rest1, float beta2,
                                 float rest2, float step_size, float root, float eps) {
  typedef Float<T> F;
  __shared__ Signed magnitudes1;
  __shared__ Unsigned magnitudes2;
  magnitudes1.fill();
  magnitudes2.fill();
  const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  float mean = 0, square_root = 0;
  if (i < count) {
    const float g = F::get(scaled(grad[i], factor));
    const float old = magnitudes2.of(codes2[i]) * scales2[blockIdx.x];
    mean = beta1 * (magnitudes1.of(codes1[i]) * scales1[blockIdx.x]) + rest1 * g;
    const float square = beta2 * (old * old) + rest2 * g * g;
    param[i] = F::put(F::get(param[i]) * decay - step_size * mean / (sqrt(square) / root + eps));
    square_root = sqrt(square);
  }
  const float scale1 = largest_of_block(mean), scale2 = largest_of_block(square_root);
  if (i < count) {
    codes1[i] = magnitudes1.code(mean, inverse_of(scale1));
    codes2[i] = magnitudes2.code(square_root, inverse_of(scale2));
  }
  if (threadIdx.x == 0) {
    scales1[blockIdx.x] = scale1;
    scales2[blockIdx.x] = scale2;
  }
}
#define ADAM_8BIT(name, T) \
  KERNEL(adam_8bit_##name)(T* param, const T* grad, u8* codes1, float* scales1, u8* codes2, float* scales2, \
                           u64 count, double factor, double decay, double beta1, double rest1, double beta2, \
                           double rest2, double step_size, double root, double eps) { \
    adam_8bit(param, grad, codes1, scales1, codes2, scales2, count, (float)factor, (float)decay, (float)beta1, \
              (float)rest1, (float)beta2, (float)rest2, (float)step_size, (float)root, (float)eps); \
  }
ADAM_8BIT(f32, float)
ADAM_8BIT(bf16, bf16)
ADAM_8BIT(f16, f16)
