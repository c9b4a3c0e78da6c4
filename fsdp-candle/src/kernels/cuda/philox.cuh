// The random numbers of `random.rs`: Philox4x32-10 (Salmon et al., SC 2011).

struct Words { u32 at[4]; };

// Returns the four words of a counter, whose lower half is `low`.
inline __device__ Words philox(u64 key, u64 low, u64 high) {
  u32 a = (u32)low, b = (u32)(low >> 32), c = (u32)high, d = (u32)(high >> 32);
  u32 key_a = (u32)key, key_b = (u32)(key >> 32);
  for (int round = 0; round < 10; round++) {
    const u64 of_a = (u64)0xd2511f53 * a, of_c = (u64)0xcd9e8d57 * c;
    a = (u32)(of_c >> 32) ^ b ^ key_a;
    b = (u32)of_c;
    c = (u32)(of_a >> 32) ^ d ^ key_b;
    d = (u32)of_a;
    key_a += 0x9e3779b9;
    key_b += 0xbb67ae85;
  }
  const Words words = {{a, b, c, d}};
  return words;
}

// One draw for the elements of a tensor: `random::Mask`, whose fields these are. A kernel takes the fields, in order.
struct Draw {
  u64 key, call, first, run, stride;
  u32 threshold;
  // The words of a thread's last counter.
  u64 counter;
  Words words;

  __device__ Draw(u64 key, u64 call, u64 first, u64 run, u64 stride, u32 threshold)
      : key(key), call(call), first(first), run(run), stride(stride), threshold(threshold), counter(~0ull) {}

  // Returns whether an element is dropped. It costs little if the thread's last element had the same counter, as three
  // of four successive elements have.
  __device__ bool drops(u64 element) {
    const u64 place = first + (element < run ? element : element / run * stride + element % run);
    if (place / 4 != counter) {
      counter = place / 4;
      words = philox(key, counter, call);
    }
    return words.at[place % 4] < threshold;
  }
};
#define DRAW_PARAMETERS u64 key, u64 call, u64 first, u64 run, u64 stride, u32 threshold
#define DRAW_ARGUMENTS key, call, first, run, stride, threshold
