// The handlers of segment_max, segment_min, segment_argmax, segment_argmin and their gradients.
#include "ffi/segment/decoding.h"
#include "ffi/segment/extremum/call.h"

namespace jax_baracuda::segment {
namespace {

template <bool kIsMinimum, bool kWithWinner>
void HandleExtremum(Arguments& arguments) {
  const Buffer data = arguments.Operand("data"), segment_ids = arguments.Operand("segment_ids");
  const Buffer output = arguments.Result("output");
  ExtremumCall call;
  Decoder decoder(arguments, &call);
  decoder.Reduction(data, segment_ids, output, &call.data, &call.output);
  data.CheckKernel(kWithWinner ? IsFloating(call.type) : DispatchOrdered(call.type, [](auto) {}));
  if (kWithWinner) {
    decoder.Cells(arguments.Result("winner"), XLA_FFI_DataType_S32, &call.winner);
    call.first_wins = arguments.Flag("first_wins");
  }
  call.is_minimum = kIsMinimum;
  call.with_winner = kWithWinner;
  call.indices_are_sorted = arguments.Flag("indices_are_sorted");
  RunWithScratch(arguments, &call);
}

// The last operands, data and output, are there if ties are shared.
void HandleExtremumBackward(Arguments& arguments) {
  const Buffer d_output = arguments.Operand("d_output"), winner = arguments.Operand("winner");
  const Buffer segment_ids = arguments.Operand("segment_ids"), d_data = arguments.Result("d_data");
  ExtremumBackwardCall call;
  Decoder decoder(arguments, &call);
  decoder.First(d_data, "rows, ...");
  decoder.Ids(segment_ids);
  decoder.FirstRows(d_data, &call.d_data);
  decoder.FirstCells(d_output, decoder.type(), &call.d_output);
  decoder.Cells(winner, XLA_FFI_DataType_S32, &call.winner);
  d_output.CheckKernel(IsFloating(call.type));
  if (arguments.NumOperandsLeft() > 0) {
    decoder.Rows(arguments.Operand("data"), &call.data);
    decoder.Like(winner, arguments.Operand("output"), decoder.type(), &call.output);
  }
  RunWithScratch(arguments, &call);
}

template <bool kIsMinimum>
void HandleArg(Arguments& arguments) {
  const Buffer data = arguments.Operand("data"), segment_ids = arguments.Operand("segment_ids");
  const Buffer winner = arguments.Result("winner");
  ArgCall call;
  Decoder decoder(arguments, &call);
  decoder.First(winner, "segments, ...");
  decoder.Ids(segment_ids);
  decoder.FirstData(data, &call.data);
  decoder.FirstCells(winner, XLA_FFI_DataType_S32, &call.row);
  data.CheckKernel(DispatchWide(call.type, [](auto) {}));
  call.is_minimum = kIsMinimum;
  call.indices_are_sorted = arguments.Flag("indices_are_sorted");
  RunWithScratch(arguments, &call);
}

// The calls that plan parameters describe.
template <bool kWithWinner>
ExtremumCall ExtremumCallOf(const PlanParameters& parameters) {
  auto call = CallOf<ExtremumCall>(parameters);
  call.with_winner = kWithWinner;
  return call;
}

JB_TARGET("segment_max", (HandleExtremum<false, false>), PlanOf<ExtremumCallOf<false>>,
          ExtremumCall::Strategies(/*with_winner=*/false));
JB_TARGET("segment_min", (HandleExtremum<true, false>), PlanOf<ExtremumCallOf<false>>,
          ExtremumCall::Strategies(/*with_winner=*/false));
JB_TARGET("segment_max_with_winner", (HandleExtremum<false, true>), PlanOf<ExtremumCallOf<true>>,
          ExtremumCall::Strategies(/*with_winner=*/true));
JB_TARGET("segment_min_with_winner", (HandleExtremum<true, true>), PlanOf<ExtremumCallOf<true>>,
          ExtremumCall::Strategies(/*with_winner=*/true));
JB_TARGET("segment_max_backward", HandleExtremumBackward, PlanOf<CallOf<ExtremumBackwardCall>>,
          ExtremumBackwardCall::Strategies());
JB_TARGET("segment_min_backward", HandleExtremumBackward, PlanOf<CallOf<ExtremumBackwardCall>>,
          ExtremumBackwardCall::Strategies());
JB_TARGET("segment_argmax", HandleArg<false>, PlanOf<CallOf<ArgCall>>, ArgCall::Strategies());
JB_TARGET("segment_argmin", HandleArg<true>, PlanOf<CallOf<ArgCall>>, ArgCall::Strategies());

}  // namespace
}  // namespace jax_baracuda::segment
