// The CPU kernels of gather_segment_sum.

#include <cstdint>

#include "ffi/segment/engine/gathered_rows_cpu.h"
#include "ffi/segment/gather_sum/call.h"
#include "ffi/segment/sum/reduction_cpu.h"

namespace jax_baracuda::segment {
namespace {

// Multiplies the narrow rows of edges by the weights of their heads.
template <typename T, typename C>
JB_AVX2 void ScaleNarrowRows(const T* weights, int64_t heads, const int32_t* edges, int64_t count, int64_t row_width,
                             C* numbers) {
  DispatchNarrow(row_width, [&](auto width) __attribute__((always_inline)) {
    const int64_t features = width / heads;
    for (int64_t i = 0; i < count; ++i) {
      const T* const of_edge = weights + edges[i] * heads;
      for (int64_t head = 0; head < heads; ++head) {
        const C weight = static_cast<C>(of_edge[head]);
        C* const of_head = numbers + i * width + head * features;
        if (heads == 1) {
          for (int64_t j = 0; j < width; ++j) of_head[j] *= weight;
        } else {
          for (int64_t j = 0; j < features; ++j) of_head[j] *= weight;
        }
      }
    }
  });
}

// Rows times the weights of their heads (see PlainRows).
template <typename T>
struct WeightedRows {
  BatchArray<T> all;  // [batch or 1, edges, heads]
  int64_t heads;
  const T* weights = nullptr;  // of a batch element

  JB_INLINE WeightedRows OfBatch(int64_t batch) const { return {all, heads, all.Of(batch)}; }

  bool IsShared() const { return all.stride == 0; }

  JB_INLINE void Prefetch(int64_t /*edge*/) const {}

  JB_INLINE void Fold(const Sum<T>&, const T* row, int64_t edge, int64_t width, CellsOf<Sum<T>> cells) const {
    using C = ComputeType<T>;
    const int64_t features = width / heads;
    const T* const of_edge = weights + edge * heads;
    WithNumbers(row, width, [&](const auto* numbers) __attribute__((always_inline)) {
      if (features == 1) {
        JB_VECTORIZE
        for (int64_t i = 0; i < width; ++i) cells.first[i] += static_cast<C>(of_edge[i]) * static_cast<C>(numbers[i]);
        return;
      }
      for (int64_t head = 0; head < heads; ++head) {
        const C weight = static_cast<C>(of_edge[head]);
        const auto* const from = numbers + head * features;
        C* const to = cells.first + head * features;
        JB_VECTORIZE
        for (int64_t i = 0; i < features; ++i) to[i] += weight * static_cast<C>(from[i]);
      }
    });
  }

  void Change(const int32_t* of_edges, int64_t count, int64_t width, ComputeType<T>* numbers) const {
    ScaleNarrowRows(weights, heads, of_edges, count, width, numbers);
  }
};

}  // namespace

std::vector<const char*> GatherSumCall::Strategies() { return RoundingStrategies(); }

Plan GatherSumCall::MakePlan() const { return PlanReduction<SumOf>(*this, JB_DISPATCH(DispatchFloating)); }

bool GatherSumCall::Run(ffi::ThreadPool& pool) const {
  return DispatchOr(true, type, JB_DISPATCH(DispatchFloating), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Sum<T> sum{output, is_wide};
    const auto reduce = [&](const auto& input) {
      return ReduceAll(pool, SegmentIds(*this), GatheredReduction(*this, clips_gather_ids, sum, input));
    };
    if (weights.data == nullptr) return reduce(PlainRows{});
    return reduce(WeightedRows<T>{{weights, problem.rows * heads}, heads});
  });
}

}  // namespace jax_baracuda::segment
