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

// Copies arrive at once. What a device would read too early, the order of threads shows only in part.
static void start_copy(u16* to, const u16* from, bool is_there) {
  engine::check_aligned(to, "a copy to shared memory");
  engine::check_aligned(from, "a copy from memory");
  if (is_there) memcpy(to, from, 16);
  else memset(to, 0, 16);
}
static void end_group() {}
template <int groups> static void wait_for_copies() {}
