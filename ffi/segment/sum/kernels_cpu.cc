// The CPU kernels of segment_sum and segment_mean.

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "ffi/segment/engine/rows_cpu.h"
#include "ffi/segment/sum/handler.h"

namespace jax_baracuda::segment {
namespace {

// Integers are summed as unsigned ones, which wrap; means are of floating numbers alone.
template <typename T>
struct Sum {
  using Element = T;
  using First = ComputeType<T>;
  using Second = NoNumber;
  static constexpr bool kRounds = kIsFloating<T>, kHoldsRuns = true, kFoldsBoth = true;

  T* output;
  int64_t features;
  bool is_mean;

  JB_INLINE CellsOf<Sum> ResultCells() const { return is_mean ? CellsOf<Sum>{} : CellsAt<Sum>(output); }

  JB_INLINE void Start(int64_t count, CellsOf<Sum> cells) const { std::fill_n(cells.first, count, First{0}); }

  template <typename Value>
  JB_INLINE void Fold(const Value* values, int32_t /*row*/, int64_t width, CellsOf<Sum> cells) const {
    AddNumbers(values, width, cells.first);
  }

  JB_INLINE void Merge(int64_t count, CellsOf<Sum> later, CellsOf<Sum> cells) const {
    AddNumbers(later.first, count, cells.first);
  }

  JB_INLINE void WriteEmpty(int64_t count, int64_t first_cell) const { WriteZeros(output + first_cell, count); }

  JB_INLINE void Write(int64_t count, int64_t first_cell, const int32_t* counts, CellsOf<Sum> cells) const {
    T* const to = output + first_cell;
    if (!kIsFloating<T> || !is_mean) {
      WriteNumbers(cells.first, count, to);
    } else if (features == 1) {
      StoreEach(count, to, [&](int64_t i) __attribute__((always_inline)) {
        return cells.first[i] / static_cast<First>(std::max(counts[i], 1));
      });
    } else {
      WithWidth(features, [&](auto width) __attribute__((always_inline)) {
        int64_t done = 0;
        const auto divide = [&](auto cells_of_segment) __attribute__((always_inline)) {
          const First rows = static_cast<First>(std::max(*counts++, 1));
          StoreEach(cells_of_segment, to + done,
                    [&](int64_t i) __attribute__((always_inline)) { return cells.first[done + i] / rows; });
          done += cells_of_segment;
        };
        const int64_t into_first = first_cell % width;
        if (into_first > 0) divide(std::min<int64_t>(width - into_first, count));
        while (done + width <= count) divide(width);
        if (done < count) divide(count - done);
      });
    }
  }
};

bool RunSum(ffi::ThreadPool& pool, const SumCall& call) {
  const Problem& problem = call.problem;
  bool has_memory = true;
  DispatchWrapping(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Sum<T> reduction{static_cast<T*>(call.output), problem.features, call.is_mean};
    AdviseHugePages(reduction.output, problem.batch * problem.segments * problem.features * sizeof(T));
    has_memory = ReduceAll(pool, problem, SegmentIds(call), DirectRows<T>{static_cast<const T*>(call.data)}, reduction,
                           call.count);
  });
  return has_memory;
}

Plan PlanSum(const SumCall& call) {
  return PlanOfType(call, JB_DISPATCH(DispatchWrapping), [&](auto tag) {
    return ChooseStrategy<Sum<typename decltype(tag)::type>>(call.problem, /*has_counts=*/call.is_mean);
  });
}

constexpr auto kRun = RunOnCpu<SumCall, RunSum>;

JB_CPU_TARGET("segment_sum", (HandleSum<ffi::ThreadPool, kRun>), (BindCall<ffi::ThreadPool, 2, 1, SumOptions>()),
              (PlanOf<PlanSum, SumCallOf<false>>), kNothing, "scan", "split_scan", "group_by_segment");
JB_CPU_TARGET("segment_mean", (HandleMean<ffi::ThreadPool, kRun>), (BindCall<ffi::ThreadPool, 2, 2, SumOptions>()),
              (PlanOf<PlanSum, SumCallOf<true>>), kNothing, "scan", "split_scan", "group_by_segment");

}  // namespace
}  // namespace jax_baracuda::segment
