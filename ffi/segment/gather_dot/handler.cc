// The handler of gather_segment_dot.
#include "ffi/segment/decoding.h"
#include "ffi/segment/gather_dot/call.h"

namespace jax_baracuda::segment {

struct GatherDotOptions {
  int64_t num_batch_dims;
  bool is_wide, has_edge_order;
};

}  // namespace jax_baracuda::segment

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_baracuda::segment::GatherDotOptions, StructMember<int64_t>("num_batch_dims"),
                                      StructMember<bool>("is_wide"), StructMember<bool>("has_edge_order"));

namespace jax_baracuda::segment {
namespace {

ffi::Error HandleGatherDot(Context context, ffi::AnyBuffer cells, ffi::AnyBuffer data, ffi::AnyBuffer gather_ids,
                           ffi::AnyBuffer segment_ids, ffi::RemainingArgs optional, ffi::Result<ffi::AnyBuffer> output,
                           ffi::RemainingRets scratch, GatherDotOptions options) {
  constexpr const char* kOp = "gather_segment_dot";
  GatherDotCall call;
  Decoder decoder(kOp, options.num_batch_dims, &call);
  const Problem& problem = call.problem;
  JB_RETURN_IF_ERROR(decoder.First("output", *output, "edges, heads"));
  JB_RETURN_IF_ERROR(decoder.Edges(data, gather_ids, segment_ids, &call));
  JB_RETURN_IF_ERROR(decoder.Heads("data", &call.heads));
  call.head_features = decoder.features()[1];
  JB_RETURN_IF_ERROR(decoder.FirstCells("d_output", cells, decoder.type(), &call.cells));
  const ffi::DataType type = options.is_wide ? ComputeDataType(decoder.type()) : decoder.type();
  JB_RETURN_IF_ERROR(decoder.Array("output", *output, type, problem.rows, decoder.features().first(1), &call.output));
  OptionalOperands operands(kOp, optional);
  JB_RETURN_IF_ERROR(decoder.EdgeOrder(options.has_edge_order, &operands, &call));
  JB_RETURN_IF_ERROR(operands.End());
  JB_RETURN_IF_ERROR(CheckKernel(kOp, "data", data, IsFloating(call.type)));
  call.is_wide = options.is_wide;
  return RunCall(context, {kOp, scratch}, &call);
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
