// The gradient of a table's rows: tokens are sorted by id, so that each row adds up its tokens alone, in their order.
#include "prelude.cuh"

// A token's id, then its index, so that no two keys are equal.
static __device__ u64 id_of(u64 key) { return key >> 32; }

// Sorts stretches of THREADS keys. A thread's key comes after all smaller ones.
KERNEL(sort_stretches)(const u32* ids, u64* keys, u64 count) {
  __shared__ u64 stretch[THREADS];
  for (u64 begin = (u64)blockIdx.x * THREADS; begin < count; begin += (u64)gridDim.x * THREADS) {
    const u64 at = begin + threadIdx.x, len = count - begin < THREADS ? count - begin : THREADS;
    const u64 key = at < count ? (u64)ids[at] << 32 | at : 0;
    stretch[threadIdx.x] = key;
    __syncthreads();
    if (at < count) {
      u32 smaller = 0;
      for (u32 i = 0; i < len; i++) smaller += stretch[i] < key;
      keys[begin + smaller] = key;
    }
    __syncthreads();
  }
}

// Merges each two successive runs of `run` sorted keys. A key comes after the smaller ones of both.
KERNEL(merge_runs)(const u64* from, u64* to, u64 count, u64 run) {
  EACH(at, count) {
    const u64 key = from[at], own = at / run, other = (own ^ 1) * run;
    const u64 begin = other < count ? other : count, end = other + run < count ? other + run : count;
    u64 low = begin, high = end;
    while (low < high) {
      const u64 middle = low + (high - low) / 2;
      if (from[middle] < key) low = middle + 1;
      else high = middle;
    }
    to[own / 2 * 2 * run + (at - own * run) + (low - begin)] = key;
  }
}

// Adds each row of `from` to the row of `table` for its id. Ids beyond the table stand for no row. The blocks of an id's
// first key add up all rows of that id. Elements of a row run along y.
template <class T, class G>
static __device__ void add_rows(const u64* keys, const T* from, G* table, u64 count, u64 width, u64 rows) {
  typedef Float<T> F;
  typedef Float<G> Table;
  for (u64 first = blockIdx.x; first < count; first += gridDim.x) {
    const u64 id = id_of(keys[first]);
    if (id >= rows || (first > 0 && id_of(keys[first - 1]) == id)) continue;
    for (u64 at = (u64)blockIdx.y * THREADS + threadIdx.x; at < width; at += (u64)gridDim.y * THREADS) {
      REAL sum = 0;
      for (u64 i = first; i < count && id_of(keys[i]) == id; i++) sum += F::get(from[(u32)keys[i] * width + at]);
      table[id * width + at] = Table::put(Table::get(table[id * width + at]) + sum);
    }
  }
}
#define ADD_ROWS_TO(name, T, table_name, G) \
  KERNEL(add_rows_##name##_##table_name)(const u64* keys, const T* from, G* table, u64 count, u64 width, u64 rows) { \
    add_rows(keys, from, table, count, width, rows); \
  }
#define ADD_ROWS(name, T) ADD_ROWS_TO(name, T, name, T)
FLOATS(ADD_ROWS)
ADD_ROWS_TO(bf16, bf16, f32, float)
