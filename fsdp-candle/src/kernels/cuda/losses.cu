// Cross-entropy: `nn/loss/mod.rs` has the formulas. A row of logits has a block of threads. Sums over a vocabulary that
// ranks share are reduced between the kernels.
#include "prelude.cuh"
#include "packs.cuh"
#include "sums.cuh"

// The target of a row that is ignored.
const u32 NONE = 0xffffffff;

template <class R> static __device__ R infinity();
template <> __device__ float infinity() { return __uint_as_float(0x7f800000); }
template <> __device__ double infinity() { return __longlong_as_double(0x7ff0000000000000); }

// Returns a logit after the softcap, if there is one.
template <class R>
static __device__ R capped(R logit, R softcap) {
  return softcap == 0 ? logit : softcap * tanh(logit / softcap);
}

// Computes a row's largest logit, and its `terms`: the sum of e^(logit - largest), the target's logit, and if there are
// three the sum of the logits. All are 0 for ignored rows. One pass: the sum follows the largest logit so far.
template <int N, class T>
static __device__ void row_statistics(const T* logits, const u32* targets, REAL* largest, REAL* numbers, u64 rows,
                                      u64 columns, u64 first_class, u32 terms, REAL softcap) {
  typedef Float<T> F;
  const REAL lowest = -infinity<REAL>();
  for (u64 row = blockIdx.x; row < rows; row += gridDim.x) {
    const u32 target = targets[row];
    const T* own = logits + row * columns;
    REAL most = lowest, powers = 0, sum = 0;
    if (target != NONE) {
      for (u64 at = (u64)threadIdx.x * N; at < columns; at += (u64)THREADS * N) {
        const Pack<T, N> pack = load<N>(own + at);
        REAL higher = most, values[N];
        for (int i = 0; i < N; i++) {
          values[i] = capped((REAL)F::get(pack.at[i]), softcap);
          higher = values[i] > higher ? values[i] : higher;
        }
        if (higher > most) {
          powers *= exp(most - higher);
          most = higher;
        }
        for (int i = 0; i < N; i++) {
          const REAL value = values[i];
          // All logits of a rank's part may be masked. NaN is added.
          if (!(value == lowest)) powers += exp(value - most);
          sum += value;
        }
      }
    }
    const REAL highest = join_threads<THREADS>(most, [](REAL a, REAL b) { return b > a ? b : a; });
    powers = sum_of_threads<THREADS>(powers == 0 ? 0 : powers * exp(most - highest));
    if (terms > 2) sum = sum_of_threads<THREADS>(sum);
    if (threadIdx.x > 0) continue;
    const u64 column = (u64)target - first_class;
    const bool counts = target != NONE, is_here = counts && column < columns;
    largest[row] = counts ? highest : 0;
    numbers[row * terms] = powers;
    numbers[row * terms + 1] = is_here ? capped((REAL)F::get(own[column]), softcap) : 0;
    if (terms > 2) numbers[row * terms + 2] = sum;
  }
}

// Scales the sums of powers of a part of the vocabulary to the largest logit of the whole.
template <class R>
static __device__ void rescale_powers(const R* own, const R* largest, R* numbers, u64 rows, u32 terms) {
  EACH(row, rows) {
    R& powers = numbers[row * terms];
    powers = powers == 0 ? 0 : powers * exp(own[row] - largest[row]);
  }
}

// Computes the losses of rows, or in one block their sum, and the logarithm of each row's sum of powers.
template <class R>
static __device__ void losses(const R* largest, const R* numbers, const u32* targets, R* losses, R* log_sums, u64 rows,
                              u32 terms, R classes, double smoothing, double divisor, u32 combined) {
  double sum = 0;
  EACH(row, rows) {
    const bool counts = targets[row] != NONE;
    const R log_sum = counts ? largest[row] + log(numbers[row * terms]) : 0;
    const double hit = counts ? log_sum - numbers[row * terms + 1] : 0;
    const double spread = counts && terms > 2 ? log_sum - numbers[row * terms + 2] / classes : 0;
    const double loss = terms > 2 ? (1 - smoothing) * hit + smoothing * spread : hit;
    log_sums[row] = log_sum;
    if (combined) sum += loss;
    else losses[row] = (R)loss;
  }
  if (!combined) return;
  sum = sum_of_threads<THREADS>(sum);
  if (threadIdx.x == 0) losses[0] = (R)(sum / divisor);
}

// Computes the gradient of logits: `scale * softmax - uniform`, less `hit` at the target, times the softcap's slope.
template <int N, class L, class T>
static __device__ void logits_back(const L* logits, T* grads, const u32* targets, const REAL* log_sums,
                                   const REAL* d_loss, u64 rows, u64 columns, u64 first_class, REAL classes,
                                   REAL smoothing, REAL divisor, u32 combined, REAL softcap) {
  for (u64 row = blockIdx.x; row < rows; row += gridDim.x) {
    const u32 target = targets[row];
    const u64 column = (u64)target - first_class;
    const REAL log_sum = log_sums[row], scale = d_loss[combined ? 0 : row] / divisor;
    const REAL uniform = scale * smoothing / classes, hit = scale * (1 - smoothing);
    for (u64 at = (u64)threadIdx.x * N; at < columns; at += (u64)THREADS * N) {
      Pack<T, N> grad = {};
      if (target != NONE) {
        const Pack<L, N> pack = load<N>(logits + row * columns + at);
        for (int i = 0; i < N; i++) {
          const REAL value = capped((REAL)Float<L>::get(pack.at[i]), softcap);
          const REAL ratio = softcap == 0 ? 0 : value / softcap, slope = 1 - ratio * ratio;
          const REAL share = exp(value - log_sum) * scale - uniform;
          grad.at[i] = Float<T>::put((at + i == column ? share - hit : share) * slope);
        }
      }
      store(grads + row * columns + at, grad);
    }
  }
}

#define STATISTICS(name, T) \
  KERNEL(row_statistics_##name)(const T* logits, const u32* targets, Float<T>::Real* largest, \
                                Float<T>::Real* numbers, u64 rows, u64 columns, u64 first_class, u32 terms, \
                                double softcap) { \
    const Float<T>::Real cap = (Float<T>::Real)softcap; \
    if (columns % 4 == 0 && are_packs(logits, logits)) \
      row_statistics<4>(logits, targets, largest, numbers, rows, columns, first_class, terms, cap); \
    else row_statistics<1>(logits, targets, largest, numbers, rows, columns, first_class, terms, cap); \
  }
FLOATS(STATISTICS)

#define LOSSES(name, R) \
  KERNEL(rescale_powers_##name)(const R* own, const R* largest, R* numbers, u64 rows, u32 terms) { \
    rescale_powers(own, largest, numbers, rows, terms); \
  } \
  KERNEL(losses_##name)(const R* largest, const R* numbers, const u32* targets, R* to, R* log_sums, u64 rows, \
                        u32 terms, double classes, double smoothing, double divisor, u32 combined) { \
    losses(largest, numbers, targets, to, log_sums, rows, terms, (R)classes, smoothing, divisor, combined); \
  }
LOSSES(f32, float)
LOSSES(f64, double)

#define LOGITS_BACK(logits_name, L, name, T) \
  KERNEL(logits_back_##logits_name##_##name)(const L* logits, T* grads, const u32* targets, \
                                             const Float<T>::Real* log_sums, const Float<T>::Real* d_loss, u64 rows, \
                                             u64 columns, u64 first_class, double classes, double smoothing, \
                                             double divisor, u32 combined, double softcap) { \
    typedef Float<T>::Real R; \
    if (columns % 4 == 0 && are_packs(logits, logits) && are_packs(grads, grads)) \
      logits_back<4>(logits, grads, targets, log_sums, d_loss, rows, columns, first_class, (R)classes, (R)smoothing, \
                     (R)divisor, combined, (R)softcap); \
    else \
      logits_back<1>(logits, grads, targets, log_sums, d_loss, rows, columns, first_class, (R)classes, (R)smoothing, \
                     (R)divisor, combined, (R)softcap); \
  }
#define LOGITS_BACK_TO_OWN(name, T) LOGITS_BACK(name, T, name, T)
FLOATS(LOGITS_BACK_TO_OWN)
LOGITS_BACK(f32, float, bf16, bf16)
LOGITS_BACK(f32, float, f16, f16)
