// The CPU kernel of write_rows.
//
// Each thread goes through all rows in order and writes those of its share of the slots. So the last row of a slot wins,
// and no thread waits for another.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "ffi/core/cpu_clones.h"
#include "ffi/core/cpu_kernel.h"
#include "ffi/core/parallel_for.h"
#include "ffi/write_rows/rows_cpu.h"

namespace jax_baracuda::write_rows {
namespace {

// A write takes a sixteenth of the time of other work on as many bytes. Below 8 MB, a second thread costs what it saves:
// it fetches lines of the pool that another thread wrote.
constexpr int64_t kSpeedOfWrites = 16;

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

char* ElementAt(const Pool& pool, int64_t element) {
  return static_cast<char*>(pool.dest) + element * pool.pool_bytes_of_element;
}

// Converts `count` neighbours of a row, which have the same scale, to elements of the pool.
void ConvertElements(const Pool& pool, const void* rows, int64_t count, int64_t to, float scale) {
  DispatchRows(pool.from, [&](auto from) {
    DispatchPool(pool.to, [&](auto to_type) {
      using From = typename decltype(from)::type;
      using To = typename decltype(to_type)::type;
      ConvertNumbers(static_cast<const From*>(rows), count, scale, reinterpret_cast<To*>(ElementAt(pool, to)));
    });
  });
}

void WriteAll(ffi::ThreadPool& threads, const Call& call) {
  const int64_t chunks = ChunksFor(threads, BytesOfRows(call) / kSpeedOfWrites);
  ParallelFor(threads, chunks, [&](int64_t chunk) {
    for (int64_t batch = 0; batch < call.batch; ++batch) {
      const int32_t* const slot_of_row = call.slot_of_row + (call.slot_of_row_is_shared ? 0 : batch * call.rows);
      const int64_t layer = call.layer == nullptr ? 0 : call.layer[call.layer_is_shared ? 0 : batch];
      if (layer < 0 || layer >= call.layers) continue;
      for (const Pool& pool : call.pools) {
        for (int64_t row = 0; row < call.rows; ++row) {
          const int64_t slot = slot_of_row[row];
          if (slot < 0 || slot >= call.slots || !IsOfChunk(slot, chunks, chunk)) continue;
          WriteRow(call, pool, RowOf(call, pool, batch, row), batch, batch * call.layers + layer, slot);
        }
      }
    }
  });
}

}  // namespace

void WriteRow(const Call& call, const Pool& pool, const char* row, int64_t batch, int64_t layer, int64_t slot) {
  if (!pool.converts) {
    const int64_t bytes = pool.inner * pool.pool_bytes_of_element;
    for (int64_t outer = 0; outer < pool.outer; ++outer) {
      std::memcpy(ElementAt(pool, FirstElement(call, pool, layer, outer, slot)), row + outer * bytes,
                  static_cast<size_t>(bytes));
    }
    return;
  }
  const int64_t elements_of_scale = pool.row_elements() / pool.num_scales;
  const float* const scales =
      pool.scales == nullptr || pool.scales_are_shared ? pool.scales : pool.scales + batch * pool.num_scales;
  for (int64_t outer = 0; outer < pool.outer; ++outer) {
    const int64_t to = FirstElement(call, pool, layer, outer, slot);
    for (int64_t begin = 0; begin < pool.inner;) {
      const int64_t element = outer * pool.inner + begin;
      int64_t count = pool.inner - begin;
      float scale = 1.0f;
      if (scales != nullptr) {
        const int64_t index = element / elements_of_scale;
        count = std::min(count, (index + 1) * elements_of_scale - element);
        scale = scales[index];
      }
      ConvertElements(pool, row + element * pool.row_bytes_of_element, count, to + begin, scale);
      begin += count;
    }
  }
}

bool Call::Run(ffi::ThreadPool& threads) const {
  for (const Copy& copy : copies) CopyArray(threads, copy);
  WriteAll(threads, *this);
  return true;
}

}  // namespace jax_baracuda::write_rows
