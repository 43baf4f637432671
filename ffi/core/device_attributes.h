// Attributes of the current device for launchers and plans. Each device is queried once.
#pragma once

#include <cuda_runtime_api.h>

#include "ffi/core/cuda_status.h"

namespace jax_baracuda {

// The defaults are an H200's; plans made without a GPU assume them. A block can opt in to 227 KB of shared memory with
// compute capability 9.0 and 10.0, 163 KB with 8.0, and 99 KB with 8.6, 8.9 and 12.0.
struct DeviceAttributes {
  int multiprocessors = 132;
  int max_shared_bytes = 227 * 1024;  // per block, static plus dynamic; requires AllowSharedMemory
};

CudaStatus GetDeviceAttributes(DeviceAttributes* attributes);

// The same for plans: the defaults of DeviceAttributes if there is no GPU.
DeviceAttributes DeviceAttributesForPlan();

CudaStatus MultiprocessorCount(int* count);

namespace internal {
CudaStatus AllowSharedMemory(const void* kernel, int* max_dynamic_bytes);
}  // namespace internal

// Raises a kernel's limit of dynamic shared memory on the current device to the maximum: the block's limit minus the
// kernel's static shared memory. It is set once, to the maximum, because it belongs to the kernel: a thread that set
// the limit for its own launch could lower it for another thread's.
template <typename... Arguments>
CudaStatus AllowSharedMemory(void (*kernel)(Arguments...), int* max_dynamic_bytes = nullptr) {
  return internal::AllowSharedMemory(reinterpret_cast<const void*>(kernel), max_dynamic_bytes);
}

}  // namespace jax_baracuda
