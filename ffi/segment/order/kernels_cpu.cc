// The CPU kernel of segment_order.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <numeric>

#include "ffi/segment/engine/rows_cpu.h"
#include "ffi/segment/order/call.h"

namespace jax_baracuda::segment {
namespace {

// With more segments per row than this, the table of a counting sort costs more than a merge sort.
constexpr int64_t kMaxCountedSegmentsToRow = 16;

bool IsCounted(const Problem& problem) { return problem.segments / kMaxCountedSegmentsToRow <= problem.rows; }

const char* StrategyOf(const Problem& problem) {
  if (problem.batch == 0 || problem.rows == 0) return kNothing;
  return IsCounted(problem) ? "counting_sort" : "merge_sort";
}

// Dropped rows are sorted into an extra segment after the last one.
int32_t SegmentOf(int32_t id, int64_t segments) {
  return static_cast<uint32_t>(id) < static_cast<uint64_t>(segments) ? id : static_cast<int32_t>(segments);
}

// Stable sorts of one batch element. Returns false if allocation fails.
bool CountingSort(const int32_t* ids, int64_t rows, int64_t segments, int32_t* order, int32_t* sorted_ids) {
  const auto places = Allocate<int32_t>(segments + 2);  // next position per segment
  if (places == nullptr) return false;
  WriteZeros(places.get(), segments + 2);
  for (int64_t row = 0; row < rows; ++row) ++places[int64_t{SegmentOf(ids[row], segments)} + 1];
  std::partial_sum(places.get(), places.get() + segments + 2, places.get());
  for (int64_t row = 0; row < rows; ++row) {
    const int32_t segment = SegmentOf(ids[row], segments);
    const int32_t place = places[segment]++;
    order[place] = static_cast<int32_t>(row);
    sorted_ids[place] = segment;
  }
  return true;
}

void MergeSort(const int32_t* ids, int64_t rows, int64_t segments, int32_t* order, int32_t* sorted_ids) {
  std::iota(order, order + rows, 0);
  std::stable_sort(order, order + rows,
                   [&](int32_t a, int32_t b) { return SegmentOf(ids[a], segments) < SegmentOf(ids[b], segments); });
  for (int64_t place = 0; place < rows; ++place) sorted_ids[place] = SegmentOf(ids[order[place]], segments);
}

}  // namespace

std::vector<const char*> OrderCall::Strategies() { return {kNothing, "counting_sort", "merge_sort"}; }

Plan OrderCall::MakePlan() const { return {StrategyOf(problem)}; }

bool OrderCall::Run(ffi::ThreadPool& pool) const {
  std::atomic<bool> has_memory{true};
  ParallelFor(pool, problem.rows == 0 ? 0 : problem.batch, [&](int64_t b) {
    const int32_t* const ids = static_cast<const int32_t*>(segment_ids) + problem.IdIndex(b, 0);
    int32_t* const own_order = order + b * problem.rows;
    int32_t* const own_sorted_ids = sorted_ids + b * problem.rows;
    if (!IsCounted(problem)) {
      MergeSort(ids, problem.rows, problem.segments, own_order, own_sorted_ids);
    } else if (!CountingSort(ids, problem.rows, problem.segments, own_order, own_sorted_ids)) {
      has_memory = false;
    }
  });
  return has_memory;
}

}  // namespace jax_baracuda::segment
