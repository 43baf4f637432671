// Shared by the CPU and CUDA kernels of rope: the operands of a call, and sines and cosines of angles.
//
//   y[i] = scale (x[i] cos - x[j] sin),   y[j] = scale (x[j] cos + x[i] sin),   angle = position * frequency
//
// where (i, j) is (2k, 2k + 1) if pairs are interleaved, otherwise (k, k + rotary_dim / 2), counted from the first
// rotated feature. The gradient is the rotation by minus the angle.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "ffi/core/batch_operand.h"
#include "ffi/core/bit_cast.h"
#include "ffi/core/element_type.h"
#include "ffi/core/executor.h"
#include "ffi/core/plan.h"

namespace jax_baracuda::rope {

// An array [batch, examples, heads, length, features] with heads_first, otherwise [batch, examples, length, heads,
// features].
struct Tensor {
  BatchOperand x;
  void* y;  // never shared by the batch; may alias x
  int64_t heads;
};

struct Problem {
  int64_t batch;
  int64_t examples;
  int64_t length;
  int64_t features;
  int64_t pairs;          // 1 to features / 2; all other features are copied
  int64_t first_rotated;  // the features of the pairs are 2 pairs neighbours from here
  bool heads_first;
  bool interleaved;

  // Whether heads, and what is rotated of them, consist of vectors of so many elements.
  bool HasVectors(int64_t elements) const {
    return features % elements == 0 && first_rotated % elements == 0 && (interleaved ? 2 : 1) * pairs % elements == 0;
  }
};

// Which of several positions of a token rotates a pair, as in M-RoPE. The pairs of a section are neighbours, or
// sections take turns: pair k belongs to section k % count until that one is full, then to the first section.
inline constexpr int kMaxSections = 4;
struct Sections {
  int32_t count;
  bool alternate;
  int32_t ends[kMaxSections];  // the first pair beyond each section

  // Pairs have an index of any integer type.
  template <typename Int>
  JB_HOST_DEVICE int Of(Int pair) const {
    if (count <= 1) return 0;
    if (alternate) {
      const int section = static_cast<int>(pair % count);
      return pair < ends[section] ? section : 0;
    }
    int section = 0;
    for (int i = 0; i < count - 1; ++i) section += pair >= ends[i] ? 1 : 0;
    return section;
  }
};

// [batch or 1, sections, examples or 1, length] of int32 or int64. If data is nullptr, positions are 0, 1, 2, ...
struct Positions {
  const void* data;
  bool are_64_bit;
  bool are_shared_by_batch;
  bool are_shared_by_examples;
  Sections sections;
};

// The row of positions that belongs to a section of an example.
template <typename Int>
JB_HOST_DEVICE Int PositionsOf(const Positions& positions, Int batch, Int examples, Int example, int section) {
  const Int row = (positions.are_shared_by_batch ? 0 : batch) * positions.sections.count + section;
  return positions.are_shared_by_examples ? row : row * examples + example;
}

inline constexpr int kMaxTensors = 2;

struct Call {
  Problem problem;
  ElementType type;  // a floating type
  int num_tensors;
  Tensor tensors[kMaxTensors];
  BatchOperand frequencies;  // [batch or 1, 2, pairs] of the compute type, with remainders (exact minus rounded value)
  Positions positions;
  double cos_scale;
  double sin_scale;  // -cos_scale if the rotation is by minus the angle

  int64_t AllHeads() const {
    int64_t heads = 0;
    for (int i = 0; i < num_tensors; ++i) heads += tensors[i].heads;
    return heads;
  }
  bool HasNoElement() const {
    return problem.batch == 0 || problem.examples == 0 || problem.length == 0 || AllHeads() == 0;
  }

  bool ExamplesShareAngles() const { return positions.data == nullptr || positions.are_shared_by_examples; }
  bool BatchSharesAngles() const {
    return frequencies.is_shared && (positions.data == nullptr || positions.are_shared_by_batch);
  }

  static std::vector<const char*> Strategies();
  Plan MakePlan() const;
  RunStatus Run(Executor executor) const;
};

// A float32 frequency and its remainder together have 48 bits. The remainder of a float64 frequency is below half an
// ulp. The only error of an angle is the rounding of one product, so float64 angles equal NumPy's.
template <typename C>
JB_HOST_DEVICE double Frequency(C frequency, C remainder) {
  return static_cast<double>(frequency) + static_cast<double>(remainder);
}

// ---- Sines and cosines for elements of type T, in a form that compilers vectorise.

// They are computed with twice the precision of T (float64: its own precision), multiplied by the scale, and rounded
// once. A float32 rotation may be wrong by 2 ulp; its own products and sum cause 1 ulp of these.
template <typename T>
using AngleType = std::conditional_t<sizeof(T) == 2, float, double>;

template <typename C>
struct Rotation {
  C cos, sin;
};

template <typename T>
Rotation<AngleType<T>> ScaleOf(const Call& call) {
  return {static_cast<AngleType<T>>(call.cos_scale), static_cast<AngleType<T>>(call.sin_scale)};
}

// Rotates a pair of features.
template <typename C>
JB_ALWAYS_INLINE void Rotate(C cos, C sin, C* first, C* second) {
  const C x = *first;
  *first = x * cos - *second * sin;
  *second = *second * cos + x * sin;
}

// An angle as a number of quarter turns and a remainder of at most an eighth of a turn.
template <typename T>
struct ReducedAngle {
  int32_t quarters;  // only the lowest two bits matter
  AngleType<T> remainder;
};

// Whether ReduceNear supports an angle. Within this limit float64 is reduced exactly; for other types, the error is
// about the rounding error of the angle itself.
template <typename T>
JB_HOST_DEVICE bool IsNear(double angle) {
  return std::fabs(angle) <= (sizeof(T) == sizeof(double) ? 0x1p20 : 0x1p50);
}

template <typename T>
JB_HOST_DEVICE ReducedAngle<T> ReduceNear(double angle) {
  constexpr double kShift = 0x1.8p52;  // adding it leaves the rounded integer in the lowest bits
  const double shifted = angle * 0x1.45f306dc9c883p-1 + kShift, quarters = shifted - kShift;
  const int64_t bits = BitCast<int64_t>(shifted);
  double remainder;
  if constexpr (sizeof(T) == sizeof(double)) {
    // pi / 2 as three terms; the products with the first two are exact.
    remainder = ((angle - quarters * 0x1.921fb544p0) - quarters * 0x1.0b4611a6p-34) - quarters * 0x1.3198a2e037073p-69;
  } else {  // as exact as the angle itself
    remainder = angle - quarters * 0x1.921fb54442d18p0;
  }
  return {static_cast<int32_t>(bits), static_cast<AngleType<T>>(remainder)};
}

// Errors of the polynomials: below 2^-59 for float64, 2^-33 for float32, 2^-29 for 16 bits.
template <typename T>
JB_HOST_DEVICE AngleType<T> SinOfRemainder(AngleType<T> r) {
  const AngleType<T> z = r * r;
  AngleType<T> p;
  if constexpr (sizeof(T) == 8) {
    p = 0x1.5d63bb85e84a2p-33;
    p = p * z - 0x1.ae5db02bc6949p-26;
    p = p * z + 0x1.71de346ea93cdp-19;
    p = p * z - 0x1.a01a019aaaaaep-13;
    p = p * z + 0x1.111111110eaafp-7;
    p = p * z - 0x1.555555555553dp-3;
  } else if constexpr (sizeof(T) == 4) {
    p = 0x1.6c8988423b5f9p-19;
    p = p * z - 0x1.a00e0e25029bfp-13;
    p = p * z + 0x1.1111062048c5fp-7;
    p = p * z - 0x1.555555480c1f2p-3;
  } else {
    p = -0x1.98dd16p-13f;
    p = p * z + 0x1.1105bep-7f;
    p = p * z - 0x1.555554p-3f;
  }
  return p * (z * r) + r;
}

template <typename T>
JB_HOST_DEVICE AngleType<T> CosOfRemainder(AngleType<T> r) {
  const AngleType<T> z = r * r;
  AngleType<T> p;
  if constexpr (sizeof(T) == 8) {
    p = -0x1.8fb130ad70c3fp-37;
    p = p * z + 0x1.1ee9f1521edcbp-29;
    p = p * z - 0x1.27e4f812b6014p-22;
    p = p * z + 0x1.a01a019cbf625p-16;
    p = p * z - 0x1.6c16c16c1521fp-10;
    p = p * z + 0x1.555555555554cp-5;
  } else if constexpr (sizeof(T) == 4) {
    p = 0x1.9a0259c1335f0p-16;
    p = p * z - 0x1.6c0c8bb9ba8efp-10;
    p = p * z + 0x1.55554ab404705p-5;
  } else {
    p = 0x1.99ec88p-16f;
    p = p * z - 0x1.6c0c32p-10f;
    p = p * z + 0x1.55554ap-5f;
  }
  return p * (z * z) + (1 - z / 2);
}

// -x if bit 1 of `number` is set, otherwise x.
JB_HOST_DEVICE float NegatedByBit1(float x, int32_t number) {
  return BitCast<float>(BitCast<uint32_t>(x) ^ (static_cast<uint32_t>(number) << 30 & 0x80000000u));
}

JB_HOST_DEVICE double NegatedByBit1(double x, int32_t number) {
  const uint64_t sign = static_cast<uint64_t>(static_cast<uint32_t>(number)) << 62 & uint64_t{1} << 63;
  return BitCast<double>(BitCast<uint64_t>(x) ^ sign);
}

// For angles within the limit of IsNear.
template <typename T>
JB_HOST_DEVICE Rotation<AngleType<T>> RotationByNear(double angle) {
  const ReducedAngle<T> reduced = ReduceNear<T>(angle);
  const AngleType<T> sin = SinOfRemainder<T>(reduced.remainder), cos = CosOfRemainder<T>(reduced.remainder);
  const bool is_odd = (reduced.quarters & 1) != 0;
  return {NegatedByBit1(is_odd ? sin : cos, reduced.quarters + 1), NegatedByBit1(is_odd ? cos : sin, reduced.quarters)};
}

// An angle within the limit of IsNear, with the same sine and cosine; NaN if the angle is not finite.
template <typename T>
JB_HOST_DEVICE double Nearer(double angle) {
  if constexpr (sizeof(T) == sizeof(double)) {
    if (!IsNear<T>(angle)) angle = std::atan2(std::sin(angle), std::cos(angle));
  } else {  // each iteration adds an error of about the rounding error of the angle
    while (std::fabs(angle) > 0x1p50) angle -= std::rint(angle * 0x1.45f306dc9c883p-3) * 0x1.921fb54442d18p2;
  }
  return angle;
}

// Applies the scale and rounds to the compute type of the elements.
template <typename T>
JB_HOST_DEVICE Rotation<ComputeType<T>> Scaled(Rotation<AngleType<T>> rotation, Rotation<AngleType<T>> scale) {
  using C = ComputeType<T>;
  return {static_cast<C>(scale.cos * rotation.cos), static_cast<C>(scale.sin * rotation.sin)};
}

}  // namespace jax_baracuda::rope
