// The gradient of maxima and minima of gathered rows. For each row, it sums over the row's edges the cotangents of the
// cells that they won.
#include "ffi/segment/gather_extremum/call.h"
#include "ffi/segment/gather_sum/reduction.cuh"

namespace jax_baracuda::segment {
namespace {

ReducePlan PlanOf(const GatherExtremumBackwardCall& call) {
  return PlanGathered(call, call.problem.features, SumStateBytes(call.type));
}

template <typename T, EdgeInput kInput>
CudaStatus SumOfWinners(const GatherExtremumBackwardCall& call, cudaStream_t stream) {
  Gathering<T> gathering = GatheringOf<T>(call, /*clips=*/false);
  gathering.winners = call.winner;
  gathering.extrema = static_cast<const T*>(call.extrema);
  gathering.reduced = static_cast<const T*>(call.gathered);
  return ReduceGathered<GatherSumReduction<T, kInput>>(call, PlanOf(call), gathering, {call.d_data, /*is_wide=*/false},
                                                       stream);
}

// With shared ties, an edge won the cells whose extremum equals its row's element. This also holds if only one edge
// attains the extremum, and a NaN equals nothing.
template <typename T>
CudaStatus SumOfWinners(const GatherExtremumBackwardCall& call, cudaStream_t stream) {
  return call.shares_ties ? SumOfWinners<T, EdgeInput::kExtrema>(call, stream)
                          : SumOfWinners<T, EdgeInput::kWinners>(call, stream);
}

// The call of one batch element.
template <typename T>
GatherExtremumBackwardCall ElementOf(const GatherExtremumBackwardCall& call, int64_t b) {
  const auto of_element = [&](const auto* array, bool is_shared, int64_t size) {
    return array == nullptr || is_shared ? array : array + b * size;
  };
  const Problem& problem = call.problem;
  const int64_t cells = call.num_rows * problem.features, elements = problem.segments * problem.features;
  GatherExtremumBackwardCall element = call;
  element.problem.batch = 1;
  element.data = of_element(static_cast<const T*>(call.data), problem.data_is_shared, cells);
  element.segment_ids = of_element(static_cast<const char*>(call.segment_ids), problem.ids_are_shared,
                                   problem.rows * (call.ids_are_64_bit ? 8 : 4));
  element.gather_ids = of_element(call.gather_ids, call.gather_ids_are_shared, problem.rows);
  element.edge_order = of_element(call.edge_order, call.edge_order_is_shared, problem.rows);
  element.winner = of_element(call.winner, call.winner_is_shared, cells);
  element.extrema = of_element(static_cast<const T*>(call.extrema), call.winner_is_shared, cells);
  element.gathered = of_element(static_cast<const T*>(call.gathered), call.gathered_is_shared, elements);
  element.d_data = static_cast<T*>(call.d_data) + b * elements;
  return element;
}

}  // namespace

Plan GatherExtremumBackwardCall::CudaPlan() const { return PlanOf(*this).Summary(); }

CudaStatus GatherExtremumBackwardCall::LaunchOnCuda(cudaStream_t stream) const {
  if (problem.HasNoResult()) return {};
  const bool is_shared = problem.data_is_shared || winner_is_shared || (gathered != nullptr && gathered_is_shared);
  CudaStatus status = JB_CUDA_STATUS(cudaErrorInvalidValue);
  DispatchFloating(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (problem.batch == 1 || !is_shared) {
      status = SumOfWinners<T>(*this, stream);
      return;
    }
    for (int64_t b = 0; b < problem.batch; ++b) {
      status = SumOfWinners<T>(ElementOf<T>(*this, b), stream);
      if (!status.ok()) return;
    }
  });
  return status;
}

}  // namespace jax_baracuda::segment
