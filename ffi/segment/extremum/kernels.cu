// Maxima and minima, with or without winners: the choice of a kernel, and the tables of atomic maxima.
#include "ffi/segment/engine/reduce.cuh"
#include "ffi/segment/engine/tuning.h"
#include "ffi/segment/extremum/launch.cuh"
#include "ffi/segment/extremum/reduce.cuh"
#include "ffi/segment/extremum/table.cuh"

namespace jax_baracuda::segment {
namespace {

enum class Algorithm {
  kReduce,       // in registers (see reduce.cuh)
  kTable,        // atomic maxima on a table in global memory
  kSharedTable,  // one table per block in shared memory
};

struct Choice {
  Algorithm algorithm;
  Strategy strategy;  // of kReduce
};

int64_t KeyBytes(int64_t element_bytes) { return element_bytes == 8 ? 8 : 4; }

constexpr int64_t kSharedTableBytes = 48 * 1024;

int64_t StateBytes(int64_t element_bytes, bool with_winner) {
  return with_winner ? 2 * KeyBytes(element_bytes) : element_bytes;
}

// Depends on shapes and flags only. As reduce.cuh chooses, except:
//
//   * Few segments with many rows each use a table per block in shared memory if private tables would be too large, and
//     always with winners. Finding winners reads the data twice, so sorted rows with winners use tiles instead.
//   * Unsorted rows that are narrow, or so few that a sort is launch-bound, use atomics on a table in global memory.
//     One load per element, and an atomic if it raises its cell, cost less than sorting the ids.
//   * Calls too large for the sort's 32-bit numbers use the same table.
Choice Choose(const Problem& problem, int64_t element_bytes, bool indices_are_sorted, bool with_winner) {
  const Strategy strategy =
      with_winner ? ChooseOrderedStrategy(problem, element_bytes, indices_are_sorted)
                  : ChooseStrategy(problem, element_bytes, StateBytes(element_bytes, false), indices_are_sorted);
  const Choice reduce{Algorithm::kReduce, strategy};
  if (strategy == Strategy::kFill || strategy == Strategy::kPrivateTable) return reduce;

  const int64_t row_bytes = problem.features * element_bytes;
  const int64_t cell_bytes = KeyBytes(element_bytes) + (with_winner ? sizeof(int32_t) : 0);
  const bool fits_shared = problem.segments <= kSharedTableBytes / cell_bytes &&
                           problem.segments * problem.features <= kSharedTableBytes / cell_bytes;
  const bool has_few_segments = problem.rows / Tuning::kMinRowsToSharedSegment >= problem.segments;
  if (fits_shared && has_few_segments && !(indices_are_sorted && with_winner)) {
    return {Algorithm::kSharedTable, Strategy::kFill};
  }
  if (strategy != Strategy::kSortThenTiles) return reduce;
  const int64_t cells = problem.batch * problem.segments * problem.features;
  const bool is_small = problem.batch * problem.rows * row_bytes <=
                            (with_winner ? Tuning::kMaxTableBytesWithWinner : Tuning::kMaxTableBytes) &&
                        (!FillsFirst(problem) || cells <= Tuning::kMaxFilledTableCells);
  if (row_bytes <= kSectorBytes || is_small || !OrderFits(problem)) {
    return {Algorithm::kTable, Strategy::kFill};
  }
  return reduce;
}

const char* NameOf(const Problem& problem, const Choice& choice) {
  if (choice.algorithm == Algorithm::kReduce) return StrategyName(choice.strategy);
  if (choice.algorithm == Algorithm::kSharedTable) return "shared_table";
  return problem.features == 1 ? "atomics_single_feature" : "atomics";
}

Plan PlanOf(const Problem& problem, const Choice& choice, int64_t element_bytes, bool with_winner) {
  const char* const name = NameOf(problem, choice);
  if (choice.algorithm == Algorithm::kReduce) {
    return {name, ReduceScratchBytes(problem, choice.strategy, element_bytes, StateBytes(element_bytes, with_winner))};
  }
  const int64_t cells = problem.batch * problem.segments * problem.features;
  ScratchSizes sizes;
  // If keys are as wide as values, the output itself is the table.
  if (KeyBytes(element_bytes) != element_bytes) sizes.Add(cells * KeyBytes(element_bytes));
  return {name, sizes.total};
}

template <typename T, bool kWithWinner>
struct Launcher {
  const ExtremumCall& arguments;
  const Choice choice;
  cudaStream_t stream;

  const T* data = static_cast<const T*>(arguments.data);
  T* output = static_cast<T*>(arguments.output);
  const Problem& problem = arguments.problem;
  const int64_t segments = problem.batch * problem.segments;
  const FlipWord<T> flip = FlipWordMask<T>(arguments.type, arguments.is_minimum);

  CudaStatus Launch() const {
    if (arguments.order != nullptr && choice.strategy != Strategy::kSortThenTiles) {
      JB_RETURN_IF_CUDA_ERROR(LaunchNaturalOrder(problem, arguments.order, stream));
    }
    if (choice.algorithm != Algorithm::kReduce) return Table();
    const int64_t state_bytes = StateBytes(sizeof(T), kWithWinner);
    return kWithWinner ? ReduceWithWinner(arguments, choice.strategy, state_bytes, stream)
                       : ReduceMaximum(arguments, choice.strategy, state_bytes, stream);
  }

  CudaStatus Table() const {
    const int64_t cells = segments * problem.features;
    TableArguments<T> a{};
    a.data = data;
    a.ids = {arguments.segment_ids, arguments.ids_are_64_bit, problem.segments};
    a.problem = problem;
    a.first_wins = arguments.first_wins;
    a.flip = flip;
    if constexpr (sizeof(TableKey<T>) == sizeof(T)) {
      a.table = reinterpret_cast<TableKey<T>*>(output);
    } else {
      a.table = static_cast<TableKey<T>*>(arguments.scratch);
    }
    a.output = output;
    a.winner = arguments.winner;
    // A batch element is split into vectors as a whole, so only its start must be aligned.
    constexpr int kWidest = sizeof(T) == 8 ? 2 : 4;
    const bool is_aligned =
        problem.batch == 1 || problem.data_is_shared || problem.rows * problem.features % kWidest == 0;
    JB_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(a.table, 0, cells * sizeof(TableKey<T>), stream));
    JB_RETURN_IF_CUDA_ERROR(is_aligned ? TableMax<kWidest>(a) : TableMax<1>(a));
    DecodeTableKernel<T><<<GridSize(CeilDivide(cells, 256)), 256, 0, stream>>>(a.table, cells, flip, output);
    JB_RETURN_IF_LAUNCH_ERROR(DecodeTableKernel);
    if constexpr (kWithWinner) {
      // Every byte of kNoWinner is 0xff.
      JB_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(a.winner, 0xff, cells * sizeof(int32_t), stream));
      return is_aligned ? TableWinner<kWidest>(a) : TableWinner<1>(a);
    }
    return {};
  }

  // Enough blocks for several waves on any GPU, but no more than there is work for.
  int64_t TableBlocksPerBatch(int64_t vectors, int threads, int64_t most_blocks) const {
    const int64_t blocks = CeilDivide(vectors, threads);
    const int64_t most = CeilDivide(most_blocks, problem.batch);
    return blocks < most ? blocks : most;
  }

  // As many blocks as are resident at once: each keeps one table for all its rows.
  CudaStatus SharedTableBlocksPerBatch(int64_t vectors, int64_t* blocks) const {
    int multiprocessors = 0;
    JB_RETURN_IF_CUDA_ERROR(MultiprocessorCount(&multiprocessors));
    *blocks = TableBlocksPerBatch(vectors, kSharedTableThreads, int64_t{kSharedTableBlocks} * multiprocessors);
    return {};
  }

  template <int kVec>
  CudaStatus TableMax(TableArguments<T> a) const {
    const int64_t vectors = CeilDivide(a.problem.rows * problem.features, kVec);
    if (choice.algorithm == Algorithm::kSharedTable) {
      JB_RETURN_IF_CUDA_ERROR(SharedTableBlocksPerBatch(vectors, &a.blocks_per_batch));
      const size_t shared_bytes = problem.segments * problem.features * sizeof(TableKey<T>);
      SharedTableMaxKernel<T, kVec>
          <<<GridSize(problem.batch * a.blocks_per_batch), kSharedTableThreads, shared_bytes, stream>>>(a);
      return JB_LAUNCH_STATUS(SharedTableMaxKernel);
    } else if (problem.features == 1) {
      a.blocks_per_batch = CeilDivide(vectors, kSingleFeatureThreads);
      const uint32_t blocks = GridSize(problem.batch * a.blocks_per_batch);
      SingleFeatureMaxKernel<T, kVec><<<blocks, kSingleFeatureThreads, 0, stream>>>(a);
      return JB_LAUNCH_STATUS(SingleFeatureMaxKernel);
    } else {
      a.blocks_per_batch = TableBlocksPerBatch(vectors, 256, int64_t{1} << 20);
      TableMaxKernel<T, kVec><<<GridSize(problem.batch * a.blocks_per_batch), 256, 0, stream>>>(a);
      return JB_LAUNCH_STATUS(TableMaxKernel);
    }
  }

  template <int kVec>
  CudaStatus TableWinner(TableArguments<T> a) const {
    const int64_t vectors = CeilDivide(problem.rows * problem.features, kVec);
    if (choice.algorithm == Algorithm::kSharedTable) {
      JB_RETURN_IF_CUDA_ERROR(SharedTableBlocksPerBatch(vectors, &a.blocks_per_batch));
      const size_t shared_bytes = problem.segments * problem.features * (sizeof(ComputeType<T>) + sizeof(int32_t));
      SharedTableWinnerKernel<T, kVec>
          <<<GridSize(problem.batch * a.blocks_per_batch), kSharedTableThreads, shared_bytes, stream>>>(a);
      return JB_LAUNCH_STATUS(SharedTableWinnerKernel);
    } else {
      a.blocks_per_batch = TableBlocksPerBatch(vectors, 256, int64_t{1} << 20);
      TableWinnerKernel<T, kVec><<<GridSize(problem.batch * a.blocks_per_batch), 256, 0, stream>>>(a);
      return JB_LAUNCH_STATUS(TableWinnerKernel);
    }
  }
};

}  // namespace

Plan PlanExtremum(const ExtremumCall& call) {
  if (call.problem.HasNoResult()) return {kNothing};
  const int64_t element_bytes = ElementBytes(call.type);
  const Choice choice = Choose(call.problem, element_bytes, call.indices_are_sorted, call.with_winner);
  return PlanOf(call.problem, choice, element_bytes, call.with_winner);
}

CudaStatus LaunchExtremum(const ExtremumCall& arguments, cudaStream_t stream) {
  const Problem& problem = arguments.problem;
  if (problem.HasNoResult()) {
    return arguments.order == nullptr ? CudaStatus{} : LaunchNaturalOrder(problem, arguments.order, stream);
  }
  const bool with_winner = arguments.with_winner;
  const int64_t element_bytes = ElementBytes(arguments.type);
  const Choice choice = Choose(problem, element_bytes, arguments.indices_are_sorted, with_winner);
  CudaStatus status = JB_CUDA_STATUS(cudaErrorInvalidValue);
  if (!SegmentsFit(problem.segments)) return status;
  if (arguments.scratch_bytes < PlanOf(problem, choice, element_bytes, with_winner).scratch_bytes) return status;
  if (with_winner) {
    DispatchFloating(arguments.type, [&](auto tag) {
      status = Launcher<typename decltype(tag)::type, true>{arguments, choice, stream}.Launch();
    });
  } else {
    DispatchOrdered(arguments.type, [&](auto tag) {
      status = Launcher<typename decltype(tag)::type, false>{arguments, choice, stream}.Launch();
    });
  }
  return status;
}

}  // namespace jax_baracuda::segment
