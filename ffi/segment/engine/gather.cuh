// Reductions of gathered rows: each edge reads the row of another array that its gather id names.
#pragma once

#include <cstdint>

#include "ffi/segment/engine/reduce.cuh"

namespace jax_baracuda::segment {

// Edges are in segment order. Always tiles: neighbouring threads then read a gathered row as whole vectors.
inline Strategy StrategyOfEdges(const Problem& problem, int64_t max_edges_of_small_tiles) {
  if (problem.HasNoResult()) return Strategy::kNothing;
  if (problem.rows == 0) return Strategy::kFill;
  return TakesSmallTiles(problem, max_edges_of_small_tiles) ? Strategy::kSmallTiles : Strategy::kTiles;
}

// A vector does not cross a part of `part_features` features.
inline ReducePlan PlanGathered(const GatheringCall& call, int64_t part_features, int64_t state_bytes) {
  const Problem& problem = call.problem;
  const Strategy strategy = StrategyOfEdges(problem, Tuning::kMaxRowsOfSmallTiles);
  // Kernels number edges and gathered rows of all batch elements together in 32 bits.
  const bool fits = OrderFits(problem) && problem.batch * call.num_rows < static_cast<int64_t>(kDropped);
  return MakeReducePlan(problem, strategy, fits ? problem.batch : 1, part_features, ElementBytes(call.type),
                        state_bytes);
}

// The edges of a call. Gather ids out of range name the nearest row if `clips`, otherwise no row.
inline Edges EdgesOf(const GatheringCall& call, bool clips) {
  return {call.gather_ids, call.gather_ids_are_shared, clips, call.num_rows,
          call.edge_order, call.edge_order_is_shared};
}

}  // namespace jax_baracuda::segment
