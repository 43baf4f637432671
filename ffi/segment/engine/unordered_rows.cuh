// Rows in any order, folded into a table of cells by atomic operations: the walk over the rows, and when each block
// keeps a table of its own in shared memory.
#pragma once

#include <algorithm>

#include "ffi/segment/engine/device.cuh"
#include "ffi/segment/engine/tuning.h"

namespace jax_baracuda::segment {

inline constexpr int kSharedTableThreads = 512;  // at most
inline constexpr int kSharedTableBlocks = 4;     // minimum resident blocks per multiprocessor
inline constexpr int64_t kSharedTableBytes = 48 * 1024;

// Blocks per batch element, each with a table in shared memory; 0 if tables do not fit or do not pay. A block clears
// its table and merges it into global memory, so it should have several rows per segment. The only block of a batch
// element merges nothing. There must be blocks for at least half of the GPU.
inline int64_t SharedTableBlocksPerBatch(const Problem& problem, int64_t cell_bytes) {
  const int64_t max_cells = kSharedTableBytes / cell_bytes;
  if (problem.segments > max_cells || problem.features > max_cells || problem.rows < problem.segments) return 0;
  if (problem.segments * problem.features > max_cells) return 0;
  const int64_t resident = int64_t{kSharedTableBlocks} * Tuning::kMultiprocessors;
  const int64_t paying = problem.rows / (Tuning::kMinBlockRowsToSharedSegment * std::max(problem.segments, int64_t{1}));
  const int64_t blocks = std::clamp(paying, int64_t{1}, CeilDivide(resident, problem.batch));
  return problem.batch * blocks >= resident / 2 ? blocks : 0;
}

// Threads of a block, each with several vectors of rows, so that blocks with few rows leave room for others.
inline int SharedTableThreads(const Problem& problem, int vector, int64_t blocks_per_batch) {
  constexpr int64_t kVectorsPerThread = 4;
  const int64_t vectors = CeilDivide(problem.rows * problem.features, vector * blocks_per_batch);
  const int64_t warps = CeilDivide(vectors, 32 * kVectorsPerThread);
  return 32 * static_cast<int>(std::clamp(warps, int64_t{2}, int64_t{kSharedTableThreads / 32}));
}

// Whether rows can be loaded as vectors. A batch element is split into vectors as a whole, so only its start must be
// aligned.
inline bool StartsAligned(const Problem& problem, int vector) {
  return problem.batch == 1 || problem.data_is_shared || problem.rows * problem.features % vector == 0;
}

template <typename T>
struct UnorderedRows {
  const T* data;
  SegmentIds ids;
  Problem problem;
  int64_t blocks_per_batch;
};

// kVec elements of the data and their cells, numbered within the batch element; negative for dropped rows. With
// kInOneRow all are of one row, so their cells are neighbours too.
template <typename T, typename Index, int kVec, bool kInOneRow>
struct Elements {
  Vector<T, kVec> values;
  Index first_cell[kInOneRow ? 1 : kVec];
  int32_t first_row[kInOneRow ? 1 : kVec];

  __device__ __forceinline__ bool IsDropped(int i) const { return first_cell[kInOneRow ? 0 : i] < 0; }
  __device__ __forceinline__ Index Cell(int i) const { return kInOneRow ? first_cell[0] + i : first_cell[i]; }
  __device__ __forceinline__ int32_t Row(int i) const { return first_row[kInOneRow ? 0 : i]; }

  // The values of the cells in `table`; undefined for dropped rows.
  template <typename U>
  __device__ __forceinline__ Vector<U, kVec> Gather(const U* table) const {
    Vector<U, kVec> found = {};
    if constexpr (kInOneRow) {
      if (!IsDropped(0)) found = LoadVector<kVec>(table + first_cell[0]);
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        if (!IsDropped(i)) found.lane[i] = table[first_cell[i]];
      }
    }
    return found;
  }
};

// Calls body(Elements) for the thread's elements of one batch element. Index must be able to hold a cell's number.
template <typename Index, int kVec, typename T, typename Body>
__device__ __forceinline__ void ForEachElements(const UnorderedRows<T>& a, int64_t b, Body&& body) {
  const int64_t features = a.problem.features, total = a.problem.rows * features;
  const T* data = a.data + (a.problem.data_is_shared ? 0 : b * total);
  const int64_t ids_offset = a.problem.ids_are_shared ? 0 : b * a.problem.rows;
  const int64_t thread = (blockIdx.x - b * a.blocks_per_batch) * blockDim.x + threadIdx.x;
  const int64_t threads = a.blocks_per_batch * blockDim.x;
  const auto cell = [&](uint32_t segment, int64_t feature) {
    return segment == kDropped
               ? Index{-1}
               : static_cast<Index>(segment) * static_cast<Index>(features) + static_cast<Index>(feature);
  };

  const int64_t row_vectors = features / kVec;
  if (features % kVec == 0 && row_vectors <= threads) {
    // Each thread keeps its features, because all threads together load whole rows in each step.
    constexpr int kInFlight = sizeof(T) < 4 ? 4 : 2;
    const int64_t rows_at_once = threads / row_vectors;
    const int64_t first_row = thread / row_vectors;
    const int64_t feature = (thread - first_row * row_vectors) * kVec;
    if (first_row >= rows_at_once) return;
    const int64_t step = rows_at_once * features;
    const T* next = data + first_row * features + feature;
    for (int64_t row = first_row; row < a.problem.rows; row += kInFlight * rows_at_once) {
      Elements<T, Index, kVec, true> elements[kInFlight];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        const int64_t r = row + u * rows_at_once;
        if (r < a.problem.rows) {
          elements[u].values = LoadStreaming<kVec>(next);
          elements[u].first_cell[0] = cell(a.ids[ids_offset + r], feature);
          elements[u].first_row[0] = static_cast<int32_t>(r);
        }
        next += step;
      }
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        if (row + u * rows_at_once < a.problem.rows) body(elements[u]);
      }
    }
    return;
  }

  const int64_t first = thread * kVec, stride = threads * kVec;
  // Divisions of 64 bits would cost more than the elements of a single feature.
  const int64_t stride_rows = features == 1 ? stride : stride / features;
  const int64_t stride_features = stride - stride_rows * features;
  int64_t row = features == 1 ? first : first / features, feature = first - row * features;
  // Vectors cross row boundaries; the last one may pass the end of the data.
  for (int64_t element = first; element < total; element += stride) {
    Elements<T, Index, kVec, false> elements;
    const int count = static_cast<int>(min(total - element, static_cast<int64_t>(kVec)));
    if (count == kVec) {
      elements.values = LoadStreaming<kVec>(data + element);
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i) elements.values.lane[i] = data[element + min(i, count - 1)];
    }
    if (features == 1) {
      a.ids.template LoadRun<kVec>(ids_offset + row, count, [&](int i, uint32_t segment) {
        elements.first_cell[i] = i < count ? cell(segment, 0) : Index{-1};
        elements.first_row[i] = static_cast<int32_t>(row) + i;
      });
    } else {
      int64_t r = row, f = feature;
      uint32_t segment = a.ids[ids_offset + r];
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        elements.first_cell[i] = i < count ? cell(segment, f) : Index{-1};
        elements.first_row[i] = static_cast<int32_t>(r);
        if (++f == features) {
          f = 0;
          ++r;
          if (i + 1 < count) segment = a.ids[ids_offset + r];
        }
      }
    }
    body(elements);
    row += stride_rows;
    feature += stride_features;
    if (feature >= features) {
      feature -= features;
      ++row;
    }
  }
}

}  // namespace jax_baracuda::segment
