// Constants measured on an H200 (compute capability 9.0). Other GPUs use them until they are measured there.
#pragma once

#include <cstdint>

namespace jax_baracuda::segment {

struct Tuning {
  // Private tables: minimum rows per segment.
  static constexpr int64_t kMinRowsToPrivateSegment = 1024;

  // Unsorted sums use atomic additions for rows or operands up to these sizes in bytes, unless a segment has so many
  // rows (on average) that additions contend.
  static constexpr int64_t kMaxAddedRowBytes = 64, kMaxAddedBytes = int64_t{1} << 24;
  static constexpr int64_t kMinContendedRowsToSegment = 2048;

  // Results are filled before the reduction from this many segments per row, and elements of the result, on.
  static constexpr int64_t kMinFilledSegmentsToRow = 2, kMinFilledElements = int64_t{1} << 18;

  // Tables in shared memory: minimum rows per segment and block, if a batch element has several blocks.
  static constexpr int64_t kMinBlockRowsToSharedSegment = 8;
  // Unsorted extrema use a table in global memory for rows up to this size, or operands up to these, with and without
  // winners.
  static constexpr int64_t kMaxTableRowBytes = 32;
  static constexpr int64_t kMaxTableBytesWithWinner = int64_t{1} << 22, kMaxTableBytes = int64_t{24} << 20;
  // The maximum number of elements that raise it without a load before each atomic. 512,000 elements took 0.55 to 0.95
  // of the time, 4M elements 1.6 to 2.1.
  static constexpr int64_t kMaxElementsRaisedAtOnce = int64_t{1} << 20;
  // If results are filled first, this is the maximum number of cells for that table.
  static constexpr int64_t kMaxFilledTableCells = int64_t{1} << 22;
  // Rows are filtered before that table from this many cells, rows, and rows per segment on.
  static constexpr int64_t kMinFilteredCells = int64_t{1} << 16, kMinFilteredRows = int64_t{1} << 24;
  static constexpr int64_t kMinFilteredRowsToSegment = 32;

  // Unsorted rows in one launch: the maximum number of elements of a batch element. 5,000 rows of 1,000 numbers took half
  // as long as with a sort before, 5,500 to 6,000 as long, 8,500 rows 1.6 times as long.
  static constexpr int64_t kMaxElementsOfFewUnsortedRows = int64_t{1} << 23;

  // Large batches of few rows: the minimum of elements, which is two blocks per multiprocessor, and the maximum of rows,
  // also per segment.
  static constexpr int64_t kMinBatchOfFewRows = 264, kMaxRowsOfBatch = 1024, kMaxRowsOfBatchToSegment = 64;

  // Sort: the maximum number of rows for small tiles, and the number of multiprocessors over which larger tiles spread
  // evenly. It is a constant because scratch, which depends on the tiles, may be planned without a GPU.
  static constexpr int64_t kMaxRowsOfSmallSortTiles = int64_t{1} << 19, kMultiprocessors = 132;

  // Gathered rows in one launch: maximum number of rows, average rows per segment, and elements of data and of result.
  static constexpr int64_t kMaxRowsOfSmallTiles = int64_t{1} << 16, kMaxRowsToSegmentOfSmallTiles = 64;
  static constexpr int64_t kMaxElementsOfSmallTiles = int64_t{1} << 22;
  // Attention, whose edges take longer: the maximum number of edges, or of steps in which one block could read them all
  // if that allows more.
  static constexpr int64_t kMaxEdgesOfSmallAttention = int64_t{1} << 15, kMaxStepsOfSmallAttention = 256;
  // Sorted rows in one launch: the maximum number of rows, and of steps in which one block could read all rows, or those
  // of an average segment.
  static constexpr int64_t kMaxFewSortedRows = int64_t{1} << 16, kMaxStepsOfFewSortedRows = 512;
  static constexpr int64_t kMaxStepsToFewSortedSegment = 4;
  static constexpr int64_t kMaxElementsOfFewSortedRows = int64_t{1} << 21;
  // Sorted pairs of rows in one launch: the maximum number of elements, and of elements to a segment, which one block
  // reads. Softmax with its gradient took 0.8 of the time of tiles for 1,272 x 8 in 2 segments, 0.9 for 8,000 x 64 in
  // 800; the gradient alone 0.65 for 5,000 x 64 in 50.
  static constexpr int64_t kMaxElementsOfFewSortedPairs = int64_t{1} << 19,
                           kMaxElementsOfFewSortedPairsToSegment = int64_t{1} << 14;
  // Gathered rows in that launch: the maximum number of blocks, which is four per multiprocessor.
  static constexpr int64_t kMaxBlocksOfFewEdges = 528;

  // gather_segment_dot: products in flight per group of threads, steps per block, and minimum resident blocks per
  // multiprocessor, which caps the registers.
  static constexpr int kDotsInFlight = 4, kDotSteps = 8, kDotBlocks = 6;
};

}  // namespace jax_baracuda::segment
