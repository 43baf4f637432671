// The handlers of segment_sum and segment_mean.
#include "ffi/segment/decoding.h"
#include "ffi/segment/sum/call.h"

namespace jax_baracuda::segment {
namespace {

template <bool kIsMean, bool kInFloat64>
constexpr const char* kSumName = kInFloat64 ? (kIsMean ? "segment_mean_in_float64" : "segment_sum_in_float64")
                                            : (kIsMean ? "segment_mean" : "segment_sum");

template <bool kIsMean, bool kInFloat64>
ffi::Error HandleSum(Context context, ffi::AnyBuffer data, ffi::AnyBuffer segment_ids,
                     ffi::Result<ffi::AnyBuffer> output, ffi::RemainingRets more_results, SumOptions options) {
  constexpr const char* kOp = kSumName<kIsMean, kInFloat64>;
  SumCall call;
  call.is_mean = kIsMean;
  call.in_float64 = kInFloat64;
  call.indices_are_sorted = options.indices_are_sorted;
  call.deterministic = options.deterministic;
  Decoder decoder(kOp, options.num_batch_dims, &call);
  JB_RETURN_IF_ERROR(decoder.Reduction(data, segment_ids, *output, &call.data, &call.output));
  JB_RETURN_IF_ERROR(CheckKernel(kOp, "data", data, call.HasKernel()));
  OptionalResults results(kOp, more_results);
  JB_RETURN_IF_ERROR(results.Next("count", kIsMean, [&](const ffi::AnyBuffer& count) {
    return decoder.Vector("count", count, ffi::DataType::S32, call.problem.segments, &call.count);
  }));
  return RunCall(context, results, &call);
}

template <bool kIsMean, bool kInFloat64>
SumCall SumCallOf(const PlanParameters& parameters) {
  auto call = CallOf<SumCall>(parameters);
  call.is_mean = kIsMean;
  call.in_float64 = kInFloat64;
  return call;
}

JB_TARGET((kSumName<false, false>), (HandleSum<false, false>), (PlanOf<SumCallOf<false, false>>),
          SumCall::Strategies(/*is_mean=*/false, /*in_float64=*/false));
JB_TARGET((kSumName<true, false>), (HandleSum<true, false>), (PlanOf<SumCallOf<true, false>>),
          SumCall::Strategies(/*is_mean=*/true, /*in_float64=*/false));
JB_TARGET((kSumName<false, true>), (HandleSum<false, true>), (PlanOf<SumCallOf<false, true>>),
          SumCall::Strategies(/*is_mean=*/false, /*in_float64=*/true));
JB_TARGET((kSumName<true, true>), (HandleSum<true, true>), (PlanOf<SumCallOf<true, true>>),
          SumCall::Strategies(/*is_mean=*/true, /*in_float64=*/true));

}  // namespace
}  // namespace jax_baracuda::segment
