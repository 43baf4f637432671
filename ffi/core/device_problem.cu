#include <cuda_runtime_api.h>

#include <thread>

#include "ffi/core/device_problem.h"

namespace jax_baracuda {
namespace {

// Stands for all kernels, which are compiled for the same architectures.
__global__ void EmptyKernel() {}

std::string VersionText(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

// The driver and the runtime that is linked into this module.
std::string VersionsText() {
  int driver = 0, runtime = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  return "the NVIDIA driver supports CUDA " + VersionText(driver) + ", and this module was built with CUDA " +
         VersionText(runtime);
}

constexpr const char* kUpdateDriver =
    "; update the driver, or build jax_baracuda from source with an older CUDA toolkit";

std::string ProblemOfDevice(int device) {
  cudaFuncAttributes attributes;
  cudaError_t error = cudaSetDevice(device);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, EmptyKernel);
  switch (error) {
    case cudaErrorInsufficientDriver:
    case cudaErrorUnsupportedPtxVersion:
      return VersionsText() + kUpdateDriver;
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorInvalidKernelImage:
    case cudaErrorJitCompilerNotFound:
    case cudaErrorJitCompilationDisabled: {
      cudaDeviceProp properties;
      if (cudaGetDeviceProperties(&properties, device) != cudaSuccess) return "";
      const std::string major = std::to_string(properties.major), minor = std::to_string(properties.minor);
      return std::string("this module has no code for GPU ") + std::to_string(device) + ", " + properties.name +
             ", of compute capability " + major + "." + minor + " (" + cudaGetErrorString(error) +
             (properties.major >= 8
                  ? "); build jax_baracuda from source with JAX_BARACUDA_CUDA_ARCHITECTURES=" + major + minor
                  : "); the kernels need 8.0 or higher: hide the GPU with CUDA_VISIBLE_DEVICES if others are there");
    }
    default:
      return "";  // Of the machine's or of another program's making: JAX itself will meet it.
  }
}

std::string ProblemOfDevices() {
  int driver = 0, devices = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) return "";
  if (const cudaError_t error = cudaGetDeviceCount(&devices); error != cudaSuccess) {
    return error == cudaErrorInsufficientDriver ? VersionsText() + kUpdateDriver : "";
  }
  for (int device = 0; device < devices; ++device) {
    if (std::string problem = ProblemOfDevice(device); !problem.empty()) return problem;
  }
  return "";
}

}  // namespace

std::string DeviceProblem() {
  // In a thread of its own, so that the caller's keeps its current device and its last error.
  std::string problem;
  std::thread([&] { problem = ProblemOfDevices(); }).join();
  return problem;
}

}  // namespace jax_baracuda
