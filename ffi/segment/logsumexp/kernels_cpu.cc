// The CPU kernel of segment_logsumexp.
//
// Exponentials of narrow rows vectorise over the rows of a block: one pass finds how each row changes its cells, a
// second one computes all exponentials, a third one adds them up.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "ffi/core/exp_cpu.h"
#include "ffi/segment/engine/rows_cpu.h"
#include "ffi/segment/logsumexp/logsumexp.h"
#include "ffi/segment/logsumexp/reduction_cpu.h"

namespace jax_baracuda::segment {
namespace {

// How far a value is above the maximum of its cell. Infinities count as the largest number, so the result is NaN for a
// NaN only.
template <typename C>
JB_INLINE C Distance(C value, C maximum) {
  constexpr C kLargest = std::numeric_limits<C>::max();
  return (value > kLargest ? kLargest : value) - (maximum > kLargest ? kLargest : maximum);
}

// Folds rows into a cell, given their maximum and their total: 1 for one row.
template <typename C>
JB_INLINE void FoldOne(C maximum_of_rows, C total_of_rows, C* maximum, C* total) {
  const C distance = Distance(maximum_of_rows, *maximum), scale = Exp(-std::abs(distance));
  *total = distance > C{0} ? *total * scale + total_of_rows : *total + total_of_rows * scale;
  *maximum = maximum_of_rows > *maximum ? maximum_of_rows : *maximum;
}

// The reduction, for the kernels of engine/rows_cpu.h. The numbers of a cell are its maximum and its total. The maximum
// passes over NaN, which the total keeps.
template <typename T>
struct LogSumExpReduction {
  using Element = T;
  using First = ComputeType<T>;
  using Second = ComputeType<T>;
  using Narrow = LogSumExpReduction<First>;
  static constexpr bool kRounds = true;

  First *maxima = nullptr, *totals = nullptr;

  JB_INLINE CellsOf<LogSumExpReduction> ResultCells() const { return {maxima, totals}; }

  JB_INLINE void Start(int64_t count, CellsOf<LogSumExpReduction> cells) const {
    // Finite, so that rows of -inf have a distance from it.
    std::fill_n(cells.first, count, std::numeric_limits<First>::lowest());
    std::fill_n(cells.second, count, First{0});
  }

  JB_INLINE void Fold(const T* values, int32_t /*row*/, int64_t width, CellsOf<LogSumExpReduction> cells) const {
    ForEachPart(values, width, [&](int64_t begin, int64_t count, const auto* numbers) __attribute__((always_inline)) {
      First *const maxima = cells.first + begin, *const totals = cells.second + begin;
      JB_VECTORIZE
      for (int64_t i = 0; i < count; ++i) FoldOne(static_cast<First>(numbers[i]), First{1}, &maxima[i], &totals[i]);
    });
  }

  JB_INLINE Narrow ForNarrow() const { return {}; }
  void Convert(const T* from, int64_t count, First* to) const { Widen(from, count, to); }

  JB_INLINE void Merge(int64_t count, CellsOf<LogSumExpReduction> later, CellsOf<LogSumExpReduction> cells) const {
    JB_VECTORIZE
    for (int64_t i = 0; i < count; ++i) FoldOne(later.first[i], later.second[i], &cells.first[i], &cells.second[i]);
  }

  JB_INLINE void Write(int64_t count, int64_t first_cell, const int32_t* /*counts*/,
                       CellsOf<LogSumExpReduction> cells) const {
    JB_VECTORIZE
    for (int64_t i = 0; i < count; ++i) {
      const LogSumExp<First> none = LogSumExp<First>::OfNoRows();
      const First maximum = cells.first[i], total = cells.second[i], if_number = total == 0 ? none.maximum : maximum;
      maxima[first_cell + i] = total != total ? total : if_number;
      totals[first_cell + i] = LogSumExp<First>{maximum, total}.Total();
    }
  }
};

// Raises maxima to the values of a row, and writes the distances of these from the maxima before.
template <typename C>
JB_INLINE void RaiseMaxima(const C* values, int64_t width, C* maxima, C* distances) {
  JB_VECTORIZE
  for (int64_t i = 0; i < width; ++i) {
    const C value = values[i], maximum = maxima[i];
    distances[i] = Distance(value, maximum);
    maxima[i] = value > maximum ? value : maximum;
  }
}

template <typename C>
JB_INLINE void ScaleAndAdd(const C* scales, const C* addends, int64_t width, C* numbers) {
  JB_VECTORIZE
  for (int64_t i = 0; i < width; ++i) numbers[i] = numbers[i] * scales[i] + addends[i];
}

template <typename C>
JB_CPU_CLONES void FoldNarrowBlock(const RowBlock block, const C* rows, const FoldTarget target) {
  using Reduction = LogSumExpReduction<C>;
  const CellsOf<Reduction> cells = TypedCells<Reduction>(target.cells);
  const int64_t count = block.count * target.width;
  C distances[kConvertedNumbers], of_totals[kConvertedNumbers], of_rows[kConvertedNumbers];
  WriteZeros(distances, count);  // dropped rows have none
  DispatchNarrow(target.width, [&](auto width) __attribute__((always_inline)) {
    ForEachMember<Reduction>(block, target, width, [&](int64_t row, int64_t segment) __attribute__((always_inline)) {
      RaiseMaxima(rows + block.offsets[row] * width, width, cells.first + segment * width, distances + row * width);
    });
  });
  JB_VECTORIZE
  for (int64_t i = 0; i < count; ++i) {
    const C distance = distances[i], weight = Exp(-std::abs(distance));
    of_totals[i] = distance > C{0} ? weight : C{1};
    of_rows[i] = distance > C{0} ? C{1} : weight;
  }
  DispatchNarrow(target.width, [&](auto width) __attribute__((always_inline)) {
    ForEachMember<Reduction>(block, target, width, [&](int64_t row, int64_t segment) __attribute__((always_inline)) {
      ScaleAndAdd(of_totals + row * width, of_rows + row * width, width, cells.second + segment * width);
    });
  });
}

template <typename T>
class LogSumExpRows final : public TypedReduction<LogSumExpReduction<T>> {
 public:
  using Reduction = LogSumExpReduction<T>;
  using C = ComputeType<T>;

  explicit LogSumExpRows(const LogSumExpCall& call)
      : TypedReduction<Reduction>(call.problem,
                                  IsNarrow(call.problem.features) ? kConvertedNumbers / call.problem.features
                                                                  : MaxBlockRows<Reduction>(call.problem),
                                  /*splits_features=*/true,
                                  Reduction{static_cast<C*>(call.maxima), static_cast<C*>(call.totals)}),
        data_(static_cast<const T*>(call.data)) {}

  bool FoldsElementsTogether() const override { return !this->problem.data_is_shared; }

  void Fold(const RowBlock& block, const FoldTarget& target) const override {
    const Problem& problem = this->problem;
    const T* const rows =
        data_ + problem.DataRow(target.batch, block.first_row) * problem.features + target.feature_begin;
    if (!IsNarrow(target.width)) return FoldOwnRows(block, rows, problem.features, this->reduction, target);
    if constexpr (std::is_same_v<T, C>) {
      FoldNarrowBlock(block, rows, target);
    } else {
      C numbers[kConvertedNumbers];
      ConvertBlock(block, rows, target.width, numbers,
                   [](const T* from, int64_t count, C* to) { Widen(from, count, to); });
      FoldNarrowBlock(block, static_cast<const C*>(numbers), target);
    }
  }

 private:
  const T* data_;
};

}  // namespace

bool WithLogSumExp(const LogSumExpCall& call, FunctionRef<bool(const RowReduction&)> body) {
  return DispatchOr(true, call.type, JB_DISPATCH(DispatchFloating),
                    [&](auto tag) { return body(LogSumExpRows<typename decltype(tag)::type>(call)); });
}

std::vector<const char*> LogSumExpCall::Strategies() { return RoundingStrategies(); }

Plan LogSumExpCall::MakePlan() const { return PlanReduction<LogSumExpReduction>(*this, JB_DISPATCH(DispatchFloating)); }

bool LogSumExpCall::Run(ffi::ThreadPool& pool) const {
  return WithLogSumExp(*this, [&](const RowReduction& rows) { return ReduceAll(pool, SegmentIds(*this), rows); });
}

}  // namespace jax_baracuda::segment
