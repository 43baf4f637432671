// Reduction of a large batch of few rows, all elements of which share their ids, in one launch.
//
// Each block sorts the shared ids once, in shared memory (see sort_few_rows.cuh). Then it copies one chunk of data after
// another to shared memory, in the order of memory. While a chunk arrives, the threads reduce the one before it, a
// vector of cells each. So the ids may be in any order, and nothing is merged. The order of terms is that of the rows.
#pragma once

#include <algorithm>
#include <numeric>

#include "ffi/core/async_copy.cuh"
#include "ffi/core/divider.cuh"
#include "ffi/core/launch_bounds.cuh"
#include "ffi/segment/engine/reduction.cuh"
#include "ffi/segment/engine/sort_few_rows.cuh"
#include "ffi/segment/engine/tuning.h"

namespace jax_baracuda::segment {

inline constexpr int kFewRowBatchBlocks = 2;       // minimum resident blocks per multiprocessor
inline constexpr int64_t kChunkBytes = 32 * 1024;  // at most; a block has two chunks

// A chunk has the rows of several batch elements, or one block of columns of the rows of one.
struct FewRowBatchGrid {
  int elements = 0;       // batch elements per chunk; 0 if chunks do not fit
  FeatureLanes features;  // vectors of 16 bytes per row of a chunk if there are several columns
  int64_t chunks = 0;

  FewRowBatchGrid(const Problem& problem, int64_t element_bytes) : features{1, 1} {
    const int64_t row_bytes = problem.features * element_bytes, bytes = problem.rows * row_bytes;
    // Chunks of whole batch elements start at whole vectors.
    const int64_t unit = kVectorBytes / std::gcd(bytes, int64_t{kVectorBytes});
    if (unit * bytes <= kChunkBytes) {
      // Several chunks per block, if the batch is large enough, so that copies overlap with computation.
      const int64_t blocks = int64_t{kFewRowBatchBlocks} * Tuning::kMultiprocessors, chunks_per_block = 4;
      const int64_t wanted = CeilDivide(problem.batch, unit * blocks * chunks_per_block);
      elements = static_cast<int>(unit * std::clamp(wanted, int64_t{1}, kChunkBytes / (unit * bytes)));
      chunks = CeilDivide(problem.batch, int64_t{elements});
    } else if (row_bytes % kVectorBytes == 0 && problem.rows * kMinColumnBytes <= kChunkBytes) {
      const int64_t max_lanes = kChunkBytes / (problem.rows * kVectorBytes);
      elements = 1;
      features = AssignFeatures(row_bytes / kVectorBytes, static_cast<int>(max_lanes));
      chunks = problem.batch * features.columns;
    }
  }

 private:
  static constexpr int64_t kMinColumnBytes = 64;
};

// Batches that keep every block busy, with few rows per segment on average, which one thread adds up.
inline bool UsesBatchOfFewRows(const Problem& problem, int64_t element_bytes) {
  return problem.ids_are_shared && !problem.data_is_shared && problem.batch >= Tuning::kMinBatchOfFewRows &&
         problem.rows <= Tuning::kMaxRowsOfBatch && problem.segments <= kMaxOwnSegments &&
         problem.rows <= Tuning::kMaxRowsOfBatchToSegment * problem.segments &&
         FewRowBatchGrid(problem, element_bytes).elements > 0;
}

inline int FewRowBatchBytes(const Problem& problem) {
  const FewRowSorter sorter(static_cast<int>(problem.rows), static_cast<int>(problem.segments));
  return static_cast<int>(2 * kChunkBytes) + sorter.Bytes();
}

template <typename Reduction>
struct FewRowBatchArguments {
  const typename Reduction::Element* data;
  SegmentIds ids;
  Problem problem;
  typename Reduction::Outputs outputs;
  FewRowBatchGrid grid;
  int chunk_row_vectors;    // vectors of cells per segment and column block
  ShortDivider by_row;      // by chunk_row_vectors
  ShortDivider by_element;  // by the vectors of cells of a batch element in a chunk
  ShortDivider by_lanes;    // by grid.features.lanes
};

template <typename Reduction, int kVec>
__global__ void __launch_bounds__(kFewRowThreads, MinBlocks(kFewRowThreads, kFewRowBatchBlocks))
    FewRowBatchKernel(const __grid_constant__ FewRowBatchArguments<Reduction> a) {
  using T = typename Reduction::Element;
  constexpr int kVectorElements = kVectorBytes / sizeof(T);
  extern __shared__ uint4 shared_memory[];
  const int rows = static_cast<int>(a.problem.rows), segments = static_cast<int>(a.problem.segments);
  const int64_t features = a.problem.features, element_size = rows * features;
  const int columns = a.grid.features.columns, lanes = a.grid.features.lanes;
  const int64_t row_stride = columns == 1 ? features : lanes * kVectorElements;  // in a chunk
  const auto chunk_of = [&](int buffer) {
    return reinterpret_cast<T*>(reinterpret_cast<char*>(shared_memory) + buffer * kChunkBytes);
  };
  struct Place {
    int64_t first_element;
    int elements;
    int64_t feature;
  };
  const auto place_of = [&](int64_t chunk) {
    const int64_t group = columns == 1 ? chunk : chunk / columns;
    const int64_t first = group * a.grid.elements;
    const int count = static_cast<int>(min(a.problem.batch - first, int64_t{a.grid.elements}));
    return Place{first, count, (chunk - group * columns) * lanes * kVectorElements};
  };
  const auto start_copy = [&](int64_t chunk, int buffer) {
    if (chunk < a.grid.chunks) {
      const Place place = place_of(chunk);
      T* const to = chunk_of(buffer);
      const T* const from = a.data + place.first_element * element_size;
      if (columns == 1) {
        const int size = static_cast<int>(place.elements * element_size), vectors = size / kVectorElements;
        for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
          CopyAsync<kVectorBytes>(to + i * kVectorElements, from + i * kVectorElements, true);
        }
        for (int i = vectors * kVectorElements + threadIdx.x; i < size; i += blockDim.x) to[i] = from[i];
      } else {
        for (int i = threadIdx.x; i < rows * lanes; i += blockDim.x) {
          const int row = a.by_lanes.Quotient(i);
          const int64_t feature = place.feature + (i - row * lanes) * kVectorElements;
          if (feature < features) {
            CopyAsync<kVectorBytes>(to + i * kVectorElements, from + row * features + feature, true);
          }
        }
      }
    }
    CommitCopies();
  };

  start_copy(blockIdx.x, 0);
  FewRowSorter sorter(rows, segments);
  sorter.template Sort<false>(reinterpret_cast<char*>(shared_memory) + 2 * kChunkBytes, 0,
                              [&](int row) { return a.ids[row]; });
  int buffer = 0;
  for (int64_t chunk = blockIdx.x; chunk < a.grid.chunks; chunk += gridDim.x, buffer ^= 1) {
    start_copy(chunk + gridDim.x, buffer ^ 1);
    WaitForCopies<1>();
    __syncthreads();
    const Place place = place_of(chunk);
    const int cells_of_element = segments * a.chunk_row_vectors, cells = place.elements * cells_of_element;
    for (int cell = threadIdx.x; cell < cells; cell += blockDim.x) {
      const int element = a.by_element.Quotient(cell), in_element = cell - element * cells_of_element;
      const int segment = a.by_row.Quotient(in_element);
      const int offset = (in_element - segment * a.chunk_row_vectors) * kVec;
      if (place.feature + offset >= features) continue;
      const T* const column = chunk_of(buffer) + element * rows * row_stride + offset;
      typename Reduction::template Accumulator<kVec> result;
      result.Start();
      const int end = sorter.Start(segment + 1);
      for (int i = sorter.Start(segment); i < end; ++i) {
        const int row = sorter.Row(i);
        result.Add(LoadVector<kVec>(column + row * row_stride), row, a.outputs);
      }
      result.Store(a.outputs, (place.first_element + element) * segments + segment, features, place.feature + offset);
    }
    __syncthreads();
  }
}

}  // namespace jax_baracuda::segment
