// Stacks of their own for the threads of a block, and the change from one to another. A thread of a kernel is one of up
// to 1024 of its block, and changes at every barrier and shuffle: so the change is a few instructions where the host's
// assembly is known, and `ucontext` elsewhere.
#pragma once
#include <sys/mman.h>
#include <cstdio>
#include <cstdlib>
#if !defined(__x86_64__) || defined(GPU_DOUBLE_UCONTEXT)
#define ENGINE_UCONTEXT
#include <ucontext.h>
#endif

namespace engine {

const size_t page_bytes = 4096;
const size_t stack_bytes = 16 * page_bytes;

struct Fiber {
#ifdef ENGINE_UCONTEXT
  ucontext_t context;
#else
  void* stack_pointer;
#endif
  char* stack;
  bool idle;
};

#ifdef ENGINE_UCONTEXT

static ucontext_t scheduler_context;

static void fiber_begin(Fiber& fiber, void (*work)()) {
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack;
  fiber.context.uc_stack.ss_size = stack_bytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, work, 0);
}
static void fiber_enter(Fiber& fiber) { swapcontext(&scheduler_context, &fiber.context); }
static void fiber_leave(Fiber& fiber) { swapcontext(&fiber.context, &scheduler_context); }
static void fiber_change(Fiber& from, Fiber& to) { swapcontext(&from.context, &to.context); }

#else

static void* scheduler_stack_pointer;

// Leaves the stack pointer in `*left` and goes on at `entered`. It stands in line and jumps, where a function would
// return: processors foresee jumps, and take returns for those of the calls that they saw last.
static inline __attribute__((always_inline)) void fiber_switch(void** left, void* entered) {
  asm volatile(
      "pushq %%rbp\n\t"
      "leaq 1f(%%rip), %%rax\n\t"
      "pushq %%rax\n\t"
      "movq %%rsp, (%0)\n\t"
      "movq %1, %%rsp\n\t"
      "popq %%rax\n\t"
      "jmpq *%%rax\n"
      "1:\n\t"
      "popq %%rbp"
      : "+D"(left), "+S"(entered)
      :
      : "rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "xmm0", "xmm1", "xmm2",
        "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15", "memory",
        "cc");
}

static void fiber_begin(Fiber& fiber, void (*work)()) {
  // The place of the top differs from stack to stack: at one place, a block's 1024 tops would share a few cache lines.
  size_t colour = (size_t)fiber.stack / (stack_bytes + page_bytes) % 16 * 192;
  void** top = (void**)(fiber.stack + stack_bytes - 64 - colour);
  top[0] = (void*)work;  // where the jump goes
  fiber.stack_pointer = top;
}
static inline __attribute__((always_inline)) void fiber_enter(Fiber& fiber) {
  fiber_switch(&scheduler_stack_pointer, fiber.stack_pointer);
}
static inline __attribute__((always_inline)) void fiber_leave(Fiber& fiber) {
  fiber_switch(&fiber.stack_pointer, scheduler_stack_pointer);
}
static inline __attribute__((always_inline)) void fiber_change(Fiber& from, Fiber& to) {
  fiber_switch(&from.stack_pointer, to.stack_pointer);
}

#endif

// A page below the stack is left without access: a stack that grows too far ends the program, and not its neighbour.
static void fiber_stack(Fiber& fiber) {
  void* memory = mmap(nullptr, stack_bytes + page_bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, page_bytes, PROT_NONE) != 0) {
    perror("gpu double: a stack for a kernel's thread");
    abort();
  }
  fiber.stack = (char*)memory + page_bytes;
}

}  // namespace engine
