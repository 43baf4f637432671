// The handler of segment_logsumexp.
#include "ffi/segment/decoding.h"
#include "ffi/segment/logsumexp/logsumexp.h"

namespace jax_baracuda::segment {
namespace {

// The context is the stream or the thread pool.
ffi::Error HandleLogSumExp(Context context, ffi::AnyBuffer data, ffi::AnyBuffer segment_ids,
                           ffi::Result<ffi::AnyBuffer> maxima, ffi::Result<ffi::AnyBuffer> totals,
                           ffi::RemainingRets scratch, ReductionOptions options) {
  constexpr const char* kOp = "segment_logsumexp";
  LogSumExpCall call;
  Decoder decoder(kOp, options.num_batch_dims, &call);
  JB_RETURN_IF_ERROR(decoder.First("maxima", *maxima, "segments, ..."));
  JB_RETURN_IF_ERROR(decoder.Ids(segment_ids));
  JB_RETURN_IF_ERROR(decoder.FirstData(data, &call.data));
  const ffi::DataType of_states = ComputeDataType(decoder.type());
  JB_RETURN_IF_ERROR(decoder.FirstCells("maxima", *maxima, of_states, &call.maxima));
  JB_RETURN_IF_ERROR(decoder.Cells("totals", *totals, of_states, &call.totals));
  JB_RETURN_IF_ERROR(CheckKernel(kOp, "data", data, IsFloating(call.type)));
  call.indices_are_sorted = options.indices_are_sorted;
  return RunCall(context, {kOp, scratch}, &call);
}

JB_TARGET("segment_logsumexp", HandleLogSumExp, PlanOf<CallOf<LogSumExpCall>>, LogSumExpCall::Strategies());

}  // namespace
}  // namespace jax_baracuda::segment
