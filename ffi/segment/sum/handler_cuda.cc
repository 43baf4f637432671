// The CUDA handlers of segment_sum, segment_mean and their gradients.

#include "ffi/segment/engine/strategies.h"
#include "ffi/segment/sum/launch.cuh"

namespace jax_baracuda::segment {
namespace {

ffi::Error Forward(const char* op, int64_t num_batch_dims, cudaStream_t stream, const ffi::AnyBuffer& data,
                   const ffi::AnyBuffer& segment_ids,
                   const ffi::AnyBuffer& output, const ffi::AnyBuffer* count, ffi::RemainingRets scratch_result,
                   bool indices_are_sorted, bool deterministic) {
  SumBuffers decoded;
  JB_RETURN_IF_ERROR(DecodeSum(op, num_batch_dims, data, segment_ids, output, count, &decoded));
  const bool supported = count != nullptr ? DispatchFloating(decoded.type, [](auto) {})
                                          : DispatchWrapping(decoded.type, [](auto) {});
  if (!supported) return UnsupportedType(op, "data", data.element_type());
  const Plan plan =
      PlanSum(decoded.problem, ElementBytes(data), indices_are_sorted, deterministic, count != nullptr);
  ScratchBuffer scratch;
  JB_RETURN_IF_ERROR(DecodeScratch(op, scratch_result, plan.scratch_bytes, &scratch));
  const SumArguments arguments{decoded.problem,
                               decoded.type,
                               decoded.ids_are_64_bit,
                               indices_are_sorted,
                               deterministic,
                               data.untyped_data(),
                               segment_ids.untyped_data(),
                               output.untyped_data(),
                               decoded.count,
                               scratch.data,
                               scratch.bytes};
  return ToError(op, LaunchSum(arguments, stream));
}

ffi::Error Sum(cudaStream_t stream, ffi::AnyBuffer data, ffi::AnyBuffer segment_ids,
               ffi::Result<ffi::AnyBuffer> output, ffi::RemainingRets scratch, bool indices_are_sorted,
               bool deterministic, int64_t num_batch_dims) {
  return Forward("segment_sum", num_batch_dims, stream, data, segment_ids, *output, nullptr, scratch,
                 indices_are_sorted, deterministic);
}

ffi::Error Mean(cudaStream_t stream, ffi::AnyBuffer data, ffi::AnyBuffer segment_ids,
                ffi::Result<ffi::AnyBuffer> output, ffi::Result<ffi::AnyBuffer> count, ffi::RemainingRets scratch,
                bool indices_are_sorted, bool deterministic, int64_t num_batch_dims) {
  return Forward("segment_mean", num_batch_dims, stream, data, segment_ids, *output, &*count, scratch,
                 indices_are_sorted, deterministic);
}

ffi::Error Backward(const char* op, int64_t num_batch_dims, cudaStream_t stream, const ffi::AnyBuffer& d_output,
                    const ffi::AnyBuffer* count, const ffi::AnyBuffer& segment_ids, const ffi::AnyBuffer& d_data) {
  GatherBuffers decoded;
  JB_RETURN_IF_ERROR(DecodeGather(op, num_batch_dims, d_output, count, segment_ids, d_data, &decoded));
  if (!DispatchFloating(decoded.type, [](auto) {})) return UnsupportedType(op, "d_output", d_output.element_type());
  const GatherArguments arguments{decoded.problem,
                                  decoded.type,
                                  decoded.ids_are_64_bit,
                                  d_output.untyped_data(),
                                  decoded.d_output_is_shared,
                                  decoded.count,
                                  decoded.count_is_shared,
                                  segment_ids.untyped_data(),
                                  d_data.untyped_data()};
  return ToError(op, LaunchGather(arguments, stream));
}

ffi::Error SumBackward(cudaStream_t stream, ffi::AnyBuffer d_output, ffi::AnyBuffer segment_ids,
                       ffi::Result<ffi::AnyBuffer> d_data, int64_t num_batch_dims) {
  return Backward("segment_sum_backward", num_batch_dims, stream, d_output, nullptr, segment_ids, *d_data);
}

ffi::Error MeanBackward(cudaStream_t stream, ffi::AnyBuffer d_output, ffi::AnyBuffer count, ffi::AnyBuffer segment_ids,
                        ffi::Result<ffi::AnyBuffer> d_data, int64_t num_batch_dims) {
  return Backward("segment_mean_backward", num_batch_dims, stream, d_output, &count, segment_ids, *d_data);
}

template <int kResults>
auto BindForward() {
  return BindBuffers<Stream, 2, kResults>()
      .RemainingRets()
      .template Attr<bool>("indices_are_sorted")
      .template Attr<bool>("deterministic").template Attr<int64_t>("num_batch_dims");
}

XLA_FFI_DEFINE_HANDLER(kSum, Sum, BindForward<1>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kMean, Mean, BindForward<2>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kSumBackward, SumBackward, (BindBuffers<Stream, 2, 1>().Attr<int64_t>("num_batch_dims")),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kMeanBackward, MeanBackward, (BindBuffers<Stream, 3, 1>().Attr<int64_t>("num_batch_dims")),
                       {ffi::Traits::kCmdBufferCompatible});

template <bool kIsMean>
Plan PlanOf(const PlanParameters& parameters) {
  const PlanRequest call(parameters);
  return PlanSum(call.problem, call.element_bytes, call.indices_are_sorted, call.deterministic, kIsMean);
}

Plan PlanOfBackward(const PlanParameters& parameters) {
  const PlanRequest call(parameters);
  return PlanGather(call.problem, call.element_bytes);
}

JB_REGISTER_TARGET("segment_sum", kSum, PlanOf<false>, kNothing, JB_REDUCE_STRATEGIES, "atomics",
                   "atomics_single_feature");
JB_REGISTER_TARGET("segment_mean", kMean, PlanOf<true>, kNothing, "fill_counts", JB_REDUCE_STRATEGIES, "atomics",
                   "atomics_single_feature");
JB_REGISTER_TARGET("segment_sum_backward", kSumBackward, PlanOfBackward, kNothing, JB_MAP_ROWS_STRATEGIES);
JB_REGISTER_TARGET("segment_mean_backward", kMeanBackward, PlanOfBackward, kNothing, JB_MAP_ROWS_STRATEGIES);

}  // namespace
}  // namespace jax_baracuda::segment
