// The handler of gather_segment_dot.
#include "ffi/segment/decoding.h"
#include "ffi/segment/gather_dot/call.h"

namespace jax_baracuda::segment {
namespace {

void HandleGatherDot(Arguments& arguments) {
  const Buffer cells = arguments.Operand("d_output"), data = arguments.Operand("data");
  const Buffer gather_ids = arguments.Operand("gather_ids"), segment_ids = arguments.Operand("segment_ids");
  const Buffer output = arguments.Result("output");
  GatherDotCall call;
  Decoder decoder(arguments, &call);
  decoder.First(output, "edges, heads");
  decoder.Edges(data, gather_ids, segment_ids, &call);
  decoder.Heads(data, &call.heads);
  call.head_features = decoder.features()[1];
  decoder.FirstCells(cells, decoder.type(), &call.cells);
  call.is_wide = arguments.Flag("is_wide");
  const DataType type = call.is_wide ? ComputeDataType(decoder.type()) : decoder.type();
  decoder.Array(output, type, call.problem.rows, decoder.features().first(1), &call.output);
  decoder.EdgeOrder(arguments, &call);
  data.CheckKernel(IsFloating(call.type));
  RunWithScratch(arguments, &call);
}

GatherDotCall GatherDotCallOf(const PlanParameters& parameters) {
  auto call = CallOf<GatherDotCall>(parameters);
  call.heads = parameters.at("heads");
  call.head_features = call.heads == 0 ? 0 : call.problem.features / call.heads;
  return call;
}

JB_TARGET("gather_segment_dot", HandleGatherDot, PlanOf<GatherDotCallOf>, GatherDotCall::Strategies());

}  // namespace
}  // namespace jax_baracuda::segment
