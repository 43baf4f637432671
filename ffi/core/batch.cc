#include "ffi/core/batch.h"

#include <algorithm>

namespace jax_baracuda {
namespace {

InvalidArgument WrongRankFor(size_t num_dims, const Buffer& result, const char* trailing) {
  return result.WrongShape("[" + std::to_string(num_dims) + " dimensions of the batch (num_batch_dims), " + trailing +
                           "]");
}

}  // namespace

Batch::Batch(const Buffer& result, int64_t num_dims, const char* trailing) {
  if (num_dims < 0) {
    throw InvalidArgument("num_batch_dims is " + std::to_string(num_dims) +
                          ", expected the number of leading dimensions that are those of the batch");
  }
  const auto count = static_cast<size_t>(num_dims);
  if (count > result.dims.size()) throw WrongRankFor(count, result, trailing);
  dims_ = result.dims.first(count);
  size_ = NumElements(dims_);
}

InvalidArgument Batch::WrongRank(const Buffer& result, const char* trailing) const {
  return WrongRankFor(dims_.size(), result, trailing);
}

std::optional<BatchView> Batch::View(const Buffer& buffer, bool may_be_shared) const {
  if (buffer.dims.size() < dims_.size()) return std::nullopt;
  const IntegerSpan own = buffer.dims.first(dims_.size());
  const bool is_whole = own == dims_;
  if (!is_whole && !(may_be_shared && std::all_of(own.begin(), own.end(), [](int64_t size) { return size == 1; }))) {
    return std::nullopt;
  }
  return BatchView{buffer.dims.last(buffer.dims.size() - dims_.size()), !is_whole};
}

InvalidArgument Batch::WrongShape(const Buffer& buffer, bool may_be_shared, const std::string& trailing) const {
  const size_t num_dims = dims_.size();
  std::string expected = TextOf(dims_);
  if (!expected.empty() && !trailing.empty()) expected += ",";
  expected = "[" + expected + trailing + "]";
  if (may_be_shared && num_dims == 1) expected += ", or 1 in front";
  if (may_be_shared && num_dims > 1) expected += ", or 1 in all of the first " + std::to_string(num_dims);
  return buffer.WrongShape(expected);
}

}  // namespace jax_baracuda
