// The handlers of segment_softmax and its gradient.
#include "ffi/segment/decoding.h"
#include "ffi/segment/softmax/call.h"

namespace jax_baracuda::segment {
namespace {

template <bool kIsBackward>
void HandleSoftmax(Arguments& arguments) {
  const Buffer rows = arguments.Operand(kIsBackward ? "probabilities" : "logits");
  const Buffer d_output = kIsBackward ? arguments.Operand("d_output") : Buffer{};
  const Buffer segment_ids = arguments.Operand("segment_ids");
  const Buffer output = arguments.Result(kIsBackward ? "d_logits" : "probabilities");
  SoftmaxCall call;
  call.is_backward = kIsBackward;
  Decoder decoder(arguments, &call);
  decoder.First(output, "rows, ...");
  decoder.Ids(segment_ids);
  decoder.FirstRows(rows, &call.inputs[0]);
  if (kIsBackward) decoder.Rows(d_output, &call.inputs[1]);
  decoder.Rows(output, &call.output);
  decoder.Segments(arguments.Integer("num_segments"));
  rows.CheckKernel(IsFloating(call.type));
  call.problem.data_is_shared = call.inputs[0].is_shared;
  call.indices_are_sorted = arguments.Flag("indices_are_sorted");
  RunWithScratch(arguments, &call);
}

template <bool kIsBackward>
SoftmaxCall SoftmaxCallOf(const PlanParameters& parameters) {
  auto call = CallOf<SoftmaxCall>(parameters);
  call.is_backward = kIsBackward;
  return call;
}

JB_TARGET("segment_softmax", HandleSoftmax</*kIsBackward=*/false>, PlanOf<SoftmaxCallOf<false>>,
          SoftmaxCall::Strategies(/*is_backward=*/false));
JB_TARGET("segment_softmax_backward", HandleSoftmax</*kIsBackward=*/true>, PlanOf<SoftmaxCallOf<true>>,
          SoftmaxCall::Strategies(/*is_backward=*/true));

}  // namespace
}  // namespace jax_baracuda::segment
