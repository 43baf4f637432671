// What the CPU and the CUDA kernels of rope share: the problem, the operands of a call, and sines and cosines of angles.
//
//   y[i] = scale (x[i] cos - x[j] sin),   y[j] = scale (x[j] cos + x[i] sin),   angle = position * inverse frequency
//
// where (i, j) is (2k, 2k + 1) where pairs are interleaved, else (k, k + rotary_dim / 2). The gradient is the rotation by
// the opposite angle.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "ffi/core/element_type.h"

namespace jax_baracuda::rope {

// An array [batch, examples, heads, length, features], or [batch, examples, length, heads, features] unless heads come
// first. An x whose leading dimension is 1 is shared by the whole batch.
struct Tensor {
  const void* x;
  bool is_shared;
  void* y;  // always has the whole batch; may be x's own memory
  int64_t heads;
};

struct Problem {
  int64_t batch;
  int64_t examples;
  int64_t length;
  int64_t features;
  int64_t pairs;  // 1 to features / 2; features behind these pairs are copied
  bool heads_first;
  bool interleaved;
};

inline constexpr int kMostTensors = 2;

struct Call {
  Problem problem;
  ElementType type;  // a floating type
  int num_tensors;
  Tensor tensors[kMostTensors];
  // [batch or 1, 2, pairs] of the compute type: inverse frequencies, then what is missing from them.
  const void* frequencies;
  bool frequencies_are_shared;
  // [batch or 1, examples or 1, length] of int32 or int64. nullptr: 0, 1, 2, ...
  const void* positions;
  bool positions_are_64_bit;
  bool positions_are_shared_by_batch;
  bool positions_are_shared_by_examples;
  double cos_scale;
  double sin_scale;  // minus the other one where the rotation is by minus the angle

  bool HasNoElement() const {
    if (problem.batch == 0 || problem.examples == 0 || problem.length == 0) return true;
    for (int i = 0; i < num_tensors; ++i) {
      if (tensors[i].heads > 0) return false;
    }
    return true;
  }
};

// A float32 frequency and its remainder have 48 bits; of a float64 one, the remainder is below half a unit in the last
// place. Angles have the relative error of one product, so that they are NumPy's in float64.
template <typename C>
JB_HOST_DEVICE double Frequency(C frequency, C remainder) {
  return static_cast<double>(frequency) + static_cast<double>(remainder);
}

// ---- Sines and cosines for elements of type T, in a form that compilers vectorise.

// They are computed with twice the precision of T (float64: with its own), and rounded once, times the scale: of the
// 2 units in the last place that a float32 rotation may be wrong, its products and its sum take one.
template <typename T>
using AngleType = std::conditional_t<sizeof(T) == 2, float, double>;

template <typename C>
struct Rotation {
  C cos, sin;
};

// An angle is so many quarter turns and a remainder within an eighth of a turn.
template <typename T>
struct ReducedAngle {
  int32_t quarters;  // modulo 4
  AngleType<T> remainder;
};

// ReduceNear takes angles up to this size.
template <typename T>
inline constexpr double kNear = sizeof(T) == sizeof(double) ? 0x1p20 : 0x1p50;

template <typename T>
JB_HOST_DEVICE ReducedAngle<T> ReduceNear(double angle) {
  constexpr double kShift = 0x1.8p52;  // adding it rounds to an integer, in the lowest bits
  const double shifted = angle * 0x1.45f306dc9c883p-1 + kShift, quarters = shifted - kShift;
  int64_t bits;
  std::memcpy(&bits, &shifted, sizeof(bits));
  double remainder;
  if constexpr (sizeof(T) == sizeof(double)) {
    // pi / 2 in three parts; the products with the first two are exact.
    remainder = ((angle - quarters * 0x1.921fb544p0) - quarters * 0x1.0b4611a6p-34) - quarters * 0x1.3198a2e037073p-69;
  } else {  // no less exact than the angle itself
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

template <typename T>
JB_HOST_DEVICE Rotation<AngleType<T>> RotationBy(ReducedAngle<T> angle) {
  const AngleType<T> sin = SinOfRemainder<T>(angle.remainder), cos = CosOfRemainder<T>(angle.remainder);
  const bool is_odd = (angle.quarters & 1) != 0;
  const AngleType<T> a = is_odd ? sin : cos, b = is_odd ? cos : sin;
  return {((angle.quarters + 1) & 2) != 0 ? -a : a, (angle.quarters & 2) != 0 ? -b : b};
}

// For angles of any size; NaN for one that is not finite.
template <typename T>
JB_HOST_DEVICE Rotation<AngleType<T>> RotationBy(double angle) {
  if constexpr (sizeof(T) == sizeof(double)) {
    if (!(std::fabs(angle) <= kNear<T>)) return {std::cos(angle), std::sin(angle)};
  } else {  // each turn of the loop is as exact as the angle itself
    while (std::fabs(angle) > kNear<T>) angle -= std::rint(angle * 0x1.45f306dc9c883p-3) * 0x1.921fb54442d18p2;
  }
  return RotationBy(ReduceNear<T>(angle));
}

// Scaled, in the type that elements are computed with.
template <typename T>
JB_HOST_DEVICE Rotation<ComputeType<T>> Scaled(Rotation<AngleType<T>> rotation, double cos_scale, double sin_scale) {
  using C = ComputeType<T>;
  return {static_cast<C>(static_cast<AngleType<T>>(cos_scale) * rotation.cos),
          static_cast<C>(static_cast<AngleType<T>>(sin_scale) * rotation.sin)};
}

}  // namespace jax_baracuda::rope
