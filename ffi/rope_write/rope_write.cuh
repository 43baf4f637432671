// The launcher of rope_write. It returns launch errors.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ffi/core/cuda_status.h"
#include "ffi/rope_write/rope_write.h"

namespace jax_baracuda::rope_write {

enum class Strategy {
  kByVector,
  kByElement,  // for rows that vectors do not fit
};

inline constexpr const char* kStrategyNames[] = {"by_vector", "by_element"};

// `value_features`: the number of neighbouring features of values. `are_aligned`: whether all arrays are aligned to
// vectors.
Strategy Choose(const rope::Problem& problem, int64_t value_features, int64_t element_bytes, bool are_aligned = true);

CudaStatus Launch(const Call& call, cudaStream_t stream);

}  // namespace jax_baracuda::rope_write
