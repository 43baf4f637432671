// The CUDA handlers of segment_max and its gradient. Kernels and their launchers are in segment_max.cu.

#include <cuda_runtime_api.h>

#include <string>

#include "ffi/core/cuda_handler.h"
#include "ffi/core/target_table.h"
#include "ffi/segment/segment_max.cuh"
#include "ffi/segment/segment_max_handler.h"

namespace jax_baracuda::segment {
namespace {

using Stream = ffi::PlatformStream<cudaStream_t>;

// The parameters that jax_baracuda/ops/segment.py passes when it lowers the op.
int64_t ScratchBytes(const ScratchParameters& parameters, bool with_winner) {
  Problem problem;
  problem.batch = parameters.at("batch");
  problem.rows = parameters.at("rows");
  problem.segments = parameters.at("segments");
  problem.features = parameters.at("features");
  problem.data_is_shared = parameters.at("data_is_shared") != 0;
  problem.ids_are_shared = parameters.at("ids_are_shared") != 0;
  return SegmentMaxScratchBytes(problem, parameters.at("element_bytes"), parameters.at("indices_are_sorted") != 0,
                                with_winner);
}

ffi::Error Forward(const char* op, cudaStream_t stream, const ffi::AnyBuffer& data, const ffi::AnyBuffer& segment_ids,
                   const ffi::AnyBuffer& output, const ffi::AnyBuffer* winner, ffi::RemainingRets scratch_result,
                   bool indices_are_sorted, bool first_wins) {
  ForwardBuffers decoded;
  JB_RETURN_IF_ERROR(DecodeForward(op, data, segment_ids, output, winner, &decoded));
  const bool supported = winner != nullptr ? DispatchFloating(decoded.type, [](auto) {})
                                           : DispatchOrdered(decoded.type, [](auto) {});
  if (!supported) return UnsupportedType(op, "data", data.element_type());
  ScratchBuffer scratch;
  const int64_t element_bytes = static_cast<int64_t>(ffi::ByteWidth(data.element_type()));
  JB_RETURN_IF_ERROR(DecodeScratch(
      op, scratch_result,
      SegmentMaxScratchBytes(decoded.problem, element_bytes, indices_are_sorted, winner != nullptr), &scratch));
  const SegmentMaxArguments arguments{decoded.problem,
                                      decoded.type,
                                      decoded.ids_are_64_bit,
                                      indices_are_sorted,
                                      first_wins,
                                      data.untyped_data(),
                                      segment_ids.untyped_data(),
                                      output.untyped_data(),
                                      decoded.winner,
                                      scratch.data,
                                      scratch.bytes};
  return CudaStatus(op, LaunchSegmentMax(arguments, stream));
}

ffi::Error SegmentMax(cudaStream_t stream, ffi::AnyBuffer data, ffi::AnyBuffer segment_ids,
                      ffi::Result<ffi::AnyBuffer> output, ffi::RemainingRets scratch, bool indices_are_sorted) {
  return Forward("segment_max", stream, data, segment_ids, *output, nullptr, scratch, indices_are_sorted, false);
}

ffi::Error SegmentMaxWithWinner(cudaStream_t stream, ffi::AnyBuffer data, ffi::AnyBuffer segment_ids,
                                ffi::Result<ffi::AnyBuffer> output, ffi::Result<ffi::AnyBuffer> winner,
                                ffi::RemainingRets scratch, bool indices_are_sorted, bool first_wins) {
  return Forward("segment_max_with_winner", stream, data, segment_ids, *output, &*winner, scratch, indices_are_sorted,
                 first_wins);
}

ffi::Error SegmentMaxBackward(cudaStream_t stream, ffi::AnyBuffer d_output, ffi::AnyBuffer winner,
                              ffi::AnyBuffer segment_ids, ffi::RemainingArgs data_and_output,
                              ffi::Result<ffi::AnyBuffer> d_data) {
  constexpr const char* kOp = "segment_max_backward";
  BackwardBuffers decoded;
  JB_RETURN_IF_ERROR(DecodeBackward(kOp, d_output, winner, segment_ids, data_and_output, *d_data, &decoded));
  if (!DispatchFloating(decoded.type, [](auto) {})) {
    return UnsupportedType(kOp, "d_output", d_output.element_type());
  }
  const SegmentMaxBackwardArguments arguments{decoded.problem,
                                              decoded.type,
                                              decoded.ids_are_64_bit,
                                              d_output.untyped_data(),
                                              static_cast<const int32_t*>(winner.untyped_data()),
                                              segment_ids.untyped_data(),
                                              decoded.data,
                                              decoded.output,
                                              d_data->untyped_data(),
                                              decoded.d_output_is_shared,
                                              decoded.winner_is_shared};
  return CudaStatus(kOp, LaunchSegmentMaxBackward(arguments, stream));
}

XLA_FFI_DEFINE_HANDLER(kSegmentMax, SegmentMax,
                       ffi::Ffi::Bind()
                           .Ctx<Stream>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .RemainingRets()
                           .Attr<bool>("indices_are_sorted"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kSegmentMaxWithWinner, SegmentMaxWithWinner,
                       ffi::Ffi::Bind()
                           .Ctx<Stream>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .RemainingRets()
                           .Attr<bool>("indices_are_sorted")
                           .Attr<bool>("first_wins"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kSegmentMaxBackward, SegmentMaxBackward,
                       ffi::Ffi::Bind()
                           .Ctx<Stream>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .RemainingArgs()
                           .Ret<ffi::AnyBuffer>(),
                       {ffi::Traits::kCmdBufferCompatible});

JB_REGISTER_TARGET("segment_max", kSegmentMax, [](const ScratchParameters& p) { return ScratchBytes(p, false); });
JB_REGISTER_TARGET("segment_max_with_winner", kSegmentMaxWithWinner,
                   [](const ScratchParameters& p) { return ScratchBytes(p, true); });
JB_REGISTER_TARGET("segment_max_backward", kSegmentMaxBackward, nullptr);

}  // namespace
}  // namespace jax_baracuda::segment
