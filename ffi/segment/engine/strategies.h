// The strategies of segment ops on GPUs. Without kernels, for handlers.
#pragma once

#include <cstddef>
#include <iterator>
#include <vector>

#include "ffi/core/plan.h"
#include "ffi/core/strategies.h"

namespace jax_baracuda::segment {

enum class Strategy {
  kNothing,          // no result
  kFill,             // no rows
  kFillCounts,       // means without features, whose counts are returned
  kPrivateTable,     // few segments: one table per thread
  kBatchOfFewRows,   // a large batch of few rows that share their ids, in one launch
  kFewUnsortedRows,  // few unsorted rows, or few pairs of rows, in one launch
  kFewSortedRows,    // few sorted rows, own or gathered, in one launch
  kRuns,             // narrow sorted rows, whole rows per thread
  kTiles,            // sorted rows, in tiles
  kSmallTiles,       // tiles of few gathered rows, in one launch
  kSortThenTiles,    // sorts the rows first, then tiles
  // Sums and extrema of unsorted rows only (see unordered_rows.cuh).
  kAtomics,          // atomics on a table in global memory
  kFilteredAtomics,  // the same, but elements are first compared with lower bounds in shared memory
  kSharedTable,      // one table per block in shared memory
};

inline constexpr const char* kStrategyNames[] = {
    kNothing, "fill",  "fill_counts", "private_table",   "batch_of_few_rows", "few_unsorted_rows", "few_sorted_rows",
    "runs",   "tiles", "small_tiles", "sort_then_tiles", "atomics",           "filtered_atomics",  "shared_table"};
static_assert(std::size(kStrategyNames) == static_cast<size_t>(Strategy::kSharedTable) + 1);

enum class MapStrategy {
  kNothing,
  kRowVectors,    // rows that are whole vectors
  kFlatVectors,   // all rows as one array, in vectors that may cross rows
  kFlatElements,  // all rows as one array, element by element
};

inline constexpr const char* kMapStrategyNames[] = {kNothing, "row_vectors", "flat_vectors", "flat_elements"};

// Whether rows are folded into tables by atomics.
constexpr bool UsesAtomics(Strategy strategy) {
  return strategy == Strategy::kAtomics || strategy == Strategy::kFilteredAtomics || strategy == Strategy::kSharedTable;
}

// The strategies of a reduction of rows, and the others that an op has.
template <typename... Others>
std::vector<const char*> ReduceStrategies(Others... others) {
  return NamesOf(kStrategyNames, Strategy::kNothing, Strategy::kFill, Strategy::kPrivateTable,
                 Strategy::kBatchOfFewRows, Strategy::kFewUnsortedRows, Strategy::kFewSortedRows, Strategy::kRuns,
                 Strategy::kTiles, Strategy::kSortThenTiles, others...);
}

// The same for a reduction that only tiles and the launch for few unsorted rows compute.
template <typename... Others>
std::vector<const char*> TileStrategies(Others... others) {
  return NamesOf(kStrategyNames, Strategy::kNothing, Strategy::kFill, Strategy::kFewUnsortedRows, Strategy::kTiles,
                 Strategy::kSortThenTiles, others...);
}

inline std::vector<const char*> MapStrategies() { return {JB_NAMES(kMapStrategyNames)}; }

// The strategies of a reduction of edges.
inline std::vector<const char*> EdgeStrategies() {
  return NamesOf(kStrategyNames, Strategy::kNothing, Strategy::kFill, Strategy::kFewSortedRows, Strategy::kSmallTiles,
                 Strategy::kTiles);
}

}  // namespace jax_baracuda::segment
