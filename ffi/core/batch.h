// The batch of a call: the first `num_batch_dims` (an attribute) dimensions of its operands and results, flattened to
// one. An operand of size 1 in all of them is shared by the whole batch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

#include "ffi/core/batch_operand.h"
#include "ffi/core/handler.h"
#include "ffi/core/operands.h"

namespace jax_baracuda {

// An operand or a result as kernels see it.
struct BatchedBuffer {
  ffi::DataType type = ffi::DataType::INVALID;
  void* data = nullptr;
  bool is_shared = false;           // one copy for the whole batch
  ffi::AnyBuffer::Dimensions dims;  // without the batch dimensions
};

class Batch {
 public:
  explicit Batch(const char* op) : op_(op) {}

  // Takes the batch sizes from the first result. `trailing` names the result's other dimensions in messages.
  ffi::Error Decode(const char* name, const ffi::AnyBuffer& result, int64_t num_dims, const char* trailing) {
    if (num_dims < 0) {
      return InvalidArgument(op_, "num_batch_dims is " + std::to_string(num_dims) +
                                      ", expected the number of leading dimensions that are those of the batch");
    }
    num_dims_ = num_dims;
    const auto shape = result.dimensions();
    if (static_cast<uint64_t>(num_dims) > shape.size()) return WrongRank(name, result, trailing);
    dims_ = shape.first(static_cast<size_t>(num_dims));
    for (const int64_t size : dims_) size_ = MultiplySizes(size_, size);
    return ffi::Error::Success();
  }

  // The error for a result of the wrong rank.
  ffi::Error WrongRank(const char* name, const ffi::AnyBuffer& result, const char* trailing) const {
    return jax_baracuda::WrongShape(
        op_, name, result,
        "[" + std::to_string(num_dims_) + " dimensions of the batch (num_batch_dims), " + trailing + "]");
  }

  // nullopt if the leading dimensions do not match the batch.
  std::optional<BatchedBuffer> View(const ffi::AnyBuffer& buffer, bool may_be_shared) const {
    const auto shape = buffer.dimensions();
    if (shape.size() < dims_.size()) return std::nullopt;
    const auto own = shape.first(dims_.size());
    const bool is_whole = own == dims_;
    if (!is_whole && !(may_be_shared && std::all_of(own.begin(), own.end(), [](int64_t size) { return size == 1; }))) {
      return std::nullopt;
    }
    return BatchedBuffer{buffer.element_type(), buffer.untyped_data(), !is_whole,
                         shape.last(shape.size() - dims_.size())};
  }

  // Checks the type of a buffer, and that `trailing` follows its batch dimensions. Sets `operand`.
  template <typename Dimensions = std::initializer_list<Dimension>>
  ffi::Error Take(const char* name, const ffi::AnyBuffer& buffer, ffi::DataType type, const Dimensions& trailing,
                  BatchOperand* operand, bool may_be_shared = true) const {
    JB_RETURN_IF_ERROR(CheckType(op_, name, buffer, type));
    const auto view = View(buffer, may_be_shared);
    if (!view || !Fits(view->dims, trailing)) return WrongShape(name, buffer, may_be_shared, TextOf(trailing));
    *operand = {view->data, view->is_shared};
    return ffi::Error::Success();
  }

  // `trailing` is the text of the dimensions that follow the batch.
  ffi::Error WrongShape(const char* name, const ffi::AnyBuffer& buffer, bool may_be_shared,
                        const std::string& trailing) const {
    std::string expected = TextOf(dims_);
    if (!expected.empty() && !trailing.empty()) expected += ",";
    expected = "[" + expected + trailing + "]";
    if (may_be_shared && num_dims_ == 1) expected += ", or 1 in front";
    if (may_be_shared && num_dims_ > 1) expected += ", or 1 in all of the first " + std::to_string(num_dims_);
    return jax_baracuda::WrongShape(op_, name, buffer, expected);
  }

  int64_t size() const { return size_; }

 private:
  const char* op_;
  int64_t num_dims_ = 0;
  ffi::AnyBuffer::Dimensions dims_;  // the batch dimensions of the first result
  int64_t size_ = 1;
};

}  // namespace jax_baracuda
