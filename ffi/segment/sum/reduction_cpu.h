// Sums and means as reductions of the CPU kernels (see engine/rows_cpu.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "ffi/segment/engine/rows_cpu.h"
#include "ffi/segment/sum/arithmetic.h"

namespace jax_baracuda::segment {

// Writes the means of segments from sums of `width` features each. The first sum is feature `into_first` of its
// segment.
template <typename C, typename T>
JB_INLINE void DivideByCounts(const C* sums, int64_t count, int64_t into_first, int64_t width, const int32_t* counts,
                              T* to) {
  constexpr int64_t kAtOnce = 256;
  C rows[kAtOnce];
  int64_t left = width - into_first;  // features left of the segment
  for (int64_t begin = 0; begin < count; begin += kAtOnce) {
    const int64_t part = std::min(kAtOnce, count - begin);
    for (int64_t i = 0; i < part;) {
      const int64_t end = std::min(i + left, part);
      left -= end - i;
      for (const C divisor = static_cast<C>(std::max(*counts, 1)); i < end; ++i) rows[i] = divisor;
      if (left == 0) {
        ++counts;
        left = width;
      }
    }
    StoreEach(part, to + begin,
              [&](int64_t i) __attribute__((always_inline)) { return RoundedFor<T>(sums[begin + i] / rows[i]); });
  }
}

template <typename T>
JB_AVX2_CLONES void WidenToDouble(const T* from, int64_t count, double* to) {
  ForEachPart(from, count, [&](int64_t begin, int64_t part, const auto* numbers) __attribute__((always_inline)) {
    JB_VECTORIZE
    for (int64_t i = 0; i < part; ++i) to[begin + i] = static_cast<ComputeType<T>>(numbers[i]);
  });
}

// Sums in C, the ComputeType or double. Integers are summed as unsigned ones, which wrap. Only floating types have means.
template <typename T, typename C = ComputeType<T>>
struct Sum {
  using Element = T;
  using First = C;
  using Second = NoNumber;
  using Narrow = Sum<First>;
  static constexpr bool kRounds = kIsFloating<T>;
  static constexpr bool kIsPrecise = !std::is_same_v<C, ComputeType<T>>;

  void* output = nullptr;  // of T, or of First if is_wide
  bool is_wide = false;
  int64_t mean_features = 0;  // for means: the number of features

  JB_INLINE CellsOf<Sum> ResultCells() const {
    if (mean_features > 0) return {};
    return is_wide ? CellsAt<Sum>(static_cast<First*>(output)) : CellsAt<Sum>(static_cast<T*>(output));
  }

  JB_INLINE void Start(int64_t count, CellsOf<Sum> cells) const { std::fill_n(cells.first, count, First{0}); }

  // Values are of T, or converted to First.
  template <typename Value>
  JB_INLINE void Fold(const Value* values, int32_t /*row*/, int64_t width, CellsOf<Sum> cells) const {
    AddNumbers(values, width, cells.first);
  }

  JB_INLINE Narrow ForNarrow() const { return {}; }
  void Convert(const T* from, int64_t count, First* to) const {
    if constexpr (kIsPrecise) {
      WidenToDouble(from, count, to);
    } else {
      Widen(from, count, to);
    }
  }

  JB_INLINE void Merge(int64_t count, CellsOf<Sum> later, CellsOf<Sum> cells) const {
    AddNumbers(later.first, count, cells.first);
  }

  JB_INLINE void Write(int64_t count, int64_t first_cell, const int32_t* counts, CellsOf<Sum> cells) const {
    T* const to = static_cast<T*>(output) + first_cell;
    if (is_wide) {
      WriteNumbers(cells.first, count, static_cast<First*>(output) + first_cell);
    } else if (!kIsFloating<T> || mean_features == 0) {
      if constexpr (kIsPrecise) {
        StoreEach(count, to, [&](int64_t i) __attribute__((always_inline)) { return RoundedFor<T>(cells.first[i]); });
      } else {
        WriteNumbers(cells.first, count, to);
      }
    } else if (mean_features == 1) {
      StoreEach(count, to, [&](int64_t i) __attribute__((always_inline)) {
        return RoundedFor<T>(cells.first[i] / static_cast<First>(std::max(counts[i], 1)));
      });
    } else {
      DivideByCounts(cells.first, count, first_cell % mean_features, mean_features, counts, to);
    }
  }
};

template <typename T>
using SumOf = Sum<T>;
template <typename T>
using Float64SumOf = Sum<T, double>;

}  // namespace jax_baracuda::segment
