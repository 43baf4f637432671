// The handler of gather_segment_sum.
#include "ffi/segment/decoding.h"
#include "ffi/segment/gather_sum/call.h"

namespace jax_baracuda::segment {

struct GatherSumOptions {
  int64_t num_batch_dims;
  bool indices_are_sorted, clips_gather_ids, is_wide, has_weights, has_edge_order;
};

}  // namespace jax_baracuda::segment

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_baracuda::segment::GatherSumOptions, StructMember<int64_t>("num_batch_dims"),
                                      StructMember<bool>("indices_are_sorted"), StructMember<bool>("clips_gather_ids"),
                                      StructMember<bool>("is_wide"), StructMember<bool>("has_weights"),
                                      StructMember<bool>("has_edge_order"));

namespace jax_baracuda::segment {
namespace {

// With weights [.., edges, heads], data is [.., rows, heads, features of a head].
ffi::Error HandleGatherSum(Context context, ffi::AnyBuffer data, ffi::AnyBuffer gather_ids, ffi::AnyBuffer segment_ids,
                           ffi::RemainingArgs optional, ffi::Result<ffi::AnyBuffer> output, ffi::RemainingRets scratch,
                           GatherSumOptions options) {
  constexpr const char* kOp = "gather_segment_sum";
  GatherSumCall call;
  Decoder decoder(kOp, options.num_batch_dims, &call);
  JB_RETURN_IF_ERROR(decoder.First("output", *output, "segments, ..."));
  JB_RETURN_IF_ERROR(decoder.Edges(data, gather_ids, segment_ids, &call));
  const ffi::DataType type = options.is_wide ? ComputeDataType(decoder.type()) : decoder.type();
  JB_RETURN_IF_ERROR(decoder.FirstCells("output", *output, type, &call.output));
  OptionalOperands operands(kOp, optional);
  JB_RETURN_IF_ERROR(operands.Next("weights", options.has_weights, [&](const ffi::AnyBuffer& weights) {
    JB_RETURN_IF_ERROR(decoder.Heads("data", &call.heads));
    return decoder.Array("weights", weights, decoder.type(), call.problem.rows, decoder.features().first(1),
                         &call.weights);
  }));
  JB_RETURN_IF_ERROR(decoder.EdgeOrder(options.has_edge_order, &operands, &call));
  JB_RETURN_IF_ERROR(operands.End());
  JB_RETURN_IF_ERROR(CheckKernel(kOp, "data", data, IsFloating(call.type)));
  call.indices_are_sorted = options.indices_are_sorted;
  call.clips_gather_ids = options.clips_gather_ids;
  call.has_weights = options.has_weights;
  call.is_wide = options.is_wide;
  if (kOnCuda) JB_RETURN_IF_ERROR(CheckSorted(kOp, call));
  return RunCall(context, {kOp, scratch}, &call);
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
