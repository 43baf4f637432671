// Rows gathered by edges from another array, for the CPU kernels.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "ffi/segment/engine/rows_cpu.h"

namespace jax_baracuda::segment {

// Edge numbers by position in segment order, for one batch element.
struct EdgeNumbers {
  const int32_t* order;  // or nullptr
  int64_t edges;
  int64_t first_place = 0;

  EdgeNumbers(const int32_t* edge_order, int64_t num_edges) : order(edge_order), edges(num_edges) {}

  // Clamped: an invalid order must not cause accesses out of bounds.
  JB_INLINE int64_t operator[](int64_t place) const {
    return order == nullptr ? first_place + place : std::clamp<int64_t>(order[place], 0, edges - 1);
  }
};

JB_INLINE int64_t NearestRow(int64_t id, int64_t num_rows) { return std::max<int64_t>(0, std::min(id, num_rows - 1)); }

// The edges of a batch element from a position on, and the rows that they gather.
template <typename T>
struct EdgesOfBatch {
  const T* rows;
  const int32_t* gather_ids;
  EdgeNumbers numbers;
  int64_t num_rows, features;
  bool clips;              // gather ids out of range name the nearest row; otherwise those edges add nothing
  bool rows_exceed_cache;  // too large for a near cache, so that prefetching a random row pays

  EdgesOfBatch(const GatheringCall& call, bool clips, int64_t batch, int64_t place)
      : rows(call.Data().Of<T>(batch, call.num_rows * call.problem.features)),
        gather_ids(call.gather_ids.Of<int32_t>(batch, call.problem.rows) + place),
        numbers(call.edge_order.Of<int32_t>(batch, call.problem.rows), call.problem.rows),
        num_rows(call.num_rows),
        features(call.problem.features),
        clips(clips),
        rows_exceed_cache(ExceedsNearCache(num_rows * features, sizeof(T))) {
    numbers.first_place = place;
    if (numbers.order != nullptr) numbers.order += place;
  }

  JB_INLINE bool HasRow(int32_t place) const {
    return clips || static_cast<uint32_t>(gather_ids[place]) < static_cast<uint64_t>(num_rows);
  }
  JB_INLINE const T* Row(int32_t place) const { return rows + NearestRow(gather_ids[place], num_rows) * features; }
};

// Copies the narrow rows of a block's edges, one after another.
template <typename Bits>
JB_AVX2 void CopyNarrowRows(const RowBlock block, const EdgesOfBatch<Bits> edges, Bits* to) {
  DispatchNarrow(edges.features, [&](auto width) __attribute__((always_inline)) {
    for (int64_t i = 0; i < block.count; ++i) {
      if (edges.rows_exceed_cache && i + kScanPrefetchDistance < block.known) {
        const int64_t upcoming = edges.gather_ids[block.offsets[i + kScanPrefetchDistance]];
        const Bits* const row = edges.rows + NearestRow(upcoming, edges.num_rows) * width;
        __builtin_prefetch(row);
        __builtin_prefetch(row + width - 1);  // the row may straddle two cache lines
      }
      const Bits* const from = edges.rows + NearestRow(edges.gather_ids[block.offsets[i]], edges.num_rows) * width;
      std::memcpy(to + i * width, from, static_cast<size_t>(width) * sizeof(Bits));
    }
  });
}

template <typename Reduction, typename Input>
JB_CPU_CLONES void FoldGathered(const RowBlock block, const EdgesOfBatch<typename Reduction::Element> edges,
                                const Input input, const Reduction reduction, const FoldTarget target) {
  const CellsOf<Reduction> cells = TypedCells<Reduction>(target.cells);
  const int64_t width = target.width;
  ForEachMember<Reduction>(block, target, width, [&](int64_t i, int64_t segment) __attribute__((always_inline)) {
    if (i + kPrefetchDistance < block.known) {
      const int32_t upcoming = block.offsets[i + kPrefetchDistance];
      if (edges.rows_exceed_cache) PrefetchRow(edges.Row(upcoming), width);
      input.Prefetch(edges.numbers[upcoming]);
    }
    const int32_t place = block.offsets[i];
    if (edges.HasRow(place)) {
      input.Fold(reduction, edges.Row(place), edges.numbers[place], width, cells + segment * width);
    }
  });
}

// Complete rows, as the input of a GatheredReduction: what else an edge has, and how it changes the row.
struct PlainRows {
  JB_INLINE PlainRows OfBatch(int64_t /*batch*/) const { return {}; }

  // Whether the batch shares what else an edge has.
  bool IsShared() const { return false; }

  JB_INLINE void Prefetch(int64_t /*edge*/) const {}

  // Folds the row of an edge.
  template <typename Reduction>
  JB_INLINE void Fold(const Reduction& reduction, const typename Reduction::Element* row, int64_t edge, int64_t width,
                      CellsOf<Reduction> cells) const {
    reduction.Fold(row, static_cast<int32_t>(edge), width, cells);
  }

  // Changes the narrow rows of `count` edges, before they are folded.
  template <typename Number>
  void Change(const int32_t* /*edges*/, int64_t /*count*/, int64_t /*width*/, Number* /*numbers*/) const {}
};

// The reduction of the rows that edges gather.
template <typename Reduction, typename Input = PlainRows>
class GatheredReduction final : public TypedReduction<Reduction> {
 public:
  using Element = typename Reduction::Element;
  using Narrow = typename Reduction::Narrow;

  // A thread's features could start inside a head, so threads do not split rows.
  GatheredReduction(const GatheringCall& call, bool clips, const Reduction& reduction, const Input& input = {})
      : TypedReduction<Reduction>(
            call.problem, IsNarrow(call.problem.features) ? kConvertedNumbers / call.problem.features : kConvertedIds,
            /*splits_features=*/false, reduction),
        call_(call),
        clips_(clips),
        input_(input),
        elements_at_once_(ElementsAtOnce(call.problem, this->type)) {
    // The edges of later elements continue the numbers of the first, unless something needs those within an element.
    const bool numbers_may_continue = !kKeepsRows<Reduction> && call.edge_order.data == nullptr && !input.IsShared();
    const bool fit = elements_at_once_ * call.num_rows <= std::numeric_limits<int32_t>::max();
    if (elements_at_once_ > 1 && call.gather_ids.is_shared && numbers_may_continue && fit) NumberRows();
  }

  bool FoldsElementsTogether() const override { return rows_of_elements_ != nullptr; }

  void Fold(const RowBlock& block, const FoldTarget& target) const override {
    if (call_.num_rows == 0) return;
    const auto edges = EdgesOf<Element>(block, target);
    const Input input = input_.OfBatch(target.batch);
    if (!IsNarrow(target.width)) return FoldGathered(block, edges, input, this->reduction, target);
    int32_t numbers[kConvertedIds], ids[kConvertedIds + kScanPrefetchDistance];
    for (int64_t i = 0; i < block.count; ++i) numbers[i] = static_cast<int32_t>(edges.numbers[block.offsets[i]]);
    RowBlock of_numbers{block.count, block.known, 0, block.first_segment, numbers, block.ids};
    FoldTarget own_target = target;
    if (!clips_) {
      own_target.ids_ascend = false;  // edges without a row are among those of a segment
      of_numbers.ids = ids;
      for (int64_t i = 0; i < block.known; ++i) ids[i] = edges.HasRow(block.offsets[i]) ? block.ids[i] : -1;
    }
    using Bits = BitsOf<Element>;
    Element rows[kConvertedNumbers];
    CopyNarrowRows(block, EdgesOf<Bits>(block, target), reinterpret_cast<Bits*>(rows));
    const auto fold = [&](auto* elements, const Narrow& reduction) {
      input.Change(numbers, block.count, target.width, elements);
      FoldNarrow(of_numbers, kAllOffsets.values, elements, reduction, own_target);
    };
    if constexpr (std::is_same_v<Narrow, Reduction>) {
      fold(rows, this->reduction);
    } else {
      typename Narrow::Element elements[kConvertedNumbers];
      this->reduction.Convert(rows, block.count * target.width, elements);
      fold(elements, this->reduction.ForNarrow());
    }
  }

 private:
  // Numbers the gathered rows of several elements of the batch in turn; -1 for edges that add nothing.
  void NumberRows() {
    rows_of_elements_ = Allocate<int32_t>(elements_at_once_ * call_.problem.rows);
    if (rows_of_elements_ == nullptr) return;
    int32_t* to = rows_of_elements_.get();
    const EdgesOfBatch<Element> edges(call_, clips_, 0, 0);
    for (int64_t element = 0; element < elements_at_once_; ++element) {
      const int64_t first_row = call_.problem.data_is_shared ? 0 : element * call_.num_rows;
      for (int32_t place = 0; place < call_.problem.rows; ++place) {
        const int64_t row = first_row + NearestRow(edges.gather_ids[place], call_.num_rows);
        *to++ = edges.HasRow(place) ? static_cast<int32_t>(row) : -1;
      }
    }
  }

  template <typename T>
  EdgesOfBatch<T> EdgesOf(const RowBlock& block, const FoldTarget& target) const {
    EdgesOfBatch<T> edges(call_, clips_, target.batch, block.first_row);
    if (rows_of_elements_ != nullptr) {
      edges.gather_ids = rows_of_elements_.get() + block.first_row;
      edges.num_rows *= elements_at_once_;
    }
    return edges;
  }

  const GatheringCall& call_;
  const bool clips_;
  const Input input_;
  const int64_t elements_at_once_;
  Memory<int32_t> rows_of_elements_;  // of up to elements_at_once_ elements; nullptr if these are folded one by one
};

}  // namespace jax_baracuda::segment
