// The logistic function.

template <class R> static __device__ R logistic(R x) { return 1 / (1 + exp(-x)); }
