#include "ffi/core/checked_call.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <new>
#include <stdexcept>
#include <string_view>

#include "ffi/core/bit_width.h"
#include "ffi/core/thread_sanitizer.h"
#include "xla/ffi/api/ffi.h"
#ifdef JB_CUDA
#include <cuda_runtime_api.h>

#include "ffi/core/cuda_error_text.h"
#include "ffi/core/cuda_status.h"
#else
#include "ffi/core/huge_pages.h"
#endif

namespace jax_baracuda {
namespace {

namespace ffi = xla::ffi;

// Does not allocate in this module: memory may be exhausted.
XLA_FFI_Error* MakeError(const XLA_FFI_CallFrame* frame, XLA_FFI_Error_Code code, const char* op, const char* message) {
  char text[2048];
  std::snprintf(text, sizeof(text), "%s: %s", op, message);
  XLA_FFI_Error_Create_Args error{};
  error.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  error.message = text;
  error.errc = code;
  return frame->api->XLA_FFI_Error_Create(&error);
}

#ifdef JB_CUDA

using ExecutorBinding = ffi::PlatformStream<Executor>;
// Calls can be captured into CUDA graphs, since they launch the same kernels every time.
constexpr std::initializer_list<ffi::Traits> kTraits = {ffi::Traits::kCmdBufferCompatible};

// Clears errors of earlier CUDA calls in this thread. Otherwise the check after our first launch would report them.
void ForgetStaleErrors() { cudaGetLastError(); }

constexpr bool kAdvisesHugePages = false;  // they are for the memory of the host
void AdviseHugePages(void*, int64_t) {}

void FillWithOnes(Executor stream, void* data, int64_t bytes) {
  const CudaStatus status = JB_CUDA_STATUS(cudaMemsetAsync(data, 0xFF, bytes, stream));
  if (!status.ok()) throw std::runtime_error(CudaErrorText(status));
}

#else

using ExecutorBinding = ffi::ThreadPool;
constexpr std::initializer_list<ffi::Traits> kTraits = {};

void ForgetStaleErrors() {}

constexpr bool kAdvisesHugePages = true;

void FillWithOnes(Executor, void* data, int64_t bytes) { std::memset(data, 0xFF, bytes); }

#endif

bool PoisonsResults() {
  static const bool poisons = [] {
    const char* value = std::getenv("JAX_BARACUDA_POISON");
    return value != nullptr && std::string_view(value) == "1";
  }();
  return poisons;
}

int64_t SizeInBytes(const XLA_FFI_Buffer& buffer) {
  int64_t elements = 1;
  for (int64_t i = 0; i < buffer.rank; ++i) elements *= buffer.dims[i];
  return PackedBytes(elements, BitWidth(buffer.dtype));
}

bool IsMemoryOfOperand(const XLA_FFI_CallFrame* frame, const void* data) {
  for (int64_t i = 0; i < frame->args.size; ++i) {
    if (frame->args.types[i] == XLA_FFI_ArgType_BUFFER &&
        static_cast<const XLA_FFI_Buffer*>(frame->args.args[i])->data == data) {
      return true;
    }
  }
  return false;
}

// Prepares the results that are fresh memory.
void PrepareResults(const XLA_FFI_CallFrame* frame, Executor executor) {
  if (!kAdvisesHugePages && !PoisonsResults()) return;
  for (int64_t i = 0; i < frame->rets.size; ++i) {
    if (frame->rets.types[i] != XLA_FFI_RetType_BUFFER) continue;
    const auto& buffer = *static_cast<const XLA_FFI_Buffer*>(frame->rets.rets[i]);
    const int64_t bytes = SizeInBytes(buffer);
    if (bytes == 0 || IsMemoryOfOperand(frame, buffer.data)) continue;
    AdviseHugePages(buffer.data, bytes);
    if (PoisonsResults()) FillWithOnes(executor, buffer.data, bytes);
  }
}

// XLA checked the size of the frame when the handler was registered.
void Execute(Handler* handler, const XLA_FFI_CallFrame* frame) {
  const ScopedHandler running;
  ForgetStaleErrors();
  ffi::DiagnosticEngine diagnostic;
  auto executor = ffi::CtxDecoding<ExecutorBinding>::Decode(frame->api, frame->ctx, diagnostic);
  if (!executor) throw std::runtime_error(diagnostic.Result());
  PrepareResults(frame, *executor);
  Arguments arguments(*frame, *executor);
  handler(arguments);
}

// Whether XLA asks about the handler, rather than for a run.
bool IsQuery(const XLA_FFI_CallFrame* frame) {
  return frame->stage != XLA_FFI_ExecutionStage_EXECUTE ||
         (frame->extension_start != nullptr && frame->extension_start->type == XLA_FFI_Extension_Metadata);
}

// All handlers give the same answer: the version of XLA's interface, and traits.
XLA_FFI_Error* Answer(XLA_FFI_CallFrame* frame) {
  static const auto* const binding = ffi::Ffi::Bind().To([] { return ffi::Error::Success(); }, kTraits).release();
  return binding->Call(frame);
}

}  // namespace

XLA_FFI_Error* CheckedCall(const char* op, Handler* handler, XLA_FFI_CallFrame* frame) {
  try {
    if (IsQuery(frame)) return Answer(frame);
    Execute(handler, frame);
    return nullptr;
  } catch (const InvalidArgument& error) {
    return MakeError(frame, XLA_FFI_Error_Code_INVALID_ARGUMENT, op, error.what());
  } catch (const std::bad_alloc&) {
    return MakeError(frame, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, op, "out of host memory");
  } catch (const std::exception& error) {
    return MakeError(frame, XLA_FFI_Error_Code_INTERNAL, op, error.what());
  } catch (...) {
    return MakeError(frame, XLA_FFI_Error_Code_INTERNAL, op, "a handler threw what is no std::exception");
  }
}

}  // namespace jax_baracuda
