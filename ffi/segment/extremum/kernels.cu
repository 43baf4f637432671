// Maxima and minima, with or without winners: the choice of a kernel, and the tables of atomic maxima.
#include <algorithm>

#include "ffi/segment/engine/reduce.cuh"
#include "ffi/segment/engine/tuning.h"
#include "ffi/segment/extremum/table.cuh"

namespace jax_baracuda::segment {
namespace {

bool FiltersRows(const Problem& problem, int64_t key_bytes) {
  const int64_t cells = problem.segments * problem.features;
  const bool outgrows_l1 = cells >= Tuning::kMinFilteredCells;
  const bool has_many_rows =
      problem.rows >= Tuning::kMinFilteredRows && problem.rows / Tuning::kMinFilteredRowsToSegment >= problem.segments;
  return key_bytes == sizeof(uint32_t) && problem.batch == 1 && problem.features <= 8 && outgrows_l1 &&
         cells < (int64_t{1} << 31) && has_many_rows;
}

// Depends on shapes and flags only. As reduce.cuh chooses, except:
//
//   * Unsorted rows use a table per block in shared memory where it fits and pays, unless private tables do, too, or
//     the rows are a batch of few rows.
//   * Unsorted rows that are narrow or few use atomics on a table in global memory. An atomic per element, or a load and
//     an atomic if it raises its cell, cost less than sorting the ids. Winners take more launches, so few rows are
//     sorted. Elements are filtered if the table exceeds the L1 cache and has so many rows per cell that most of them
//     come after a greater one.
//   * Calls too large for the sort's 32-bit numbers use the same table.
ReducePlan Choose(const ExtremumCall& call) {
  const Problem& problem = call.problem;
  const bool with_winner = call.with_winner;
  const int64_t element_bytes = ElementBytes(call.type), key_bytes = AccumulatorBytes(call.type);
  const int64_t state_bytes = with_winner ? 2 * key_bytes : element_bytes;
  Strategy strategy = with_winner ? ChooseOrderedStrategy(problem, element_bytes, call.indices_are_sorted)
                                  : ChooseStrategy(problem, element_bytes, state_bytes, call.indices_are_sorted);
  const int64_t row_bytes = problem.features * element_bytes, cells = problem.segments * problem.features;
  const bool is_small = problem.batch * problem.rows * row_bytes <=
                            (with_winner ? Tuning::kMaxTableBytesWithWinner : Tuning::kMaxTableBytes) &&
                        (!FillsFirst(problem) || problem.batch * cells <= Tuning::kMaxFilledTableCells);
  const bool is_unsorted =
      strategy == Strategy::kSortThenTiles || (strategy == Strategy::kFewUnsortedRows && !with_winner);
  int64_t shared_tables = 0;
  if (strategy != Strategy::kFill && strategy != Strategy::kPrivateTable && strategy != Strategy::kBatchOfFewRows) {
    if (!call.indices_are_sorted) {
      shared_tables = SharedTableBlocksPerBatch(problem, key_bytes + (with_winner ? sizeof(int32_t) : 0));
    }
    if (shared_tables > 0) {
      strategy = Strategy::kSharedTable;
    } else if (is_unsorted && (row_bytes <= Tuning::kMaxTableRowBytes || is_small ||
                               (strategy == Strategy::kSortThenTiles && !OrderFits(problem)))) {
      strategy = FiltersRows(problem, key_bytes) ? Strategy::kFilteredAtomics : Strategy::kAtomics;
    }
  }
  if (!UsesAtomics(strategy)) return MakeReducePlan(problem, strategy, element_bytes, state_bytes);
  ReducePlan plan = MakeTablePlan(problem, strategy, shared_tables, element_bytes, key_bytes);
  static_assert(kBoundBytes % kScratchAlignment == 0);
  if (strategy == Strategy::kFilteredAtomics) plan.scratch_bytes += kBoundBytes;
  return plan;
}

template <typename T, bool kWithWinner>
struct TableLauncher {
  const ExtremumCall& call;
  const ReducePlan& plan;
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
    constexpr int kWidest = sizeof(T) == 8 ? 2 : 4;
    const bool is_aligned = StartsAligned(problem, kWidest);
    if constexpr (kOutputIsTable<T>) {
      if (!plan.StaysShared()) {
        const typename MaxReduction<T>::Outputs nothing{a.output, a.flip};
        JB_RETURN_IF_CUDA_ERROR(LaunchFill<MaxReduction<T>>(nothing, 0, all_cells, 1, stream));
      }
    } else if (!plan.StaysShared()) {
      a.keys = carver.Take<OrderedKey<T>>(all_cells);
      JB_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(a.keys, 0, all_cells * sizeof(OrderedKey<T>), stream));
    }
    JB_RETURN_IF_CUDA_ERROR(plan.strategy == Strategy::kFilteredAtomics
                                ? FilteredMax<kWidest>(a, carver.Take<char>(kBoundBytes))
                            : is_aligned ? TableMax<kWidest>(a)
                                         : TableMax<1>(a));
    if constexpr (!kOutputIsTable<T>) {
      if (!plan.StaysShared()) {
        DecodeTableKernel<T><<<GridSize(CeilDivide(all_cells, 256 * kDecodedCells)), 256, 0, stream>>>(a, all_cells);
        JB_RETURN_IF_LAUNCH_ERROR(DecodeTableKernel);
      }
    }
    if constexpr (kWithWinner) {
      // Every byte of kNoWinner is 0xff.
      JB_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(a.winner, 0xff, all_cells * sizeof(int32_t), stream));
      return is_aligned ? TableWinner<kWidest>(a) : TableWinner<1>(a);
    }
    return {};
  }

 private:
  // The first rows go directly to the table. The others are split into chunks. Each chunk is filtered by the lower
  // bounds that the table has after the previous one.
  template <int kVec>
  CudaStatus FilteredMax(const TableArguments<T>& a, char* scratch) const {
    if constexpr (sizeof(OrderedKey<T>) != sizeof(uint32_t)) {
      return JB_CUDA_STATUS(cudaErrorInvalidValue);
    } else {
      const LowerBounds<T> lower_bounds(reinterpret_cast<BoundKey<T>*>(scratch), cells);
      int multiprocessors = 0;
      JB_RETURN_IF_CUDA_ERROR(MultiprocessorCount(&multiprocessors));
      const uint32_t blocks = kFilterBlocks * multiprocessors;
      // Ends of the chunks, in 1/64 of the rows. The fraction of elements that pass the filter is inversely
      // proportional to the number of rows before.
      constexpr int kChunkEnds[] = {4, 10, 26, 64};
      int64_t begin = 0;
      for (const int chunk_end : kChunkEnds) {
        // Chunks begin at multiples of 64 rows, to stay aligned.
        const int64_t end = chunk_end == 64 ? problem.rows : problem.rows / (64 * 64) * 64 * chunk_end;
        TableArguments<T> chunk = a;
        chunk.data = a.data + begin * problem.features;
        chunk.ids.ids = static_cast<const char*>(a.ids.ids) + begin * (a.ids.are_64_bit ? 8 : 4);
        chunk.problem.rows = end - begin;
        if (begin == 0) {
          JB_RETURN_IF_CUDA_ERROR(TableMax<kVec>(chunk));
        } else {
          constexpr uint32_t kBoundBlocks = LowerBounds<T>::kGroups * kBoundLanes / 256;
          LowerBoundsKernel<T><<<kBoundBlocks, 256, 0, stream>>>(GlobalTableOf(a, 0), lower_bounds);
          JB_RETURN_IF_LAUNCH_ERROR(LowerBoundsKernel);
          chunk.blocks_per_batch = blocks;
          FilteredMaxKernel<T, kVec><<<blocks, kFilterThreads, 0, stream>>>(chunk, lower_bounds);
          JB_RETURN_IF_LAUNCH_ERROR(FilteredMaxKernel);
        }
        begin = end;
      }
      return {};
    }
  }

  template <int kVec>
  CudaStatus TableMax(const TableArguments<T>& a) const {
    const int64_t elements = problem.batch * a.problem.rows * problem.features;
    if (plan.strategy == Strategy::kAtomics && elements <= Tuning::kMaxElementsRaisedAtOnce) {
      return OverRows<1>(a, RaiseTableKernel<T>, nullptr, 0);
    }
    return OverRows<kVec>(a, TableMaxKernel<T, kVec>, SharedTableMaxKernel<T, kVec>, sizeof(OrderedKey<T>));
  }

  template <int kVec>
  CudaStatus TableWinner(const TableArguments<T>& a) const {
    return OverRows<kVec>(a, TableWinnerKernel<T, kVec>, SharedTableWinnerKernel<T, kVec>,
                          sizeof(ComputeType<T>) + sizeof(int32_t));
  }

  using Kernel = void (*)(TableArguments<T>);

  template <int kVec>
  CudaStatus OverRows(TableArguments<T> a, Kernel of_global_table, Kernel of_shared_table, int64_t cell_bytes) const {
    const bool is_shared = plan.strategy == Strategy::kSharedTable;
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

std::vector<const char*> ExtremumCall::Strategies(bool with_winner) {
  if (!with_winner) return ReduceStrategies(Strategy::kAtomics, Strategy::kFilteredAtomics, Strategy::kSharedTable);
  // There are no private tables: unsorted rows of few segments use the shared table, sorted ones runs or tiles.
  return NamesOf(kStrategyNames, Strategy::kNothing, Strategy::kFill, Strategy::kBatchOfFewRows,
                 Strategy::kFewUnsortedRows, Strategy::kFewSortedRows, Strategy::kRuns, Strategy::kTiles,
                 Strategy::kSortThenTiles, Strategy::kAtomics, Strategy::kFilteredAtomics, Strategy::kSharedTable);
}

Plan ExtremumCall::MakePlan() const { return problem.HasNoResult() ? Plan{kNothing} : Choose(*this).Summary(); }

CudaStatus ExtremumCall::Run(cudaStream_t stream) const {
  if (problem.HasNoResult()) return {};
  const ReducePlan plan = Choose(*this);
  if (!UsesAtomics(plan.strategy)) {
    return with_winner ? ReduceWithWinner(*this, plan, stream) : ReduceMaximum(*this, plan, stream);
  }
  if (!SegmentsFit(problem.segments) || scratch_bytes < plan.scratch_bytes) {
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
