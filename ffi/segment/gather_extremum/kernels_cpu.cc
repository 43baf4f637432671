// The CPU kernels of gather_segment_max, gather_segment_min and their gradients. The gradient first finds the cells
// that each edge won, as one bit per feature. Then it sums the selected cotangents over the edges of each row.

#include <algorithm>
#include <cstdint>
#include <memory>

#include "ffi/core/integers.h"
#include "ffi/segment/engine/gathered_rows_cpu.h"
#include "ffi/segment/extremum/reduction_cpu.h"
#include "ffi/segment/gather_extremum/call.h"
#include "ffi/segment/sum/reduction_cpu.h"

namespace jax_baracuda::segment {
namespace {

// Words per edge, with one bit per feature.
int64_t SelectionWords(const Problem& problem) { return CeilDivide(problem.features, 32); }

// Clears the elements of narrow rows that their edges do not select.
template <typename C>
JB_AVX2 void ClearUnselected(const uint32_t* selection, const int32_t* edges, int64_t count, int64_t features,
                             C* numbers) {
  DispatchNarrow(features, [&](auto width) __attribute__((always_inline)) {
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t bits = selection[edges[i]];
      C* const of_edge = numbers + i * width;
      for (int64_t j = 0; j < width; ++j) of_edge[j] = (bits >> j & 1) != 0 ? of_edge[j] : C{0};
    }
  });
}

// Selected elements of rows (see PlainRows).
struct SelectedRows {
  const uint32_t* selection;  // [batch, edges, words], one bit per element of a row
  int64_t edges, words;

  JB_INLINE SelectedRows OfBatch(int64_t batch) const { return {selection + batch * edges * words, edges, words}; }

  bool IsShared() const { return false; }

  JB_INLINE void Prefetch(int64_t edge) const { PrefetchRow(selection + edge * words, words); }

  template <typename T>
  JB_INLINE void Fold(const Sum<T>&, const T* row, int64_t edge, int64_t width, CellsOf<Sum<T>> cells) const {
    using C = ComputeType<T>;
    constexpr int64_t kWordBits = 32;
    const uint32_t* const selected = selection + edge * words;
    WithNumbers(row, width, [&](const auto* numbers) __attribute__((always_inline)) {
      for (int64_t begin = 0; begin < width; begin += kWordBits) {
        const uint32_t bits = selected[begin / kWordBits];
        const auto* const from = numbers + begin;
        C* const to = cells.first + begin;
        const int count = static_cast<int>(std::min(kWordBits, width - begin));
        JB_VECTORIZE
        for (int i = 0; i < count; ++i) to[i] += (bits >> i & 1) != 0 ? static_cast<C>(from[i]) : C{0};
      }
    });
  }

  template <typename C>
  void Change(const int32_t* of_edges, int64_t count, int64_t width, C* numbers) const {
    ClearUnselected(selection, of_edges, count, width, numbers);
  }
};

// Finds the cells won by the edges at positions [begin, end): one bit per feature.
template <typename T>
JB_AVX2_CLONES void SelectWon(const GatherExtremumBackwardCall call, int64_t batch, int64_t begin, int64_t end,
                              uint32_t* selection) {
  constexpr int64_t kWordBits = 32;
  const int64_t edges = call.problem.rows, features = call.problem.features, words = SelectionWords(call.problem);
  const int64_t cells = call.num_rows * features;
  const int32_t* const winners = call.winner.Of<int32_t>(batch, cells);
  const T* const extrema = call.extrema.Of<T>(batch, cells);
  const T* const gathered = call.gathered.Of<T>(batch, call.problem.segments * features);
  const int32_t* const segment_ids = call.segment_ids_of_edges.Of<int32_t>(batch, edges);
  const int32_t* const gather_ids = call.gather_ids_of_edges.Of<int32_t>(batch, edges);
  const EdgeNumbers numbers(call.forward_order.Of<int32_t>(batch, edges), edges);
  const auto is_cell = [&](int64_t segment) __attribute__((always_inline)) {
    return static_cast<uint64_t>(segment) < static_cast<uint64_t>(call.num_rows);
  };
  for (int64_t place = begin; place < end; ++place) {
    if (place + kPrefetchDistance < end && is_cell(segment_ids[place + kPrefetchDistance])) {
      PrefetchRow(winners + segment_ids[place + kPrefetchDistance] * features, features);
    }
    const int32_t edge = static_cast<int32_t>(numbers[place]);
    uint32_t* const selected = selection + (batch * edges + edge) * words;
    const int64_t segment = segment_ids[place];
    if (!is_cell(segment)) {
      std::fill_n(selected, words, 0);
      continue;
    }
    for (int64_t word = 0; word < words; ++word) {
      const int64_t first = segment * features + word * kWordBits;
      const int count = static_cast<int>(std::min(kWordBits, features - word * kWordBits));
      uint32_t bits = 0;
      int32_t lowest = 0;
      JB_VECTORIZE
      for (int i = 0; i < count; ++i) {
        bits |= static_cast<uint32_t>(winners[first + i] == edge) << i;
        lowest = std::min(lowest, winners[first + i]);
      }
      if (IsTie(lowest) && call.shares_ties) {
        const T* const row =
            gathered + NearestRow(gather_ids[place], call.problem.segments) * features + word * kWordBits;
        JB_VECTORIZE
        for (int i = 0; i < count; ++i) {
          const bool attains = AreEqual(row[i], extrema[first + i]);
          bits |= static_cast<uint32_t>(IsTie(winners[first + i]) && attains) << i;
        }
      }
      selected[word] = bits;
    }
  }
}

}  // namespace

std::vector<const char*> GatherExtremumCall::Strategies() { return ExactStrategies(); }

Plan GatherExtremumCall::MakePlan() const {
  return with_winner ? PlanReduction<ExtremumWithWinnerOf>(*this, JB_DISPATCH(DispatchFloating))
                     : PlanReduction<ExtremumOf>(*this, JB_DISPATCH(DispatchFloating));
}

bool GatherExtremumCall::Run(ffi::ThreadPool& pool) const {
  return DispatchKeys(JB_DISPATCH(DispatchFloating), type, is_minimum, [&](auto format) {
    using Format = decltype(format);
    auto* const keys = static_cast<typename Format::Key*>(output);
    const auto reduce = [&](const auto& reduction) {
      return ReduceAll(pool, SegmentIds(*this), GatheredReduction(*this, /*clips=*/true, reduction));
    };
    return with_winner ? reduce(ExtremumWithWinner<Format>{format, first_wins, keys, winner})
                       : reduce(Extremum<Format>{format, keys});
  });
}

std::vector<const char*> GatherExtremumBackwardCall::Strategies() { return RoundingStrategies(); }

Plan GatherExtremumBackwardCall::MakePlan() const { return PlanReduction<SumOf>(*this, JB_DISPATCH(DispatchFloating)); }

bool GatherExtremumBackwardCall::Run(ffi::ThreadPool& pool) const {
  if (problem.HasNoResult()) return true;
  const int64_t words = SelectionWords(problem);
  const auto selection = Allocate<uint32_t>(problem.batch * problem.rows * words);
  if (selection == nullptr) return false;
  if (forward_order.data != nullptr) {
    // Edges missing from an invalid order won nothing.
    WriteZeroBytes(pool, selection.get(), problem.batch * problem.rows * words * sizeof(uint32_t));
  }
  return DispatchOr(true, type, JB_DISPATCH(DispatchFloating), [&](auto tag) {
    using T = typename decltype(tag)::type;
    ForEachRangeOfBatch(
        pool, problem.batch, problem.rows, problem.rows * problem.features * sizeof(int32_t),
        [&](int64_t batch, int64_t begin, int64_t end) { SelectWon<T>(*this, batch, begin, end, selection.get()); });
    const SelectedRows rows{selection.get(), problem.rows, words};
    return ReduceAll(pool, SegmentIds(*this), GatheredReduction(*this, /*clips=*/false, Sum<T>{d_data}, rows));
  });
}

}  // namespace jax_baracuda::segment
