// Attention on tensor cores, whose scores stay in registers: FlashAttention-2 (Dao, 2023, arXiv:2307.08691).
//
// Backward has a kernel for the gradients of queries, and one for those of keys and values. Both compute the
// probabilities again. So each gradient is one block's sum in a fixed order, and runs have the same bits. `fused.rs` has
// the formulas.
//
// A block has four warps, each with 16 rows: queries, or keys in the second kernel of backward. Powers of e are
// powers of 2, which devices compute faster.

const u32 WARPS = 4, ROWS = 16 * WARPS;
// Keys of a tile in forward, and queries of a tile in the second kernel of backward.
const u32 KEYS = 64, QUERIES = 32;
const float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

// The heads of an operand: the strides of a row of the batch and of a position. Heads follow each other.
struct Strides { u64 batch, row; };

struct Sizes {
  Visibility all;
  u64 heads, group;  // query heads, and how many of them share a key head
  float scale;
  float softcap;     // 0 without a cap
};

// Returns log2(e) times the scaled and capped score of a product. `slope` becomes the score's derivative.
static __device__ float score(float product, const Sizes& of, float& slope) {
  slope = of.scale;
  if (of.softcap == 0) return product * (of.scale * LOG2_E);
  const float t = tanhf(product * (of.scale / of.softcap));
  slope = of.scale * (1 - t * t);
  return of.softcap * LOG2_E * t;
}

static __device__ u32 lane() { return threadIdx.x % 32; }
static __device__ u32 warp() { return threadIdx.x / 32; }
// The lane's place in tiles: see `tensor_cores.cuh`.
static __device__ u32 group_of_lane() { return lane() / 4; }
static __device__ u32 pair_of_lane() { return lane() % 4 * 2; }

// Starts to copy the rows of a head from `first` on to shared memory, with zeros from `end` on. Rows in shared memory
// are 16 bytes longer, so that the rows of a tile are in different banks.
template <u32 D, u32 rows>
static __device__ void start_rows(u16 (*to)[D + 8], const u16* from, u64 stride, u64 first, u64 end) {
  for (u32 i = threadIdx.x; i < rows * (D / 8); i += WARPS * 32) {
    const u32 row = i / (D / 8), column = i % (D / 8) * 8;
    const bool is_there = first + row < end;
    start_copy(&to[row][column], from + (is_there ? (first + row) * stride : 0) + column, is_there);
  }
}

// Reads this warp's 16 rows of a head as the first operands of products. Rows from `end` on are zeros.
template <u32 D>
static __device__ void read_rows(u32 (&to)[D / 16][4], const u16* from, u64 stride, u64 first, u64 end) {
  for (u32 r = 0; r < 2; r++) {
    const u64 row = first + group_of_lane() + 8 * r;
#pragma unroll
    for (u32 i = 0; i < D / 8; i++)
      to[i / 2][r + i % 2 * 2] = row < end ? *(const u32*)(from + row * stride + 8 * i + pair_of_lane()) : 0;
  }
}

// sums [16, n] = or += rows [16, D] times the transposed `others` [n, D].
template <class T, u32 D, u32 n>
static __device__ void add_products(float (&sums)[n / 8][4], const u32 (&rows)[D / 16][4], u16 (*others)[D + 8]) {
#pragma unroll
  for (u32 k = 0; k < D / 16; k++) {
#pragma unroll
    for (u32 i = 0; i < n / 16; i++) {
      u32 b[4];
      load_tiles(b, &others[16 * i + lane() / 16 * 8 + lane() % 8][16 * k + lane() / 8 % 2 * 8]);
      add_product(T(), sums[2 * i], rows[k], b[0], b[1]);
      add_product(T(), sums[2 * i + 1], rows[k], b[2], b[3]);
    }
  }
}

// sums [16, D] += weights [16, n] times `others` [n, D].
template <class T, u32 D, u32 n>
static __device__ void add_weighted(float (&sums)[D / 8][4], const u32 (&weights)[n / 16][4], u16 (*others)[D + 8]) {
#pragma unroll
  for (u32 k = 0; k < n / 16; k++) {
#pragma unroll
    for (u32 i = 0; i < D / 16; i++) {
      u32 b[4];
      load_transposed(b, &others[16 * k + lane() % 16][16 * i + lane() / 16 * 8]);
      add_product(T(), sums[2 * i], weights[k], b[0], b[1]);
      add_product(T(), sums[2 * i + 1], weights[k], b[2], b[3]);
    }
  }
}

// Rounds sums [16, n] to the first operands of products.
template <class T, u32 n> static __device__ void round_all(u32 (&to)[n / 16][4], const float (&sums)[n / 8][4]) {
#pragma unroll
  for (u32 k = 0; k < n / 16; k++) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
      const float(&tile)[4] = sums[2 * k + i / 2];
      to[k][i] = rounded(T(), tile[i % 2 * 2], tile[i % 2 * 2 + 1]);
    }
  }
}

// Writes this warp's 16 rows, times a factor for each of the lane's two rows, without the rows from `end` on.
template <class T, u32 D>
static __device__ void write_rows(u16* to, u64 stride, u64 first, u64 end, const float (&sums)[D / 8][4],
                                  float factor, float other_factor) {
  for (u32 r = 0; r < 2; r++) {
    const u64 row = first + group_of_lane() + 8 * r;
    const float times = r ? other_factor : factor;
    if (row >= end) continue;
#pragma unroll
    for (u32 i = 0; i < D / 8; i++)
      *(u32*)(to + row * stride + 8 * i + pair_of_lane()) =
          rounded(T(), sums[i][2 * r] * times, sums[i][2 * r + 1] * times);
  }
}

// The elements of a word.
template <class T> static __device__ float low_half(T, u32 word) {
  T element = {(u16)word};
  return Float<T>::get(element);
}
template <class T> static __device__ float high_half(T, u32 word) {
  T element = {(u16)(word >> 16)};
  return Float<T>::get(element);
}

// Sums over the four lanes that share a row.
static __device__ float sum_of_row(float mine) {
  mine += __shfl_xor_sync(0xffffffff, mine, 1);
  return mine + __shfl_xor_sync(0xffffffff, mine, 2);
}

// The queries of a block and the keys that they see.
struct Block {
  // First query of the block, and of this warp.
  u64 first, own;
  // Keys that any of the queries sees, and that all of them see.
  Keys any, all;
  // Keys that the queries of this lane's rows see, counted from the first key that any sees. A row that does not exist
  // sees none.
  u32 begins[2], ends[2];

  __device__ Block(const Visibility& of) {
    // The last queries see the most keys: their blocks begin first.
    first = (u64)(gridDim.x - 1 - blockIdx.x) * ROWS;
    own = first + 16 * warp();
    const Keys of_first = of.of(first), of_last = of.of(first + ROWS < of.queries ? first + ROWS - 1 : of.queries - 1);
    any.begin = of_first.begin;
    any.end = of_last.end;
    all.begin = of_last.begin;
    all.end = of_first.end;
    for (u32 r = 0; r < 2; r++) {
      const u64 query = own + group_of_lane() + 8 * r;
      const Keys visible = of.of(query < of.queries ? query : of.queries - 1);
      begins[r] = (u32)(visible.begin - any.begin);
      ends[r] = query < of.queries ? (u32)(visible.end - any.begin) : 0;
    }
  }

  // Whether all queries see a tile of keys.
  template <u32 keys> __device__ bool sees_all(u64 key) const { return key >= all.begin && key + keys <= all.end; }
};

template <class T, u32 D>
static __device__ void forward(const u16* q, const u16* k, const u16* v, u16* out, float* log_sums, Strides q_strides,
                               Strides k_strides, Strides v_strides, Sizes of) {
  __shared__ __align__(16) u16 keys[KEYS][D + 8];
  __shared__ __align__(16) u16 values[KEYS][D + 8];
  const Visibility& all = of.all;
  const Block block(all);
  const u64 head = blockIdx.y, batch = blockIdx.z;
  q += batch * q_strides.batch + head * D;
  k += batch * k_strides.batch + head / of.group * D;
  v += batch * v_strides.batch + head / of.group * D;
  out += (batch * all.queries * of.heads + head) * D;
  log_sums += (batch * of.heads + head) * all.queries;

  u32 queries[D / 16][4];
  read_rows<D>(queries, q, q_strides.row, block.own, all.queries);
  float sums[D / 8][4] = {}, highest[2], total[2] = {};
  highest[0] = highest[1] = -f32_of(0x7f800000);
  start_rows<D, KEYS>(keys, k, k_strides.row, block.any.begin, all.keys);
  end_group();
  start_rows<D, KEYS>(values, v, v_strides.row, block.any.begin, all.keys);
  end_group();
  for (u64 key = block.any.begin; key < block.any.end; key += KEYS) {
    wait_for_copies<1>();
    __syncthreads();
    float scores[KEYS / 8][4] = {};
    add_products<T, D, KEYS>(scores, queries, keys);
    __syncthreads();  // all warps have read the keys
    if (key + KEYS < block.any.end) start_rows<D, KEYS>(keys, k, k_strides.row, key + KEYS, all.keys);
    end_group();

    const bool sees_all = block.sees_all<KEYS>(key);
    float most[2] = {highest[0], highest[1]};
#pragma unroll
    for (u32 i = 0; i < KEYS / 8; i++) {
#pragma unroll
      for (u32 c = 0; c < 4; c++) {
        const u32 at = (u32)(key - block.any.begin) + 8 * i + pair_of_lane() + c % 2;
        float slope;
        const bool sees = sees_all || (at >= block.begins[c / 2] && at < block.ends[c / 2]);
        scores[i][c] = sees ? score(scores[i][c], of, slope) : -f32_of(0x7f800000);
        most[c / 2] = fmaxf(most[c / 2], scores[i][c]);
      }
    }
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
      most[r] = fmaxf(most[r], __shfl_xor_sync(0xffffffff, most[r], 1));
      most[r] = fmaxf(most[r], __shfl_xor_sync(0xffffffff, most[r], 2));
      // Without a score so far, the difference of two infinities would be NaN.
      const float base = most[r] == -f32_of(0x7f800000) ? 0 : most[r];
      const float factor = power_of_two(highest[r] - base);
      float sum = 0;
#pragma unroll
      for (u32 i = 0; i < KEYS / 8; i++) {
#pragma unroll
        for (u32 c = 2 * r; c < 2 * r + 2; c++) sum += scores[i][c] = power_of_two(scores[i][c] - base);
      }
      total[r] = total[r] * factor + sum;
      highest[r] = most[r];
#pragma unroll
      for (u32 i = 0; i < D / 8; i++) {
        sums[i][2 * r] *= factor;
        sums[i][2 * r + 1] *= factor;
      }
    }
    u32 weights[KEYS / 16][4];
    round_all<T, KEYS>(weights, scores);
    wait_for_copies<1>();
    __syncthreads();
    add_weighted<T, D, KEYS>(sums, weights, values);
    __syncthreads();  // all warps have read the values
    if (key + KEYS < block.any.end) start_rows<D, KEYS>(values, v, v_strides.row, key + KEYS, all.keys);
    end_group();
  }
  for (u32 r = 0; r < 2; r++) {
    total[r] = sum_of_row(total[r]);
    const u64 query = block.own + group_of_lane() + 8 * r;
    if (query < all.queries && lane() % 4 == 0) log_sums[query] = highest[r] * LN_2 + logf(total[r]);
  }
  write_rows<T, D>(out, of.heads * D, block.own, all.queries, sums, 1 / total[0], 1 / total[1]);
}

// Writes the gradients of the queries, and for the other kernel the products of each query's output and its gradient.
template <class T, u32 D>
static __device__ void backward_queries(const u16* q, const u16* k, const u16* v, const u16* out, const u16* d_out,
                                        const float* log_sums, float* deltas, u16* d_q, Strides q_strides,
                                        Strides k_strides, Strides v_strides, Sizes of) {
  // Keys of a tile.
  constexpr u32 TILE = D > 64 ? 64 : 32;
  __shared__ __align__(16) u16 keys[TILE][D + 8];
  __shared__ __align__(16) u16 values[TILE][D + 8];
  const Visibility& all = of.all;
  const Block block(all);
  const u64 head = blockIdx.y, batch = blockIdx.z, of_head = (batch * all.queries * of.heads + head) * D;
  k += batch * k_strides.batch + head / of.group * D;
  v += batch * v_strides.batch + head / of.group * D;
  log_sums += (batch * of.heads + head) * all.queries;
  deltas += (batch * of.heads + head) * all.queries;

  u32 queries[D / 16][4], outputs[D / 16][4];
  float delta[2] = {}, log_sum[2] = {};
  read_rows<D>(queries, out + of_head, of.heads * D, block.own, all.queries);
  read_rows<D>(outputs, d_out + of_head, of.heads * D, block.own, all.queries);
#pragma unroll
  for (u32 i = 0; i < D / 16; i++) {
#pragma unroll
    for (u32 c = 0; c < 4; c++)
      delta[c % 2] += low_half(T(), queries[i][c]) * low_half(T(), outputs[i][c]) +
                      high_half(T(), queries[i][c]) * high_half(T(), outputs[i][c]);
  }
  for (u32 r = 0; r < 2; r++) {
    delta[r] = sum_of_row(delta[r]);
    const u64 query = block.own + group_of_lane() + 8 * r;
    if (query >= all.queries) continue;
    log_sum[r] = log_sums[query] * LOG2_E;
    if (lane() % 4 == 0) deltas[query] = delta[r];
  }
  read_rows<D>(queries, q + batch * q_strides.batch + head * D, q_strides.row, block.own, all.queries);

  float sums[D / 8][4] = {};
  for (u64 key = block.any.begin; key < block.any.end; key += TILE) {
    __syncthreads();  // all warps have read the last tile
    start_rows<D, TILE>(keys, k, k_strides.row, key, all.keys);
    start_rows<D, TILE>(values, v, v_strides.row, key, all.keys);
    end_group();
    wait_for_copies<0>();
    __syncthreads();
    float scores[TILE / 8][4] = {}, gradients[TILE / 8][4] = {};
    add_products<T, D, TILE>(scores, queries, keys);
    add_products<T, D, TILE>(gradients, outputs, values);
    const bool sees_all = block.sees_all<TILE>(key);
#pragma unroll
    for (u32 i = 0; i < TILE / 8; i++) {
#pragma unroll
      for (u32 c = 0; c < 4; c++) {
        const u32 at = (u32)(key - block.any.begin) + 8 * i + pair_of_lane() + c % 2;
        float slope;
        const float p = power_of_two(score(scores[i][c], of, slope) - log_sum[c / 2]);
        const bool sees = sees_all || (at >= block.begins[c / 2] && at < block.ends[c / 2]);
        scores[i][c] = sees ? p * (gradients[i][c] - delta[c / 2]) * slope : 0;
      }
    }
    u32 weights[TILE / 16][4];
    round_all<T, TILE>(weights, scores);
    add_weighted<T, D, TILE>(sums, weights, keys);
  }
  write_rows<T, D>(d_q + batch * q_strides.batch + head * D, q_strides.row, block.own, all.queries, sums, 1, 1);
}

// The first query from `low` on of which the condition holds, which then holds of all later ones, or `queries`.
template <class Condition> static __device__ u64 first_query(u64 low, u64 queries, Condition holds) {
  u64 high = queries;
  while (low < high) {
    const u64 middle = low + (high - low) / 2;
    if (holds(middle)) high = middle;
    else low = middle + 1;
  }
  return low;
}

// Writes the gradients of the keys and the values. If both are in one buffer, those of the values begin `v_after_k`
// elements after `d_k`, and `d_v` is null.
template <class T, u32 D>
static __device__ void backward_keys(const u16* q, const u16* k, const u16* v, const u16* d_out, const float* log_sums,
                                     const float* deltas, u16* d_k, u16* d_v, u64 v_after_k, Strides q_strides,
                                     Strides k_strides, Strides v_strides, Sizes of) {
  __shared__ __align__(16) u16 keys[ROWS][D + 8];
  __shared__ __align__(16) u16 queries[QUERIES][D + 8];
  __shared__ __align__(16) u16 outputs[QUERIES][D + 8];
  __shared__ float log_sum[QUERIES];
  __shared__ float delta[QUERIES];
  // Keys that the queries see, counted from the block's first one.
  __shared__ u32 begins[QUERIES];
  __shared__ u32 ends[QUERIES];
  const Visibility& all = of.all;
  const u64 first = (u64)blockIdx.x * ROWS, own = first + 16 * warp(), kv_head = blockIdx.y, batch = blockIdx.z;
  q += batch * q_strides.batch;
  k += batch * k_strides.batch + kv_head * D;
  v += batch * v_strides.batch + kv_head * D;

  // The warp's values stay in registers.
  u32 values[D / 16][4];
  read_rows<D>(values, v, v_strides.row, own, all.keys);
  start_rows<D, ROWS>(keys, k, k_strides.row, first, all.keys);
  end_group();
  // Later queries see later keys.
  const u64 begin = first_query(0, all.queries, [&](u64 query) { return all.of(query).end > first; });
  const u64 end = first_query(begin, all.queries, [&](u64 query) { return all.of(query).begin >= first + ROWS; });
  float key_sums[D / 8][4] = {}, value_sums[D / 8][4] = {};
  for (u64 member = 0; member < of.group; member++) {
    const u64 head = kv_head * of.group + member, of_sums = (batch * of.heads + head) * all.queries;
    for (u64 query = begin; query < end; query += QUERIES) {
      __syncthreads();  // all warps have read the last tile
      start_rows<D, QUERIES>(queries, q + head * D, q_strides.row, query, all.queries);
      start_rows<D, QUERIES>(outputs, d_out + (batch * all.queries * of.heads + head) * D, of.heads * D, query,
                             all.queries);
      end_group();
      if (threadIdx.x < QUERIES) {
        const u64 mine = query + threadIdx.x;
        const bool is_there = mine < all.queries;
        const Keys none = {0, 0}, visible = is_there ? all.of(mine) : none;
        log_sum[threadIdx.x] = is_there ? log_sums[of_sums + mine] * LOG2_E : 0;
        delta[threadIdx.x] = is_there ? deltas[of_sums + mine] : 0;
        begins[threadIdx.x] = visible.begin > first ? (u32)(visible.begin - first) : 0;
        ends[threadIdx.x] = visible.end > first ? (u32)(visible.end - first) : 0;
      }
      wait_for_copies<0>();
      __syncthreads();
      float scores[QUERIES / 8][4] = {}, gradients[QUERIES / 8][4] = {};
      {
        u32 rows[D / 16][4];
#pragma unroll
        for (u32 i = 0; i < D / 16; i++)
          load_tiles(rows[i], &keys[16 * warp() + lane() % 16][16 * i + lane() / 16 * 8]);
        add_products<T, D, QUERIES>(scores, rows, queries);
      }
      add_products<T, D, QUERIES>(gradients, values, outputs);
#pragma unroll
      for (u32 i = 0; i < QUERIES / 8; i++) {
#pragma unroll
        for (u32 c = 0; c < 4; c++) {
          const u32 column = 8 * i + pair_of_lane() + c % 2;
          const u32 key = 16 * warp() + group_of_lane() + c / 2 * 8;
          float slope;
          const bool sees = key >= begins[column] && key < ends[column];
          const float p = sees ? power_of_two(score(scores[i][c], of, slope) - log_sum[column]) : 0;
          gradients[i][c] = sees ? p * (gradients[i][c] - delta[column]) * slope : 0;
          scores[i][c] = p;
        }
      }
      u32 weights[QUERIES / 16][4];
      round_all<T, QUERIES>(weights, scores);
      add_weighted<T, D, QUERIES>(value_sums, weights, outputs);
      round_all<T, QUERIES>(weights, gradients);
      add_weighted<T, D, QUERIES>(key_sums, weights, queries);
    }
  }
  wait_for_copies<0>();  // of keys that no query sees
  if (!d_v) d_v = d_k + v_after_k;
  d_k += batch * k_strides.batch + kv_head * D;
  d_v += batch * v_strides.batch + kv_head * D;
  write_rows<T, D>(d_k, k_strides.row, own, all.keys, key_sums, 1, 1);
  write_rows<T, D>(d_v, v_strides.row, own, all.keys, value_sums, 1, 1);
}

#define SIZES_PARAMETERS \
  u64 q_batch, u64 q_row, u64 k_batch, u64 k_row, u64 v_batch, u64 v_row, VISIBILITY_PARAMETERS, u64 heads, u64 group, \
      float scale, float softcap
// The structures of these parameters.
#define SIZES \
  const Strides q_strides = {q_batch, q_row}, k_strides = {k_batch, k_row}, v_strides = {v_batch, v_row}; \
  VISIBILITY; \
  const Sizes of = {all, heads, group, scale, softcap}
// At least two blocks share a processor.
#define FLASH_KERNEL(name) extern "C" __global__ void __launch_bounds__(WARPS * 32, 2) name

#define FLASH_ATTENTION(T, D) \
  FLASH_KERNEL(flash_forward_##T##_##D)(const u16* q, const u16* k, const u16* v, u16* out, float* log_sums, \
                                        SIZES_PARAMETERS) { \
    SIZES; \
    forward<T, D>(q, k, v, out, log_sums, q_strides, k_strides, v_strides, of); \
  } \
  FLASH_KERNEL(flash_backward_queries_##T##_##D)(const u16* q, const u16* k, const u16* v, const u16* out, \
                                                 const u16* d_out, const float* log_sums, float* deltas, u16* d_q, \
                                                 SIZES_PARAMETERS) { \
    SIZES; \
    backward_queries<T, D>(q, k, v, out, d_out, log_sums, deltas, d_q, q_strides, k_strides, v_strides, of); \
  } \
  FLASH_KERNEL(flash_backward_keys_##T##_##D)(const u16* q, const u16* k, const u16* v, const u16* d_out, \
                                              const float* log_sums, const float* deltas, u16* d_k, u16* d_v, \
                                              u64 v_after_k, SIZES_PARAMETERS) { \
    SIZES; \
    backward_keys<T, D>(q, k, v, d_out, log_sums, deltas, d_k, d_v, v_after_k, q_strides, k_strides, v_strides, of); \
  }
