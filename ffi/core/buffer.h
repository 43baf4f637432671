// Operands and results as handlers see them. Handlers do not trust Python: every check throws an error that names the
// argument and says what is wrong with it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "ffi/core/element_type.h"
#include "ffi/core/integers.h"
#include "xla/ffi/api/c_api.h"

namespace jax_baracuda {

using DataType = XLA_FFI_DataType;
// The error of a bad call. Its text gets the name of the op in front.
using InvalidArgument = std::invalid_argument;

std::string TypeName(DataType type);
ElementType ElementTypeOf(DataType type);

// ComputeType of a floating type.
inline DataType ComputeDataType(DataType type) {
  return type == XLA_FFI_DataType_F64 ? XLA_FFI_DataType_F64 : XLA_FFI_DataType_F32;
}

// Integers in XLA's memory: the dimensions of a buffer, or an attribute.
class IntegerSpan {
 public:
  IntegerSpan() = default;
  IntegerSpan(const int64_t* data, size_t size) : data_(data), size_(size) {}

  size_t size() const { return size_; }
  const int64_t* begin() const { return data_; }
  const int64_t* end() const { return data_ + size_; }
  int64_t operator[](size_t i) const { return data_[i]; }
  int64_t back() const { return data_[size_ - 1]; }
  IntegerSpan first(size_t count) const { return {data_, count}; }
  IntegerSpan last(size_t count) const { return {data_ + (size_ - count), count}; }
  bool operator==(IntegerSpan other) const { return std::equal(begin(), end(), other.begin(), other.end()); }

 private:
  const int64_t* data_ = nullptr;
  size_t size_ = 0;
};

// The required size of a dimension. With may_be_shared, a size of 1 is also accepted: the operand is broadcast along
// it.
struct Dimension {
  int64_t size;
  bool may_be_shared = false;

  Dimension(int64_t the_size, bool or_one = false) : size(the_size), may_be_shared(or_one) {}

  bool Fits(int64_t actual) const { return actual == size || (may_be_shared && actual == 1); }
  std::string Text() const { return std::to_string(size) + (may_be_shared ? " or 1" : ""); }
};

template <typename Dimensions>
bool Fits(IntegerSpan dims, const Dimensions& required) {
  return std::equal(dims.begin(), dims.end(), required.begin(), required.end(),
                    [](int64_t size, const Dimension& dimension) { return dimension.Fits(size); });
}

template <typename Dimensions>
std::string TextOf(const Dimensions& dims) {
  std::string text;
  for (const Dimension dimension : dims) text += (text.empty() ? "" : ",") + dimension.Text();
  return text;
}

// The number of elements of an array of these dimensions.
template <typename Dimensions>
int64_t NumElements(const Dimensions& dims) {
  int64_t size = 1;
  for (const int64_t dimension : dims) size = MultiplySizes(size, dimension);
  return size;
}

template <typename Dimensions>
std::string ShapeString(const Dimensions& dims) {
  return "[" + TextOf(dims) + "]";
}

// An operand or a result.
struct Buffer {
  const char* name = nullptr;
  int64_t number = -1;  // among several of this name; -1: there is one
  DataType type = XLA_FFI_DataType_INVALID;
  void* data = nullptr;
  IntegerSpan dims;

  int64_t Size() const { return NumElements(dims); }

  void CheckType(DataType expected) const {
    if (type != expected) throw WrongType(TypeName(expected));
  }
  // For types without a kernel.
  void CheckKernel(bool has_kernel) const {
    if (!has_kernel) throw WithoutKernel();
  }

  // Errors to throw.
  InvalidArgument Wrong(const std::string& what) const;  // "<name> <what>"
  InvalidArgument WrongType(const std::string& expected) const;
  InvalidArgument WrongShape(const std::string& expected) const;
  InvalidArgument WithoutKernel() const;
};

}  // namespace jax_baracuda
