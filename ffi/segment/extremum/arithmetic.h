// The scalar arithmetic of segment_max, segment_min, segment_argmax, segment_argmin and their gradients, shared by the
// CPU and the CUDA kernels.
//
// Everything here computes the maximum of floating numbers or signed integers. For a minimum, or for unsigned integers,
// values are flipped before and after: see FlipMask.
//
// Reducing a cell yields its maximum and, for the gradient, its `winner`: one int32 that says which rows get the cell's
// cotangent:
//
//     winner >= 0             the only row that attains the maximum (the first one under first_wins)
//     winner == kNoWinner     no row: the segment is empty or holds a NaN
//     winner <= -2            -winner members tie and share equally; the identity of the reduction counts as a member
//                             if the maximum equals it
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "ffi/core/bit_cast.h"
#include "ffi/core/element_type.h"
#include "ffi/segment/problem.h"

namespace jax_baracuda::segment {

inline constexpr int32_t kNoWinner = -1;

inline bool IsUnsigned(ElementType type) {
  switch (type) {
    case ElementType::kBool:
    case ElementType::kUInt8:
    case ElementType::kUInt16:
    case ElementType::kUInt32:
    case ElementType::kUInt64:
      return true;
    default:
      return false;
  }
}

// The bits to invert so that the maximum in the order of T is the wanted extremum. For a minimum they reverse the
// order: the sign of a floating type, all bits of an integer, the lowest bit of a bool. Unsigned values come as a
// signed T: the highest bit is inverted too.
template <typename T>
BitsOf<T> FlipMask(ElementType type, bool is_minimum) {
  constexpr BitsOf<T> kAll = static_cast<BitsOf<T>>(~BitsOf<T>{0});
  constexpr BitsOf<T> kHighest = static_cast<BitsOf<T>>(kAll ^ (kAll >> 1));
  const BitsOf<T> reversing = type == ElementType::kBool ? BitsOf<T>{1} : kIsFloating<T> ? kHighest : kAll;
  return static_cast<BitsOf<T>>((is_minimum ? reversing : 0) ^ (IsUnsigned(type) ? kHighest : 0));
}

template <typename T>
JB_HOST_DEVICE T Flip(T value, BitsOf<T> mask) {
  return BitCast<T>(static_cast<BitsOf<T>>(BitCast<BitsOf<T>>(value) ^ mask));
}

// The maximum of no rows: -inf, or the lowest value of an integer type.
template <typename T>
JB_HOST_DEVICE T MaxIdentity() {
  if constexpr (kIsFloating<T>) {
    return static_cast<T>(-std::numeric_limits<ComputeType<T>>::infinity());
  } else {
    return std::numeric_limits<T>::lowest();
  }
}

// Of two equal values, prefers +0 to -0. Always returns one of the two, even if the processor flushes denormals, so
// that different denormals compare equal.
template <typename T>
JB_HOST_DEVICE T PositiveZero(T a, T b) {
  if constexpr (kIsFloating<T>) {
    return BitCast<BitsOf<T>>(a) >> (8 * sizeof(T) - 1) != 0 ? b : a;
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

// An unfinished cell; FinalWinner turns its winner into the final one.
template <typename T>
struct Cell {
  T best = MaxIdentity<T>();
  int32_t winner = kNoWinner;
};

JB_HOST_DEVICE int32_t TieCount(int32_t winner) { return winner >= 0 ? 1 : -winner; }

// Folds in the cell of other rows of the same segment, in any order.
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
      // Both counts include the identity if it is a member; it counts once.
      const int32_t shared = best == static_cast<ComputeType<T>>(MaxIdentity<T>()) ? 1 : 0;
      cell.winner = shared - TieCount(cell.winner) - TieCount(other.winner);
    }
  }
}

template <typename T>
JB_HOST_DEVICE int32_t FinalWinner(const Cell<T>& cell) {
  return IsNan(cell.best) ? kNoWinner : cell.winner;
}

// Whether the gradient must find the rows that attain the maximum; only then are data and output read again.
JB_HOST_DEVICE bool IsTie(int32_t winner) { return winner < kNoWinner; }

// The gradient of each row that attains the maximum of a tied cell.
template <typename T>
JB_HOST_DEVICE T TiedShare(int32_t winner, T d_output) {
  using C = ComputeType<T>;
  return static_cast<T>(static_cast<C>(d_output) / static_cast<C>(-winner));
}

// The gradient of a row with value `data` in a tied cell.
template <typename T>
JB_HOST_DEVICE T TiedGradient(int32_t winner, T data, T output, T d_output) {
  using C = ComputeType<T>;
  const bool attains = static_cast<C>(data) == static_cast<C>(output);
  return attains ? TiedShare(winner, d_output) : static_cast<T>(C{0});
}

// Values as signed integers in the order of argmax: a NaN of either sign above everything and equal to any other, -0
// equal to +0.
template <typename T>
using OrderedKey = std::conditional_t<sizeof(T) == 8, int64_t, int32_t>;

template <typename T>
JB_HOST_DEVICE OrderedKey<T> ToOrderedKey(T value) {
  using Key = OrderedKey<T>;
  if constexpr (kIsFloating<T>) {
    const ComputeType<T> x = static_cast<ComputeType<T>>(value) + ComputeType<T>{0};  // -0 + 0 is +0
    const Key bits = BitCast<Key>(x);
    const Key ordered = bits ^ ((bits >> (8 * sizeof(Key) - 1)) & std::numeric_limits<Key>::max());
    return x != x ? std::numeric_limits<Key>::max() : ordered;
  } else {
    return static_cast<Key>(value);
  }
}

// An unfinished cell of argmax. `row` is kNoWinner, the greatest unsigned number, while it has no row.
template <typename Key>
struct ArgCell {
  Key best = std::numeric_limits<Key>::lowest();
  int32_t row = kNoWinner;
};

// Folds in a row, or the cell of other rows, in any order. Of equal keys the lowest row wins.
template <typename Key>
JB_HOST_DEVICE void MergeArgCell(ArgCell<Key>& cell, Key key, int32_t row) {
  const bool is_before = static_cast<uint32_t>(row) < static_cast<uint32_t>(cell.row);
  if (key > cell.best || (key == cell.best && is_before)) {
    cell.best = key;
    cell.row = row;
  }
}

}  // namespace jax_baracuda::segment
