// The CPU kernels of segment_sum, segment_mean and segment_sum_of_exponentials.

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "ffi/core/exp_cpu.h"
#include "ffi/segment/engine/rows_cpu.h"
#include "ffi/segment/sum/handler.h"
#include "ffi/segment/sum/reduction_cpu.h"

namespace jax_baracuda::segment {

JB_FOLD_NARROW(Sum<float>);
JB_FOLD_NARROW(Sum<double>);

namespace {

// Sums of exponentials; C is float or double.
template <typename C>
struct SumOfExponentials {
  using Element = C;
  using First = C;
  using Second = NoNumber;
  using Narrow = SumOfExponentials;
  static constexpr bool kRounds = true;

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
    if (!call.is_of_exponentials) {
      const Sum<T> sum{output, /*is_wide=*/false, call.is_mean ? problem.features : 0};
      has_memory = ReduceRows(pool, call, call.data, sum, call.count);
    } else if constexpr (std::is_floating_point_v<T>) {
      has_memory = ReduceRows(pool, call, call.data, SumOfExponentials<T>{output});
    }
  });
  return has_memory;
}

Plan PlanSum(const SumCall& call) {
  return PlanOfType(call, JB_DISPATCH(DispatchWrapping), [&](auto tag) {
    return ChooseStrategy(call.problem, CellTypeOf<Sum<typename decltype(tag)::type>>(), /*has_counts=*/call.is_mean);
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
