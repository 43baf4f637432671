// The problem and the scalar arithmetic of segment_max and its gradient, shared by the CPU and the CUDA kernels.
//
// A cell is one (segment, feature) pair of the result. Reducing a cell yields its maximum and, for the gradient, its
// `winner`, one int32 that says who gets the cell's cotangent:
//
//     winner >= 0             the only row that attains the maximum (the first one under first_wins)
//     winner == kNoWinner     nobody: the segment is empty or holds a NaN
//     winner <= -2            -winner members tie and share equally; the identity of the reduction is a member when
//                             the maximum equals it
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "ffi/core/element_type.h"

namespace jax_baracuda::segment {

inline constexpr int32_t kNoWinner = -1;

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
};

// True where T has NaN, infinities and a negative zero (std::is_floating_point leaves out the 16-bit types).
template <typename T>
inline constexpr bool kIsFloating = std::is_floating_point_v<T> || std::is_same_v<T, Float16> ||
                                    std::is_same_v<T, BFloat16>;

// The maximum of no rows: -inf, or the least value of an integer type (0, which is False, for bool).
template <typename T>
JB_HOST_DEVICE T MaxIdentity() {
  if constexpr (kIsFloating<T>) {
    return static_cast<T>(-std::numeric_limits<ComputeType<T>>::infinity());
  } else {
    return std::numeric_limits<T>::lowest();
  }
}

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
using BitsOf = std::conditional_t<sizeof(T) == 2, uint16_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>;

// Of two values that compare equal, +0 rather than -0. Always one of the two, also where denormal numbers that differ
// compare equal because the processor treats them as zero.
template <typename T>
JB_HOST_DEVICE T PositiveZero(T a, T b) {
  if constexpr (kIsFloating<T>) {
    BitsOf<T> bits;
    memcpy(&bits, &a, sizeof(T));
    return bits >> (8 * sizeof(T) - 1) != 0 ? b : a;
  } else {
    return a;
  }
}

// max(a, b) with NaN propagated and +0 above -0.
template <typename T>
JB_HOST_DEVICE T Larger(T a, T b) {
  const ComputeType<T> x = static_cast<ComputeType<T>>(a), y = static_cast<ComputeType<T>>(b);
  if constexpr (kIsFloating<T>) {
    return (y > x || y != y) ? b : (x == y ? PositiveZero(a, b) : a);
  } else {
    return y > x ? b : a;
  }
}

// A cell under reduction; FinishCell turns its winner into the final one.
template <typename T>
struct Cell {
  T best = MaxIdentity<T>();
  int32_t winner = kNoWinner;
};

JB_HOST_DEVICE int32_t TieCount(int32_t winner) { return winner >= 0 ? 1 : -winner; }

// Folds one row into a cell. Rows of a cell must come in ascending order.
template <typename T>
JB_HOST_DEVICE void AddRow(Cell<T>& cell, T value, int32_t row, bool first_wins) {
  const ComputeType<T> x = static_cast<ComputeType<T>>(value), best = static_cast<ComputeType<T>>(cell.best);
  if (x > best || x != x) {
    cell.best = value;
    cell.winner = row;
  } else if (x == best) {
    cell.best = PositiveZero(cell.best, value);
    if (first_wins) {
      cell.winner = cell.winner == kNoWinner ? row : cell.winner;
    } else {
      cell.winner = -TieCount(cell.winner) - 1;
    }
  }
}

// Folds the cell of another set of rows of the same segment into this one, in any order.
template <typename T>
JB_HOST_DEVICE void MergeCell(Cell<T>& cell, const Cell<T>& other, bool first_wins) {
  const ComputeType<T> x = static_cast<ComputeType<T>>(other.best), best = static_cast<ComputeType<T>>(cell.best);
  if (x > best || x != x) {
    cell = other;
  } else if (x == best) {
    cell.best = PositiveZero(cell.best, other.best);
    if (first_wins) {
      const bool take_other = cell.winner == kNoWinner || (other.winner != kNoWinner && other.winner < cell.winner);
      cell.winner = take_other ? other.winner : cell.winner;
    } else {
      // Both counts hold the identity where it is a member; it counts once.
      const int32_t shared = best == static_cast<ComputeType<T>>(MaxIdentity<T>()) ? 1 : 0;
      cell.winner = shared - TieCount(cell.winner) - TieCount(other.winner);
    }
  }
}

template <typename T>
JB_HOST_DEVICE int32_t FinalWinner(const Cell<T>& cell) {
  return IsNan(cell.best) ? kNoWinner : cell.winner;
}

// Whether the gradient of a cell depends on which rows attain its maximum: only then are data and output read again.
JB_HOST_DEVICE bool IsTie(int32_t winner) { return winner < kNoWinner; }

// The share of a tied cell's cotangent that a row with value `data` gets.
template <typename T>
JB_HOST_DEVICE T TiedGradient(int32_t winner, T data, T output, T d_output) {
  using C = ComputeType<T>;
  const bool attains = static_cast<C>(data) == static_cast<C>(output);
  return attains ? static_cast<T>(static_cast<C>(d_output) / static_cast<C>(-winner)) : static_cast<T>(C{0});
}

}  // namespace jax_baracuda::segment
