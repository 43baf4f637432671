// The batch of a call: the first `num_batch_dims` (an attribute) dimensions of its operands and results, flattened to
// one. An operand of size 1 in all of them is shared by the whole batch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

#include "ffi/core/batch_operand.h"
#include "ffi/core/buffer.h"

namespace jax_baracuda {

// The dimensions of a buffer that follow those of the batch.
struct BatchView {
  IntegerSpan dims;
  bool is_shared = false;  // one copy for the whole batch
};

class Batch {
 public:
  Batch() = default;

  // Takes the batch sizes from the first result. `trailing` names the result's other dimensions in messages.
  Batch(const Buffer& result, int64_t num_dims, const char* trailing);

  // The error for a result of the wrong rank.
  InvalidArgument WrongRank(const Buffer& result, const char* trailing) const;

  // nullopt if the leading dimensions do not match the batch.
  std::optional<BatchView> View(const Buffer& buffer, bool may_be_shared) const;

  // Checks the type of a buffer, and that `trailing` follows its batch dimensions.
  template <typename Dimensions = std::initializer_list<Dimension>>
  BatchOperand Take(const Buffer& buffer, DataType type, const Dimensions& trailing, bool may_be_shared = true) const {
    buffer.CheckType(type);
    const auto view = View(buffer, may_be_shared);
    if (!view || !Fits(view->dims, trailing)) throw WrongShape(buffer, may_be_shared, TextOf(trailing));
    return {buffer.data, view->is_shared};
  }

  // The same of a result, which the batch does not share.
  void* TakeResult(const Buffer& buffer, DataType type, std::initializer_list<Dimension> trailing) const {
    Take(buffer, type, trailing, /*may_be_shared=*/false);
    return buffer.data;
  }

  // `trailing` is the text of the dimensions that follow the batch.
  InvalidArgument WrongShape(const Buffer& buffer, bool may_be_shared, const std::string& trailing) const;

  int64_t size() const { return size_; }

 private:
  IntegerSpan dims_;  // the batch dimensions of the first result
  int64_t size_ = 1;
};

}  // namespace jax_baracuda
