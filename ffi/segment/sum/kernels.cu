// Sums and means: the choice of a kernel.
#include "ffi/segment/engine/reduce.cuh"
#include "ffi/segment/engine/tuning.h"
#include "ffi/segment/sum/reduction.cuh"
#include "ffi/segment/sum/table.cuh"

namespace jax_baracuda::segment {
namespace {

// Whether one instruction adds four floats in global memory, with compute capability 9.0; others are not measured. In
// shared memory, each float takes a loop of compare-and-swap.
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
ReducePlan Choose(const SumCall& call) {
  if (call.in_float64) return PlanFloat64(call);
  const Problem& problem = call.problem;
  const int64_t element_bytes = ElementBytes(call.type), compute_bytes = AccumulatorBytes(call.type);
  const int64_t state_bytes = compute_bytes * (call.is_mean ? 2 : 1);
  Strategy strategy = ChooseStrategy(problem, element_bytes, state_bytes, call.indices_are_sorted);
  const int64_t row_bytes = problem.features * element_bytes;
  const bool is_small = problem.batch * problem.rows * row_bytes <= Tuning::kMaxAddedBytes;
  const bool is_contended = problem.rows / Tuning::kMinContendedRowsToSegment >= problem.segments;
  int64_t shared_tables = 0;
  if ((strategy == Strategy::kFewUnsortedRows || strategy == Strategy::kSortThenTiles) && !call.deterministic) {
    const bool is_added = (row_bytes <= Tuning::kMaxAddedRowBytes || is_small) && !is_contended;
    if (!(is_added && AddsVectors(call))) {
      shared_tables = SharedTableBlocksPerBatch(problem, compute_bytes + (call.is_mean ? sizeof(int32_t) : 0));
    }
    if (shared_tables > 0) {
      strategy = Strategy::kSharedTable;
    } else if (is_added || (strategy == Strategy::kSortThenTiles && !OrderFits(problem))) {
      strategy = Strategy::kAtomics;
    }
  }
  return UsesAtomics(strategy) ? MakeTablePlan(problem, strategy, shared_tables, element_bytes, compute_bytes)
                               : MakeReducePlan(problem, strategy, element_bytes, state_bytes);
}

// Calls launch(std::integral_constant<int, number>{}) with the numbers of a vector that divides rows.
template <typename T, typename Launch>
CudaStatus DispatchNumbersAtOnce(const Problem& problem, const Launch& launch) {
  constexpr int kWidest = 16 / sizeof(ComputeType<T>);
  return problem.features % kWidest == 0 ? launch(std::integral_constant<int, kWidest>{})
         : problem.features % 2 == 0     ? launch(std::integral_constant<int, 2>{})
                                         : launch(std::integral_constant<int, 1>{});
}

template <typename T>
CudaStatus AddRows(SumTableArguments<T> a, cudaStream_t stream) {
  const Problem& problem = a.problem;
  constexpr int64_t kOfBlock = int64_t{kSumTableThreads} * kSumVectorsInFlight;
  return DispatchNumbersAtOnce<T>(problem, [&](auto vector) {
    constexpr int kVec = decltype(vector)::value;
    a.blocks_per_batch = CeilDivide(problem.rows * (problem.features / kVec), kOfBlock);
    a.sum_blocks = problem.batch * a.blocks_per_batch;
    if (a.count != nullptr) a.count_blocks_per_batch = CeilDivide(problem.rows, kOfBlock);
    const uint32_t blocks = GridSize(a.sum_blocks + problem.batch * a.count_blocks_per_batch);
    SumTableKernel<T, kVec><<<blocks, kSumTableThreads, 0, stream>>>(a);
    return JB_LAUNCH_STATUS(SumTableKernel);
  });
}

template <typename T>
CudaStatus FinishTable(const SumTableArguments<T>& a, cudaStream_t stream) {
  return DispatchNumbersAtOnce<T>(a.problem, [&](auto vector) {
    constexpr int kVec = decltype(vector)::value;
    const int64_t row_vectors = a.problem.features / kVec, vectors = a.problem.batch * a.problem.segments * row_vectors;
    FinishSumTableKernel<T, kVec><<<GridSize(CeilDivide(vectors, kSumTableThreads)), kSumTableThreads, 0, stream>>>(
        a, Divider(row_vectors), vectors);
    return JB_LAUNCH_STATUS(FinishSumTableKernel);
  });
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
  constexpr int kWidest = 16 / sizeof(ComputeType<T>);
  return StartsAligned(problem, kWidest) ? add_rows(std::integral_constant<int, kWidest>{})
                                         : add_rows(std::integral_constant<int, 1>{});
}

template <typename T>
CudaStatus LaunchTable(const SumCall& call, const ReducePlan& plan, cudaStream_t stream) {
  using C = ComputeType<T>;
  const Problem& problem = call.problem;
  const int64_t cells = problem.NumCells();
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
  return FinishTable(a, stream);
}

}  // namespace

std::vector<const char*> SumCall::Strategies(bool is_mean, bool in_float64) {
  if (in_float64) return is_mean ? TileStrategies(Strategy::kFillCounts) : TileStrategies();
  return is_mean ? ReduceStrategies(Strategy::kFillCounts, Strategy::kAtomics, Strategy::kSharedTable)
                 : ReduceStrategies(Strategy::kAtomics, Strategy::kSharedTable);
}

Plan SumCall::MakePlan() const {
  if (problem.HasNoResult()) {
    return {NameOf(kStrategyNames, HasCounts() ? Strategy::kFillCounts : Strategy::kNothing)};
  }
  return Choose(*this).Summary();
}

CudaStatus SumCall::Run(cudaStream_t stream) const {
  if (problem.HasNoResult()) {
    if (!HasCounts()) return {};
    return JB_CUDA_STATUS(cudaMemsetAsync(count, 0, problem.batch * problem.segments * sizeof(int32_t), stream));
  }
  const ReducePlan plan = Choose(*this);
  if (!SegmentsFit(problem.segments) || scratch_bytes < plan.scratch_bytes) {
    return JB_CUDA_STATUS(cudaErrorInvalidValue);
  }
  if (in_float64) return ReduceFloat64(*this, plan, stream);
  if (is_mean && !UsesAtomics(plan.strategy)) return ReduceMean(*this, plan, stream);
  return LaunchFor(type, JB_DISPATCH(DispatchWrapping), [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (UsesAtomics(plan.strategy)) return LaunchTable<T>(*this, plan, stream);
    return LaunchReduction<SumReduction<T>>(*this, plan, {static_cast<T*>(output)}, stream);
  });
}

}  // namespace jax_baracuda::segment
