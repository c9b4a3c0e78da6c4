// What a kernel's signature says: the sizes of its parameters, and which of them are pointers that it reads or writes.
#pragma once
#include <type_traits>
#include "engine.h"

namespace engine {

// A type that kernels take by value: `GPU_DOUBLE_VALUE(Type)` says that it has no pointers, `GPU_DOUBLE_POINTERS(Type,
// {offset, count, access}, ...)` where they lie. A class of which nothing is said is refused: races through it would be
// missed.
struct Field { uint32_t offset, count; Access access; };
template <class T, class = void> struct Value { static constexpr bool known = false; };
template <class T> struct Value<T, std::enable_if_t<std::is_arithmetic_v<T> || std::is_enum_v<T>>> {
  static constexpr bool known = true;
  static constexpr uint32_t count = 0;
  static constexpr Field fields[1] = {};
};
template <class T> struct Value<T*> {
  static_assert(!std::is_pointer_v<T>, "a kernel's parameter that points at pointers: pass a struct of pointers by "
                                       "value, or the double can't see what is read and written");
  static constexpr bool known = true;
  static constexpr uint32_t count = 1;
  static constexpr Field fields[1] = {{0, 1, std::is_const_v<T> ? Read : Write}};
};

template <auto kernel> struct Signature;
template <class... Parameters, void (*kernel)(Parameters...)> struct Signature<kernel> {
  static_assert((Value<Parameters>::known && ...),
                "a kernel's parameter is a class of which the double does not know whether it has pointers: say so "
                "with GPU_DOUBLE_VALUE(Type) or GPU_DOUBLE_POINTERS(Type, {offset, count, engine::Read}, ...)");
  static constexpr uint32_t parameters = sizeof...(Parameters);
  static constexpr uint32_t pointers = (Value<Parameters>::count + ... + 0);
  // One more than there are: an array has at least one.
  struct Table { uint32_t sizes[parameters + 1]; Pointers pointer[pointers + 1]; };
  template <class T> static constexpr void add(Table& table, uint32_t& parameter, uint32_t& pointer) {
    for (uint32_t i = 0; i < Value<T>::count; i++) {
      Field field = Value<T>::fields[i];
      table.pointer[pointer++] = {parameter, field.offset, field.count, field.access};
    }
    table.sizes[parameter++] = sizeof(T);
  }
  static constexpr Table make() {
    Table table = {};
    [[maybe_unused]] uint32_t parameter = 0, pointer = 0;
    (add<Parameters>(table, parameter, pointer), ...);
    return table;
  }
  static constexpr Table table = make();

  template <size_t... I> static void call(void** given, std::index_sequence<I...>) {
    kernel(*(Parameters*)given[I]...);
  }
  // Threads of a block, until all are started.
  static void threads(void** given) {
    while (started < engine::threads) {
      begin_thread();
      call(given, std::index_sequence_for<Parameters...>{});
      finished++;
    }
  }
};

template <auto which> constexpr Kernel describe(const char* name) {
  using S = Signature<which>;
  return {name, S::parameters, S::pointers, S::table.sizes, S::table.pointer, S::threads};
}

}  // namespace engine

#define GPU_DOUBLE_VALUE(...) \
  template <> struct engine::Value<__VA_ARGS__> { \
    static constexpr bool known = true; \
    static constexpr uint32_t count = 0; \
    static constexpr Field fields[1] = {}; \
  };
#define GPU_DOUBLE_POINTERS(Type, ...) \
  template <> struct engine::Value<Type> { \
    static constexpr bool known = true; \
    static constexpr Field fields[] = {__VA_ARGS__}; \
    static constexpr uint32_t count = sizeof fields / sizeof *fields; \
  };
