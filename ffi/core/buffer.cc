#include "ffi/core/buffer.h"

#include <sstream>

#include "xla/ffi/api/api.h"

namespace jax_baracuda {

std::string TypeName(DataType type) {
  std::ostringstream name;
  name << type;
  return name.str().empty() ? std::to_string(type) : name.str();  // the header may not know the type
}

ElementType ElementTypeOf(DataType type) {
  switch (type) {
    case XLA_FFI_DataType_PRED:
      return ElementType::kBool;
    case XLA_FFI_DataType_S8:
      return ElementType::kInt8;
    case XLA_FFI_DataType_S16:
      return ElementType::kInt16;
    case XLA_FFI_DataType_S32:
      return ElementType::kInt32;
    case XLA_FFI_DataType_S64:
      return ElementType::kInt64;
    case XLA_FFI_DataType_U8:
      return ElementType::kUInt8;
    case XLA_FFI_DataType_U16:
      return ElementType::kUInt16;
    case XLA_FFI_DataType_U32:
      return ElementType::kUInt32;
    case XLA_FFI_DataType_U64:
      return ElementType::kUInt64;
    case XLA_FFI_DataType_F16:
      return ElementType::kFloat16;
    case XLA_FFI_DataType_BF16:
      return ElementType::kBFloat16;
    case XLA_FFI_DataType_F32:
      return ElementType::kFloat32;
    case XLA_FFI_DataType_F64:
      return ElementType::kFloat64;
    case XLA_FFI_DataType_F8E4M3FN:
      return ElementType::kFloat8E4M3;
    case XLA_FFI_DataType_F8E5M2:
      return ElementType::kFloat8E5M2;
    default:
      return ElementType::kUnsupported;
  }
}

InvalidArgument Buffer::Wrong(const std::string& what) const {
  return InvalidArgument(name + (number < 0 ? "" : " " + std::to_string(number)) + " " + what);
}

InvalidArgument Buffer::WrongType(const std::string& expected) const {
  return Wrong("has element type " + TypeName(type) + ", expected " + expected);
}

InvalidArgument Buffer::WrongShape(const std::string& expected) const {
  return Wrong("has shape " + ShapeString(dims) + ", expected " + expected);
}

InvalidArgument Buffer::WithoutKernel() const {
  return Wrong("has element type " + TypeName(type) + ", for which there is no kernel");
}

}  // namespace jax_baracuda
