// XLA runs CPU code with subnormal numbers treated as zero, which is faster for some arithmetic but makes numbers that
// differ compare equal. Kernels that compare and select are no slower with them.
#pragma once

#include <cstdint>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace jax_baracuda {

// While an object of this class lives, its thread computes with subnormal numbers as IEEE 754 has them.
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
