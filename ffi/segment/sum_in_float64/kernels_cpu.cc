// The CPU kernels of segment_sum_in_float64 and segment_mean_in_float64.

#include <algorithm>
#include <cstdint>

#include "ffi/segment/engine/rows_cpu.h"
#include "ffi/segment/sum/handler.h"
#include "ffi/segment/sum/reduction_cpu.h"
#include "ffi/segment/sum_in_float64/arithmetic.h"
#include "ffi/segment/sum_in_float64/call.h"

namespace jax_baracuda::segment {
namespace {

template <typename T>
JB_AVX2_CLONES void WidenToDouble(const T* from, int64_t count, double* to) {
  ForEachPart(from, count, [&](int64_t begin, int64_t part, const auto* numbers) __attribute__((always_inline)) {
    JB_VECTORIZE
    for (int64_t i = 0; i < part; ++i) to[begin + i] = static_cast<ComputeType<T>>(numbers[i]);
  });
}

template <typename T>
struct Float64Sum {
  using Element = T;
  using First = double;
  using Second = NoNumber;
  using Narrow = Sum<double>;
  static constexpr bool kRounds = true;

  T* output;
  int64_t mean_features = 0;  // for means: the number of features

  JB_INLINE CellsOf<Float64Sum> ResultCells() const { return {}; }

  JB_INLINE void Start(int64_t count, CellsOf<Float64Sum> cells) const { std::fill_n(cells.first, count, 0.0); }

  JB_INLINE void Fold(const T* values, int32_t /*row*/, int64_t width, CellsOf<Float64Sum> cells) const {
    ForEachPart(values, width, [&](int64_t begin, int64_t count, const auto* numbers) __attribute__((always_inline)) {
      double* const sums = cells.first + begin;
      JB_VECTORIZE
      for (int64_t i = 0; i < count; ++i) sums[i] += static_cast<ComputeType<T>>(numbers[i]);
    });
  }

  JB_INLINE Narrow ForNarrow() const { return {}; }
  void Convert(const T* from, int64_t count, double* to) const { WidenToDouble(from, count, to); }

  JB_INLINE void Merge(int64_t count, CellsOf<Float64Sum> later, CellsOf<Float64Sum> cells) const {
    AddNumbers(later.first, count, cells.first);
  }

  JB_INLINE void Write(int64_t count, int64_t first_cell, const int32_t* counts, CellsOf<Float64Sum> cells) const {
    double* const numbers = cells.first;
    if (mean_features > 0) {
      DivideByCounts(numbers, count, first_cell % mean_features, mean_features, counts, numbers);
    }
    StoreEach(count, output + first_cell,
              [&](int64_t i) __attribute__((always_inline)) { return RoundedFor<T>(numbers[i]); });
  }
};

bool RunSum(ffi::ThreadPool& pool, const Float64SumCall& call) {
  const Problem& problem = call.problem;
  return DispatchOr(true, call.type, JB_DISPATCH(DispatchBelowFloat64), [&](auto tag) {
    using T = typename decltype(tag)::type;
    T* const output = static_cast<T*>(call.output);
    AdviseHugePages(output, problem.NumCells() * sizeof(T));
    const Float64Sum<T> sum{output, call.is_mean ? problem.features : 0};
    return ReduceRows(pool, call, call.data, sum, call.count);
  });
}

Plan PlanSum(const Float64SumCall& call) {
  return PlanReduction<Float64Sum>(call, JB_DISPATCH(DispatchBelowFloat64), /*has_counts=*/call.is_mean);
}

constexpr auto kRun = RunOnCpu<Float64SumCall, RunSum>;

JB_CPU_TARGET(Float64SumCall::kSumName, (HandleSum<ffi::ThreadPool, Float64SumCall, kRun, /*kIsMean=*/false>),
              (PlanOf<PlanSum, SumCallOf<Float64SumCall, false>>), RoundingStrategies());
JB_CPU_TARGET(Float64SumCall::kMeanName, (HandleSum<ffi::ThreadPool, Float64SumCall, kRun, /*kIsMean=*/true>),
              (PlanOf<PlanSum, SumCallOf<Float64SumCall, true>>), RoundingStrategies());

}  // namespace
}  // namespace jax_baracuda::segment
