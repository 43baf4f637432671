// Maxima and minima, as the CPU kernels take them (see engine/rows_cpu.h). A minimum is the maximum of flipped values:
// they are flipped when they are read, and the result when it is written.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "ffi/segment/engine/rows_cpu.h"
#include "ffi/segment/extremum/arithmetic.h"

namespace jax_baracuda::segment {

// Larger in the fewest vector instructions, where subnormal numbers are not treated as zero. Of equal numbers it has
// the bits that both have: those of +0, or of either.
template <typename C>
JB_INLINE C LargerOf(C best, C value) {
  if constexpr (std::is_floating_point_v<C>) {
    BitsOf<C> bits = BitCast<BitsOf<C>>(best), value_bits = BitCast<BitsOf<C>>(value);
    bits &= value == best ? value_bits : static_cast<BitsOf<C>>(~BitsOf<C>{0});
    const bool takes_value = !(value <= best) && best == best;
    bits = takes_value ? value_bits : bits;
    return BitCast<C>(bits);
  } else {
    return Larger(best, value);
  }
}

// Folds a single number that is neither NaN nor equal to the best one: one comparison and no branch on what is random.
// Returns false, and does nothing, for others.
template <typename C>
JB_INLINE bool TakeScalar(C value, int32_t row, C* best, int32_t* winner) {
  if constexpr (std::is_floating_point_v<C>) {
    if (!__builtin_islessgreater(value, *best)) return false;
  } else {
    if (value == *best) return false;
  }
  const bool is_above = value > *best;
  *best = is_above ? value : *best;
  *winner = is_above ? row : *winner;
  return true;
}

template <typename T>
struct Extremum {
  using Element = T;
  using First = ComputeType<T>;
  using Second = NoNumber;
  static constexpr bool kRounds = false, kHoldsRuns = true;
  static constexpr bool kTakesWeights = false, kTakesSelection = false;

  BitsOf<T> flip;
  T* output;

  JB_INLINE CellsOf<Extremum> ResultCells() const { return CellsAt<Extremum>(output); }

  JB_INLINE void Start(int64_t count, CellsOf<Extremum> cells) const {
    std::fill_n(cells.first, count, MaxIdentity<First>());
  }

  JB_INLINE void Fold(const T* values, int32_t /*row*/, int64_t width, CellsOf<Extremum> cells) const {
    int32_t any_row = 0;
    if (width == 1 && TakeScalar(static_cast<First>(Flip(*values, flip)), 0, cells.first, &any_row)) return;
    JB_VECTORIZE
    for (int64_t i = 0; i < width; ++i) {
      cells.first[i] = LargerOf(cells.first[i], static_cast<First>(Flip(values[i], flip)));
    }
  }

  JB_INLINE void Merge(int64_t count, CellsOf<Extremum> later, CellsOf<Extremum> cells) const {
    JB_VECTORIZE
    for (int64_t i = 0; i < count; ++i) cells.first[i] = LargerOf(cells.first[i], later.first[i]);
  }

  JB_INLINE void Write(int64_t count, int64_t first_cell, const int32_t* /*counts*/, CellsOf<Extremum> cells) const {
    T* const to = output + first_cell;
    JB_VECTORIZE
    for (int64_t i = 0; i < count; ++i) to[i] = Flip(static_cast<T>(cells.first[i]), flip);
  }
};

template <typename T>
struct ExtremumWithWinner {
  using Element = T;
  using First = ComputeType<T>;
  using Second = int32_t;
  static constexpr bool kRounds = false, kHoldsRuns = true;
  static constexpr bool kTakesWeights = false, kTakesSelection = false;

  BitsOf<T> flip;
  bool first_wins;
  T* output;
  int32_t* winner;

  JB_INLINE CellsOf<ExtremumWithWinner> ResultCells() const { return CellsAt<ExtremumWithWinner>(output, winner); }

  JB_INLINE void Start(int64_t count, CellsOf<ExtremumWithWinner> cells) const {
    std::fill_n(cells.first, count, MaxIdentity<First>());
    std::fill_n(cells.second, count, kNoWinner);
  }

  JB_INLINE void Fold(const T* values, int32_t row, int64_t width, CellsOf<ExtremumWithWinner> cells) const {
    if (width == 1 && TakeScalar(static_cast<First>(Flip(*values, flip)), row, cells.first, cells.second)) return;
    JB_VECTORIZE
    for (int64_t i = 0; i < width; ++i) {
      // AddRow without branches, and without stores that hang on a condition. The winner of a NaN does not matter.
      const First value = static_cast<First>(Flip(values[i], flip)), best = cells.first[i];
      const int32_t winner_before = cells.second[i];
      const int32_t first = winner_before == kNoWinner ? row : winner_before, shared = -TieCount(winner_before) - 1;
      const bool is_above = !(value <= best), is_equal = value == best;
      cells.first[i] = LargerOf(best, value);
      cells.second[i] = is_above ? row : is_equal ? (first_wins ? first : shared) : winner_before;
    }
  }

  JB_INLINE void Merge(int64_t count, CellsOf<ExtremumWithWinner> later, CellsOf<ExtremumWithWinner> cells) const {
    for (int64_t i = 0; i < count; ++i) {
      Cell<First> cell{cells.first[i], cells.second[i]};
      MergeCell(cell, Cell<First>{later.first[i], later.second[i]}, first_wins);
      cells.first[i] = cell.best;
      cells.second[i] = cell.winner;
    }
  }

  JB_INLINE void Write(int64_t count, int64_t first_cell, const int32_t* /*counts*/,
                       CellsOf<ExtremumWithWinner> cells) const {
    T* const to = output + first_cell;
    int32_t* const to_winner = winner + first_cell;
    JB_VECTORIZE
    for (int64_t i = 0; i < count; ++i) {
      to[i] = Flip(static_cast<T>(cells.first[i]), flip);
      to_winner[i] = FinalWinner(Cell<First>{cells.first[i], cells.second[i]});
    }
  }
};

}  // namespace jax_baracuda::segment
