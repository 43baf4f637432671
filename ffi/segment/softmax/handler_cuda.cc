// The CUDA handlers of segment_softmax and its gradient.

#include "ffi/segment/engine/strategies.h"
#include "ffi/segment/softmax/launch.cuh"

namespace jax_baracuda::segment {
namespace {

ffi::Error Softmax(cudaStream_t stream, ffi::AnyBuffer logits, ffi::AnyBuffer segment_ids,
                   ffi::Result<ffi::AnyBuffer> probabilities, ffi::RemainingRets scratch_result, int64_t num_segments,
                   bool indices_are_sorted, bool deterministic, int64_t num_batch_dims) {
  constexpr const char* kOp = "segment_softmax";
  Buffers decoded;
  JB_RETURN_IF_ERROR(DecodeSoftmax(kOp, num_batch_dims, logits, segment_ids, *probabilities, num_segments, &decoded));
  if (!DispatchFloating(decoded.type, [](auto) {})) return UnsupportedType(kOp, "logits", logits.element_type());
  const Plan plan = PlanSoftmax(decoded.problem, ElementBytes(logits), indices_are_sorted, deterministic,
                                /*is_backward=*/false);
  ScratchBuffer scratch;
  JB_RETURN_IF_ERROR(DecodeScratch(kOp, scratch_result, plan.scratch_bytes, &scratch));
  const SoftmaxArguments arguments{decoded.problem,
                                   decoded.type,
                                   decoded.ids_are_64_bit,
                                   indices_are_sorted,
                                   deterministic,
                                   logits.untyped_data(),
                                   segment_ids.untyped_data(),
                                   probabilities->untyped_data(),
                                   scratch.data,
                                   scratch.bytes};
  return ToError(kOp, LaunchSoftmax(arguments, stream));
}

ffi::Error SoftmaxBackward(cudaStream_t stream, ffi::AnyBuffer probabilities, ffi::AnyBuffer d_probabilities,
                           ffi::AnyBuffer segment_ids, ffi::Result<ffi::AnyBuffer> d_logits,
                           ffi::RemainingRets scratch_result, int64_t num_segments, bool indices_are_sorted,
                           bool deterministic, int64_t num_batch_dims) {
  constexpr const char* kOp = "segment_softmax_backward";
  SoftmaxBackwardBuffers decoded;
  JB_RETURN_IF_ERROR(DecodeSoftmaxBackward(kOp, num_batch_dims, probabilities, d_probabilities, segment_ids, *d_logits,
                                           num_segments, &decoded));
  if (!DispatchFloating(decoded.type, [](auto) {})) {
    return UnsupportedType(kOp, "probabilities", probabilities.element_type());
  }
  const Plan plan = PlanSoftmax(decoded.problem, ElementBytes(probabilities), indices_are_sorted, deterministic,
                                /*is_backward=*/true);
  ScratchBuffer scratch;
  JB_RETURN_IF_ERROR(DecodeScratch(kOp, scratch_result, plan.scratch_bytes, &scratch));
  const SoftmaxBackwardArguments arguments{decoded.problem,
                                           decoded.type,
                                           decoded.ids_are_64_bit,
                                           indices_are_sorted,
                                           deterministic,
                                           decoded.d_probabilities_are_shared,
                                           probabilities.untyped_data(),
                                           d_probabilities.untyped_data(),
                                           segment_ids.untyped_data(),
                                           d_logits->untyped_data(),
                                           scratch.data,
                                           scratch.bytes};
  return ToError(kOp, LaunchSoftmaxBackward(arguments, stream));
}

XLA_FFI_DEFINE_HANDLER(kSoftmax, Softmax,
                       ffi::Ffi::Bind()
                           .Ctx<Stream>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .RemainingRets()
                           .Attr<int64_t>("num_segments")
                           .Attr<bool>("indices_are_sorted")
                           .Attr<bool>("deterministic").Attr<int64_t>("num_batch_dims"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kSoftmaxBackward, SoftmaxBackward,
                       ffi::Ffi::Bind()
                           .Ctx<Stream>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .RemainingRets()
                           .Attr<int64_t>("num_segments")
                           .Attr<bool>("indices_are_sorted")
                           .Attr<bool>("deterministic").Attr<int64_t>("num_batch_dims"),
                       {ffi::Traits::kCmdBufferCompatible});

template <bool kIsBackward>
Plan PlanOf(const PlanParameters& parameters) {
  const PlanRequest call(parameters);
  return PlanSoftmax(call.problem, call.element_bytes, call.indices_are_sorted, call.deterministic, kIsBackward);
}

#define JB_SOFTMAX_STRATEGIES                                                                                   \
  kNothing, "fill", "one_launch", "windows", "sort_then_windows", "atomics", "cached_atomics", "atomics_in_parts", \
      "cached_atomics_in_parts"

JB_REGISTER_TARGET("segment_softmax", kSoftmax, PlanOf<false>, JB_SOFTMAX_STRATEGIES);
JB_REGISTER_TARGET("segment_softmax_backward", kSoftmaxBackward, PlanOf<true>, JB_SOFTMAX_STRATEGIES);

}  // namespace
}  // namespace jax_baracuda::segment
