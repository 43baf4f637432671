// The handlers of segment_softmax and its gradient.
#include "ffi/segment/decoding.h"
#include "ffi/segment/softmax/call.h"

namespace jax_baracuda::segment {
namespace {

ffi::Error HandleSoftmax(Context context, ffi::AnyBuffer logits, ffi::AnyBuffer segment_ids,
                         ffi::Result<ffi::AnyBuffer> probabilities, ffi::RemainingRets scratch,
                         SoftmaxOptions options) {
  constexpr const char* kOp = "segment_softmax";
  SoftmaxCall call;
  Decoder decoder(kOp, options.num_batch_dims, &call);
  JB_RETURN_IF_ERROR(decoder.First("probabilities", *probabilities, "rows, ..."));
  JB_RETURN_IF_ERROR(decoder.Ids(segment_ids));
  JB_RETURN_IF_ERROR(decoder.FirstRows("logits", logits, &call.inputs[0]));
  JB_RETURN_IF_ERROR(decoder.Rows("probabilities", *probabilities, &call.output));
  JB_RETURN_IF_ERROR(decoder.Segments(options.num_segments));
  JB_RETURN_IF_ERROR(CheckKernel(kOp, "logits", logits, IsFloating(call.type)));
  call.problem.data_is_shared = call.inputs[0].is_shared;
  call.indices_are_sorted = options.indices_are_sorted;
  return RunCall(context, {kOp, scratch}, &call);
}

ffi::Error HandleSoftmaxBackward(Context context, ffi::AnyBuffer probabilities, ffi::AnyBuffer d_probabilities,
                                 ffi::AnyBuffer segment_ids, ffi::Result<ffi::AnyBuffer> d_logits,
                                 ffi::RemainingRets scratch, SoftmaxOptions options) {
  constexpr const char* kOp = "segment_softmax_backward";
  SoftmaxCall call;
  Decoder decoder(kOp, options.num_batch_dims, &call);
  JB_RETURN_IF_ERROR(decoder.First("d_logits", *d_logits, "rows, ..."));
  JB_RETURN_IF_ERROR(decoder.Ids(segment_ids));
  JB_RETURN_IF_ERROR(decoder.FirstRows("probabilities", probabilities, &call.inputs[0]));
  JB_RETURN_IF_ERROR(decoder.Rows("d_output", d_probabilities, &call.inputs[1]));
  JB_RETURN_IF_ERROR(decoder.Rows("d_logits", *d_logits, &call.output));
  JB_RETURN_IF_ERROR(decoder.Segments(options.num_segments));
  JB_RETURN_IF_ERROR(CheckKernel(kOp, "probabilities", probabilities, IsFloating(call.type)));
  call.problem.data_is_shared = call.inputs[0].is_shared;
  call.is_backward = true;
  call.indices_are_sorted = options.indices_are_sorted;
  return RunCall(context, {kOp, scratch}, &call);
}

template <bool kIsBackward>
SoftmaxCall SoftmaxCallOf(const PlanParameters& parameters) {
  auto call = CallOf<SoftmaxCall>(parameters);
  call.is_backward = kIsBackward;
  return call;
}

JB_TARGET("segment_softmax", HandleSoftmax, PlanOf<SoftmaxCallOf<false>>,
          SoftmaxCall::Strategies(/*is_backward=*/false));
JB_TARGET("segment_softmax_backward", HandleSoftmaxBackward, PlanOf<SoftmaxCallOf<true>>,
          SoftmaxCall::Strategies(/*is_backward=*/true));

}  // namespace
}  // namespace jax_baracuda::segment
