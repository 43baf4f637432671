// Sums of gathered rows as a reduction of the CPU kernels (see engine/rows_cpu.h).
#pragma once

#include <algorithm>
#include <cstdint>

#include "ffi/segment/engine/gathered_rows_cpu.h"

namespace jax_baracuda::segment {

// Sums of complete rows, with or without weights, or of selected elements.
template <typename T, bool kSelects = false>
struct GatherSum {
  using Element = T;
  using First = ComputeType<T>;
  using Second = NoNumber;
  static constexpr bool kRounds = true, kHoldsRuns = true, kFoldsBoth = true;
  static constexpr bool kTakesWeights = !kSelects, kTakesSelection = kSelects;

  void* output;
  bool is_wide;

  JB_INLINE CellsOf<GatherSum> ResultCells() const {
    return is_wide ? CellsAt<GatherSum>(static_cast<First*>(output)) : CellsAt<GatherSum>(static_cast<T*>(output));
  }

  JB_INLINE void Start(int64_t count, CellsOf<GatherSum> cells) const { std::fill_n(cells.first, count, First{0}); }

  template <typename Value>
  JB_INLINE void Fold(const Value* values, int32_t /*edge*/, int64_t width, CellsOf<GatherSum> cells) const {
    AddNumbers(values, width, cells.first);
  }

  template <typename Value>
  JB_INLINE void FoldScaled(const Value* values, const T* weights, int64_t heads, int64_t width,
                            CellsOf<GatherSum> cells) const {
    const int64_t features = width / heads;
    for (int64_t head = 0; head < heads; ++head) {
      const First weight = static_cast<First>(weights[head]);
      const Value* const from = values + head * features;
      First* const to = cells.first + head * features;
      JB_VECTORIZE
      for (int64_t i = 0; i < features; ++i) to[i] += weight * static_cast<First>(from[i]);
    }
  }

  template <typename Value>
  JB_INLINE void FoldSelected(const Value* values, const uint32_t* selected, int64_t width,
                              CellsOf<GatherSum> cells) const {
    constexpr int64_t kWordBits = 32;
    for (int64_t begin = 0; begin < width; begin += kWordBits) {
      const uint32_t bits = selected[begin / kWordBits];
      const Value* const from = values + begin;
      First* const to = cells.first + begin;
      const int count = static_cast<int>(std::min(kWordBits, width - begin));
      JB_VECTORIZE
      for (int i = 0; i < count; ++i) to[i] += (bits >> i & 1) != 0 ? static_cast<First>(from[i]) : First{0};
    }
  }

  JB_INLINE void Merge(int64_t count, CellsOf<GatherSum> later, CellsOf<GatherSum> cells) const {
    AddNumbers(later.first, count, cells.first);
  }

  JB_INLINE void WriteEmpty(int64_t count, int64_t first_cell) const {
    if (is_wide) {
      WriteZeros(static_cast<First*>(output) + first_cell, count);
    } else {
      WriteZeros(static_cast<T*>(output) + first_cell, count);
    }
  }

  JB_INLINE void Write(int64_t count, int64_t first_cell, const int32_t*, CellsOf<GatherSum> cells) const {
    if (is_wide) {
      WriteNumbers(cells.first, count, static_cast<First*>(output) + first_cell);
    } else {
      WriteNumbers(cells.first, count, static_cast<T*>(output) + first_cell);
    }
  }
};

}  // namespace jax_baracuda::segment
