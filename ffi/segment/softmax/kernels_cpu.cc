// The CPU kernels of segment_softmax and its gradient.
//
// In order, the rows are reduced to cells, and then each row is computed from its numbers and its segment's cells.
// Grouped by segment, the rows of one segment after the other are reduced and computed, while they are in a near cache.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <type_traits>

#include "ffi/core/exp_cpu.h"
#include "ffi/segment/engine/rows_cpu.h"
#include "ffi/segment/logsumexp/handler.h"
#include "ffi/segment/softmax/handler.h"
#include "ffi/segment/sum/reduction_cpu.h"

namespace jax_baracuda::segment {
namespace {

constexpr int64_t kBlockNumbers = 1024;       // numbers of rows in order that are computed together
constexpr int64_t kSegmentNumbers = 1 << 15;  // largest segment whose weights are kept, in numbers

template <typename T>
int64_t ResultBytes(const SoftmaxCall& call) {
  return call.problem.batch * call.problem.rows * call.problem.features * static_cast<int64_t>(sizeof(T));
}

// Some neighbouring features of the rows of a block, which are contiguous: a block of several rows has all features.
struct NumberBlock {
  RowBlock rows;
  uint64_t num_segments;
  int64_t first_cell;       // of the batch element, and of the features
  int64_t features, width;  // of a row, and of those in the block

  int64_t count() const { return rows.count * width; }
  JB_INLINE bool IsMember(int64_t row) const { return static_cast<uint64_t>(rows.ids[row]) < num_segments; }
  // The first cell of a row's segment; an arbitrary one for a dropped row.
  JB_INLINE int64_t Cell(int64_t row) const {
    return first_cell + (IsMember(row) ? rows.first_segment + rows.ids[row] : 0) * features;
  }
};

// Calls body(batch, first, block) for blocks of the numbers of a result. `first` is the index of a block's first number in
// the batch element.
template <typename Body>
void ForEachNumberBlock(ffi::ThreadPool& pool, const SoftmaxCall& call, int64_t element_bytes, const Body& body) {
  const Problem& problem = call.problem;
  const int64_t features = problem.features, width = std::min(features, kBlockNumbers);
  ForEachBlockOfResult(pool, problem, SegmentIds(call), call.output, element_bytes, kBlockNumbers / width,
                       [&](int64_t batch, const RowBlock& rows) {
                         for (int64_t begin = 0; begin < features; begin += width) {
                           const NumberBlock block{rows, static_cast<uint64_t>(problem.segments),
                                                   batch * problem.segments * features + begin, features,
                                                   std::min(width, features - begin)};
                           body(batch, rows.first_row * features + begin, block);
                         }
                       });
}

// An array [batch or 1, rows, features].
template <typename T>
struct RowArray {
  const T* rows;
  bool is_shared;

  RowArray(const SoftmaxCall& call, int index)
      : rows(static_cast<const T*>(call.inputs[index])), is_shared(call.is_shared[index]) {}

  const T* OfBatch(const Problem& problem, int64_t batch) const {
    return rows + (is_shared ? 0 : batch * problem.rows * problem.features);
  }

  // `count` numbers from `first` on, as ComputeType<T>: in place, or converted into `memory`.
  const ComputeType<T>* Numbers(const Problem& problem, int64_t batch, int64_t first, int64_t count,
                                ComputeType<T>* memory) const {
    const T* const from = OfBatch(problem, batch) + first;
    if constexpr (std::is_same_v<T, ComputeType<T>>) {
      return from;
    } else {
      Widen(from, count, memory);
      return memory;
    }
  }
};

// Calls compute(to) to write `count` numbers of a result. If T is not its own ComputeType, they are rounded.
template <typename T, typename Compute>
void WriteComputed(int64_t count, T* result, const Compute& compute) {
  if constexpr (std::is_same_v<T, ComputeType<T>>) {
    compute(result);
  } else {
    ComputeType<T> numbers[kBlockNumbers];
    compute(numbers);
    Narrow(numbers, count, result);
  }
}

// The width of rows is not a constant, so that this is compiled once.
template <typename C>
JB_CPU_CLONES void ExpAll(int64_t count, C* numbers) {
  JB_VECTORIZE
  for (int64_t i = 0; i < count; ++i) numbers[i] = Exp(numbers[i]);
}

// logit - maximum for the rows at the offsets of a block; arbitrary for dropped rows.
template <typename C>
JB_CPU_CLONES void SubtractMaxima(const NumberBlock block, const C* logits, const C* maxima, C* to) {
  WithWidth(block.width, [&](auto width) __attribute__((always_inline)) {
    for (int64_t row = 0; row < block.rows.count; ++row) {
      const C* const of_segment = maxima + block.Cell(row);
      const C* const of_row = logits + block.rows.offsets[row] * width;
      StoreEach(width, to + row * width,
                [&](int64_t i) __attribute__((always_inline)) { return of_row[i] - of_segment[i]; });
    }
  });
}

// weight / total; 0 for dropped rows.
template <typename C>
JB_CPU_CLONES void DivideByTotals(const NumberBlock block, const C* weights, const C* totals, C* to) {
  WithWidth(block.width, [&](auto width) __attribute__((always_inline)) {
    for (int64_t row = 0; row < block.rows.count; ++row) {
      const C* const of_segment = totals + block.Cell(row);
      if (block.IsMember(row)) {
        StoreEach(width, to + row * width,
                  [&](int64_t i) __attribute__((always_inline)) { return weights[row * width + i] / of_segment[i]; });
      } else {
        WriteZeros(to + row * width, width);
      }
    }
  });
}

// probability * (cotangent - sum); 0 for dropped rows.
template <typename C>
JB_CPU_CLONES void ComputeGradient(const NumberBlock block, const C* probabilities, const C* cotangents, const C* sums,
                                   C* to) {
  WithWidth(block.width, [&](auto width) __attribute__((always_inline)) {
    for (int64_t row = 0; row < block.rows.count; ++row) {
      const C* const of_segment = sums + block.Cell(row);
      if (block.IsMember(row)) {
        StoreEach(width, to + row * width, [&](int64_t i) __attribute__((always_inline)) {
          return probabilities[row * width + i] * (cotangents[row * width + i] - of_segment[i]);
        });
      } else {
        WriteZeros(to + row * width, width);
      }
    }
  });
}

// The sums of the products of two arrays.
template <typename T>
struct ProductSum {
  using Element = T;
  using First = ComputeType<T>;
  using Second = NoNumber;
  using Narrow = std::conditional_t<std::is_same_v<T, First>, ProductSum, Sum<First>>;
  static constexpr bool kRounds = true;

  First* output;
  const T *first = nullptr, *second = nullptr;  // the arrays of a batch element

  JB_INLINE CellsOf<ProductSum> ResultCells() const { return {output, nullptr}; }

  JB_INLINE void Start(int64_t count, CellsOf<ProductSum> cells) const { std::fill_n(cells.first, count, First{0}); }

  // Calls body(begin, count, x, y) for the numbers of both arrays. `values` points into the first one.
  template <typename Body>
  JB_INLINE void ForEachPair(const T* values, int64_t count, const Body& body) const {
    ForEachPart(values, second + (values - first), count, body);
  }

  JB_INLINE void Fold(const T* values, int32_t /*row*/, int64_t width, CellsOf<ProductSum> cells) const {
    ForEachPair(values, width,
                [&](int64_t begin, int64_t count, const auto* x, const auto* y) __attribute__((always_inline)) {
                  First* const sums = cells.first + begin;
                  JB_VECTORIZE
                  for (int64_t i = 0; i < count; ++i) sums[i] += static_cast<First>(x[i]) * static_cast<First>(y[i]);
                });
  }

  JB_INLINE Narrow ForNarrow() const { return {}; }
  void Convert(const T* from, int64_t count, First* to) const { Multiply(*this, from, count, to); }

  JB_CPU_CLONES static void Multiply(const ProductSum arrays, const T* values, int64_t count, First* to) {
    arrays.ForEachPair(values, count,
                       [&](int64_t begin, int64_t part, const auto* x, const auto* y) __attribute__((always_inline)) {
                         First* const products = to + begin;
                         JB_VECTORIZE
                         for (int64_t i = 0; i < part; ++i) {
                           products[i] = static_cast<First>(x[i]) * static_cast<First>(y[i]);
                         }
                       });
  }

  JB_INLINE void Merge(int64_t count, CellsOf<ProductSum> later, CellsOf<ProductSum> cells) const {
    AddNumbers(later.first, count, cells.first);
  }

  JB_INLINE void Write(int64_t count, int64_t first_cell, const int32_t* /*counts*/, CellsOf<ProductSum> cells) const {
    WriteNumbers(cells.first, count, output + first_cell);
  }
};

template <typename T>
class ProductReduction final : public TypedReduction<ProductSum<T>> {
 public:
  ProductReduction(const SoftmaxCall& call, ComputeType<T>* sums)
      : TypedReduction<ProductSum<T>>(call.problem, MaxBlockRows<ProductSum<T>>(call.problem),
                                      /*splits_features=*/true, ProductSum<T>{sums}),
        probabilities_(call, 0),
        cotangents_(call, 1) {}

  void Fold(const RowBlock& block, const FoldTarget& target) const override {
    const Problem& problem = this->problem;
    ProductSum<T> of_batch = this->reduction;
    of_batch.first = probabilities_.OfBatch(problem, target.batch);
    of_batch.second = cotangents_.OfBatch(problem, target.batch);
    FoldOwnRows(block, of_batch.first + block.first_row * problem.features + target.feature_begin, problem.features,
                of_batch, target);
  }

 private:
  const RowArray<T> probabilities_, cotangents_;
};

// Folds a row into maxima; arbitrary ones if a number is NaN, because then the total of the weights is NaN.
template <typename T, typename C>
JB_INLINE void TakeMaxima(const T* logits, int64_t width, C* maxima) {
  ForEachPart(logits, width, [&](int64_t begin, int64_t count, const auto* numbers) __attribute__((always_inline)) {
    JB_VECTORIZE
    for (int64_t i = 0; i < count; ++i) {
      const C value = static_cast<C>(numbers[i]), maximum = maxima[begin + i];
      maxima[begin + i] = maximum > value ? maximum : value;
    }
  });
}

// The maximum of each cell; arbitrary if a member is NaN, because the sum of its weights is NaN anyway.
template <typename T>
struct Maximum {
  using Element = T;
  using First = ComputeType<T>;
  using Second = NoNumber;
  using Narrow = Maximum<First>;
  static constexpr bool kRounds = false;

  First* output = nullptr;

  JB_INLINE CellsOf<Maximum> ResultCells() const { return {output, nullptr}; }

  JB_INLINE void Start(int64_t count, CellsOf<Maximum> cells) const {
    std::fill_n(cells.first, count, -std::numeric_limits<First>::infinity());
  }

  JB_INLINE void Fold(const T* values, int32_t /*row*/, int64_t width, CellsOf<Maximum> cells) const {
    TakeMaxima(values, width, cells.first);
  }

  JB_INLINE Narrow ForNarrow() const { return {}; }
  void Convert(const T* from, int64_t count, First* to) const { Widen(from, count, to); }

  JB_INLINE void Merge(int64_t count, CellsOf<Maximum> later, CellsOf<Maximum> cells) const {
    TakeMaxima(later.first, count, cells.first);
  }

  JB_INLINE void Write(int64_t count, int64_t first_cell, const int32_t* /*counts*/, CellsOf<Maximum> cells) const {
    WriteNumbers(cells.first, count, output + first_cell);
  }
};

// The totals of exp(logit - maximum).
template <typename T>
class WeightTotals final : public TypedReduction<Sum<ComputeType<T>>> {
 public:
  using C = ComputeType<T>;

  WeightTotals(const SoftmaxCall& call, const C* maxima, C* totals)
      : TypedReduction<Sum<C>>(call.problem, kBlockNumbers / call.problem.features, /*splits_features=*/false,
                               Sum<C>{totals}),
        logits_(call, 0),
        maxima_(maxima) {}

  void Fold(const RowBlock& block, const FoldTarget& target) const override {
    if (block.count == 0) return;
    const Problem& problem = this->problem;
    const int64_t features = problem.features, count = (block.offsets[block.count - 1] + 1) * features;
    C numbers[kBlockNumbers], weights[kBlockNumbers];
    const C* const logits = logits_.Numbers(problem, target.batch, block.first_row * features, count, numbers);
    const NumberBlock all{block, target.num_segments, target.batch * problem.segments * features, features, features};
    SubtractMaxima(all, logits, maxima_, static_cast<C*>(weights));
    ExpAll(all.count(), static_cast<C*>(weights));
    FoldRows(block, kAllOffsets.values, weights, this->reduction, target);
  }

 private:
  const RowArray<T> logits_;
  const C* const maxima_;
};

// Reduces rows in order to maxima and totals. Of rows whose width is no multiple of 4, exponentials vectorise only over
// rows, and so the maxima come first. Returns false if memory allocation fails.
template <typename T, typename C>
bool ReduceInOrder(ffi::ThreadPool& pool, const SoftmaxCall& call, C* maxima, C* totals) {
  if (IsNarrow(call.problem.features) && call.problem.features % 4 != 0) {
    const SegmentIds ids(call);
    return Scan(pool, ids, DirectReduction(call.problem, call.inputs[0], Maximum<T>{maxima})) &&
           Scan(pool, ids, WeightTotals<T>(call, maxima, totals));
  }
  auto reduction = call.ReductionAs<LogSumExpCall>();
  reduction.maxima = maxima;
  reduction.totals = totals;
  return RunLogSumExp(pool, reduction);
}

template <typename T>
bool SoftmaxInOrder(ffi::ThreadPool& pool, const SoftmaxCall& call) {
  using C = ComputeType<T>;
  const Problem& problem = call.problem;
  const int64_t cells = problem.batch * problem.segments * problem.features;
  const auto states = Allocate<C>(2 * cells);
  if (states == nullptr) return false;
  const C *const maxima = states.get(), *const totals = maxima + cells;
  if (!ReduceInOrder<T>(pool, call, states.get(), states.get() + cells)) return false;
  const RowArray<T> logits(call, 0);
  T* const result = static_cast<T*>(call.output);
  ForEachNumberBlock(pool, call, sizeof(T), [&](int64_t batch, int64_t first, const NumberBlock& block) {
    C numbers[kBlockNumbers], weights[kBlockNumbers];
    SubtractMaxima(block, logits.Numbers(problem, batch, first, block.count(), numbers), maxima,
                   static_cast<C*>(weights));
    ExpAll(block.count(), static_cast<C*>(weights));
    WriteComputed(block.count(), result + batch * problem.rows * problem.features + first,
                  [&](C* to) { DivideByTotals(block, static_cast<const C*>(weights), totals, to); });
  });
  return true;
}

template <typename T>
bool GradientsInOrder(ffi::ThreadPool& pool, const SoftmaxCall& call) {
  using C = ComputeType<T>;
  const Problem& problem = call.problem;
  const auto sums = Allocate<C>(problem.batch * problem.segments * problem.features);
  if (sums == nullptr || !ReduceAll(pool, SegmentIds(call), ProductReduction<T>(call, sums.get()))) return false;
  const RowArray<T> probabilities(call, 0), cotangents(call, 1);
  T* const result = static_cast<T*>(call.output);
  ForEachNumberBlock(pool, call, sizeof(T), [&](int64_t batch, int64_t first, const NumberBlock& block) {
    C memory_of_x[kBlockNumbers], memory_of_y[kBlockNumbers];
    const C* const x = probabilities.Numbers(problem, batch, first, block.count(), memory_of_x);
    const C* const y = cotangents.Numbers(problem, batch, first, block.count(), memory_of_y);
    WriteComputed(block.count(), result + batch * problem.rows * problem.features + first,
                  [&](C* to) { ComputeGradient(block, x, y, static_cast<const C*>(sums.get()), to); });
  });
  return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// Rows grouped by segment.

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

// Writes the rows of a result in arbitrary order, each once.
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
JB_CPU_CLONES bool SoftmaxGrouped(const SoftmaxCall& call, const Block block, const GroupedRows& grouped,
                                  bool is_streamed) {
  using C = ComputeType<T>;
  const Problem problem = call.problem;
  const int64_t features = problem.features, width = block.feature_end - block.feature_begin;
  const auto memory = Allocate<C>(2 * width), weights = Allocate<C>(std::max(kSegmentNumbers, width));
  if (memory == nullptr || weights == nullptr) return false;
  C* const maxima = memory.get();
  C* const totals = maxima + width;
  const T* const logits = RowArray<T>(call, 0).OfBatch(problem, block.batch) + block.feature_begin;
  T* const output = static_cast<T*>(call.output);
  T* const results = output + block.batch * problem.rows * features + block.feature_begin;
  const ScatteredRows<T> scattered(width, is_streamed);
  const auto prefetch = [&](int32_t row)
                            __attribute__((always_inline)) { PrefetchRow(logits + row * features, width); };
  for (int64_t segment = block.segment_begin; segment < block.segment_end; ++segment) {
    const int64_t group = segment - block.segment_begin;
    const int32_t begin = grouped.Begin(group), end = grouped.End(group);
    const bool are_kept = (end - begin) * width <= kSegmentNumbers;
    std::fill_n(maxima, width, -std::numeric_limits<C>::infinity());
    grouped.ForEachRow(begin, end, prefetch, [&](int32_t row) __attribute__((always_inline)) {
      TakeMaxima(logits + row * features, width, maxima);
    });
    std::fill_n(totals, width, C{0});
    C* next = weights.get();
    for (int32_t place = begin; place < end; ++place) {
      WeighRow(logits + grouped[place] * features, maxima, width, next);
      AddNumbers(next, width, totals);
      if (are_kept) next += width;
    }
    next = weights.get();
    for (int32_t place = begin; place < end; ++place) {
      const int64_t first = grouped[place] * features;
      if (!are_kept) WeighRow(logits + first, maxima, width, next);
      scattered.Put(results + first, [&](T* to) __attribute__((always_inline)) {
        StoreEach(width, to, [&](int64_t i) __attribute__((always_inline)) { return next[i] / totals[i]; });
      });
      if (are_kept) next += width;
    }
  }
  WriteDroppedRows(problem, block, SegmentIds(call), output);
  FinishStreaming();
  return true;
}

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
                  return static_cast<C>(x[i]) * (static_cast<C>(y[i]) - sums[begin + i]);
                });
              });
}

template <typename T>
JB_CPU_CLONES bool GradientsGrouped(const SoftmaxCall& call, const Block block, const GroupedRows& grouped,
                                    bool is_streamed) {
  using C = ComputeType<T>;
  const Problem problem = call.problem;
  const int64_t features = problem.features, width = block.feature_end - block.feature_begin;
  const auto sums = Allocate<C>(width);
  if (sums == nullptr) return false;
  const T* const probabilities = RowArray<T>(call, 0).OfBatch(problem, block.batch) + block.feature_begin;
  const T* const d_probabilities = RowArray<T>(call, 1).OfBatch(problem, block.batch) + block.feature_begin;
  T* const output = static_cast<T*>(call.output);
  T* const results = output + block.batch * problem.rows * features + block.feature_begin;
  const ScatteredRows<T> scattered(width, is_streamed);
  const auto prefetch = [&](int32_t row) __attribute__((always_inline)) {
    PrefetchRow(probabilities + row * features, width);
    PrefetchRow(d_probabilities + row * features, width);
  };
  for (int64_t segment = block.segment_begin; segment < block.segment_end; ++segment) {
    const int64_t group = segment - block.segment_begin;
    const int32_t begin = grouped.Begin(group), end = grouped.End(group);
    std::fill_n(sums.get(), width, C{0});
    grouped.ForEachRow(begin, end, prefetch, [&](int32_t row) __attribute__((always_inline)) {
      AddProducts(probabilities + row * features, d_probabilities + row * features, width, sums.get());
    });
    for (int32_t place = begin; place < end; ++place) {
      const int64_t first = grouped[place] * features;
      scattered.Put(results + first, [&](T* to) __attribute__((always_inline)) {
        GradientOfRow(probabilities + first, d_probabilities + first, sums.get(), width, to);
      });
    }
  }
  WriteDroppedRows(problem, block, SegmentIds(call), output);
  FinishStreaming();
  return true;
}

// `is_streamed`: results larger than the caches are written past them.
template <typename T>
bool RunGrouped(ffi::ThreadPool& pool, const SoftmaxCall& call, bool is_streamed) {
  const int64_t result_bytes = ResultBytes<T>(call);
  AdviseHugePages(call.output, result_bytes);
  return ForEachGroupedBlock(pool, call.problem, sizeof(T), NumThreads(pool, result_bytes), SegmentIds(call),
                             [&](const Block& block, const GroupedRows& rows) {
                               return call.is_backward ? GradientsGrouped<T>(call, block, rows, is_streamed)
                                                       : SoftmaxGrouped<T>(call, block, rows, is_streamed);
                             });
}

// ---------------------------------------------------------------------------------------------------------------------

template <typename T>
Strategy ChooseStrategy(const SoftmaxCall& call) {
  const Problem& problem = call.problem;
  if (call.HasNoResult()) return Strategy::kNothing;
  if (problem.segments == 0) return Strategy::kFill;
  CellType type = CellTypeOf<ProductSum<T>>();
  if (!call.is_backward) type.second_bytes = type.first_bytes;
  const Strategy strategy = ChooseStrategy(problem, type, /*has_counts=*/false);
  const bool is_streamed = strategy == Strategy::kGroupBySegment && ResultBytes<T>(call) >= kMinStreamedBytes;
  return is_streamed ? Strategy::kStreamedGroups : strategy;
}

// Numbers the segments that have rows, if hardly any has one: memory then grows with the rows, not the segments.
// Returns the new ids, or null if there is nothing to do or no memory.
std::unique_ptr<int64_t[]> NumberSegmentsWithRows(SoftmaxCall* call) {
  constexpr int64_t kSegmentsPerRow = 64;
  Problem& problem = call->problem;
  const int64_t num_ids = (problem.ids_are_shared ? 1 : problem.batch) * problem.rows;
  if (num_ids == 0 || problem.segments / kSegmentsPerRow <= num_ids) return nullptr;
  const SegmentIds ids(*call);
  auto numbers = Allocate<int64_t>(num_ids);
  const auto with_rows = Allocate<int64_t>(num_ids);
  if (numbers == nullptr || with_rows == nullptr) return nullptr;
  int64_t* end = with_rows.get();
  for (int64_t i = 0; i < num_ids; ++i) {
    if (0 <= ids[i] && ids[i] < problem.segments) *end++ = ids[i];
  }
  std::sort(with_rows.get(), end);
  end = std::unique(with_rows.get(), end);
  const int64_t num_segments = std::max<int64_t>(end - with_rows.get(), 1);
  for (int64_t i = 0; i < num_ids; ++i) {  // in the order of the ids, which may be sorted
    const bool is_beyond = ids[i] >= problem.segments;
    numbers[i] = ids[i] < 0  ? -1
                 : is_beyond ? num_segments
                             : std::lower_bound(with_rows.get(), end, ids[i]) - with_rows.get();
  }
  problem.segments = num_segments;
  call->segment_ids = numbers.get();
  call->ids_are_64_bit = true;
  return numbers;
}

bool RunSoftmax(ffi::ThreadPool& pool, const SoftmaxCall& given) {
  SoftmaxCall call = given;
  const auto numbers = NumberSegmentsWithRows(&call);
  bool has_memory = true;
  DispatchFloating(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Strategy strategy = ChooseStrategy<T>(call);
    const bool is_streamed = strategy == Strategy::kStreamedGroups;
    if (strategy == Strategy::kNothing) return;
    if (strategy == Strategy::kFill) return WriteZeroBytes(pool, call.output, ResultBytes<T>(call));
    has_memory = is_streamed || strategy == Strategy::kGroupBySegment ? RunGrouped<T>(pool, call, is_streamed)
                 : call.is_backward                                   ? GradientsInOrder<T>(pool, call)
                                                                      : SoftmaxInOrder<T>(pool, call);
  });
  return has_memory;
}

Plan PlanSoftmax(const SoftmaxCall& call) {
  return PlanOfType(call, JB_DISPATCH(DispatchFloating),
                    [&](auto tag) { return ChooseStrategy<typename decltype(tag)::type>(call); });
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
