// The CUDA handlers of where and its gradient.

#include <cstdint>

#include "ffi/core/cuda_handler.h"
#include "ffi/core/strategies.h"
#include "ffi/core/target_table.h"
#include "ffi/where/where.cuh"
#include "ffi/where/where_handler.h"

namespace jax_baracuda::where {
namespace {

ffi::Error SelectHandler(cudaStream_t stream, ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::AnyBuffer cond,
                         ffi::Result<ffi::AnyBuffer> output) {
  constexpr const char* kOp = "where";
  SelectCall call;
  JB_RETURN_IF_ERROR(DecodeSelect(kOp, a, b, cond, *output, &call));
  return ToError(kOp, LaunchSelect(call, stream));
}

ffi::Error SplitHandler(cudaStream_t stream, ffi::AnyBuffer d_output, ffi::AnyBuffer cond,
                        ffi::Result<ffi::AnyBuffer> da, ffi::Result<ffi::AnyBuffer> db,
                        ffi::RemainingRets more_results) {
  constexpr const char* kOp = "where_backward";
  SplitCall call;
  JB_RETURN_IF_ERROR(DecodeSplit(kOp, d_output, cond, *da, *db, &call));
  const SplitPlan plan = Choose(call);
  ScratchBuffer scratch;
  JB_RETURN_IF_ERROR(DecodeScratch({kOp, more_results}, plan.scratch_bytes, &scratch));
  return ToError(kOp, LaunchSplit(call, plan, scratch.data, stream));
}

Plan PlanSelect(const PlanParameters& parameters) { return Plan{NameOf(kStrategyNames, Choose(SelectOf(parameters)))}; }

Plan PlanSplit(const PlanParameters& parameters) {
  const SplitPlan plan = Choose(SplitOf(parameters));
  return Plan{NameOf(kStrategyNames, plan.strategy), plan.scratch_bytes};
}

JB_TARGET("where", SelectHandler, PlanSelect,
          NamesOf(kStrategyNames, Strategy::kNothing, Strategy::kVectors, Strategy::kElements));
JB_TARGET("where_backward", SplitHandler, PlanSplit, JB_NAMES(kStrategyNames));

}  // namespace
}  // namespace jax_baracuda::where
