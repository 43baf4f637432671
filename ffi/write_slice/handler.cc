// The handlers of write_slice and its gradient.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "ffi/core/batch.h"
#include "ffi/core/bit_width.h"
#include "ffi/core/integers.h"
#include "ffi/core/run.h"
#include "ffi/core/strategies.h"
#include "ffi/core/target_table.h"
#include "ffi/write_slice/write_slice.h"

namespace jax_baracuda::write_slice {

struct Attributes {
  ffi::Span<const int64_t> windows;
  bool drop;
  int64_t num_batch_dims;
};

}  // namespace jax_baracuda::write_slice

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_baracuda::write_slice::Attributes,
                                      StructMember<ffi::Span<const int64_t>>("windows"), StructMember<bool>("drop"),
                                      StructMember<int64_t>("num_batch_dims"));

namespace jax_baracuda::write_slice {
namespace {

// The attribute `windows` has these five numbers for each axis that is not written whole, ordered by array and axis.
struct Window {
  int64_t array, axis;
  int64_t start;  // the number of the start operand
  int64_t size;
  int64_t num_shards;  // shards of the axis; if more than one, an operand has the number of this shard
};
constexpr size_t kNumbersOfWindow = 5;

// The name of a buffer in errors. Valid calls create no strings.
struct Name {
  const char* what;
  size_t number;

  std::string Text() const { return std::string(what) + " " + std::to_string(number); }
};

// Sets the axes of an array, all written whole. `width`: bits per element.
template <typename Dimensions>
void SetWholeAxes(int64_t batch, const Dimensions& dims, int64_t width, Update* update) {
  update->num_axes = static_cast<int32_t>(1 + dims.size());
  int64_t stride = width;
  for (size_t i = dims.size() + 1; i-- > 0;) {
    Axis& axis = update->axes[i];
    axis.size = axis.dim = i == 0 ? batch : dims[i - 1];
    axis.stride = stride;
    stride = MultiplySizes(stride, axis.dim);
  }
}

// The bytes of the array (Axis::dim) or of the window (Axis::size), before the axes are merged.
int64_t BytesOf(const Update& update, int64_t Axis::* size) {
  int64_t bits = update.axes[update.num_axes - 1].stride;
  for (int i = 0; i < update.num_axes; ++i) bits = MultiplySizes(bits, update.axes[i].*size);
  return CeilDivide(bits, 8);
}

// Operands are the arrays, then (writes only) the sources, then the starts, then the shard numbers.
class Decoder {
 public:
  Decoder(const char* op, bool writes, ffi::RemainingArgs operands, ffi::RemainingRets results,
          ffi::Span<const int64_t> windows)
      : op_(op), writes_(writes), operands_(operands), results_(results), numbers_(windows), batch_(op) {}

  ffi::Error Decode(bool drop, int64_t num_batch_dims, Call* call) {
    if (!writes_ && results_.size() % 2 != 0) {
      return InvalidArgument(op_, "got " + std::to_string(results_.size()) + " results, expected an even number");
    }
    const size_t num_arrays = writes_ ? results_.size() : results_.size() / 2;
    size_t num_parts = 0;
    JB_RETURN_IF_ERROR(CheckWindows(num_arrays, &num_parts));
    first_start_ = writes_ ? 2 * num_arrays : num_arrays;
    if (num_arrays == 0 || operands_.size() < first_start_ + num_parts) {
      return InvalidArgument(op_, "got " + std::to_string(operands_.size()) + " operands and " +
                                      std::to_string(results_.size()) + " results, expected at least " +
                                      std::to_string(first_start_ + num_parts) + " operands for as many results");
    }
    first_part_ = operands_.size() - num_parts;
    call->updates.reserve(num_arrays);
    size_t next_window = 0, next_part = first_part_;
    for (size_t i = 0; i < num_arrays; ++i) {
      auto dest = operands_.get<ffi::AnyBuffer>(i);
      if (dest.has_error()) return dest.error();
      auto result = results_.get<ffi::AnyBuffer>(i);
      if (result.has_error()) return result.error();
      if (i == 0) JB_RETURN_IF_ERROR(batch_.Decode("dest 0", *dest, num_batch_dims, kTrailing));
      Update update;
      update.dest = (*result)->untyped_data();
      update.drop = drop;
      JB_RETURN_IF_ERROR(SetAxes(Name{"dest", i}, *dest, &update));
      JB_RETURN_IF_ERROR(CheckTypeAndShape(Name{"result", i}, **result, *dest, update, /*is_shared=*/nullptr));
      call->copies.emplace_back(update.dest, dest->untyped_data(), BytesOf(update, &Axis::dim));
      for (; next_window < num_windows() && window(next_window).array == static_cast<int64_t>(i); ++next_window) {
        JB_RETURN_IF_ERROR(AddWindow(window(next_window), &next_part, &update));
      }
      bool source_is_shared = false;
      const Name source_name{"source", i};
      if (writes_) {
        auto source = operands_.get<ffi::AnyBuffer>(num_arrays + i);
        if (source.has_error()) return source.error();
        JB_RETURN_IF_ERROR(CheckTypeAndShape(source_name, *source, *dest, update, &source_is_shared));
        update.source = source->untyped_data();
      } else {
        auto source = results_.get<ffi::AnyBuffer>(num_arrays + i);
        if (source.has_error()) return source.error();
        JB_RETURN_IF_ERROR(CheckTypeAndShape(source_name, **source, *dest, update, /*is_shared=*/nullptr));
        update.source = (*source)->untyped_data();
        if (BitWidth(dest->element_type()) < 8) return Unsupported(Name{"dest", i}, *dest);
      }
      if (BytesOf(update, &Axis::size) == 0) continue;
      MergeAxes(source_is_shared, &update);
      call->updates.push_back(update);
    }
    return ffi::Error::Success();
  }

 private:
  size_t num_windows() const { return numbers_.size() / kNumbersOfWindow; }

  Window window(size_t i) const {
    const int64_t* const first = numbers_.begin() + i * kNumbersOfWindow;
    return Window{first[0], first[1], first[2], first[3], first[4]};
  }

  ffi::Error CheckWindows(size_t num_arrays, size_t* num_parts) const {
    bool is_valid = numbers_.size() % kNumbersOfWindow == 0;
    Window last{-1, -1, 0, 0, 0};
    for (size_t i = 0; is_valid && i < num_windows(); ++i) {
      const Window next = window(i);
      const bool is_in_order = last.array < next.array || (last.array == next.array && last.axis < next.axis);
      is_valid = is_in_order && next.array >= 0 && next.array < static_cast<int64_t>(num_arrays) && next.axis >= 0 &&
                 next.start >= 0 && next.size >= 0 && next.num_shards >= 1;
      *num_parts += next.num_shards > 1 ? 1 : 0;
      last = next;
    }
    if (is_valid) return ffi::Error::Success();
    std::string text;
    for (const int64_t number : numbers_) text += " " + std::to_string(number);
    return InvalidArgument(op_, "windows are" + text +
                                    ", expected 5 numbers (array, axis, start, size, shards) each, "
                                    "none negative, in the order of arrays and axes");
  }

  // Sets the axes of an array, initially all written whole.
  ffi::Error SetAxes(const Name& name, const ffi::AnyBuffer& buffer, Update* update) const {
    const int64_t width = BitWidth(buffer.element_type());
    if (width == 0) return Unsupported(name, buffer);
    const auto view = batch_.View(buffer, /*may_be_shared=*/false);
    if (!view) return batch_.WrongShape(name.Text().c_str(), buffer, /*may_be_shared=*/false, kTrailing);
    const auto dims = view->dims;
    if (dims.size() < 1 || dims.size() >= kMaxAxes) return batch_.WrongRank(name.Text().c_str(), buffer, kTrailing);
    SetWholeAxes(batch_.size(), dims, width, update);
    return ffi::Error::Success();
  }

  // Checks that a buffer has the type of dest and the sizes of its window. If `is_shared` is not null, the batch may
  // share the buffer.
  ffi::Error CheckTypeAndShape(const Name& name, const ffi::AnyBuffer& buffer, const ffi::AnyBuffer& dest,
                               const Update& update, bool* is_shared) const {
    if (buffer.element_type() != dest.element_type()) {
      return InvalidArgument(op_, name.Text() + " has XLA element type " +
                                      std::to_string(static_cast<int>(buffer.element_type())) + ", expected " +
                                      std::to_string(static_cast<int>(dest.element_type())) + ", that of dest");
    }
    const auto view = batch_.View(buffer, /*may_be_shared=*/is_shared != nullptr);
    bool fits = view && static_cast<int>(view->dims.size()) == update.num_axes - 1;
    for (int i = 1; fits && i < update.num_axes; ++i) fits = view->dims[i - 1] == update.axes[i].size;
    if (fits) {
      if (is_shared != nullptr) *is_shared = view->is_shared;
      return ffi::Error::Success();
    }
    std::string expected;
    for (int i = 1; i < update.num_axes; ++i) expected += (i == 1 ? "" : ",") + std::to_string(update.axes[i].size);
    return batch_.WrongShape(name.Text().c_str(), buffer, /*may_be_shared=*/is_shared != nullptr, expected);
  }

  // *next_part is the index of the next operand with a shard number.
  ffi::Error AddWindow(const Window& window, size_t* next_part, Update* update) const {
    const Name name{"dest", static_cast<size_t>(window.array)};
    if (window.axis + 1 >= update->num_axes) {
      return InvalidArgument(op_, name.Text() + " has a window of axis " + std::to_string(window.axis) +
                                      ", expected less than " + std::to_string(update->num_axes - 1));
    }
    Axis& axis = update->axes[window.axis + 1];
    const int64_t most_shards = std::numeric_limits<int64_t>::max() / 4 / (axis.dim > 0 ? axis.dim : 1);
    if (window.num_shards > most_shards || window.size > axis.dim * window.num_shards) {
      return InvalidArgument(op_, name.Text() + " has a window of size " + std::to_string(window.size) +
                                      ", expected at most the size of the axis, " + std::to_string(axis.dim) +
                                      ", times the number of shards, " + std::to_string(window.num_shards));
    }
    if (static_cast<uint64_t>(window.start) >= first_part_ - first_start_) {
      return InvalidArgument(op_, name.Text() + " has start " + std::to_string(window.start) + ", expected less than " +
                                      std::to_string(first_part_ - first_start_));
    }
    const Name start_name{"start", static_cast<size_t>(window.start)};
    auto start = operands_.get<ffi::AnyBuffer>(first_start_ + start_name.number);
    if (start.has_error()) return start.error();
    const ElementType type = ElementTypeOf(start->element_type());
    if (!IsStartType(type)) return Unsupported(start_name, *start);
    JB_RETURN_IF_ERROR(CheckScalar(start_name, *start));
    axis.size = window.size;
    axis.num_shards = window.num_shards;
    axis.start = Start{start->untyped_data(), type, start->element_count() == 1};
    if (window.num_shards == 1) return ffi::Error::Success();

    const Name part_name{"part", *next_part - first_part_};
    auto part = operands_.get<ffi::AnyBuffer>((*next_part)++);
    if (part.has_error()) return part.error();
    if (part->element_type() != ffi::DataType::S32) return Unsupported(part_name, *part);
    JB_RETURN_IF_ERROR(CheckScalar(part_name, *part));
    if (part->element_count() != 1) return WrongShape(op_, part_name.Text().c_str(), *part, "one number");
    axis.shard = static_cast<const int32_t*>(part->untyped_data());
    return ffi::Error::Success();
  }

  // One number per batch element, or one for all.
  ffi::Error CheckScalar(const Name& name, const ffi::AnyBuffer& buffer) const {
    const auto view = batch_.View(buffer, /*may_be_shared=*/true);
    if (view && view->dims.size() == 0) return ffi::Error::Success();
    return batch_.WrongShape(name.Text().c_str(), buffer, /*may_be_shared=*/true, "");
  }

  ffi::Error Unsupported(const Name& name, const ffi::AnyBuffer& buffer) const {
    return UnsupportedType(op_, name.Text().c_str(), buffer.element_type());
  }

  static constexpr const char* kTrailing = "1 to 8 axes";

  const char* op_;
  const bool writes_;
  ffi::RemainingArgs operands_;
  ffi::RemainingRets results_;
  ffi::Span<const int64_t> numbers_;
  Batch batch_;
  size_t first_start_ = 0, first_part_ = 0;  // indices of the first start and the first shard number among the operands
};

constexpr const char* kStrategyNames[] = {"nothing", "bytes", "bits"};
constexpr int kTakeStrategies = 2;  // the first two: the gradient has no elements narrower than a byte

// "bits" if rows of some window begin or end inside bytes.
Plan PlanWindows(const PlanParameters& parameters) {
  static const int32_t start = 0;  // a placeholder for starts: plans do not depend on their values
  int strategy = 0;
  for (int64_t i = 0; i < parameters.at("arrays"); ++i) {
    const auto get = [&](const std::string& what) { return parameters.at(what + "_" + std::to_string(i)); };
    const auto get_of_axis = [&](const char* what, size_t axis) {
      return parameters.at(std::string(what) + "_" + std::to_string(i) + "_" + std::to_string(axis));
    };
    const int64_t rank = get("rank");
    if (rank < 1 || rank >= kMaxAxes) continue;  // the handler rejects these
    std::vector<int64_t> dims(static_cast<size_t>(rank));
    for (size_t axis = 0; axis < dims.size(); ++axis) dims[axis] = get_of_axis("size", axis);
    Update update;
    SetWholeAxes(parameters.at("batch"), dims, get("bits"), &update);
    for (size_t axis = 0; axis < dims.size(); ++axis) {
      if (get_of_axis("has_window", axis) == 0) continue;
      update.axes[axis + 1].size = get_of_axis("window", axis);
      const std::string operand = "start_" + std::to_string(get_of_axis("start_operand", axis));
      const bool is_shared = parameters.at("batch") == 1 || parameters.at(operand + "_is_shared") != 0;
      update.axes[axis + 1].start = Start{&start, ElementType::kInt32, is_shared};
    }
    if (BytesOf(update, &Axis::size) == 0) continue;
    const auto source_is_shared = parameters.find("source_" + std::to_string(i) + "_is_shared");
    MergeAxes(source_is_shared != parameters.end() && source_is_shared->second != 0, &update);
    strategy = std::max(strategy, update.word == 0 ? 2 : 1);
  }
  return Plan{kStrategyNames[strategy]};
}

template <bool kWrites>
ffi::Error HandleWindows(Context context, ffi::RemainingArgs operands, ffi::RemainingRets results,
                         Attributes attributes) {
  constexpr const char* kOp = kWrites ? "write_slice" : "write_slice_backward";
  Call call;
  Decoder decoder(kOp, kWrites, operands, results, attributes.windows);
  JB_RETURN_IF_ERROR(decoder.Decode(attributes.drop, attributes.num_batch_dims, &call));
  return ToError(kOp, kWrites ? call.Write(context) : call.Take(context));
}

JB_TARGET("write_slice", HandleWindows</*kWrites=*/true>, PlanWindows, JB_NAMES(kStrategyNames));
JB_TARGET("write_slice_backward", HandleWindows</*kWrites=*/false>, PlanWindows, kStrategyNames,
          kStrategyNames + kTakeStrategies);

}  // namespace
}  // namespace jax_baracuda::write_slice
