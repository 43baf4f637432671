// Exact quotients of non-negative integers without a division.
#pragma once

#include <algorithm>
#include <cstdint>

namespace jax_baracuda {

// For numbers below 2^31.
struct ShortDivider {
  uint32_t divisor;
  uint32_t reciprocal;

  ShortDivider() = default;
  explicit ShortDivider(uint64_t by)
      : divisor(static_cast<uint32_t>(std::clamp<uint64_t>(by, 1, 0xffffffffu))), reciprocal(0xffffffffu / divisor) {}

  // The product with the rounded-down reciprocal is at most one too low; the last line corrects that.
  __device__ __forceinline__ uint32_t Quotient(uint32_t number) const {
    const uint32_t quotient = __umulhi(number, reciprocal);
    return quotient + (number - quotient * divisor >= divisor ? 1u : 0u);
  }

  __device__ __forceinline__ uint32_t Remainder(uint32_t number, uint32_t quotient) const {
    return number - quotient * divisor;
  }
};

// For numbers below 2^63.
struct Divider {
  uint64_t divisor;
  uint64_t reciprocal;
  ShortDivider of_short;

  Divider() = default;
  explicit Divider(int64_t by)
      : divisor(static_cast<uint64_t>(std::max<int64_t>(by, 1))),
        reciprocal(~uint64_t{0} / divisor),
        of_short(divisor) {}

  __device__ __forceinline__ int64_t Quotient(int64_t number) const {
    if (__builtin_expect(number >> 31 == 0, true)) return of_short.Quotient(static_cast<uint32_t>(number));
    const uint64_t n = static_cast<uint64_t>(number), quotient = __umul64hi(n, reciprocal);
    return static_cast<int64_t>(quotient + (n - quotient * divisor >= divisor ? 1 : 0));
  }
};

}  // namespace jax_baracuda
