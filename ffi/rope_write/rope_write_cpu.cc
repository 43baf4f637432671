// The CPU kernel of rope_write.
//
// Each thread goes through all rows in order and takes those of its share of the slots, as in write_rows. It rotates
// the queries of such a row and its keys, with the same sines and cosines. Keys are rotated into the pool, unless their
// numbers are converted.

#include <atomic>
#include <cstdint>
#include <memory>

#include "ffi/core/cpu_kernel.h"
#include "ffi/core/parallel_for.h"
#include "ffi/rope/rows_cpu.h"
#include "ffi/rope_write/rope_write.h"
#include "ffi/write_rows/rows_cpu.h"

namespace jax_baracuda::rope_write {
namespace {

template <typename T>
class Rows {
 public:
  Rows(const Call& call, int64_t max_elements)
      : call_(call),
        features_(call.problem.features),
        part_{features_, call.problem.pairs, call.problem.first_rotated},
        table_(call.problem, call.frequencies, call.positions, Scale(call), /*max_length=*/1),
        rotated_keys_(Allocate<T>(max_elements)) {}

  bool has_memory() const { return table_.has_memory() && rotated_keys_ != nullptr; }

  void RotateQueries(int64_t batch, int64_t row) {
    const rope::Tensor& queries = call_.queries;
    table_.Compute(batch, row, 1);
    const int64_t of_batch = call_.problem.length * queries.heads * features_;
    const int64_t first = row * queries.heads * features_;
    const T* const x = queries.x.Of<T>(batch, of_batch) + first;
    Rotate(x, queries.heads, static_cast<T*>(queries.y) + batch * of_batch + first);
  }

  // Call RotateQueries first, for the same row.
  void Write(int64_t batch, int64_t row, int64_t layer, int64_t slot) {
    const write_rows::Call& write = call_.write;
    const int64_t layer_of_all = batch * write.layers + layer;
    for (const write_rows::Pool& pool : write.pools) {
      const char* const from = write_rows::RowOf(write, pool, batch, row);
      if (pool.number != kKeys) {
        write_rows::WriteRow(write, pool, from, batch, layer_of_all, slot);
        continue;
      }
      const T* const keys = reinterpret_cast<const T*>(from);
      if (pool.converts) {
        Rotate(keys, pool.row_elements() / features_, rotated_keys_.get());
        const char* const rotated = reinterpret_cast<const char*>(rotated_keys_.get());
        write_rows::WriteRow(write, pool, rotated, batch, layer_of_all, slot);
        continue;
      }
      for (int64_t outer = 0; outer < pool.outer; ++outer) {
        T* const to = static_cast<T*>(pool.dest) + write_rows::FirstElement(write, pool, layer_of_all, outer, slot);
        Rotate(keys + outer * pool.inner, pool.inner / features_, to);
      }
    }
  }

 private:
  static rope::Rotation<rope::AngleType<T>> Scale(const Call& call) {
    const auto scale = static_cast<rope::AngleType<T>>(call.scale);
    return {scale, scale};
  }

  void Rotate(const T* x, int64_t heads, T* y) const {
    rope::RotateRows(call_.problem.interleaved, x, heads, part_, table_.At(0), 0, y);
  }

  const Call& call_;
  const int64_t features_;
  const rope::RotatedPart part_;
  rope::Table<T> table_;
  const Memory<T> rotated_keys_;
};

template <typename T>
bool RotateAndWrite(ffi::ThreadPool& threads, const Call& call) {
  const write_rows::Call& write = call.write;
  int64_t converted_elements = 0;
  for (const write_rows::Pool& pool : write.pools) {
    if (pool.number == kKeys && pool.converts) converted_elements = pool.row_elements();
  }
  const int64_t bytes_of_queries = call.problem.batch * call.problem.length * call.queries.heads *
                                   call.problem.features * 2 * static_cast<int64_t>(sizeof(T));
  const int64_t chunks = ChunksFor(threads, write_rows::BytesOfRows(write) + bytes_of_queries);
  std::atomic<bool> has_memory{true};
  ParallelFor(threads, chunks, [&](int64_t chunk) {
    Rows<T> rows(call, converted_elements);
    if (!rows.has_memory()) {
      has_memory = false;
      return;
    }
    for (int64_t batch = 0; batch < call.problem.batch; ++batch) {
      const int32_t* const slot_of_row = write.slot_of_row + (write.slot_of_row_is_shared ? 0 : batch * write.rows);
      const int64_t layer = write.layer == nullptr ? 0 : write.layer[write.layer_is_shared ? 0 : batch];
      const bool has_layer = layer >= 0 && layer < write.layers;
      for (int64_t row = 0; row < call.problem.length; ++row) {
        const int64_t slot = slot_of_row[row];
        const bool is_written = has_layer && slot >= 0 && slot < write.slots;
        if (!write_rows::IsOfChunk(is_written ? slot : row, chunks, chunk)) continue;
        rows.RotateQueries(batch, row);
        if (is_written) rows.Write(batch, row, layer, slot);
      }
    }
  });
  return has_memory;
}

}  // namespace

std::vector<const char*> Call::Strategies() { return {"rows"}; }

Plan Call::MakePlan() const { return {"rows"}; }

bool Call::Run(ffi::ThreadPool& threads) const {
  for (const Copy& copy : write.copies) CopyArray(threads, copy);
  return DispatchOr(true, type, JB_DISPATCH(DispatchFloating),
                    [&](auto tag) { return RotateAndWrite<typename decltype(tag)::type>(threads, *this); });
}

}  // namespace jax_baracuda::rope_write
