// The handlers of segment_sum_in_float64 and segment_mean_in_float64.
#pragma once

#include "ffi/segment/sum/handler.h"
#include "ffi/segment/sum_in_float64/call.h"

namespace jax_baracuda::segment {

template <typename Context, Run<Context, Float64SumCall> kRun>
ffi::Error HandleSumInFloat64(Context context, ffi::AnyBuffer data, ffi::AnyBuffer segment_ids,
                              ffi::Result<ffi::AnyBuffer> output, ffi::RemainingRets scratch, SumOptions options) {
  constexpr const char* kOp = "segment_sum_in_float64";
  Float64SumCall call;
  Decoder decoder(kOp, options.num_batch_dims, &call);
  JB_RETURN_IF_ERROR(DecodeSum(&decoder, data, segment_ids, *output, options, &call));
  JB_RETURN_IF_ERROR(CheckKernel(kOp, "data", data, DispatchBelowFloat64(call.type, [](auto) {})));
  return kRun(context, kOp, scratch, &call);
}

template <typename Context, Run<Context, Float64SumCall> kRun>
ffi::Error HandleMeanInFloat64(Context context, ffi::AnyBuffer data, ffi::AnyBuffer segment_ids,
                               ffi::Result<ffi::AnyBuffer> output, ffi::Result<ffi::AnyBuffer> count,
                               ffi::RemainingRets scratch, SumOptions options) {
  constexpr const char* kOp = "segment_mean_in_float64";
  Float64SumCall call;
  Decoder decoder(kOp, options.num_batch_dims, &call);
  JB_RETURN_IF_ERROR(DecodeSum(&decoder, data, segment_ids, *output, options, &call));
  JB_RETURN_IF_ERROR(decoder.Vector("count", *count, ffi::DataType::S32, call.problem.segments, &call.count));
  JB_RETURN_IF_ERROR(CheckKernel(kOp, "data", data, DispatchBelowFloat64(call.type, [](auto) {})));
  call.is_mean = true;
  return kRun(context, kOp, scratch, &call);
}

template <bool kIsMean>
Float64SumCall Float64SumCallOf(const PlanParameters& parameters) {
  auto call = CallOf<Float64SumCall>(parameters);
  call.is_mean = kIsMean;
  return call;
}

}  // namespace jax_baracuda::segment
