#include <map>
#include <mutex>
#include <utility>

#include "ffi/core/device_attributes.h"

namespace jax_baracuda {
namespace {

// Calls `ask(&value)` once per key and caches the value; failures are not cached.
template <typename Key, typename Value, typename Ask>
CudaStatus GetOnce(std::map<Key, Value>& known, std::mutex& mutex, const Key& key, Value* value, const Ask& ask) {
  const std::lock_guard<std::mutex> lock(mutex);
  auto found = known.find(key);
  if (found == known.end()) {
    Value fresh;
    JB_RETURN_IF_CUDA_ERROR(ask(&fresh));
    found = known.emplace(key, fresh).first;
  }
  *value = found->second;
  return {};
}

}  // namespace

CudaStatus GetDeviceAttributes(DeviceAttributes* attributes) {
  static std::mutex mutex;
  static std::map<int, DeviceAttributes> known;
  int device = 0;
  JB_RETURN_IF_CUDA_ERROR(cudaGetDevice(&device));
  return GetOnce(known, mutex, device, attributes, [&](DeviceAttributes* fresh) -> CudaStatus {
    JB_RETURN_IF_CUDA_ERROR(cudaDeviceGetAttribute(&fresh->multiprocessors, cudaDevAttrMultiProcessorCount, device));
    JB_RETURN_IF_CUDA_ERROR(
        cudaDeviceGetAttribute(&fresh->max_shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    return {};
  });
}

DeviceAttributes DeviceAttributesForPlan() {
  DeviceAttributes attributes;
  return GetDeviceAttributes(&attributes).ok() ? attributes : DeviceAttributes{};
}

CudaStatus MultiprocessorCount(int* count) {
  DeviceAttributes attributes;
  JB_RETURN_IF_CUDA_ERROR(GetDeviceAttributes(&attributes));
  *count = attributes.multiprocessors;
  return {};
}

namespace internal {

CudaStatus AllowSharedMemory(const void* kernel, int* max_dynamic_bytes) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, int> known;
  int device = 0, allowed = 0;
  DeviceAttributes attributes;
  JB_RETURN_IF_CUDA_ERROR(cudaGetDevice(&device));
  JB_RETURN_IF_CUDA_ERROR(GetDeviceAttributes(&attributes));
  JB_RETURN_IF_CUDA_ERROR(
      GetOnce(known, mutex, std::make_pair(kernel, device), &allowed, [&](int* fresh) -> CudaStatus {
        cudaFuncAttributes of_kernel;
        JB_RETURN_IF_CUDA_ERROR(cudaFuncGetAttributes(&of_kernel, kernel));
        *fresh = attributes.max_shared_bytes - static_cast<int>(of_kernel.sharedSizeBytes);
        JB_RETURN_IF_CUDA_ERROR(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, *fresh));
        return {};
      }));
  if (max_dynamic_bytes != nullptr) *max_dynamic_bytes = allowed;
  return {};
}

}  // namespace internal
}  // namespace jax_baracuda
