// The handler of gather_segment_sum.
#include "ffi/segment/decoding.h"
#include "ffi/segment/gather_sum/call.h"

namespace jax_baracuda::segment {
namespace {

void HandleGatherSum(Arguments& arguments) {
  const Buffer data = arguments.Operand("data"), gather_ids = arguments.Operand("gather_ids");
  const Buffer segment_ids = arguments.Operand("segment_ids"), output = arguments.Result("output");
  GatherSumCall call;
  call.indices_are_sorted = arguments.Flag("indices_are_sorted");
  call.clips_gather_ids = arguments.Flag("clips_gather_ids");
  call.has_weights = arguments.Flag("has_weights");
  call.is_wide = arguments.Flag("is_wide");
  Decoder decoder(arguments, &call);
  decoder.First(output, "segments, ...");
  decoder.Edges(data, gather_ids, segment_ids, &call);
  const DataType type = call.is_wide ? ComputeDataType(decoder.type()) : decoder.type();
  decoder.FirstCells(output, type, &call.output);
  if (call.has_weights) {  // [.., edges, heads], and data [.., rows, heads, features of a head]
    const Buffer weights = arguments.Operand("weights");
    decoder.Heads(data, &call.heads);
    decoder.Array(weights, decoder.type(), call.problem.rows, decoder.features().first(1), &call.weights);
  }
  decoder.EdgeOrder(arguments, &call);
  data.CheckKernel(IsFloating(call.type));
  if (kOnCuda) CheckSorted(call);
  RunWithScratch(arguments, &call);
}

GatherSumCall GatherSumCallOf(const PlanParameters& parameters) {
  auto call = CallOf<GatherSumCall>(parameters);
  call.num_rows = parameters.at("gathered_rows");
  call.heads = parameters.at("heads");
  call.has_weights = parameters.at("has_weights") != 0;
  return call;
}

JB_TARGET("gather_segment_sum", HandleGatherSum, PlanOf<GatherSumCallOf>, GatherSumCall::Strategies());

}  // namespace
}  // namespace jax_baracuda::segment
