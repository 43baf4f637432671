// The CPU kernel of segment_logsumexp.

#include <algorithm>
#include <cstdint>

#include "ffi/segment/engine/rows_cpu.h"
#include "ffi/segment/logsumexp/handler.h"

namespace jax_baracuda::segment {
namespace {

// The reduction, for the kernels of engine/rows_cpu.h. The numbers of a cell are its maximum and its total.
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
    std::fill_n(cells.first, count, LogSumExp<First>::OfNoRows().maximum);
    std::fill_n(cells.second, count, LogSumExp<First>::OfNoRows().total);
  }

  JB_INLINE void Fold(const T* values, int32_t /*row*/, int64_t width, CellsOf<LogSumExpReduction> cells) const {
    ForEachPart(values, width, [&](int64_t begin, int64_t count, const auto* numbers) __attribute__((always_inline)) {
      JB_VECTORIZE
      for (int64_t i = 0; i < count; ++i) {
        LogSumExp<First> cell{cells.first[begin + i], cells.second[begin + i]};
        cell.Add(static_cast<First>(numbers[i]));
        cells.first[begin + i] = cell.maximum;
        cells.second[begin + i] = cell.total;
      }
    });
  }

  JB_INLINE Narrow ForNarrow() const { return {}; }
  void Convert(const T* from, int64_t count, First* to) const { Widen(from, count, to); }

  JB_INLINE void Merge(int64_t count, CellsOf<LogSumExpReduction> later, CellsOf<LogSumExpReduction> cells) const {
    JB_VECTORIZE
    for (int64_t i = 0; i < count; ++i) {
      LogSumExp<First> cell{cells.first[i], cells.second[i]};
      cell.Merge({later.first[i], later.second[i]});
      cells.first[i] = cell.maximum;
      cells.second[i] = cell.total;
    }
  }

  JB_INLINE void Write(int64_t count, int64_t first_cell, const int32_t* /*counts*/,
                       CellsOf<LogSumExpReduction> cells) const {
    WriteNumbers(cells.first, count, maxima + first_cell);
    JB_VECTORIZE
    for (int64_t i = 0; i < count; ++i) {
      totals[first_cell + i] = LogSumExp<First>{cells.first[i], cells.second[i]}.Total();
    }
  }
};

}  // namespace

bool RunLogSumExp(ffi::ThreadPool& pool, const LogSumExpCall& call) {
  bool has_memory = true;
  DispatchFloating(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = ComputeType<T>;
    const LogSumExpReduction<T> reduction{static_cast<C*>(call.maxima), static_cast<C*>(call.totals)};
    has_memory = ReduceRows(pool, call, call.data, reduction);
  });
  return has_memory;
}

namespace {

Plan PlanLogSumExp(const LogSumExpCall& call) {
  return PlanOfType(call, JB_DISPATCH(DispatchFloating), [&](auto tag) {
    using Reduction = LogSumExpReduction<typename decltype(tag)::type>;
    return ChooseStrategy(call.problem, CellTypeOf<Reduction>(), /*has_counts=*/false);
  });
}

constexpr auto kRun = RunOnCpu<LogSumExpCall, RunLogSumExp>;

JB_CPU_TARGET("segment_logsumexp", (HandleLogSumExp<ffi::ThreadPool, kRun>),
              (BindCall<ffi::ThreadPool, 2, 2, ReductionOptions>()), (PlanOf<PlanLogSumExp, CallOf<LogSumExpCall>>),
              kNothing, "scan", "split_scan", "group_by_segment");

}  // namespace
}  // namespace jax_baracuda::segment
