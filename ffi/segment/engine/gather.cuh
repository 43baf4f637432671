// Reductions of gathered rows: each edge takes the row of another array that its gather id names.
#pragma once

#include <cstdint>

#include "ffi/segment/engine/reduce.cuh"

namespace jax_baracuda::segment {

// How edges in order of their segments are reduced, and how many elements of the batch are taken at once.
struct GatherGrid {
  Strategy strategy;
  int64_t elements_at_once;
  int64_t part_features;  // as in Reducer
};

// Rows are in tiles always: a gathered row is read by neighbouring threads, as whole vectors of it.
inline GatherGrid MakeGatherGrid(const Problem& problem, int64_t num_rows, int64_t part_features) {
  const Strategy strategy = problem.rows == 0          ? Strategy::kFill
                            : TakesSmallTiles(problem) ? Strategy::kSmallTiles
                                                       : Strategy::kTiles;
  // Edges and gathered rows are numbered through the batch in 32 bits.
  const bool fits = OrderFits(problem) && problem.batch * num_rows < static_cast<int64_t>(kDropped);
  return {strategy, fits ? problem.batch : 1, part_features};
}

inline Plan PlanGather(Problem problem, const GatherGrid& grid, int64_t element_bytes, int64_t state_bytes) {
  problem.batch = grid.elements_at_once;
  const int vector = TileVector(grid.strategy, grid.part_features, element_bytes);
  return {StrategyName(grid.strategy), ScratchBytesAtOnce(problem, grid.strategy, vector, state_bytes)};
}

// The edges of a call whose gather ids name the nearest row, or none, where they are out of range.
template <typename T>
Gathering<T> GatheringOf(const GatheringCall& call, bool clips) {
  Gathering<T> gathering{};
  gathering.gather_ids = call.gather_ids;
  gathering.gather_ids_are_shared = call.gather_ids_are_shared;
  gathering.clips = clips;
  gathering.num_rows = call.num_rows;
  gathering.edge_order = call.edge_order;
  gathering.edge_order_is_shared = call.edge_order_is_shared;
  return gathering;
}

template <typename Reduction>
CudaStatus ReduceGathered(const GatheringCall& call, const GatherGrid& grid,
                          const Gathering<typename Reduction::Element>& gathering, int64_t state_bytes,
                          const typename Reduction::Outputs& outputs, cudaStream_t stream) {
  using T = typename Reduction::Element;
  const Reducer<Reduction, /*kGathers=*/true> reducer{call.problem,
                                                      grid.strategy,
                                                      grid.elements_at_once,
                                                      grid.part_features,
                                                      static_cast<const T*>(call.data),
                                                      gathering,
                                                      call.segment_ids,
                                                      call.ids_are_64_bit,
                                                      outputs,
                                                      state_bytes,
                                                      call.scratch,
                                                      /*order=*/nullptr,
                                                      stream};
  return reducer.Launch();
}

}  // namespace jax_baracuda::segment
