// The handlers of segment_softmax and its gradient.
#include "ffi/segment/decoding.h"
#include "ffi/segment/softmax/call.h"

namespace jax_baracuda::segment {
namespace {

void HandleSoftmax(Arguments& arguments) {
  const Buffer logits = arguments.Operand("logits"), segment_ids = arguments.Operand("segment_ids");
  const Buffer probabilities = arguments.Result("probabilities");
  SoftmaxCall call;
  Decoder decoder(arguments, &call);
  decoder.First(probabilities, "rows, ...");
  decoder.Ids(segment_ids);
  decoder.FirstRows(logits, &call.inputs[0]);
  decoder.Rows(probabilities, &call.output);
  decoder.Segments(arguments.Integer("num_segments"));
  logits.CheckKernel(IsFloating(call.type));
  call.problem.data_is_shared = call.inputs[0].is_shared;
  call.indices_are_sorted = arguments.Flag("indices_are_sorted");
  RunWithScratch(arguments, &call);
}

void HandleSoftmaxBackward(Arguments& arguments) {
  const Buffer probabilities = arguments.Operand("probabilities"), d_output = arguments.Operand("d_output");
  const Buffer segment_ids = arguments.Operand("segment_ids"), d_logits = arguments.Result("d_logits");
  SoftmaxCall call;
  Decoder decoder(arguments, &call);
  decoder.First(d_logits, "rows, ...");
  decoder.Ids(segment_ids);
  decoder.FirstRows(probabilities, &call.inputs[0]);
  decoder.Rows(d_output, &call.inputs[1]);
  decoder.Rows(d_logits, &call.output);
  decoder.Segments(arguments.Integer("num_segments"));
  probabilities.CheckKernel(IsFloating(call.type));
  call.problem.data_is_shared = call.inputs[0].is_shared;
  call.is_backward = true;
  call.indices_are_sorted = arguments.Flag("indices_are_sorted");
  RunWithScratch(arguments, &call);
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
