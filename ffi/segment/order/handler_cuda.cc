// The CUDA target of segment_order.

#include "ffi/segment/engine/run_cuda.h"
#include "ffi/segment/order/handler.h"

namespace jax_baracuda::segment {
namespace {

JB_CUDA_TARGET("segment_order", (HandleOrder<cudaStream_t, RunOnCuda<OrderCall>>), (CudaPlanOf<CallOf<OrderCall>>),
               kNothing, "few_unsorted_rows", "radix_sort");

}  // namespace
}  // namespace jax_baracuda::segment
