// Decoding and checking of FFI arguments. Handlers do not trust Python: every check returns an error that names the op
// and the argument.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "ffi/core/element_type.h"
#include "ffi/core/integers.h"
#include "xla/ffi/api/ffi.h"

namespace jax_baracuda {

namespace ffi = xla::ffi;

inline ElementType ElementTypeOf(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::PRED:
      return ElementType::kBool;
    case ffi::DataType::S8:
      return ElementType::kInt8;
    case ffi::DataType::S16:
      return ElementType::kInt16;
    case ffi::DataType::S32:
      return ElementType::kInt32;
    case ffi::DataType::S64:
      return ElementType::kInt64;
    case ffi::DataType::U8:
      return ElementType::kUInt8;
    case ffi::DataType::U16:
      return ElementType::kUInt16;
    case ffi::DataType::U32:
      return ElementType::kUInt32;
    case ffi::DataType::U64:
      return ElementType::kUInt64;
    case ffi::DataType::F16:
      return ElementType::kFloat16;
    case ffi::DataType::BF16:
      return ElementType::kBFloat16;
    case ffi::DataType::F32:
      return ElementType::kFloat32;
    case ffi::DataType::F64:
      return ElementType::kFloat64;
    default:
      return ElementType::kUnsupported;
  }
}

inline std::string ShapeString(ffi::AnyBuffer::Dimensions dimensions) {
  std::string text = "[";
  for (size_t i = 0; i < dimensions.size(); ++i) {
    text += (i == 0 ? "" : ",") + std::to_string(dimensions[i]);
  }
  return text + "]";
}

inline ffi::Error InvalidArgument(const char* op, const std::string& message) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, std::string(op) + ": " + message);
}

inline ffi::Error UnsupportedType(const char* op, const char* argument, ffi::DataType type) {
  return InvalidArgument(op, std::string(argument) + " has XLA element type " + std::to_string(static_cast<int>(type)) +
                                 ", for which there is no kernel");
}

inline ffi::Error WrongShape(const char* op, const char* argument, const ffi::AnyBuffer& buffer,
                             const std::string& expected) {
  return InvalidArgument(
      op, std::string(argument) + " has shape " + ShapeString(buffer.dimensions()) + ", expected " + expected);
}

// The product of the dimensions from `first` on.
inline int64_t TrailingSize(const ffi::AnyBuffer& buffer, size_t first) {
  int64_t size = 1;
  for (size_t i = first; i < buffer.dimensions().size(); ++i) size = MultiplySizes(size, buffer.dimensions()[i]);
  return size;
}

// A binding with `kCount` more operands, or results, of any shape and type.
template <int kCount, typename Binding>
auto BindOperands(Binding&& binding) {
  if constexpr (kCount == 1) {
    return std::forward<Binding>(binding).template Arg<ffi::AnyBuffer>();
  } else {
    return BindOperands<kCount - 1>(std::forward<Binding>(binding).template Arg<ffi::AnyBuffer>());
  }
}

template <int kCount, typename Binding>
auto BindResults(Binding&& binding) {
  if constexpr (kCount == 1) {
    return std::forward<Binding>(binding).template Ret<ffi::AnyBuffer>();
  } else {
    return BindResults<kCount - 1>(std::forward<Binding>(binding).template Ret<ffi::AnyBuffer>());
  }
}

// The binding of a handler that takes a context (the stream, or the thread pool), operands and results.
template <typename Context, int kOperands, int kResults>
auto BindBuffers() {
  return BindResults<kResults>(BindOperands<kOperands>(ffi::Ffi::Bind().Ctx<Context>()));
}

}  // namespace jax_baracuda

#define JB_RETURN_IF_ERROR(expression)         \
  do {                                         \
    ::xla::ffi::Error jb_error = (expression); \
    if (jb_error.failure()) return jb_error;   \
  } while (false)
