// The CUDA target of segment_order.

#include "ffi/segment/engine/run_cuda.h"
#include "ffi/segment/order/handler.h"

namespace jax_baracuda::segment {
namespace {

JB_CUDA_TARGET("segment_order", (HandleOrder<cudaStream_t, RunOnCuda<OrderCall>>),
               (BindCall<Stream, 1, 2, OrderOptions>()), (CudaPlanOf<CallOf<OrderCall>>), kNothing, "few_rows",
               "radix_sort");

}  // namespace
}  // namespace jax_baracuda::segment
