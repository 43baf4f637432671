// The scalar arithmetic of segment_prod and its gradient, shared by the CPU and the CUDA kernels.
//
// A product is kept as mantissa * 2^exponent, so that it neither overflows nor underflows on the way, and zeros,
// infinities and NaN are counted apart. Then the product of all members but one, which the gradient needs, is a
// division that is always exact to rounding, whatever the member.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "ffi/core/bit_cast.h"
#include "ffi/core/element_type.h"
#include "ffi/segment/problem.h"

namespace jax_baracuda::segment {

// C is float or double.
template <typename C>
struct FloatingFormat {
  static constexpr int kMantissaBits = sizeof(C) == 4 ? 23 : 52;
  static constexpr int kExponentBias = sizeof(C) == 4 ? 127 : 1023;
  static constexpr int kExponentMask = 2 * kExponentBias + 1;  // also the exponent field of infinities and NaN
};

// 2^exponent, for an exponent of normal numbers.
template <typename C>
JB_HOST_DEVICE C PowerOfTwo(int exponent) {
  using Format = FloatingFormat<C>;
  const BitsOf<C> bits = static_cast<BitsOf<C>>(exponent + Format::kExponentBias) << Format::kMantissaBits;
  return BitCast<C>(bits);
}

// For code that runs once for each cell or less: inlined, it would crowd the loops over rows out of a GPU's instruction
// cache.
#ifdef __CUDACC__
#define JB_RARE __host__ __device__ __noinline__
#else
#define JB_RARE inline
#endif

// mantissa * 2^exponent, rounded once.
template <typename C>
JB_RARE C Scale(C mantissa, int32_t exponent) {
  constexpr int kBias = FloatingFormat<C>::kExponentBias;
  if (exponent >= 1 - kBias && exponent <= kBias) return mantissa * PowerOfTwo<C>(exponent);
  return std::scalbn(mantissa, exponent);
}

// A finite number other than zero as mantissa in [1, 2), with its sign, and exponent.
template <typename C>
JB_HOST_DEVICE C SplitExponent(C value, int32_t* exponent) {
  using Format = FloatingFormat<C>;
  int32_t offset = -Format::kExponentBias;
  BitsOf<C> bits = BitCast<BitsOf<C>>(value);
  int32_t field = static_cast<int32_t>(bits >> Format::kMantissaBits) & Format::kExponentMask;
  if (field == 0) {  // subnormal
    value *= PowerOfTwo<C>(Format::kMantissaBits + 1);
    bits = BitCast<BitsOf<C>>(value);
    field = static_cast<int32_t>(bits >> Format::kMantissaBits) & Format::kExponentMask;
    offset -= Format::kMantissaBits + 1;
  }
  *exponent = field + offset;
  constexpr BitsOf<C> kField = static_cast<BitsOf<C>>(Format::kExponentMask) << Format::kMantissaBits;
  constexpr BitsOf<C> kOne = static_cast<BitsOf<C>>(Format::kExponentBias) << Format::kMantissaBits;
  return BitCast<C>((bits & ~kField) | kOne);
}

// The product of floating numbers. The mantissa has the sign of all members; its magnitude, in [1, 2), and the exponent
// are those of the members that are neither zero nor infinite nor NaN, which `packed` counts up to 2 of each kind.
template <typename C>
struct Product {
  C mantissa = C{1};
  int32_t packed = 0;  // exponent * 64, plus 16 * NaNs, plus 4 * infinities, plus zeros
};

enum ProductClass : int32_t { kZero = 0, kInfinity = 2, kNan = 4, kOrdinary = -1 };  // the bits of the count

template <typename C>
JB_HOST_DEVICE ProductClass ClassOf(C value) {
  if (value != value) return kNan;
  if (value == C{0}) return kZero;
  return value - value == C{0} ? kOrdinary : kInfinity;
}

JB_HOST_DEVICE int32_t CountOf(int32_t packed, ProductClass kind) { return (packed >> kind) & 3; }

JB_HOST_DEVICE int32_t AddExponent(int32_t packed, int32_t exponent) {
  // Beyond this bound every result is zero or infinite anyway, whatever one more or less member does.
  // The room above it is that of a few members more whose exponents are added without a look at it.
  constexpr int32_t kMax = (1 << 25) - (1 << 17);
  const int32_t sum = (packed >> 6) + exponent;
  const int32_t clamped = sum > kMax ? kMax : sum < -kMax ? -kMax : sum;
  return clamped * 64 + (packed & 63);
}

JB_HOST_DEVICE int32_t AddCount(int32_t packed, ProductClass kind, int32_t count) {
  const int32_t before = CountOf(packed, kind), after = before + count;
  return packed + (((after > 2 ? 2 : after) - before) << kind);
}

// Brings a mantissa of magnitude in [1, 4) back to [1, 2).
template <typename C>
JB_HOST_DEVICE void NormalizeMantissa(Product<C>& product) {
  const bool is_large = std::fabs(product.mantissa) >= C{2};
  product.mantissa *= is_large ? C{0.5} : C{1};
  product.packed = AddExponent(product.packed, is_large ? 1 : 0);
}

template <typename C>
JB_HOST_DEVICE void MultiplyBy(Product<C>& product, C value) {
  const ProductClass kind = ClassOf(value);
  if (kind == kOrdinary) {
    int32_t exponent;
    product.mantissa *= SplitExponent(value, &exponent);
    const bool is_large = std::fabs(product.mantissa) >= C{2};
    product.mantissa *= is_large ? C{0.5} : C{1};
    product.packed = AddExponent(product.packed, exponent + (is_large ? 1 : 0));
  } else {
    product.mantissa = std::signbit(value) ? -product.mantissa : product.mantissa;
    product.packed = AddCount(product.packed, kind, 1);
  }
}

template <typename C>
JB_HOST_DEVICE void MergeProduct(Product<C>& product, const Product<C>& other) {
  product.mantissa *= other.mantissa;
  product.packed = AddExponent(product.packed, other.packed >> 6);
  for (const ProductClass kind : {kZero, kInfinity, kNan}) {
    product.packed = AddCount(product.packed, kind, CountOf(other.packed, kind));
  }
  NormalizeMantissa(product);
}

// The number that a product stands for.
template <typename C>
JB_RARE C ProductValue(Product<C> product) {
  const bool has_zero = CountOf(product.packed, kZero) != 0, has_infinity = CountOf(product.packed, kInfinity) != 0;
  if (CountOf(product.packed, kNan) != 0 || (has_zero && has_infinity)) return std::numeric_limits<C>::quiet_NaN();
  if (has_zero) return std::copysign(C{0}, product.mantissa);
  if (has_infinity) return std::copysign(std::numeric_limits<C>::infinity(), product.mantissa);
  return Scale(product.mantissa, product.packed >> 6);
}

// The product of all members but one, whose value is `value`, and of `factor`, which may bring it back into range.
template <typename C>
JB_RARE C ProductOfOthersTimes(Product<C> others, C value, C factor) {
  const ProductClass kind = ClassOf(value);
  if (kind == kOrdinary) {
    int32_t exponent;
    others.mantissa /= SplitExponent(value, &exponent);
    others.packed = AddExponent(others.packed, -exponent);
  } else {
    // A count of two stands for two or more, of which at least one is left, and one of a kind is as good as more.
    const int32_t count = CountOf(others.packed, kind);
    others.mantissa = std::signbit(value) ? -others.mantissa : others.mantissa;
    if (count == 1) others.packed = AddCount(others.packed, kind, -1);
  }
  MultiplyBy(others, factor);
  return ProductValue(others);
}

}  // namespace jax_baracuda::segment
