// What XLA passes to a handler.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "ffi/core/buffer.h"
#include "ffi/core/executor.h"
#include "xla/ffi/api/c_api.h"

namespace jax_baracuda {

class Arguments {
 public:
  Arguments(const XLA_FFI_CallFrame& frame, Executor executor) : frame_(frame), executor_(executor) {}

  Executor executor() const { return executor_; }

  // The next operand or result. Operands that a call may lack are taken only if its attributes, or the number
  // of operands left, say that it has them.
  Buffer Operand(const char* name, int64_t number = -1);
  Buffer Result(const char* name, int64_t number = -1);
  // The next `count` of them, numbered from 0.
  std::vector<Buffer> Operands(const char* name, size_t count);
  std::vector<Buffer> Results(const char* name, size_t count);
  size_t NumOperandsLeft() const { return static_cast<size_t>(frame_.args.size) - num_operands_; }
  size_t NumResultsLeft() const { return static_cast<size_t>(frame_.rets.size) - num_results_; }

  // The attribute of this name.
  bool Flag(std::string_view name);
  int64_t Integer(std::string_view name);
  double Float(std::string_view name);
  IntegerSpan Integers(std::string_view name);

  // Checks that all operands, results and attributes were taken.
  void CheckEnd() const;

 private:
  const void* Attribute(std::string_view name, XLA_FFI_AttrType kind, DataType type);
  const void* Scalar(std::string_view name, DataType type);

  const XLA_FFI_CallFrame& frame_;
  Executor executor_;
  size_t num_operands_ = 0, num_results_ = 0;  // taken so far
  uint64_t taken_attributes_ = 0;              // a bit for each
};

}  // namespace jax_baracuda
