// Runs a kernel: one block after the other, and in it every thread on the stack of a fiber. A thread that never waits
// leaves its stack to the next one, so that only those that wait (barrier, shuffle) cost a change of stacks.
// One kernel of a library runs at a time: the caller holds a lock.
#pragma once
#include <cstdarg>
#include <cstdint>
#include <cstring>
#include <utility>
#include "fibers.h"

struct uint3 { unsigned x, y, z; };
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
static uint3 threadIdx, blockIdx;
static dim3 blockDim, gridDim;
const int warpSize = 32;

namespace engine {

// What the library says of a kernel. The same lies in `src/kernels/library.rs`.
enum Access : uint32_t { Read, Write };
struct Pointers { uint32_t parameter, offset, count; Access access; };
struct Kernel {
  const char* name;
  uint32_t parameters, pointers;
  const uint32_t* sizes;
  const Pointers* pointer;
  void (*threads)(void**);
};
struct Launch { uint32_t grid[3], block[3], shared_bytes; uint64_t seed; void** arguments; };

const unsigned most_threads = 1024;
const size_t most_shared_bytes = 227 * 1024;

// ---- the block that runs ----

static const Kernel* kernel;
static void** arguments;
static unsigned threads, started, finished;
static unsigned current;                // the running thread's number in its block
static unsigned turn;                   // where the block's first thread stands, see `number`
static bool backwards;
static Fiber fibers[most_threads];
static unsigned fibers_made;
static Fiber *running, *idle[most_threads], *ready[most_threads], *at_barrier[most_threads];
static unsigned idle_count, ready_from, ready_count, barrier_count;
static char message[512];               // of the fault; empty is none
static uint64_t block_number;           // counts blocks of all launches
const size_t guard_bytes = 1024;        // behind a launch's shared memory, to find writes there
alignas(128) static char dynamic_shared[most_shared_bytes + guard_bytes];
static size_t dynamic_bytes, static_bytes;
static unsigned votes_now, votes_then;  // of __syncthreads_count and its like

static __attribute__((noinline, cold)) void fault(const char* form, ...) {
  int used = snprintf(message, sizeof message, "kernel %s, block (%u, %u, %u): ", kernel->name, blockIdx.x, blockIdx.y,
                      blockIdx.z);
  va_list rest;
  va_start(rest, form);
  vsnprintf(message + used, sizeof message - used, form, rest);
  va_end(rest);
  if (running) fiber_leave(*running);  // and never comes back
}

// Threads that have left a barrier and are held back, by their numbers. With a seed, a barrier lets one warp go on, and
// the next one only when no thread of it can: a missing barrier shows where warps may be apart.
static Fiber* held_at[2][most_threads];
static Fiber **held = held_at[0], **arriving = held_at[1];
static unsigned held_count, held_warp;
static bool holds;

static void make_ready(Fiber* fiber) { ready[(ready_from + ready_count++) % most_threads] = fiber; }

// Whether a thread can go on. Lets held threads of the next warp go on if no other can.
static bool any_ready() {
  for (; !ready_count && held_count; held_warp = (held_warp + 1) % ((threads + 31) / 32)) {
    for (unsigned i = 32 * held_warp; i < 32 * held_warp + 32 && i < threads; i++) {
      if (!held[i]) continue;
      make_ready(held[i]);
      held[i] = nullptr;
      held_count--;
    }
  }
  return ready_count;
}

static Fiber* next_ready() {
  Fiber* next = ready[ready_from];
  ready_from = (ready_from + 1) % most_threads;
  ready_count--;
  return next;
}

// The running thread stops until it is made ready. The next one goes on, if there is one, without the scheduler.
static inline __attribute__((always_inline)) void wait() {
  unsigned me = current;
  uint3 index = threadIdx;
  Fiber* self = running;
  if (any_ready()) {
    running = next_ready();
    fiber_change(*self, *running);
  } else {
    fiber_leave(*self);
  }
  current = me;
  threadIdx = index;
}

// The order of threads is not promised. They start from any warp, forwards or backwards: a missing barrier shows in one
// direction or the other.
static unsigned number(unsigned start) {
  unsigned at = start + turn < threads ? start + turn : start + turn - threads;
  return backwards ? threads - 1 - at : at;
}

static void begin_thread() {
  current = number(started++);
  if (threads == blockDim.x) {
    threadIdx = {current, 0, 0};  // without a division, which would be most of a small kernel's time
  } else {
    unsigned rest = current / blockDim.x;
    threadIdx = {current % blockDim.x, rest % blockDim.y, rest / blockDim.y};
  }
}

static void work() {
  for (;;) {
    kernel->threads(arguments);
    running->idle = true;
    fiber_leave(*running);
  }
}

static void run_block() {
  block_number++;
  static_bytes = 0;
  started = finished = ready_from = ready_count = barrier_count = held_count = votes_now = 0;
  if (holds) memset(held_at, 0, sizeof held_at);  // a fault may have left some
  memset(dynamic_shared, 0xff, dynamic_bytes);  // NaN: shared memory begins with no value
  char* const behind = dynamic_shared + dynamic_bytes;
  const size_t guarded = dynamic_bytes ? guard_bytes : 0;
  memset(behind, 0x5a, guarded);
  while (finished < threads && !message[0]) {
    if (any_ready()) {
      running = next_ready();
    } else if (started < threads) {
      if (!idle_count) {
        Fiber& fiber = fibers[fibers_made++];
        fiber_stack(fiber);
        fiber_begin(fiber, work);
        idle[idle_count++] = &fiber;
      }
      running = idle[--idle_count];
      running->idle = false;
    } else if (barrier_count) {
      running = nullptr;
      return fault("__syncthreads() was reached by %u of %u threads: %u have ended, %u wait for others of their warp",
                   barrier_count, threads, finished, threads - finished - barrier_count);
    } else {
      running = nullptr;
      return fault("%u of %u threads wait in a shuffle or vote that not all threads of its mask reach",
                   threads - finished, threads);
    }
    fiber_enter(*running);
    if (running->idle) idle[idle_count++] = running;
  }
  running = nullptr;
  for (size_t i = 0; i < guarded && !message[0]; i++)
    if (behind[i] != 0x5a) fault("a write behind the %zu bytes of shared memory by launch", dynamic_bytes);
}

static inline __attribute__((always_inline)) void barrier() {
  if (barrier_count + 1 < threads) {
    if (holds) arriving[current] = running;
    at_barrier[barrier_count++] = running;
    return wait();
  }
  if (holds) {
    std::swap(held, arriving);
    held_count = barrier_count;
    held_warp = current / 32;
  } else {
    for (unsigned i = 0; i < barrier_count; i++) make_ready(at_barrier[i]);
  }
  barrier_count = 0;
}

// A `__shared__` variable: nobody may count on a value from before the block.
static inline void begin_shared(void* memory, size_t bytes, uint64_t& block) {
  if (block == block_number) return;
  block = block_number;
  static_bytes += bytes;
  if (static_bytes + dynamic_bytes > most_shared_bytes || static_bytes > 48 * 1024)
    fault("%zu bytes of shared memory by declaration and %zu by launch", static_bytes, dynamic_bytes);
  memset(memory, 0xff, bytes);
}

static uint64_t random(uint64_t& state) {
  state += 0x9e3779b97f4a7c15;
  uint64_t mixed = (state ^ state >> 30) * 0xbf58476d1ce4e5b9;
  mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111eb;
  return mixed ^ mixed >> 31;
}

static uint64_t common_divisor(uint64_t a, uint64_t b) { return b ? common_divisor(b, a % b) : a; }

// The text of the fault, or null. The order of blocks is not promised: with a seed it is any.
static const char* launch(const Kernel& which, const Launch& how) {
  kernel = &which;
  arguments = how.arguments;
  gridDim = {how.grid[0], how.grid[1], how.grid[2]};
  blockDim = {how.block[0], how.block[1], how.block[2]};
  threads = blockDim.x * blockDim.y * blockDim.z;
  dynamic_bytes = how.shared_bytes;
  message[0] = 0;
  uint64_t blocks = (uint64_t)gridDim.x * gridDim.y * gridDim.z, step = 1, block = 0, state = how.seed;
  turn = 0;
  backwards = false;
  holds = how.seed;
  if (how.seed) {
    step = random(state) % blocks + 1;
    while (common_divisor(step, blocks) != 1) step = step % blocks + 1;
    block = random(state) % blocks;
  }
  for (uint64_t i = 0; i < blocks && !message[0]; i++) {
    if (how.seed) {
      uint64_t order = random(state);
      backwards = order & 1;
      turn = order / 2 % ((threads + 31) / 32) * 32;
    }
    blockIdx = {(unsigned)(block % gridDim.x), (unsigned)(block / gridDim.x % gridDim.y),
                (unsigned)(block / gridDim.x / gridDim.y)};
    run_block();
    block = (block + step) % blocks;
  }
  if (!message[0]) return nullptr;
  for (unsigned i = 0; i < fibers_made; i++) {  // those that wait would wait for ever
    fiber_begin(fibers[i], work);
    idle[i] = &fibers[i];
  }
  idle_count = fibers_made;
  return message;
}

}  // namespace engine
