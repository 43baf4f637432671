// XLA runs CPU code with subnormal numbers flushed to zero. That speeds up some arithmetic, but distinct subnormals
// then compare equal. Kernels that compare and select are as fast with subnormals enabled. Products are faster with
// zeros, and then look for lost numbers.
#pragma once

#include <cstdint>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace jax_baracuda {

#if defined(__SSE__) || defined(__aarch64__)
inline constexpr bool kCanFlushSubnormals = true;
#else
inline constexpr bool kCanFlushSubnormals = false;
#endif

// Decides in its thread, while the object lives, whether subnormal operands and results are zeros, or IEEE 754 numbers.
template <bool kAreZeros>
class ScopedSubnormalMode {
 public:
#if defined(__SSE__)
  ScopedSubnormalMode() : saved_(_mm_getcsr()) {
    _mm_setcsr(kAreZeros ? saved_ | kFlushToZeroAndDenormalsAreZero : saved_ & ~kFlushToZeroAndDenormalsAreZero);
  }
  ~ScopedSubnormalMode() { _mm_setcsr(saved_); }

 private:
  static constexpr unsigned kFlushToZeroAndDenormalsAreZero = 0x8040;
  unsigned saved_;
#elif defined(__aarch64__)
  ScopedSubnormalMode() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(kAreZeros ? saved_ | kFlushToZero : saved_ & ~kFlushToZero));
  }
  ~ScopedSubnormalMode() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  static constexpr uint64_t kFlushToZero = uint64_t{1} << 24;
  uint64_t saved_;
#else
  ScopedSubnormalMode() {}
#endif

 public:
  ScopedSubnormalMode(const ScopedSubnormalMode&) = delete;
  ScopedSubnormalMode& operator=(const ScopedSubnormalMode&) = delete;
};

using ScopedSubnormals = ScopedSubnormalMode<false>;
using ScopedZerosForSubnormals = ScopedSubnormalMode<true>;

}  // namespace jax_baracuda
