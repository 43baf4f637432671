// Shared by CPU kernels: attributes of functions and loops, memory, and stores.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <type_traits>

#include "ffi/core/alignment.h"
#include "ffi/core/copy.h"
#include "ffi/core/element_type.h"
#include "ffi/core/huge_pages.h"
#include "ffi/core/integers.h"
#include "ffi/core/parallel_for.h"

#define JB_INLINE __attribute__((always_inline)) inline

// Precedes a loop with independent iterations. "unroll 1": GCC would otherwise unroll a loop over few features first,
// and then not vectorise it.
#define JB_VECTORIZE _Pragma("GCC ivdep") _Pragma("GCC unroll 1")

namespace jax_baracuda {

// If `number` is in kKnown, calls body with it as a compile-time constant. Otherwise returns false and calls nothing.
template <int64_t... kKnown, typename Body>
JB_INLINE bool DispatchConstant(int64_t number, const Body& body) {
  return ((number == kKnown && (body(std::integral_constant<int64_t, kKnown>{}), true)) || ...);
}

struct FreeMemory {
  void operator()(void* memory) const { std::free(memory); }
};
template <typename T>
using Memory = std::unique_ptr<T[], FreeMemory>;

// Uninitialised memory from a cache line on; nullptr if the allocation fails.
template <typename T>
Memory<T> Allocate(int64_t count) {
  static_assert(std::is_trivially_default_constructible_v<T> && std::is_trivially_destructible_v<T>);
  const int64_t bytes = RoundUp(std::max<int64_t>(1, count) * static_cast<int64_t>(sizeof(T)), kCacheLine);
  T* const memory = static_cast<T*>(std::aligned_alloc(kCacheLine, static_cast<size_t>(bytes)));
  if (memory != nullptr) AdviseHugePages(memory, bytes);
  return Memory<T>(memory);
}

// All bits zero, which is +0 for floating types.
template <typename T>
JB_INLINE void WriteZeros(T* to, int64_t count) {
  std::memset(static_cast<void*>(to), 0, static_cast<size_t>(count) * sizeof(T));
}

// The same for a whole result, in parallel.
inline void WriteZeroBytes(ffi::ThreadPool& pool, void* to, int64_t bytes) {
  ForEachRange(pool, bytes, 2 * bytes,
               [&](int64_t begin, int64_t end) { WriteZeros(static_cast<char*>(to) + begin, end - begin); });
}

inline void CopyArray(ffi::ThreadPool& pool, const Copy& copy) {
  ForEachRange(pool, copy.bytes, 2 * copy.bytes, [&](int64_t begin, int64_t end) {
    std::memcpy(static_cast<char*>(copy.to) + begin, static_cast<const char*>(copy.from) + begin,
                static_cast<size_t>(end - begin));
  });
}

// Stores a number as a T. It assigns only the bits: assigning a Float16 or BFloat16 object keeps GCC from vectorising.
template <typename T>
JB_INLINE void Store(ComputeType<T> value, T* to) {
  if constexpr (std::is_same_v<T, ComputeType<T>>) {
    *to = value;
  } else {
    to->bits = static_cast<T>(value).bits;
  }
}

}  // namespace jax_baracuda
