// The CPU kernels of segment_softmax and its gradient.
//
// Both are a reduction of the rows and then a function of each row and its segment's cells. In the grouped way a
// segment's rows are read once from memory. In order, the rows are read once for each reduction, and the exponential is
// computed anew rather than stored in between: that is cheaper than the traffic.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>

#include "ffi/core/exp_cpu.h"
#include "ffi/segment/engine/rows_cpu.h"
#include "ffi/segment/softmax/arithmetic.h"
#include "ffi/segment/softmax/handler.h"

namespace jax_baracuda::segment {
namespace {

constexpr int64_t kNarrowFeatures = 16;       // below this, rows are too short to vectorise each by itself
constexpr int64_t kBlockNumbers = 1024;       // of a block of such rows
constexpr int64_t kSegmentNumbers = 1 << 15;  // of the rows of a segment whose weights are kept

// The maximum of each cell, or anything where a member is NaN: then the sum of its weights is NaN all the same.
template <typename T>
struct Maximum {
  using Element = T;
  using First = ComputeType<T>;
  using Second = NoNumber;
  static constexpr bool kRounds = false, kHoldsRuns = false, kFoldsBoth = false;

  First* output;

  JB_INLINE CellsOf<Maximum> ResultCells() const { return {output, nullptr}; }

  JB_INLINE void Start(int64_t count, CellsOf<Maximum> cells) const {
    std::fill_n(cells.first, count, -std::numeric_limits<First>::infinity());
  }

  template <typename U>
  JB_INLINE static void Take(const U* values, int64_t width, First* maxima) {
    JB_VECTORIZE
    for (int64_t i = 0; i < width; ++i) {
      const First value = static_cast<First>(values[i]), maximum = maxima[i];
      maxima[i] = maximum > value ? maximum : value;
    }
  }

  template <typename U>
  JB_INLINE void Fold(const U* values, int32_t /*row*/, int64_t width, CellsOf<Maximum> cells) const {
    Take(values, width, cells.first);
  }

  JB_INLINE void Merge(int64_t count, CellsOf<Maximum> later, CellsOf<Maximum> cells) const {
    Take(later.first, count, cells.first);
  }

  JB_INLINE void Write(int64_t count, int64_t first_cell, const int32_t* /*counts*/, CellsOf<Maximum> cells) const {
    WriteNumbers(cells.first, count, output + first_cell);
  }
};

// Sums of numbers that are computed from rows.
template <typename C>
struct ComputedSum {
  using First = C;
  using Second = NoNumber;
  static constexpr bool kRounds = true, kHoldsRuns = false;

  C* output;

  JB_INLINE CellsOf<ComputedSum> ResultCells() const { return {output, nullptr}; }

  JB_INLINE void Start(int64_t count, CellsOf<ComputedSum> cells) const { std::fill_n(cells.first, count, C{0}); }

  JB_INLINE void Merge(int64_t count, CellsOf<ComputedSum> later, CellsOf<ComputedSum> cells) const {
    AddNumbers(later.first, count, cells.first);
  }

  JB_INLINE void Write(int64_t count, int64_t first_cell, const int32_t* /*counts*/, CellsOf<ComputedSum> cells) const {
    WriteNumbers(cells.first, count, output + first_cell);
  }
};

template <typename T, typename C>
JB_INLINE void Subtract(const T* values, const C* subtrahends, int64_t width, C* differences) {
  JB_VECTORIZE
  for (int64_t i = 0; i < width; ++i) differences[i] = static_cast<C>(values[i]) - subtrahends[i];
}

// exp(logit - maximum) for one row.
template <typename T, typename C>
JB_INLINE void WeighRow(const T* logits, const C* maxima, int64_t width, C* weights) {
  ForEachPart(logits, width, [&](int64_t begin, int64_t count, const auto* numbers) __attribute__((always_inline)) {
    JB_VECTORIZE
    for (int64_t i = 0; i < count; ++i) {
      weights[begin + i] = Exp(static_cast<C>(numbers[i]) - maxima[begin + i]);
    }
  });
}

// For blocks of rows of any width, so that it is compiled once.
template <typename C>
JB_CPU_CLONES void ExpAll(int64_t count, C* numbers) {
  for (int64_t i = 0; i < count; ++i) numbers[i] = Exp(numbers[i]);
}

template <typename T, typename C>
JB_INLINE void WriteQuotients(const C* weights, const C* sums, int64_t width, T* to) {
  StoreEach(width, to, [&](int64_t i) __attribute__((always_inline)) { return weights[i] / sums[i]; });
}

template <typename T>
struct SoftmaxArrays {
  SegmentIds ids;
  const T* logits;
  T* probabilities;
};

// Calls use(row, segment, weights) for the rows of ForEachBlockOfRows; segment is -1, and the weights mean nothing, where
// a row is in none of `segments`. `maxima` are those of a batch element.
template <bool kAreListed, typename T, typename C, typename Use>
JB_INLINE void ForEachWeighedRow(const Problem& problem, const SoftmaxArrays<T>& arrays, int64_t batch,
                                 int64_t row_begin, int64_t row_end, SegmentRange segments, int64_t width,
                                 const C* maxima, C* block, const Use& use) {
  const T* const logits = arrays.logits + problem.DataRow(batch, 0) * width;
  const int64_t rows_at_once = std::max<int64_t>(1, kBlockNumbers / width);
  ForEachBlockOfRows<kAreListed>(
      problem, arrays.ids, batch, row_begin, row_end, segments,
      [&](int64_t num_rows, const auto& row, const auto& segment) __attribute__((always_inline)) {
        if (width >= kNarrowFeatures) {
          for (int64_t i = 0; i < num_rows; ++i) {
            const C* const of_segment = maxima + segment(i) * width;
            if (segment(i) >= 0) WeighRow(logits + row(i) * width, of_segment, width, block);
            use(row(i), segment(i), block);
          }
          return;
        }
        for (int64_t begin = 0; begin < num_rows; begin += rows_at_once) {
          const int64_t end = std::min(begin + rows_at_once, num_rows);
          C* difference = block;
          for (int64_t i = begin; i < end; ++i, difference += width) {
            const C* const of_segment = maxima + std::max<int64_t>(segment(i), 0) * width;
            Subtract(logits + row(i) * width, of_segment, width, difference);
          }
          ExpAll((end - begin) * width, block);
          const C* weights = block;
          for (int64_t i = begin; i < end; ++i, weights += width) use(row(i), segment(i), weights);
        }
      });
}

// Into the cells of `segments`.
template <bool kAreListed, typename T, typename C>
JB_CPU_CLONES void SumWeightsInOrder(const Problem problem, const SoftmaxArrays<T> arrays, int64_t batch,
                                     int64_t row_begin, int64_t row_end, SegmentRange segments, const C* maxima,
                                     C* block, C* sums) {
  std::fill_n(sums, (segments.end - segments.begin) * problem.features, C{0});
  WithWidth(problem.features, [&](auto width) __attribute__((always_inline)) {
    ForEachWeighedRow<kAreListed>(problem, arrays, batch, row_begin, row_end, segments, width, maxima, block,
                                  [&](int64_t, int64_t segment, const C* weights) __attribute__((always_inline)) {
                                    if (segment >= 0)
                                      AddNumbers(weights, width, sums + (segment - segments.begin) * width);
                                  });
  });
}

template <typename T, typename C>
JB_CPU_CLONES void WriteProbabilitiesInOrder(const Problem problem, const SoftmaxArrays<T> arrays, int64_t batch,
                                             int64_t row_begin, int64_t row_end, const C* maxima, const C* sums,
                                             C* block) {
  T* const probabilities = arrays.probabilities + batch * problem.rows * problem.features;
  WithWidth(problem.features, [&](auto width) __attribute__((always_inline)) {
    ForEachWeighedRow<false>(problem, arrays, batch, row_begin, row_end, SegmentRange{0, problem.segments}, width,
                             maxima, block,
                             [&](int64_t row, int64_t segment, const C* weights) __attribute__((always_inline)) {
                               T* const to = probabilities + row * width;
                               if (segment >= 0) {
                                 WriteQuotients(weights, sums + segment * width, width, to);
                               } else {
                                 WriteZeros(to, width);
                               }
                             });
  });
}

// Rows of a result that are written in no order, each once.
template <typename T>
class ScatteredRows {
 public:
  ScatteredRows(int64_t width, bool is_streamed) : width_(width), is_streamed_(is_streamed), buffer_(width) {}

  template <typename Write>
  JB_INLINE void Put(T* row, const Write& write) const {
    T* const computed = is_streamed_ ? buffer_.At(row) : nullptr;
    if (computed == nullptr) return write(row);
    write(computed);
    StreamLines(row, computed, width_ * static_cast<int64_t>(sizeof(T)));
  }

 private:
  int64_t width_;
  bool is_streamed_;
  StreamBuffer<T> buffer_;
};

template <typename T>
JB_CPU_CLONES bool SoftmaxGrouped(const Problem problem, const Block block, const GroupedRows& grouped,
                                  const SoftmaxArrays<T> arrays, bool is_streamed) {
  using C = ComputeType<T>;
  const int64_t features = problem.features, width = block.feature_end - block.feature_begin;
  const auto memory = Allocate<C>(2 * width), weights = Allocate<C>(std::max(kSegmentNumbers, width));
  if (memory == nullptr || weights == nullptr) return false;
  C* const maxima = memory.get();
  C* const sums = maxima + width;
  const T* const logits = arrays.logits + problem.DataRow(block.batch, 0) * features + block.feature_begin;
  T* const results = arrays.probabilities + block.batch * problem.rows * features + block.feature_begin;
  const ScatteredRows<T> scattered(width, is_streamed);
  const Maximum<T> maximum{};
  const auto prefetch = [&](int32_t row)
                            __attribute__((always_inline)) { PrefetchRow(logits + row * features, width); };
  for (int64_t segment = block.segment_begin; segment < block.segment_end; ++segment) {
    const int64_t group = segment - block.segment_begin;
    const int32_t begin = grouped.Begin(group), end = grouped.End(group);
    const bool are_kept = (end - begin) * width <= kSegmentNumbers;
    maximum.Start(width, {maxima, nullptr});
    ForEachGroupedRow(grouped, begin, end, prefetch, [&](int32_t row) __attribute__((always_inline)) {
      FoldRow(maximum, logits + row * features, row, width, {maxima, nullptr});
    });
    std::fill_n(sums, width, C{0});
    C* next = weights.get();
    for (int32_t place = begin; place < end; ++place) {
      WeighRow(logits + grouped[place] * features, maxima, width, next);
      AddNumbers(next, width, sums);
      if (are_kept) next += width;
    }
    next = weights.get();
    for (int32_t place = begin; place < end; ++place) {
      const int64_t first = grouped[place] * features;
      if (!are_kept) WeighRow(logits + first, maxima, width, next);
      scattered.Put(results + first,
                    [&](T* to) __attribute__((always_inline)) { WriteQuotients(next, sums, width, to); });
      if (are_kept) next += width;
    }
  }
  WriteDroppedRows(problem, block, arrays.ids, arrays.probabilities);
  FinishStreaming();
  return true;
}

template <typename T>
struct GradientArrays {
  SegmentIds ids;
  const T* probabilities;
  const T* d_probabilities;
  bool d_probabilities_are_shared;
  T* d_logits;

  const T* RowsOfProbabilities(const Problem& problem, int64_t batch) const {
    return probabilities + problem.DataRow(batch, 0) * problem.features;
  }
  const T* RowsOfCotangents(const Problem& problem, int64_t batch) const {
    return d_probabilities + (d_probabilities_are_shared ? 0 : batch * problem.rows * problem.features);
  }
};

template <typename T, typename C>
JB_INLINE void AddProducts(const T* probabilities, const T* d_probabilities, int64_t width, C* sums) {
  ForEachPart(probabilities, d_probabilities, width,
              [&](int64_t begin, int64_t count, const auto* x, const auto* y) __attribute__((always_inline)) {
                JB_VECTORIZE
                for (int64_t i = 0; i < count; ++i) sums[begin + i] += static_cast<C>(x[i]) * static_cast<C>(y[i]);
              });
}

template <typename T, typename C>
JB_INLINE void GradientOfRow(const T* probabilities, const T* d_probabilities, const C* sums, int64_t width, T* to) {
  ForEachPart(probabilities, d_probabilities, width,
              [&](int64_t begin, int64_t count, const auto* x, const auto* y) __attribute__((always_inline)) {
                StoreEach(count, to + begin, [&](int64_t i) __attribute__((always_inline)) {
                  return SoftmaxGradient(static_cast<C>(x[i]), static_cast<C>(y[i]), sums[begin + i]);
                });
              });
}

template <bool kAreListed, typename T, typename C>
JB_CPU_CLONES void SumProductsInOrder(const Problem problem, const GradientArrays<T> arrays, int64_t batch,
                                      int64_t row_begin, int64_t row_end, SegmentRange segments, C* sums) {
  const int64_t num_cells = (segments.end - segments.begin) * problem.features;
  std::fill_n(sums, num_cells, C{0});
  const T* const probabilities = arrays.RowsOfProbabilities(problem, batch);
  const T* const d_probabilities = arrays.RowsOfCotangents(problem, batch);
  const bool are_far = AreFar(num_cells, sizeof(C));
  const auto prefetch = [&](int64_t /*row*/, int64_t segment) __attribute__((always_inline)) {
    if (are_far) __builtin_prefetch(sums + (segment - segments.begin) * problem.features, /*rw=*/1);
  };
  WithWidth(problem.features, [&](auto width) __attribute__((always_inline)) {
    ForEachMember<kAreListed>(problem, arrays.ids, batch, row_begin, row_end, segments, prefetch,
                              [&](int64_t row, int64_t segment) __attribute__((always_inline)) {
                                AddProducts(probabilities + row * width, d_probabilities + row * width, width,
                                            sums + (segment - segments.begin) * width);
                              });
  });
}

template <typename T, typename C>
JB_CPU_CLONES void WriteGradientInOrder(const Problem problem, const GradientArrays<T> arrays, int64_t batch,
                                        int64_t row_begin, int64_t row_end, const C* sums) {
  const T* const probabilities = arrays.RowsOfProbabilities(problem, batch);
  const T* const d_probabilities = arrays.RowsOfCotangents(problem, batch);
  const auto prefetch = [&](int64_t segment) __attribute__((always_inline)) {
    PrefetchRow(sums + segment * problem.features, problem.features);
  };
  WithWidth(problem.features, [&](auto width) __attribute__((always_inline)) {
    WriteRowsOfSegments(problem, arrays.ids, batch, row_begin, row_end, width, arrays.d_logits, prefetch,
                        [&](int64_t row, int64_t segment, T* to) __attribute__((always_inline)) {
                          GradientOfRow(probabilities + row * width, d_probabilities + row * width,
                                        sums + segment * width, width, to);
                        });
  });
}

template <typename T>
JB_CPU_CLONES bool GradientGrouped(const Problem problem, const Block block, const GroupedRows& grouped,
                                   const GradientArrays<T> arrays, bool is_streamed) {
  using C = ComputeType<T>;
  const int64_t features = problem.features, width = block.feature_end - block.feature_begin;
  const auto sums = Allocate<C>(width);
  if (sums == nullptr) return false;
  const T* const probabilities = arrays.RowsOfProbabilities(problem, block.batch) + block.feature_begin;
  const T* const d_probabilities = arrays.RowsOfCotangents(problem, block.batch) + block.feature_begin;
  T* const results = arrays.d_logits + block.batch * problem.rows * features + block.feature_begin;
  const ScatteredRows<T> scattered(width, is_streamed);
  const auto prefetch = [&](int32_t row) __attribute__((always_inline)) {
    PrefetchRow(probabilities + row * features, width);
    PrefetchRow(d_probabilities + row * features, width);
  };
  for (int64_t segment = block.segment_begin; segment < block.segment_end; ++segment) {
    const int64_t group = segment - block.segment_begin;
    const int32_t begin = grouped.Begin(group), end = grouped.End(group);
    std::fill_n(sums.get(), width, C{0});
    ForEachGroupedRow(grouped, begin, end, prefetch, [&](int32_t row) __attribute__((always_inline)) {
      AddProducts(probabilities + row * features, d_probabilities + row * features, width, sums.get());
    });
    for (int32_t place = begin; place < end; ++place) {
      const int64_t first = grouped[place] * features;
      scattered.Put(results + first, [&](T* to) __attribute__((always_inline)) {
        GradientOfRow(probabilities + first, d_probabilities + first, sums.get(), width, to);
      });
    }
  }
  WriteDroppedRows(problem, block, arrays.ids, arrays.d_logits);
  FinishStreaming();
  return true;
}

// Of both directions; `states` is the number of tables of cells that rows in order need.
template <typename T>
Strategy ChooseStrategy(const Problem& problem, int64_t states) {
  using C = ComputeType<T>;
  const int64_t row_bytes = problem.features * static_cast<int64_t>(sizeof(T));
  const int64_t result_bytes = problem.batch * problem.rows * row_bytes;
  if (result_bytes == 0) return Strategy::kNothing;
  if (problem.segments == 0) return Strategy::kFill;
  if (ReducesInOrder<T>(problem, row_bytes, states * sizeof(C))) return ChooseScan<ComputedSum<C>>(problem, row_bytes);
  return result_bytes >= kMinStreamedBytes ? Strategy::kStreamedGroups : Strategy::kGroupBySegment;
}

// Calls in_order(bytes of a row) or grouped(block, grouped rows, is_streamed); returns false if there is no memory.
template <typename T>
bool ForEachSegment(ffi::ThreadPool& pool, const Problem& problem, SegmentIds ids, int64_t states, T* result,
                    FunctionRef<bool(int64_t)> in_order,
                    FunctionRef<bool(const Block&, const GroupedRows&, bool)> grouped) {
  const Strategy strategy = ChooseStrategy<T>(problem, states);
  if (strategy == Strategy::kNothing) return true;
  const int64_t row_bytes = problem.features * static_cast<int64_t>(sizeof(T));
  const int64_t result_bytes = problem.batch * problem.rows * row_bytes;
  AdviseHugePages(result, result_bytes);
  if (strategy == Strategy::kFill) {
    WriteZeroBytes(pool, result, result_bytes);
    return true;
  }
  if (strategy == Strategy::kScan || strategy == Strategy::kSplitScan) return in_order(row_bytes);
  const Blocking blocking(problem, sizeof(T), NumThreads(pool, result_bytes));
  return ForEachGroupedBlock(pool, problem, blocking, ids, [&](const Block& block, const GroupedRows& rows) {
    return grouped(block, rows, strategy == Strategy::kStreamedGroups);
  });
}

constexpr int64_t kForwardStates = 2, kBackwardStates = 1;

template <typename T>
bool Softmax(ffi::ThreadPool& pool, const Problem& problem, const SoftmaxArrays<T>& arrays) {
  using C = ComputeType<T>;
  const auto in_order = [&](int64_t row_bytes) {
    const int64_t cells_per_batch = problem.segments * problem.features;
    const auto maxima = Allocate<C>(problem.batch * cells_per_batch);
    const auto sums = Allocate<C>(problem.batch * cells_per_batch);
    if (maxima == nullptr || sums == nullptr) return false;
    const Maximum<T> maximum{maxima.get()};
    if (!Scan(pool, problem, arrays.ids, DirectRows<T>{arrays.logits}, maximum)) return false;
    std::atomic<bool> has_memory{true};
    const auto with_block = [&](const auto& body) {
      const auto block = Allocate<C>(std::max(kBlockNumbers, problem.features));
      if (block == nullptr) {
        has_memory = false;
      } else {
        body(block.get());
      }
    };
    const auto fold_weights = [&](int64_t batch, int64_t row_begin, int64_t row_end, SegmentRange segments,
                                  bool are_listed, CellsOf<ComputedSum<C>> cells, int32_t*) {
      with_block([&](C* block) {
        WithConstant(are_listed, [&](auto listed) {
          SumWeightsInOrder<listed>(problem, arrays, batch, row_begin, row_end, segments,
                                    maxima.get() + batch * cells_per_batch, block, cells.first);
        });
      });
    };
    const ComputedSum<C> sum{sums.get()};
    if (!Scan<ComputedSum<C>>(pool, problem, arrays.ids, row_bytes, kMaxSegmentParts, sum, nullptr, fold_weights))
      return false;
    ForEachChunkOfRows(pool, problem, arrays.probabilities, sizeof(T),
                       [&](int64_t batch, int64_t row_begin, int64_t row_end) {
                         const int64_t first_cell = batch * cells_per_batch;
                         with_block([&](C* block) {
                           WriteProbabilitiesInOrder(problem, arrays, batch, row_begin, row_end,
                                                     maxima.get() + first_cell, sums.get() + first_cell, block);
                         });
                       });
    return has_memory.load();
  };
  return ForEachSegment(pool, problem, arrays.ids, kForwardStates, arrays.probabilities, in_order,
                        [&](const Block& block, const GroupedRows& grouped, bool is_streamed) {
                          return SoftmaxGrouped(problem, block, grouped, arrays, is_streamed);
                        });
}

template <typename T>
bool SoftmaxGradients(ffi::ThreadPool& pool, const Problem& problem, const GradientArrays<T>& arrays) {
  using C = ComputeType<T>;
  const auto in_order = [&](int64_t row_bytes) {
    const int64_t cells_per_batch = problem.segments * problem.features;
    const auto sums = Allocate<C>(problem.batch * cells_per_batch);
    if (sums == nullptr) return false;
    const auto fold_products = [&](int64_t batch, int64_t row_begin, int64_t row_end, SegmentRange segments,
                                   bool are_listed, CellsOf<ComputedSum<C>> cells, int32_t*) {
      WithConstant(are_listed, [&](auto listed) {
        SumProductsInOrder<listed>(problem, arrays, batch, row_begin, row_end, segments, cells.first);
      });
    };
    const ComputedSum<C> sum{sums.get()};
    if (!Scan<ComputedSum<C>>(pool, problem, arrays.ids, row_bytes, kMaxSegmentParts, sum, nullptr, fold_products))
      return false;
    ForEachChunkOfRows(
        pool, problem, arrays.d_logits, sizeof(T), [&](int64_t batch, int64_t row_begin, int64_t row_end) {
          WriteGradientInOrder(problem, arrays, batch, row_begin, row_end, sums.get() + batch * cells_per_batch);
        });
    return true;
  };
  return ForEachSegment(pool, problem, arrays.ids, kBackwardStates, arrays.d_logits, in_order,
                        [&](const Block& block, const GroupedRows& grouped, bool is_streamed) {
                          return GradientGrouped(problem, block, grouped, arrays, is_streamed);
                        });
}

bool RunSoftmax(ffi::ThreadPool& pool, const SoftmaxCall& call) {
  bool has_memory = true;
  DispatchFloating(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* const inputs[] = {static_cast<const T*>(call.inputs[0]), static_cast<const T*>(call.inputs[1])};
    T* const output = static_cast<T*>(call.output);
    if (call.is_backward) {
      const GradientArrays<T> arrays{SegmentIds(call), inputs[0], inputs[1], call.is_shared[1], output};
      has_memory = SoftmaxGradients(pool, call.problem, arrays);
    } else {
      has_memory = Softmax(pool, call.problem, SoftmaxArrays<T>{SegmentIds(call), inputs[0], output});
    }
  });
  return has_memory;
}

Plan PlanSoftmax(const SoftmaxCall& call) {
  return PlanOfType(call, JB_DISPATCH(DispatchFloating), [&](auto tag) {
    return ChooseStrategy<typename decltype(tag)::type>(call.problem,
                                                        call.is_backward ? kBackwardStates : kForwardStates);
  });
}

constexpr auto kRun = RunOnCpu<SoftmaxCall, RunSoftmax>;

#define JB_SOFTMAX_STRATEGIES kNothing, "fill", "scan", "split_scan", "group_by_segment", "group_by_segment_streamed"

JB_CPU_TARGET("segment_softmax", (HandleSoftmax<ffi::ThreadPool, kRun>),
              (BindCall<ffi::ThreadPool, 2, 1, SoftmaxOptions>()), (PlanOf<PlanSoftmax, SoftmaxCallOf<false>>),
              JB_SOFTMAX_STRATEGIES);
JB_CPU_TARGET("segment_softmax_backward", (HandleSoftmaxBackward<ffi::ThreadPool, kRun>),
              (BindCall<ffi::ThreadPool, 3, 1, SoftmaxOptions>()), (PlanOf<PlanSoftmax, SoftmaxCallOf<true>>),
              JB_SOFTMAX_STRATEGIES);

}  // namespace
}  // namespace jax_baracuda::segment
