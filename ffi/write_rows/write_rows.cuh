// The launcher of write_rows. Its functions return launch errors.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "ffi/core/cuda_status.h"
#include "ffi/write_rows/write_rows.h"

namespace jax_baracuda::write_rows {

CudaStatus Launch(const Call& call, cudaStream_t stream);

// The copies that a call makes before it writes rows.
CudaStatus CopyPools(const std::vector<Copy>& copies, cudaStream_t stream);

}  // namespace jax_baracuda::write_rows
