// Rows gathered by edges from another array, for the CPU kernels.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ffi/segment/engine/rows_cpu.h"

namespace jax_baracuda::segment {

// The data of one batch element in an array that may be shared by the batch.
template <typename T>
JB_INLINE const T* OfElement(const T* array, bool is_shared, int64_t batch, int64_t size) {
  return array == nullptr || is_shared ? array : array + batch * size;
}

// Edge numbers by position in segment order, for one batch element.
struct EdgeNumbers {
  const int32_t* order;  // or nullptr
  int64_t edges;
  int64_t first_place = 0;

  EdgeNumbers(const int32_t* edge_order, bool is_shared, int64_t batch, int64_t num_edges)
      : order(OfElement(edge_order, is_shared, batch, num_edges)), edges(num_edges) {}

  // Clamped: an invalid order must not cause accesses out of bounds.
  JB_INLINE int64_t operator[](int64_t place) const {
    return order == nullptr ? first_place + place : std::clamp<int64_t>(order[place], 0, edges - 1);
  }
};

JB_INLINE int64_t NearestRow(int64_t id, int64_t num_rows) { return std::max<int64_t>(0, std::min(id, num_rows - 1)); }

// The gathered rows of a call (see rows_cpu.h): complete rows, rows times the weights of their heads, or selected
// elements of rows.
template <typename T>
struct GatheredRows {
  static constexpr bool kSplitsFeatures = false;  // a thread's features could start inside a head

  GatheringCall call;
  bool clips;                  // gather ids out of range name the nearest row; otherwise those edges add nothing
  const T* weights = nullptr;  // [batch or 1, edges, heads]
  bool weights_are_shared = false;
  int64_t heads = 1;
  const uint32_t* selection = nullptr;  // [batch, edges, selection_words], one bit per element of a row
  int64_t selection_words = 0;

  struct Element {
    static constexpr bool kAreInOrder = false;

    const T* rows;
    const int32_t* gather_ids;
    int64_t num_rows;
    bool clips;
    const T* weights;
    int64_t heads;
    const uint32_t* selection;
    int64_t selection_words;
    EdgeNumbers numbers;

    // The same rows, with positions counted from `place` on.
    JB_INLINE Element From(int64_t place, int64_t /*stride*/) const {
      Element from = *this;
      from.gather_ids += place;
      from.numbers.first_place += place;
      if (numbers.order != nullptr) from.numbers.order += place;
      return from;
    }

    // The gathered row of an edge; out of range if the edge has none.
    JB_INLINE int64_t Row(int32_t place) const {
      return clips ? NearestRow(gather_ids[place], num_rows) : gather_ids[place];
    }
    JB_INLINE bool Exists(int64_t row) const { return static_cast<uint64_t>(row) < static_cast<uint64_t>(num_rows); }

    JB_INLINE void Prefetch(int32_t place, int64_t stride, int64_t width) const {
      const int64_t row = Row(place);
      if (Exists(row)) PrefetchRow(rows + row * stride, width);
      if (selection != nullptr) PrefetchRow(selection + numbers[place] * selection_words, selection_words);
    }

    // Prefetches both ends: a narrow row may straddle two cache lines.
    JB_INLINE void PrefetchNarrow(int32_t place, int64_t width) const {
      const int64_t row = Row(place);
      if (!Exists(row)) return;
      __builtin_prefetch(rows + row * width);
      __builtin_prefetch(rows + row * width + width - 1);
    }

    template <typename Reduction>
    JB_INLINE void Fold(const Reduction& reduction, int32_t place, int64_t stride, int64_t width,
                        CellsOf<Reduction> cells) const {
      const int64_t row = Row(place);
      if (!Exists(row)) return;
      const int64_t edge = numbers[place];
      const T* const values = rows + row * stride;
      if constexpr (Reduction::kTakesWeights) {
        if (weights != nullptr) {
          WithNumbers(values, width, [&](const auto* row_numbers) __attribute__((always_inline)) {
            reduction.FoldScaled(row_numbers, weights + edge * heads, heads, width, cells);
          });
          return;
        }
      }
      if constexpr (Reduction::kTakesSelection) {
        WithNumbers(values, width, [&](const auto* row_numbers) __attribute__((always_inline)) {
          reduction.FoldSelected(row_numbers, selection + edge * selection_words, width, cells);
        });
      } else {
        FoldRow(reduction, values, static_cast<int32_t>(edge), width, cells);
      }
    }
  };

  JB_INLINE Element At(const Problem& problem, int64_t batch, int64_t feature) const {
    const int64_t edges = problem.rows;
    return {
        OfElement(static_cast<const T*>(call.data), problem.data_is_shared, batch, call.num_rows * problem.features) +
            feature,
        OfElement(call.gather_ids, call.gather_ids_are_shared, batch, edges),
        call.num_rows,
        clips,
        OfElement(weights, weights_are_shared, batch, edges * heads),
        heads,
        OfElement(selection, /*is_shared=*/false, batch, edges * selection_words),
        selection_words,
        EdgeNumbers(call.edge_order, call.edge_order_is_shared, batch, edges)};
  }
};

}  // namespace jax_baracuda::segment
