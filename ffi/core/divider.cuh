// Exact quotients of numbers below 2^63 without a division.
#pragma once

#include <algorithm>
#include <cstdint>

namespace jax_baracuda {

struct Divider {
  uint64_t divisor;
  uint64_t reciprocal;
  uint32_t short_divisor;  // for numbers below 2^31
  uint32_t short_reciprocal;

  Divider() = default;
  explicit Divider(int64_t by)
      : divisor(by > 1 ? by : 1),
        reciprocal(~uint64_t{0} / divisor),
        short_divisor(static_cast<uint32_t>(std::min<uint64_t>(divisor, 0xffffffffu))),
        short_reciprocal(0xffffffffu / short_divisor) {}

  // Products with rounded reciprocals are at most one too low.
  __device__ __forceinline__ int64_t Quotient(int64_t number) const {
    if (__builtin_expect(number >> 31 == 0, true)) {
      const uint32_t n = static_cast<uint32_t>(number), quotient = __umulhi(n, short_reciprocal);
      return quotient + (n - quotient * short_divisor >= short_divisor ? 1u : 0u);
    }
    const uint64_t n = static_cast<uint64_t>(number), quotient = __umul64hi(n, reciprocal);
    return static_cast<int64_t>(quotient + (n - quotient * divisor >= divisor ? 1 : 0));
  }
};

}  // namespace jax_baracuda
