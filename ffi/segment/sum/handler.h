// The handlers of segment_sum and segment_mean.
#pragma once

#include "ffi/segment/decoding.h"
#include "ffi/segment/sum/call.h"

namespace jax_baracuda::segment {

template <bool kIsMean, bool kInFloat64>
inline constexpr const char* kSumName = kInFloat64 ? (kIsMean ? "segment_mean_in_float64" : "segment_sum_in_float64")
                                                   : (kIsMean ? "segment_mean" : "segment_sum");

template <typename Context, Run<Context, SumCall> kRun, bool kIsMean, bool kInFloat64>
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
  return kRun(context, results, &call);
}

template <bool kIsMean, bool kInFloat64>
SumCall SumCallOf(const PlanParameters& parameters) {
  auto call = CallOf<SumCall>(parameters);
  call.is_mean = kIsMean;
  call.in_float64 = kInFloat64;
  return call;
}

}  // namespace jax_baracuda::segment
