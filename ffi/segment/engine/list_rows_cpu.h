// Lists the rows of a block that belong to a range of segments, for the CPU kernels.
#pragma once

#include <cstdint>

namespace jax_baracuda::segment {

inline constexpr int64_t kListSlack = 16;  // extra elements that may be written past the list

// Lists, in ascending order, each i in [0, count) with first <= ids[i] < first + size, and returns how many there are.
// Branch-free, since the ids are unpredictable. `listed` needs room for count + kListSlack.
int64_t ListRows(const int32_t* ids, int64_t count, int32_t first, uint32_t size, int32_t* listed);

}  // namespace jax_baracuda::segment
