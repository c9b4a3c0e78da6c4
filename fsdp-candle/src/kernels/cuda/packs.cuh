// Elements that a thread reads and writes together.

// The address is a multiple of the size.
template <class T, int N> struct alignas(N * sizeof(T)) Pack { T at[N]; };

template <int N, class T> __device__ Pack<T, N> load(const T* from) { return *(const Pack<T, N>*)from; }
template <int N, class T> __device__ void store(T* to, const Pack<T, N>& pack) { *(Pack<T, N>*)to = pack; }

// Returns whether packs of N elements may start at these addresses.
template <int N = 4, class T> __device__ bool are_packs(const T* at) {
  return ((u64)at & (N * sizeof(T) - 1)) == 0;
}
template <int N = 4, class T, class... More> __device__ bool are_packs(const T* at, const More*... more) {
  return are_packs<N>(at) && are_packs<N>(more...);
}

// A loop over packs of N elements, divided over all threads of a launch.
#define EACH_PACK(at, count) \
  for (u64 at = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * N; at < (count); at += (u64)gridDim.x * blockDim.x * N)

// Elements of a pack of copies, casts and optimizers: a load of 16 bytes of half floats, and two of f32.
enum : int { PACK = 8 };
// Calls a function template, whose loop is over packs of its first parameter.
#define BY_PACKS(aligned, count, function, ...) \
  if ((count) % PACK == 0 && (aligned)) function<PACK>(__VA_ARGS__); \
  else function<1>(__VA_ARGS__)
