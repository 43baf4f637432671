#include "ffi/core/arguments.h"

#include <algorithm>
#include <string>

namespace jax_baracuda {
namespace {

constexpr int64_t kMaxAttributes = 64;  // bits of Arguments::taken_attributes_

Buffer BufferOf(const void* buffer, const char* name, int64_t number) {
  const auto& of_xla = *static_cast<const XLA_FFI_Buffer*>(buffer);
  return {name, number, of_xla.dtype, of_xla.data, {of_xla.dims, static_cast<size_t>(of_xla.rank)}};
}

InvalidArgument Missing(const char* name, int64_t number, size_t got, const char* what) {
  return Buffer{name, number, XLA_FFI_DataType_INVALID, nullptr, {}}.Wrong("is missing: got " + std::to_string(got) +
                                                                           " " + what);
}

void CheckIsBuffer(bool is_buffer, const char* name) {
  if (!is_buffer) throw InvalidArgument(std::string(name) + " is no buffer, expected one");
}

void CheckCount(int64_t got, size_t expected, const char* what) {
  if (static_cast<size_t>(got) == expected) return;
  throw InvalidArgument("got " + std::to_string(got) + " " + what + ", expected " + std::to_string(expected));
}

std::string_view NameOf(const XLA_FFI_Attrs& attributes, int64_t i) {
  return {attributes.names[i]->ptr, attributes.names[i]->len};
}

DataType TypeOf(XLA_FFI_AttrType kind, const void* attribute) {
  switch (kind) {
    case XLA_FFI_AttrType_SCALAR:
      return static_cast<const XLA_FFI_Scalar*>(attribute)->dtype;
    case XLA_FFI_AttrType_ARRAY:
      return static_cast<const XLA_FFI_Array*>(attribute)->dtype;
    default:
      return XLA_FFI_DataType_INVALID;
  }
}

std::string AttributeText(XLA_FFI_AttrType kind, DataType type) {
  switch (kind) {
    case XLA_FFI_AttrType_SCALAR:
      return "a scalar of type " + TypeName(type);
    case XLA_FFI_AttrType_ARRAY:
      return "an array of type " + TypeName(type);
    case XLA_FFI_AttrType_STRING:
      return "a string";
    default:
      return "a dictionary";
  }
}

}  // namespace

Buffer Arguments::Operand(const char* name, int64_t number) {
  if (NumOperandsLeft() == 0) throw Missing(name, number, num_operands_, "operands");
  CheckIsBuffer(frame_.args.types[num_operands_] == XLA_FFI_ArgType_BUFFER, name);
  return BufferOf(frame_.args.args[num_operands_++], name, number);
}

Buffer Arguments::Result(const char* name, int64_t number) {
  if (NumResultsLeft() == 0) throw Missing(name, number, num_results_, "results");
  CheckIsBuffer(frame_.rets.types[num_results_] == XLA_FFI_RetType_BUFFER, name);
  return BufferOf(frame_.rets.rets[num_results_++], name, number);
}

std::vector<Buffer> Arguments::Operands(const char* name, size_t count) {
  std::vector<Buffer> operands;
  operands.reserve(std::min(count, NumOperandsLeft()));
  for (size_t i = 0; i < count; ++i) operands.push_back(Operand(name, static_cast<int64_t>(i)));
  return operands;
}

std::vector<Buffer> Arguments::Results(const char* name, size_t count) {
  std::vector<Buffer> results;
  results.reserve(std::min(count, NumResultsLeft()));
  for (size_t i = 0; i < count; ++i) results.push_back(Result(name, static_cast<int64_t>(i)));
  return results;
}

const void* Arguments::Attribute(std::string_view name, XLA_FFI_AttrType kind, DataType type) {
  const XLA_FFI_Attrs& attributes = frame_.attrs;
  for (int64_t i = 0; i < std::min(attributes.size, kMaxAttributes); ++i) {
    if (NameOf(attributes, i) != name) continue;
    taken_attributes_ |= uint64_t{1} << i;
    const DataType own_type = TypeOf(attributes.types[i], attributes.attrs[i]);
    if (attributes.types[i] == kind && own_type == type) return attributes.attrs[i];
    throw InvalidArgument(std::string(name) + " is " + AttributeText(attributes.types[i], own_type) + ", expected " +
                          AttributeText(kind, type));
  }
  throw InvalidArgument(std::string(name) + " is missing, expected an attribute that is " + AttributeText(kind, type));
}

const void* Arguments::Scalar(std::string_view name, DataType type) {
  return static_cast<const XLA_FFI_Scalar*>(Attribute(name, XLA_FFI_AttrType_SCALAR, type))->value;
}

bool Arguments::Flag(std::string_view name) { return *static_cast<const bool*>(Scalar(name, XLA_FFI_DataType_PRED)); }

int64_t Arguments::Integer(std::string_view name) {
  return *static_cast<const int64_t*>(Scalar(name, XLA_FFI_DataType_S64));
}

double Arguments::Float(std::string_view name) {
  return *static_cast<const double*>(Scalar(name, XLA_FFI_DataType_F64));
}

IntegerSpan Arguments::Integers(std::string_view name) {
  const auto* array = static_cast<const XLA_FFI_Array*>(Attribute(name, XLA_FFI_AttrType_ARRAY, XLA_FFI_DataType_S64));
  return {static_cast<const int64_t*>(array->data), array->size};
}

void Arguments::CheckEnd() const {
  CheckCount(frame_.args.size, num_operands_, "operands");
  CheckCount(frame_.rets.size, num_results_, "results");
  const auto was_taken = [&](int64_t i) { return i < kMaxAttributes && (taken_attributes_ >> i & 1) != 0; };
  for (int64_t i = 0; i < frame_.attrs.size; ++i) {
    if (was_taken(i)) continue;
    std::string taken;
    for (int64_t j = 0; j < frame_.attrs.size; ++j) {
      if (was_taken(j)) taken += (taken.empty() ? "only " : ", ") + std::string(NameOf(frame_.attrs, j));
    }
    throw InvalidArgument("got attribute " + std::string(NameOf(frame_.attrs, i)) + ", expected " +
                          (taken.empty() ? "none" : taken));
  }
}

}  // namespace jax_baracuda
