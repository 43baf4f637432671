// The handlers of write_slice and its gradient.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "ffi/core/arguments.h"
#include "ffi/core/batch.h"
#include "ffi/core/bit_width.h"
#include "ffi/core/integers.h"
#include "ffi/core/run.h"
#include "ffi/core/strategies.h"
#include "ffi/core/target_table.h"
#include "ffi/write_slice/write_slice.h"

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

// Operands are the arrays, then (writes only) the sources, then the starts, then the shard numbers. Results are the
// arrays, then (takes only) the sources.
class Decoder {
 public:
  Decoder(Arguments& arguments, bool writes) : writes_(writes), numbers_(arguments.Integers("windows")) {
    const size_t num_results = arguments.NumResultsLeft(), num_arrays = writes ? num_results : num_results / 2;
    if (num_arrays == 0) throw InvalidArgument("got " + std::to_string(num_results) + " results, expected more");
    const size_t num_parts = CheckWindows(num_arrays);
    dests_ = arguments.Operands("dest", num_arrays);
    results_ = arguments.Results("result", num_arrays);
    sources_ = writes ? arguments.Operands("source", num_arrays) : arguments.Results("source", num_arrays);
    const size_t num_left = arguments.NumOperandsLeft();
    starts_ = arguments.Operands("start", num_left - std::min(num_left, num_parts));
    parts_ = arguments.Operands("part", num_parts);
    batch_ = Batch(dests_[0], arguments.Integer("num_batch_dims"), kTrailing);
    drop_ = arguments.Flag("drop");
  }

  void Decode(Call* call) {
    call->updates.reserve(dests_.size());
    size_t next_window = 0, next_part = 0;
    for (size_t i = 0; i < dests_.size(); ++i) {
      const Buffer &dest = dests_[i], &source = sources_[i];
      Update update;
      update.dest = results_[i].data;
      update.drop = drop_;
      SetAxes(dest, &update);
      CheckTypeAndShape(results_[i], dest, update, /*is_shared=*/nullptr);
      call->copies.emplace_back(update.dest, dest.data, BytesOf(update, &Axis::dim));
      for (; next_window < num_windows() && window(next_window).array == static_cast<int64_t>(i); ++next_window) {
        AddWindow(window(next_window), &next_part, &update);
      }
      bool source_is_shared = false;
      CheckTypeAndShape(source, dest, update, writes_ ? &source_is_shared : nullptr);
      update.source = source.data;
      if (!writes_) dest.CheckKernel(BitWidth(dest.type) >= 8);
      if (BytesOf(update, &Axis::size) == 0) continue;
      MergeAxes(source_is_shared, &update);
      call->updates.push_back(update);
    }
  }

 private:
  size_t num_windows() const { return numbers_.size() / kNumbersOfWindow; }

  Window window(size_t i) const {
    const int64_t* const first = numbers_.begin() + i * kNumbersOfWindow;
    return Window{first[0], first[1], first[2], first[3], first[4]};
  }

  // Returns how many windows have a shard number.
  size_t CheckWindows(size_t num_arrays) const {
    bool is_valid = numbers_.size() % kNumbersOfWindow == 0;
    size_t num_parts = 0;
    Window last{-1, -1, 0, 0, 0};
    for (size_t i = 0; is_valid && i < num_windows(); ++i) {
      const Window next = window(i);
      const bool is_in_order = last.array < next.array || (last.array == next.array && last.axis < next.axis);
      is_valid = is_in_order && next.array >= 0 && next.array < static_cast<int64_t>(num_arrays) && next.axis >= 0 &&
                 next.start >= 0 && next.size >= 0 && next.num_shards >= 1;
      num_parts += next.num_shards > 1 ? 1 : 0;
      last = next;
    }
    if (is_valid) return num_parts;
    std::string text;
    for (const int64_t number : numbers_) text += " " + std::to_string(number);
    throw InvalidArgument("windows are" + text +
                          ", expected 5 numbers (array, axis, start, size, shards) each, none negative, in the order "
                          "of arrays and axes");
  }

  // Sets the axes of an array, initially all written whole.
  void SetAxes(const Buffer& dest, Update* update) const {
    const int64_t width = BitWidth(dest.type);
    dest.CheckKernel(width > 0);
    const auto view = batch_.View(dest, /*may_be_shared=*/false);
    if (!view) throw batch_.WrongShape(dest, /*may_be_shared=*/false, kTrailing);
    const size_t rank = view->dims.size();
    if (rank < 1 || rank >= kMaxAxes) throw batch_.WrongRank(dest, kTrailing);
    SetWholeAxes(batch_.size(), view->dims, width, update);
  }

  // Checks that a buffer has the type of dest and the sizes of its window. If `is_shared` is not null, the batch may
  // share the buffer.
  void CheckTypeAndShape(const Buffer& buffer, const Buffer& dest, const Update& update, bool* is_shared) const {
    if (buffer.type != dest.type) throw buffer.WrongType(TypeName(dest.type) + ", that of dest");
    const auto view = batch_.View(buffer, /*may_be_shared=*/is_shared != nullptr);
    bool fits = view && static_cast<int>(view->dims.size()) == update.num_axes - 1;
    for (int i = 1; fits && i < update.num_axes; ++i) fits = view->dims[i - 1] == update.axes[i].size;
    if (fits) {
      if (is_shared != nullptr) *is_shared = view->is_shared;
      return;
    }
    std::string expected;
    for (int i = 1; i < update.num_axes; ++i) expected += (i == 1 ? "" : ",") + std::to_string(update.axes[i].size);
    throw batch_.WrongShape(buffer, /*may_be_shared=*/is_shared != nullptr, expected);
  }

  void AddWindow(const Window& window, size_t* next_part, Update* update) const {
    const Buffer& dest = dests_[static_cast<size_t>(window.array)];
    if (window.axis + 1 >= update->num_axes) {
      throw dest.Wrong("has a window of axis " + std::to_string(window.axis) + ", expected less than " +
                       std::to_string(update->num_axes - 1));
    }
    Axis& axis = update->axes[window.axis + 1];
    const int64_t most_shards = std::numeric_limits<int64_t>::max() / 4 / (axis.dim > 0 ? axis.dim : 1);
    if (window.num_shards > most_shards || window.size > axis.dim * window.num_shards) {
      throw dest.Wrong("has a window of size " + std::to_string(window.size) +
                       ", expected at most the size of the axis, " + std::to_string(axis.dim) +
                       ", times the number of shards, " + std::to_string(window.num_shards));
    }
    if (static_cast<uint64_t>(window.start) >= starts_.size()) {
      throw dest.Wrong("has start " + std::to_string(window.start) + ", expected less than " +
                       std::to_string(starts_.size()));
    }
    const Buffer& start = starts_[static_cast<size_t>(window.start)];
    const ElementType type = ElementTypeOf(start.type);
    start.CheckKernel(IsStartType(type));
    CheckScalar(start);
    axis.size = window.size;
    axis.num_shards = window.num_shards;
    axis.start = Start{start.data, type, start.Size() == 1};
    if (window.num_shards == 1) return;

    const Buffer& part = parts_[(*next_part)++];
    part.CheckType(XLA_FFI_DataType_S32);
    CheckScalar(part);
    if (part.Size() != 1) throw part.WrongShape("one number");
    axis.shard = static_cast<const int32_t*>(part.data);
  }

  // One number per batch element, or one for all.
  void CheckScalar(const Buffer& buffer) const {
    const auto view = batch_.View(buffer, /*may_be_shared=*/true);
    if (!view || view->dims.size() != 0) throw batch_.WrongShape(buffer, /*may_be_shared=*/true, "");
  }

  static constexpr const char* kTrailing = "1 to 8 axes";

  const bool writes_;
  const IntegerSpan numbers_;
  std::vector<Buffer> dests_, results_, sources_, starts_, parts_;
  Batch batch_;
  bool drop_ = false;
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
void HandleWindows(Arguments& arguments) {
  Call call;
  Decoder(arguments, kWrites).Decode(&call);
  arguments.CheckEnd();
  CheckStatus(kWrites ? call.Write(arguments.executor()) : call.Take(arguments.executor()));
}

JB_TARGET("write_slice", HandleWindows</*kWrites=*/true>, PlanWindows, JB_NAMES(kStrategyNames));
JB_TARGET("write_slice_backward", HandleWindows</*kWrites=*/false>, PlanWindows, kStrategyNames,
          kStrategyNames + kTakeStrategies);

}  // namespace
}  // namespace jax_baracuda::write_slice
