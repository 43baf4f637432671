// The CPU kernels of the gradients of segment_sum and segment_mean.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "ffi/segment/engine/rows_cpu.h"
#include "ffi/segment/gather/call.h"

namespace jax_baracuda::segment {
namespace {

template <typename T>
JB_INLINE void DivideRow(const T* from, int32_t count, int64_t width, T* to) {
  using C = ComputeType<T>;
  const C rows = static_cast<C>(std::max(count, 1));
  ForEachPart(from, width, [&](int64_t begin, int64_t count, const auto* numbers) __attribute__((always_inline)) {
    StoreEach(count, to + begin,
              [&](int64_t i) __attribute__((always_inline)) { return static_cast<C>(numbers[i]) / rows; });
  });
}

// `counts` is nullptr for a sum.
template <bool kIsMean, typename T>
JB_AVX2_CLONES void GatherRows(const RowBlock block, int64_t segments, int64_t features, const T* cells,
                               const int32_t* counts, T* rows) {
  const auto prefetch = [&](int64_t segment)
                            __attribute__((always_inline)) { PrefetchRow(cells + segment * features, features); };
  WriteRowsOfBlock(block, segments, features, rows, prefetch,
                   [&](int64_t, int64_t segment, T* to) __attribute__((always_inline)) {
                     const T* const from = cells + segment * features;
                     if constexpr (kIsMean) {
                       DivideRow(from, counts[segment], features, to);
                     } else {
                       std::memcpy(static_cast<void*>(to), from, static_cast<size_t>(features) * sizeof(T));
                     }
                   });
}

template <bool kIsMean, typename T>
void GatherAll(ffi::ThreadPool& pool, const GatherCall& call) {
  const int64_t segments = call.problem.segments, features = call.problem.features;
  ForEachBlockOfResult(pool, call.problem, SegmentIds(call), sizeof(T), kConvertedIds,
                       [&](int64_t batch, const RowBlock& block) {
                         GatherRows<kIsMean>(block, segments, features, call.cells.Of<T>(batch, segments * features),
                                             call.count.Of<int32_t>(batch, segments),
                                             static_cast<T*>(call.rows) + batch * call.problem.rows * features);
                       });
}

}  // namespace

std::vector<const char*> GatherCall::Strategies() { return GatherStrategies(); }

Plan GatherCall::MakePlan() const { return PlanOfGather(problem); }

bool GatherCall::Run(ffi::ThreadPool& pool) const {
  DispatchFloating(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (count.data == nullptr) {
      GatherAll<false, BitsOf<T>>(pool, *this);  // copies depend on the width of the type only
    } else {
      GatherAll<true, T>(pool, *this);
    }
  });
  return true;
}

}  // namespace jax_baracuda::segment
