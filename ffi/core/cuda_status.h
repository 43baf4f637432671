// The status of CUDA runtime calls and kernel launches, with the place of the failure, and the sizes of grids. For .cu
// and .cc files.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ffi/core/copy.h"
#include "ffi/core/element_type.h"

namespace jax_baracuda {

struct [[nodiscard]] CudaStatus {
  cudaError_t code = cudaSuccess;
  const char* file = "";  // relative to the project's folder (see CMakeLists.txt)
  int line = 0;
  const char* expression = "";

  bool ok() const { return code == cudaSuccess; }
};

// A block count as a grid dimension. A count that does not fit in 32 bits becomes 0xffffffff, so that CUDA rejects the
// launch instead of launching too few blocks.
inline uint32_t GridSize(int64_t blocks) {
  constexpr uint32_t kTooManyBlocks = 0xffffffffu;
  return blocks >= 0 && blocks < int64_t{kTooManyBlocks} ? static_cast<uint32_t>(blocks) : kTooManyBlocks;
}

namespace internal {

// A failed call also sets the thread's last error. Clears it, so that a later check does not report it again.
inline CudaStatus TakeStatus(cudaError_t code, const char* file, int line, const char* expression) {
  if (code == cudaSuccess) return {};
  cudaGetLastError();
  return {code, file, line, expression};
}

// A CudaStatus keeps its original file and line.
inline CudaStatus TakeStatus(const CudaStatus& status, const char*, int, const char*) { return status; }

}  // namespace internal
}  // namespace jax_baracuda

// The status of an expression, a cudaError_t or a CudaStatus.
#define JB_CUDA_STATUS(...) ::jax_baracuda::internal::TakeStatus((__VA_ARGS__), __FILE__, __LINE__, #__VA_ARGS__)

// The status of the launch just made; the argument names the kernel.
#define JB_LAUNCH_STATUS(...) \
  ::jax_baracuda::internal::TakeStatus(cudaGetLastError(), __FILE__, __LINE__, "launch of " #__VA_ARGS__)

// Returns from the enclosing function if the expression failed.
#define JB_RETURN_IF_CUDA_ERROR(...)                                          \
  do {                                                                        \
    const ::jax_baracuda::CudaStatus jb_status = JB_CUDA_STATUS(__VA_ARGS__); \
    if (!jb_status.ok()) return jb_status;                                    \
  } while (false)

#define JB_RETURN_IF_LAUNCH_ERROR(...)                                          \
  do {                                                                          \
    const ::jax_baracuda::CudaStatus jb_status = JB_LAUNCH_STATUS(__VA_ARGS__); \
    if (!jb_status.ok()) return jb_status;                                      \
  } while (false)

namespace jax_baracuda {

inline CudaStatus LaunchCopy(const Copy& copy, cudaStream_t stream) {
  if (copy.bytes == 0) return {};
  const size_t bytes = static_cast<size_t>(copy.bytes);
  return JB_CUDA_STATUS(cudaMemcpyAsync(copy.to, copy.from, bytes, cudaMemcpyDeviceToDevice, stream));
}

// The status of launch(TypeTag<T>{}) for the T that dispatch(type, body) finds; an error if it finds none.
template <typename Type, typename Dispatch, typename Launch>
CudaStatus LaunchFor(Type type, const Dispatch& dispatch, const Launch& launch) {
  return DispatchOr(JB_CUDA_STATUS(cudaErrorInvalidValue), type, dispatch, launch);
}

}  // namespace jax_baracuda
