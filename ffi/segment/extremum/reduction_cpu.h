// Maxima and minima, as the CPU kernels take them (see engine/rows_cpu.h). A minimum is the maximum of flipped values:
// they are flipped when they are read, and the result when it is written.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "ffi/segment/engine/rows_cpu.h"
#include "ffi/segment/extremum/arithmetic.h"

namespace jax_baracuda::segment {

// A value as an integer of as many bits whose order is that of maxima: +0 above -0, and a NaN above everything.
template <typename T>
using MaxKey = std::make_signed_t<BitsOf<T>>;

template <typename T>
inline constexpr int kMantissaBits = std::is_same_v<T, Float16>    ? 10
                                     : std::is_same_v<T, BFloat16> ? 7
                                                                   : std::numeric_limits<T>::digits - 1;

template <typename T>
inline constexpr MaxKey<T> kInfinityKey = std::numeric_limits<MaxKey<T>>::max() >> kMantissaBits<T> << kMantissaBits<T>;

// What keys of T are computed with: their own type, or a wider one, in which others are that they are selected with.
template <typename T, typename Key>
JB_INLINE Key WithReversedNegatives(Key bits) {
  return static_cast<Key>(bits ^ ((bits >> (8 * sizeof(Key) - 1)) & std::numeric_limits<MaxKey<T>>::max()));
}

template <typename T, typename Key = MaxKey<T>>
JB_INLINE Key KeyOf(T value) {
  const Key bits = BitCast<MaxKey<T>>(value);
  if constexpr (kIsFloating<T>) {
    const bool is_nan = static_cast<Key>(bits & std::numeric_limits<MaxKey<T>>::max()) > kInfinityKey<T>;
    return is_nan ? kInfinityKey<T> | (kInfinityKey<T> >> 1) : WithReversedNegatives<T>(bits);
  } else {
    return bits;
  }
}

template <typename T>
JB_INLINE T OfKey(MaxKey<T> key) {
  if constexpr (kIsFloating<T>) {
    return BitCast<T>(WithReversedNegatives<T>(key));
  } else {
    return BitCast<T>(key);
  }
}

// Keys whose numbers are equal become equal: those of -0 and +0, -1 and 0.
template <typename Key>
JB_INLINE auto WithOneZero(Key key) {
  return key - (key >> (8 * sizeof(Key) - 1));
}

template <typename T>
JB_INLINE bool AreEqual(T a, T b) {
  return WithOneZero(KeyOf(a)) == WithOneZero(KeyOf(b));
}

// Folds a single key that differs from the best one by more than the sign of a zero: one comparison and no branch on what
// is random. Returns false, and does nothing, for others.
template <typename Key>
JB_INLINE bool TakeOne(Key key, int32_t row, Key& best, int32_t& winner) {
  if (WithOneZero(key) == WithOneZero(best)) return false;
  const int32_t if_above = -static_cast<int32_t>(key > best);  // a mask, of which no compiler makes a branch
  best = std::max(best, key);
  winner ^= (winner ^ row) & if_above;
  return true;
}

// Of floating numbers, the maximum of keys: a comparison of integers, which takes as many numbers at once as there are in
// a vector, of 16 bits too, and treats no subnormal number as zero.
template <typename T>
struct Extremum {
  using Element = T;
  using First = MaxKey<T>;
  using Second = NoNumber;
  static constexpr bool kRounds = false, kHoldsRuns = true;
  static constexpr bool kTakesWeights = false, kTakesSelection = false;

  BitsOf<T> flip;
  First* output;  // the bits of results

  JB_INLINE CellsOf<Extremum> ResultCells() const { return {output, nullptr}; }

  JB_INLINE void Start(int64_t count, CellsOf<Extremum> cells) const {
    std::fill_n(cells.first, count, KeyOf(MaxIdentity<T>()));
  }

  JB_INLINE void Fold(const T* values, int32_t /*row*/, int64_t width, CellsOf<Extremum> cells) const {
    JB_VECTORIZE
    for (int64_t i = 0; i < width; ++i) {
      const First key = KeyOf(Flip(values[i], flip)), best = cells.first[i];
      cells.first[i] = key > best ? key : best;
    }
  }

  JB_INLINE void Merge(int64_t count, CellsOf<Extremum> later, CellsOf<Extremum> cells) const {
    JB_VECTORIZE
    for (int64_t i = 0; i < count; ++i) cells.first[i] = std::max(cells.first[i], later.first[i]);
  }

  JB_INLINE void Write(int64_t count, int64_t first_cell, const int32_t* /*counts*/, CellsOf<Extremum> cells) const {
    First* const to = output + first_cell;
    JB_VECTORIZE
    for (int64_t i = 0; i < count; ++i) to[i] = BitCast<First>(Flip(OfKey<T>(cells.first[i]), flip));
  }
};

template <typename T>
struct ExtremumWithWinner {
  using Element = T;
  using First = std::common_type_t<MaxKey<T>, int32_t>;  // as wide as winners at least, so that no vector is repacked
  using Second = int32_t;
  static constexpr bool kRounds = false, kHoldsRuns = true;
  static constexpr bool kTakesWeights = false, kTakesSelection = false;

  BitsOf<T> flip;
  bool first_wins;
  MaxKey<T>* output;  // the bits of results
  int32_t* winner;

  JB_INLINE CellsOf<ExtremumWithWinner> ResultCells() const { return CellsAt<ExtremumWithWinner>(output, winner); }

  JB_INLINE static T ValueOf(First key) { return OfKey<T>(static_cast<MaxKey<T>>(key)); }

  JB_INLINE void Start(int64_t count, CellsOf<ExtremumWithWinner> cells) const {
    std::fill_n(cells.first, count, KeyOf<T, First>(MaxIdentity<T>()));
    std::fill_n(cells.second, count, kNoWinner);
  }

  // AddRow or MergeCell of what comes later, without branches, and without stores that hang on a condition. The winner
  // of a NaN does not matter. `counted_twice` is 1 where both tie counts hold the identity.
  JB_INLINE void Take(First key, int32_t its_winner, int32_t counted_twice, CellsOf<ExtremumWithWinner> cells,
                      int64_t i) const {
    const First best = cells.first[i], number = WithOneZero(key), best_number = WithOneZero(best);
    const int32_t winner_before = cells.second[i];
    const int32_t first = winner_before == kNoWinner ? its_winner : winner_before;
    const int32_t shared = counted_twice - TieCount(winner_before) - TieCount(its_winner);
    const int32_t of_equal = number == best_number ? (first_wins ? first : shared) : winner_before;
    cells.first[i] = key > best ? key : best;
    cells.second[i] = number > best_number ? its_winner : of_equal;
  }

  JB_INLINE void Fold(const T* values, int32_t row, int64_t width, CellsOf<ExtremumWithWinner> cells) const {
    if (width == 1 && TakeOne(KeyOf<T, First>(Flip(*values, flip)), row, *cells.first, *cells.second)) return;
    JB_VECTORIZE
    for (int64_t i = 0; i < width; ++i) Take(KeyOf<T, First>(Flip(values[i], flip)), row, 0, cells, i);
  }

  JB_INLINE void Merge(int64_t count, CellsOf<ExtremumWithWinner> later, CellsOf<ExtremumWithWinner> cells) const {
    const First identity = KeyOf<T, First>(MaxIdentity<T>());
    JB_VECTORIZE
    for (int64_t i = 0; i < count; ++i) {
      Take(later.first[i], later.second[i], cells.first[i] == identity ? 1 : 0, cells, i);
    }
  }

  JB_INLINE void Write(int64_t count, int64_t first_cell, const int32_t* /*counts*/,
                       CellsOf<ExtremumWithWinner> cells) const {
    MaxKey<T>* const to = output + first_cell;
    int32_t* const to_winner = winner + first_cell;
    JB_VECTORIZE
    for (int64_t i = 0; i < count; ++i) {
      const First key = cells.first[i];
      const int32_t of_number = cells.second[i];
      to[i] = BitCast<MaxKey<T>>(Flip(ValueOf(key), flip));
      to_winner[i] = key > kInfinityKey<T> ? kNoWinner : of_number;
    }
  }
};

}  // namespace jax_baracuda::segment
