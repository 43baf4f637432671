// The order of rows by their segments.
#include "ffi/core/scratch.h"
#include "ffi/segment/engine/order.cuh"
#include "ffi/segment/order/call.h"

namespace jax_baracuda::segment {
namespace {

// The batch elements that are sorted at once.
Problem PartOf(Problem problem) {
  if (!OrderFits(problem)) problem.batch = 1;
  return problem;
}

}  // namespace

std::vector<const char*> OrderCall::Strategies() { return {kNothing, "few_unsorted_rows", "radix_sort"}; }

Plan OrderCall::MakePlan() const {
  if (problem.batch == 0 || problem.rows == 0) return {kNothing};
  if (UsesFewUnsortedRows(problem)) return {"few_unsorted_rows"};
  const Problem part = PartOf(problem);
  return {"radix_sort", SegmentOrderScratchBytes(part, /*holds_order=*/part.batch > 1)};
}

CudaStatus OrderCall::Run(cudaStream_t stream) const {
  if (problem.batch == 0 || problem.rows == 0) return {};
  if (!SegmentsFit(problem.segments)) return JB_CUDA_STATUS(cudaErrorInvalidValue);
  if (UsesFewUnsortedRows(problem)) {
    return LaunchFewRowOrder(problem, segment_ids, ids_are_64_bit, order, sorted_ids, stream);
  }
  const Problem part = PartOf(problem);
  if (scratch_bytes < SegmentOrderScratchBytes(part, /*holds_order=*/part.batch > 1)) {
    return JB_CUDA_STATUS(cudaErrorInvalidValue);
  }
  for (int64_t b = 0; b < problem.batch; b += part.batch) {
    const int32_t* const ids = static_cast<const int32_t*>(segment_ids) + problem.IdIndex(b, 0);
    const int64_t first = b * problem.rows;
    SegmentOrder sorted;
    if (part.batch == 1) {  // the joined order is the result
      sorted = {reinterpret_cast<uint32_t*>(sorted_ids + first), reinterpret_cast<uint32_t*>(order + first)};
    }
    JB_RETURN_IF_CUDA_ERROR(
        LaunchSegmentOrder(part, ids, /*ids_are_64_bit=*/false, static_cast<char*>(scratch), &sorted, stream));
    if (part.batch > 1) {
      JB_RETURN_IF_CUDA_ERROR(LaunchRowOrder(part, sorted, order + first, sorted_ids + first, stream));
    }
  }
  return {};
}

}  // namespace jax_baracuda::segment
