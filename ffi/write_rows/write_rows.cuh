// The launcher of write_rows. It returns launch errors.
#pragma once

#include <cuda_runtime_api.h>

#include "ffi/core/cuda_status.h"
#include "ffi/write_rows/write_rows.h"

namespace jax_baracuda::write_rows {

CudaStatus Launch(const Call& call, cudaStream_t stream);

}  // namespace jax_baracuda::write_rows
