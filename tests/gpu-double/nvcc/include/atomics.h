// Threads of the double change only where they wait: a plain read and write is atomic. The order in which they come is
// not promised, and a seed changes it.
#pragma once

namespace engine {
template <class T, class Change> static inline T atomic(T* at, Change change) {
  T old = *at;
  *at = change(old);
  return old;
}
// Keeps an operand from choosing the type, so that `atomicAdd(&unsigned, 1)` is one on unsigned.
template <class T> struct Same { using Type = T; };
template <class T> using Operand = typename Same<T>::Type;
}  // namespace engine

template <class T> T atomicAdd(T* at, engine::Operand<T> x) {
  return engine::atomic(at, [&](T old) -> T { return old + x; });
}
template <class T> T atomicSub(T* at, engine::Operand<T> x) {
  return engine::atomic(at, [&](T old) -> T { return old - x; });
}
template <class T> T atomicExch(T* at, engine::Operand<T> x) {
  return engine::atomic(at, [&](T) -> T { return x; });
}
template <class T> T atomicMin(T* at, engine::Operand<T> x) {
  return engine::atomic(at, [&](T old) -> T { return x < old ? x : old; });
}
template <class T> T atomicMax(T* at, engine::Operand<T> x) {
  return engine::atomic(at, [&](T old) -> T { return old < x ? x : old; });
}
template <class T> T atomicAnd(T* at, engine::Operand<T> x) {
  return engine::atomic(at, [&](T old) -> T { return old & x; });
}
template <class T> T atomicOr(T* at, engine::Operand<T> x) {
  return engine::atomic(at, [&](T old) -> T { return old | x; });
}
template <class T> T atomicXor(T* at, engine::Operand<T> x) {
  return engine::atomic(at, [&](T old) -> T { return old ^ x; });
}
template <class T> T atomicCAS(T* at, engine::Operand<T> expected, engine::Operand<T> x) {
  return engine::atomic(at, [&](T old) -> T { return old == expected ? x : old; });
}
static inline unsigned atomicInc(unsigned* at, unsigned last) {
  return engine::atomic(at, [&](unsigned old) { return old >= last ? 0 : old + 1; });
}
static inline unsigned atomicDec(unsigned* at, unsigned first) {
  return engine::atomic(at, [&](unsigned old) { return old == 0 || old > first ? first : old - 1; });
}
