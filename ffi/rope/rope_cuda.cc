// The CUDA handlers of rope and its gradient.

#include "ffi/core/cuda_handler.h"
#include "ffi/core/device_attributes.h"
#include "ffi/core/strategies.h"
#include "ffi/core/target_table.h"
#include "ffi/rope/rope.cuh"
#include "ffi/rope/rope_handler.h"

namespace jax_baracuda::rope {
namespace {

ffi::Error Run(cudaStream_t stream, const char* op, const Call& call) { return ToError(op, LaunchRope(call, stream)); }

Plan PlanRope(const PlanParameters& parameters) {
  const RopePlan plan = Choose(ProblemOf(parameters), parameters.at("heads"), parameters.at("element_bytes"),
                               DeviceAttributesForPlan().multiprocessors);
  return Plan{NameOf(kStrategyNames, plan.strategy)};
}

JB_TARGET("rope", (HandleRope<cudaStream_t, Run, false>), PlanRope, JB_NAMES(kStrategyNames));
JB_TARGET("rope_backward", (HandleRope<cudaStream_t, Run, true>), PlanRope, JB_NAMES(kStrategyNames));
JB_TARGET("rope_qk", (HandleRopeQk<cudaStream_t, Run, false>), PlanRope, JB_NAMES(kStrategyNames));
JB_TARGET("rope_qk_backward", (HandleRopeQk<cudaStream_t, Run, true>), PlanRope, JB_NAMES(kStrategyNames));

}  // namespace
}  // namespace jax_baracuda::rope
