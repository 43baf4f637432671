// The handlers of segment_sum and segment_mean.
#pragma once

#include "ffi/segment/decoding.h"
#include "ffi/segment/sum/call.h"

namespace jax_baracuda::segment {

inline ffi::Error DecodeSum(Decoder* decoder, const ffi::AnyBuffer& data, const ffi::AnyBuffer& segment_ids,
                            const ffi::AnyBuffer& output, const SumOptions& options, SumArguments* call) {
  call->indices_are_sorted = options.indices_are_sorted;
  call->deterministic = options.deterministic;
  return decoder->Reduction(data, segment_ids, output, &call->data, &call->output);
}

template <typename Context, Run<Context, SumCall> kRun>
ffi::Error HandleSum(Context context, ffi::AnyBuffer data, ffi::AnyBuffer segment_ids,
                     ffi::Result<ffi::AnyBuffer> output, ffi::RemainingRets scratch, SumOptions options) {
  constexpr const char* kOp = "segment_sum";
  SumCall call;
  Decoder decoder(kOp, options.num_batch_dims, &call);
  JB_RETURN_IF_ERROR(DecodeSum(&decoder, data, segment_ids, *output, options, &call));
  JB_RETURN_IF_ERROR(CheckKernel(kOp, "data", data, DispatchWrapping(call.type, [](auto) {})));
  return kRun(context, kOp, scratch, &call);
}

template <typename Context, Run<Context, SumCall> kRun>
ffi::Error HandleMean(Context context, ffi::AnyBuffer data, ffi::AnyBuffer segment_ids,
                      ffi::Result<ffi::AnyBuffer> output, ffi::Result<ffi::AnyBuffer> count, ffi::RemainingRets scratch,
                      SumOptions options) {
  constexpr const char* kOp = "segment_mean";
  SumCall call;
  Decoder decoder(kOp, options.num_batch_dims, &call);
  JB_RETURN_IF_ERROR(DecodeSum(&decoder, data, segment_ids, *output, options, &call));
  JB_RETURN_IF_ERROR(decoder.Vector("count", *count, ffi::DataType::S32, call.problem.segments, &call.count));
  JB_RETURN_IF_ERROR(CheckKernel(kOp, "data", data, DispatchFloating(call.type, [](auto) {})));
  call.is_mean = true;
  return kRun(context, kOp, scratch, &call);
}

template <bool kIsMean>
SumCall SumCallOf(const PlanParameters& parameters) {
  auto call = CallOf<SumCall>(parameters);
  call.is_mean = kIsMean;
  return call;
}

}  // namespace jax_baracuda::segment
