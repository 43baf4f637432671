// The handlers of gather_segment_max, gather_segment_min and their gradients.
#include <string>

#include "ffi/segment/decoding.h"
#include "ffi/segment/gather_extremum/call.h"

namespace jax_baracuda::segment {
namespace {

template <bool kIsMinimum, bool kWithWinner>
void HandleGatherExtremum(Arguments& arguments) {
  const Buffer data = arguments.Operand("data"), gather_ids = arguments.Operand("gather_ids");
  const Buffer segment_ids = arguments.Operand("segment_ids"), output = arguments.Result("output");
  GatherExtremumCall call;
  Decoder decoder(arguments, &call);
  decoder.First(output, "segments, ...");
  decoder.Edges(data, gather_ids, segment_ids, &call);
  decoder.FirstCells(output, decoder.type(), &call.output);
  if (call.num_rows == 0 && call.problem.rows > 0) {
    throw data.Wrong("has no rows for " + std::to_string(call.problem.rows) + " edges to gather");
  }
  data.CheckKernel(IsFloating(call.type));
  if (kWithWinner) {
    decoder.EdgeOrder(arguments, &call);
    call.first_wins = arguments.Flag("first_wins");
    decoder.Cells(arguments.Result("winner"), XLA_FFI_DataType_S32, &call.winner);
  }
  call.is_minimum = kIsMinimum;
  call.with_winner = kWithWinner;
  call.indices_are_sorted = arguments.Flag("indices_are_sorted");
  if (kOnCuda) CheckSorted(call);
  RunWithScratch(arguments, &call);
}

// Optional operands: with a plan, the edges sorted by the row that they gather; with shared ties, data and output of
// the forward pass.
void HandleGatherExtremumBackward(Arguments& arguments) {
  const Buffer d_winner = arguments.Operand("d_winner"), winner = arguments.Operand("winner");
  const Buffer gather_ids = arguments.Operand("gather_ids"), segment_ids = arguments.Operand("segment_ids");
  const bool has_plan = arguments.Flag("has_plan");
  const Buffer edge_order = has_plan ? arguments.Operand("edge_order") : Buffer{};
  const Buffer transposed_order = has_plan ? arguments.Operand("transposed_order") : Buffer{};
  const Buffer cells_of_edges = has_plan ? arguments.Operand("transposed_gather_ids") : segment_ids;
  const Buffer rows_of_edges = has_plan ? arguments.Operand("transposed_segment_ids") : gather_ids;
  const Buffer d_data = arguments.Result("d_data");
  GatherExtremumBackwardCall call;
  Decoder decoder(arguments, &call);
  decoder.First(d_data, "rows, ...");
  decoder.Ids(rows_of_edges);
  decoder.Gathered(d_winner, cells_of_edges, &call);
  decoder.FirstCells(d_data, decoder.type(), &call.d_data);
  decoder.Array(winner, XLA_FFI_DataType_S32, call.num_rows, decoder.features(), &call.winner);
  decoder.EdgeIds(gather_ids, &call.gather_ids_of_edges);
  decoder.EdgeIds(segment_ids, &call.segment_ids_of_edges);
  if (has_plan) {
    decoder.EdgeIds(edge_order, &call.forward_order);
    decoder.EdgeIds(transposed_order, &call.edge_order);
  }
  call.shares_ties = arguments.Flag("shares_ties");
  if (call.shares_ties) {
    const Buffer data = arguments.Operand("data"), output = arguments.Operand("output");
    decoder.Array(data, decoder.type(), call.problem.segments, decoder.features(), &call.gathered);
    decoder.Like(winner, output, decoder.type(), &call.extrema);
  }
  d_winner.CheckKernel(IsFloating(call.type));
  call.indices_are_sorted = has_plan;
  if (kOnCuda) CheckSorted(call);
  RunWithScratch(arguments, &call);
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
JB_TARGET("gather_segment_max_backward", HandleGatherExtremumBackward, PlanOf<GatherExtremumBackwardCallOf>,
          GatherExtremumBackwardCall::Strategies());
JB_TARGET("gather_segment_min_backward", HandleGatherExtremumBackward, PlanOf<GatherExtremumBackwardCallOf>,
          GatherExtremumBackwardCall::Strategies());

}  // namespace
}  // namespace jax_baracuda::segment
