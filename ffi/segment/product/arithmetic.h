// The scalar arithmetic of segment_prod and its gradient, shared by the CPU and the CUDA kernels. It has no branches,
// so that loops over features vectorise.
//
// A product is kept as mantissa * 2^exponent, so that partial products neither overflow nor underflow. Zeros,
// infinities and NaN are counted separately. So the gradient can compute the product of all members but one by a
// division, which is exact up to rounding for any member.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "ffi/core/bit_cast.h"
#include "ffi/core/host_device.h"

namespace jax_baracuda::segment {

// C is float or double.
template <typename C>
struct FloatingFormat {
  using Bits = std::conditional_t<sizeof(C) == 4, int32_t, int64_t>;
  static constexpr int kMantissaBits = sizeof(C) == 4 ? 23 : 52;
  static constexpr int kExponentBias = sizeof(C) == 4 ? 127 : 1023;
  static constexpr int kExponentMask = 2 * kExponentBias + 1;  // also the exponent field of infinities and NaN
  static constexpr Bits kSign = std::numeric_limits<Bits>::min();
  static constexpr Bits kMantissa = (Bits{1} << kMantissaBits) - 1;
};

template <typename C>
using SignedBits = typename FloatingFormat<C>::Bits;

// 2^exponent, for an exponent of normal numbers.
template <typename C>
JB_ALWAYS_INLINE C PowerOfTwo(SignedBits<C> exponent) {
  using F = FloatingFormat<C>;
  return BitCast<C>(static_cast<BitsOf<C>>(exponent + F::kExponentBias) << F::kMantissaBits);
}

// The exponent field of a number.
template <typename C>
JB_ALWAYS_INLINE SignedBits<C> FieldOf(C value) {
  using F = FloatingFormat<C>;
  return (BitCast<SignedBits<C>>(value) >> F::kMantissaBits) & F::kExponentMask;
}

// The exponent of a normal number: value == MantissaOf(value) * 2^ExponentOf(value).
template <typename C>
JB_ALWAYS_INLINE SignedBits<C> ExponentOf(C value) {
  return FieldOf(value) - FloatingFormat<C>::kExponentBias;
}

// The value with another exponent: keeps the sign and the mantissa.
template <typename C>
JB_ALWAYS_INLINE C WithExponent(C value, SignedBits<C> exponent) {
  using F = FloatingFormat<C>;
  const BitsOf<C> kept = BitCast<BitsOf<C>>(value) & static_cast<BitsOf<C>>(F::kSign | F::kMantissa);
  return BitCast<C>(kept | (static_cast<BitsOf<C>>(exponent + F::kExponentBias) << F::kMantissaBits));
}

// The mantissa, in [1, 2), with the sign.
template <typename C>
JB_ALWAYS_INLINE C MantissaOf(C value) {
  return WithExponent(value, 0);
}

// Members without an exponent are counted, up to 2 of each kind, in the two bits from this one on.
enum ProductClass : int32_t { kZero = 0, kInfinity = 2, kNan = 4 };
inline constexpr int kCountBits = 6;
inline constexpr int kCountMask = (1 << kCountBits) - 1;

// What a number contributes to a product: a factor of the mantissa, and addends of the exponent and the counts.
template <typename C>
struct Factor {
  C mantissa;        // with the sign; 1 for zero, infinity and NaN
  int32_t exponent;  // 0 for zero, infinity and NaN
  int32_t kind;      // ProductClass of zero, infinity and NaN; otherwise kZero
  int32_t is_special;

  JB_ALWAYS_INLINE explicit Factor(C value) {
    using F = FloatingFormat<C>;
    constexpr int kShift = F::kMantissaBits + 1;  // makes subnormal numbers normal
    const SignedBits<C> field = FieldOf(value);
    const C scaled = value * (field == 0 ? PowerOfTwo<C>(kShift) : C{1});
    const SignedBits<C> bits = BitCast<SignedBits<C>>(scaled), scaled_field = FieldOf(scaled);
    const bool special = scaled_field == 0 || scaled_field == F::kExponentMask;
    mantissa = MantissaOf(BitCast<C>(bits & (special ? F::kSign : F::kSign | F::kMantissa)));
    exponent = special ? 0 : static_cast<int32_t>(scaled_field - F::kExponentBias - (field == 0 ? kShift : 0));
    kind = scaled_field == 0 ? kZero : (bits & F::kMantissa) == 0 ? kInfinity : kNan;
    kind = special ? kind : static_cast<int32_t>(kZero);
    is_special = special ? 1 : 0;
  }
};

// The increment of the counts for `count` more members of a kind; each count saturates at 2.
JB_ALWAYS_INLINE int32_t CountsToAdd(int32_t counts, int32_t kind, int32_t count) {
  const int32_t room = 2 - ((counts >> kind) & 3);
  return (count < room ? count : room) << kind;
}

// A partial product: mantissa * 2^exponent. The mantissa is any normal number with the sign of the product. It is the
// product itself while that is normal and all members are ordinary numbers. The exponent has 58 bits, enough for any
// number of members.
template <typename C>
struct Product {
  C mantissa = C{1};
  int64_t packed = 0;  // exponent * 64, plus 16 * NaNs, plus 4 * infinities, plus zeros
};

// The product times another member. The resulting mantissa is in [1, 4).
template <typename C>
JB_ALWAYS_INLINE Product<C> ProductTimes(const Product<C>& product, C value) {
  const Factor<C> factor(value);
  const SignedBits<C> exponent = ExponentOf(product.mantissa) + factor.exponent;
  const int32_t counts = static_cast<int32_t>(product.packed & kCountMask);
  return {MantissaOf(product.mantissa) * factor.mantissa,
          product.packed + exponent * (1 << kCountBits) + CountsToAdd(counts, factor.kind, factor.is_special)};
}

// The product of two partial products. The resulting mantissa is in [1, 4).
template <typename C>
JB_ALWAYS_INLINE Product<C> ProductOfBoth(const Product<C>& a, const Product<C>& b) {
  const SignedBits<C> exponent = ExponentOf(a.mantissa) + ExponentOf(b.mantissa);
  const int32_t counts = static_cast<int32_t>(a.packed & kCountMask);
  int64_t packed = a.packed + (b.packed & ~int64_t{kCountMask}) + exponent * (1 << kCountBits);
  for (const ProductClass kind : {kZero, kInfinity, kNan}) {
    packed += CountsToAdd(counts, kind, static_cast<int32_t>(b.packed >> kind) & 3);
  }
  return {MantissaOf(a.mantissa) * MantissaOf(b.mantissa), packed};
}

// The value of a mantissa of magnitude in [0.5, 4), an exponent and counts, rounded once.
template <typename C, typename Exponent>
JB_ALWAYS_INLINE C ValueOf(C mantissa, Exponent exponent, int32_t counts) {
  using F = FloatingFormat<C>;
  // Scales in two steps, so that only the last one rounds. Outside the bounds the value is zero or infinite.
  constexpr int kMax = F::kExponentBias + F::kMantissaBits + 4;
  const auto bounded = static_cast<SignedBits<C>>(exponent < -kMax ? -kMax : exponent > kMax ? kMax : exponent);
  const SignedBits<C> half = bounded >> 1;
  const C scaled = mantissa * PowerOfTwo<C>(half) * PowerOfTwo<C>(bounded - half);
  constexpr C kInfinite = std::numeric_limits<C>::infinity(), kNoNumber = std::numeric_limits<C>::quiet_NaN();
  const bool has_zero = (counts & (3 << kZero)) != 0, has_infinity = (counts & (3 << kInfinity)) != 0;
  const bool is_nan = (counts & (3 << kNan)) != 0 || (has_zero && has_infinity);
  SignedBits<C> magnitude = BitCast<SignedBits<C>>(scaled) & ~F::kSign;
  magnitude = has_infinity ? BitCast<SignedBits<C>>(kInfinite) : magnitude;
  magnitude = has_zero ? SignedBits<C>{0} : magnitude;
  magnitude = is_nan ? BitCast<SignedBits<C>>(kNoNumber) : magnitude;
  return BitCast<C>(static_cast<SignedBits<C>>(magnitude | (BitCast<SignedBits<C>>(mantissa) & F::kSign)));
}

template <typename C>
JB_ALWAYS_INLINE C ValueOf(const Product<C>& product) {
  return ValueOf(MantissaOf(product.mantissa), (product.packed >> kCountBits) + ExponentOf(product.mantissa),
                 static_cast<int32_t>(product.packed & kCountMask));
}

// The residual of a product for its gradient: mantissa * 2^(units * 2^kUnitBits). It needs no 64-bit integers, which
// JAX may not have. The magnitude of the mantissa is in [2^-half, 2^half), with half of a unit, so that the product of
// two is normal. The exponent reaches +-2^31 for float and +-2^34 for double, which takes at least 14 million members
// of the most extreme magnitude. Beyond it every result is zero or infinite, even with one member more or less.
template <typename C>
struct Residual {
  static constexpr int kUnitBits = sizeof(C) == 4 ? 6 : 9;
  static constexpr int32_t kMaxUnits = (1 << 25) - 64;

  C mantissa;
  int32_t packed;  // units * 64 and the counts

  // From a product. If `Packed` has 32 bits, intermediate values fit in 32 bits too.
  template <typename Packed>
  JB_ALWAYS_INLINE static Residual Of(C mantissa, Packed packed) {
    constexpr int kHalf = 1 << (kUnitBits - 1);
    const Packed exponent = (packed >> kCountBits) + static_cast<Packed>(ExponentOf(mantissa));
    const Packed units = (exponent + kHalf) >> kUnitBits, rest = exponent - units * (1 << kUnitBits);
    const Packed bounded = units < -kMaxUnits ? -kMaxUnits : units > kMaxUnits ? kMaxUnits : units;
    return {WithExponent(mantissa, static_cast<SignedBits<C>>(rest)),
            static_cast<int32_t>(bounded) * (1 << kCountBits) + static_cast<int32_t>(packed & kCountMask)};
  }

  // The exponent of the product.
  JB_ALWAYS_INLINE SignedBits<C> Exponent() const {
    return static_cast<SignedBits<C>>(packed >> kCountBits) * (1 << kUnitBits) + ExponentOf(mantissa);
  }

  // The product, if its exponent is that of a normal number and no member is counted.
  JB_ALWAYS_INLINE C Value() const {
    constexpr int kShift = kUnitBits - kCountBits;
    return mantissa * PowerOfTwo<C>(static_cast<SignedBits<C>>(packed) * (1 << kShift));
  }

  // The product of all members but `value`, times `factor`. Rounds only at the end, since `factor` may bring the
  // product back into range.
  JB_ALWAYS_INLINE C OfOthersTimes(C value, C factor) const {
    const Factor<C> without(value), with(factor);
    // A count of 2 means two or more. At least one of these is left, and one has the same effect as several.
    const int32_t one_less = ((packed >> without.kind) & 3) == 1 ? without.is_special : 0;
    const int32_t counts = (packed & kCountMask) - (one_less << without.kind);
    return ValueOf(MantissaOf(mantissa) / without.mantissa * with.mantissa,
                   Exponent() - without.exponent + with.exponent,
                   counts + CountsToAdd(counts, with.kind, with.is_special));
  }
};

}  // namespace jax_baracuda::segment
