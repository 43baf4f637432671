#include <cuda_runtime_api.h>

#include <cstdlib>
#include <sstream>
#include <thread>

#include "ffi/core/device_problem.h"

namespace jax_baracuda {
namespace {

std::string VersionText(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

// CUDA versions of the driver and of the runtime linked into this module, e.g. 12080.
struct Versions {
  int driver = 0, runtime = 0;

  std::string Problem() const {
    return "the NVIDIA driver supports CUDA " + VersionText(driver) + ", and this module was built with CUDA " +
           VersionText(runtime) + "; update the driver, or build jax_baracuda from source with an older CUDA toolkit";
  }
};

// An architecture such as 80, 90a-real or 100f-virtual. No suffix means machine code and PTX.
struct Architecture {
  int capability = 0;  // 10 * major + minor; 0 for other names, such as "native"
  std::string feature_set, kind;

  explicit Architecture(const std::string& name) {
    char* end = nullptr;
    capability = static_cast<int>(std::strtol(name.c_str(), &end, 10));
    const std::string rest = end;
    feature_set = rest.substr(0, rest.find('-'));
    kind = rest.substr(feature_set.size());
  }

  // Machine code for X.a runs on every X.b with b >= a; PTX runs on every later GPU. With feature set "a", both run on
  // X.a only. With feature set "f", PTX runs where machine code does.
  bool CodeServes(int device) const { return kind != "-virtual" && ServesGeneration(device); }
  bool PtxServes(int device) const {
    return kind != "-real" && (feature_set.empty() ? capability <= device : ServesGeneration(device));
  }

 private:
  bool ServesGeneration(int device) const {
    const bool is_older = capability / 10 == device / 10 && capability <= device;
    return is_older && (feature_set != "a" || capability == device);
  }
};

std::string ProblemOfDevice(int device, const std::string& architectures, const Versions& versions) {
  int major = 0, minor = 0;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess) {
    return "";  // Not our problem to report: JAX itself will hit the same error.
  }
  bool has_ptx = false;
  std::istringstream names(architectures);
  for (std::string name; names >> name;) {
    const Architecture architecture(name);
    if (architecture.capability == 0 || architecture.CodeServes(10 * major + minor)) return "";
    has_ptx = has_ptx || architecture.PtxServes(10 * major + minor);
  }
  // A driver compiles PTX of its own CUDA version and of earlier ones.
  if (has_ptx) return versions.driver >= versions.runtime ? "" : versions.Problem();
  cudaDeviceProp properties;
  if (cudaGetDeviceProperties(&properties, device) != cudaSuccess) return "";
  const std::string capability = std::to_string(major) + "." + std::to_string(minor);
  return std::string("this module has no code for GPU ") + std::to_string(device) + ", " + properties.name +
         ", of compute capability " + capability +
         (major >= 8 ? "; build jax_baracuda from source with JAX_BARACUDA_CUDA_ARCHITECTURES=" +
                           std::to_string(10 * major + minor)
                     : "; the kernels need 8.0 or higher: hide the GPU with CUDA_VISIBLE_DEVICES if others are there");
}

std::string ProblemOfDevices(const std::string& architectures) {
  Versions versions;
  int devices = 0;
  if (cudaDriverGetVersion(&versions.driver) != cudaSuccess || versions.driver == 0) return "";
  cudaRuntimeGetVersion(&versions.runtime);
  if (const cudaError_t error = cudaGetDeviceCount(&devices); error != cudaSuccess) {
    return error == cudaErrorInsufficientDriver ? versions.Problem() : "";
  }
  for (int device = 0; device < devices; ++device) {
    if (std::string problem = ProblemOfDevice(device, architectures, versions); !problem.empty()) return problem;
  }
  return "";
}

}  // namespace

std::string DeviceProblem(const std::string& architectures) {
  // A separate thread, so that the CUDA last error of the caller's thread is unchanged.
  std::string problem;
  std::thread([&] { problem = ProblemOfDevices(architectures); }).join();
  return problem;
}

}  // namespace jax_baracuda
