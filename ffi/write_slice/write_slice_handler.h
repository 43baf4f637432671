// Checks the buffers of write_slice and its gradient and turns them into windows; used by both back ends.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "ffi/core/bit_width.h"
#include "ffi/core/handler.h"
#include "ffi/write_slice/write_slice.h"

namespace jax_baracuda::write_slice {

// What to do with an array before its window is written where XLA gave it other memory than the result's.
struct Copy {
  void* to;
  const void* from;
  int64_t bytes;
};

struct Call {
  std::vector<Copy> copies;
  std::vector<Update> updates;
};

// The attribute `windows` holds these five numbers for each axis that is not written whole, in the order of the arrays
// and of their axes.
struct Window {
  int64_t array, axis;
  int64_t start;  // number of the operand that holds it
  int64_t size;
  int64_t num_shards;  // into how many parts the axis is split; if several, there is an operand with the part's number
};
inline constexpr size_t kNumbersOfWindow = 5;

// Operands are the arrays, then what is written to them, if anything is, then starts, then numbers of parts.
class Decoder {
 public:
  Decoder(const char* op, ffi::RemainingArgs operands, ffi::RemainingRets results, ffi::Span<const int64_t> windows,
          bool drop, bool batched)
      : op_(op), operands_(operands), results_(results), numbers_(windows), drop_(drop), batched_(batched) {}

  ffi::Error DecodeWrite(Call* call) { return Decode(results_.size(), /*writes=*/true, call); }

  ffi::Error DecodeTake(Call* call) {
    if (results_.size() % 2 != 0) {
      return InvalidArgument(op_, "got " + std::to_string(results_.size()) + " results, expected an even number");
    }
    return Decode(results_.size() / 2, /*writes=*/false, call);
  }

 private:
  ffi::Error Decode(size_t num_arrays, bool writes, Call* call) {
    const size_t first_start = writes ? 2 * num_arrays : num_arrays;
    JB_RETURN_IF_ERROR(DecodeWindows(num_arrays));
    size_t num_parts = 0;
    for (const Window& window : windows_) num_parts += window.num_shards > 1 ? 1 : 0;
    if (num_arrays == 0 || operands_.size() < first_start + num_parts) {
      return InvalidArgument(op_, "got " + std::to_string(operands_.size()) + " operands and " +
                                      std::to_string(results_.size()) + " results, expected at least " +
                                      std::to_string(first_start + num_parts) + " operands for as many results");
    }
    const size_t first_part = operands_.size() - num_parts;
    size_t next_window = 0, next_part = first_part;
    for (size_t i = 0; i < num_arrays; ++i) {
      const std::string number = " " + std::to_string(i);
      auto dest = operands_.get<ffi::AnyBuffer>(i);
      if (dest.has_error()) return dest.error();
      auto result = results_.get<ffi::AnyBuffer>(i);
      if (result.has_error()) return result.error();
      std::vector<Axis> axes;
      JB_RETURN_IF_ERROR(CheckArray("dest" + number, *dest, &axes));
      JB_RETURN_IF_ERROR(CheckTypeAndShape("result" + number, **result, *dest, axes, /*is_shared=*/nullptr));
      const int64_t batch = batched_ ? axes[0].dim : 1;
      for (; next_window < windows_.size() && windows_[next_window].array == static_cast<int64_t>(i); ++next_window) {
        const Window& window = windows_[next_window];
        JB_RETURN_IF_ERROR(AddWindow(window, first_start, first_part, batch, &axes));
        if (window.num_shards == 1) continue;
        JB_RETURN_IF_ERROR(AddPart(window, next_part++, &axes));
      }
      Update update;
      bool source_is_shared = false;
      if (writes) {
        auto source = operands_.get<ffi::AnyBuffer>(num_arrays + i);
        if (source.has_error()) return source.error();
        JB_RETURN_IF_ERROR(CheckTypeAndShape("source" + number, *source, *dest, axes, &source_is_shared));
        update.source = source->untyped_data();
      } else {
        auto source = results_.get<ffi::AnyBuffer>(num_arrays + i);
        if (source.has_error()) return source.error();
        JB_RETURN_IF_ERROR(CheckTypeAndShape("source" + number, **source, *dest, axes, /*is_shared=*/nullptr));
        update.source = (*source)->untyped_data();
        if (BitWidth(dest->element_type()) < 8) return UnsupportedType(op_, ("dest" + number).c_str(), dest->element_type());
      }
      update.dest = (*result)->untyped_data();
      update.bit_width = static_cast<int32_t>(BitWidth(dest->element_type()));
      update.drop = drop_;
      AddUpdate(*dest, axes, source_is_shared, update, call);
    }
    return ffi::Error::Success();
  }

  ffi::Error DecodeWindows(size_t num_arrays) {
    bool is_valid = numbers_.size() % kNumbersOfWindow == 0;
    for (size_t i = 0; is_valid && i < numbers_.size(); i += kNumbersOfWindow) {
      const Window window{numbers_[i], numbers_[i + 1], numbers_[i + 2], numbers_[i + 3], numbers_[i + 4]};
      const bool is_in_order = windows_.empty() || windows_.back().array < window.array ||
                               (windows_.back().array == window.array && windows_.back().axis < window.axis);
      is_valid = is_in_order && 0 <= window.array && window.array < static_cast<int64_t>(num_arrays) &&
                 window.axis >= 0 && window.start >= 0 && window.size >= 0 && window.num_shards >= 1;
      windows_.push_back(window);
    }
    if (is_valid) return ffi::Error::Success();
    std::string text;
    for (const int64_t number : numbers_) text += " " + std::to_string(number);
    return InvalidArgument(op_, "windows are" + text + ", expected 5 numbers (array, axis, start, size, shards) each, " +
                                    "none negative, in the order of arrays and axes");
  }

  // The axes of an array, all of them written whole; the first one is the batch, whether there is one or not.
  ffi::Error CheckArray(const std::string& name, const ffi::AnyBuffer& buffer, std::vector<Axis>* axes) const {
    if (BitWidth(buffer.element_type()) == 0) return UnsupportedType(op_, name.c_str(), buffer.element_type());
    const auto shape = buffer.dimensions();
    const size_t rank = batched_ ? shape.size() - 1 : shape.size();
    if (shape.size() == 0 || rank < 1 || rank >= kMostAxes) {
      return WrongShape(op_, name.c_str(), buffer,
                        std::string("1 to 8 axes") + (batched_ ? " and that of the batch" : ""));
    }
    axes->resize(1 + rank);
    int64_t stride = 1;
    for (size_t i = axes->size(); i-- > 0;) {
      Axis& axis = (*axes)[i];
      axis.size = axis.dim = batched_ ? shape[i] : i == 0 ? 1 : shape[i - 1];
      axis.stride = stride;
      stride *= axis.dim;
    }
    return ffi::Error::Success();
  }

  // A buffer of the type of dest and with the sizes of its window. Where `is_shared` is not null, the batch may share it.
  ffi::Error CheckTypeAndShape(const std::string& name, const ffi::AnyBuffer& buffer, const ffi::AnyBuffer& dest,
                               const std::vector<Axis>& axes, bool* is_shared) const {
    if (buffer.element_type() != dest.element_type()) {
      return InvalidArgument(op_, name + " has XLA element type " +
                                      std::to_string(static_cast<int>(buffer.element_type())) + ", expected " +
                                      std::to_string(static_cast<int>(dest.element_type())) + ", that of dest");
    }
    const auto shape = buffer.dimensions();
    const size_t first = batched_ ? 0 : 1;
    bool fits = shape.size() == axes.size() - first;
    for (size_t i = 1; fits && i < axes.size(); ++i) fits = shape[i - first] == axes[i].size;
    if (fits && batched_) {
      fits = is_shared == nullptr ? shape[0] == axes[0].size : IsBatchOrShared(shape[0], axes[0].size);
      if (fits && is_shared != nullptr) *is_shared = shape[0] != axes[0].size;
    }
    if (fits) return ffi::Error::Success();
    std::string expected;
    for (size_t i = first; i < axes.size(); ++i) {
      expected += (i == first ? "" : ",") + std::to_string(axes[i].size) +
                  (i == 0 && is_shared != nullptr ? " or 1" : "");
    }
    return WrongShape(op_, name.c_str(), buffer, "[" + expected + "]");
  }

  ffi::Error AddWindow(const Window& window, size_t first_start, size_t first_part, int64_t batch,
                       std::vector<Axis>* axes) const {
    const std::string name = "dest " + std::to_string(window.array);
    if (window.axis + 1 >= static_cast<int64_t>(axes->size())) {
      return InvalidArgument(op_, name + " has a window of axis " + std::to_string(window.axis) + ", expected less than " +
                                      std::to_string(axes->size() - 1));
    }
    Axis& axis = (*axes)[static_cast<size_t>(window.axis + 1)];
    const int64_t most_shards = std::numeric_limits<int64_t>::max() / 4 / (axis.dim > 0 ? axis.dim : 1);
    if (window.num_shards > most_shards || window.size > axis.dim * window.num_shards) {
      return InvalidArgument(op_, name + " has a window of size " + std::to_string(window.size) +
                                      ", expected at most the size of the axis, " + std::to_string(axis.dim) +
                                      ", times the number of shards, " + std::to_string(window.num_shards));
    }
    if (static_cast<uint64_t>(window.start) >= first_part - first_start) {
      return InvalidArgument(op_, name + " has start " + std::to_string(window.start) + ", expected less than " +
                                      std::to_string(first_part - first_start));
    }
    auto start = operands_.get<ffi::AnyBuffer>(first_start + static_cast<size_t>(window.start));
    if (start.has_error()) return start.error();
    const std::string start_name = "start " + std::to_string(window.start);
    const ElementType type = ElementTypeOf(start->element_type());
    if (!IsStartType(type)) return UnsupportedType(op_, start_name.c_str(), start->element_type());
    JB_RETURN_IF_ERROR(CheckScalar(start_name, *start, batch));
    axis.size = window.size;
    axis.num_shards = window.num_shards;
    axis.start = Start{start->untyped_data(), type, static_cast<int64_t>(start->element_count()) == 1};
    return ffi::Error::Success();
  }

  ffi::Error AddPart(const Window& window, size_t operand, std::vector<Axis>* axes) const {
    auto part = operands_.get<ffi::AnyBuffer>(operand);
    if (part.has_error()) return part.error();
    if (part->element_type() != ffi::DataType::S32) return UnsupportedType(op_, "part", part->element_type());
    JB_RETURN_IF_ERROR(CheckScalar("part", *part, 1));
    (*axes)[static_cast<size_t>(window.axis + 1)].shard = static_cast<const int32_t*>(part->untyped_data());
    return ffi::Error::Success();
  }

  // A number for each element of the batch, or one for all.
  ffi::Error CheckScalar(const std::string& name, const ffi::AnyBuffer& buffer, int64_t batch) const {
    const auto shape = buffer.dimensions();
    if (batched_ ? shape.size() == 1 && IsBatchOrShared(shape[0], batch) : shape.size() == 0) {
      return ffi::Error::Success();
    }
    return WrongShape(op_, name.c_str(), buffer, batched_ ? "[" + std::to_string(batch) + " or 1]" : "[]");
  }

  void AddUpdate(const ffi::AnyBuffer& dest, std::vector<Axis> axes, bool source_is_shared, Update update,
                 Call* call) const {
    int64_t elements = 1, window_elements = 1;
    for (const Axis& axis : axes) {
      elements *= axis.dim;
      window_elements *= axis.size;
    }
    if (elements > 0 && update.dest != dest.untyped_data()) {
      call->copies.push_back(Copy{update.dest, dest.untyped_data(), PackedBytes(elements, update.bit_width)});
    }
    if (window_elements == 0) return;
    update.source_bytes =
        PackedBytes(source_is_shared ? window_elements / axes[0].size : window_elements, update.bit_width);
    ReduceAxes(axes, source_is_shared, &update);
    ChooseUnits(&update);
    call->updates.push_back(update);
  }

  const char* op_;
  ffi::RemainingArgs operands_;
  ffi::RemainingRets results_;
  ffi::Span<const int64_t> numbers_;
  bool drop_, batched_;
  std::vector<Window> windows_;
};

// The binding of both handlers.
template <typename Context>
auto BindWindows() {
  return ffi::Ffi::Bind()
      .Ctx<Context>()
      .RemainingArgs()
      .RemainingRets()
      .template Attr<ffi::Span<const int64_t>>("windows")
      .template Attr<bool>("drop")
      .template Attr<bool>("batched");
}

}  // namespace jax_baracuda::write_slice
