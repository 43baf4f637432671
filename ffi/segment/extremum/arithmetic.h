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
#include <limits>

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

JB_ALWAYS_INLINE int32_t TieCount(int32_t winner) { return winner >= 0 ? 1 : -winner; }

// Whether a row is before another one. kNoWinner, the greatest unsigned number, is behind every row.
JB_ALWAYS_INLINE bool IsBefore(int32_t a, int32_t b) { return static_cast<uint32_t>(a) < static_cast<uint32_t>(b); }

// The winner of two sets of rows with the same maximum. `counted_twice` is 1 if both tie counts include the identity.
JB_ALWAYS_INLINE int32_t WinnerOfBoth(int32_t a, int32_t b, bool first_wins, int32_t counted_twice) {
  const int32_t first = IsBefore(b, a) ? b : a;
  return first_wins ? first : counted_twice - TieCount(a) - TieCount(b);
}

// Whether the gradient must find the rows that attain the maximum; only then are data and output read again.
JB_HOST_DEVICE bool IsTie(int32_t winner) { return winner < kNoWinner; }

// The gradient of each row that attains the maximum of a tied cell.
template <typename T>
JB_HOST_DEVICE T TiedShare(int32_t winner, T d_output) {
  using C = ComputeType<T>;
  return static_cast<T>(static_cast<C>(d_output) / static_cast<C>(-winner));
}

// An unfinished cell of argmax. `row` is kNoWinner while it has no row.
template <typename Key>
struct ArgCell {
  Key best = std::numeric_limits<Key>::lowest();
  int32_t row = kNoWinner;
};

// Folds in a row, or the cell of other rows, in any order. Of equal keys the lowest row wins.
template <typename Key>
JB_HOST_DEVICE void MergeArgCell(ArgCell<Key>& cell, Key key, int32_t row) {
  const bool is_before = IsBefore(row, cell.row);
  if (key > cell.best || (key == cell.best && is_before)) {
    cell.best = key;
    cell.row = row;
  }
}

}  // namespace jax_baracuda::segment
