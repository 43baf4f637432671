// Dividing one scratch buffer into aligned parts.
#pragma once

#include <cstdint>

#include "ffi/core/integers.h"

namespace jax_baracuda {

inline constexpr int64_t kScratchAlignment = 256;

// The scratch bytes that a ScratchCarver needs for parts of these sizes.
struct ScratchSizes {
  int64_t total = 0;

  void Add(int64_t bytes) { total += RoundUp(bytes, kScratchAlignment); }
};

class ScratchCarver {
 public:
  explicit ScratchCarver(void* scratch) : next_(static_cast<char*>(scratch)) {}

  template <typename T>
  T* Take(int64_t count) {
    T* part = reinterpret_cast<T*>(next_);
    next_ += RoundUp(count * static_cast<int64_t>(sizeof(T)), kScratchAlignment);
    return part;
  }

 private:
  char* next_;
};

}  // namespace jax_baracuda
