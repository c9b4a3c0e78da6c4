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

const u32 COORDINATE_BITS = 24;

// One draw for the elements of a tensor: `random::Mask`. A kernel takes the key, the coordinates of the tensor's first
// element, the first line after a gap, the lines that the gap skips, and the threshold.
struct Draw {
  u64 key, first_row, first_plane, first_line, first_column, gap_at, gap;
  u32 threshold;
  // The words of a thread's last counter.
  u64 row, counter;
  Words words;

  __device__ Draw(u64 key, u64 first_row, u64 first_plane, u64 first_line, u64 first_column, u64 gap_at, u64 gap,
                  u32 threshold)
      : key(key), first_row(first_row), first_plane(first_plane), first_line(first_line), first_column(first_column),
        gap_at(gap_at), gap(gap), threshold(threshold), row(0), counter(~0ull) {}

  // Returns whether the element of a row with these coordinates is dropped. It costs little if the thread's last element
  // had the same counter, as three of four successive elements have.
  __device__ bool drops(u64 at_row, u64 plane, u64 line, u64 column) {
    const u64 lines_before = ((first_plane + plane) << COORDINATE_BITS) + first_line + line + (line >= gap_at ? gap : 0);
    const u64 place = (lines_before << COORDINATE_BITS) + first_column + column;
    if (place / 4 != counter || at_row != row) {
      counter = place / 4;
      row = at_row;
      words = philox(key, counter, first_row + row);
    }
    return words.at[place % 4] < threshold;
  }
};
#define DRAW_PARAMETERS \
  u64 key, u64 first_row, u64 first_plane, u64 first_line, u64 first_column, u64 line_gap_at, u64 line_gap, u32 threshold
#define DRAW_ARGUMENTS key, first_row, first_plane, first_line, first_column, line_gap_at, line_gap, threshold
