// Rotary position embedding: `nn/rotary.rs` has the formula. Backward rotates the gradient by the negative angle.
#include "prelude.cuh"

// Rotates groups of `heads` successive heads that share a position. A thread rotates a pair, or copies an element that
// is not rotated. Groups run along y.
//
// Group `g` has the position `positions[g]`, or `offset + g % steps` without `positions`. Its angles are at row
// `g / groups_of_table * rows_of_table + position` of the tables.
template <class T, class C>
static __device__ void rotate(const T* x, T* y, const C* cos, const C* sin, const u32* positions, u64 groups, u64 heads,
                              u64 dim, u64 half, u64 offset, u64 steps, u64 groups_of_table, u64 rows_of_table,
                              u32 interleaved, u32 is_backward) {
  typedef Float<T> F;
  const u64 slots = dim - half;  // of a head: its pairs, and the elements that are not rotated
  for (u64 group = (u64)blockIdx.x * blockDim.y + threadIdx.y; group < groups; group += (u64)gridDim.x * blockDim.y) {
    const u64 position = positions ? positions[group] : offset + group % steps;
    const u64 row = (group / groups_of_table * rows_of_table + position) * half;
    for (u64 slot = threadIdx.x; slot < heads * slots; slot += blockDim.x) {
      const u64 pair = slot % slots, start = (group * heads + slot / slots) * dim;
      if (pair >= half) {
        y[start + half + pair] = x[start + half + pair];
        continue;
      }
      const u64 first = start + (interleaved ? 2 * pair : pair), second = first + (interleaved ? 1 : half);
      const REAL a = F::get(x[first]), b = F::get(x[second]);
      const REAL c = (REAL)Float<C>::get(cos[row + pair]), of_angle = (REAL)Float<C>::get(sin[row + pair]);
      const REAL s = is_backward ? -of_angle : of_angle;
      y[first] = F::put(a * c - b * s);
      y[second] = F::put(b * c + a * s);
    }
  }
}
#define ROTATE(name, T, tables, C) \
  KERNEL(rotate_##name##_##tables)(const T* x, T* y, const C* cos, const C* sin, const u32* positions, u64 groups, \
                                   u64 heads, u64 dim, u64 half, u64 offset, u64 steps, u64 groups_of_table, \
                                   u64 rows_of_table, u32 interleaved, u32 is_backward) { \
    rotate(x, y, cos, sin, positions, groups, heads, dim, half, offset, steps, groups_of_table, rows_of_table, \
           interleaved, is_backward); \
  }
#define ROTATE_BY_OWN(name, T) ROTATE(name, T, name, T)
FLOATS(ROTATE_BY_OWN)
ROTATE(f64, double, f32, float)
ROTATE(bf16, bf16, f32, float)
ROTATE(f16, f16, f32, float)
