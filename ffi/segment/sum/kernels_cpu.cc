// The CPU kernels of segment_sum, segment_mean and segment_sum_of_exponentials.

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "ffi/core/exp_cpu.h"
#include "ffi/segment/engine/rows_cpu.h"
#include "ffi/segment/sum/handler.h"

namespace jax_baracuda::segment {
namespace {

// The means of segments, from sums of `width` features each; the first is number `into_first` of its segment.
template <typename C, typename T>
JB_INLINE void DivideByCounts(const C* sums, int64_t count, int64_t into_first, int64_t width, const int32_t* counts,
                              T* to) {
  constexpr int64_t kAtOnce = 256;
  C rows[kAtOnce];
  int64_t left = width - into_first;  // of the segment
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
    StoreEach(part, to + begin, [&](int64_t i) __attribute__((always_inline)) { return sums[begin + i] / rows[i]; });
  }
}

// Integers are summed as unsigned ones, which wrap; means are of floating numbers alone.
template <typename T>
struct Sum {
  using Element = T;
  using First = ComputeType<T>;
  using Second = NoNumber;
  using Widened = Sum<First>;
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
      DivideByCounts(cells.first, count, first_cell % features, features, counts, to);
    }
  }
};

// Of exponentials; C is float or double.
template <typename C>
struct SumOfExponentials {
  using Element = C;
  using First = C;
  using Second = NoNumber;
  static constexpr bool kRounds = true, kHoldsRuns = true;

  C* output;

  JB_INLINE CellsOf<SumOfExponentials> ResultCells() const { return {output, nullptr}; }

  JB_INLINE void Start(int64_t count, CellsOf<SumOfExponentials> cells) const { std::fill_n(cells.first, count, C{0}); }

  JB_INLINE void Fold(const C* values, int32_t /*row*/, int64_t width, CellsOf<SumOfExponentials> cells) const {
    JB_VECTORIZE
    for (int64_t i = 0; i < width; ++i) {
      const C term = std::max(ExpOrZero(values[i]), kMinExponential<C>);
      cells.first[i] += values[i] == values[i] ? term : values[i];
    }
  }

  JB_INLINE void Merge(int64_t count, CellsOf<SumOfExponentials> later, CellsOf<SumOfExponentials> cells) const {
    AddNumbers(later.first, count, cells.first);
  }

  JB_INLINE void Write(int64_t count, int64_t first_cell, const int32_t* /*counts*/,
                       CellsOf<SumOfExponentials> cells) const {
    WriteNumbers(cells.first, count, output + first_cell);
  }
};

bool RunSum(ffi::ThreadPool& pool, const SumCall& call) {
  const Problem& problem = call.problem;
  bool has_memory = true;
  DispatchWrapping(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    T* const output = static_cast<T*>(call.output);
    AdviseHugePages(output, problem.batch * problem.segments * problem.features * sizeof(T));
    const auto reduce = [&](const auto& reduction) {
      has_memory = ReduceAll(pool, problem, SegmentIds(call), DirectRows<T>{static_cast<const T*>(call.data)},
                             reduction, call.count);
    };
    if (!call.is_of_exponentials) {
      reduce(Sum<T>{output, problem.features, call.is_mean});
    } else if constexpr (std::is_floating_point_v<T>) {
      reduce(SumOfExponentials<T>{output});
    }
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
JB_CPU_TARGET("segment_sum_of_exponentials", (HandleSumOfExponentials<ffi::ThreadPool, kRun>),
              (BindCall<ffi::ThreadPool, 2, 1, SumOptions>()), (PlanOf<PlanSum, SumCallOf<false>>), kNothing, "scan",
              "split_scan", "group_by_segment");

}  // namespace
}  // namespace jax_baracuda::segment
