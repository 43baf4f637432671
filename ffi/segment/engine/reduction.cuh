// The interface between reductions and the kernels that keep cells in registers or in private tables.
//
// A reduction is a struct with
//
//   using Element                         the type of the data
//   struct Outputs                        result pointers and options; passed to kernels by value
//   kRowsInFlight                         rows that a thread loads before it uses the first
//   kTileBlocks                           minimum resident tile blocks per multiprocessor, which caps the registers
//   template <int kCount> Accumulator     state of kCount neighbouring cells of a segment, trivially copyable and
//                                         without initialisers, because it also lives in shared memory:
//     Start()                                  the state of no rows
//     Add(values, row, outputs)                folds in kCount elements of a row
//     Merge(other, outputs)                    folds in the accumulator of other rows of the segment
//     Store(outputs, segment, features, feature)  writes the results of the cells from `feature` on
//
// Partial results pass between blocks as accumulators, unrounded.
#pragma once

#include <cstdint>

#include "ffi/segment/engine/device.cuh"

namespace jax_baracuda::segment {

// Whether a reduction may use private tables; false avoids compiling kernels that are never launched.
template <typename Reduction>
inline constexpr bool kAllowsPrivateTable = true;

// Whether every result holds exactly one element per cell.
template <typename Reduction>
inline constexpr bool kStoresCellsAlone = true;

// Whether all rows are whole vectors of the widest kind, so that the kernels of other vectors need not be compiled.
template <typename Reduction>
inline constexpr bool kOnlyWidestVectors = false;

// Partial results of runs that cross the borders of blocks of rows, one of each kind per block. Cells are accumulators
// [blocks, vectors].
struct Carries {
  uint32_t* in_segment;  // segment of the long run that enters the block, or kDropped
  void* in;              // the block's carry-in: its rows of that run
  void* out;             // its carry-out: its rows of a long run that starts in it and leaves it
};

// Assignment of rows to blocks.
struct RowGrid {
  Problem problem;  // with an order: the batch joined into one element
  FeatureLanes features;
  int groups;                // tiles or rows per block
  int64_t blocks_per_batch;  // blocks along the rows of one batch element
  int64_t row_blocks;        // of all batch elements
};

template <typename Reduction>
struct TileArguments : RowGrid {
  const typename Reduction::Element* data;
  SegmentIds ids;                   // in memory order; unused with `sorted_segments`
  const uint32_t* sorted_segments;  // nullptr, or the sorted segments; `order` then has their rows
  const uint32_t* order;
  int64_t batch_rows;     // rows per batch element; below problem.rows only if the batch was joined
  int64_t first_segment;  // first segment of the result; not 0 if batch elements are launched one by one
  typename Reduction::Outputs outputs;
  Carries carries;
  uint32_t* merge_counters;  // finished blocks of MergeKernel, and blocks with an entering run
  int merge_parts;           // blocks of MergeKernel that share their carries
  uint32_t gap_blocks;       // blocks at the start of the grid that fill wide gaps; 0 if FillsFirst
};

}  // namespace jax_baracuda::segment
