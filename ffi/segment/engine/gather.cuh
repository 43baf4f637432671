// Reductions of gathered rows: each edge reads the row of another array that its gather id names.
#pragma once

#include <cstdint>

#include "ffi/segment/engine/reduce.cuh"

namespace jax_baracuda::segment {

// Strategy for edges in segment order, and the number of batch elements per launch.
struct GatherGrid {
  Strategy strategy;
  int64_t elements_at_once;
  int64_t part_features;  // as in Reducer
};

// Always tiles: neighbouring threads then read a gathered row as whole vectors.
inline GatherGrid MakeGatherGrid(const Problem& problem, int64_t num_rows, int64_t part_features) {
  const Strategy strategy = problem.rows == 0          ? Strategy::kFill
                            : TakesSmallTiles(problem) ? Strategy::kSmallTiles
                                                       : Strategy::kTiles;
  // Kernels number edges and gathered rows of all batch elements together in 32 bits.
  const bool fits = OrderFits(problem) && problem.batch * num_rows < static_cast<int64_t>(kDropped);
  return {strategy, fits ? problem.batch : 1, part_features};
}

inline Plan PlanGather(Problem problem, const GatherGrid& grid, int64_t element_bytes, int64_t state_bytes) {
  problem.batch = grid.elements_at_once;
  const int vector = TileVector(grid.strategy, grid.part_features, element_bytes);
  return {StrategyName(grid.strategy), ScratchBytesAtOnce(problem, grid.strategy, vector, state_bytes)};
}

// The edges of a call. Gather ids out of range name the nearest row if `clips`, otherwise no row.
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
