// The CUDA handlers of rope and its gradient.

#include "ffi/core/cuda_handler.h"
#include "ffi/core/target_table.h"
#include "ffi/rope/rope.cuh"
#include "ffi/rope/rope_handler.h"

namespace jax_baracuda::rope {
namespace {

ffi::Error Run(cudaStream_t stream, const char* op, const Call& call) {
  return CudaStatus(op, LaunchRope(call, stream));
}

XLA_FFI_DEFINE_HANDLER(kRope, (HandleRope<cudaStream_t, Run, false>), BindRope<Stream>(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kRopeBackward, (HandleRope<cudaStream_t, Run, true>), BindRope<Stream>(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kRopeQk, (HandleRopeQk<cudaStream_t, Run, false>), BindRopeQk<Stream>(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kRopeQkBackward, (HandleRopeQk<cudaStream_t, Run, true>), BindRopeQk<Stream>(),
                       {ffi::Traits::kCmdBufferCompatible});

JB_REGISTER_TARGET("rope", kRope, nullptr);
JB_REGISTER_TARGET("rope_backward", kRopeBackward, nullptr);
JB_REGISTER_TARGET("rope_qk", kRopeQk, nullptr);
JB_REGISTER_TARGET("rope_qk_backward", kRopeQkBackward, nullptr);

}  // namespace
}  // namespace jax_baracuda::rope
