// Operands of products in 8-bit floats. A value is multiplied by a scale and rounded to the nearest code. The sums of a
// product run over the columns of both operands' codes.
#include "prelude.cuh"
#include "float8.cuh"
#include "packs.cuh"
#include "sums.cuh"

#define FLOAT8_INPUTS(each) each(f32, float) each(bf16, bf16) each(f16, f16)

// The bits of floats that are not negative are in order, and NaN is above all.
template <class T> static __device__ u32 magnitude(T value) { return bits_of(Float<T>::get(value)) & 0x7fffffff; }
static __device__ u32 larger(u32 a, u32 b) { return a > b ? a : b; }

template <int N, class T> static __device__ void largest_of_all(const T* values, u32* most, u64 count) {
  u32 mine = 0;
  EACH_PACK(i, count) {
    const Pack<T, N> pack = load<N>(values + i);
    for (int k = 0; k < N; k++) mine = larger(mine, magnitude(pack.at[k]));
  }
  mine = join_threads<THREADS>(mine, larger);
  if (threadIdx.x == 0) atomicMax(most, mine);
}

// The bits of the largest magnitude of a tensor, of each row, or of each column. The first and the last start as zeros.
#define LARGEST(name, T) \
  KERNEL(float8_largest_##name)(const T* values, u32* most, u64 count) { \
    BY_PACKS(are_packs<PACK>(values), count, largest_of_all, values, most, count); \
  } \
  KERNEL(float8_largest_of_rows_##name)(const T* values, u32* most, u64 rows, u64 width) { \
    EACH_ROW(row, rows, THREADS) { \
      u32 mine = 0; \
      for (u64 i = threadIdx.x; i < width; i += THREADS) mine = larger(mine, magnitude(values[row * width + i])); \
      mine = join_threads<THREADS>(mine, larger); \
      if (threadIdx.x == 0) most[row] = mine; \
    } \
  } \
  KERNEL(float8_largest_of_columns_##name)(const T* values, u32* most, u64 rows, u64 width, u64 stretch) { \
    const u64 column = (u64)blockIdx.x * THREADS + threadIdx.x; \
    if (column >= width) return; \
    const u64 begin = blockIdx.y * stretch, end = begin + stretch < rows ? begin + stretch : rows; \
    u32 mine = 0; \
    for (u64 row = begin; row < end; row++) mine = larger(mine, magnitude(values[row * width + column])); \
    atomicMax(most + column, mine); \
  }
FLOAT8_INPUTS(LARGEST)

// Converts largest magnitudes to scales, followed by their inverses. If `shared`, there is one magnitude for all.
KERNEL(float8_scales)(const u32* most, float* scales, u64 count, float largest, double least, u32 power_of_two,
                      u32 shared) {
  EACH(i, count) {
    const double magnitude = f32_of(most[shared ? 0 : i]);
    float scale = (float)(largest / (magnitude < least ? least : magnitude));
    // A float without its mantissa is the power of two below. NaN stays NaN.
    if (power_of_two && scale == scale) scale = f32_of(bits_of(scale) & 0xff800000);
    scales[i] = scale;
    scales[count + i] = 1 / scale;
  }
}

// ---- codes ----

// Codes of values, row by row. Each row has a scale if `per_row`.
template <int N, u8 code(float), class T>
static __device__ void cast_rows(const T* values, const float* scales, u8* codes, u64 count, u64 width, u32 per_row) {
  EACH_PACK(i, count) {
    const float scale = scales[per_row ? i / width : 0];
    const Pack<T, N> pack = load<N>(values + i);
    Pack<u8, N> of_pack;
    for (int k = 0; k < N; k++) of_pack.at[k] = code(Float<T>::get(pack.at[k]) * scale);
    store(codes + i, of_pack);
  }
}

// Codes of values, column by column: row `c` of the result has the codes of column `c`, then zeros up to `padded`, a
// multiple of 4. Each column has a scale if `per_column`. A block casts a tile.
enum : u32 { TILE = 64, WORD = 4 };
template <u8 code(float), class T>
static __device__ void cast_columns(const T* values, const float* scales, u8* codes, u64 rows, u64 width, u64 padded,
                                    u32 per_column) {
  __shared__ u8 tile[TILE][TILE + 1];
  const u64 column = (u64)blockIdx.x * TILE, row = (u64)blockIdx.y * TILE;
  for (u32 i = threadIdx.x; i < TILE * TILE; i += THREADS) {
    const u64 from_row = row + i / TILE, from_column = column + i % TILE;
    u8 of_value = 0;
    if (from_row < rows && from_column < width)
      of_value = code(Float<T>::get(values[from_row * width + from_column]) * scales[per_column ? from_column : 0]);
    tile[i / TILE][i % TILE] = of_value;
  }
  __syncthreads();
  for (u32 i = threadIdx.x; i < TILE * TILE / WORD; i += THREADS) {
    const u32 of_column = i / (TILE / WORD), of_row = i % (TILE / WORD) * WORD;
    if (column + of_column >= width || row + of_row >= padded) continue;
    u32 word = 0;
    for (u32 k = 0; k < WORD; k++) word |= (u32)tile[of_row + k][of_column] << (8 * k);
    *(u32*)(codes + (column + of_column) * padded + row + of_row) = word;
  }
}

#define CAST(format, name, T) \
  KERNEL(float8_cast_rows_##format##_##name)(const T* values, const float* scales, u8* codes, u64 count, u64 width, \
                                             u32 per_row) { \
    if (width % PACK == 0 && are_packs<PACK>(values, codes)) \
      cast_rows<PACK, code_##format>(values, scales, codes, count, width, per_row); \
    else cast_rows<1, code_##format>(values, scales, codes, count, width, per_row); \
  } \
  KERNEL(float8_cast_columns_##format##_##name)(const T* values, const float* scales, u8* codes, u64 rows, u64 width, \
                                                u64 padded, u32 per_column) { \
    cast_columns<code_##format>(values, scales, codes, rows, width, padded, per_column); \
  }
#define CASTS(name, T) CAST(e4m3, name, T) CAST(e5m2, name, T)
FLOAT8_INPUTS(CASTS)
