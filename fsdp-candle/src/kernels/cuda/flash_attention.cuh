// Attention on tensor cores, whose scores stay in registers: FlashAttention-2 (Dao, 2023, arXiv:2307.08691).
//
// Backward has a kernel for the gradients of queries, and one for those of keys and values. Both compute the
// probabilities again. So each gradient is one block's sum in a fixed order, and runs have the same bits. `fused.rs` has
// the formulas.
//
// A block has four warps. Each has tiles of 16 rows: two of queries in forward, one of queries in the first kernel of
// backward, one of keys in the second. What a warp reads from shared memory serves all of its tiles. While a block
// computes with some rows, copies of the next ones are under way. Powers of e are powers of 2, which devices compute
// faster.

const u32 WARPS = 4;
// Rows of a block with a tile for each warp.
const u32 ROWS = 16 * WARPS;
// Keys of a step in the first kernel of backward, and queries of a step in the second.
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

// The block's shared memory from a row of a head on. The size is in `FlashAttention::shared_bytes`.
struct alignas(16) Words { u16 at[8]; };
template <u32 D> static __device__ u16 (*shared_rows(u32 first))[D + 8] {
  extern __shared__ Words shared[];
  return (u16(*)[D + 8])shared + first;
}

// Starts to copy the rows of a head from `first` on to shared memory, with zeros from `end` on. Rows in shared memory
// are 16 bytes longer, so that the rows of a tile are in different banks.
template <u32 D, u32 rows>
static __device__ void start_rows(u16 (*to)[D + 8], const u16* from, u64 stride, u32 first, u32 end) {
  for (u32 i = threadIdx.x; i < rows * (D / 8); i += WARPS * 32) {
    const u32 row = i / (D / 8), column = i % (D / 8) * 8;
    const bool is_there = first + row < end;
    start_copy(&to[row][column], from + (is_there ? (u64)(first + row) * stride : 0) + column, is_there);
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

// sums [16, n] += rows [16, D] times the transposed `others` [n, D].
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

// The same for several tiles of `rows` [16 tiles, D], which are in shared memory.
template <class T, u32 D, u32 n, u32 tiles>
static __device__ void add_products(float (&sums)[tiles][n / 8][4], u16 (*rows)[D + 8], u16 (*others)[D + 8]) {
#pragma unroll
  for (u32 k = 0; k < D / 16; k++) {
    u32 a[tiles][4];
#pragma unroll
    for (u32 tile = 0; tile < tiles; tile++)
      load_tiles(a[tile], &rows[16 * tile + lane() % 16][16 * k + lane() / 16 * 8]);
#pragma unroll
    for (u32 i = 0; i < n / 16; i++) {
      u32 b[4];
      load_tiles(b, &others[16 * i + lane() / 16 * 8 + lane() % 8][16 * k + lane() / 8 % 2 * 8]);
#pragma unroll
      for (u32 tile = 0; tile < tiles; tile++) {
        add_product(T(), sums[tile][2 * i], a[tile], b[0], b[1]);
        add_product(T(), sums[tile][2 * i + 1], a[tile], b[2], b[3]);
      }
    }
  }
}

// sums [16, D] += weights [16, n] times `others` [n, D], for each tile.
template <class T, u32 D, u32 n, u32 tiles>
static __device__ void add_weighted(float (&sums)[tiles][D / 8][4], const u32 (&weights)[tiles][n / 16][4],
                                    u16 (*others)[D + 8]) {
#pragma unroll
  for (u32 k = 0; k < n / 16; k++) {
#pragma unroll
    for (u32 i = 0; i < D / 16; i++) {
      u32 b[4];
      load_transposed(b, &others[16 * k + lane() % 16][16 * i + lane() / 16 * 8]);
#pragma unroll
      for (u32 tile = 0; tile < tiles; tile++) {
        add_product(T(), sums[tile][2 * i], weights[tile][k], b[0], b[1]);
        add_product(T(), sums[tile][2 * i + 1], weights[tile][k], b[2], b[3]);
      }
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

// The queries of a block, with some tiles for each warp, and the keys that they see. Keys count from the first one that
// any of the queries sees.
template <u32 tiles> struct Block {
  static const u32 rows = ROWS * tiles;
  // First query of the block, and of this warp.
  u32 first, own;
  u64 first_key;
  // Keys that any of the queries sees, that all of them see, and that exist.
  u32 keys, all_begin, all_end, end;
  // In shared memory: the keys that each query sees. A query that does not exist sees none.
  u32 *begins, *ends;

  // The threads of the block may read the keys of its queries after the next barrier.
  __device__ Block(const Visibility& of, u32* begins_memory, u32* ends_memory)
      : begins(begins_memory), ends(ends_memory) {
    // The last queries see the most keys: their blocks begin first.
    first = (gridDim.x - 1 - blockIdx.x) * rows;
    own = first + 16 * tiles * warp();
    const Keys of_first = of.of(first), of_last = of.of(first + rows < of.queries ? first + rows - 1 : of.queries - 1);
    first_key = of_first.begin;
    keys = (u32)(of_last.end - first_key);
    all_begin = (u32)(of_last.begin - first_key);
    all_end = (u32)(of_first.end - first_key);
    end = (u32)(of.keys - first_key);
    for (u32 row = threadIdx.x; row < rows; row += WARPS * 32) {
      const bool is_there = first + row < of.queries;
      const Keys visible = of.of(is_there ? first + row : of.queries - 1);
      begins[row] = (u32)(visible.begin - first_key);
      ends[row] = is_there ? (u32)(visible.end - first_key) : 0;
    }
  }

  // Whether all queries see a step's keys.
  template <u32 step> __device__ bool sees_all(u32 key) const { return key >= all_begin && key + step <= all_end; }

  // Whether a query of this lane, in a tile and of its half, sees a key.
  __device__ bool sees(u32 tile, u32 half, u32 key) const {
    const u32 row = 16 * (tiles * warp() + tile) + group_of_lane() + 8 * half;
    return key >= begins[row] && key < ends[row];
  }
};

template <class T, u32 D>
static __device__ void forward(const u16* q, const u16* k, const u16* v, u16* out, float* log_sums, Strides q_strides,
                               Strides k_strides, Strides v_strides, Sizes of) {
  // More keys would not fit into the registers.
  const u32 TILES = 2, STEP = D > 64 ? 32 : 64;
  typedef Block<TILES> Queries;
  u16(*queries)[D + 8] = shared_rows<D>(0);
  u16(*keys)[D + 8] = shared_rows<D>(Queries::rows);
  u16(*values)[D + 8] = shared_rows<D>(Queries::rows + STEP);
  const Visibility& all = of.all;
  __shared__ u32 begins[Queries::rows];
  __shared__ u32 ends[Queries::rows];
  const Queries block(all, begins, ends);
  const u64 head = blockIdx.y, batch = blockIdx.z;
  k += batch * k_strides.batch + head / of.group * D + block.first_key * k_strides.row;
  v += batch * v_strides.batch + head / of.group * D + block.first_key * v_strides.row;

  float sums[TILES][D / 8][4] = {}, highest[TILES][2], total[TILES][2] = {};
  for (u32 tile = 0; tile < TILES; tile++) highest[tile][0] = highest[tile][1] = -f32_of(0x7f800000);
  start_rows<D, Queries::rows>(queries, q + batch * q_strides.batch + head * D, q_strides.row, block.first, (u32)all.queries);
  start_rows<D, STEP>(keys, k, k_strides.row, 0, block.end);
  end_group();
  start_rows<D, STEP>(values, v, v_strides.row, 0, block.end);
  end_group();
  for (u32 key = 0; key < block.keys; key += STEP) {
    wait_for_copies<1>();
    __syncthreads();
    float scores[TILES][STEP / 8][4] = {};
    add_products<T, D, STEP, TILES>(scores, queries + 16 * TILES * warp(), keys);
    __syncthreads();  // all warps have read the keys
    if (key + STEP < block.keys) start_rows<D, STEP>(keys, k, k_strides.row, key + STEP, block.end);
    end_group();

    const bool sees_all = block.template sees_all<STEP>(key);
    u32 weights[TILES][STEP / 16][4];
#pragma unroll
    for (u32 tile = 0; tile < TILES; tile++) {
      float most[2] = {highest[tile][0], highest[tile][1]};
#pragma unroll
      for (u32 i = 0; i < STEP / 8; i++) {
#pragma unroll
        for (u32 c = 0; c < 4; c++) {
          const u32 at = key + 8 * i + pair_of_lane() + c % 2;
          float slope, &mine = scores[tile][i][c];
          const bool sees = sees_all || block.sees(tile, c / 2, at);
          mine = sees ? score(mine, of, slope) : -f32_of(0x7f800000);
          most[c / 2] = fmaxf(most[c / 2], mine);
        }
      }
#pragma unroll
      for (u32 r = 0; r < 2; r++) {
        most[r] = fmaxf(most[r], __shfl_xor_sync(0xffffffff, most[r], 1));
        most[r] = fmaxf(most[r], __shfl_xor_sync(0xffffffff, most[r], 2));
        // Without a score so far, the difference of two infinities would be NaN.
        const float base = most[r] == -f32_of(0x7f800000) ? 0 : most[r];
        const float factor = power_of_two(highest[tile][r] - base);
        float sum = 0;
#pragma unroll
        for (u32 i = 0; i < STEP / 8; i++) {
#pragma unroll
          for (u32 c = 2 * r; c < 2 * r + 2; c++) sum += scores[tile][i][c] = power_of_two(scores[tile][i][c] - base);
        }
        total[tile][r] = total[tile][r] * factor + sum;
        highest[tile][r] = most[r];
#pragma unroll
        for (u32 i = 0; i < D / 8; i++) {
          sums[tile][i][2 * r] *= factor;
          sums[tile][i][2 * r + 1] *= factor;
        }
      }
      round_all<T, STEP>(weights[tile], scores[tile]);
    }
    wait_for_copies<1>();
    __syncthreads();
    add_weighted<T, D, STEP, TILES>(sums, weights, values);
    __syncthreads();  // all warps have read the values
    if (key + STEP < block.keys) start_rows<D, STEP>(values, v, v_strides.row, key + STEP, block.end);
    end_group();
  }
  wait_for_copies<0>();  // if no query sees a key
  out += (batch * all.queries * of.heads + head) * D;
  log_sums += (batch * of.heads + head) * all.queries;
#pragma unroll
  for (u32 tile = 0; tile < TILES; tile++) {
    const u64 own = block.own + 16 * tile;
    for (u32 r = 0; r < 2; r++) {
      total[tile][r] = sum_of_row(total[tile][r]);
      const u64 query = own + group_of_lane() + 8 * r;
      if (query < all.queries && lane() % 4 == 0)
        log_sums[query] = highest[tile][r] * LN_2 + logf(total[tile][r]);
    }
    write_rows<T, D>(out, of.heads * D, own, all.queries, sums[tile], 1 / total[tile][0], 1 / total[tile][1]);
  }
}

// Writes the gradients of the queries, and for the other kernel the products of each query's output and its gradient.
template <class T, u32 D>
static __device__ void backward_queries(const u16* q, const u16* k, const u16* v, const u16* out, const u16* d_out,
                                        const float* log_sums, float* deltas, u16* d_q, Strides q_strides,
                                        Strides k_strides, Strides v_strides, Sizes of) {
  // Two steps' keys and values.
  u16(*keys)[D + 8] = shared_rows<D>(0);
  u16(*values)[D + 8] = shared_rows<D>(2 * KEYS);
  const Visibility& all = of.all;
  __shared__ u32 begins[ROWS];
  __shared__ u32 ends[ROWS];
  const Block<1> block(all, begins, ends);
  const u64 head = blockIdx.y, batch = blockIdx.z, of_head = (batch * all.queries * of.heads + head) * D;
  k += batch * k_strides.batch + head / of.group * D + block.first_key * k_strides.row;
  v += batch * v_strides.batch + head / of.group * D + block.first_key * v_strides.row;
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

  const auto start = [&](u32 key, u32 step) {
    start_rows<D, KEYS>(keys + step * KEYS, k, k_strides.row, key, block.end);
    start_rows<D, KEYS>(values + step * KEYS, v, v_strides.row, key, block.end);
  };
  float sums[1][D / 8][4] = {};
  u32 step = 0;
  start(0, step);
  end_group();
  for (u32 key = 0; key < block.keys; key += KEYS, step ^= 1) {
    if (key + KEYS < block.keys) start(key + KEYS, step ^ 1);
    end_group();
    wait_for_copies<1>();
    __syncthreads();
    float scores[KEYS / 8][4] = {}, gradients[KEYS / 8][4] = {};
    add_products<T, D, KEYS>(scores, queries, keys + step * KEYS);
    add_products<T, D, KEYS>(gradients, outputs, values + step * KEYS);
    const bool sees_all = block.sees_all<KEYS>(key);
#pragma unroll
    for (u32 i = 0; i < KEYS / 8; i++) {
#pragma unroll
      for (u32 c = 0; c < 4; c++) {
        const u32 at = key + 8 * i + pair_of_lane() + c % 2;
        float slope;
        const float p = power_of_two(score(scores[i][c], of, slope) - log_sum[c / 2]);
        const bool sees = sees_all || block.sees(0, c / 2, at);
        scores[i][c] = sees ? p * (gradients[i][c] - delta[c / 2]) * slope : 0;
      }
    }
    u32 weights[1][KEYS / 16][4];
    round_all<T, KEYS>(weights[0], scores);
    add_weighted<T, D, KEYS, 1>(sums, weights, keys + step * KEYS);
    __syncthreads();  // all warps have read this step's keys and values
  }
  wait_for_copies<0>();  // if no query sees a key
  write_rows<T, D>(d_q + batch * q_strides.batch + head * D, q_strides.row, block.own, all.queries, sums[0], 1, 1);
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
  u16(*keys)[D + 8] = shared_rows<D>(0);
  // Two steps' queries, the gradients of their outputs, and what follows.
  u16(*queries)[D + 8] = shared_rows<D>(ROWS);
  u16(*outputs)[D + 8] = shared_rows<D>(ROWS + 2 * QUERIES);
  __shared__ float log_sum[2][QUERIES];
  __shared__ float delta[2][QUERIES];
  // Keys that the queries see, counted from the block's first one.
  __shared__ u32 begins[2][QUERIES];
  __shared__ u32 ends[2][QUERIES];
  const Visibility& all = of.all;
  const u64 first = (u64)blockIdx.x * ROWS, own = first + 16 * warp(), kv_head = blockIdx.y, batch = blockIdx.z;
  q += batch * q_strides.batch;
  k += batch * k_strides.batch + kv_head * D;
  v += batch * v_strides.batch + kv_head * D;

  // The warp's values stay in registers.
  u32 values[D / 16][4];
  read_rows<D>(values, v, v_strides.row, own, all.keys);
  start_rows<D, ROWS>(keys, k, k_strides.row, (u32)first, (u32)all.keys);
  end_group();
  // Later queries see later keys.
  const u64 begin = first_query(0, all.queries, [&](u64 query) { return all.of(query).end > first; });
  const u64 end = first_query(begin, all.queries, [&](u64 query) { return all.of(query).begin >= first + ROWS; });
  // Each query head of the group has these steps.
  const u32 steps = end > begin ? (u32)((end - begin + QUERIES - 1) / QUERIES) : 0, all_steps = steps * (u32)of.group;
  const auto start = [&](u32 number) {
    const u32 step = number & 1;
    const u64 query = begin + (u64)(number % steps) * QUERIES, head = kv_head * of.group + number / steps;
    start_rows<D, QUERIES>(queries + step * QUERIES, q + head * D, q_strides.row, (u32)query, (u32)all.queries);
    start_rows<D, QUERIES>(outputs + step * QUERIES, d_out + (batch * all.queries * of.heads + head) * D, of.heads * D,
                           (u32)query, (u32)all.queries);
    if (threadIdx.x >= QUERIES) return;
    const u64 mine = query + threadIdx.x, of_sums = (batch * of.heads + head) * all.queries;
    const bool is_there = mine < all.queries;
    const Keys none = {0, 0}, visible = is_there ? all.of(mine) : none;
    start_number(&log_sum[step][threadIdx.x], log_sums + of_sums + (is_there ? mine : 0), is_there);
    start_number(&delta[step][threadIdx.x], deltas + of_sums + (is_there ? mine : 0), is_there);
    begins[step][threadIdx.x] = visible.begin > first ? (u32)(visible.begin - first) : 0;
    ends[step][threadIdx.x] = visible.end > first ? (u32)(visible.end - first) : 0;
  };
  float key_sums[1][D / 8][4] = {}, value_sums[1][D / 8][4] = {};
  if (all_steps) start(0);
  end_group();
  for (u32 number = 0; number < all_steps; number++) {
    const u32 step = number & 1;
    if (number + 1 < all_steps) start(number + 1);
    end_group();
    wait_for_copies<1>();
    __syncthreads();
    float scores[QUERIES / 8][4] = {}, gradients[QUERIES / 8][4] = {};
    {
      u32 rows[D / 16][4];
#pragma unroll
      for (u32 i = 0; i < D / 16; i++)
        load_tiles(rows[i], &keys[16 * warp() + lane() % 16][16 * i + lane() / 16 * 8]);
      add_products<T, D, QUERIES>(scores, rows, queries + step * QUERIES);
    }
    add_products<T, D, QUERIES>(gradients, values, outputs + step * QUERIES);
#pragma unroll
    for (u32 i = 0; i < QUERIES / 8; i++) {
#pragma unroll
      for (u32 c = 0; c < 4; c++) {
        const u32 column = 8 * i + pair_of_lane() + c % 2;
        const u32 key = 16 * warp() + group_of_lane() + c / 2 * 8;
        float slope;
        const bool sees = key >= begins[step][column] && key < ends[step][column];
        const float logit = score(scores[i][c], of, slope);
        const float p = sees ? power_of_two(logit - log_sum[step][column] * LOG2_E) : 0;
        gradients[i][c] = sees ? p * (gradients[i][c] - delta[step][column]) * slope : 0;
        scores[i][c] = p;
      }
    }
    u32 weights[1][QUERIES / 16][4];
    round_all<T, QUERIES>(weights[0], scores);
    add_weighted<T, D, QUERIES, 1>(value_sums, weights, outputs + step * QUERIES);
    round_all<T, QUERIES>(weights[0], gradients);
    add_weighted<T, D, QUERIES, 1>(key_sums, weights, queries + step * QUERIES);
    __syncthreads();  // all warps have read this step's rows
  }
  wait_for_copies<0>();  // of keys that no query sees
  if (!d_v) d_v = d_k + v_after_k;
  d_k += batch * k_strides.batch + kv_head * D;
  d_v += batch * v_strides.batch + kv_head * D;
  write_rows<T, D>(d_k, k_strides.row, own, all.keys, key_sums[0], 1, 1);
  write_rows<T, D>(d_v, v_strides.row, own, all.keys, value_sums[0], 1, 1);
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
