// What launchers and plans ask of the current device. Each device is asked once.
#pragma once

#include <cuda_runtime_api.h>

#include "ffi/core/cuda_status.h"

namespace jax_baracuda {

// The numbers here are an H200's: plans made where there is no GPU are made for one. Shared memory differs: a block can
// opt in to 227 KB with compute capability 9.0 and 10.0, 163 KB with 8.0, 99 KB with 8.6, 8.9 and 12.0.
struct DeviceAttributes {
  int multiprocessors = 132;
  int max_shared_bytes = 227 * 1024;  // of a block, static and dynamic, once AllowSharedMemory has allowed them
};

CudaStatus GetDeviceAttributes(DeviceAttributes* attributes);

// The same for plans, which may be made without a GPU: see DeviceAttributes.
DeviceAttributes DeviceAttributesForPlan();

CudaStatus MultiprocessorCount(int* count);

namespace internal {
CudaStatus AllowSharedMemory(const void* kernel, int* max_dynamic_bytes);
}  // namespace internal

// Lets launches of a kernel on the current device have as much dynamic shared memory as a block can: what the device
// gives less what the kernel itself declares. It does so once and for all: the limit belongs to the kernel, not to a
// launch, so that a thread which set it for its own launch could shrink it for another's.
template <typename... Arguments>
CudaStatus AllowSharedMemory(void (*kernel)(Arguments...), int* max_dynamic_bytes = nullptr) {
  return internal::AllowSharedMemory(reinterpret_cast<const void*>(kernel), max_dynamic_bytes);
}

}  // namespace jax_baracuda
