// The handlers of the gradients of segment_sum and segment_mean.
#include "ffi/segment/decoding.h"
#include "ffi/segment/gather/call.h"

namespace jax_baracuda::segment {
namespace {

ffi::Error DecodeGather(const char* op, Decoder* decoder, const ffi::AnyBuffer& d_output,
                        const ffi::AnyBuffer& segment_ids, const ffi::AnyBuffer& d_data, GatherCall* call) {
  JB_RETURN_IF_ERROR(decoder->First("d_data", d_data, "rows, ..."));
  JB_RETURN_IF_ERROR(decoder->Ids(segment_ids));
  JB_RETURN_IF_ERROR(decoder->FirstRows("d_data", d_data, &call->rows));
  JB_RETURN_IF_ERROR(decoder->FirstCells("d_output", d_output, decoder->type(), &call->cells));
  return CheckKernel(op, "d_output", d_output, IsFloating(call->type));
}

ffi::Error HandleSumBackward(Context context, ffi::AnyBuffer d_output, ffi::AnyBuffer segment_ids,
                             ffi::Result<ffi::AnyBuffer> d_data, ffi::RemainingRets scratch, GatherOptions options) {
  constexpr const char* kOp = "segment_sum_backward";
  GatherCall call;
  Decoder decoder(kOp, options.num_batch_dims, &call);
  JB_RETURN_IF_ERROR(DecodeGather(kOp, &decoder, d_output, segment_ids, *d_data, &call));
  return RunCall(context, {kOp, scratch}, &call);
}

ffi::Error HandleMeanBackward(Context context, ffi::AnyBuffer d_output, ffi::AnyBuffer count,
                              ffi::AnyBuffer segment_ids, ffi::Result<ffi::AnyBuffer> d_data,
                              ffi::RemainingRets scratch, GatherOptions options) {
  constexpr const char* kOp = "segment_mean_backward";
  GatherCall call;
  Decoder decoder(kOp, options.num_batch_dims, &call);
  JB_RETURN_IF_ERROR(DecodeGather(kOp, &decoder, d_output, segment_ids, *d_data, &call));
  JB_RETURN_IF_ERROR(decoder.Vector("count", count, ffi::DataType::S32, call.problem.segments, &call.count));
  return RunCall(context, {kOp, scratch}, &call);
}

JB_TARGET("segment_sum_backward", HandleSumBackward, PlanOf<CallOf<GatherCall>>, GatherCall::Strategies());
JB_TARGET("segment_mean_backward", HandleMeanBackward, PlanOf<CallOf<GatherCall>>, GatherCall::Strategies());

}  // namespace
}  // namespace jax_baracuda::segment
