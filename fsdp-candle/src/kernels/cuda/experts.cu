// Mixtures of experts: the choice of experts, and rows that move between tokens and experts. A route is one token's way
// to one of its experts; routes are numbered token by token. A token has `per_token` routes.
#include "prelude.cuh"
#include "packs.cuh"
#include "sums.cuh"
#include "logistic.cuh"

// The bits of a float in the order of Rust's `total_cmp`.
static __device__ u32 ordered(float x) {
  const u32 bits = bits_of(x);
  return bits >> 31 ? ~bits : bits | 1u << 31;
}

// Finds the columns of the `count` largest values of each row, the largest first. Of equal values the first is the
// largest. A row has a warp.
KERNEL(largest_of_rows)(const float* values, u32* found, u64 rows, u64 width, u32 count) {
  EACH_ROW(row, rows, WARP) {
    u64 last = 0;
    for (u32 i = 0; i < count; i++) {
      u64 best = 0;
      for (u64 at = threadIdx.x % WARP; at < width; at += WARP) {
        const u64 key = (u64)ordered(values[row * width + at]) << 32 | ~(u32)at;
        if ((i == 0 || key < last) && key > best) best = key;
      }
      last = join_threads<WARP>(best, [](u64 a, u64 b) { return a > b ? a : b; });
      if (threadIdx.x % WARP == 0) found[row * count + i] = ~(u32)last;
    }
  }
}

// Sorts routes by expert, those of one expert by number. `order` has the sorted routes, `places` each route's place among
// them, and `counts` the routes of each expert. A block has an expert. Numbers that are no expert's have no place.
template <class I>
static __device__ void sort_routes(const I* chosen, u32* counts, u32* order, u32* places, u64 routes) {
  __shared__ u32 of_warps[THREADS / WARP];
  const u32 warp = threadIdx.x / WARP, earlier = (1u << threadIdx.x % WARP) - 1;
  const u64 expert = blockIdx.x;
  u32 smaller = 0;
  for (u64 route = threadIdx.x; route < routes; route += THREADS) smaller += (u64)chosen[route] < expert;
  const u32 begin = sum_of_threads<THREADS>(smaller);
  u32 end = begin;
  for (u64 first = 0; first < routes; first += THREADS) {
    const u64 route = first + threadIdx.x;
    const bool is_own = route < routes && (u64)chosen[route] == expert;
    const u32 own = __ballot_sync(0xffffffff, is_own);
    if (threadIdx.x % WARP == 0) of_warps[warp] = __popc(own);
    __syncthreads();
    u32 place = end + __popc(own & earlier);
    for (u32 i = 0; i < THREADS / WARP; i++) {
      if (i < warp) place += of_warps[i];
      end += of_warps[i];
    }
    if (is_own) {
      order[place] = (u32)route;
      places[route] = place;
    }
    __syncthreads();  // all warps have read the counts
  }
  if (threadIdx.x == 0) counts[expert] = end - begin;
}
#define SORT_ROUTES(name, I) \
  KERNEL(sort_routes_##name)(const I* chosen, u32* counts, u32* order, u32* places, u64 routes) { \
    sort_routes(chosen, counts, order, places, routes); \
  }
SORT_ROUTES(u8, u8) SORT_ROUTES(u32, u32) SORT_ROUTES(i64, long long)

// Copies the row of each sorted route's token.
template <int N, class T>
static __device__ void gather_rows(const T* from, const u32* order, T* to, u64 routes, u64 width, u32 per_token) {
  const u32 threads = WARP;
  EACH_ROW(row, routes, threads) {
    const T* own = from + order[row] / per_token * width;
    EACH_PACK_OF_ROW(at, width) store(to + row * width + at, load<N>(own + at));
  }
}

// Adds up the rows of each token's routes, in the order of the routes, each times its weight if there are weights.
template <int N, class T>
static __device__ void combine_rows(const T* from, const u32* places, const REAL* weights, T* to, u64 tokens, u64 width,
                                    u32 per_token) {
  typedef Float<T> F;
  const u32 threads = WARP;
  EACH_ROW(token, tokens, threads) {
    EACH_PACK_OF_ROW(at, width) {
      REAL sums[N] = {};
      for (u64 route = token * per_token; route < (token + 1) * per_token; route++) {
        const Pack<T, N> values = load<N>(from + places[route] * width + at);
        const REAL weight = weights ? weights[route] : 1;
        for (int i = 0; i < N; i++) sums[i] += weight * F::get(values.at[i]);
      }
      Pack<T, N> all;
      for (int i = 0; i < N; i++) all.at[i] = F::put(sums[i]);
      store(to + token * width + at, all);
    }
  }
}

// The backward of sorted routes' SwiGLU, given the gradient `d_hidden` of its output for a weight of 1. Returns the
// gradients of gates, ups and weights, and the output times its weight, which the gradient of `down` is a product of.
template <u32 threads, int N, class T>
static __device__ void weighted_swiglu_back(const T* gates, const T* ups, const T* d_hidden, const u32* order,
                                            const REAL* weights, T* d_gates, T* d_ups, T* hidden, REAL* d_weights,
                                            u64 routes, u64 width) {
  typedef Float<T> F;
  EACH_ROW(row, routes, threads) {
    const u32 route = order[row];
    const REAL weight = weights[route];
    REAL d_weight = 0;
    EACH_PACK_OF_ROW(at, width) {
      const u64 from = row * width + at;
      Pack<T, N> of_gate = load<N>(gates + from), of_up = load<N>(ups + from), out = load<N>(d_hidden + from);
      for (int i = 0; i < N; i++) {
        const REAL gate = F::get(of_gate.at[i]), up = F::get(of_up.at[i]), grad = F::get(out.at[i]);
        const REAL s = logistic(gate), silu = gate * s;
        d_weight += grad * (silu * up);
        of_gate.at[i] = F::put(weight * grad * up * s * (1 + gate * (1 - s)));
        of_up.at[i] = F::put(weight * grad * silu);
        out.at[i] = F::put(weight * (silu * up));
      }
      store(d_gates + from, of_gate);
      store(d_ups + from, of_up);
      store(hidden + from, out);
    }
    d_weight = sum_of_threads<threads>(d_weight);
    if (threadIdx.x % threads == 0) d_weights[route] = d_weight;
  }
}

// Elements of a row from which a block shares it.
const u64 LONG = 1024;

#define EXPERTS(name, T) \
  KERNEL(gather_rows_##name)(const T* from, const u32* order, T* to, u64 routes, u64 width, u32 per_token) { \
    if (width % PACK == 0 && are_packs<PACK>(from, to)) gather_rows<PACK>(from, order, to, routes, width, per_token); \
    else gather_rows<1>(from, order, to, routes, width, per_token); \
  } \
  KERNEL(combine_rows_##name)(const T* from, const u32* places, const Float<T>::Real* weights, T* to, u64 tokens, \
                              u64 width, u32 per_token) { \
    if (width % 4 == 0 && are_packs(from, to)) combine_rows<4>(from, places, weights, to, tokens, width, per_token); \
    else combine_rows<1>(from, places, weights, to, tokens, width, per_token); \
  } \
  KERNEL(weighted_swiglu_back_##name)(const T* gates, const T* ups, const T* d_hidden, const u32* order, \
                                      const Float<T>::Real* weights, T* d_gates, T* d_ups, T* hidden, \
                                      Float<T>::Real* d_weights, u64 routes, u64 width) { \
    const bool packs = width % 4 == 0 && are_packs(gates, ups, d_hidden, d_gates, d_ups, hidden); \
    if (packs && width >= LONG) \
      weighted_swiglu_back<THREADS, 4>(gates, ups, d_hidden, order, weights, d_gates, d_ups, hidden, d_weights, routes, \
                                       width); \
    else if (packs) \
      weighted_swiglu_back<WARP, 4>(gates, ups, d_hidden, order, weights, d_gates, d_ups, hidden, d_weights, routes, \
                                    width); \
    else \
      weighted_swiglu_back<WARP, 1>(gates, ups, d_hidden, order, weights, d_gates, d_ups, hidden, d_weights, routes, \
                                    width); \
  }
FLOATS(EXPERTS)
