// The softmax of attention, forward and backward, for a block of queries of one row of the batch.
//
// A block of threads computes one query of one head. The order of a sum depends only on the number of keys in the block.
#include "prelude.cuh"
#include "philox.cuh"
#include "visible_keys.cuh"

// The queries and keys of a block of scores [heads, rows, block_keys].
struct Scores {
  Visibility all;
  // The block's first query and its number of queries.
  u64 first_query, rows;
  // The range of keys that any of its queries sees.
  u64 first_key, block_keys;
  double scale;
  // 0 without a cap.
  double softcap;

  // The keys that a query sees, counted from the block's first key.
  __device__ Keys visible(u64 query) const {
    const Keys keys = all.of(query);
    const Keys in_block = {keys.begin - first_key, keys.end - first_key};
    return in_block;
  }
};

// Returns the scaled and capped score of a product of a query and a key. `slope` becomes its derivative.
template <class R> static __device__ R score(R product, const Scores& of, R& slope) {
  slope = (R)of.scale;
  if (of.softcap == 0) return product * (R)of.scale;
  const R cap = (R)of.softcap, t = tanh(product * ((R)of.scale / cap));
  slope = (R)of.scale * (1 - t * t);
  return cap * t;
}

// Dropout of probabilities [heads, queries, keys], of all rows of the batch. Without dropout, the threshold is 0.
struct Dropout {
  Draw draw;
  // Row of the batch.
  u64 row;
  float scale;

  // Returns a probability, or its gradient, after dropout.
  template <class R> __device__ R applied(u64 head, u64 query, u64 key, R value) {
    if (draw.threshold == 0) return value;
    return draw.drops(row, head, query, key) ? (R)0 : value * (R)scale;
  }
};

// Part of a softmax: the largest score, and the sum of powers of e relative to it.
template <class R> struct Powers { R highest, sum; };

template <class R> static __device__ Powers<R> together(Powers<R> a, Powers<R> b) {
  const R highest = a.highest > b.highest ? a.highest : b.highest;
  // Without a score, the sum is 0. The difference of two infinities would be NaN.
  const R of_a = a.highest == highest ? a.sum : a.sum * exp(a.highest - highest);
  const R of_b = b.highest == highest ? b.sum : b.sum * exp(b.highest - highest);
  const Powers<R> both = {highest, of_a + of_b};
  return both;
}

const u32 WARP = 32;
const u32 ALL_LANES = 0xffffffff;

// Combines the parts of a block's threads. Every thread calls it, once, and gets the result.
template <class R> static __device__ Powers<R> of_block(Powers<R> own) {
  __shared__ R highest[THREADS / 32];
  __shared__ R sums[THREADS / 32];
  for (u32 apart = WARP / 2; apart > 0; apart /= 2) {
    const Powers<R> other = {__shfl_xor_sync(ALL_LANES, own.highest, apart),
                             __shfl_xor_sync(ALL_LANES, own.sum, apart)};
    own = together(own, other);
  }
  if (threadIdx.x % WARP == 0) {
    highest[threadIdx.x / WARP] = own.highest;
    sums[threadIdx.x / WARP] = own.sum;
  }
  __syncthreads();
  Powers<R> all = {highest[0], sums[0]};
  for (u32 warp = 1; warp < blockDim.x / WARP; warp++) {
    const Powers<R> other = {highest[warp], sums[warp]};
    all = together(all, other);
  }
  return all;
}

// Sums a value of each of a block's threads. Every thread calls it, once, and gets the result.
template <class R> static __device__ R sum_of_block(R own) {
  __shared__ R sums[THREADS / 32];
  for (u32 apart = WARP / 2; apart > 0; apart /= 2) own += __shfl_xor_sync(ALL_LANES, own, apart);
  if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = own;
  __syncthreads();
  R all = sums[0];
  for (u32 warp = 1; warp < blockDim.x / WARP; warp++) all += sums[warp];
  return all;
}

// Writes the probabilities [heads, rows, block_keys] of products of queries and keys, and the logarithms of the sums
// [heads, queries]. A hidden key's probability is 0.
template <class T, class R>
static __device__ void softmax_scores(const R* products, T* probabilities, R* log_sums, Scores of, Dropout dropout) {
  const u64 head = blockIdx.x / of.rows, query = of.first_query + blockIdx.x % of.rows;
  const Keys visible = of.visible(query);
  products += blockIdx.x * of.block_keys;
  probabilities += blockIdx.x * of.block_keys;
  R slope;
  Powers<R> own = {(R)-f32_of(0x7f800000), 0};
  for (u64 key = visible.begin + threadIdx.x; key < visible.end; key += blockDim.x) {
    const Powers<R> one = {score(products[key], of, slope), 1};
    own = together(own, one);
  }
  const Powers<R> all = of_block(own);
  const R log_sum = all.highest + log(all.sum);
  if (threadIdx.x == 0) log_sums[head * of.all.queries + query] = log_sum;
  for (u64 key = threadIdx.x; key < of.block_keys; key += blockDim.x) {
    const bool is_visible = key >= visible.begin && key < visible.end;
    const R p = is_visible ? exp(score(products[key], of, slope) - log_sum) : (R)0;
    probabilities[key] = Float<T>::put(dropout.applied(head, query, of.first_key + key, p));
  }
}

// Writes the probabilities again, and the gradients of the products of queries and keys, both [heads, rows,
// block_keys]. `gradients` are the probabilities' gradients before dropout. `out` and `d_out` are the attention's
// output [queries, heads, dim] and its gradient.
template <class T, class R>
static __device__ void softmax_scores_back(const R* products, const R* gradients, const T* out, const T* d_out,
                                           const R* log_sums, T* probabilities, T* d_products, u64 heads, u64 dim,
                                           Scores of, Dropout dropout) {
  const u64 head = blockIdx.x / of.rows, query = of.first_query + blockIdx.x % of.rows;
  const Keys visible = of.visible(query);
  const u64 at = blockIdx.x * of.block_keys, at_out = (query * heads + head) * dim;
  R delta = 0;
  for (u64 i = threadIdx.x; i < dim; i += blockDim.x)
    delta += (R)Float<T>::get(out[at_out + i]) * (R)Float<T>::get(d_out[at_out + i]);
  delta = sum_of_block(delta);
  const R log_sum = log_sums[head * of.all.queries + query];
  for (u64 key = threadIdx.x; key < of.block_keys; key += blockDim.x) {
    R p = 0, d_product = 0;
    if (key >= visible.begin && key < visible.end) {
      R slope;
      const R whole = exp(score(products[at + key], of, slope) - log_sum);
      d_product = whole * (dropout.applied(head, query, of.first_key + key, gradients[at + key]) - delta) * slope;
      p = dropout.applied(head, query, of.first_key + key, whole);
    }
    probabilities[at + key] = Float<T>::put(p);
    d_products[at + key] = Float<T>::put(d_product);
  }
}

#define SCORES_PARAMETERS \
  VISIBILITY_PARAMETERS, u64 first_query, u64 rows, u64 first_key, u64 block_keys, double scale, double softcap, \
      DRAW_PARAMETERS, u64 row, float drop_scale
// The structures of these parameters.
#define SCORES \
  VISIBILITY; \
  const Scores of = {all, first_query, rows, first_key, block_keys, scale, softcap}; \
  const Dropout dropout = {Draw(DRAW_ARGUMENTS), row, drop_scale}

#define ATTENTION(name, T) \
  KERNEL(softmax_scores_##name)(const Float<T>::Real* products, T* probabilities, Float<T>::Real* log_sums, \
                                SCORES_PARAMETERS) { \
    SCORES; \
    softmax_scores(products, probabilities, log_sums, of, dropout); \
  } \
  KERNEL(softmax_scores_back_##name)(const Float<T>::Real* products, const Float<T>::Real* gradients, const T* out, \
                                     const T* d_out, const Float<T>::Real* log_sums, T* probabilities, \
                                     T* d_products, u64 heads, u64 dim, SCORES_PARAMETERS) { \
    SCORES; \
    softmax_scores_back(products, gradients, out, d_out, log_sums, probabilities, d_products, heads, dim, of, dropout); \
  }
FLOATS(ATTENTION)
