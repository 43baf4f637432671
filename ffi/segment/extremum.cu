// Maxima and minima, with or without winners: the choice of a kernel, and the tables of atomic maxima.
#include "ffi/segment/extremum.cuh"

#include "ffi/segment/extremum_table.cuh"
#include "ffi/segment/reduce.cuh"

namespace jax_baracuda::segment {
namespace {

enum class Algorithm {
  kReduce,       // in registers: see reduce.cuh
  kTable,        // atomic maxima on a table in global memory
  kSharedTable,  // one table per block in shared memory
};

struct Plan {
  Algorithm algorithm;
  Way way;            // of kReduce
  bool filters_rows;  // for a table in global memory: rows pass floors in shared memory first
};

int64_t KeyBytes(int64_t element_bytes) { return element_bytes == 8 ? 8 : 4; }

constexpr int64_t kSharedTableBytes = 48 * 1024;

bool FiltersRows(const Problem& problem, int64_t element_bytes, bool indices_are_sorted) {
  const int64_t cells = problem.segments * problem.features;
  const bool outgrows_l1 = cells >= (int64_t{1} << 16);
  const bool has_many_rows = problem.rows >= (int64_t{1} << 24) && problem.rows / 32 >= problem.segments;
  return KeyBytes(element_bytes) == sizeof(uint32_t) && !indices_are_sorted && problem.batch == 1 &&
         problem.features <= 8 && outgrows_l1 && cells < (int64_t{1} << 31) && has_many_rows;
}

int64_t StateBytes(int64_t element_bytes, bool with_winner) {
  return with_winner ? 2 * KeyBytes(element_bytes) : element_bytes;
}

// The rule, from shapes and flags alone: what reduce.cuh takes, but
//
//   * for few segments with many rows each, a table of them for each block in shared memory, where tables for each
//     thread would be too large: always with winners. Then it reads the data twice, so that rows in order rather go by
//     tiles;
//   * for rows in any order that are narrow, or over before a sort has been launched, an atomic, or at least a load,
//     for each element on a table in global memory, which is cheaper than a sort of the ids. The table filters the rows
//     where it is larger than an L1, so that a look at it is dear, and has so many rows to a cell that most of them
//     come after a greater one of their cell;
//   * the same table for what the order cannot number in 32 bits.
Plan ChoosePlan(const Problem& problem, int64_t element_bytes, bool indices_are_sorted, bool with_winner) {
  const Way way = with_winner ? ChooseOrderedWay(problem, element_bytes, indices_are_sorted)
                              : ChooseWay(problem, element_bytes, StateBytes(element_bytes, false), indices_are_sorted);
  const Plan reduce{Algorithm::kReduce, way, false};
  if (way == Way::kFill || way == Way::kPrivateTable) return reduce;

  const int64_t row_bytes = problem.features * element_bytes;
  const int64_t cell_bytes = KeyBytes(element_bytes) + (with_winner ? sizeof(int32_t) : 0);
  const bool fits_shared = problem.segments <= kSharedTableBytes / cell_bytes &&
                           problem.segments * problem.features <= kSharedTableBytes / cell_bytes;
  const bool has_few_segments = problem.rows / 4096 >= problem.segments;
  if (fits_shared && has_few_segments && !(indices_are_sorted && with_winner)) {
    return {Algorithm::kSharedTable, Way::kFill, false};
  }
  if (way != Way::kOrderTiles) return reduce;
  const bool is_small = problem.batch * problem.rows * row_bytes <= (int64_t{1} << (with_winner ? 23 : 26));
  if (row_bytes <= kSectorBytes || is_small || !OrderFits(problem)) {
    return {Algorithm::kTable, Way::kFill, FiltersRows(problem, element_bytes, indices_are_sorted)};
  }
  return reduce;
}

int64_t ScratchBytes(const Problem& problem, const Plan& plan, int64_t element_bytes, bool with_winner) {
  if (plan.algorithm == Algorithm::kReduce) {
    return ReduceScratchBytes(problem, plan.way, element_bytes, StateBytes(element_bytes, with_winner));
  }
  const int64_t cells = problem.batch * problem.segments * problem.features;
  ScratchSizes sizes;
  // Where keys are as wide as values the output itself is the table.
  if (KeyBytes(element_bytes) != element_bytes) sizes.Add(cells * KeyBytes(element_bytes));
  if (plan.filters_rows) sizes.Add(kFloorBytes);
  return sizes.total;
}

template <typename T, bool kWithWinner>
struct Launcher {
  const ExtremumArguments& arguments;
  const Plan plan;
  cudaStream_t stream;

  const T* data = static_cast<const T*>(arguments.data);
  T* output = static_cast<T*>(arguments.output);
  const Problem& problem = arguments.problem;
  const int64_t segments = problem.batch * problem.segments;
  const FlipWord<T> flip = FlipWordMask<T>(arguments.type, arguments.is_minimum);

  cudaError_t Launch() const {
    if (arguments.order != nullptr && plan.way != Way::kOrderTiles) {
      if (cudaError_t e = LaunchNaturalOrder(problem, arguments.order, stream)) return e;
    }
    if (plan.algorithm != Algorithm::kReduce) return Table();
    if constexpr (kWithWinner) {
      return arguments.first_wins ? Reduce<WinnerReduction<T, true>>({output, arguments.winner, flip})
                                  : Reduce<WinnerReduction<T, false>>({output, arguments.winner, flip});
    } else {
      return Reduce<MaxReduction<T>>({output, flip});
    }
  }

  template <typename Reduction>
  cudaError_t Reduce(const typename Reduction::Outputs& outputs) const {
    return LaunchReduction<Reduction>(arguments, plan.way, StateBytes(sizeof(T), kWithWinner), outputs, arguments.order,
                                      stream);
  }

  cudaError_t Table() const {
    const int64_t cells = segments * problem.features;
    ScratchCarver carver(arguments.scratch);
    TableArguments<T> a{};
    a.data = data;
    a.ids = {arguments.segment_ids, arguments.ids_are_64_bit, problem.segments};
    a.problem = problem;
    a.first_wins = arguments.first_wins;
    a.flip = flip;
    if constexpr (sizeof(TableKey<T>) == sizeof(T)) {
      a.table = reinterpret_cast<TableKey<T>*>(output);
    } else {
      a.table = carver.Take<TableKey<T>>(cells);
    }
    a.output = output;
    a.winner = arguments.winner;
    // Vectors are cut from an element of the batch as a whole, so only its beginning has to be aligned.
    constexpr int kWidest = sizeof(T) == 8 ? 2 : 4;
    const bool is_aligned = problem.batch == 1 || problem.data_is_shared ||
                            problem.rows * problem.features % kWidest == 0;
    if (cudaError_t e = cudaMemsetAsync(a.table, 0, cells * sizeof(TableKey<T>), stream)) return e;
    if (cudaError_t e = plan.filters_rows ? FilteredMax<kWidest>(a, carver.Take<char>(kFloorBytes))
                        : is_aligned      ? TableMax<kWidest>(a)
                                          : TableMax<1>(a)) {
      return e;
    }
    DecodeTableKernel<T><<<static_cast<uint32_t>(CeilDivide(cells, 256)), 256, 0, stream>>>(a.table, cells, flip,
                                                                                              output);
    if (cudaError_t e = cudaGetLastError()) return e;
    if constexpr (kWithWinner) {
      // Every byte of kNoWinner is 0xff.
      if (cudaError_t e = cudaMemsetAsync(a.winner, 0xff, cells * sizeof(int32_t), stream)) return e;
      return is_aligned ? TableWinner<kWidest>(a) : TableWinner<1>(a);
    }
    return cudaSuccess;
  }

  // The first rows go straight to the table; the others in parts, each behind the floors that the rows before it leave.
  template <int kVec>
  cudaError_t FilteredMax(const TableArguments<T>& a, char* scratch) const {
    if constexpr (sizeof(TableKey<T>) != sizeof(uint32_t)) {
      return cudaErrorInvalidValue;
    } else {
      const Floors<T> floors(reinterpret_cast<FloorKey<T>*>(scratch), problem.segments * problem.features);
      int multiprocessors = 0;
      if (cudaError_t e = MultiprocessorCount(&multiprocessors)) return e;
      const uint32_t blocks = kFilterBlocks * multiprocessors;
      // In 1/64 of the rows. What the floors let pass falls as the inverse of the number of rows before.
      constexpr int kPartEnds[] = {4, 10, 26, 64};
      int64_t begin = 0;
      for (const int part_end : kPartEnds) {
        // Parts begin at multiples of 64 rows, to stay aligned.
        const int64_t end = part_end == 64 ? problem.rows : problem.rows / (64 * 64) * 64 * part_end;
        TableArguments<T> part = a;
        part.data = data + begin * problem.features;
        part.ids.ids = static_cast<const char*>(a.ids.ids) + begin * (a.ids.are_64_bit ? 8 : 4);
        part.problem.rows = end - begin;
        if (begin == 0) {
          if (cudaError_t e = TableMax<kVec>(part)) return e;
        } else {
          constexpr uint32_t kFloorBlocks = Floors<T>::kGroups * kFloorLanes / 256;
          FloorsKernel<T><<<kFloorBlocks, 256, 0, stream>>>(a.table, floors);
          if (cudaError_t e = cudaGetLastError()) return e;
          part.blocks_per_batch = blocks;
          FilteredMaxKernel<T, kVec><<<blocks, kFilterThreads, 0, stream>>>(part, floors);
          if (cudaError_t e = cudaGetLastError()) return e;
        }
        begin = end;
      }
      return cudaSuccess;
    }
  }

  // Blocks enough to fill any GPU several times over, but no more than there is work for.
  int64_t TableBlocksPerBatch(int64_t vectors, int threads, int64_t most_blocks) const {
    const int64_t blocks = CeilDivide(vectors, threads);
    const int64_t most = CeilDivide(most_blocks, problem.batch);
    return blocks < most ? blocks : most;
  }

  // As many as run at once: each keeps its table for all of its rows.
  cudaError_t SharedTableBlocksPerBatch(int64_t vectors, int64_t* blocks) const {
    int multiprocessors = 0;
    if (cudaError_t e = MultiprocessorCount(&multiprocessors)) return e;
    *blocks = TableBlocksPerBatch(vectors, kSharedTableThreads, int64_t{kSharedTableBlocks} * multiprocessors);
    return cudaSuccess;
  }

  template <int kVec>
  cudaError_t TableMax(TableArguments<T> a) const {
    const int64_t vectors = CeilDivide(a.problem.rows * problem.features, kVec);
    if (plan.algorithm == Algorithm::kSharedTable) {
      if (cudaError_t e = SharedTableBlocksPerBatch(vectors, &a.blocks_per_batch)) return e;
      const size_t shared_bytes = problem.segments * problem.features * sizeof(TableKey<T>);
      SharedTableMaxKernel<T, kVec><<<static_cast<uint32_t>(problem.batch * a.blocks_per_batch), kSharedTableThreads,
                                      shared_bytes, stream>>>(a);
    } else if (problem.features == 1) {
      a.blocks_per_batch = CeilDivide(vectors, kSingleFeatureThreads);
      const uint32_t blocks = static_cast<uint32_t>(problem.batch * a.blocks_per_batch);
      SingleFeatureMaxKernel<T, kVec><<<blocks, kSingleFeatureThreads, 0, stream>>>(a);
    } else {
      a.blocks_per_batch = TableBlocksPerBatch(vectors, 256, int64_t{1} << 20);
      TableMaxKernel<T, kVec><<<static_cast<uint32_t>(problem.batch * a.blocks_per_batch), 256, 0, stream>>>(a);
    }
    return cudaGetLastError();
  }

  template <int kVec>
  cudaError_t TableWinner(TableArguments<T> a) const {
    const int64_t vectors = CeilDivide(problem.rows * problem.features, kVec);
    if (plan.algorithm == Algorithm::kSharedTable) {
      if (cudaError_t e = SharedTableBlocksPerBatch(vectors, &a.blocks_per_batch)) return e;
      const size_t shared_bytes =
          problem.segments * problem.features * (sizeof(ComputeType<T>) + sizeof(int32_t));
      SharedTableWinnerKernel<T, kVec><<<static_cast<uint32_t>(problem.batch * a.blocks_per_batch),
                                         kSharedTableThreads, shared_bytes, stream>>>(a);
    } else {
      a.blocks_per_batch = TableBlocksPerBatch(vectors, 256, int64_t{1} << 20);
      TableWinnerKernel<T, kVec><<<static_cast<uint32_t>(problem.batch * a.blocks_per_batch), 256, 0, stream>>>(a);
    }
    return cudaGetLastError();
  }
};

}  // namespace

int64_t ExtremumScratchBytes(const Problem& problem, int64_t element_bytes, bool indices_are_sorted,
                               bool with_winner) {
  if (problem.HasNoResult()) return 0;
  return ScratchBytes(problem, ChoosePlan(problem, element_bytes, indices_are_sorted, with_winner), element_bytes,
                      with_winner);
}

cudaError_t LaunchExtremum(const ExtremumArguments& arguments, cudaStream_t stream) {
  const Problem& problem = arguments.problem;
  if (problem.HasNoResult()) {
    return arguments.order == nullptr ? cudaSuccess : LaunchNaturalOrder(problem, arguments.order, stream);
  }
  const bool with_winner = arguments.winner != nullptr;
  const int64_t element_bytes = ElementBytes(arguments.type);
  const Plan plan = ChoosePlan(problem, element_bytes, arguments.indices_are_sorted, with_winner);
  cudaError_t error = cudaErrorInvalidValue;
  if (!SegmentsFit(problem.segments)) return error;
  if (arguments.scratch_bytes < ScratchBytes(problem, plan, element_bytes, with_winner)) return error;
  if (with_winner) {
    DispatchFloating(arguments.type, [&](auto tag) {
      error = Launcher<typename decltype(tag)::type, true>{arguments, plan, stream}.Launch();
    });
  } else {
    DispatchOrdered(arguments.type, [&](auto tag) {
      error = Launcher<typename decltype(tag)::type, false>{arguments, plan, stream}.Launch();
    });
  }
  return error;
}

}  // namespace jax_baracuda::segment
