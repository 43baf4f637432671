// XLA runs CPU code with subnormal numbers flushed to zero. That speeds up some arithmetic, but distinct subnormals
// then compare equal. Kernels that compare and select are as fast with subnormals enabled.
#pragma once

#include <cstdint>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace jax_baracuda {

// Enables IEEE 754 subnormal numbers in its thread while the object lives.
class ScopedSubnormals {
 public:
#if defined(__SSE__)
  ScopedSubnormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ & ~kFlushToZeroAndDenormalsAreZero); }
  ~ScopedSubnormals() { _mm_setcsr(saved_); }

 private:
  static constexpr unsigned kFlushToZeroAndDenormalsAreZero = 0x8040;
  unsigned saved_;
#elif defined(__aarch64__)
  ScopedSubnormals() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(saved_ & ~kFlushToZero));
  }
  ~ScopedSubnormals() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  static constexpr uint64_t kFlushToZero = uint64_t{1} << 24;
  uint64_t saved_;
#else
  ScopedSubnormals() {}
#endif

 public:
  ScopedSubnormals(const ScopedSubnormals&) = delete;
  ScopedSubnormals& operator=(const ScopedSubnormals&) = delete;
};

}  // namespace jax_baracuda
