// The CUDA handlers of segment_max, segment_min, segment_argmax, segment_argmin and the gradients.

#include "ffi/segment/engine/strategies.h"
#include "ffi/segment/extremum/launch.cuh"

namespace jax_baracuda::segment {
namespace {

ffi::Error Forward(const char* op, int64_t num_batch_dims, bool is_minimum, cudaStream_t stream,
                   const ffi::AnyBuffer& data,
                   const ffi::AnyBuffer& segment_ids, const ffi::AnyBuffer& output, const ffi::AnyBuffer* winner,
                   const ffi::AnyBuffer* order, ffi::RemainingRets scratch_result, bool indices_are_sorted,
                   bool first_wins) {
  ForwardBuffers decoded;
  JB_RETURN_IF_ERROR(DecodeForward(op, num_batch_dims, data, segment_ids, output, winner, order, &decoded));
  const bool supported = winner != nullptr ? DispatchFloating(decoded.type, [](auto) {})
                                           : DispatchOrdered(decoded.type, [](auto) {});
  if (!supported) return UnsupportedType(op, "data", data.element_type());
  const Problem& problem = decoded.problem;
  const Plan plan = PlanExtremum(problem, ElementBytes(data), indices_are_sorted, winner != nullptr);
  ScratchBuffer scratch;
  JB_RETURN_IF_ERROR(DecodeScratch(op, scratch_result, plan.scratch_bytes, &scratch));
  if (order != nullptr && decoded.order_size != problem.rows) {
    // No order is wanted, but the result is there.
    const int64_t bytes = problem.batch * decoded.order_size * sizeof(int32_t);
    JB_RETURN_IF_ERROR(ToError(op, JB_CUDA_STATUS(cudaMemsetAsync(decoded.order, 0, bytes, stream))));
    decoded.order = nullptr;
  }
  const ExtremumArguments arguments{problem,
                                    decoded.type,
                                    decoded.ids_are_64_bit,
                                    indices_are_sorted,
                                    is_minimum,
                                    first_wins,
                                    data.untyped_data(),
                                    segment_ids.untyped_data(),
                                    output.untyped_data(),
                                    decoded.winner,
                                    decoded.order,
                                    scratch.data,
                                    scratch.bytes};
  return ToError(op, LaunchExtremum(arguments, stream));
}

template <bool kIsMinimum>
ffi::Error Extremum(cudaStream_t stream, ffi::AnyBuffer data, ffi::AnyBuffer segment_ids,
                    ffi::Result<ffi::AnyBuffer> output, ffi::RemainingRets scratch, bool indices_are_sorted,
                    int64_t num_batch_dims) {
  return Forward(kIsMinimum ? "segment_min" : "segment_max", num_batch_dims, kIsMinimum, stream, data, segment_ids,
                 *output, nullptr, nullptr, scratch, indices_are_sorted, false);
}

template <bool kIsMinimum>
ffi::Error ExtremumWithWinner(cudaStream_t stream, ffi::AnyBuffer data, ffi::AnyBuffer segment_ids,
                              ffi::Result<ffi::AnyBuffer> output, ffi::Result<ffi::AnyBuffer> winner,
                              ffi::Result<ffi::AnyBuffer> order, ffi::RemainingRets scratch, bool indices_are_sorted,
                              bool first_wins, int64_t num_batch_dims) {
  return Forward(kIsMinimum ? "segment_min_with_winner" : "segment_max_with_winner", num_batch_dims, kIsMinimum,
                 stream, data, segment_ids, *output, &*winner, &*order, scratch, indices_are_sorted, first_wins);
}

template <bool kIsMinimum>
ffi::Error ExtremumBackward(cudaStream_t stream, ffi::AnyBuffer d_output, ffi::AnyBuffer winner,
                            ffi::AnyBuffer segment_ids, ffi::AnyBuffer order, ffi::RemainingArgs data_and_output,
                            ffi::Result<ffi::AnyBuffer> d_data, int64_t num_batch_dims) {
  constexpr const char* kOp = kIsMinimum ? "segment_min_backward" : "segment_max_backward";
  BackwardBuffers decoded;
  JB_RETURN_IF_ERROR(
      DecodeBackward(kOp, num_batch_dims, d_output, winner, segment_ids, order, data_and_output, *d_data, &decoded));
  if (!DispatchFloating(decoded.type, [](auto) {})) {
    return UnsupportedType(kOp, "d_output", d_output.element_type());
  }
  const bool has_order = decoded.order_size == decoded.problem.rows;
  const ExtremumBackwardArguments arguments{
      decoded.problem,
      decoded.type,
      decoded.ids_are_64_bit,
      d_output.untyped_data(),
      static_cast<const int32_t*>(winner.untyped_data()),
      segment_ids.untyped_data(),
      has_order ? static_cast<const int32_t*>(order.untyped_data()) : nullptr,
      decoded.order_is_shared,
      decoded.data,
      decoded.output,
      d_data->untyped_data(),
      decoded.d_output_is_shared,
      decoded.winner_is_shared};
  return ToError(kOp, LaunchExtremumBackward(arguments, stream));
}

template <bool kIsMinimum>
ffi::Error Arg(cudaStream_t stream, ffi::AnyBuffer data, ffi::AnyBuffer segment_ids,
               ffi::Result<ffi::AnyBuffer> winner, ffi::RemainingRets scratch_result, bool indices_are_sorted,
               int64_t num_batch_dims) {
  constexpr const char* kOp = kIsMinimum ? "segment_argmin" : "segment_argmax";
  Buffers decoded;
  JB_RETURN_IF_ERROR(DecodeArg(kOp, num_batch_dims, data, segment_ids, *winner, &decoded));
  if (!DispatchWide(decoded.type, [](auto) {})) return UnsupportedType(kOp, "data", data.element_type());
  const Plan plan = PlanArg(decoded.problem, ElementBytes(data), indices_are_sorted);
  ScratchBuffer scratch;
  JB_RETURN_IF_ERROR(DecodeScratch(kOp, scratch_result, plan.scratch_bytes, &scratch));
  const ArgArguments arguments{decoded.problem,
                               decoded.type,
                               decoded.ids_are_64_bit,
                               indices_are_sorted,
                               kIsMinimum,
                               data.untyped_data(),
                               segment_ids.untyped_data(),
                               static_cast<int32_t*>(winner->untyped_data()),
                               scratch.data,
                               scratch.bytes};
  return ToError(kOp, LaunchArg(arguments, stream));
}

auto BindExtremum() { return BindBuffers<Stream, 2, 1>().RemainingRets().Attr<bool>("indices_are_sorted")
    .Attr<int64_t>("num_batch_dims"); } 
auto BindWithWinner() {
  return BindBuffers<Stream, 2, 3>().RemainingRets().Attr<bool>("indices_are_sorted").Attr<bool>("first_wins")
      .Attr<int64_t>("num_batch_dims");
}

auto BindBackward() {
  return BindResults<1>(BindOperands<4>(ffi::Ffi::Bind().Ctx<Stream>()).RemainingArgs())
      .Attr<int64_t>("num_batch_dims");
}

XLA_FFI_DEFINE_HANDLER(kMax, Extremum<false>, BindExtremum(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kMin, Extremum<true>, BindExtremum(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kMaxWithWinner, ExtremumWithWinner<false>, BindWithWinner(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kMinWithWinner, ExtremumWithWinner<true>, BindWithWinner(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kMaxBackward, ExtremumBackward<false>, BindBackward(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kMinBackward, ExtremumBackward<true>, BindBackward(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kArgMax, Arg<false>, BindExtremum(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kArgMin, Arg<true>, BindExtremum(), {ffi::Traits::kCmdBufferCompatible});

template <bool kWithWinner>
Plan PlanOf(const PlanParameters& parameters) {
  const PlanRequest call(parameters);
  return PlanExtremum(call.problem, call.element_bytes, call.indices_are_sorted, kWithWinner);
}

Plan PlanOfBackward(const PlanParameters& parameters) {
  const PlanRequest call(parameters);
  return PlanExtremumBackward(call.problem, call.element_bytes, call.has_order, call.shares_ties);
}

Plan PlanOfArg(const PlanParameters& parameters) {
  const PlanRequest call(parameters);
  return PlanArg(call.problem, call.element_bytes, call.indices_are_sorted);
}

#define JB_TABLE_STRATEGIES "shared_table", "filtered_atomics", "atomics", "atomics_single_feature"
// Winners are not kept in private tables, which leaves few segments in any order to the shared one.
#define JB_WITH_WINNER_STRATEGIES \
  kNothing, "fill", "runs", "tiles", "staged_tiles", "sort_then_tiles", JB_TABLE_STRATEGIES
#define JB_BACKWARD_STRATEGIES                                                                                \
  kNothing, "winners", "winners_in_order", "winners_and_ties", "winners_and_ties_in_order", "all_rows", \
      "all_rows_in_order"

JB_REGISTER_TARGET("segment_max", kMax, PlanOf<false>, kNothing, JB_REDUCE_STRATEGIES, JB_TABLE_STRATEGIES);
JB_REGISTER_TARGET("segment_min", kMin, PlanOf<false>, kNothing, JB_REDUCE_STRATEGIES, JB_TABLE_STRATEGIES);
JB_REGISTER_TARGET("segment_max_with_winner", kMaxWithWinner, PlanOf<true>, JB_WITH_WINNER_STRATEGIES);
JB_REGISTER_TARGET("segment_min_with_winner", kMinWithWinner, PlanOf<true>, JB_WITH_WINNER_STRATEGIES);
JB_REGISTER_TARGET("segment_max_backward", kMaxBackward, PlanOfBackward, JB_BACKWARD_STRATEGIES);
JB_REGISTER_TARGET("segment_min_backward", kMinBackward, PlanOfBackward, JB_BACKWARD_STRATEGIES);
JB_REGISTER_TARGET("segment_argmax", kArgMax, PlanOfArg, kNothing, JB_REDUCE_STRATEGIES);
JB_REGISTER_TARGET("segment_argmin", kArgMin, PlanOfArg, kNothing, JB_REDUCE_STRATEGIES);

}  // namespace
}  // namespace jax_baracuda::segment
