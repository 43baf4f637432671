// Shared by the CUDA kernels of rope: positions, frequencies, and units of rows.
//
// A unit of a row is one vector if pairs are interleaved. Otherwise it is two vectors: one with the first and one with
// the second elements of pairs. All other features are copied by units of as many vectors.
#pragma once

#include <cstdint>

#include "ffi/core/divider.cuh"
#include "ffi/core/integers.h"
#include "ffi/core/vectors.cuh"
#include "ffi/rope/rope.h"

namespace jax_baracuda::rope {

// Int is the type of element counts and indices.
template <typename Int>
struct RowLayout {
  Int features, pairs, first_rotated;
  Int unit_stride, partner_stride;  // of rotated units, in elements
  Int copied_units;                 // per row
  unsigned rotated_units;

  RowLayout() = default;
  RowLayout(const Problem& problem, int pairs_of_unit)
      : features(static_cast<Int>(problem.features)),
        pairs(static_cast<Int>(problem.pairs)),
        first_rotated(static_cast<Int>(problem.first_rotated)),
        unit_stride(pairs_of_unit * (problem.interleaved ? 2 : 1)),
        partner_stride(problem.interleaved ? 1 : pairs),
        copied_units(static_cast<Int>(CeilDivide(problem.features - 2 * problem.pairs, int64_t{2} * pairs_of_unit))),
        rotated_units(static_cast<unsigned>(problem.pairs / pairs_of_unit)) {}
};

// A position as raw words. The conversion happens at its use, so that code between load and use does not wait for the
// load.
struct RawPosition {
  uint32_t low, high;

  template <typename Int>
  __device__ __forceinline__ void Load(const Positions& positions, Int begin, Int i) {
    if (positions.data == nullptr) {
      low = static_cast<uint32_t>(i);
      high = static_cast<uint32_t>(static_cast<int64_t>(i) >> 32);
      return;
    }
    const Int index = begin + i;
    const uint32_t* const words = static_cast<const uint32_t*>(positions.data) + index;
    if (positions.are_64_bit) {
      low = words[index];
      high = words[index + 1];
    } else {
      low = words[0];
    }
  }

  __device__ __forceinline__ double Value(const Positions& positions) const {
    const bool has_high = positions.data == nullptr || positions.are_64_bit;
    const uint32_t high_word = has_high ? high : static_cast<uint32_t>(static_cast<int32_t>(low) >> 31);
    return static_cast<double>(static_cast<int64_t>(uint64_t{high_word} << 32 | low));
  }
};

// A frequency in its memory format, for the same reason.
template <typename T>
struct RawFrequency {
  ComputeType<T> frequency, remainder;

  template <typename Int>
  __device__ __forceinline__ void Load(const BatchOperand& frequencies, Int batch, Int pairs, Int pair) {
    const auto* const from =
        static_cast<const ComputeType<T>*>(frequencies.data) + (frequencies.is_shared ? 0 : batch * 2 * pairs) + pair;
    frequency = __ldg(from);
    remainder = __ldg(from + pairs);
  }

  __device__ __forceinline__ double Value() const { return Frequency(frequency, remainder); }
};

template <typename T, int kCount, bool kInterleaved>
struct Unit {
  static constexpr int kVectors = kInterleaved ? 1 : 2;
  static constexpr int kPairs = kCount * kVectors / 2;
  using C = ComputeType<T>;

  Packed<T, kCount> words[kVectors];

  // The first feature of a unit, and the distance to its second vector.
  template <typename Int>
  struct Location {
    Int feature, partner_stride;
  };

  template <typename Int>
  static __device__ __forceinline__ Location<Int> Locate(const RowLayout<Int>& layout, unsigned unit) {
    if (unit < layout.rotated_units) {
      return {layout.first_rotated + static_cast<Int>(unit) * layout.unit_stride, layout.partner_stride};
    }
    // Neighbouring units have neighbouring vectors. A unit without a second vector has the first one twice.
    const Int copied = layout.features - 2 * layout.pairs;
    const Int first = static_cast<Int>(unit - layout.rotated_units) * kCount;
    const Int second = first + layout.copied_units * kCount < copied ? first + layout.copied_units * kCount : first;
    const auto feature_of = [&](Int i) { return i < layout.first_rotated ? i : i + 2 * layout.pairs; };
    return {feature_of(first), feature_of(second) - feature_of(first)};
  }

  __device__ __forceinline__ void Load(const T* address, int64_t partner_stride) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) words[i] = LoadPacked<kCount>(address + i * partner_stride);
  }

  __device__ __forceinline__ void Rotate(const Rotation<C>* rotations) {
    C values[kVectors * kCount];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) Widen<T, kCount>(words[i], values + i * kCount);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      rope::Rotate(rotations[i].cos, rotations[i].sin, &values[kInterleaved ? 2 * i : i],
                   &values[kInterleaved ? 2 * i + 1 : i + kPairs]);
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) words[i] = Narrow<T, kCount>(values + i * kCount);
  }

  __device__ __forceinline__ void Store(T* address, int64_t partner_stride) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) StorePacked<T, kCount>(address + i * partner_stride, words[i]);
  }
};

// Changes the angles to others with the same sine and cosine.
template <typename T, int kPairs>
__device__ __forceinline__ void ComputeRotations(double (&angles)[kPairs], Rotation<AngleType<T>> scale,
                                                 Rotation<ComputeType<T>>* rotations) {
  bool are_near = true;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) are_near = are_near && IsNear<T>(angles[i]);
  if (!are_near) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) angles[i] = Nearer<T>(angles[i]);
  }
#pragma unroll
  for (int i = 0; i < kPairs; ++i) rotations[i] = Scaled<T>(RotationByNear<T>(angles[i]), scale);
}

}  // namespace jax_baracuda::rope
