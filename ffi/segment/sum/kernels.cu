// Sums and means: the choice of a kernel.
#include "ffi/segment/engine/reduce.cuh"
#include "ffi/segment/engine/tuning.h"
#include "ffi/segment/sum/reduction.cuh"
#include "ffi/segment/sum/table.cuh"

namespace jax_baracuda::segment {
namespace {

struct SumPlan {
  bool takes_table;   // atomic additions to a table in global memory; otherwise in registers (see reduce.cuh)
  ReducePlan reduce;  // unless takes_table
  Plan summary;
};

int64_t ComputeBytes(int64_t element_bytes) { return element_bytes == 8 ? 8 : 4; }

// Depends on shapes and flags only. As reduce.cuh chooses, but unsorted rows that are narrow or few are added to a
// table, which costs less than sorting them, unless a segment has so many rows that additions contend. Atomic additions
// have no fixed order, so deterministic sums never use the table. All other calls too large for the sort's 32-bit
// numbers use it.
SumPlan Choose(const SumCall& call) {
  const Problem& problem = call.problem;
  const int64_t element_bytes = ElementBytes(call.type), compute_bytes = ComputeBytes(element_bytes);
  const int64_t state_bytes = compute_bytes * (call.is_mean ? 2 : 1);
  const Strategy strategy = ChooseStrategy(problem, element_bytes, state_bytes, call.indices_are_sorted);
  const int64_t row_bytes = problem.features * element_bytes;
  const bool is_small = problem.batch * problem.rows * row_bytes <= Tuning::kMaxAddedBytes;
  const bool is_contended = problem.rows / Tuning::kMinContendedRowsToSegment >= problem.segments;
  const bool takes_table =
      strategy == Strategy::kSortThenTiles && !call.deterministic &&
      (((row_bytes <= Tuning::kMaxAddedRowBytes || is_small) && !is_contended) || !OrderFits(problem));
  if (!takes_table) {
    const ReducePlan reduce = MakeReducePlan(problem, strategy, element_bytes, state_bytes);
    return {false, reduce, reduce.Summary()};
  }
  ScratchSizes sizes;
  if (compute_bytes != element_bytes) {
    sizes.Add(problem.batch * problem.segments * problem.features * compute_bytes);
  }
  return {true, {}, {"atomics", sizes.total}};
}

template <typename T>
CudaStatus LaunchTable(const SumCall& call, cudaStream_t stream) {
  using C = ComputeType<T>;
  const Problem& problem = call.problem;
  const int64_t cells = problem.batch * problem.segments * problem.features;
  T* const output = static_cast<T*>(call.output);
  SumTableArguments<T> a{};
  a.data = static_cast<const T*>(call.data);
  a.ids = {call.segment_ids, call.ids_are_64_bit, problem.segments};
  a.problem = problem;
  a.table = sizeof(C) == sizeof(T) ? reinterpret_cast<C*>(output) : static_cast<C*>(call.scratch);
  a.count = call.count;
  JB_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(a.table, 0, cells * sizeof(C), stream));
  if (a.count != nullptr) {
    const int64_t bytes = problem.batch * problem.segments * sizeof(int32_t);
    JB_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(a.count, 0, bytes, stream));
  }
  const auto add_rows = [&](auto vector) {
    constexpr int kVec = decltype(vector)::value;
    a.blocks_per_batch =
        CeilDivide(problem.rows * (problem.features / kVec), int64_t{kSumTableThreads} * kSumVectorsInFlight);
    const uint32_t blocks = GridSize(problem.batch * a.blocks_per_batch);
    SumTableKernel<T, kVec><<<blocks, kSumTableThreads, 0, stream>>>(a);
    return JB_LAUNCH_STATUS(SumTableKernel);
  };
  constexpr int kWidest = 16 / sizeof(C);
  JB_RETURN_IF_CUDA_ERROR(problem.features % kWidest == 0 ? add_rows(std::integral_constant<int, kWidest>{})
                          : problem.features % 2 == 0     ? add_rows(std::integral_constant<int, 2>{})
                                                          : add_rows(std::integral_constant<int, 1>{}));
  if (sizeof(C) == sizeof(T) && a.count == nullptr) return {};
  FinishSumTableKernel<T>
      <<<GridSize(CeilDivide(cells, 256)), 256, 0, stream>>>(a.table, a.count, problem.features, cells, output);
  return JB_LAUNCH_STATUS(FinishSumTableKernel);
}

}  // namespace

Plan SumCall::CudaPlan() const {
  // Counts are returned even without features.
  if (problem.HasNoResult()) return {is_mean && problem.batch * problem.segments > 0 ? "fill_counts" : kNothing};
  return Choose(*this).summary;
}

CudaStatus SumCall::LaunchOnCuda(cudaStream_t stream) const {
  if (problem.HasNoResult()) {
    if (!is_mean || problem.batch * problem.segments == 0) return {};
    return JB_CUDA_STATUS(cudaMemsetAsync(count, 0, problem.batch * problem.segments * sizeof(int32_t), stream));
  }
  const SumPlan plan = Choose(*this);
  if (!SegmentsFit(problem.segments) || scratch_bytes < plan.summary.scratch_bytes) {
    return JB_CUDA_STATUS(cudaErrorInvalidValue);
  }
  if (is_mean && !plan.takes_table) return ReduceMean(*this, plan.reduce, stream);
  return LaunchFor(type, JB_DISPATCH(DispatchWrapping), [&](auto tag) {
    using T = typename decltype(tag)::type;
    return plan.takes_table ? LaunchTable<T>(*this, stream)
                            : LaunchReduction<SumReduction<T>>(*this, plan.reduce, {static_cast<T*>(output)}, stream);
  });
}

}  // namespace jax_baracuda::segment
