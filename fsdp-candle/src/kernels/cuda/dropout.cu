// Dropout. Backward is the same kernel on the gradient, with the same draw.
#include "prelude.cuh"
#include "packs.cuh"
#include "philox.cuh"

// A thread for four successive elements of a tensor [rows, planes, lines, columns].
template <class T>
static __device__ void dropout(const T* x, T* y, u64 count, Draw draw, u64 planes, u64 lines, u64 columns, float scale) {
  typedef Float<T> F;
  const bool packs = are_packs(x, y);
  EACH(four, count / 4 + (count % 4 != 0)) {
    const u64 start = 4 * four;
    // The coordinates of the next element.
    u64 column = start % columns, line = start / columns;
    u64 plane = line / lines, row = plane / planes;
    line %= lines;
    plane %= planes;
    const auto kept = [&](T value) {
      const bool drops = draw.drops(row, plane, line, column);
      if (++column == columns) {
        column = 0;
        if (++line == lines) {
          line = 0;
          if (++plane == planes) {
            plane = 0;
            row++;
          }
        }
      }
      return F::put(drops ? (REAL)0 : F::get(value) * (REAL)scale);
    };
    if (packs && start + 4 <= count) {
      Pack<T, 4> values = load<4>(x + start);
      for (int i = 0; i < 4; i++) values.at[i] = kept(values.at[i]);
      store(y + start, values);
    } else {
      for (u64 i = start; i < start + 4 && i < count; i++) y[i] = kept(x[i]);
    }
  }
}
#define DROPOUT(name, T) \
  KERNEL(dropout_##name)(const T* x, T* y, u64 count, DRAW_PARAMETERS, u64 planes, u64 lines, u64 columns, \
                         float scale) { \
    dropout(x, y, count, Draw(DRAW_ARGUMENTS), planes, lines, columns, scale); \
  }
FLOATS(DROPOUT)
