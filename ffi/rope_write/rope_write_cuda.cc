// The CUDA handler of rope_write.

#include "ffi/core/cuda_handler.h"
#include "ffi/core/strategies.h"
#include "ffi/core/target_table.h"
#include "ffi/rope_write/rope_write.cuh"
#include "ffi/rope_write/rope_write_handler.h"

namespace jax_baracuda::rope_write {
namespace {

ffi::Error Run(cudaStream_t stream, const Call& call) { return ToError(kOp, Launch(call, stream)); }

Plan PlanRopeWrite(const PlanParameters& parameters) {
  rope::Problem problem{};
  problem.features = parameters.at("features");
  problem.pairs = parameters.at("rotary_dim") / 2;
  problem.first_rotated = parameters.at("rotary_offset");
  problem.interleaved = parameters.at("interleaved") != 0;
  return Plan{NameOf(kStrategyNames, Choose(problem, parameters.at("value_features"), parameters.at("element_bytes")))};
}

JB_TARGET("rope_write", (HandleRopeWrite<cudaStream_t, Run>), PlanRopeWrite, JB_NAMES(kStrategyNames));

}  // namespace
}  // namespace jax_baracuda::rope_write
