// Decoding and checking of FFI arguments. Handlers do not trust Python: every check returns an error that names the op
// and the argument.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>
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
    case ffi::DataType::F8E4M3FN:
      return ElementType::kFloat8E4M3;
    case ffi::DataType::F8E5M2:
      return ElementType::kFloat8E5M2;
    default:
      return ElementType::kUnsupported;
  }
}

// ComputeType of a floating type.
inline ffi::DataType ComputeDataType(ffi::DataType type) {
  return type == ffi::DataType::F64 ? ffi::DataType::F64 : ffi::DataType::F32;
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

// `binding` with what XLA passes for one more parameter of a handler.
template <typename Parameter, typename Binding>
auto BindParameter(Binding&& binding) {
  if constexpr (std::is_same_v<Parameter, ffi::AnyBuffer>) {
    return std::forward<Binding>(binding).template Arg<ffi::AnyBuffer>();
  } else if constexpr (std::is_same_v<Parameter, ffi::Result<ffi::AnyBuffer>>) {
    return std::forward<Binding>(binding).template Ret<ffi::AnyBuffer>();
  } else if constexpr (std::is_same_v<Parameter, ffi::RemainingArgs>) {
    return std::forward<Binding>(binding).RemainingArgs();
  } else if constexpr (std::is_same_v<Parameter, ffi::RemainingRets>) {
    return std::forward<Binding>(binding).RemainingRets();
  } else if constexpr (std::is_same_v<Parameter, ffi::ThreadPool>) {
    return std::forward<Binding>(binding).template Ctx<ffi::ThreadPool>();
  } else if constexpr (std::is_pointer_v<Parameter>) {
    return std::forward<Binding>(binding).template Ctx<ffi::PlatformStream<Parameter>>();
  } else {
    return std::forward<Binding>(binding).template Attrs<Parameter>();
  }
}

template <typename First, typename... Rest, typename Binding>
auto BindParameters(Binding&& binding) {
  if constexpr (sizeof...(Rest) == 0) {
    return BindParameter<First>(std::forward<Binding>(binding));
  } else {
    return BindParameters<Rest...>(BindParameter<First>(std::forward<Binding>(binding)));
  }
}

// The binding of a handler, which follows from its parameters: the thread pool or the stream, operands, results, and a
// struct of all attributes.
template <typename... Parameters>
auto BindingOf(ffi::Error (*)(Parameters...)) {
  return BindParameters<Parameters...>(ffi::Ffi::Bind());
}

}  // namespace jax_baracuda

#define JB_RETURN_IF_ERROR(expression)         \
  do {                                         \
    ::xla::ffi::Error jb_error = (expression); \
    if (jb_error.failure()) return jb_error;   \
  } while (false)
