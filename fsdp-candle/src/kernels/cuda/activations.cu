// Activations and sums: `nn/activation.rs` has the formulas. Backward reads only the inputs.
#include "prelude.cuh"
#include "packs.cuh"
#include "logistic.cuh"

struct Silu {
  template <class R> static __device__ R value(R x) { return x * logistic(x); }
  template <class R> static __device__ R slope(R x) {
    const R s = logistic(x);
    return s * (1 + x * (1 - s));
  }
};
// The tanh approximation.
struct Gelu {
  template <class R> static __device__ R argument(R x) {
    return (R)1.5957691216057308 * x * ((R)0.044715 * x * x + 1);  // 2 sqrt(2 / pi)
  }
  template <class R> static __device__ R value(R x) { return x * logistic(argument(x)); }
  template <class R> static __device__ R slope(R x) {
    const R s = logistic(argument(x)), bend = s * (1 - s);
    // The square of a large number is infinite, where the function is straight.
    return bend > 0 ? s + x * bend * ((R)1.5957691216057308 * ((R)0.134145 * x * x + 1)) : s;
  }
};
struct GeluErf {
  template <class R> static __device__ R distribution(R x) { return (R)0.5 * erfc(x * (R)-0.7071067811865476); }
  template <class R> static __device__ R value(R x) { return x * distribution(x); }
  template <class R> static __device__ R slope(R x) {
    return distribution(x) + x * ((R)0.3989422804014327 * exp((R)-0.5 * x * x));  // 1 / sqrt(2 pi)
  }
};

template <class A, int N, class T> static __device__ void activate(const T* x, T* y, u64 count) {
  typedef Float<T> F;
  EACH_PACK(at, count) {
    Pack<T, N> values = load<N>(x + at);
    for (int i = 0; i < N; i++) values.at[i] = F::put(A::value(F::get(values.at[i])));
    store(y + at, values);
  }
}
template <class A, int N, class T>
static __device__ void activate_back(const T* x, const T* dy, T* dx, u64 count) {
  typedef Float<T> F;
  EACH_PACK(at, count) {
    const Pack<T, N> values = load<N>(x + at);
    Pack<T, N> grads = load<N>(dy + at);
    for (int i = 0; i < N; i++) grads.at[i] = F::put(F::get(grads.at[i]) * A::slope(F::get(values.at[i])));
    store(dx + at, grads);
  }
}
#define ACTIVATION(function, A, name, T) \
  KERNEL(function##_##name)(const T* x, T* y, u64 count) { \
    if (count % 4 == 0 && are_packs(x, y)) activate<A, 4>(x, y, count); \
    else activate<A, 1>(x, y, count); \
  } \
  KERNEL(function##_back_##name)(const T* x, const T* dy, T* dx, u64 count) { \
    if (count % 4 == 0 && are_packs(x, dy, dx)) activate_back<A, 4>(x, dy, dx, count); \
    else activate_back<A, 1>(x, dy, dx, count); \
  }
#define ACTIVATIONS(name, T) \
  ACTIVATION(silu, Silu, name, T) ACTIVATION(gelu, Gelu, name, T) ACTIVATION(gelu_erf, GeluErf, name, T)
FLOATS(ACTIVATIONS)

template <int N, class T> static __device__ void sum(const T* x, const T* y, T* to, u64 count) {
  typedef Float<T> F;
  EACH_PACK(at, count) {
    Pack<T, N> values = load<N>(x + at);
    const Pack<T, N> more = load<N>(y + at);
    for (int i = 0; i < N; i++) values.at[i] = F::put(F::get(values.at[i]) + F::get(more.at[i]));
    store(to + at, values);
  }
}
#define SUM(name, T) \
  KERNEL(sum_##name)(const T* x, const T* y, T* to, u64 count) { \
    if (count % 4 == 0 && are_packs(x, y, to)) sum<4>(x, y, to, count); \
    else sum<1>(x, y, to, count); \
  }
FLOATS(SUM)

// SwiGLU of rows of `width` elements. The rows of `gate` and `up` are `stride` apart, as in a tensor that holds both.
template <int N, class T>
static __device__ void swiglu(const T* gate, const T* up, T* y, u64 rows, u64 width, u64 stride) {
  typedef Float<T> F;
  EACH_PACK(at, rows * width) {
    const u64 from = at / width * stride + at % width;
    const Pack<T, N> gates = load<N>(gate + from);
    Pack<T, N> ups = load<N>(up + from);
    for (int i = 0; i < N; i++) ups.at[i] = F::put(Silu::value(F::get(gates.at[i])) * F::get(ups.at[i]));
    store(y + at, ups);
  }
}
template <int N, class T>
static __device__ void swiglu_back(const T* gate, const T* up, const T* dy, T* d_gate, T* d_up, u64 rows, u64 width,
                                   u64 stride) {
  typedef Float<T> F;
  EACH_PACK(at, rows * width) {
    const u64 from = at / width * stride + at % width;
    Pack<T, N> gates = load<N>(gate + from), ups = load<N>(up + from);
    const Pack<T, N> grads = load<N>(dy + at);
    for (int i = 0; i < N; i++) {
      const REAL gate = F::get(gates.at[i]), grad = F::get(grads.at[i]), s = logistic(gate);
      gates.at[i] = F::put(grad * F::get(ups.at[i]) * s * (1 + gate * (1 - s)));
      ups.at[i] = F::put(grad * gate * s);
    }
    store(d_gate + from, gates);
    store(d_up + from, ups);
  }
}
#define SWIGLU(name, T) \
  KERNEL(swiglu_##name)(const T* gate, const T* up, T* y, u64 count) { \
    if (count % 4 == 0 && are_packs(gate, up, y)) swiglu<4>(gate, up, y, 1, count, count); \
    else swiglu<1>(gate, up, y, 1, count, count); \
  } \
  KERNEL(swiglu_back_##name)(const T* gate, const T* up, const T* dy, T* d_gate, T* d_up, u64 count) { \
    if (count % 4 == 0 && are_packs(gate, up, dy, d_gate, d_up)) \
      swiglu_back<4>(gate, up, dy, d_gate, d_up, 1, count, count); \
    else swiglu_back<1>(gate, up, dy, d_gate, d_up, 1, count, count); \
  } \
  KERNEL(swiglu_halves_##name)(const T* both, T* y, u64 rows, u64 width) { \
    if (width % 4 == 0 && are_packs(both, y)) swiglu<4>(both, both + width, y, rows, width, 2 * width); \
    else swiglu<1>(both, both + width, y, rows, width, 2 * width); \
  } \
  KERNEL(swiglu_halves_back_##name)(const T* both, const T* dy, T* grads, u64 rows, u64 width) { \
    if (width % 4 == 0 && are_packs(both, dy, grads)) \
      swiglu_back<4>(both, both + width, dy, grads, grads + width, rows, width, 2 * width); \
    else swiglu_back<1>(both, both + width, dy, grads, grads + width, rows, width, 2 * width); \
  }
FLOATS(SWIGLU)
