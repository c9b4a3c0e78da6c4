// A warp's matrix products on tensor cores: NVIDIA's PTX ISA, `mma`, `ldmatrix` and `cp.async`, for capability 8.0 and
// newer.
//
// Elements are 16 bits. A product adds `a` [16, 16] times `b` [16, 8] to `sum` [16, 8]. The lanes of a warp hold the
// elements in words of two neighbours. With group = lane / 4 and pair = lane % 4 * 2, a lane has
//
//   a[r + 2 c]    row group + 8 r, columns pair + 8 c and the next
//   b[r]          rows pair + 8 r and the next, column group
//   sum[2 r + c]  row group + 8 r, column pair + c
//
// So two sums, of 16 columns together, become the `a` of another product without an exchange between lanes.

#ifdef GPU_DOUBLE
#include "warp_products.h"  // the device double's own
#elif !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
inline __device__ u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }

// Each lane gives the address of 8 elements: lanes 8 i to 8 i + 7 those of the rows of tile i [8, 8]. A lane gets two
// neighbours of each tile: row group, columns pair and the next.
inline __device__ void load_tiles(u32 (&to)[4], const u16* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}

// The same of the transposed tiles: rows pair and the next, column group.
inline __device__ void load_transposed(u32 (&to)[4], const u16* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}

inline __device__ void add_product(bf16, float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
inline __device__ void add_product(f16, float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Rounds two neighbours to a word.
inline __device__ u32 rounded(bf16, float first, float second) {
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
  return both;
}
inline __device__ u32 rounded(f16, float first, float second) {
  u32 both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
  return both;
}

inline __device__ float power_of_two(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

// Starts to copy 8 elements to shared memory, or zeros. `from` is an address that can be read.
inline __device__ void start_copy(u16* to, const u16* from, bool is_there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(shared_address(to)), "l"(from), "r"(is_there ? 16 : 0)
               : "memory");
}
// Starts to copy a number to shared memory, or 0. `from` is an address that can be read.
inline __device__ void start_number(float* to, const float* from, bool is_there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
               :
               : "r"(shared_address(to)), "l"(from), "r"(is_there ? 4 : 0)
               : "memory");
}
// Ends a group of copies.
inline __device__ void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `groups` of this thread's groups have not arrived.
template <int groups> inline __device__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" : : "n"(groups) : "memory");
}
#else  // Older devices have no such instructions. Their kernels do nothing, and are not called.
inline __device__ void load_tiles(u32 (&)[4], const u16*) {}
inline __device__ void load_transposed(u32 (&)[4], const u16*) {}
template <class T> inline __device__ void add_product(T, float (&)[4], const u32 (&)[4], u32, u32) {}
template <class T> inline __device__ u32 rounded(T, float, float) { return 0; }
inline __device__ float power_of_two(float) { return 0; }
inline __device__ void start_copy(u16*, const u16*, bool) {}
inline __device__ void start_number(float*, const float*, bool) {}
inline __device__ void end_group() {}
template <int groups> inline __device__ void wait_for_copies() {}
#endif
