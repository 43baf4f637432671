// The handlers of segment_max, segment_min, segment_argmax, segment_argmin and their gradients.
#include <type_traits>

#include "ffi/segment/decoding.h"
#include "ffi/segment/extremum/call.h"

namespace jax_baracuda::segment {
namespace {

template <bool kIsMinimum, bool kWithWinner>
ffi::Error HandleExtremum(Context context, ffi::AnyBuffer data, ffi::AnyBuffer segment_ids,
                          ffi::Result<ffi::AnyBuffer> output, ffi::RemainingRets more_results,
                          std::conditional_t<kWithWinner, WinnerOptions, ReductionOptions> options) {
  constexpr const char* kOp = kWithWinner ? (kIsMinimum ? "segment_min_with_winner" : "segment_max_with_winner")
                                          : (kIsMinimum ? "segment_min" : "segment_max");
  ExtremumCall call;
  Decoder decoder(kOp, options.num_batch_dims, &call);
  JB_RETURN_IF_ERROR(decoder.Reduction(data, segment_ids, *output, &call.data, &call.output));
  const bool has_kernel = kWithWinner ? IsFloating(call.type) : DispatchOrdered(call.type, [](auto) {});
  JB_RETURN_IF_ERROR(CheckKernel(kOp, "data", data, has_kernel));
  OptionalResults results(kOp, more_results);
  JB_RETURN_IF_ERROR(results.Next("winner", kWithWinner, [&](const ffi::AnyBuffer& winner) {
    return decoder.Cells("winner", winner, ffi::DataType::S32, &call.winner);
  }));
  call.is_minimum = kIsMinimum;
  call.with_winner = kWithWinner;
  if constexpr (kWithWinner) call.first_wins = options.first_wins;
  call.indices_are_sorted = options.indices_are_sorted;
  return RunCall(context, results, &call);
}

// The operands are (d_output, winner, segment_ids) and, if ties are shared, data and output.
template <bool kIsMinimum>
ffi::Error HandleExtremumBackward(Context context, ffi::AnyBuffer d_output, ffi::AnyBuffer winner,
                                  ffi::AnyBuffer segment_ids, ffi::RemainingArgs data_and_output,
                                  ffi::Result<ffi::AnyBuffer> d_data, ffi::RemainingRets scratch,
                                  GatherOptions options) {
  constexpr const char* kOp = kIsMinimum ? "segment_min_backward" : "segment_max_backward";
  ExtremumBackwardCall call;
  Decoder decoder(kOp, options.num_batch_dims, &call);
  JB_RETURN_IF_ERROR(decoder.First("d_data", *d_data, "rows, ..."));
  JB_RETURN_IF_ERROR(decoder.Ids(segment_ids));
  JB_RETURN_IF_ERROR(decoder.FirstRows("d_data", *d_data, &call.d_data));
  JB_RETURN_IF_ERROR(decoder.FirstCells("d_output", d_output, decoder.type(), &call.d_output));
  JB_RETURN_IF_ERROR(decoder.Cells("winner", winner, ffi::DataType::S32, &call.winner));
  JB_RETURN_IF_ERROR(CheckKernel(kOp, "d_output", d_output, IsFloating(call.type)));
  OptionalOperands operands(kOp, data_and_output);
  const bool shares_ties = data_and_output.size() > 0;
  JB_RETURN_IF_ERROR(operands.Next("data", shares_ties,
                                   [&](const ffi::AnyBuffer& data) { return decoder.Rows("data", data, &call.data); }));
  JB_RETURN_IF_ERROR(operands.Next("output", shares_ties, [&](const ffi::AnyBuffer& output) {
    return decoder.Like("winner", winner, "output", output, decoder.type(), &call.output);
  }));
  JB_RETURN_IF_ERROR(operands.End());
  return RunCall(context, {kOp, scratch}, &call);
}

template <bool kIsMinimum>
ffi::Error HandleArg(Context context, ffi::AnyBuffer data, ffi::AnyBuffer segment_ids,
                     ffi::Result<ffi::AnyBuffer> winner, ffi::RemainingRets scratch, ReductionOptions options) {
  constexpr const char* kOp = kIsMinimum ? "segment_argmin" : "segment_argmax";
  ArgCall call;
  Decoder decoder(kOp, options.num_batch_dims, &call);
  JB_RETURN_IF_ERROR(decoder.First("winner", *winner, "segments, ..."));
  JB_RETURN_IF_ERROR(decoder.Ids(segment_ids));
  JB_RETURN_IF_ERROR(decoder.FirstData(data, &call.data));
  JB_RETURN_IF_ERROR(decoder.FirstCells("winner", *winner, ffi::DataType::S32, &call.row));
  JB_RETURN_IF_ERROR(CheckKernel(kOp, "data", data, DispatchWide(call.type, [](auto) {})));
  call.is_minimum = kIsMinimum;
  call.indices_are_sorted = options.indices_are_sorted;
  return RunCall(context, {kOp, scratch}, &call);
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
JB_TARGET("segment_max_backward", HandleExtremumBackward<false>, PlanOf<CallOf<ExtremumBackwardCall>>,
          ExtremumBackwardCall::Strategies());
JB_TARGET("segment_min_backward", HandleExtremumBackward<true>, PlanOf<CallOf<ExtremumBackwardCall>>,
          ExtremumBackwardCall::Strategies());
JB_TARGET("segment_argmax", HandleArg<false>, PlanOf<CallOf<ArgCall>>, ArgCall::Strategies());
JB_TARGET("segment_argmin", HandleArg<true>, PlanOf<CallOf<ArgCall>>, ArgCall::Strategies());

}  // namespace
}  // namespace jax_baracuda::segment
