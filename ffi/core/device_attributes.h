// What launchers ask of the current device.
#pragma once

#include <cuda_runtime_api.h>

namespace jax_baracuda {

inline cudaError_t DeviceAttribute(cudaDeviceAttr attribute, int* value) {
  int device = 0;
  if (cudaError_t e = cudaGetDevice(&device)) return e;
  return cudaDeviceGetAttribute(value, attribute, device);
}

inline cudaError_t MultiprocessorCount(int* count) { return DeviceAttribute(cudaDevAttrMultiProcessorCount, count); }

// Of dynamic shared memory, once cudaFuncSetAttribute has allowed a kernel to have them.
inline cudaError_t MostSharedBytesPerBlock(int* bytes) {
  return DeviceAttribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, bytes);
}

}  // namespace jax_baracuda
