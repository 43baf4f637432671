// Sums and means: the choice of a kernel.
#include "ffi/segment/engine/reduce.cuh"
#include "ffi/segment/engine/tuning.h"
#include "ffi/segment/sum/launch.cuh"
#include "ffi/segment/sum/reduce.cuh"
#include "ffi/segment/sum/reduction.cuh"
#include "ffi/segment/sum/table.cuh"

namespace jax_baracuda::segment {
namespace {

struct Choice {
  bool takes_table;  // atomic additions to a table in global memory; otherwise in registers (see reduce.cuh)
  Strategy strategy;
};

int64_t ComputeBytes(int64_t element_bytes) { return element_bytes == 8 ? 8 : 4; }

int64_t StateBytes(int64_t element_bytes, bool is_mean) { return ComputeBytes(element_bytes) * (is_mean ? 2 : 1); }

// Depends on shapes and flags only. As reduce.cuh chooses, but unsorted rows that are narrow or few are added to a
// table, which costs less than sorting them, unless a segment has so many rows that additions contend. Atomic additions
// have no fixed order, so deterministic sums never use the table. All other calls too large for the sort's 32-bit
// numbers use it.
Choice Choose(const Problem& problem, int64_t element_bytes, bool indices_are_sorted, bool deterministic,
              bool is_mean) {
  const Strategy strategy =
      ChooseStrategy(problem, element_bytes, StateBytes(element_bytes, is_mean), indices_are_sorted);
  if (strategy != Strategy::kSortThenTiles || deterministic) return {false, strategy};
  const int64_t row_bytes = problem.features * element_bytes;
  const bool is_small = problem.batch * problem.rows * row_bytes <= Tuning::kMaxAddedBytes;
  const bool is_contended = problem.rows / Tuning::kMinContendedRowsToSegment >= problem.segments;
  return {((row_bytes <= Tuning::kMaxAddedRowBytes || is_small) && !is_contended) || !OrderFits(problem), strategy};
}

// Whether each thread reads a vector of rows of one feature. Every batch element must then begin at a vector boundary.
bool TakesSingleFeatures(const Problem& problem, int64_t element_bytes) {
  const int64_t vector = 16 / ComputeBytes(element_bytes);
  return problem.features == 1 && (problem.batch == 1 || problem.data_is_shared || problem.rows % vector == 0);
}

Plan PlanOf(const Problem& problem, const Choice& choice, int64_t element_bytes, bool is_mean) {
  if (!choice.takes_table) {
    return {StrategyName(choice.strategy),
            ReduceScratchBytes(problem, choice.strategy, element_bytes, StateBytes(element_bytes, is_mean))};
  }
  ScratchSizes sizes;
  if (ComputeBytes(element_bytes) != element_bytes) {
    sizes.Add(problem.batch * problem.segments * problem.features * ComputeBytes(element_bytes));
  }
  return {TakesSingleFeatures(problem, element_bytes) ? "atomics_single_feature" : "atomics", sizes.total};
}

template <typename T, bool kIsOfExponentials>
struct Launcher {
  using C = ComputeType<T>;
  using Reduction = SumReduction<T, kIsOfExponentials>;
  const SumCall& arguments;
  const Choice choice;
  cudaStream_t stream;

  const Problem& problem = arguments.problem;
  T* output = static_cast<T*>(arguments.output);

  CudaStatus Launch() const {
    if (choice.takes_table) {
      const Plan plan = PlanOf(problem, choice, sizeof(T), arguments.is_mean);
      return arguments.scratch_bytes < plan.scratch_bytes ? JB_CUDA_STATUS(cudaErrorInvalidValue) : Table();
    }
    const int64_t state_bytes = StateBytes(sizeof(T), arguments.is_mean);
    if (arguments.is_mean) return ReduceMean(arguments, choice.strategy, state_bytes, stream);
    return LaunchReduction<Reduction>(arguments, choice.strategy, state_bytes, {output}, nullptr, stream);
  }

 private:
  CudaStatus Table() const {
    const int64_t cells = problem.batch * problem.segments * problem.features;
    SumTableArguments<T> a{};
    a.data = static_cast<const T*>(arguments.data);
    a.ids = {arguments.segment_ids, arguments.ids_are_64_bit, problem.segments};
    a.problem = problem;
    a.table = sizeof(C) == sizeof(T) ? reinterpret_cast<C*>(output) : static_cast<C*>(arguments.scratch);
    a.count = arguments.count;
    JB_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(a.table, 0, cells * sizeof(C), stream));
    if (a.count != nullptr) {
      const int64_t bytes = problem.batch * problem.segments * sizeof(int32_t);
      JB_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(a.count, 0, bytes, stream));
    }
    constexpr int kWidest = 16 / sizeof(C);
    JB_RETURN_IF_CUDA_ERROR(problem.features % kWidest == 0            ? AddRows<kWidest>(a)
                            : kWidest > 2 && problem.features % 2 == 0 ? AddRows<2>(a)
                                                                       : AddRows<1>(a));
    if (sizeof(C) == sizeof(T) && a.count == nullptr) return {};
    FinishSumTableKernel<T>
        <<<GridSize(CeilDivide(cells, 256)), 256, 0, stream>>>(a.table, a.count, problem.features, cells, output);
    return JB_LAUNCH_STATUS(FinishSumTableKernel);
  }

  template <int kVec>
  CudaStatus AddRows(SumTableArguments<T> a) const {
    constexpr int kWidest = 16 / sizeof(C);
    if (TakesSingleFeatures(problem, sizeof(T))) {
      a.blocks_per_batch = CeilDivide(problem.rows, int64_t{kSumTableThreads} * kWidest);
      SingleFeatureSumKernel<T, kWidest, kIsOfExponentials>
          <<<GridSize(problem.batch * a.blocks_per_batch), kSumTableThreads, 0, stream>>>(a);
      return JB_LAUNCH_STATUS(SingleFeatureSumKernel);
    } else {
      a.blocks_per_batch =
          CeilDivide(problem.rows * (problem.features / kVec), int64_t{kSumTableThreads} * kSumVectorsInFlight);
      SumTableKernel<T, kVec, kIsOfExponentials>
          <<<GridSize(problem.batch * a.blocks_per_batch), kSumTableThreads, 0, stream>>>(a);
      return JB_LAUNCH_STATUS(SumTableKernel);
    }
  }
};

}  // namespace

Plan PlanSum(const SumCall& call) {
  const Problem& problem = call.problem;
  // Counts are returned even without features.
  if (problem.HasNoResult()) return {call.is_mean && problem.batch * problem.segments > 0 ? "fill_counts" : kNothing};
  const int64_t element_bytes = ElementBytes(call.type);
  const Choice choice = Choose(problem, element_bytes, call.indices_are_sorted, call.deterministic, call.is_mean);
  return PlanOf(problem, choice, element_bytes, call.is_mean);
}

CudaStatus LaunchSum(const SumCall& arguments, cudaStream_t stream) {
  const Problem& problem = arguments.problem;
  const bool is_mean = arguments.is_mean;
  CudaStatus status = JB_CUDA_STATUS(cudaErrorInvalidValue);
  if (problem.HasNoResult()) {
    if (!is_mean || problem.batch * problem.segments == 0) return {};
    const int64_t bytes = problem.batch * problem.segments * sizeof(int32_t);
    return JB_CUDA_STATUS(cudaMemsetAsync(arguments.count, 0, bytes, stream));
  }
  if (!SegmentsFit(problem.segments)) return status;
  DispatchWrapping(arguments.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Choice choice = Choose(problem, sizeof(T), arguments.indices_are_sorted, arguments.deterministic, is_mean);
    if (!arguments.is_of_exponentials) {
      status = Launcher<T, false>{arguments, choice, stream}.Launch();
    } else if constexpr (std::is_floating_point_v<T>) {
      status = Launcher<T, true>{arguments, choice, stream}.Launch();
    }
  });
  return status;
}

}  // namespace jax_baracuda::segment
