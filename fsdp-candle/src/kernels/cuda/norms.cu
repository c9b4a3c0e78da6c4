// Layer normalization and root-mean-square normalization: `nn/layer_norm.rs` has the formulas. A row has a warp, or a
// block of threads if it is long and consists of packs. The first pass over a row leaves it in the cache for the others.
#include "prelude.cuh"
#include "packs.cuh"
#include "sums.cuh"

template <class R> struct Statistics { R mean, scale; };

// Returns a row's mean (0 unless `centered`) and 1 / sqrt(variance + eps).
template <u32 threads, int N, class T>
static __device__ Statistics<REAL> statistics(const T* x, u64 width, REAL eps, bool centered) {
  typedef Float<T> F;
  REAL mean = 0, squares = 0;
  if (centered) {
    EACH_PACK_OF_ROW(at, width) {
      const Pack<T, N> values = load<N>(x + at);
      for (int i = 0; i < N; i++) mean += F::get(values.at[i]);
    }
    mean = sum_of_threads<threads>(mean) / (REAL)width;
  }
  EACH_PACK_OF_ROW(at, width) {
    const Pack<T, N> values = load<N>(x + at);
    for (int i = 0; i < N; i++) squares += (F::get(values.at[i]) - mean) * (F::get(values.at[i]) - mean);
  }
  const REAL variance = sum_of_threads<threads>(squares) / (REAL)width;
  return {mean, 1 / sqrt(variance + eps)};
}

template <u32 threads, int N, class T>
static __device__ void normalize(const T* x, const T* weight, const T* bias, T* y, u64 rows, u64 width, REAL eps,
                                 bool centered) {
  typedef Float<T> F;
  EACH_ROW(row, rows, threads) {
    const Statistics<REAL> of = statistics<threads, N>(x + row * width, width, eps, centered);
    EACH_PACK_OF_ROW(at, width) {
      Pack<T, N> values = load<N>(x + row * width + at);
      const Pack<T, N> weights = load<N>(weight + at);
      for (int i = 0; i < N; i++) {
        const REAL value = (F::get(values.at[i]) - of.mean) * of.scale * F::get(weights.at[i]);
        values.at[i] = F::put(bias ? value + F::get(bias[at + i]) : value);
      }
      store(y + row * width + at, values);
    }
  }
}

// Keeps the statistics of the rows for the weights' gradients.
template <u32 threads, int N, class T>
static __device__ void normalize_back(const T* x, const T* dy, const T* weight, T* dx, REAL* kept, u64 rows, u64 width,
                                      REAL eps, bool centered) {
  typedef Float<T> F;
  EACH_ROW(row, rows, threads) {
    const T *x_row = x + row * width, *dy_row = dy + row * width;
    const Statistics<REAL> of = statistics<threads, N>(x_row, width, eps, centered);
    REAL sum_g = 0, sum_gh = 0;
    EACH_PACK_OF_ROW(at, width) {
      const Pack<T, N> values = load<N>(x_row + at), grads = load<N>(dy_row + at), weights = load<N>(weight + at);
      for (int i = 0; i < N; i++) {
        const REAL g = F::get(grads.at[i]) * F::get(weights.at[i]);
        sum_g += g;
        sum_gh += g * (F::get(values.at[i]) - of.mean);
      }
    }
    const REAL mean_g = centered ? sum_of_threads<threads>(sum_g) / (REAL)width : 0;
    const REAL mean_gh = sum_of_threads<threads>(sum_gh) * of.scale / (REAL)width;
    EACH_PACK_OF_ROW(at, width) {
      Pack<T, N> values = load<N>(x_row + at);
      const Pack<T, N> grads = load<N>(dy_row + at), weights = load<N>(weight + at);
      for (int i = 0; i < N; i++) {
        const REAL g = F::get(grads.at[i]) * F::get(weights.at[i]), h = (F::get(values.at[i]) - of.mean) * of.scale;
        values.at[i] = F::put(of.scale * (g - mean_g - h * mean_gh));
      }
      store(dx + row * width + at, values);
    }
    if (threadIdx.x % threads == 0) {
      kept[2 * row] = of.mean;
      kept[2 * row + 1] = of.scale;
    }
  }
}

// Rows of a block that sums columns, whose x has a warp.
const u32 TOGETHER = THREADS / WARP;

// Sums the weight's and the bias's gradients over stretches of rows: `parts` is [stretches, 2, width]. Stretches run
// along y.
template <int N, class T>
static __device__ void weight_sums(const T* x, const T* dy, const REAL* kept, REAL* parts, u64 rows, u64 width,
                                   u64 stretch) {
  typedef Float<T> F;
  __shared__ REAL sums[2][TOGETHER][WARP * N];
  const u64 begin = blockIdx.y * stretch, end = begin + stretch < rows ? begin + stretch : rows;
  for (u64 tile = (u64)blockIdx.x * WARP * N; tile < width; tile += (u64)gridDim.x * WARP * N) {
    const u64 at = tile + threadIdx.x * N;
    REAL dw[N] = {}, db[N] = {};
    if (at < width) {
      _Pragma("unroll 1") for (u64 row = begin + threadIdx.y; row < end; row += TOGETHER) {
        const REAL mean = kept[2 * row], scale = kept[2 * row + 1];
        const Pack<T, N> values = load<N>(x + row * width + at), grads = load<N>(dy + row * width + at);
        for (int i = 0; i < N; i++) {
          const REAL grad = F::get(grads.at[i]);
          dw[i] += grad * ((F::get(values.at[i]) - mean) * scale);
          db[i] += grad;
        }
      }
    }
    for (int i = 0; i < N; i++) {
      sums[0][threadIdx.y][threadIdx.x * N + i] = dw[i];
      sums[1][threadIdx.y][threadIdx.x * N + i] = db[i];
    }
    __syncthreads();
    if (threadIdx.y < 2 && at < width) {
      for (u32 i = 0; i < N; i++) {
        REAL sum = 0;
        for (u32 row = 0; row < TOGETHER; row++) sum += sums[threadIdx.y][row][threadIdx.x * N + i];
        parts[(2 * blockIdx.y + threadIdx.y) * width + at + i] = sum;
      }
    }
    __syncthreads();
  }
}

// Adds the sums of all stretches to a gradient, or overwrites it. `first` is 0 for the weight and 1 for the bias.
template <class T>
static __device__ void weight_totals(const REAL* parts, T* grad, u64 stretches, u64 width, u32 first, u32 accumulates) {
  typedef Float<T> F;
  EACH(at, width) {
    REAL sum = 0;
    for (u64 stretch = 0; stretch < stretches; stretch++) sum += parts[(2 * stretch + first) * width + at];
    grad[at] = F::put(accumulates ? F::get(grad[at]) + sum : sum);
  }
}

// Elements of a row from which a block shares it.
const u64 LONG = 1024;

#define NORMS(name, T) \
  KERNEL(normalize_##name)(const T* x, const T* weight, const T* bias, T* y, u64 rows, u64 width, double eps, \
                           u32 centered) { \
    const bool packs = width % 4 == 0 && are_packs(x, y, weight); \
    if (packs && width < LONG) normalize<WARP, 4>(x, weight, bias, y, rows, width, eps, centered); \
    else if (packs) normalize<THREADS, 4>(x, weight, bias, y, rows, width, eps, centered); \
    else normalize<WARP, 1>(x, weight, bias, y, rows, width, eps, centered); \
  } \
  KERNEL(normalize_back_##name)(const T* x, const T* dy, const T* weight, T* dx, Float<T>::Real* kept, u64 rows, \
                                u64 width, double eps, u32 centered) { \
    const bool packs = width % 4 == 0 && are_packs(x, dy, weight, dx); \
    if (packs && width < LONG) normalize_back<WARP, 4>(x, dy, weight, dx, kept, rows, width, eps, centered); \
    else if (packs) normalize_back<THREADS, 4>(x, dy, weight, dx, kept, rows, width, eps, centered); \
    else normalize_back<WARP, 1>(x, dy, weight, dx, kept, rows, width, eps, centered); \
  } \
  KERNEL(weight_sums_##name)(const T* x, const T* dy, const Float<T>::Real* kept, Float<T>::Real* parts, u64 rows, \
                             u64 width, u64 stretch) { \
    if (width % 4 == 0 && are_packs(x, dy)) weight_sums<4>(x, dy, kept, parts, rows, width, stretch); \
    else weight_sums<1>(x, dy, kept, parts, rows, width, stretch); \
  } \
  KERNEL(weight_totals_##name)(const Float<T>::Real* parts, T* grad, u64 stretches, u64 width, u32 first, \
                               u32 accumulates) { \
    weight_totals(parts, grad, stretches, width, first, accumulates); \
  }
FLOATS(NORMS)
