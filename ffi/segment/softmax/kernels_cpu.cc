// The CPU kernels of segment_softmax and its gradient.
//
// Both first reduce the rows, and then compute each row from its segment's cells. Grouped by segment, rows are read
// from memory once. In order, rows are read once per reduction, and exponentials are recomputed, which is cheaper than
// storing and reloading them.

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
#include "ffi/segment/sum/reduction_cpu.h"

namespace jax_baracuda::segment {
namespace {

constexpr int64_t kNarrowFeatures = 16;       // below this, rows are too short to vectorise each by itself
constexpr int64_t kBlockNumbers = 1024;       // numbers per block of rows in order, which have at most so many features
constexpr int64_t kSegmentNumbers = 1 << 15;  // largest segment whose weights are kept, in numbers

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

  template <typename U>
  JB_INLINE static void Take(const U* values, int64_t width, First* maxima) {
    JB_VECTORIZE
    for (int64_t i = 0; i < width; ++i) {
      const First value = static_cast<First>(values[i]), maximum = maxima[i];
      maxima[i] = maximum > value ? maximum : value;
    }
  }

  JB_INLINE void Fold(const T* values, int32_t /*row*/, int64_t width, CellsOf<Maximum> cells) const {
    ForEachPart(values, width, [&](int64_t begin, int64_t count, const auto* numbers) __attribute__((always_inline)) {
      Take(numbers, count, cells.first + begin);
    });
  }

  JB_INLINE Narrow ForNarrow() const { return {}; }
  void Convert(const T* from, int64_t count, First* to) const { Widen(from, count, to); }

  JB_INLINE void Merge(int64_t count, CellsOf<Maximum> later, CellsOf<Maximum> cells) const {
    Take(later.first, count, cells.first);
  }

  JB_INLINE void Write(int64_t count, int64_t first_cell, const int32_t* /*counts*/, CellsOf<Maximum> cells) const {
    WriteNumbers(cells.first, count, output + first_cell);
  }
};

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

// The width of rows is not a constant, so that this is compiled once.
template <typename C>
JB_CPU_CLONES void ExpAll(int64_t count, C* numbers) {
  for (int64_t i = 0; i < count; ++i) numbers[i] = Exp(numbers[i]);
}

template <typename T, typename C>
JB_INLINE void WriteQuotients(const C* weights, const C* sums, int64_t width, T* to) {
  StoreEach(width, to, [&](int64_t i) __attribute__((always_inline)) { return weights[i] / sums[i]; });
}

// Rows per block. Their weights or results are computed together.
int64_t RowsAtOnce(const Problem& problem) {
  return std::max<int64_t>(1, kBlockNumbers / std::max<int64_t>(1, problem.features));
}

// The rows of a block as ComputeType<T>: in place, or converted into `memory` at the same offsets.
template <typename T>
const ComputeType<T>* NumbersOf(const RowBlock& block, const T* rows, int64_t features, ComputeType<T>* memory) {
  const T* const first = rows + block.first_row * features;
  if constexpr (std::is_same_v<T, ComputeType<T>>) {
    return first;
  } else {
    ConvertBlock(block, first, features, memory,
                 [](const T* from, int64_t count, float* to) { Widen(from, count, to); });
    return memory;
  }
}

JB_INLINE bool IsMember(const RowBlock& block, const Problem& problem, int64_t i) {
  return static_cast<uint64_t>(block.ids[i]) < static_cast<uint64_t>(problem.segments);
}

// The cells of a row's segment; arbitrary ones for a dropped row.
template <typename C>
JB_INLINE C* CellsOfRow(const RowBlock& block, const Problem& problem, int64_t i, int64_t width, C* cells) {
  return cells + (IsMember(block, problem, i) ? block.first_segment + block.ids[i] : 0) * width;
}

// exp(logit - maximum) for the rows of a block, one after another; arbitrary for dropped rows.
template <typename C>
JB_CPU_CLONES void WeighBlock(const RowBlock block, const Problem problem, const C* logits, const C* maxima,
                              C* weights) {
  const int64_t features = problem.features;
  if (features >= kNarrowFeatures) {
    for (int64_t i = 0; i < block.count; ++i) {
      WeighRow(logits + block.offsets[i] * features, CellsOfRow(block, problem, i, features, maxima), features,
               weights + i * features);
    }
    return;
  }
  WithWidth(features, [&](auto width) __attribute__((always_inline)) {
    for (int64_t i = 0; i < block.count; ++i) {
      const C* const of_segment = CellsOfRow(block, problem, i, width, maxima);
      const C* const of_row = logits + block.offsets[i] * width;
      for (int64_t j = 0; j < width; ++j) weights[i * width + j] = of_row[j] - of_segment[j];
    }
  });
  ExpAll(block.count * features, weights);
}

// weight / sum for all rows of a block; 0 for dropped rows.
template <typename C>
JB_CPU_CLONES void NormalizeBlock(const RowBlock block, const Problem problem, const C* sums, const C* weights, C* to) {
  WithWidth(problem.features, [&](auto width) __attribute__((always_inline)) {
    for (int64_t i = 0; i < block.count; ++i) {
      if (IsMember(block, problem, i)) {
        WriteQuotients(weights + i * width, CellsOfRow(block, problem, i, width, sums), width, to + i * width);
      } else {
        WriteZeros(to + i * width, width);
      }
    }
  });
}

// Calls compute(to) to write the rows of a block. If T is not its own ComputeType, results go to `memory` and are
// rounded.
template <typename T, typename Compute>
void WriteBlock(const RowBlock& block, int64_t features, ComputeType<T>* memory, T* rows, const Compute& compute) {
  T* const to = rows + block.first_row * features;
  if constexpr (std::is_same_v<T, ComputeType<T>>) {
    compute(to);
  } else {
    compute(memory);
    Narrow(memory, block.count * features, to);
  }
}

// The type of sums over rows of T that are computed from other arrays.
template <typename T>
CellType TypeOfSums() {
  CellType type = CellTypeOf<Sum<ComputeType<T>>>();
  type.element_bytes = sizeof(T);
  return type;
}

template <typename T>
struct SoftmaxArrays {
  using C = ComputeType<T>;

  SegmentIds ids;
  const T* logits;
  T* probabilities;
  C *maxima = nullptr, *sums = nullptr;  // of cells; for rows in order

  // Calculates the weights of a block of rows in order.
  void Weigh(const RowBlock& block, const Problem& problem, int64_t batch, C* weights) const {
    C numbers[kBlockNumbers];
    const T* const rows = logits + problem.DataRow(batch, 0) * problem.features;
    WeighBlock(block, problem, NumbersOf(block, rows, problem.features, numbers), OfBatch(maxima, problem, batch),
               weights);
  }

  static const C* OfBatch(const C* cells, const Problem& problem, int64_t batch) {
    return cells + batch * problem.segments * problem.features;
  }
};

// The sums of weights.
template <typename T>
class WeightSums final : public TypedReduction<Sum<ComputeType<T>>> {
 public:
  using C = ComputeType<T>;

  WeightSums(const Problem& problem, const SoftmaxArrays<T>& arrays)
      : TypedReduction<Sum<C>>(problem, RowsAtOnce(problem), /*splits_features=*/false, Sum<C>{arrays.sums},
                               TypeOfSums<T>()),
        arrays_(arrays) {}

  void Fold(const RowBlock& block, const FoldTarget& target) const override {
    C weights[kBlockNumbers];
    arrays_.Weigh(block, this->problem, target.batch, weights);
    FoldRows(block, kAllOffsets.values, weights, this->reduction, target);
  }

 private:
  const SoftmaxArrays<T>& arrays_;
};

template <typename T>
void WriteProbabilities(const RowBlock& block, const Problem& problem, int64_t batch, const SoftmaxArrays<T>& arrays) {
  using C = ComputeType<T>;
  C weights[kBlockNumbers], numbers[kBlockNumbers];
  arrays.Weigh(block, problem, batch, weights);
  const C* const sums = arrays.OfBatch(arrays.sums, problem, batch);
  WriteBlock(block, problem.features, numbers, arrays.probabilities + batch * problem.rows * problem.features,
             [&](C* to) { NormalizeBlock(block, problem, sums, static_cast<const C*>(weights), to); });
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
    grouped.ForEachRow(begin, end, prefetch, [&](int32_t row) __attribute__((always_inline)) {
      maximum.Fold(logits + row * features, row, width, {maxima, nullptr});
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

// Adds the products of the rows of a block to the cells of their segments.
template <typename C>
JB_CPU_CLONES void SumProductsOfBlock(const RowBlock block, const C* x, const C* y, const FoldTarget target) {
  C* const sums = static_cast<C*>(target.cells.first);
  WithWidth(target.width, [&](auto width) __attribute__((always_inline)) {
    ForEachMember<Sum<C>>(block, target, width, [&](int64_t i, int64_t segment) __attribute__((always_inline)) {
      const int64_t first = block.offsets[i] * width;
      AddProducts(x + first, y + first, width, sums + segment * width);
    });
  });
}

template <typename C>
JB_CPU_CLONES void GradientOfBlock(const RowBlock block, const Problem problem, const C* probabilities,
                                   const C* d_probabilities, const C* sums, C* to) {
  WithWidth(problem.features, [&](auto width) __attribute__((always_inline)) {
    for (int64_t i = 0; i < block.count; ++i) {
      if (IsMember(block, problem, i)) {
        GradientOfRow(probabilities + i * width, d_probabilities + i * width,
                      CellsOfRow(block, problem, i, width, sums), width, to + i * width);
      } else {
        WriteZeros(to + i * width, width);
      }
    }
  });
}

// The sums of products of probabilities and cotangents.
template <typename T>
class ProductSums final : public TypedReduction<Sum<ComputeType<T>>> {
 public:
  using C = ComputeType<T>;

  ProductSums(const Problem& problem, const GradientArrays<T>& arrays, C* sums)
      : TypedReduction<Sum<C>>(problem, RowsAtOnce(problem), /*splits_features=*/false, Sum<C>{sums}, TypeOfSums<T>()),
        arrays_(arrays) {}

  void Fold(const RowBlock& block, const FoldTarget& target) const override {
    C x[kBlockNumbers], y[kBlockNumbers];
    SumProductsOfBlock(
        block, NumbersOf(block, arrays_.RowsOfProbabilities(this->problem, target.batch), target.width, x),
        NumbersOf(block, arrays_.RowsOfCotangents(this->problem, target.batch), target.width, y), target);
  }

 private:
  const GradientArrays<T>& arrays_;
};

// `sums` are those of all batch elements.
template <typename T, typename C>
void WriteGradient(const RowBlock& block, const Problem& problem, int64_t batch, const GradientArrays<T>& arrays,
                   const C* sums) {
  C x[kBlockNumbers], y[kBlockNumbers];
  const int64_t features = problem.features;
  const C* const probabilities = NumbersOf(block, arrays.RowsOfProbabilities(problem, batch), features, x);
  const C* const d_probabilities = NumbersOf(block, arrays.RowsOfCotangents(problem, batch), features, y);
  WriteBlock(block, features, x, arrays.d_logits + batch * problem.rows * features, [&](C* to) {
    GradientOfBlock(block, problem, probabilities, d_probabilities, sums + batch * problem.segments * features, to);
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
  WriteDroppedRows(problem, block, arrays.ids, arrays.d_logits);
  FinishStreaming();
  return true;
}

// For both directions. `states` is the number of tables of cells that a scan needs.
template <typename T>
Strategy ChooseStrategy(const Problem& problem, int64_t states) {
  using C = ComputeType<T>;
  const int64_t row_bytes = problem.features * static_cast<int64_t>(sizeof(T));
  const int64_t result_bytes = problem.batch * problem.rows * row_bytes;
  if (result_bytes == 0) return Strategy::kNothing;
  if (problem.segments == 0) return Strategy::kFill;
  if (problem.features <= kBlockNumbers && ReducesInOrder(problem, sizeof(T), states * sizeof(C))) {
    return ChooseScan(problem, /*rounds=*/true, row_bytes);
  }
  return result_bytes >= kMinStreamedBytes ? Strategy::kStreamedGroups : Strategy::kGroupBySegment;
}

// Calls in_order() or grouped(block, grouped rows, is_streamed). Returns false if allocation fails.
template <typename T>
bool ForEachSegment(ffi::ThreadPool& pool, const Problem& problem, SegmentIds ids, int64_t states, T* result,
                    FunctionRef<bool()> in_order, FunctionRef<bool(const Block&, const GroupedRows&, bool)> grouped) {
  const Strategy strategy = ChooseStrategy<T>(problem, states);
  if (strategy == Strategy::kNothing) return true;
  const int64_t result_bytes = problem.batch * problem.rows * problem.features * static_cast<int64_t>(sizeof(T));
  AdviseHugePages(result, result_bytes);
  if (strategy == Strategy::kFill) {
    WriteZeroBytes(pool, result, result_bytes);
    return true;
  }
  if (strategy == Strategy::kScan || strategy == Strategy::kSplitScan) return in_order();
  return ForEachGroupedBlock(pool, problem, sizeof(T), NumThreads(pool, result_bytes), ids,
                             [&](const Block& block, const GroupedRows& rows) {
                               return grouped(block, rows, strategy == Strategy::kStreamedGroups);
                             });
}

constexpr int64_t kForwardStates = 2, kBackwardStates = 1;

template <typename T>
bool Softmax(ffi::ThreadPool& pool, const Problem& problem, SoftmaxArrays<T> arrays) {
  using C = ComputeType<T>;
  const auto in_order = [&] {
    const int64_t cells = problem.batch * problem.segments * problem.features;
    const auto memory = Allocate<C>(2 * cells);
    if (memory == nullptr) return false;
    arrays.maxima = memory.get();
    arrays.sums = memory.get() + cells;
    if (!Scan(pool, arrays.ids, DirectReduction(problem, arrays.logits, Maximum<T>{arrays.maxima})) ||
        !Scan(pool, arrays.ids, WeightSums<T>(problem, arrays))) {
      return false;
    }
    ForEachBlockOfResult(
        pool, problem, arrays.ids, arrays.probabilities, sizeof(T), RowsAtOnce(problem),
        [&](int64_t batch, const RowBlock& block) { WriteProbabilities(block, problem, batch, arrays); });
    return true;
  };
  return ForEachSegment(pool, problem, arrays.ids, kForwardStates, arrays.probabilities, in_order,
                        [&](const Block& block, const GroupedRows& grouped, bool is_streamed) {
                          return SoftmaxGrouped(problem, block, grouped, arrays, is_streamed);
                        });
}

template <typename T>
bool SoftmaxGradients(ffi::ThreadPool& pool, const Problem& problem, const GradientArrays<T>& arrays) {
  using C = ComputeType<T>;
  const auto in_order = [&] {
    const auto sums = Allocate<C>(problem.batch * problem.segments * problem.features);
    if (sums == nullptr || !Scan(pool, arrays.ids, ProductSums<T>(problem, arrays, sums.get()))) return false;
    ForEachBlockOfResult(
        pool, problem, arrays.ids, arrays.d_logits, sizeof(T), RowsAtOnce(problem),
        [&](int64_t batch, const RowBlock& block) { WriteGradient(block, problem, batch, arrays, sums.get()); });
    return true;
  };
  return ForEachSegment(pool, problem, arrays.ids, kBackwardStates, arrays.d_logits, in_order,
                        [&](const Block& block, const GroupedRows& grouped, bool is_streamed) {
                          return GradientGrouped(problem, block, grouped, arrays, is_streamed);
                        });
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
