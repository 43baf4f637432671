// The order of rows by their segments.
#include "ffi/core/scratch.h"
#include "ffi/segment/engine/order.cuh"
#include "ffi/segment/order/launch.cuh"

namespace jax_baracuda::segment {
namespace {

// The batch elements that are sorted at once.
Problem PartOf(Problem problem) {
  if (!OrderFits(problem)) problem.batch = 1;
  return problem;
}

}  // namespace

Plan PlanOrder(const OrderCall& call) {
  if (call.problem.batch == 0 || call.problem.rows == 0) return {kNothing};
  if (FitsOneBlock(call.problem)) return {"one_block"};
  const Problem part = PartOf(call.problem);
  return {"radix_sort", SegmentOrderScratchBytes(part, /*holds_order=*/part.batch > 1)};
}

CudaStatus LaunchOrder(const OrderCall& call, cudaStream_t stream) {
  const Problem& problem = call.problem;
  if (problem.batch == 0 || problem.rows == 0) return {};
  if (!SegmentsFit(problem.segments) || call.scratch_bytes < PlanOrder(call).scratch_bytes) {
    return JB_CUDA_STATUS(cudaErrorInvalidValue);
  }
  if (FitsOneBlock(problem)) {
    return LaunchOneBlockOrder(problem, call.segment_ids, call.ids_are_64_bit, call.order, call.sorted_ids, stream);
  }
  const Problem part = PartOf(problem);
  for (int64_t b = 0; b < problem.batch; b += part.batch) {
    const int32_t* const ids = static_cast<const int32_t*>(call.segment_ids) + problem.IdIndex(b, 0);
    const int64_t first = b * problem.rows;
    SegmentOrder order;
    if (part.batch == 1) {  // the joined order is the result
      order = {reinterpret_cast<uint32_t*>(call.sorted_ids + first), reinterpret_cast<uint32_t*>(call.order + first)};
    }
    JB_RETURN_IF_CUDA_ERROR(
        LaunchSegmentOrder(part, ids, /*ids_are_64_bit=*/false, static_cast<char*>(call.scratch), &order, stream));
    if (part.batch > 1) {
      JB_RETURN_IF_CUDA_ERROR(LaunchRowOrder(part, order, call.order + first, call.sorted_ids + first, stream));
    }
  }
  return {};
}

}  // namespace jax_baracuda::segment
