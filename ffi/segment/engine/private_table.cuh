// Reduction of rows in any order into few segments: every lane keeps its own table of cells.
//
// In each step, the lanes of a warp load the features of one or several narrow rows. Each lane folds its element into
// its own column of a table in shared memory. This needs no atomics and has no bank conflicts, and the order of the
// terms depends only on the shapes and the number of blocks. Dropped rows go to an extra segment, so that no branch
// separates a warp's loads. Tables are merged within the block, and across blocks by a second kernel.
#pragma once

#include "ffi/segment/engine/device.cuh"
#include "ffi/segment/engine/reduction.cuh"

namespace jax_baracuda::segment {

// Maximum shared memory of kMinPrivateWarps warps, which every GPU has. Most run more warps.
inline constexpr int kPrivateTableBytes = 96 * 1024;
inline constexpr int kMinPrivateWarps = 4;
inline constexpr int kMaxPrivateWarps = 24;
inline constexpr int kMaxPrivateBlocks = 256;
inline constexpr int kMaxPrivateFeatures = 32;        // a row fits in a warp
inline constexpr int64_t kMinPrivateElements = 8192;  // per block: few rows leave few tables to merge
inline constexpr int kMaxMergingThreads = 32;         // of a cell, within a block
inline constexpr int kPrivateInFlight = 16;           // steps of a warp that are loaded before the first is folded

// A warp's table, and the segments of its rows in flight.
inline int64_t PrivateWarpBytes(int64_t segments, int64_t accumulator_bytes) {
  return (segments + 1) * 32 * accumulator_bytes + kPrivateInFlight * 32 * sizeof(uint16_t);
}

template <typename Reduction>
struct PrivateTableArguments {
  const typename Reduction::Element* data;
  SegmentIds ids;
  Problem problem;
  typename Reduction::Outputs outputs;
  void* partials;  // accumulators [batch, blocks_per_batch, segments, features]
  int blocks_per_batch;
};

template <typename Reduction>
__global__ void __launch_bounds__(32 * kMaxPrivateWarps, 1)
    PrivateTableKernel(const __grid_constant__ PrivateTableArguments<Reduction> a) {
  using T = typename Reduction::Element;
  using Cells = typename Reduction::template Accumulator<1>;
  constexpr int kInFlight = kPrivateInFlight;
  extern __shared__ uint4 private_memory[];
  Cells* const tables = reinterpret_cast<Cells*>(private_memory);
  const int segments = static_cast<int>(a.problem.segments), features = static_cast<int>(a.problem.features);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int table_cells = (segments + 1) * 32;
  uint16_t* const at_hand = reinterpret_cast<uint16_t*>(tables + warps * table_cells) + warp * kInFlight * 32;
  Cells* const table = tables + warp * table_cells + lane;
  for (int s = 0; s <= segments; ++s) table[s * 32].Start();

  // A warp loads neighbouring rows, as many per step as fit in its lanes. Left-over lanes repeat the last row.
  const int groups = 32 / features, group = min(lane / features, groups - 1);
  const int batch_rows = kInFlight * groups, step_elements = groups * features;
  const int64_t b = blockIdx.x / a.blocks_per_batch, rows = a.problem.rows;
  const int64_t first_id = a.problem.ids_are_shared ? 0 : b * rows;
  const int64_t first_element = a.problem.data_is_shared ? 0 : b * rows * features;
  const T* const data = a.data + first_element + group * features + lane % features;
  const int64_t stride = static_cast<int64_t>(a.blocks_per_batch) * warps * batch_rows;
  const int64_t first_row = (static_cast<int64_t>(blockIdx.x - b * a.blocks_per_batch) * warps + warp) * batch_rows;
  for (int64_t row = first_row; row < rows; row += stride) {
    const int count = static_cast<int>(min(rows - row, static_cast<int64_t>(batch_rows)));
    Vector<T, 1> values[kInFlight];
    const T* next = data + row * features;
    if (count == batch_rows) {
#pragma unroll
      for (int u = 0; u < kInFlight; ++u, next += step_elements) values[u] = LoadStreaming<1>(next);
    } else {
#pragma unroll
      for (int u = 0; u < kInFlight; ++u, next += step_elements) {
        values[u].lane[0] = static_cast<T>(ComputeType<T>{0});
        if (u * groups + group < count) values[u] = LoadStreaming<1>(next);
      }
    }
#pragma unroll 4
    for (int i = lane; i < batch_rows; i += 32) {
      const uint32_t segment = i < count ? a.ids[first_id + row + i] : kDropped;
      at_hand[i] = static_cast<uint16_t>(min(segment, static_cast<uint32_t>(segments)));
    }
    __syncwarp();
    Cells* cells[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) cells[u] = table + at_hand[u * groups + group] * 32;
    __syncwarp();
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      Cells updated = *cells[u];
      updated.Add(values[u], static_cast<int32_t>(row) + u * groups + group, a.outputs);
      *cells[u] = updated;
    }
  }
  __syncthreads();

  // Merges the tables of all lanes. Several threads merge a part of each cell's tables, in place; then one merges these.
  const int cell_count = segments * features, lane_tables = warps * groups;
  const int parts = min(min(max(static_cast<int>(blockDim.x) / cell_count, 1), kMaxMergingThreads), lane_tables);
  const auto cell_of = [&](int cell, int t) -> Cells& {
    const int s = cell / features, own = cell - s * features;
    return tables[t / groups * table_cells + s * 32 + t % groups * features + own];
  };
  const auto merged = [&](int cell, int first, int step, int end) {
    Cells cells = cell_of(cell, first);
    for (int t = first + step; t < end; t += step) cells.Merge(cell_of(cell, t), a.outputs);
    return cells;
  };
  for (int i = threadIdx.x; i < cell_count * parts; i += blockDim.x) {
    const int cell = i / parts, part = i - cell * parts;
    cell_of(cell, part) = merged(cell, part, parts, lane_tables);
  }
  __syncthreads();
  Cells* const partials = static_cast<Cells*>(a.partials) + static_cast<int64_t>(blockIdx.x) * cell_count;
  for (int cell = threadIdx.x; cell < cell_count; cell += blockDim.x) partials[cell] = merged(cell, 0, 1, parts);
}

inline constexpr int kPartialCells = 32;   // cells per block, so that neighbouring threads read neighbouring cells
inline constexpr int kPartialSlices = 16;  // slices of the blocks' tables, each merged by its own threads

// Merges the tables of the blocks.
template <typename Reduction>
__global__ void __launch_bounds__(kPartialCells* kPartialSlices)
    MergePartialsKernel(const __grid_constant__ PrivateTableArguments<Reduction> a) {
  using Cells = typename Reduction::template Accumulator<1>;
  __shared__ Cells shared_cells[kPartialSlices][kPartialCells];
  const int64_t features = a.problem.features, table_cells = a.problem.segments * features;
  const int own = threadIdx.x % kPartialCells, slice = threadIdx.x / kPartialCells;
  const int64_t cell = static_cast<int64_t>(blockIdx.x) * kPartialCells + own;
  const bool is_active = cell < a.problem.batch * table_cells;
  Cells cells;
  cells.Start();
  const int64_t b = cell / table_cells, in_table = cell - b * table_cells;
  if (is_active) {
    const int64_t first = b * a.blocks_per_batch * table_cells;
    const Cells* const partials = static_cast<const Cells*>(a.partials) + first + in_table;
#pragma unroll 4
    for (int block = slice; block < a.blocks_per_batch; block += kPartialSlices) {
      cells.Merge(partials[block * table_cells], a.outputs);
    }
  }
  shared_cells[slice][own] = cells;
  __syncthreads();
  if (slice != 0 || !is_active) return;
  for (int i = 1; i < kPartialSlices; ++i) cells.Merge(shared_cells[i][own], a.outputs);
  const int64_t segment = in_table / features;
  cells.Store(a.outputs, b * a.problem.segments + segment, features, in_table - segment * features);
}

}  // namespace jax_baracuda::segment
