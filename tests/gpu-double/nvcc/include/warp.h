// What the threads of a warp do together: each leaves a value and waits; the last one works out what every lane gets.
#pragma once
#include "engine.h"

namespace engine {

enum class Together { Shuffle, Ballot };
struct Lane {
  Together operation;
  unsigned mask, source;
  uint64_t value, result;
  Fiber* fiber;
};
static Lane lanes[most_threads];
static struct { uint64_t block; unsigned lanes; } arrived[most_threads / 32];

static unsigned lane() { return current % 32; }

static inline __attribute__((always_inline)) uint64_t together(
    Together operation, unsigned mask, uint64_t value, unsigned source) {
  unsigned me = current, mine = lane(), first = me - mine;
  unsigned present = threads - first >= 32 ? ~0u : (1u << (threads - first)) - 1;
  unsigned members = mask & present;
  if (!(members >> mine & 1)) fault("thread %u calls a shuffle or vote whose mask %#x leaves it out", me, mask);
  auto& here = arrived[me / 32];
  if (here.block != block_number) here = {block_number, 0};
  lanes[me] = {operation, mask, source, value, 0, running};
  here.lanes |= 1u << mine;
  if ((here.lanes & members) != members) {
    wait();
    return lanes[me].result;
  }
  uint64_t votes = 0;
  for (unsigned i = 0; i < 32; i++) {
    if (!(members >> i & 1)) continue;
    const Lane& other = lanes[first + i];
    if (other.operation != operation || other.mask != mask)
      fault("threads %u and %u are in different shuffles or votes, or name different masks", me, first + i);
    votes |= (uint64_t)(other.value != 0) << i;
  }
  for (unsigned i = 0; i < 32; i++) {
    if (!(members >> i & 1)) continue;
    Lane& other = lanes[first + i];
    // What a lane that takes no part would have given is not defined: NaN.
    uint64_t given = members >> other.source & 1 ? lanes[first + other.source].value : ~0ull;
    other.result = operation == Together::Ballot ? votes : given;
    if (i != mine) make_ready(other.fiber);
  }
  here.lanes &= ~members;
  return lanes[me].result;
}

template <class T> T shuffle(unsigned mask, T value, unsigned source) {
  static_assert(sizeof(T) <= 8, "a shuffle takes at most 8 bytes");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof value);
  bits = together(Together::Shuffle, mask, bits, source);
  memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace engine

template <class T> T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  return engine::shuffle(mask, value, (engine::lane() & ~(width - 1)) | (source & (width - 1)));
}
template <class T> T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  unsigned lane = engine::lane();
  return engine::shuffle(mask, value, (lane & (width - 1)) < delta ? lane : lane - delta);
}
template <class T> T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  unsigned lane = engine::lane();
  return engine::shuffle(mask, value, (lane & (width - 1)) + delta >= (unsigned)width ? lane : lane + delta);
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int flip, int width = 32) {
  unsigned lane = engine::lane(), source = lane ^ flip;
  return engine::shuffle(mask, value, source >= (lane & ~(width - 1)) + width ? lane : source);
}
static inline unsigned __ballot_sync(unsigned mask, int vote) {
  return engine::together(engine::Together::Ballot, mask, vote != 0, 0);
}
static inline int __any_sync(unsigned mask, int vote) { return __ballot_sync(mask, vote) != 0; }
static inline int __all_sync(unsigned mask, int vote) { return __ballot_sync(mask, !vote) == 0; }
static inline void __syncwarp(unsigned mask = ~0u) { __ballot_sync(mask, 0); }

static inline void __syncthreads() { engine::barrier(); }
namespace engine {
static unsigned barrier_votes(int vote) {
  votes_now += vote != 0;
  // The last one to come closes the count before anybody goes on.
  if (barrier_count + 1 == threads) votes_then = votes_now, votes_now = 0;
  barrier();
  return votes_then;
}
}  // namespace engine
static inline int __syncthreads_count(int vote) { return engine::barrier_votes(vote); }
static inline int __syncthreads_or(int vote) { return engine::barrier_votes(vote) != 0; }
static inline int __syncthreads_and(int vote) { return engine::barrier_votes(!vote) == 0; }
