// The handler of segment_logsumexp.
#include "ffi/segment/decoding.h"
#include "ffi/segment/logsumexp/logsumexp.h"

namespace jax_baracuda::segment {
namespace {

void HandleLogSumExp(Arguments& arguments) {
  const Buffer data = arguments.Operand("data"), segment_ids = arguments.Operand("segment_ids");
  const Buffer maxima = arguments.Result("maxima"), totals = arguments.Result("totals");
  LogSumExpCall call;
  Decoder decoder(arguments, &call);
  decoder.First(maxima, "segments, ...");
  decoder.Ids(segment_ids);
  decoder.FirstData(data, &call.data);
  const DataType of_states = ComputeDataType(decoder.type());
  decoder.FirstCells(maxima, of_states, &call.maxima);
  decoder.Cells(totals, of_states, &call.totals);
  data.CheckKernel(IsFloating(call.type));
  call.indices_are_sorted = arguments.Flag("indices_are_sorted");
  RunWithScratch(arguments, &call);
}

JB_TARGET("segment_logsumexp", HandleLogSumExp, PlanOf<CallOf<LogSumExpCall>>, LogSumExpCall::Strategies());

}  // namespace
}  // namespace jax_baracuda::segment
