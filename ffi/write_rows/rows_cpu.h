// Writing of rows to slots by CPU kernels.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "ffi/core/cpu_clones.h"
#include "ffi/core/cpu_kernel.h"
#include "ffi/write_rows/write_rows.h"

namespace jax_baracuda::write_rows {

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

inline char* ElementAt(const Pool& pool, int64_t element) {
  return static_cast<char*>(pool.dest) + element * pool.pool_bytes_of_element;
}

// Converts `count` neighbours of a row, which have the same scale, to elements of the pool.
inline void ConvertElements(const Pool& pool, const void* rows, int64_t count, int64_t to, float scale) {
  DispatchRows(pool.from, [&](auto from) {
    DispatchPool(pool.to, [&](auto to_type) {
      using From = typename decltype(from)::type;
      using To = typename decltype(to_type)::type;
      ConvertNumbers(static_cast<const From*>(rows), count, scale, reinterpret_cast<To*>(ElementAt(pool, to)));
    });
  });
}

// The row of a pool's rows.
inline const char* RowOf(const Call& call, const Pool& pool, int64_t batch, int64_t row) {
  const int64_t number = (pool.rows_are_shared ? 0 : batch) * call.rows + row;
  return static_cast<const char*>(pool.rows) + number * pool.row_elements() * pool.row_bytes_of_element;
}

// The first element of a slot in the pool, in one of its outer runs. `layer`: counted through the batch.
inline int64_t FirstElement(const Call& call, const Pool& pool, int64_t layer, int64_t outer, int64_t slot) {
  return ((layer * pool.outer + outer) * call.slots + slot) * pool.inner;
}

// Writes a row to a slot of a layer.
inline void WriteRow(const Call& call, const Pool& pool, const char* row, int64_t batch, int64_t layer, int64_t slot) {
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

// Whether a chunk of several has the rows with this number, a slot or another one.
inline bool IsOfChunk(int64_t number, int64_t chunks, int64_t chunk) {
  return chunks == 1 || number % chunks == chunk;  // a division takes as long as a short row
}

// The bytes that are read and written.
inline int64_t BytesOfRows(const Call& call) {
  int64_t bytes = 0;
  for (const Pool& pool : call.pools) {
    bytes += call.batch * call.rows * pool.row_elements() * (pool.row_bytes_of_element + pool.pool_bytes_of_element);
  }
  return bytes;
}

}  // namespace jax_baracuda::write_rows
