// The CUDA handler of write_rows.

#include "ffi/core/cuda_handler.h"
#include "ffi/core/target_table.h"
#include "ffi/write_rows/write_rows.cuh"
#include "ffi/write_rows/write_rows_handler.h"

namespace jax_baracuda::write_rows {
namespace {

ffi::Error Run(cudaStream_t stream, const Call& call) { return ToError(kOp, Launch(call, stream)); }

JB_TARGET("write_rows", (HandleRows<cudaStream_t, Run>), PlanRows, JB_NAMES(kStrategyNames));

}  // namespace
}  // namespace jax_baracuda::write_rows
