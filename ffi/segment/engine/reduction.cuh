// What a reduction is to the kernels that keep cells in registers or in private tables.
//
// A reduction is a struct with
//
//   using Element                         the type of the data
//   struct Outputs                        where results go, and options; passed to kernels by value
//   kRowsInFlight                         rows that a thread loads before it uses the first
//   kTileBlocks                           blocks of tiles that share a multiprocessor, which caps the registers
//   template <int kCount> Accumulator     kCount neighbouring cells of one segment under reduction, trivially copyable:
//     Start()                                  the cells of no rows
//     Add(values, row, outputs)                folds kCount elements of a row into them
//     Merge(other, outputs)                    folds in the cells of other rows of the segment
//     Store(outputs, segment, features, feature)  writes the results of the cells from `feature` on
//
// Partial results pass between blocks as accumulators, unrounded.
#pragma once

#include <cstdint>

namespace jax_baracuda::segment {

// Whether a reduction may be taken to private tables. (Kernels that nobody launches take time to compile, too.)
template <typename Reduction>
inline constexpr bool kTakesPrivateTable = true;

// Whether a reduction writes nothing but an element for each cell to each of its results.
template <typename Reduction>
inline constexpr bool kStoresCellsAlone = true;

// What blocks of rows leave of runs that cross their borders, one slot a block; cells as accumulators [blocks,
// vectors].
struct Carries {
  uint32_t* in_segment;  // kDropped where no long run enters the block
  void* in;              // of the run that enters the block
  void* out;             // of a long run that starts in the block and leaves it
};

}  // namespace jax_baracuda::segment
