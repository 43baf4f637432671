// The CPU kernel of write_rows.
//
// Each thread goes through all rows in order and writes those of its share of the slots. So the last row of a slot wins,
// and no thread waits for another.

#include <cstdint>

#include "ffi/core/parallel_for.h"
#include "ffi/write_rows/rows_cpu.h"

namespace jax_baracuda::write_rows {
namespace {

// A write takes a sixteenth of the time of other work on as many bytes. Below 8 MB, a second thread costs what it saves:
// it fetches lines of the pool that another thread wrote.
constexpr int64_t kSpeedOfWrites = 16;

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

bool Call::Run(ffi::ThreadPool& threads) const {
  for (const Copy& copy : copies) CopyArray(threads, copy);
  WriteAll(threads, *this);
  return true;
}

}  // namespace jax_baracuda::write_rows
