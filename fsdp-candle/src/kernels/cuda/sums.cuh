// Sums and maxima over the threads that share a row: a warp, or a block of THREADS threads. All of them call a function
// and get the result. The order depends only on the number of threads.

const u32 WARP = 32;

template <u32 threads, class R, class Join> __device__ R join_threads(R mine, Join join) {
  for (u32 flip = WARP / 2; flip > 0; flip /= 2) mine = join(mine, __shfl_xor_sync(0xffffffff, mine, flip));
  if (threads == WARP) return mine;
  __shared__ R warps[THREADS / WARP];
  __syncthreads();  // the threads have read the last results
  if (threadIdx.x % WARP == 0) warps[threadIdx.x / WARP] = mine;
  __syncthreads();
  R all = warps[0];
  for (u32 warp = 1; warp < THREADS / WARP; warp++) all = join(all, warps[warp]);
  return all;
}
template <u32 threads, class R> __device__ R sum_of_threads(R mine) {
  return join_threads<threads>(mine, [](R a, R b) { return a + b; });
}

// A loop over rows, each of which has this many threads.
#define EACH_ROW(row, rows, threads) \
  for (u64 row = ((u64)blockIdx.x * blockDim.x + threadIdx.x) / (threads); row < (rows); \
       row += (u64)gridDim.x * blockDim.x / (threads))
// A loop over a row's packs of N elements, divided over its `threads`. More unrolling takes longer to compile.
#define EACH_PACK_OF_ROW(at, width) \
  _Pragma("unroll 1") for (u64 at = (u64)(threadIdx.x % threads) * N; at < (width); at += (u64)threads * N)
