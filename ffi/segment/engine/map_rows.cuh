// Computes every row from its segment's cells, as the gradients of reductions do.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>

#include "ffi/core/cuda_status.h"
#include "ffi/core/plan.h"
#include "ffi/segment/engine/device.cuh"
#include "ffi/segment/engine/strategies.h"
#include "ffi/segment/engine/tuning.h"

namespace jax_baracuda::segment {

inline constexpr int kMapThreads = 256;
inline constexpr int kMapRowsInFlight = 4;
inline constexpr int kMinMapRowsPerThread = 1, kMaxMapRowsPerThread = 32;
inline constexpr int kFlatVectorsPerThread = 4;

// A row function is a struct with
//   template <int kVec> Vector<T, kVec> At(b, segment, row, feature)
// which returns the elements from `feature` on of a row, which is of `segment`, in batch element b.
template <typename T, typename Function>
struct MapRowsArguments {
  SegmentIds ids;
  Problem problem;
  Function function;
  T* rows;
  FeatureLanes features;
  int rows_per_thread;  // of whole vectors
  int64_t blocks_per_batch;
};

// Few rows leave few to a thread, so that all multiprocessors have some.
inline int MapRowsPerThread(const Problem& problem, const FeatureLanes& features) {
  const int64_t row_threads = problem.batch * problem.rows * features.lanes * features.columns;
  const int64_t rows = row_threads / (int64_t{kMapThreads} * 4 * Tuning::kMultiprocessors);
  return static_cast<int>(std::clamp<int64_t>(rows, kMinMapRowsPerThread, kMaxMapRowsPerThread));
}

// For rows that are whole vectors.
template <typename T, typename Function, int kVec>
__global__ void __launch_bounds__(kMapThreads) MapRowsKernel(const __grid_constant__ MapRowsArguments<T, Function> a) {
  extern __shared__ uint32_t map_segments[];  // segments of the block's rows
  const int groups = kMapThreads / a.features.lanes, group = threadIdx.x / a.features.lanes;
  // Column blocks are the slow dimension of the grid, so that the cells of one column can stay in L2 while all rows
  // gather.
  const int64_t row_blocks = gridDim.x / a.features.columns;
  const int64_t column_block = blockIdx.x / row_blocks, row_block = blockIdx.x - column_block * row_blocks;
  const int64_t column = (column_block * a.features.lanes + threadIdx.x % a.features.lanes) * kVec;
  const int64_t b = row_block / a.blocks_per_batch;
  const int block_rows = groups * a.rows_per_thread;
  const int64_t first_row = (row_block - b * a.blocks_per_batch) * block_rows;
  const int rows = static_cast<int>(min(a.problem.rows - first_row, static_cast<int64_t>(block_rows)));
  const int64_t ids_offset = (a.problem.ids_are_shared ? 0 : b * a.problem.rows) + first_row;
#pragma unroll 4
  for (int i = threadIdx.x; i < rows; i += kMapThreads) map_segments[i] = a.ids[ids_offset + i];
  __syncthreads();
  if (group >= groups || column >= a.problem.features) return;

  const int64_t features = a.problem.features;
  T* const result = a.rows + (b * a.problem.rows + first_row) * features + column;
  for (int row = group; row < rows; row += kMapRowsInFlight * groups) {
    Vector<T, kVec> values[kMapRowsInFlight];
#pragma unroll
    for (int u = 0; u < kMapRowsInFlight; ++u) {
      const int own = row + u * groups;
      const uint32_t segment = own < rows ? map_segments[own] : kDropped;
      values[u] = Repeat<kVec>(static_cast<T>(ComputeType<T>{0}));
      if (segment != kDropped) {
        values[u] = a.function.template At<kVec>(b, segment, first_row + own, column);
      }
    }
#pragma unroll
    for (int u = 0; u < kMapRowsInFlight; ++u) {
      const int own = row + u * groups;
      if (own < rows) StoreStreaming(result + own * features, values[u]);
    }
  }
}

// For rows that are not whole vectors: vectors cross row boundaries.
template <typename T, typename Function, int kVec>
__global__ void __launch_bounds__(kMapThreads) MapFlatKernel(const __grid_constant__ MapRowsArguments<T, Function> a) {
  const int64_t b = blockIdx.x / a.blocks_per_batch;
  const int64_t features = a.problem.features, total = a.problem.rows * features;
  const int64_t ids_offset = a.problem.ids_are_shared ? 0 : b * a.problem.rows;
  const int64_t block_begin =
      (blockIdx.x - b * a.blocks_per_batch) * int64_t{kMapThreads} * kVec * kFlatVectorsPerThread;
#pragma unroll 1  // unrolling gains nothing: the next vector's loads cannot pass this one's store
  for (int u = 0; u < kFlatVectorsPerThread; ++u) {
    const int64_t first = block_begin + (u * kMapThreads + static_cast<int64_t>(threadIdx.x)) * kVec;
    if (first >= total) return;
    const int count = static_cast<int>(min(total - first, static_cast<int64_t>(kVec)));
    Vector<T, kVec> values = Repeat<kVec>(static_cast<T>(ComputeType<T>{0}));
    const auto take = [&](int i, uint32_t segment, int64_t row, int64_t feature) {
      if (segment != kDropped) values.lane[i] = a.function.template At<1>(b, segment, row, feature).lane[0];
    };
    if (features == 1) {
      a.ids.template LoadRun<kVec>(ids_offset + first, count, [&](int i, uint32_t segment) {
        if (i < count) take(i, segment, first + i, 0);
      });
    } else {
      int64_t row = first / features, feature = first - row * features;
      uint32_t segment = a.ids[ids_offset + row];
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        if (i >= count) break;
        take(i, segment, row, feature);
        if (++feature == features) {
          feature = 0;
          ++row;
          if (i + 1 < count) segment = a.ids[ids_offset + row];
        }
      }
    }
    T* const result = a.rows + b * total + first;
    if (count == kVec) {
      StoreStreaming(result, values);
    } else {
      for (int i = 0; i < count; ++i) result[i] = values.lane[i];
    }
  }
}

inline MapStrategy ChooseMapStrategy(const Problem& problem, int64_t element_bytes) {
  if (problem.batch == 0 || problem.rows == 0 || problem.features == 0) return MapStrategy::kNothing;
  const int64_t vector = 16 / element_bytes;
  if (problem.features % vector == 0) return MapStrategy::kRowVectors;
  // Vectors may cross row boundaries, but not boundaries of batch elements.
  const bool is_aligned = problem.batch == 1 || problem.rows * problem.features % vector == 0;
  return is_aligned ? MapStrategy::kFlatVectors : MapStrategy::kFlatElements;
}

inline Plan PlanMapRows(const Problem& problem, int64_t element_bytes) {
  return {NameOf(kMapStrategyNames, ChooseMapStrategy(problem, element_bytes))};
}

template <typename T, typename Function>
CudaStatus LaunchMapRows(const Problem& problem, const void* segment_ids, bool ids_are_64_bit, const Function& function,
                         T* rows, cudaStream_t stream) {
  const MapStrategy strategy = ChooseMapStrategy(problem, sizeof(T));
  if (strategy == MapStrategy::kNothing) return {};
  if (!SegmentsFit(problem.segments)) return JB_CUDA_STATUS(cudaErrorInvalidValue);
  MapRowsArguments<T, Function> a{};
  a.ids = {segment_ids, ids_are_64_bit, problem.segments};
  a.problem = problem;
  a.function = function;
  a.rows = rows;
  constexpr int kWidest = 16 / sizeof(T);
  if (strategy == MapStrategy::kRowVectors) {
    a.features = AssignFeatures(problem.features / kWidest, 32);
    a.rows_per_thread = MapRowsPerThread(problem, a.features);
    const int block_rows = kMapThreads / a.features.lanes * a.rows_per_thread;
    a.blocks_per_batch = CeilDivide(problem.rows, block_rows);
    const int64_t blocks = problem.batch * a.blocks_per_batch * a.features.columns;
    MapRowsKernel<T, Function, kWidest><<<GridSize(blocks), kMapThreads, block_rows * sizeof(uint32_t), stream>>>(a);
    return JB_LAUNCH_STATUS(MapRowsKernel);
  }
  const auto launch_flat = [&](auto vector) {
    constexpr int kVec = decltype(vector)::value;
    a.blocks_per_batch =
        CeilDivide(problem.rows * problem.features, int64_t{kMapThreads} * kVec * kFlatVectorsPerThread);
    MapFlatKernel<T, Function, kVec><<<GridSize(problem.batch * a.blocks_per_batch), kMapThreads, 0, stream>>>(a);
    return JB_LAUNCH_STATUS(MapFlatKernel);
  };
  return strategy == MapStrategy::kFlatVectors ? launch_flat(std::integral_constant<int, kWidest>{})
                                               : launch_flat(std::integral_constant<int, 1>{});
}

}  // namespace jax_baracuda::segment
