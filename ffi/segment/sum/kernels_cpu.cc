// The CPU kernels of segment_sum, segment_mean and their gradients.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "ffi/core/target_table.h"
#include "ffi/segment/decoding.h"
#include "ffi/segment/engine/rows_cpu.h"

namespace jax_baracuda::segment {
namespace {

// Integers are summed as unsigned ones, which wrap; means are of floating numbers alone.
template <typename T>
struct Sum {
  using Element = T;
  using First = ComputeType<T>;
  using Second = NoNumber;
  static constexpr bool kRounds = kIsFloating<T>, kHoldsRuns = true;

  T* output;
  int64_t features;
  bool is_mean;

  JB_INLINE void Start(int64_t count, CellsOf<Sum> cells) const { std::fill_n(cells.first, count, First{0}); }

  JB_INLINE void Fold(const T* values, int32_t /*row*/, int64_t width, CellsOf<Sum> cells) const {
    JB_VECTORIZE
    for (int64_t i = 0; i < width; ++i) cells.first[i] += static_cast<First>(values[i]);
  }

  JB_INLINE void Merge(int64_t count, CellsOf<Sum> later, CellsOf<Sum> cells) const {
    JB_VECTORIZE
    for (int64_t i = 0; i < count; ++i) cells.first[i] += later.first[i];
  }

  JB_INLINE void Write(int64_t count, int64_t first_cell, const int32_t* counts, CellsOf<Sum> cells) const {
    T* const to = output + first_cell;
    if (!kIsFloating<T> || !is_mean) {
      JB_VECTORIZE
      for (int64_t i = 0; i < count; ++i) Store(cells.first[i], to + i);
    } else if (features == 1) {
      JB_VECTORIZE
      for (int64_t i = 0; i < count; ++i) {
        Store(cells.first[i] / static_cast<First>(std::max(counts[i], 1)), to + i);
      }
    } else {
      for (int64_t begin = 0; begin < count;) {
        const int64_t end = std::min(count, begin + features - (first_cell + begin) % features);
        const First rows = static_cast<First>(std::max(*counts++, 1));
        JB_VECTORIZE
        for (int64_t i = begin; i < end; ++i) Store(cells.first[i] / rows, to + i);
        begin = end;
      }
    }
  }
};

template <typename T>
struct GatherArrays {
  SegmentIds ids;
  const T* d_output;
  const int32_t* count;  // nullptr for a sum
  T* d_data;
  bool d_output_is_shared;
  bool count_is_shared;
};

template <typename T>
JB_INLINE void DivideRow(const T* from, int32_t count, int64_t width, T* to) {
  using C = ComputeType<T>;
  const C rows = static_cast<C>(std::max(count, 1));
  JB_VECTORIZE
  for (int64_t i = 0; i < width; ++i) Store(static_cast<C>(from[i]) / rows, to + i);
}

template <bool kIsMean, typename T>
JB_CPU_CLONES void Gather(const Problem problem, int64_t batch, int64_t row_begin, int64_t row_end,
                          const GatherArrays<T> arrays) {
  const int64_t features = problem.features;
  const T* const cells = arrays.d_output + (arrays.d_output_is_shared ? 0 : batch * problem.segments * features);
  const int32_t* const counts = arrays.count + (arrays.count_is_shared ? 0 : batch * problem.segments);
  const auto prefetch = [&](int64_t segment) __attribute__((always_inline)) {
    PrefetchRow(cells + segment * features, features);
  };
  WithWidth(features, [&](auto width) __attribute__((always_inline)) {
    WriteRowsOfSegments(problem, arrays.ids, batch, row_begin, row_end, width, arrays.d_data, prefetch,
                        [&](int64_t, int64_t segment, T* to) __attribute__((always_inline)) {
      const T* const from = cells + segment * width;
      if constexpr (kIsMean) {
        DivideRow(from, counts[segment], width, to);
      } else {
        std::memcpy(static_cast<void*>(to), from, static_cast<size_t>(width) * sizeof(T));
      }
    });
  });
}

template <bool kIsMean, typename T>
void GatherAll(ffi::ThreadPool& pool, const Problem& problem, const GatherArrays<T>& arrays) {
  ForEachChunkOfRows(pool, problem, arrays.d_data, sizeof(T),
                     [&](int64_t batch, int64_t row_begin, int64_t row_end) {
                       Gather<kIsMean>(problem, batch, row_begin, row_end, arrays);
                     });
}

template <bool kIsMean>
bool ReduceSum(ffi::ThreadPool& pool, const SumBuffers& decoded, const ffi::AnyBuffer& data,
               const ffi::AnyBuffer& segment_ids, const ffi::AnyBuffer& output, bool* has_memory) {
  const auto run = [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Sum<T> reduction{static_cast<T*>(output.untyped_data()), decoded.problem.features, kIsMean};
    AdviseHugePages(reduction.output, output.element_count() * sizeof(T));
    *has_memory = ReduceAll(pool, decoded.problem, SegmentIds{segment_ids.untyped_data(), decoded.ids_are_64_bit},
                            static_cast<const T*>(data.untyped_data()), reduction, decoded.count);
  };
  return kIsMean ? DispatchFloating(decoded.type, run) : DispatchWrapping(decoded.type, run);
}

ffi::Error SegmentSum(ffi::ThreadPool pool, ffi::AnyBuffer data, ffi::AnyBuffer segment_ids,
                      ffi::Result<ffi::AnyBuffer> output, bool /*indices_are_sorted*/, bool /*deterministic*/,
                      int64_t num_batch_dims) {
  constexpr const char* kOp = "segment_sum";
  SumBuffers decoded;
  JB_RETURN_IF_ERROR(DecodeSum(kOp, num_batch_dims, data, segment_ids, *output, nullptr, &decoded));
  bool has_memory = true;
  const bool is_supported = ReduceSum<false>(pool, decoded, data, segment_ids, *output, &has_memory);
  return Status(kOp, is_supported, has_memory, "data", data);
}

ffi::Error SegmentMean(ffi::ThreadPool pool, ffi::AnyBuffer data, ffi::AnyBuffer segment_ids,
                       ffi::Result<ffi::AnyBuffer> output, ffi::Result<ffi::AnyBuffer> count,
                       bool /*indices_are_sorted*/, bool /*deterministic*/, int64_t num_batch_dims) {
  constexpr const char* kOp = "segment_mean";
  SumBuffers decoded;
  JB_RETURN_IF_ERROR(DecodeSum(kOp, num_batch_dims, data, segment_ids, *output, &*count, &decoded));
  bool has_memory = true;
  const bool is_supported = ReduceSum<true>(pool, decoded, data, segment_ids, *output, &has_memory);
  return Status(kOp, is_supported, has_memory, "data", data);
}

ffi::Error Backward(const char* op, int64_t num_batch_dims, ffi::ThreadPool& pool, const ffi::AnyBuffer& d_output,
                    const ffi::AnyBuffer* count, const ffi::AnyBuffer& segment_ids, const ffi::AnyBuffer& d_data) {
  GatherBuffers decoded;
  JB_RETURN_IF_ERROR(DecodeGather(op, num_batch_dims, d_output, count, segment_ids, d_data, &decoded));
  const bool is_supported = DispatchFloating(decoded.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const GatherArrays<T> arrays{SegmentIds{segment_ids.untyped_data(), decoded.ids_are_64_bit},
                                 static_cast<const T*>(d_output.untyped_data()),
                                 decoded.count,
                                 static_cast<T*>(d_data.untyped_data()),
                                 decoded.d_output_is_shared,
                                 decoded.count_is_shared};
    if (count == nullptr) {
      GatherAll<false>(pool, decoded.problem, arrays);
    } else {
      GatherAll<true>(pool, decoded.problem, arrays);
    }
  });
  return Status(op, is_supported, /*has_memory=*/true, "d_output", d_output);
}

ffi::Error SegmentSumBackward(ffi::ThreadPool pool, ffi::AnyBuffer d_output, ffi::AnyBuffer segment_ids,
                              ffi::Result<ffi::AnyBuffer> d_data, int64_t num_batch_dims) {
  return Backward("segment_sum_backward", num_batch_dims, pool, d_output, nullptr, segment_ids, *d_data);
}

ffi::Error SegmentMeanBackward(ffi::ThreadPool pool, ffi::AnyBuffer d_output, ffi::AnyBuffer count,
                               ffi::AnyBuffer segment_ids, ffi::Result<ffi::AnyBuffer> d_data, int64_t num_batch_dims) {
  return Backward("segment_mean_backward", num_batch_dims, pool, d_output, &count, segment_ids, *d_data);
}

template <int kResults>
auto BindForward() {
  return BindBuffers<ffi::ThreadPool, 2, kResults>()
      .template Attr<bool>("indices_are_sorted")
      .template Attr<bool>("deterministic").template Attr<int64_t>("num_batch_dims");
}

XLA_FFI_DEFINE_HANDLER(kSum, SegmentSum, BindForward<1>());
XLA_FFI_DEFINE_HANDLER(kMean, SegmentMean, BindForward<2>());
XLA_FFI_DEFINE_HANDLER(kSumBackward, SegmentSumBackward, (BindBuffers<ffi::ThreadPool, 2, 1>()
    .Attr<int64_t>("num_batch_dims")));
XLA_FFI_DEFINE_HANDLER(kMeanBackward, SegmentMeanBackward, (BindBuffers<ffi::ThreadPool, 3, 1>()
    .Attr<int64_t>("num_batch_dims")));

template <bool kIsMean>
Plan PlanOf(const PlanParameters& parameters) {
  return PlanOfType(PlanRequest(parameters), [](auto tag, const Problem& problem) {
    return ChooseStrategy<Sum<typename decltype(tag)::type>>(problem, /*has_counts=*/kIsMean);
  });
}

JB_REGISTER_TARGET("segment_sum", kSum, PlanOf<false>, kNothing, "scan", "split_scan", "group_by_segment");
JB_REGISTER_TARGET("segment_mean", kMean, PlanOf<true>, kNothing, "scan", "split_scan", "group_by_segment");
JB_REGISTER_TARGET("segment_sum_backward", kSumBackward, PlanOfGather, kNothing, "gather");
JB_REGISTER_TARGET("segment_mean_backward", kMeanBackward, PlanOfGather, kNothing, "gather");

}  // namespace
}  // namespace jax_baracuda::segment
