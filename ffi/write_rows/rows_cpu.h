// Writing of rows to slots by CPU kernels.
#pragma once

#include <cstdint>

#include "ffi/write_rows/write_rows.h"

namespace jax_baracuda::write_rows {

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
void WriteRow(const Call& call, const Pool& pool, const char* row, int64_t batch, int64_t layer, int64_t slot);

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
