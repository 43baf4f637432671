// Maxima and minima as reductions of the CPU kernels (see engine/rows_cpu.h). A minimum is the maximum of flipped
// values: values are flipped when read, results when written.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "ffi/segment/engine/rows_cpu.h"
#include "ffi/segment/extremum/arithmetic.h"

namespace jax_baracuda::segment {

// A value as an integer of the same width, in the order of maxima: +0 above -0, NaN above everything. All integers of a
// width share the kernels, and so do all floating types of a width.
template <typename T>
using KeyType = std::make_signed_t<BitsOf<T>>;

template <typename IntegerOfBits, bool kOfFloating_>
struct KeyFormat {
  static constexpr bool kOfFloating = kOfFloating_;
  using Key = IntegerOfBits;

  Key flip;      // see FlipMask
  Key infinity;  // the greatest key of a number

  // As a Wide integer, as wide as the values that keys are selected with, so that vectors need no repacking.
  template <typename Wide = Key>
  JB_INLINE Wide KeyOf(Key value) const {
    const Wide bits = static_cast<Key>(value ^ flip);
    if constexpr (!kOfFloating) return bits;
    const bool is_nan = (bits & std::numeric_limits<Key>::max()) > infinity;
    return is_nan ? static_cast<Wide>(infinity | (infinity >> 1)) : WithReversedNegatives(bits);
  }

  template <typename Wide>
  JB_INLINE Key OfKey(Wide key) const {
    return static_cast<Key>(WithReversedNegatives(key) ^ flip);
  }

  // The key of the maximum of no rows.
  JB_INLINE Key Identity() const { return static_cast<Key>(~infinity); }

 private:
  template <typename Wide>
  JB_INLINE Wide WithReversedNegatives(Wide bits) const {
    constexpr Wide kMagnitude = kOfFloating ? std::numeric_limits<Key>::max() : 0;
    return static_cast<Wide>(bits ^ ((bits >> (8 * sizeof(Wide) - 1)) & kMagnitude));
  }
};

// Maps the keys of -0 and +0, -1 and 0, to one key.
template <typename Key>
JB_INLINE Key WithOneZero(Key key) {
  return static_cast<Key>(key - (key >> (8 * sizeof(Key) - 1)));
}

template <typename T>
using FormatOfType = KeyFormat<KeyType<T>, kIsFloating<T>>;

template <typename T>
FormatOfType<T> FormatOf(BitsOf<T> flip) {
  using Key = KeyType<T>;
  if constexpr (kIsFloating<T>) {
    return {static_cast<Key>(flip), BitCast<Key>(static_cast<T>(std::numeric_limits<ComputeType<T>>::infinity()))};
  } else {
    return {static_cast<Key>(flip), std::numeric_limits<Key>::max()};
  }
}

// Returns body(format) with the key format of a type that dispatch(type, body) knows.
template <typename Dispatch, typename Body>
bool DispatchKeys(const Dispatch& dispatch, ElementType type, bool is_minimum, const Body& body) {
  return DispatchOr(true, type, dispatch, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return body(FormatOf<T>(FlipMask<T>(type, is_minimum)));
  });
}

template <typename T>
JB_INLINE bool AreEqual(T a, T b) {
  const auto format = FormatOf<T>(0);
  return WithOneZero(format.KeyOf(BitCast<KeyType<T>>(a))) == WithOneZero(format.KeyOf(BitCast<KeyType<T>>(b)));
}

// Converts elements to keys of cells, for loops that are compiled once per width of these keys.
template <typename Reduction>
JB_CPU_CLONES void ConvertToKeys(const Reduction reduction, const typename Reduction::Element* from, int64_t count,
                                 typename Reduction::First* to) {
  JB_VECTORIZE
  for (int64_t i = 0; i < count; ++i) to[i] = reduction.KeyOf(from[i]);
}

// Folds one key that does not equal the best one, without branching on the unpredictable comparison.
template <typename Key>
JB_INLINE void FoldOne(Key key, int32_t row, Key& best, int32_t& winner) {
  const int32_t if_above = -static_cast<int32_t>(key > best);  // a mask, which compilers do not turn into a branch
  best = std::max(best, key);
  winner ^= (winner ^ row) & if_above;
}

// The maximum of keys.
template <typename Key>
struct MaximumOfKeys {
  using Element = Key;
  using First = Key;
  using Second = NoNumber;
  using Narrow = MaximumOfKeys;

  JB_INLINE void Fold(const Key* keys, int32_t /*row*/, int64_t width, CellsOf<MaximumOfKeys> cells) const {
    JB_VECTORIZE
    for (int64_t i = 0; i < width; ++i) cells.first[i] = std::max(cells.first[i], keys[i]);
  }
};

// The maximum of values. Floating numbers are compared as integers: this uses full vectors for 16-bit types too, and does
// not treat subnormal numbers as zero.
template <typename Format>
struct Extremum {
  using Key = typename Format::Key;
  using Element = Key;
  using First = Key;
  using Second = NoNumber;
  using Narrow = MaximumOfKeys<Key>;
  static constexpr bool kRounds = false;

  Format format;
  Key* output;  // the bits of results

  JB_INLINE CellsOf<Extremum> ResultCells() const { return {output, nullptr}; }

  JB_INLINE void Start(int64_t count, CellsOf<Extremum> cells) const {
    std::fill_n(cells.first, count, format.Identity());
  }

  JB_INLINE Key KeyOf(Key value) const { return format.KeyOf(value); }
  JB_INLINE Narrow ForNarrow() const { return {}; }
  void Convert(const Key* from, int64_t count, Key* to) const { ConvertToKeys(*this, from, count, to); }

  JB_INLINE void Fold(const Key* values, int32_t /*row*/, int64_t width, CellsOf<Extremum> cells) const {
    JB_VECTORIZE
    for (int64_t i = 0; i < width; ++i) {
      const Key key = format.KeyOf(values[i]), best = cells.first[i];
      cells.first[i] = key > best ? key : best;
    }
  }

  JB_INLINE void Merge(int64_t count, CellsOf<Extremum> later, CellsOf<Extremum> cells) const {
    JB_VECTORIZE
    for (int64_t i = 0; i < count; ++i) cells.first[i] = std::max(cells.first[i], later.first[i]);
  }

  JB_INLINE void Write(int64_t count, int64_t first_cell, const int32_t* /*counts*/, CellsOf<Extremum> cells) const {
    Key* const to = output + first_cell;
    JB_VECTORIZE
    for (int64_t i = 0; i < count; ++i) to[i] = format.OfKey(cells.first[i]);
  }
};

// The maximum of keys of floating numbers, and its winner.
template <typename KeyOfCell>
struct WinnerOfKeys {
  using Element = KeyOfCell;
  using First = KeyOfCell;
  using Second = int32_t;
  using Narrow = WinnerOfKeys;

  bool first_wins;

  // Folds in a row, or the cell of later rows, without branches and without conditional stores. The winner of a NaN does
  // not matter. `counted_twice` is that of WinnerOfBoth.
  JB_INLINE void Take(First key, int32_t its_winner, int32_t counted_twice, CellsOf<WinnerOfKeys> cells,
                      int64_t i) const {
    const First best = cells.first[i], number = WithOneZero(key), best_number = WithOneZero(best);
    const int32_t winner_before = cells.second[i];
    const int32_t of_both = WinnerOfBoth(winner_before, its_winner, first_wins, counted_twice);
    const int32_t of_equal = number == best_number ? of_both : winner_before;
    cells.first[i] = key > best ? key : best;
    cells.second[i] = number > best_number ? its_winner : of_equal;
  }

  JB_INLINE void Fold(const First* keys, int32_t row, int64_t width, CellsOf<WinnerOfKeys> cells) const {
    if (width == 1 && WithOneZero(*keys) != WithOneZero(*cells.first)) {
      return FoldOne(*keys, row, *cells.first, *cells.second);
    }
    JB_VECTORIZE
    for (int64_t i = 0; i < width; ++i) Take(keys[i], row, 0, cells, i);
  }
};

template <typename Format>
struct ExtremumWithWinner {
  using Key = typename Format::Key;
  using Element = Key;
  using First = std::common_type_t<Key, int32_t>;  // at least as wide as winners, so that vectors need no repacking
  using Second = int32_t;
  using Narrow = WinnerOfKeys<First>;
  static constexpr bool kRounds = false, kKeepsRows = true;

  Format format;
  bool first_wins;
  Key* output;  // the bits of results
  int32_t* winner;

  JB_INLINE CellsOf<ExtremumWithWinner> ResultCells() const { return CellsAt<ExtremumWithWinner>(output, winner); }

  JB_INLINE void Start(int64_t count, CellsOf<ExtremumWithWinner> cells) const {
    std::fill_n(cells.first, count, First{format.Identity()});
    std::fill_n(cells.second, count, kNoWinner);
  }

  JB_INLINE First KeyOf(Key value) const { return format.template KeyOf<First>(value); }
  JB_INLINE Narrow ForNarrow() const { return {first_wins}; }
  void Convert(const Key* from, int64_t count, First* to) const { ConvertToKeys(*this, from, count, to); }

  JB_INLINE void Fold(const Key* values, int32_t row, int64_t width, CellsOf<ExtremumWithWinner> cells) const {
    JB_VECTORIZE
    for (int64_t i = 0; i < width; ++i) ForNarrow().Take(KeyOf(values[i]), row, 0, cells, i);
  }

  JB_INLINE void Merge(int64_t count, CellsOf<ExtremumWithWinner> later, CellsOf<ExtremumWithWinner> cells) const {
    const First identity = format.Identity();
    JB_VECTORIZE
    for (int64_t i = 0; i < count; ++i) {
      ForNarrow().Take(later.first[i], later.second[i], cells.first[i] == identity ? 1 : 0, cells, i);
    }
  }

  JB_INLINE void Write(int64_t count, int64_t first_cell, const int32_t* /*counts*/,
                       CellsOf<ExtremumWithWinner> cells) const {
    Key* const to = output + first_cell;
    int32_t* const to_winner = winner + first_cell;
    JB_VECTORIZE
    for (int64_t i = 0; i < count; ++i) {
      const First key = cells.first[i];
      const int32_t of_number = cells.second[i];
      to[i] = format.OfKey(key);
      to_winner[i] = key > format.infinity ? kNoWinner : of_number;
    }
  }
};

// The reductions of rows of type T.
template <typename T>
using ExtremumOf = Extremum<FormatOfType<T>>;
template <typename T>
using ExtremumWithWinnerOf = ExtremumWithWinner<FormatOfType<T>>;

}  // namespace jax_baracuda::segment
