// The handlers of segment_sum and segment_mean.
#include "ffi/segment/decoding.h"
#include "ffi/segment/sum/call.h"

namespace jax_baracuda::segment {
namespace {

template <bool kIsMean, bool kInFloat64>
void HandleSum(Arguments& arguments) {
  const Buffer data = arguments.Operand("data"), segment_ids = arguments.Operand("segment_ids");
  const Buffer output = arguments.Result("output");
  SumCall call;
  call.is_mean = kIsMean;
  call.in_float64 = kInFloat64;
  call.indices_are_sorted = arguments.Flag("indices_are_sorted");
  call.deterministic = arguments.Flag("deterministic");
  Decoder decoder(arguments, &call);
  decoder.Reduction(data, segment_ids, output, &call.data, &call.output);
  data.CheckKernel(call.HasKernel());
  if (kIsMean) decoder.Vector(arguments.Result("count"), XLA_FFI_DataType_S32, call.problem.segments, &call.count);
  RunWithScratch(arguments, &call);
}

template <bool kIsMean, bool kInFloat64>
SumCall SumCallOf(const PlanParameters& parameters) {
  auto call = CallOf<SumCall>(parameters);
  call.is_mean = kIsMean;
  call.in_float64 = kInFloat64;
  return call;
}

JB_TARGET("segment_sum", (HandleSum<false, false>), (PlanOf<SumCallOf<false, false>>),
          SumCall::Strategies(/*is_mean=*/false, /*in_float64=*/false));
JB_TARGET("segment_mean", (HandleSum<true, false>), (PlanOf<SumCallOf<true, false>>),
          SumCall::Strategies(/*is_mean=*/true, /*in_float64=*/false));
JB_TARGET("segment_sum_in_float64", (HandleSum<false, true>), (PlanOf<SumCallOf<false, true>>),
          SumCall::Strategies(/*is_mean=*/false, /*in_float64=*/true));
JB_TARGET("segment_mean_in_float64", (HandleSum<true, true>), (PlanOf<SumCallOf<true, true>>),
          SumCall::Strategies(/*is_mean=*/true, /*in_float64=*/true));

}  // namespace
}  // namespace jax_baracuda::segment
