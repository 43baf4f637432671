// The CPU kernel of write_rows.
//
// Each thread goes through all rows in order and writes those of its share of the slots. So the last row of a slot wins,
// and no thread waits for another.

#include <cstdint>
#include <cstring>

#include "ffi/core/cpu_clones.h"
#include "ffi/core/cpu_kernel.h"
#include "ffi/core/parallel_for.h"
#include "ffi/core/target_table.h"
#include "ffi/write_rows/write_rows_handler.h"

namespace jax_baracuda::write_rows {
namespace {

void CopyPools(ffi::ThreadPool& pool, const std::vector<Copy>& copies) {
  for (const Copy& copy : copies) {
    ForEachRange(pool, copy.bytes, 2 * copy.bytes, [&](int64_t begin, int64_t end) {
      std::memcpy(static_cast<char*>(copy.to) + begin, static_cast<const char*>(copy.from) + begin,
                  static_cast<size_t>(end - begin));
    });
  }
}

template <typename To>
JB_INLINE void StoreNumber(float number, To* to) {
  if constexpr (std::is_same_v<To, Int8>) {
    to->value = Int8::Of(number).value;
  } else if constexpr (std::is_same_v<To, Float8E4M3> || std::is_same_v<To, Float8E5M2>) {
    to->bits = To::Of(number).bits;
  } else {
    Store<To>(number, to);
  }
}

template <typename From, typename To>
JB_AVX2_CLONES void ConvertNumbers(const From* from, int64_t count, float scale, To* to) {
  JB_VECTORIZE
  for (int64_t i = 0; i < count; ++i) StoreNumber(static_cast<float>(from[i]) / scale, to + i);
}

// Writes `count` neighbours. `element`: their position in the rows; `to`: that in the pool. All have the same scale.
void WriteElements(const Pool& pool, int64_t element, int64_t count, int64_t to, float scale) {
  char* const dest = static_cast<char*>(pool.dest) + to * pool.pool_bytes_of_element;
  const char* const rows = static_cast<const char*>(pool.rows) + element * pool.row_bytes_of_element;
  if (!pool.converts) {
    std::memcpy(dest, rows, static_cast<size_t>(count * pool.pool_bytes_of_element));
    return;
  }
  DispatchRows(pool.from, [&](auto from) {
    DispatchPool(pool.to, [&](auto to_type) {
      using From = typename decltype(from)::type;
      using To = typename decltype(to_type)::type;
      ConvertNumbers(reinterpret_cast<const From*>(rows), count, scale, reinterpret_cast<To*>(dest));
    });
  });
}

// Writes a row to a slot of a layer, counted through the batch.
void WriteRow(const Call& call, const Pool& pool, int64_t batch, int64_t layer, int64_t row, int64_t slot) {
  const int64_t row_begin = ((pool.rows_are_shared ? 0 : batch) * call.rows + row) * pool.row_elements();
  const int64_t elements_of_scale = pool.row_elements() / pool.num_scales;
  const float* const scales =
      pool.scales == nullptr || pool.scales_are_shared ? pool.scales : pool.scales + batch * pool.num_scales;
  for (int64_t outer = 0; outer < pool.outer; ++outer) {
    const int64_t to = ((layer * pool.outer + outer) * call.slots + slot) * pool.inner;
    for (int64_t begin = 0; begin < pool.inner;) {
      const int64_t element = outer * pool.inner + begin;
      int64_t count = pool.inner - begin;
      float scale = 1.0f;
      if (scales != nullptr) {
        const int64_t index = element / elements_of_scale;
        count = std::min(count, (index + 1) * elements_of_scale - element);
        scale = scales[index];
      }
      WriteElements(pool, row_begin + element, count, to + begin, scale);
      begin += count;
    }
  }
}

ffi::Error Run(ffi::ThreadPool threads, const Call& call) {
  CopyPools(threads, call.copies);
  int64_t bytes = 0;
  for (const Pool& pool : call.pools) {
    bytes += call.batch * call.rows * pool.row_elements() * (pool.row_bytes_of_element + pool.pool_bytes_of_element);
  }
  const int64_t chunks = ChunksFor(threads, bytes);
  ParallelFor(threads, chunks, [&](int64_t chunk) {
    for (int64_t batch = 0; batch < call.batch; ++batch) {
      const int32_t* const slots = call.slot_of_row + (call.slot_of_row_is_shared ? 0 : batch * call.rows);
      const int64_t layer = call.layer == nullptr ? 0 : call.layer[call.layer_is_shared ? 0 : batch];
      if (layer < 0 || layer >= call.layers) continue;
      for (int64_t row = 0; row < call.rows; ++row) {
        const int64_t slot = slots[row];
        if (slot < 0 || slot >= call.slots || slot % chunks != chunk) continue;
        for (const Pool& pool : call.pools) WriteRow(call, pool, batch, batch * call.layers + layer, row, slot);
      }
    }
  });
  return ffi::Error::Success();
}

JB_CPU_TARGET("write_rows", (HandleRows<ffi::ThreadPool, Run>), BindRows<ffi::ThreadPool>(), PlanRows,
              JB_NAMES(kStrategyNames));

}  // namespace
}  // namespace jax_baracuda::write_rows
