// The exponential of the CPU kernels, in a form that compilers vectorise.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "ffi/core/bit_cast.h"

namespace jax_baracuda {

// exp(x) for x <= 0 or NaN. The error is at most 1.01 ulp for every x. Vectorises.
__attribute__((always_inline)) inline float Exp(float x) {
  constexpr float kShift = 0x1.8p23f;               // adding it leaves the rounded integer in the lowest bits
  const float clamped = x < -104.0f ? -104.0f : x;  // exp(-104) rounds to 0
  const float shifted = clamped * 0x1.715476p0f + kShift, n = shifted - kShift;
  const float r = (clamped - n * 0x1.63p-1f) - n * -0x1.bd0106p-13f;  // ln 2 as two terms; n times the first is exact
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  // 2^n as two factors, so that only the last multiplication rounds to a subnormal number.
  const auto power = [](int32_t e) __attribute__((always_inline)) {
    return BitCast<float>(static_cast<uint32_t>(e + 127) << 23);
  };
  const int32_t bits = BitCast<int32_t>(shifted);
  const int32_t exponent = (bits & 0xffff) - ((bits & 0x8000) << 1), half = exponent >> 1;
  return p * power(half) * power(exponent - half);
}

__attribute__((always_inline)) inline double Exp(double x) { return std::exp(x); }

namespace internal {

// Clamps x to [least, most]; `least` is negative, `most` positive. A NaN becomes one of the bounds. It compares bits:
// positive floats are ordered like their bits, negative ones in reverse. An integer minimum is one instruction; a float
// minimum that handles NaN takes a comparison and a selection.
template <typename Signed, typename Unsigned, typename Float>
__attribute__((always_inline)) inline Float Clamp(Float x, Float least, Float most) {
  const Signed below = std::min(BitCast<Signed>(x), BitCast<Signed>(most));
  return BitCast<Float>(std::min(static_cast<Unsigned>(below), BitCast<Unsigned>(least)));
}

}  // namespace internal

// exp(x) with an error of at most 2 ulp: infinity on overflow, 0 if the result would be subnormal, unspecified for NaN.
// Vectorises, and needs fewer instructions than Exp.
__attribute__((always_inline)) inline float ExpOrZero(float x) {
  constexpr float kShift = 0x1.8p23f + 126.0f;  // adding it leaves the rounded integer plus 126 in the lowest bits
  const float clamped = internal::Clamp<int32_t, uint32_t>(x, -87.0f, 89.0f);
  const float shifted = clamped * 0x1.715476p0f + kShift, n = shifted - kShift;
  const float r = (clamped - n * 0x1.63p-1f) - n * -0x1.bd0106p-13f;  // ln 2 as two terms; n times the first is exact
  // The result is 2 * exp(r) * 2^(n - 1): 2^(n - 1) is finite for every n here.
  float p = 0x1.6d758cp-9f;
  p = p * r + 0x1.127p-6f;
  p = p * r + 0x1.5554acp-4f;
  p = p * r + 0x1.555404p-2f;
  p = p * r + 1.0f;
  p = p * r + 2.0f;
  p = p * r + 2.0f;
  return p * BitCast<float>(BitCast<uint32_t>(shifted) << 23);
}

__attribute__((always_inline)) inline double ExpOrZero(double x) {
  constexpr double kShift = 0x1.8p52 + 1022.0;
  const double clamped = internal::Clamp<int64_t, uint64_t>(x, -708.0, 710.0);
  const double shifted = clamped * 0x1.71547652b82fep0 + kShift, n = shifted - kShift;
  const double r = (clamped - n * 0x1.62e42fefap-1) - n * 0x1.cf79abc9e3b3ap-40;
  double p = 0x1.af635e4f6b5eep-25;
  p = p * r + 0x1.28b43a93fe57ap-21;
  p = p * r + 0x1.71ddf5514be0cp-18;
  p = p * r + 0x1.a01991731e6fap-15;
  p = p * r + 0x1.a01a01b150ad2p-12;
  p = p * r + 0x1.6c16c1881156bp-9;
  p = p * r + 0x1.111111110f205p-6;
  p = p * r + 0x1.555555554f067p-4;
  p = p * r + 0x1.555555555555ap-2;
  p = p * r + 0x1.0000000000011p0;
  p = p * r + 2.0;
  p = p * r + 2.0;
  return p * BitCast<double>(BitCast<uint64_t>(shifted) << 52);
}

}  // namespace jax_baracuda
