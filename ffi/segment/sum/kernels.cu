// Sums and means: the choice of a kernel.
#include "ffi/segment/engine/reduce.cuh"
#include "ffi/segment/engine/tuning.h"
#include "ffi/segment/sum/reduction.cuh"
#include "ffi/segment/sum/table.cuh"

namespace jax_baracuda::segment {
namespace {

enum class Algorithm {
  kReduce,       // in registers (see reduce.cuh)
  kTable,        // atomic additions to a table in global memory
  kSharedTable,  // a table for each block in shared memory
};

inline constexpr const char* kTableNames[] = {"", "atomics", "shared_table"};

struct SumPlan {
  Algorithm algorithm;
  ReducePlan reduce;      // of kReduce
  int64_t shared_tables;  // of kSharedTable: blocks per batch element; otherwise 0
  Plan summary;

  // The only table of a batch element needs no table in global memory.
  bool StaysShared() const { return shared_tables == 1; }
};

// Whether one instruction adds four floats in global memory. In shared memory, each float takes a loop of
// compare-and-swap.
bool AddsVectors(const SumCall& call) {
  const bool is_added_in_float =
      call.type == ElementType::kFloat16 || call.type == ElementType::kBFloat16 || call.type == ElementType::kFloat32;
  return is_added_in_float && call.problem.features % 4 == 0;
}

// Depends on shapes and flags only. As reduce.cuh chooses, but unsorted rows that are narrow or few are added to a
// table, which costs less than sorting them, unless a segment has so many rows that additions contend. Where each block
// can keep its own table, it does, and then rows of any number and width are added, unless vectors of floats can be
// added in global memory. Atomic additions have no fixed order, so deterministic sums never use a table. All other
// calls too large for the sort's 32-bit numbers use it.
SumPlan Choose(const SumCall& call) {
  const Problem& problem = call.problem;
  const int64_t element_bytes = ElementBytes(call.type), compute_bytes = AccumulatorBytes(call.type);
  const int64_t state_bytes = compute_bytes * (call.is_mean ? 2 : 1);
  const Strategy strategy = ChooseStrategy(problem, element_bytes, state_bytes, call.indices_are_sorted);
  const int64_t row_bytes = problem.features * element_bytes;
  const bool is_small = problem.batch * problem.rows * row_bytes <= Tuning::kMaxAddedBytes;
  const bool is_contended = problem.rows / Tuning::kMinContendedRowsToSegment >= problem.segments;
  SumPlan plan{};
  if ((strategy == Strategy::kFewUnsortedRows || strategy == Strategy::kSortThenTiles) && !call.deterministic) {
    const bool is_added = (row_bytes <= Tuning::kMaxAddedRowBytes || is_small) && !is_contended;
    if (!(is_added && AddsVectors(call))) {
      plan.shared_tables = SharedTableBlocksPerBatch(problem, compute_bytes + (call.is_mean ? sizeof(int32_t) : 0));
    }
    if (plan.shared_tables > 0) {
      plan.algorithm = Algorithm::kSharedTable;
    } else if (is_added || (strategy == Strategy::kSortThenTiles && !OrderFits(problem))) {
      plan.algorithm = Algorithm::kTable;
    }
  }
  if (plan.algorithm == Algorithm::kReduce) {
    plan.reduce = MakeReducePlan(problem, strategy, element_bytes, state_bytes);
    plan.summary = plan.reduce.Summary();
    return plan;
  }
  ScratchSizes sizes;
  if (compute_bytes != element_bytes && !plan.StaysShared()) {
    sizes.Add(problem.batch * problem.segments * problem.features * compute_bytes);
  }
  plan.summary = {NameOf(kTableNames, plan.algorithm), sizes.total};
  return plan;
}

template <typename T>
CudaStatus AddRows(SumTableArguments<T> a, cudaStream_t stream) {
  const Problem& problem = a.problem;
  const auto add_rows = [&](auto vector) {
    constexpr int kVec = decltype(vector)::value;
    a.blocks_per_batch =
        CeilDivide(problem.rows * (problem.features / kVec), int64_t{kSumTableThreads} * kSumVectorsInFlight);
    const uint32_t blocks = GridSize(problem.batch * a.blocks_per_batch);
    SumTableKernel<T, kVec><<<blocks, kSumTableThreads, 0, stream>>>(a);
    return JB_LAUNCH_STATUS(SumTableKernel);
  };
  constexpr int kWidest = 16 / sizeof(ComputeType<T>);
  return problem.features % kWidest == 0 ? add_rows(std::integral_constant<int, kWidest>{})
         : problem.features % 2 == 0     ? add_rows(std::integral_constant<int, 2>{})
                                         : add_rows(std::integral_constant<int, 1>{});
}

template <typename T>
CudaStatus AddRowsInSharedTables(const SumTableArguments<T>& a, cudaStream_t stream) {
  const Problem& problem = a.problem;
  const int64_t cell_bytes = problem.features * sizeof(ComputeType<T>) + (a.count == nullptr ? 0 : sizeof(int32_t));
  const auto add_rows = [&](auto vector) {
    constexpr int kVec = decltype(vector)::value;
    const uint32_t blocks = GridSize(problem.batch * a.blocks_per_batch);
    const int threads = SharedTableThreads(problem, kVec, a.blocks_per_batch);
    SharedSumTableKernel<T, kVec><<<blocks, threads, problem.segments * cell_bytes, stream>>>(a);
    return JB_LAUNCH_STATUS(SharedSumTableKernel);
  };
  // A batch element is split into vectors as a whole, so only its start must be aligned.
  constexpr int kWidest = 16 / sizeof(ComputeType<T>);
  const bool is_aligned =
      problem.batch == 1 || problem.data_is_shared || problem.rows * problem.features % kWidest == 0;
  return is_aligned ? add_rows(std::integral_constant<int, kWidest>{}) : add_rows(std::integral_constant<int, 1>{});
}

template <typename T>
CudaStatus LaunchTable(const SumCall& call, const SumPlan& plan, cudaStream_t stream) {
  using C = ComputeType<T>;
  const Problem& problem = call.problem;
  const int64_t cells = problem.batch * problem.segments * problem.features;
  SumTableArguments<T> a{};
  a.data = static_cast<const T*>(call.data);
  a.ids = {call.segment_ids, call.ids_are_64_bit, problem.segments};
  a.problem = problem;
  a.blocks_per_batch = plan.shared_tables;
  a.output = static_cast<T*>(call.output);
  a.table = sizeof(C) == sizeof(T) ? reinterpret_cast<C*>(a.output) : static_cast<C*>(call.scratch);
  a.count = call.count;
  if (plan.StaysShared()) return AddRowsInSharedTables(a, stream);
  JB_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(a.table, 0, cells * sizeof(C), stream));
  if (a.count != nullptr) {
    const int64_t bytes = problem.batch * problem.segments * sizeof(int32_t);
    JB_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(a.count, 0, bytes, stream));
  }
  JB_RETURN_IF_CUDA_ERROR(plan.shared_tables > 0 ? AddRowsInSharedTables(a, stream) : AddRows(a, stream));
  if (sizeof(C) == sizeof(T) && a.count == nullptr) return {};
  FinishSumTableKernel<T><<<GridSize(CeilDivide(cells, 256)), 256, 0, stream>>>(a, cells);
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
  if (is_mean && plan.algorithm == Algorithm::kReduce) return ReduceMean(*this, plan.reduce, stream);
  return LaunchFor(type, JB_DISPATCH(DispatchWrapping), [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (plan.algorithm != Algorithm::kReduce) return LaunchTable<T>(*this, plan, stream);
    return LaunchReduction<SumReduction<T>>(*this, plan.reduce, {static_cast<T*>(output)}, stream);
  });
}

}  // namespace jax_baracuda::segment
