// The handlers of segment_sum and segment_mean.
#pragma once

#include "ffi/segment/decoding.h"
#include "ffi/segment/sum/call.h"

namespace jax_baracuda::segment {

template <typename Call>
ffi::Error DecodeSum(Decoder* decoder, const char* op, const ffi::AnyBuffer& data, const ffi::AnyBuffer& segment_ids,
                     const ffi::AnyBuffer& output, const SumOptions& options, Call* call) {
  call->indices_are_sorted = options.indices_are_sorted;
  call->deterministic = options.deterministic;
  JB_RETURN_IF_ERROR(decoder->Reduction(data, segment_ids, output, &call->data, &call->output));
  return CheckKernel(op, "data", data, call->HasKernel());
}

template <typename Context, typename Call, Run<Context, Call> kRun>
ffi::Error HandleSum(Context context, ffi::AnyBuffer data, ffi::AnyBuffer segment_ids,
                     ffi::Result<ffi::AnyBuffer> output, ffi::RemainingRets scratch, SumOptions options) {
  Call call;
  Decoder decoder(Call::kSumName, options.num_batch_dims, &call);
  JB_RETURN_IF_ERROR(DecodeSum(&decoder, Call::kSumName, data, segment_ids, *output, options, &call));
  return kRun(context, Call::kSumName, scratch, &call);
}

template <typename Context, typename Call, Run<Context, Call> kRun>
ffi::Error HandleMean(Context context, ffi::AnyBuffer data, ffi::AnyBuffer segment_ids,
                      ffi::Result<ffi::AnyBuffer> output, ffi::Result<ffi::AnyBuffer> count, ffi::RemainingRets scratch,
                      SumOptions options) {
  Call call;
  call.is_mean = true;
  Decoder decoder(Call::kMeanName, options.num_batch_dims, &call);
  JB_RETURN_IF_ERROR(DecodeSum(&decoder, Call::kMeanName, data, segment_ids, *output, options, &call));
  JB_RETURN_IF_ERROR(decoder.Vector("count", *count, ffi::DataType::S32, call.problem.segments, &call.count));
  return kRun(context, Call::kMeanName, scratch, &call);
}

template <typename Call, bool kIsMean>
Call SumCallOf(const PlanParameters& parameters) {
  auto call = CallOf<Call>(parameters);
  call.is_mean = kIsMean;
  return call;
}

}  // namespace jax_baracuda::segment
