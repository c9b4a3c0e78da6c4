// Dropout. Backward is the same kernel on the gradient, with the same draw.
#include "prelude.cuh"
#include "packs.cuh"
#include "philox.cuh"

// A thread for four successive elements.
template <class T> static __device__ void dropout(const T* x, T* y, u64 count, Draw draw, float scale) {
  typedef Float<T> F;
  const bool packs = are_packs(x, y);
  EACH(four, count / 4 + (count % 4 != 0)) {
    const u64 start = 4 * four;
    const auto kept = [&](T value, u64 element) {
      return F::put(draw.drops(element) ? (REAL)0 : F::get(value) * (REAL)scale);
    };
    if (packs && start + 4 <= count) {
      Pack<T, 4> values = load<4>(x + start);
      for (int i = 0; i < 4; i++) values.at[i] = kept(values.at[i], start + i);
      store(y + start, values);
    } else {
      for (u64 i = start; i < start + 4 && i < count; i++) y[i] = kept(x[i], i);
    }
  }
}
#define DROPOUT(name, T) \
  KERNEL(dropout_##name)(const T* x, T* y, u64 count, DRAW_PARAMETERS, float scale) { \
    dropout(x, y, count, Draw(DRAW_ARGUMENTS), scale); \
  }
FLOATS(DROPOUT)
