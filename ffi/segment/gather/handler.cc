// The handlers of the gradients of segment_sum and segment_mean.
#include "ffi/segment/decoding.h"
#include "ffi/segment/gather/call.h"

namespace jax_baracuda::segment {
namespace {

template <bool kIsMean>
void HandleGather(Arguments& arguments) {
  const Buffer d_output = arguments.Operand("d_output");
  const Buffer count = kIsMean ? arguments.Operand("count") : Buffer{};
  const Buffer segment_ids = arguments.Operand("segment_ids"), d_data = arguments.Result("d_data");
  GatherCall call;
  Decoder decoder(arguments, &call);
  decoder.First(d_data, "rows, ...");
  decoder.Ids(segment_ids);
  decoder.FirstRows(d_data, &call.rows);
  decoder.FirstCells(d_output, decoder.type(), &call.cells);
  d_output.CheckKernel(IsFloating(call.type));
  if (kIsMean) decoder.Vector(count, XLA_FFI_DataType_S32, call.problem.segments, &call.count);
  RunWithScratch(arguments, &call);
}

JB_TARGET("segment_sum_backward", HandleGather</*kIsMean=*/false>, PlanOf<CallOf<GatherCall>>,
          GatherCall::Strategies());
JB_TARGET("segment_mean_backward", HandleGather</*kIsMean=*/true>, PlanOf<CallOf<GatherCall>>,
          GatherCall::Strategies());

}  // namespace
}  // namespace jax_baracuda::segment
