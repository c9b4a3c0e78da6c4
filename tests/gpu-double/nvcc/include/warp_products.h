// What `tensor_cores.cuh` of fsdp-candle has on devices: matrix products of a warp, and copies to shared memory. That
// file includes this one, and describes which elements a lane has.
#pragma once
#include "warp.h"

namespace engine {

// What each lane of a warp gives to an operation of all of them.
static const void* given[most_threads];

// Returns what a lane of this warp gave. All lanes call `give` before and `taken` after.
template <class T> const T& of_lane(unsigned other) { return *(const T*)given[current - lane() + other]; }
static void give(const void* mine) {
  if (threads % 32) fault("a warp's product in a block of %u threads, which is no multiple of 32", threads);
  given[current] = mine;
  together(Together::Ballot, ~0u, 0, 0);
}
static void taken() { together(Together::Ballot, ~0u, 0, 0); }

static void check_aligned(const void* at, const char* what) {
  if ((uintptr_t)at % 16) fault("%s at %p, which is no multiple of 16 bytes", what, at);
}

}  // namespace engine

static void load_tiles(u32 (&to)[4], const u16* row) {
  engine::check_aligned(row, "a row of a tile");
  engine::give(row);
  const unsigned lane = engine::lane();
  for (unsigned i = 0; i < 4; i++) memcpy(&to[i], &engine::of_lane<u16>(8 * i + lane / 4) + lane % 4 * 2, 4);
  engine::taken();
}

static void load_transposed(u32 (&to)[4], const u16* row) {
  engine::check_aligned(row, "a row of a tile");
  engine::give(row);
  const unsigned lane = engine::lane();
  for (unsigned i = 0; i < 4; i++) {
    const u16* first = &engine::of_lane<u16>(8 * i + lane % 4 * 2);
    const u16* second = &engine::of_lane<u16>(8 * i + lane % 4 * 2 + 1);
    to[i] = first[lane / 4] | (u32)second[lane / 4] << 16;
  }
  engine::taken();
}

template <class T> static void add_product(T, float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  struct Operands { u32 a[4], b[2]; };
  const Operands mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
  engine::give(&mine);
  const unsigned lane = engine::lane(), group = lane / 4, pair = lane % 4 * 2;
  const auto element = [](u32 word, unsigned half) {
    T bits = {(u16)(word >> 16 * half)};
    return Float<T>::get(bits);
  };
  for (unsigned k = 0; k < 16; k++) {
    const unsigned of_k = k % 8 / 2, upper = k / 8, half = k % 2;
    for (unsigned c = 0; c < 2; c++) {
      const float b = element(engine::of_lane<Operands>((pair + c) * 4 + of_k).b[upper], half);
      const Operands& rows = engine::of_lane<Operands>(group * 4 + of_k);
      for (unsigned r = 0; r < 2; r++) sum[2 * r + c] += element(rows.a[r + 2 * upper], half) * b;
    }
  }
  engine::taken();
}

template <class T> static u32 rounded(T, float first, float second) {
  return Float<T>::put(first).bits | (u32)Float<T>::put(second).bits << 16;
}

static float power_of_two(float x) { return exp2f(x); }

// Copies to shared memory that a thread has started. A device writes the destination at some time before the thread has
// waited. Here it holds NaN until then, so that a read too early shows, and so does a copy over what others still read.
namespace engine {

struct Copy { void* to; const void* from; unsigned bytes; bool is_there; };
struct Copies {
  static const unsigned most = 128;
  uint64_t block;
  Copy all[most];
  unsigned first, end;              // those that have not arrived
  unsigned ends[most], groups;      // where each group ends
};
static Copies copies[most_threads];

static Copies& own_copies() {
  Copies& own = copies[current];
  if (own.block != block_number) own.block = block_number, own.first = own.end = own.groups = 0;
  return own;
}

static void start(void* to, const void* from, unsigned bytes, bool is_there) {
  if ((uintptr_t)to % bytes || (uintptr_t)from % bytes)
    fault("a copy from %p to %p in shared memory, which are no multiples of %u bytes", from, to, bytes);
  Copies& own = own_copies();
  if (own.end - own.first == Copies::most) fault("a thread has started %u copies without waiting", Copies::most);
  own.all[own.end++ % Copies::most] = {to, from, bytes, is_there};
  memset(to, 0xff, bytes);
}

}  // namespace engine

static void start_copy(u16* to, const u16* from, bool is_there) { engine::start(to, from, 16, is_there); }
static void start_number(float* to, const float* from, bool is_there) { engine::start(to, from, 4, is_there); }
static void end_group() {
  engine::Copies& own = engine::own_copies();
  own.ends[own.groups++ % engine::Copies::most] = own.end;
}
template <int groups> static void wait_for_copies() {
  engine::Copies& own = engine::own_copies();
  const unsigned arriving = own.groups > groups ? own.groups - groups : 0;
  const unsigned end = arriving ? own.ends[(arriving - 1) % engine::Copies::most] : own.first;
  for (; own.first < end; own.first++) {
    const engine::Copy& copy = own.all[own.first % engine::Copies::most];
    if (copy.is_there) memcpy(copy.to, copy.from, copy.bytes);
    else memset(copy.to, 0, copy.bytes);
  }
}
