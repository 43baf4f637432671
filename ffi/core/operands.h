// Checks of buffers against known dimensions, and operands whose presence depends on an attribute.
#pragma once

#include <algorithm>
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "ffi/core/handler.h"

namespace jax_baracuda {

inline std::string TypeName(ffi::DataType type) {
  std::ostringstream name;
  name << type;
  return name.str();
}

// `expected()` returns the text for the accepted types; only a failing call needs it.
template <typename Expected>
ffi::Error CheckType(const char* op, const char* name, const ffi::AnyBuffer& buffer, const Expected& expected,
                     bool fits) {
  if (fits) return ffi::Error::Success();
  return InvalidArgument(
      op, std::string(name) + " has element type " + TypeName(buffer.element_type()) + ", expected " + expected());
}

inline ffi::Error CheckType(const char* op, const char* name, const ffi::AnyBuffer& buffer, ffi::DataType type) {
  return CheckType(op, name, buffer, [&] { return TypeName(type); }, buffer.element_type() == type);
}

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
bool Fits(ffi::AnyBuffer::Dimensions shape, const Dimensions& dimensions) {
  return std::equal(shape.begin(), shape.end(), dimensions.begin(), dimensions.end(),
                    [](int64_t size, const Dimension& dimension) { return dimension.Fits(size); });
}

template <typename Dimensions>
std::string TextOf(const Dimensions& dimensions) {
  std::string text;
  for (const Dimension dimension : dimensions) text += (text.empty() ? "" : ",") + dimension.Text();
  return text;
}

inline ffi::Error CheckShape(const char* op, const char* name, const ffi::AnyBuffer& buffer,
                             const std::vector<Dimension>& dimensions) {
  if (Fits(buffer.dimensions(), dimensions)) return ffi::Error::Success();
  return WrongShape(op, name, buffer, "[" + TextOf(dimensions) + "]");
}

// Operands whose presence depends on an attribute, decoded in order.
class OptionalOperands {
 public:
  OptionalOperands(const char* op, ffi::RemainingArgs operands) : op_(op), operands_(operands) {}

  // Calls take(buffer) if the operand is present.
  template <typename Take>
  ffi::Error Next(const char* name, bool is_there, const Take& take) {
    if (!is_there) return ffi::Error::Success();
    if (next_ == operands_.size()) return InvalidArgument(op_, std::string(name) + " is missing");
    const auto buffer = operands_.get<ffi::AnyBuffer>(next_++);
    if (buffer.has_error()) return buffer.error();
    return take(*buffer);
  }

  ffi::Error End() const {
    if (next_ == operands_.size()) return ffi::Error::Success();
    return InvalidArgument(op_, "got " + std::to_string(operands_.size()) + " optional operands, but attributes for " +
                                    std::to_string(next_));
  }

 private:
  const char* op_;
  ffi::RemainingArgs operands_;
  size_t next_ = 0;
};

// Results whose presence depends on an attribute, decoded in order. With CUDA, scratch may follow them.
class OptionalResults {
 public:
  OptionalResults(const char* op, ffi::RemainingRets results) : op_(op), results_(results) {}

  // Calls take(buffer) if the result is present.
  template <typename Take>
  ffi::Error Next(const char* name, bool is_there, const Take& take) {
    if (!is_there) return ffi::Error::Success();
    if (num_decoded_ == results_.size()) {
      return InvalidArgument(op_, std::string(name) + " is missing among the results");
    }
    auto buffer = results_.get<ffi::AnyBuffer>(num_decoded_++);
    if (buffer.has_error()) return buffer.error();
    return take(**buffer);
  }

  ffi::Error End() const {
    if (num_decoded_ == results_.size()) return ffi::Error::Success();
    return InvalidArgument(
        op_, "got " + std::to_string(results_.size()) + " optional results, expected " + std::to_string(num_decoded_));
  }

  const char* op() const { return op_; }
  ffi::RemainingRets results() const { return results_; }
  size_t num_decoded() const { return num_decoded_; }

 private:
  const char* op_;
  ffi::RemainingRets results_;
  size_t num_decoded_ = 0;
};

}  // namespace jax_baracuda
