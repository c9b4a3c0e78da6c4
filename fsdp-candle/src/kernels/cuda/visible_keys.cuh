// Which keys a query of attention sees: `VisibleKeys` in `nn/attention/visible_keys.rs`.

struct Keys { u64 begin, end; };

// One row of the batch. What a query sees follows from its index, so no mask is read.
struct Visibility {
  // Bounds of the row's documents in tokens: 0, ..., `keys`. Null without documents.
  const u32* bounds;
  u64 documents;
  u64 queries, keys;
  // Position of the first query, the first query after a gap, and the positions that the gap skips.
  u64 first, gap_at, gap;
  u32 is_causal;
  u64 window;

  __device__ Keys of(u64 query) const {
    u64 start = 0, length = keys;
    const u64 in_row = first + query + (query >= gap_at ? gap : 0);
    if (bounds) {
      // The last document that begins at the position or before it.
      u64 low = 0, high = documents;
      while (high - low > 1) {
        const u64 middle = low + (high - low) / 2;
        if (bounds[middle] <= in_row) low = middle;
        else high = middle;
      }
      start = bounds[low];
      length = bounds[low + 1] - start;
    }
    const u64 position = in_row - start;
    const u64 begin = position + 1 > window ? position + 1 - window : 0;
    u64 end = position + 1;
    if (!is_causal) end = window < length - position ? position + window : length;
    const Keys visible = {start + begin, start + end};
    return visible;
  }
};

#define VISIBILITY_PARAMETERS \
  const u32 *bounds, u64 documents, u64 queries, u64 keys, u64 first, u64 gap_at, u64 gap, u32 is_causal, u64 window
// The structure of these parameters.
#define VISIBILITY const Visibility all = {bounds, documents, queries, keys, first, gap_at, gap, is_causal, window}
