// Thresholds that were measured on one GPU. Others take its numbers, until somebody has measured there.
#pragma once

#include <cstdint>

namespace jax_baracuda::segment {

// Compute capability 9.0, an H200.
struct Tuning90 {
  // Few segments go to private tables, with at least so many rows each.
  static constexpr int64_t kMaxPrivateSegments = 1024, kMinRowsToPrivateSegment = 1024;

  // Sums in any order are added to a table by atomics where rows are that narrow or the operand that small, unless so
  // many rows go to each segment that they wait for each other.
  static constexpr int64_t kMaxAddedRowBytes = 64, kMaxAddedBytes = int64_t{1} << 24;
  static constexpr int64_t kMinContendedRowsToSegment = 2048;

  // All results are filled before rows are reduced where there are so many segments to a row, and elements.
  static constexpr int64_t kMinFilledSegmentsToRow = 2, kMinFilledElements = int64_t{1} << 18;

  // Extrema of few segments, with at least so many rows each, go to a table in shared memory.
  static constexpr int64_t kMinRowsToSharedSegment = 4096;
  // Those in any order go to a table in global memory up to this size of the operand, with and without winners.
  static constexpr int64_t kMaxTableBytesWithWinner = int64_t{1} << 22, kMaxTableBytes = int64_t{24} << 20;
  // Where results are filled, with so many cells at most.
  static constexpr int64_t kMaxFilledTableCells = int64_t{1} << 22;
  // That table filters the rows from so many cells, rows, and rows to a segment on.
  static constexpr int64_t kMinFilteredCells = int64_t{1} << 16, kMinFilteredRows = int64_t{1} << 24;
  static constexpr int64_t kMinFilteredRowsToSegment = 32;

  // Operands of softmax up to this size are left in L2 for the next pass.
  static constexpr int64_t kKeptBytes = int64_t{48} << 20;
  // A table beyond this size is summed up in parts, which stay in L2, if there are few parts and many rows to a
  // segment: each part reads all rows.
  static constexpr int64_t kPartBytes = int64_t{24} << 20, kMaxParts = 4, kMinRowsToPartSegment = 8;
  // Rows of softmax that wide are brought into order, though nobody asks for it, from this size of a table on.
  static constexpr int64_t kMinFarRowBytes = 64, kMinFarTableBytes = int64_t{32} << 20;
  // A small softmax takes one launch up to this size, and with at most so many rows to a segment.
  static constexpr int64_t kMaxSmallElements = int64_t{1} << 22, kMaxSmallRowsToSegment = 1024;
  // Of sorted rows, tiles are as fast from so many on, or from so many elements on with so few rows to a segment.
  static constexpr int64_t kMinRowsOfSortedTiles = int64_t{1} << 12;
  static constexpr int64_t kMinElementsOfSortedTiles = int64_t{1} << 18, kMaxRowsToSegmentOfSortedTiles = 32;

  // Gathered rows are reduced in one launch where they are that few, on average so few to a segment, and data and result
  // that small.
  static constexpr int64_t kMaxRowsOfSmallTiles = int64_t{1} << 14, kMaxRowsToSegmentOfSmallTiles = 64;
  static constexpr int64_t kMaxElementsOfSmallTiles = int64_t{1} << 21;
  // Likewise rows as they lie, where a block could read them in so many steps.
  static constexpr int64_t kMaxFewRows = int64_t{1} << 16, kMaxFewRowsToSegment = 64, kMaxStepsOfFewRows = 128;
  static constexpr int64_t kMaxElementsOfFewRows = int64_t{1} << 21;

  // Products of an edge's rows: so many of each group of threads are under way at once, in so many steps of a block;
  // and so many blocks share a multiprocessor, which caps the registers.
  static constexpr int kDotsInFlight = 4, kDotSteps = 8, kDotBlocks = 6;
};

using Tuning = Tuning90;

}  // namespace jax_baracuda::segment
