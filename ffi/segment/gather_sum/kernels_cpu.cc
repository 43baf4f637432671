// The CPU kernels of gather_segment_sum.

#include <algorithm>
#include <cstdint>

#include "ffi/segment/engine/rows_cpu.h"
#include "ffi/segment/gather_sum/handler.h"

namespace jax_baracuda::segment {
namespace {

// Rows of another array (see rows_cpu.h), each times the weights of its heads if there are weights.
template <typename T>
struct GatheredRows {
  static constexpr bool kSplitsFeatures = false;  // a thread's part of a row would begin inside a head

  GatherSumCall call;

  struct Element {
    const T* rows;
    const int32_t* gather_ids;
    int64_t num_rows;
    bool clips;
    const T* weights;
    int64_t heads;
    const int32_t* edge_order;
    int64_t num_edges;

    // The gathered row of an edge, or a number that is none.
    JB_INLINE int64_t Row(int32_t edge) const {
      const int64_t row = gather_ids[edge];
      return clips ? std::max<int64_t>(0, std::min(row, num_rows - 1)) : row;
    }
    JB_INLINE bool Exists(int64_t row) const { return static_cast<uint64_t>(row) < static_cast<uint64_t>(num_rows); }

    JB_INLINE void Prefetch(int32_t edge, int64_t stride, int64_t width) const {
      const int64_t row = Row(edge);
      if (Exists(row)) PrefetchRow(rows + row * stride, width);
    }

    template <typename Reduction>
    JB_INLINE void Fold(const Reduction& reduction, int32_t edge, int64_t stride, int64_t width,
                        CellsOf<Reduction> cells) const {
      const int64_t row = Row(edge);
      if (!Exists(row)) return;
      if (weights == nullptr) {
        reduction.Fold(rows + row * stride, edge, width, cells);
        return;
      }
      // Whatever a caller passes, nothing out of bounds is read.
      const int64_t weight = edge_order == nullptr ? edge : std::clamp<int64_t>(edge_order[edge], 0, num_edges - 1);
      reduction.FoldScaled(rows + row * stride, weights + weight * heads, heads, width, cells);
    }
  };

  JB_INLINE Element At(const Problem& problem, int64_t batch, int64_t feature) const {
    const auto of_batch = [&](const auto* array, bool is_shared, int64_t size) {
      return array == nullptr || is_shared ? array : array + batch * size;
    };
    return {of_batch(static_cast<const T*>(call.data), problem.data_is_shared, call.num_rows * problem.features) +
                feature,
            of_batch(call.gather_ids, call.gather_ids_are_shared, problem.rows),
            call.num_rows,
            call.clips_gather_ids,
            of_batch(static_cast<const T*>(call.weights), call.weights_are_shared, problem.rows * call.heads),
            call.heads,
            of_batch(call.edge_order, call.edge_order_is_shared, problem.rows),
            problem.rows};
  }
};

template <typename T>
struct GatherSum {
  using Element = T;
  using First = ComputeType<T>;
  using Second = NoNumber;
  static constexpr bool kRounds = true, kHoldsRuns = true;

  void* output;
  bool is_wide;

  JB_INLINE void Start(int64_t count, CellsOf<GatherSum> cells) const { std::fill_n(cells.first, count, First{0}); }

  JB_INLINE void Fold(const T* values, int32_t /*edge*/, int64_t width, CellsOf<GatherSum> cells) const {
    JB_VECTORIZE
    for (int64_t i = 0; i < width; ++i) cells.first[i] += static_cast<First>(values[i]);
  }

  JB_INLINE void FoldScaled(const T* values, const T* weights, int64_t heads, int64_t width,
                            CellsOf<GatherSum> cells) const {
    const int64_t features = width / heads;
    for (int64_t head = 0; head < heads; ++head) {
      const First weight = static_cast<First>(weights[head]);
      const T* const from = values + head * features;
      First* const to = cells.first + head * features;
      JB_VECTORIZE
      for (int64_t i = 0; i < features; ++i) to[i] += weight * static_cast<First>(from[i]);
    }
  }

  JB_INLINE void Merge(int64_t count, CellsOf<GatherSum> later, CellsOf<GatherSum> cells) const {
    JB_VECTORIZE
    for (int64_t i = 0; i < count; ++i) cells.first[i] += later.first[i];
  }

  JB_INLINE void Write(int64_t count, int64_t first_cell, const int32_t*, CellsOf<GatherSum> cells) const {
    if (is_wide) {
      std::copy_n(cells.first, count, static_cast<First*>(output) + first_cell);
    } else {
      T* const to = static_cast<T*>(output) + first_cell;
      JB_VECTORIZE
      for (int64_t i = 0; i < count; ++i) Store(cells.first[i], to + i);
    }
  }
};

bool RunGatherSum(ffi::ThreadPool& pool, const GatherSumCall& call) {
  const Problem& problem = call.problem;
  bool has_memory = true;
  DispatchFloating(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const GatherSum<T> reduction{call.output, call.is_wide};
    const int64_t element_bytes = call.is_wide ? sizeof(ComputeType<T>) : sizeof(T);
    AdviseHugePages(reduction.output, problem.batch * problem.segments * problem.features * element_bytes);
    has_memory = ReduceAll(pool, problem, SegmentIds(call), GatheredRows<T>{call}, reduction);
  });
  return has_memory;
}

Plan PlanGatherSum(const GatherSumCall& call) {
  return PlanOfType(call, JB_DISPATCH(DispatchFloating), [&](auto tag) {
    return ChooseStrategy<GatherSum<typename decltype(tag)::type>>(call.problem, /*has_counts=*/false);
  });
}

JB_CPU_TARGET("gather_segment_sum", (HandleGatherSum<ffi::ThreadPool, RunOnCpu<GatherSumCall, RunGatherSum>>),
              BindGatherSum<ffi::ThreadPool>(), (PlanOf<PlanGatherSum, GatherSumCallOf>), kNothing, "scan",
              "split_scan", "group_by_segment");

}  // namespace
}  // namespace jax_baracuda::segment
