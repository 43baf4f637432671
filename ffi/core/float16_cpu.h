// Converts arrays of float16 to float32 and back with the F16C instructions. The conversions of class Float16 vectorise
// on every processor, but are several times slower. GCC does not use F16C by itself in functions compiled for several
// instruction sets (cpu_clones.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "ffi/core/cpu_kernel.h"
#include "ffi/core/element_type.h"

namespace jax_baracuda {

void Widen(const Float16* from, int64_t count, float* to);
void Widen(const BFloat16* from, int64_t count, float* to);

// Adds `from` to `sums`, element by element.
void AddWidened(const Float16* from, int64_t count, float* sums);

// Rounds to nearest, ties to even.
void Narrow(const float* from, int64_t count, Float16* to);
void Narrow(const float* from, int64_t count, BFloat16* to);

// Other types are their own compute type.
template <typename C>
void Widen(const C* from, int64_t count, C* to) {
  std::copy_n(from, count, to);
}
template <typename C>
void Narrow(const C* from, int64_t count, C* to) {
  std::copy_n(from, count, to);
}

// Whether converting whole arrays of this type is faster than converting single elements.
template <typename T>
inline constexpr bool kIsWidenedAtOnce = std::is_same_v<T, Float16>;

inline constexpr int64_t kWidenedAtOnce = 512;

// Calls body(begin, count, numbers) for consecutive chunks of an array. float16 is converted to float, chunk by chunk;
// any other type is passed unconverted as one chunk.
template <typename T, typename Body>
JB_INLINE void ForEachPart(const T* values, int64_t count, const Body& body) {
  if constexpr (kIsWidenedAtOnce<T>) {
    float numbers[kWidenedAtOnce];
    for (int64_t begin = 0; begin < count; begin += kWidenedAtOnce) {
      const int64_t part = std::min(count - begin, kWidenedAtOnce);
      Widen(values + begin, part, numbers);
      body(begin, part, static_cast<const float*>(numbers));
    }
  } else {
    body(int64_t{0}, count, values);
  }
}

// Adds numbers of any type to sums in their ComputeType or in double.
template <typename T, typename C>
JB_INLINE void AddNumbers(const T* numbers, int64_t count, C* sums) {
  if constexpr (kIsWidenedAtOnce<T> && std::is_same_v<C, ComputeType<T>>) {
    AddWidened(numbers, count, sums);
  } else {
    ForEachPart(numbers, count, [&](int64_t begin, int64_t part, const auto* from) __attribute__((always_inline)) {
      C* const to = sums + begin;
      JB_VECTORIZE
      for (int64_t i = 0; i < part; ++i) to[i] += static_cast<ComputeType<T>>(from[i]);
    });
  }
}

// Calls body with the array; a float16 array of at most kWidenedAtOnce elements is converted to float first.
template <typename T, typename Body>
JB_INLINE void WithNumbers(const T* values, int64_t count, const Body& body) {
  if constexpr (kIsWidenedAtOnce<T>) {
    if (count <= kWidenedAtOnce) {
      float numbers[kWidenedAtOnce];
      Widen(values, count, numbers);
      return body(static_cast<const float*>(numbers));
    }
  }
  body(values);
}

// As ForEachPart, for two arrays of equal length: body(begin, count, x, y).
template <typename T, typename Body>
JB_INLINE void ForEachPart(const T* x_values, const T* y_values, int64_t count, const Body& body) {
  ForEachPart(x_values, count, [&](int64_t x_begin, int64_t x_count, const auto* x) __attribute__((always_inline)) {
    ForEachPart(y_values + x_begin, x_count, [&](int64_t, int64_t part, const auto* y) __attribute__((always_inline)) {
      body(x_begin, part, x, y);
    });
  });
}

// Stores compute(i) for each i below `count`.
template <typename T, typename Compute>
JB_INLINE void StoreEach(int64_t count, T* to, const Compute& compute) {
  if constexpr (kIsWidenedAtOnce<T>) {
    float numbers[kWidenedAtOnce];
    for (int64_t begin = 0; begin < count; begin += kWidenedAtOnce) {
      const int64_t part = std::min(count - begin, kWidenedAtOnce);
      JB_VECTORIZE
      for (int64_t i = 0; i < part; ++i) numbers[i] = compute(begin + i);
      Narrow(numbers, part, to + begin);
    }
  } else {
    JB_VECTORIZE
    for (int64_t i = 0; i < count; ++i) Store(compute(i), to + i);
  }
}

}  // namespace jax_baracuda
