// Maxima and minima, with or without winners: the choice of a kernel, and the tables of atomic maxima.
#include <algorithm>

#include "ffi/segment/engine/reduce.cuh"
#include "ffi/segment/engine/tuning.h"
#include "ffi/segment/extremum/table.cuh"

namespace jax_baracuda::segment {
namespace {

enum class Algorithm {
  kReduce,       // in registers (see reduce.cuh)
  kTable,        // atomic maxima on a table in global memory
  kSharedTable,  // one table per block in shared memory
};

inline constexpr const char* kTableNames[] = {"", "atomics", "shared_table"};

int64_t KeyBytes(int64_t element_bytes) { return element_bytes == 8 ? 8 : 4; }

struct ExtremumPlan {
  Algorithm algorithm;
  ReducePlan reduce;      // of kReduce
  int64_t shared_tables;  // of kSharedTable: blocks per batch element; otherwise 0
  Plan summary;

  // The only table of a batch element needs no table in global memory.
  bool StaysShared() const { return shared_tables == 1; }
};

// Depends on shapes and flags only. As reduce.cuh chooses, except:
//
//   * Unsorted rows use a table per block in shared memory where it fits and pays, unless private tables do, too.
//   * Unsorted rows that are narrow or few use atomics on a table in global memory. One load per element, and an atomic
//     if it raises its cell, cost less than sorting the ids. Winners take more launches, so few rows are sorted.
//   * Calls too large for the sort's 32-bit numbers use the same table.
ExtremumPlan Choose(const ExtremumCall& call) {
  const Problem& problem = call.problem;
  const bool with_winner = call.with_winner;
  const int64_t element_bytes = ElementBytes(call.type), key_bytes = KeyBytes(element_bytes);
  const int64_t state_bytes = with_winner ? 2 * key_bytes : element_bytes;
  const Strategy strategy = with_winner ? ChooseOrderedStrategy(problem, element_bytes, call.indices_are_sorted)
                                        : ChooseStrategy(problem, element_bytes, state_bytes, call.indices_are_sorted);
  const int64_t row_bytes = problem.features * element_bytes, cells = problem.segments * problem.features;
  const int64_t shared_tables = SharedTableBlocksPerBatch(problem, key_bytes + (with_winner ? sizeof(int32_t) : 0));
  const bool is_small = problem.batch * problem.rows * row_bytes <=
                            (with_winner ? Tuning::kMaxTableBytesWithWinner : Tuning::kMaxTableBytes) &&
                        (!FillsFirst(problem) || problem.batch * cells <= Tuning::kMaxFilledTableCells);
  const bool is_unsorted = strategy == Strategy::kSortThenTiles || (strategy == Strategy::kFewRows && !with_winner);
  ExtremumPlan plan{};
  if (strategy != Strategy::kFill && strategy != Strategy::kPrivateTable) {
    if (shared_tables > 0 && !call.indices_are_sorted) {
      plan.algorithm = Algorithm::kSharedTable;
      plan.shared_tables = shared_tables;
    } else if (is_unsorted && (row_bytes <= kSectorBytes || is_small || !OrderFits(problem))) {
      plan.algorithm = Algorithm::kTable;
    }
  }
  if (plan.algorithm == Algorithm::kReduce) {
    plan.reduce = MakeReducePlan(problem, strategy, element_bytes, state_bytes);
    plan.summary = plan.reduce.Summary();
    return plan;
  }
  ScratchSizes sizes;
  // If keys are as wide as values, the output itself is the table.
  if (key_bytes != element_bytes && !plan.StaysShared()) sizes.Add(problem.batch * cells * key_bytes);
  plan.summary = {NameOf(kTableNames, plan.algorithm), sizes.total};
  return plan;
}

template <typename T, bool kWithWinner>
struct TableLauncher {
  const ExtremumCall& call;
  const ExtremumPlan& plan;
  cudaStream_t stream;

  const Problem& problem = call.problem;
  const int64_t cells = problem.segments * problem.features;  // per batch element

  CudaStatus Launch() const {
    const int64_t all_cells = problem.batch * cells;
    ScratchCarver carver(call.scratch);
    TableArguments<T> a{};
    a.data = static_cast<const T*>(call.data);
    a.ids = {call.segment_ids, call.ids_are_64_bit, problem.segments};
    a.problem = problem;
    a.first_wins = call.first_wins;
    a.flip = FlipWordMask<T>(call.type, call.is_minimum);
    a.output = static_cast<T*>(call.output);
    a.winner = call.winner;
    if constexpr (sizeof(TableKey<T>) == sizeof(T)) {
      a.table = reinterpret_cast<TableKey<T>*>(a.output);
    } else if (!plan.StaysShared()) {
      a.table = carver.Take<TableKey<T>>(all_cells);
    }
    // A batch element is split into vectors as a whole, so only its start must be aligned.
    constexpr int kWidest = sizeof(T) == 8 ? 2 : 4;
    const bool is_aligned =
        problem.batch == 1 || problem.data_is_shared || problem.rows * problem.features % kWidest == 0;
    if (!plan.StaysShared()) {
      JB_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(a.table, 0, all_cells * sizeof(TableKey<T>), stream));
    }
    JB_RETURN_IF_CUDA_ERROR(is_aligned ? TableMax<kWidest>(a) : TableMax<1>(a));
    if (!plan.StaysShared()) {
      DecodeTableKernel<T><<<GridSize(CeilDivide(all_cells, 256)), 256, 0, stream>>>(a, all_cells);
      JB_RETURN_IF_LAUNCH_ERROR(DecodeTableKernel);
    }
    if constexpr (kWithWinner) {
      // Every byte of kNoWinner is 0xff.
      JB_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(a.winner, 0xff, all_cells * sizeof(int32_t), stream));
      return is_aligned ? TableWinner<kWidest>(a) : TableWinner<1>(a);
    }
    return {};
  }

 private:
  template <int kVec>
  CudaStatus TableMax(const TableArguments<T>& a) const {
    return OverRows<kVec>(a, TableMaxKernel<T, kVec>, SharedTableMaxKernel<T, kVec>, sizeof(TableKey<T>));
  }

  template <int kVec>
  CudaStatus TableWinner(const TableArguments<T>& a) const {
    return OverRows<kVec>(a, TableWinnerKernel<T, kVec>, SharedTableWinnerKernel<T, kVec>,
                          sizeof(ComputeType<T>) + sizeof(int32_t));
  }

  using Kernel = void (*)(TableArguments<T>);

  template <int kVec>
  CudaStatus OverRows(TableArguments<T> a, Kernel of_global_table, Kernel of_shared_table, int64_t cell_bytes) const {
    const bool is_shared = plan.algorithm == Algorithm::kSharedTable;
    constexpr int64_t kMaxBlocks = int64_t{1} << 20;  // several waves on any GPU
    const int threads = is_shared ? SharedTableThreads(problem, kVec, plan.shared_tables) : 256;
    const int64_t vectors = CeilDivide(a.problem.rows * problem.features, kVec);
    a.blocks_per_batch =
        is_shared ? plan.shared_tables : std::min(CeilDivide(vectors, threads), CeilDivide(kMaxBlocks, problem.batch));
    const Kernel kernel = is_shared ? of_shared_table : of_global_table;
    kernel<<<GridSize(problem.batch * a.blocks_per_batch), threads, is_shared ? cells * cell_bytes : 0, stream>>>(a);
    return JB_LAUNCH_STATUS(OverRows);
  }
};

}  // namespace

Plan ExtremumCall::CudaPlan() const { return problem.HasNoResult() ? Plan{kNothing} : Choose(*this).summary; }

CudaStatus ExtremumCall::LaunchOnCuda(cudaStream_t stream) const {
  if (problem.HasNoResult()) return {};
  const ExtremumPlan plan = Choose(*this);
  if (plan.algorithm == Algorithm::kReduce) {
    return with_winner ? ReduceWithWinner(*this, plan.reduce, stream) : ReduceMaximum(*this, plan.reduce, stream);
  }
  if (!SegmentsFit(problem.segments) || scratch_bytes < plan.summary.scratch_bytes) {
    return JB_CUDA_STATUS(cudaErrorInvalidValue);
  }
  const auto launch = [&](auto tag, auto is_with_winner) {
    using T = typename decltype(tag)::type;
    return TableLauncher<T, decltype(is_with_winner)::value>{*this, plan, stream}.Launch();
  };
  if (with_winner) {
    return LaunchFor(type, JB_DISPATCH(DispatchFloating), [&](auto tag) { return launch(tag, std::true_type{}); });
  }
  return LaunchFor(type, JB_DISPATCH(DispatchOrdered), [&](auto tag) { return launch(tag, std::false_type{}); });
}

}  // namespace jax_baracuda::segment
