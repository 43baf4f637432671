// Checks the buffers of calls that write rows to slots, for the handlers of write_rows and rope_write.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "ffi/core/batch.h"
#include "ffi/core/bit_width.h"
#include "ffi/core/handler.h"
#include "ffi/core/integers.h"
#include "ffi/core/operands.h"
#include "ffi/write_rows/write_rows.h"

namespace jax_baracuda::write_rows {

inline bool Converts(ElementType from, ElementType to) {
  return DispatchRows(from, [](auto) {}) && DispatchPool(to, [](auto) {});
}

enum ScaleKind : int64_t { kNoScale, kOneScale, kScalePerHead };

// Operands are the pools, then their rows, then slots, then the layer if there is one, then the scales of the pools
// that have some.
class Decoder {
 public:
  // Of the operands and results, takes the first `num_operands` and `num_pools`.
  Decoder(const char* op, ffi::RemainingArgs operands, size_t num_operands, ffi::RemainingRets results,
          size_t num_pools)
      : op_(op),
        operands_(operands),
        results_(results),
        num_own_operands_(num_operands),
        num_pools_(num_pools),
        batch_(op) {}

  // `attributes` has those of write_rows.
  template <typename OpAttributes>
  ffi::Error Decode(const OpAttributes& attributes, Call* call) {
    const size_t num_pools = num_pools_;
    const bool has_layer = attributes.has_layer;
    const ffi::Span<const int64_t> scales = attributes.scales;
    call->has_unique_slots = attributes.has_unique_slots;
    size_t num_operands = 2 * num_pools + 1 + (has_layer ? 1 : 0);
    bool is_valid = scales.size() == num_pools;
    for (const int64_t kind : scales) {
      is_valid = is_valid && kNoScale <= kind && kind <= kScalePerHead;
      num_operands += kind == kNoScale ? 0 : 1;
    }
    if (!is_valid) return InvalidArgument(op_, "scales expected: 0, 1 or 2 for each result");
    if (num_pools == 0 || num_own_operands_ != num_operands) {
      return InvalidArgument(op_, "got " + std::to_string(num_own_operands_) + " operands and " +
                                      std::to_string(num_pools) + " results, expected " + std::to_string(num_operands) +
                                      " operands for at least one result");
    }
    first_pool_axis_ = has_layer ? 1 : 0;
    size_t next = 2 * num_pools;
    JB_RETURN_IF_ERROR(
        DecodeFirst(attributes.axis, attributes.num_batch_dims, *operands_.get<ffi::AnyBuffer>(next++), call));
    if (has_layer) {
      BatchOperand layer;
      JB_RETURN_IF_ERROR(batch_.Take("layer", *operands_.get<ffi::AnyBuffer>(next++), ffi::DataType::S32, {}, &layer));
      call->layer = static_cast<const int32_t*>(layer.data);
      call->layer_is_shared = layer.is_shared;
    }
    for (size_t i = 0; i < num_pools; ++i) {
      Pool pool;
      pool.number = static_cast<int32_t>(i);
      JB_RETURN_IF_ERROR(DecodePool(i, call, &pool));
      JB_RETURN_IF_ERROR(DecodeRows(i, num_pools + i, scales[i], &next, *call, &pool));
      const bool has_work = pool.row_elements() > 0 && call->batch > 0 && call->layers > 0 && call->slots > 0;
      if (has_work && call->rows > 0) call->pools.push_back(pool);
    }
    return ffi::Error::Success();
  }

 private:
  // Sets what all pools share, from the first pool and the slots.
  ffi::Error DecodeFirst(int64_t axis, int64_t num_batch_dims, const ffi::AnyBuffer& slots, Call* call) {
    const ffi::AnyBuffer dest = *operands_.get<ffi::AnyBuffer>(0);
    JB_RETURN_IF_ERROR(batch_.Decode("dest 0", dest, num_batch_dims, kTrailing));
    const auto dims = batch_.View(dest, /*may_be_shared=*/false)->dims;
    if (axis < 0 || dims.size() <= first_pool_axis_ || static_cast<uint64_t>(axis) >= dims.size() - first_pool_axis_) {
      return InvalidArgument(op_, "dest 0 has shape " + ShapeString(dest.dimensions()) +
                                      ", expected an axis of slots number " + std::to_string(axis));
    }
    slot_axis_ = first_pool_axis_ + static_cast<size_t>(axis);
    call->batch = batch_.size();
    call->layers = first_pool_axis_ == 1 ? dims[0] : 1;
    call->slots = dims[slot_axis_];
    if (call->slots > std::numeric_limits<int32_t>::max()) {
      return InvalidArgument(op_, "dest 0 has " + std::to_string(call->slots) + " slots, expected less than 2^31");
    }
    JB_RETURN_IF_ERROR(CheckType(op_, "slots", slots, ffi::DataType::S32));
    const auto view = batch_.View(slots, /*may_be_shared=*/true);
    if (!view || view->dims.size() != 1) return batch_.WrongShape("slots", slots, /*may_be_shared=*/true, "rows");
    call->slot_of_row = static_cast<const int32_t*>(view->data);
    call->slot_of_row_is_shared = view->is_shared;
    call->rows = view->dims[0];
    return ffi::Error::Success();
  }

  ffi::Error DecodePool(size_t i, Call* call, Pool* pool) {
    const std::string name = "dest " + std::to_string(i), name_of_result = "result " + std::to_string(i);
    const ffi::AnyBuffer dest = *operands_.get<ffi::AnyBuffer>(i), result = **results_.get<ffi::AnyBuffer>(i);
    const auto view = batch_.View(dest, /*may_be_shared=*/false);
    bool fits = view && view->dims.size() > slot_axis_ && view->dims[slot_axis_] == call->slots;
    fits = fits && (first_pool_axis_ == 0 || view->dims[0] == call->layers);
    if (!fits) return batch_.WrongShape(name.c_str(), dest, /*may_be_shared=*/false, kTrailing);
    pool->pool_bytes_of_element = WholeByteWidth(dest.element_type());
    if (pool->pool_bytes_of_element == 0) return UnsupportedType(op_, name.c_str(), dest.element_type());
    JB_RETURN_IF_ERROR(CheckType(op_, name_of_result.c_str(), result, dest.element_type()));
    if (!(result.dimensions() == dest.dimensions())) {
      return WrongShape(op_, name_of_result.c_str(), result, ShapeString(dest.dimensions()));
    }
    dims_ = view->dims;
    for (size_t axis = first_pool_axis_; axis < dims_.size(); ++axis) {
      if (axis < slot_axis_) pool->outer = MultiplySizes(pool->outer, dims_[axis]);
      if (axis > slot_axis_) pool->inner = MultiplySizes(pool->inner, dims_[axis]);
    }
    pool->dest = result.untyped_data();
    const int64_t bytes = MultiplySizes(TrailingSize(dest, 0), pool->pool_bytes_of_element);
    call->copies.emplace_back(pool->dest, dest.untyped_data(), bytes);
    pool->to = ElementTypeOf(dest.element_type());
    return ffi::Error::Success();
  }

  // The rows of the pool whose dimensions are `dims_`. *next is the index of the next operand with scales.
  ffi::Error DecodeRows(size_t i, size_t operand, int64_t scale_kind, size_t* next, const Call& call, Pool* pool) {
    const std::string name = "rows " + std::to_string(i);
    const ffi::AnyBuffer rows = *operands_.get<ffi::AnyBuffer>(operand);
    const auto view = batch_.View(rows, /*may_be_shared=*/true);
    bool fits = view && view->dims.size() == dims_.size() - first_pool_axis_ && view->dims[0] == call.rows;
    for (size_t axis = first_pool_axis_, own = 1; axis < dims_.size(); ++axis) {
      if (axis == slot_axis_) continue;
      fits = fits && view->dims[own] == dims_[axis];
      ++own;
    }
    if (!fits) return batch_.WrongShape(name.c_str(), rows, /*may_be_shared=*/true, ShapeOfRows(call.rows));
    pool->rows = view->data;
    pool->rows_are_shared = view->is_shared;
    const ffi::DataType type = rows.element_type(), pool_type = operands_.get<ffi::AnyBuffer>(i)->element_type();
    pool->from = ElementTypeOf(type);
    pool->row_bytes_of_element = WholeByteWidth(type);
    pool->converts = type != pool_type || scale_kind != kNoScale;
    JB_RETURN_IF_ERROR(CheckType(
        op_, name.c_str(), rows, [&] { return TypeName(pool_type) + ", or a type that is converted to it"; },
        !pool->converts || Converts(pool->from, pool->to)));
    if (scale_kind == kNoScale) return ffi::Error::Success();
    const std::string name_of_scale = "scale " + std::to_string(i);
    const ffi::AnyBuffer scale = *operands_.get<ffi::AnyBuffer>((*next)++);
    const bool is_per_head = scale_kind == kScalePerHead;
    if (is_per_head && view->dims.size() < 2) return batch_.WrongRank(name.c_str(), rows, "rows, heads, ...");
    std::vector<Dimension> heads;
    if (is_per_head) heads.emplace_back(view->dims[1]);
    BatchOperand scales;
    JB_RETURN_IF_ERROR(batch_.Take(name_of_scale.c_str(), scale, ffi::DataType::F32, heads, &scales));
    pool->scales = static_cast<const float*>(scales.data);
    pool->scales_are_shared = scales.is_shared;
    pool->num_scales = is_per_head ? view->dims[1] : 1;
    return ffi::Error::Success();
  }

  // The shape of the rows of the current pool, as text.
  std::string ShapeOfRows(int64_t rows) const {
    std::string shape = std::to_string(rows);
    for (size_t axis = first_pool_axis_; axis < dims_.size(); ++axis) {
      if (axis != slot_axis_) shape += "," + std::to_string(dims_[axis]);
    }
    return shape;
  }

  static constexpr const char* kTrailing = "layers if there are some, and the slots of the first pool on the same axis";

  const char* op_;
  ffi::RemainingArgs operands_;
  ffi::RemainingRets results_;
  size_t num_own_operands_, num_pools_;
  Batch batch_;
  size_t first_pool_axis_ = 0, slot_axis_ = 0;  // after the batch
  ffi::AnyBuffer::Dimensions dims_;             // of the current pool, after the batch
};

}  // namespace jax_baracuda::write_rows
