// Exponentials and reciprocals of softmax on the GPU.
//
// Sums of exp(x) need no maximum if they neither overflow nor underflow, and most do not: floats are scaled so that the
// logarithm of a sum may lie between about -34 and 44. Kernels compute these sums first, and sums with maxima only if
// one is out of range.
#pragma once

#include <cstdint>

#include "ffi/segment/softmax/arithmetic.h"

namespace jax_baracuda::segment {

template <typename C>
inline constexpr int kExpScale = sizeof(C) == 4 ? 56 : 0;

// exp(x) * 2^kExpScale, with the error of expf.
__device__ __forceinline__ float ScaledExp(float x) {
  // Computes 2^power * 2^fraction. The low bits of `biased` hold the power with its bias. Outside the range of powers,
  // the fraction takes the rest, and 2^fraction is 0, infinite or NaN.
  constexpr float kRange = 252, kLowest = 182, kRound = 12582912 + 1;
  const float in_range = __saturatef(fmaf(x, 1.4426950408889634f / kRange, kLowest / kRange));
  const float biased = fmaf(in_range, kRange, kRound);
  static_assert(kLowest + 1 == kExpScale<float> + 127);
  const float power = biased - (kRound + kLowest);
  float fraction = fmaf(x, 1.4426950216293335f, -power);
  fraction = fmaf(x, 1.925963033500999e-8f, fraction);
  float root;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(fraction));
  return root * __int_as_float(__float_as_int(biased) << 23);
}
__device__ __forceinline__ double ScaledExp(double x) { return exp(x); }

// Whether a sum of ScaledExp is as accurate as one of exp(x - maximum), and safe as a divisor.
__device__ __forceinline__ bool IsInRange(float sum) { return sum >= 0x1p6f && sum <= 0x1p120f; }
__device__ __forceinline__ bool IsInRange(double sum) { return sum >= 0x1p-64 && sum <= 0x1p1000; }

// Checks IsInRange for many sums.
template <typename C>
struct RangeCheck {
  bool all_in_range = true;

  __device__ __forceinline__ void Add(C sum) { all_in_range &= IsInRange(sum); }
  __device__ __forceinline__ bool AllInRange() const { return all_in_range; }
};
template <>
struct RangeCheck<float> {
  // Floats that are not negative have the order of their bits. NaN is above them.
  static constexpr uint32_t kMin = (127u + 6) << 23, kMax = (127u + 120) << 23;
  uint32_t max_above = 0;

  __device__ __forceinline__ void Add(float sum) {
    max_above = __viaddmax_u32(static_cast<uint32_t>(__float_as_int(sum)), 0u - kMin, max_above);
  }
  __device__ __forceinline__ bool AllInRange() const { return max_above <= kMax - kMin; }
};

// The sum times 2^-kExpScale.
template <typename C>
__device__ __forceinline__ C UnscaledExpSum(C sum) {
  return sizeof(C) == 4 ? sum * static_cast<C>(0x1p-56) : sum;
}

__device__ __forceinline__ float Reciprocal(float x) {
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(x));
  return reciprocal;
}
__device__ __forceinline__ double Reciprocal(double x) { return 1.0 / x; }

// Removes rounding errors above 1; keeps NaN.
template <typename C>
__device__ __forceinline__ C AtMostOne(C probability) {
  return probability > C{1} ? C{1} : probability;
}

}  // namespace jax_baracuda::segment
