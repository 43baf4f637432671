// The handlers of gather_segment_max, gather_segment_min and their gradients.
#include <string>
#include <type_traits>

#include "ffi/segment/decoding.h"
#include "ffi/segment/gather_extremum/call.h"

namespace jax_baracuda::segment {

struct GatherWinnerOptions {
  int64_t num_batch_dims;
  bool indices_are_sorted, first_wins, has_edge_order;
};

struct GatherExtremumBackwardOptions {
  int64_t num_batch_dims;
  bool has_plan, shares_ties;
};

}  // namespace jax_baracuda::segment

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_baracuda::segment::GatherWinnerOptions,
                                      StructMember<int64_t>("num_batch_dims"), StructMember<bool>("indices_are_sorted"),
                                      StructMember<bool>("first_wins"), StructMember<bool>("has_edge_order"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_baracuda::segment::GatherExtremumBackwardOptions,
                                      StructMember<int64_t>("num_batch_dims"), StructMember<bool>("has_plan"),
                                      StructMember<bool>("shares_ties"));

namespace jax_baracuda::segment {
namespace {

template <bool kIsMinimum, bool kWithWinner>
ffi::Error HandleGatherExtremum(Context context, ffi::AnyBuffer data, ffi::AnyBuffer gather_ids,
                                ffi::AnyBuffer segment_ids, ffi::RemainingArgs optional,
                                ffi::Result<ffi::AnyBuffer> output, ffi::RemainingRets more_results,
                                std::conditional_t<kWithWinner, GatherWinnerOptions, ReductionOptions> options) {
  constexpr const char* kOp = kWithWinner
                                  ? (kIsMinimum ? "gather_segment_min_with_winner" : "gather_segment_max_with_winner")
                                  : (kIsMinimum ? "gather_segment_min" : "gather_segment_max");
  GatherExtremumCall call;
  Decoder decoder(kOp, options.num_batch_dims, &call);
  JB_RETURN_IF_ERROR(decoder.First("output", *output, "segments, ..."));
  JB_RETURN_IF_ERROR(decoder.Edges(data, gather_ids, segment_ids, &call));
  JB_RETURN_IF_ERROR(decoder.FirstCells("output", *output, decoder.type(), &call.output));
  if (call.num_rows == 0 && call.problem.rows > 0) {
    return InvalidArgument(kOp, "data has no rows for " + std::to_string(call.problem.rows) + " edges to gather");
  }
  JB_RETURN_IF_ERROR(CheckKernel(kOp, "data", data, IsFloating(call.type)));
  OptionalOperands operands(kOp, optional);
  OptionalResults results(kOp, more_results);
  if constexpr (kWithWinner) {
    JB_RETURN_IF_ERROR(decoder.EdgeOrder(options.has_edge_order, &operands, &call));
    call.first_wins = options.first_wins;
  }
  JB_RETURN_IF_ERROR(operands.End());
  JB_RETURN_IF_ERROR(results.Next("winner", kWithWinner, [&](const ffi::AnyBuffer& winner) {
    return decoder.Cells("winner", winner, ffi::DataType::S32, &call.winner);
  }));
  call.is_minimum = kIsMinimum;
  call.with_winner = kWithWinner;
  call.indices_are_sorted = options.indices_are_sorted;
  if (kOnCuda) JB_RETURN_IF_ERROR(CheckSorted(kOp, call));
  return RunCall(context, results, &call);
}

// Optional operands: with a plan, the edges sorted by the row that they gather; with shared ties, data and output of
// the forward pass.
template <bool kIsMinimum>
ffi::Error HandleGatherExtremumBackward(Context context, ffi::AnyBuffer d_winner, ffi::AnyBuffer winner,
                                        ffi::AnyBuffer gather_ids, ffi::AnyBuffer segment_ids,
                                        ffi::RemainingArgs optional, ffi::Result<ffi::AnyBuffer> d_data,
                                        ffi::RemainingRets scratch, GatherExtremumBackwardOptions options) {
  constexpr const char* kOp = kIsMinimum ? "gather_segment_min_backward" : "gather_segment_max_backward";
  GatherExtremumBackwardCall call;
  Decoder decoder(kOp, options.num_batch_dims, &call);
  OptionalOperands operands(kOp, optional);
  ffi::AnyBuffer edge_order = gather_ids, transposed_order = gather_ids;
  ffi::AnyBuffer cells_of_edges = segment_ids, rows_of_edges = gather_ids;
  const auto take = [&](const char* name, bool is_there, ffi::AnyBuffer* operand) {
    return operands.Next(name, is_there, [&](const ffi::AnyBuffer& buffer) {
      *operand = buffer;
      return ffi::Error::Success();
    });
  };
  JB_RETURN_IF_ERROR(take("edge_order", options.has_plan, &edge_order));
  JB_RETURN_IF_ERROR(take("transposed_order", options.has_plan, &transposed_order));
  JB_RETURN_IF_ERROR(take("transposed_gather_ids", options.has_plan, &cells_of_edges));
  JB_RETURN_IF_ERROR(take("transposed_segment_ids", options.has_plan, &rows_of_edges));

  JB_RETURN_IF_ERROR(decoder.First("d_data", *d_data, "rows, ..."));
  JB_RETURN_IF_ERROR(decoder.Ids(rows_of_edges, options.has_plan ? "transposed_segment_ids" : "gather_ids"));
  JB_RETURN_IF_ERROR(decoder.Gathered("d_winner", d_winner, options.has_plan ? "transposed_gather_ids" : "segment_ids",
                                      cells_of_edges, &call));
  JB_RETURN_IF_ERROR(decoder.FirstCells("d_data", *d_data, decoder.type(), &call.d_data));
  JB_RETURN_IF_ERROR(
      decoder.Array("winner", winner, ffi::DataType::S32, call.num_rows, decoder.features(), &call.winner));
  JB_RETURN_IF_ERROR(decoder.EdgeIds("gather_ids", gather_ids, &call.gather_ids_of_edges));
  JB_RETURN_IF_ERROR(decoder.EdgeIds("segment_ids", segment_ids, &call.segment_ids_of_edges));
  if (options.has_plan) {
    JB_RETURN_IF_ERROR(decoder.EdgeIds("edge_order", edge_order, &call.forward_order));
    JB_RETURN_IF_ERROR(decoder.EdgeIds("transposed_order", transposed_order, &call.edge_order));
  }
  JB_RETURN_IF_ERROR(operands.Next("data", options.shares_ties, [&](const ffi::AnyBuffer& data) {
    return decoder.Array("data", data, decoder.type(), call.problem.segments, decoder.features(), &call.gathered);
  }));
  JB_RETURN_IF_ERROR(operands.Next("output", options.shares_ties, [&](const ffi::AnyBuffer& output) {
    return decoder.Like("winner", winner, "output", output, decoder.type(), &call.extrema);
  }));
  JB_RETURN_IF_ERROR(operands.End());
  JB_RETURN_IF_ERROR(CheckKernel(kOp, "d_winner", d_winner, IsFloating(call.type)));
  call.indices_are_sorted = options.has_plan;
  call.shares_ties = options.shares_ties;
  if (kOnCuda) JB_RETURN_IF_ERROR(CheckSorted(kOp, call));
  return RunCall(context, {kOp, scratch}, &call);
}

// The calls that plan parameters describe.
template <bool kWithWinner>
GatherExtremumCall GatherExtremumCallOf(const PlanParameters& parameters) {
  auto call = CallOf<GatherExtremumCall>(parameters);
  call.num_rows = parameters.at("gathered_rows");
  call.with_winner = kWithWinner;
  return call;
}

GatherExtremumBackwardCall GatherExtremumBackwardCallOf(const PlanParameters& parameters) {
  auto call = CallOf<GatherExtremumBackwardCall>(parameters);
  call.num_rows = parameters.at("gathered_rows");
  return call;
}

JB_TARGET("gather_segment_max", (HandleGatherExtremum<false, false>), PlanOf<GatherExtremumCallOf<false>>,
          GatherExtremumCall::Strategies());
JB_TARGET("gather_segment_min", (HandleGatherExtremum<true, false>), PlanOf<GatherExtremumCallOf<false>>,
          GatherExtremumCall::Strategies());
JB_TARGET("gather_segment_max_with_winner", (HandleGatherExtremum<false, true>), PlanOf<GatherExtremumCallOf<true>>,
          GatherExtremumCall::Strategies());
JB_TARGET("gather_segment_min_with_winner", (HandleGatherExtremum<true, true>), PlanOf<GatherExtremumCallOf<true>>,
          GatherExtremumCall::Strategies());
JB_TARGET("gather_segment_max_backward", HandleGatherExtremumBackward<false>, PlanOf<GatherExtremumBackwardCallOf>,
          GatherExtremumBackwardCall::Strategies());
JB_TARGET("gather_segment_min_backward", HandleGatherExtremumBackward<true>, PlanOf<GatherExtremumBackwardCallOf>,
          GatherExtremumBackwardCall::Strategies());

}  // namespace
}  // namespace jax_baracuda::segment
