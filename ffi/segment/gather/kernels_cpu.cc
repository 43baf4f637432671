// The CPU kernels of the gradients of segment_sum and segment_mean.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "ffi/segment/engine/rows_cpu.h"
#include "ffi/segment/gather/handler.h"

namespace jax_baracuda::segment {
namespace {

template <typename T>
struct GatherArrays {
  SegmentIds ids;
  const T* d_output;
  const int32_t* count;  // nullptr for a sum
  T* d_data;
  bool d_output_is_shared;
  bool count_is_shared;

  JB_INLINE const T* Cells(const Problem& problem, int64_t batch) const {
    return d_output + (d_output_is_shared ? 0 : batch * problem.segments * problem.features);
  }
  JB_INLINE const int32_t* Counts(const Problem& problem, int64_t batch) const {
    return count == nullptr || count_is_shared ? count : count + batch * problem.segments;
  }
};

template <typename T>
JB_INLINE void DivideRow(const T* from, int32_t count, int64_t width, T* to) {
  using C = ComputeType<T>;
  const C rows = static_cast<C>(std::max(count, 1));
  ForEachPart(from, width, [&](int64_t begin, int64_t count, const auto* numbers) __attribute__((always_inline)) {
    StoreEach(count, to + begin,
              [&](int64_t i) __attribute__((always_inline)) { return static_cast<C>(numbers[i]) / rows; });
  });
}

// For rows so narrow that loop overhead would dominate. Their cells are usually in a near cache, and their loads are
// independent, so there is no prefetch.
template <bool kIsMean, int64_t kFeatures, typename T>
JB_INLINE void GatherNarrow(const T* cells, const int32_t* counts, const int32_t* row_ids, int64_t rows,
                            int64_t segments, T* to) {
  using C = ComputeType<T>;
  JB_VECTORIZE
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t segment = row_ids[row];
    const bool is_member = static_cast<uint64_t>(segment) < static_cast<uint64_t>(segments);
    for (int64_t i = 0; i < kFeatures; ++i) {
      T value = is_member ? cells[segment * kFeatures + i] : T{};
      if constexpr (kIsMean) {
        const int32_t count = is_member ? std::max(counts[segment], 1) : 1;
        Store(static_cast<C>(value) / static_cast<C>(count), &value);
      }
      to[row * kFeatures + i] = value;
    }
  }
}

template <bool kIsMean, typename T>
JB_CPU_CLONES_OF_NARROW void GatherNarrowRows(const Problem problem, int64_t batch, int64_t row_begin, int64_t row_end,
                                              const GatherArrays<T> arrays) {
  const T* const cells = arrays.Cells(problem, batch);
  const int32_t* const counts = arrays.Counts(problem, batch);
  DispatchNarrow(problem.features, [&](auto width) __attribute__((always_inline)) {
    T* const to = arrays.d_data + batch * problem.rows * width;
    ForEachBlockOfIds(
        problem, arrays.ids, batch, row_begin, row_end,
        [&](int64_t begin, int64_t end, const int32_t* row_ids, int64_t first_segment) __attribute__((always_inline)) {
          GatherNarrow<kIsMean, width()>(cells + first_segment * width, kIsMean ? counts + first_segment : nullptr,
                                         row_ids, end - begin, problem.segments, to + begin * width);
        });
  });
}

template <bool kIsMean, typename T>
JB_CPU_CLONES void GatherWideRows(const Problem problem, int64_t batch, int64_t row_begin, int64_t row_end,
                                  const GatherArrays<T> arrays) {
  const int64_t features = problem.features;
  const T* const cells = arrays.Cells(problem, batch);
  const int32_t* const counts = arrays.Counts(problem, batch);
  const auto prefetch = [&](int64_t segment)
                            __attribute__((always_inline)) { PrefetchRow(cells + segment * features, features); };
  WriteRowsOfSegments(problem, arrays.ids, batch, row_begin, row_end, features, arrays.d_data, prefetch,
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
void GatherAll(ffi::ThreadPool& pool, const Problem& problem, const GatherArrays<T>& arrays) {
  ForEachChunkOfRows(pool, problem, arrays.d_data, sizeof(T), [&](int64_t batch, int64_t row_begin, int64_t row_end) {
    if (IsNarrow(problem.features)) {
      GatherNarrowRows<kIsMean>(problem, batch, row_begin, row_end, arrays);
    } else {
      GatherWideRows<kIsMean>(problem, batch, row_begin, row_end, arrays);
    }
  });
}

bool RunGather(ffi::ThreadPool& pool, const GatherCall& call) {
  const auto gather = [&](auto is_mean, auto tag) {
    using T = typename decltype(tag)::type;
    const GatherArrays<T> arrays{SegmentIds(call),
                                 static_cast<const T*>(call.cells),
                                 call.count,
                                 static_cast<T*>(call.rows),
                                 call.cells_are_shared,
                                 call.count_is_shared};
    GatherAll<is_mean>(pool, call.problem, arrays);
  };
  DispatchFloating(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (call.count == nullptr) {
      gather(std::false_type{}, TypeTag<BitsOf<T>>{});  // copies depend on the width of the type only
    } else {
      gather(std::true_type{}, tag);
    }
  });
  return true;
}

constexpr auto kRun = RunOnCpu<GatherCall, RunGather>;

JB_CPU_TARGET("segment_sum_backward", (HandleSumBackward<ffi::ThreadPool, kRun>),
              (BindCall<ffi::ThreadPool, 2, 1, GatherOptions>()), PlanOfGather, kNothing, "gather");
JB_CPU_TARGET("segment_mean_backward", (HandleMeanBackward<ffi::ThreadPool, kRun>),
              (BindCall<ffi::ThreadPool, 3, 1, GatherOptions>()), PlanOfGather, kNothing, "gather");

}  // namespace
}  // namespace jax_baracuda::segment
