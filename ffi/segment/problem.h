// What all segment reductions share: the problem, and properties of element types. For the CPU and the CUDA kernels.
//
// A cell is one (segment, feature) pair of the result.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "ffi/core/element_type.h"

namespace jax_baracuda::segment {

// data [batch or 1, rows, features], segment_ids [batch or 1, rows], result [batch, segments, features].
// An operand whose leading dimension is 1 is shared by the whole batch.
struct Problem {
  int64_t batch;
  int64_t rows;
  int64_t segments;
  int64_t features;
  bool data_is_shared;
  bool ids_are_shared;

  int64_t DataRow(int64_t b, int64_t row) const { return data_is_shared ? row : b * rows + row; }
  int64_t IdIndex(int64_t b, int64_t row) const { return ids_are_shared ? row : b * rows + row; }
  bool HasNoResult() const { return batch == 0 || segments == 0 || features == 0; }
};

// True where T has NaN, infinities and a negative zero (std::is_floating_point leaves out the 16-bit types).
template <typename T>
inline constexpr bool kIsFloating = std::is_floating_point_v<T> || std::is_same_v<T, Float16> ||
                                    std::is_same_v<T, BFloat16>;

template <typename T>
JB_HOST_DEVICE bool IsNan(T x) {
  if constexpr (kIsFloating<T>) {
    const ComputeType<T> value = static_cast<ComputeType<T>>(x);
    return value != value;
  } else {
    return false;
  }
}

template <typename T>
using BitsOf = std::conditional_t<
    sizeof(T) == 1, uint8_t,
    std::conditional_t<sizeof(T) == 2, uint16_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>>;

}  // namespace jax_baracuda::segment
