// Which rows of a block belong to a range of segments, for the CPU kernels.
#pragma once

#include <cstdint>

namespace jax_baracuda::segment {

inline constexpr int64_t kListSlack = 16;  // that many more may be written than are listed

// Lists, ascending, each i of [0, count) with first <= ids[i] < first + size, without a branch on what is random. Returns
// how many there are. `listed` has room for count + kListSlack.
int64_t ListRows(const int32_t* ids, int64_t count, int32_t first, uint32_t size, int32_t* listed);

}  // namespace jax_baracuda::segment
