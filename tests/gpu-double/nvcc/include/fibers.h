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

#else

static void* scheduler_stack_pointer;

// Saves what the calling convention asks a function to keep, leaves the stack pointer in `*left`, goes on at `entered`.
extern "C" void gpu_double_switch(void** left, void* entered);
asm(R"(
  .pushsection .text
  .globl gpu_double_switch
  .hidden gpu_double_switch
  .type gpu_double_switch, @function
gpu_double_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size gpu_double_switch, .-gpu_double_switch
  .popsection
)");

static void fiber_begin(Fiber& fiber, void (*work)()) {
  // The place of the top differs from stack to stack: at one place, a block's 1024 tops would share a few cache lines.
  size_t colour = (size_t)fiber.stack / (stack_bytes + page_bytes) % 16 * 192;
  void** top = (void**)(fiber.stack + stack_bytes - 64 - colour);
  top[6] = (void*)work;  // where `ret` goes, above six registers
  fiber.stack_pointer = top;
}
static void fiber_enter(Fiber& fiber) { gpu_double_switch(&scheduler_stack_pointer, fiber.stack_pointer); }
static void fiber_leave(Fiber& fiber) { gpu_double_switch(&fiber.stack_pointer, scheduler_stack_pointer); }

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
