// The CPU kernel of write_rows.
//
// Each thread goes through all rows in order and writes those of its share of the slots. So the last row of a slot wins,
// and no thread waits for another.

#include <cstdint>

#include "ffi/core/parallel_for.h"
#include "ffi/core/target_table.h"
#include "ffi/write_rows/rows_cpu.h"
#include "ffi/write_rows/write_rows_handler.h"

namespace jax_baracuda::write_rows {
namespace {

// A write takes a sixteenth of the time of other work on as many bytes. Below 8 MB, a second thread costs what it saves:
// it fetches lines of the pool that another thread wrote.
constexpr int64_t kSpeedOfWrites = 16;

ffi::Error Run(ffi::ThreadPool threads, const Call& call) {
  for (const Copy& copy : call.copies) CopyArray(threads, copy);
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
  return ffi::Error::Success();
}

JB_TARGET("write_rows", (HandleRows<ffi::ThreadPool, Run>), PlanRows, JB_NAMES(kStrategyNames));

}  // namespace
}  // namespace jax_baracuda::write_rows
