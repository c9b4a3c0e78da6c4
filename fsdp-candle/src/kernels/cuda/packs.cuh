// Elements that a thread reads and writes together.

// The address is a multiple of the size.
template <class T, int N> struct alignas(N * sizeof(T)) Pack { T at[N]; };

template <int N, class T> __device__ Pack<T, N> load(const T* from) { return *(const Pack<T, N>*)from; }
template <int N, class T> __device__ void store(T* to, const Pack<T, N>& pack) { *(Pack<T, N>*)to = pack; }

// Returns whether packs of four may start at these addresses.
template <class T> __device__ bool are_packs(const T* a, const T* b) {
  return (((u64)a | (u64)b) & (4 * sizeof(T) - 1)) == 0;
}
template <class T, class... More> __device__ bool are_packs(const T* a, const T* b, const More*... more) {
  return are_packs(a, b) && are_packs(a, more...);
}
