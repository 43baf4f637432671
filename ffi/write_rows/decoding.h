// Checks the buffers of calls that write rows to slots, for the handlers of write_rows and rope_write.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "ffi/core/arguments.h"
#include "ffi/core/batch.h"
#include "ffi/core/bit_width.h"
#include "ffi/core/integers.h"
#include "ffi/write_rows/write_rows.h"

namespace jax_baracuda::write_rows {

inline bool Converts(ElementType from, ElementType to) {
  return DispatchRows(from, [](auto) {}) && DispatchPool(to, [](auto) {});
}

enum ScaleKind : int64_t { kNoScale, kOneScale, kScalePerHead };

// Operands are the pools, then their rows, then slots, then the layer if there is one, then the scales of the pools
// that have some. Results are the pools.
class Decoder {
 public:
  Decoder(Arguments& arguments, size_t num_pools)
      : arguments_(arguments),
        pools_(arguments.Operands("dest", num_pools)),
        rows_(arguments.Operands("rows", num_pools)),
        results_(arguments.Results("result", num_pools)) {}

  void Decode(Call* call) {
    const size_t num_pools = pools_.size();
    const IntegerSpan scales = arguments_.Integers("scales");
    const bool is_valid = scales.size() == num_pools && std::all_of(scales.begin(), scales.end(), [](int64_t kind) {
                            return kNoScale <= kind && kind <= kScalePerHead;
                          });
    if (!is_valid) throw InvalidArgument("scales are " + ShapeString(scales) + ", expected 0, 1 or 2 for each result");
    if (num_pools == 0) throw InvalidArgument("got no results, expected at least one");
    call->has_unique_slots = arguments_.Flag("has_unique_slots");
    const bool has_layer = arguments_.Flag("has_layer");
    first_pool_axis_ = has_layer ? 1 : 0;
    DecodeFirst(arguments_.Integer("axis"), arguments_.Integer("num_batch_dims"), arguments_.Operand("slots"), call);
    if (has_layer) {
      const BatchOperand layer = batch_.Take(arguments_.Operand("layer"), XLA_FFI_DataType_S32, {});
      call->layer = static_cast<const int32_t*>(layer.data);
      call->layer_is_shared = layer.is_shared;
    }
    for (size_t i = 0; i < num_pools; ++i) {
      Pool pool;
      pool.number = static_cast<int32_t>(i);
      DecodePool(pools_[i], results_[i], call, &pool);
      DecodeRows(rows_[i], pools_[i].type, scales[i], *call, &pool);
      const bool has_work = pool.row_elements() > 0 && call->batch > 0 && call->layers > 0 && call->slots > 0;
      if (has_work && call->rows > 0) call->pools.push_back(pool);
    }
  }

  const std::vector<Buffer>& rows() const { return rows_; }

 private:
  // Sets what all pools share, from the first pool and the slots.
  void DecodeFirst(int64_t axis, int64_t num_batch_dims, const Buffer& slots, Call* call) {
    const Buffer& dest = pools_[0];
    batch_ = Batch(dest, num_batch_dims, kTrailing);
    const IntegerSpan dims = batch_.View(dest, /*may_be_shared=*/false)->dims;
    if (axis < 0 || dims.size() <= first_pool_axis_ || static_cast<uint64_t>(axis) >= dims.size() - first_pool_axis_) {
      throw dest.WrongShape("an axis of slots number " + std::to_string(axis));
    }
    slot_axis_ = first_pool_axis_ + static_cast<size_t>(axis);
    call->batch = batch_.size();
    call->layers = first_pool_axis_ == 1 ? dims[0] : 1;
    call->slots = dims[slot_axis_];
    if (call->slots > std::numeric_limits<int32_t>::max()) {
      throw dest.Wrong("has " + std::to_string(call->slots) + " slots, expected less than 2^31");
    }
    slots.CheckType(XLA_FFI_DataType_S32);
    const auto view = batch_.View(slots, /*may_be_shared=*/true);
    if (!view || view->dims.size() != 1) throw batch_.WrongShape(slots, /*may_be_shared=*/true, "rows");
    call->slot_of_row = static_cast<const int32_t*>(slots.data);
    call->slot_of_row_is_shared = view->is_shared;
    call->rows = view->dims[0];
  }

  void DecodePool(const Buffer& dest, const Buffer& result, Call* call, Pool* pool) {
    const auto view = batch_.View(dest, /*may_be_shared=*/false);
    bool fits = view && view->dims.size() > slot_axis_ && view->dims[slot_axis_] == call->slots;
    fits = fits && (first_pool_axis_ == 0 || view->dims[0] == call->layers);
    if (!fits) throw batch_.WrongShape(dest, /*may_be_shared=*/false, kTrailing);
    pool->pool_bytes_of_element = WholeByteWidth(dest.type);
    dest.CheckKernel(pool->pool_bytes_of_element > 0);
    result.CheckType(dest.type);
    if (!(result.dims == dest.dims)) throw result.WrongShape(ShapeString(dest.dims));
    dims_ = view->dims;
    for (size_t axis = first_pool_axis_; axis < dims_.size(); ++axis) {
      if (axis < slot_axis_) pool->outer = MultiplySizes(pool->outer, dims_[axis]);
      if (axis > slot_axis_) pool->inner = MultiplySizes(pool->inner, dims_[axis]);
    }
    pool->dest = result.data;
    call->copies.emplace_back(pool->dest, dest.data, MultiplySizes(dest.Size(), pool->pool_bytes_of_element));
    pool->to = ElementTypeOf(dest.type);
  }

  // The rows of the pool whose dimensions are `dims_`.
  void DecodeRows(const Buffer& rows, DataType pool_type, int64_t scale_kind, const Call& call, Pool* pool) {
    const auto view = batch_.View(rows, /*may_be_shared=*/true);
    bool fits = view && view->dims.size() == dims_.size() - first_pool_axis_ && view->dims[0] == call.rows;
    for (size_t axis = first_pool_axis_, own = 1; axis < dims_.size(); ++axis) {
      if (axis == slot_axis_) continue;
      fits = fits && view->dims[own] == dims_[axis];
      ++own;
    }
    if (!fits) throw batch_.WrongShape(rows, /*may_be_shared=*/true, ShapeOfRows(call.rows));
    pool->rows = rows.data;
    pool->rows_are_shared = view->is_shared;
    pool->from = ElementTypeOf(rows.type);
    pool->row_bytes_of_element = WholeByteWidth(rows.type);
    pool->converts = rows.type != pool_type || scale_kind != kNoScale;
    if (pool->converts && !Converts(pool->from, pool->to)) {
      throw rows.WrongType(TypeName(pool_type) + ", or a type that is converted to it");
    }
    if (scale_kind == kNoScale) return;
    const bool is_per_head = scale_kind == kScalePerHead;
    if (is_per_head && view->dims.size() < 2) throw batch_.WrongRank(rows, "rows, heads, ...");
    std::vector<Dimension> heads;
    if (is_per_head) heads.emplace_back(view->dims[1]);
    const BatchOperand scales = batch_.Take(arguments_.Operand("scale", rows.number), XLA_FFI_DataType_F32, heads);
    pool->scales = static_cast<const float*>(scales.data);
    pool->scales_are_shared = scales.is_shared;
    pool->num_scales = is_per_head ? view->dims[1] : 1;
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

  Arguments& arguments_;
  const std::vector<Buffer> pools_, rows_, results_;
  Batch batch_;
  size_t first_pool_axis_ = 0, slot_axis_ = 0;  // after the batch
  IntegerSpan dims_;                            // of the current pool, after the batch
};

}  // namespace jax_baracuda::write_rows
