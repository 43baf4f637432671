// The CUDA handlers of causal_conv1d, its gradient and its update.

#include <cstdint>

#include "ffi/causal_conv1d/causal_conv1d.cuh"
#include "ffi/causal_conv1d/causal_conv1d_handler.h"
#include "ffi/core/cuda_handler.h"
#include "ffi/core/strategies.h"
#include "ffi/core/target_table.h"

namespace jax_baracuda::causal_conv1d {
namespace {

ffi::Error Forward(cudaStream_t stream, const ForwardCall& call) {
  return ToError(kForwardName, LaunchForward(call, stream));
}

ffi::Error Backward(cudaStream_t stream, BackwardCall* call, ffi::RemainingRets more_results, size_t num_decoded) {
  const int64_t scratch_bytes = BackwardScratchBytes(call->problem, ElementBytes(call->type));
  ScratchBuffer scratch;
  JB_RETURN_IF_ERROR(DecodeScratch(kBackwardName, more_results, scratch_bytes, &scratch, /*first=*/num_decoded));
  call->scratch = scratch.data;
  return ToError(kBackwardName, LaunchBackward(*call, stream));
}

ffi::Error Update(cudaStream_t stream, const UpdateCall& call) {
  return ToError(kUpdateName, LaunchUpdate(call, stream));
}

Plan PlanForward(const PlanParameters& parameters) {
  const Problem problem = ProblemOf(parameters);
  const Tiling tiling =
      ChooseForward(problem, parameters.at("element_bytes"), /*is_shared=*/parameters.at("x_is_shared") != 0);
  if (tiling == Tiling::kNothing) return Plan{"nothing"};
  return Plan{kForwardStrategyNames[2 * static_cast<int>(tiling) - 1 + (problem.has_same_sequence ? 1 : 0)]};
}

Plan PlanBackward(const PlanParameters& parameters) {
  const Problem problem = ProblemOf(parameters);
  const int64_t element_bytes = parameters.at("element_bytes");
  const int64_t scratch_bytes = BackwardScratchBytes(problem, element_bytes);
  const bool is_shared = parameters.at("x_is_shared") != 0 || parameters.at("d_output_is_shared") != 0;
  const int states = parameters.at("has_initial_state") != 0 || parameters.at("has_d_final_state") != 0 ? 1 : 0;
  if (problem.batch == 0 || problem.channels == 0) return Plan{"nothing", scratch_bytes};
  const Tiling tiling = ChooseBackward(problem, element_bytes, is_shared);
  if (tiling == Tiling::kNothing) return Plan{states == 1 ? "no_inputs_and_states" : "no_inputs", scratch_bytes};
  const int index = 4 * static_cast<int>(tiling) - 3 + (problem.has_same_sequence ? 2 : 0) + states;
  return Plan{kBackwardStrategyNames[index], scratch_bytes};
}

Plan PlanUpdate(const PlanParameters& parameters) {
  return Plan{NameOf(kUpdateStrategyNames, ChooseUpdate(ProblemOf(parameters), parameters.at("element_bytes"),
                                                        parameters.at("state_length")))};
}

JB_CUDA_TARGET(kForwardName, (HandleForward<cudaStream_t, Forward>), BindForward<Stream>(), PlanForward,
               JB_NAMES(kForwardStrategyNames));
JB_CUDA_TARGET(kBackwardName, (HandleBackward<cudaStream_t, Backward>), BindBackward<Stream>(), PlanBackward,
               JB_NAMES(kBackwardStrategyNames));
JB_CUDA_TARGET(kUpdateName, (HandleUpdate<cudaStream_t, Update>), BindUpdate<Stream>(), PlanUpdate,
               JB_NAMES(kUpdateStrategyNames));

}  // namespace
}  // namespace jax_baracuda::causal_conv1d
