// The CPU kernels of segment_softmax and its gradient: a reduction of the rows to cells, and then each row from its
// numbers and those of its segment's cells (see RowMap).

#include <algorithm>
#include <cstdint>
#include <memory>
#include <type_traits>

#include "ffi/core/exp_cpu.h"
#include "ffi/segment/engine/map_rows_cpu.h"
#include "ffi/segment/logsumexp/reduction_cpu.h"
#include "ffi/segment/softmax/call.h"
#include "ffi/segment/sum/reduction_cpu.h"

namespace jax_baracuda::segment {
namespace {

// The numbers of a block in the `index`th input.
template <typename T>
const T* InputOf(const SoftmaxCall& call, int index, const NumberBlock& block) {
  return call.inputs[index].Of<T>(block.batch, call.problem.rows * call.problem.features) + block.First();
}

template <typename T, typename C>
JB_CPU_CLONES void WriteProbabilities(const T* logits, const C* maxima, const C* totals, int64_t count, T* to) {
  ForEachPart(logits, count, [&](int64_t begin, int64_t part, const auto* numbers) __attribute__((always_inline)) {
    StoreEach(part, to + begin, [&](int64_t i) __attribute__((always_inline)) {
      return Exp(static_cast<C>(numbers[i]) - maxima[begin + i]) / totals[begin + i];
    });
  });
}

template <typename T>
bool Softmax(ffi::ThreadPool& pool, const SoftmaxCall& call) {
  using C = ComputeType<T>;
  const Problem& problem = call.problem;
  const auto maxima = Allocate<C>(problem.NumCells()), totals = Allocate<C>(problem.NumCells());
  if (maxima == nullptr || totals == nullptr) return false;
  auto reduction = call.ReductionAs<LogSumExpCall>();
  reduction.maxima = maxima.get();
  reduction.totals = totals.get();
  const auto compute = [&](const NumberBlock& block, T* to, const C* of_maxima, const C* of_totals) {
    WriteProbabilities(InputOf<T>(call, 0, block), of_maxima, of_totals, block.count(), to);
  };
  const int64_t cells = problem.segments * problem.features;
  const RowMap map(problem, static_cast<T*>(call.output), compute, BatchArray<C>(maxima.get(), cells),
                   BatchArray<C>(totals.get(), cells));
  return WithLogSumExp(reduction, [&](const RowReduction& rows) { return map.RunAfter(pool, SegmentIds(call), rows); });
}

// The sums of the products of two arrays.
template <typename T>
struct ProductSum : Sum<T> {
  using First = ComputeType<T>;
  using Narrow = std::conditional_t<std::is_same_v<T, First>, ProductSum, Sum<First>>;

  const T *first = nullptr, *second = nullptr;  // the arrays of a batch element

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
};

template <typename T>
class ProductSumRows final : public TypedReduction<ProductSum<T>> {
 public:
  ProductSumRows(const SoftmaxCall& call, ComputeType<T>* sums)
      : TypedReduction<ProductSum<T>>(call.problem, MaxBlockRows<ProductSum<T>>(call.problem),
                                      /*splits_features=*/true, ProductSum<T>{{sums, /*is_wide=*/true}}),
        call_(call) {}

  bool FoldsElementsTogether() const override { return !call_.inputs[0].is_shared && !call_.inputs[1].is_shared; }

  void Fold(const RowBlock& block, const FoldTarget& target) const override {
    const Problem& problem = this->problem;
    ProductSum<T> of_batch = this->reduction;
    of_batch.first = call_.inputs[0].Of<T>(target.batch, problem.rows * problem.features);
    of_batch.second = call_.inputs[1].Of<T>(target.batch, problem.rows * problem.features);
    FoldOwnRows(block, of_batch.first + block.first_row * problem.features + target.feature_begin, problem.features,
                of_batch, target);
  }

 private:
  const SoftmaxCall& call_;
};

template <typename T, typename C>
JB_CPU_CLONES void WriteGradients(const T* probabilities, const T* cotangents, const C* sums, int64_t count, T* to) {
  ForEachPart(probabilities, cotangents, count,
              [&](int64_t begin, int64_t part, const auto* x, const auto* y) __attribute__((always_inline)) {
                StoreEach(part, to + begin, [&](int64_t i) __attribute__((always_inline)) {
                  return static_cast<C>(x[i]) * (static_cast<C>(y[i]) - sums[begin + i]);
                });
              });
}

template <typename T>
bool Gradient(ffi::ThreadPool& pool, const SoftmaxCall& call) {
  using C = ComputeType<T>;
  const Problem& problem = call.problem;
  const auto sums = Allocate<C>(problem.NumCells());
  if (sums == nullptr) return false;
  const auto compute = [&](const NumberBlock& block, T* to, const C* of_sums) {
    WriteGradients(InputOf<T>(call, 0, block), InputOf<T>(call, 1, block), of_sums, block.count(), to);
  };
  const RowMap map(problem, static_cast<T*>(call.output), compute,
                   BatchArray<C>(sums.get(), problem.segments * problem.features));
  return map.RunAfter(pool, SegmentIds(call), ProductSumRows<T>(call, sums.get()));
}

// Numbers the segments that have rows, if hardly any has one: memory then grows with the rows, not the segments.
// Returns the new ids, or null if there is nothing to do or no memory.
Memory<int64_t> NumberSegmentsWithRows(SoftmaxCall* call) {
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

}  // namespace

std::vector<const char*> SoftmaxCall::Strategies(bool) {
  return NamesOf(kStrategyNames, Strategy::kNothing, Strategy::kFill, Strategy::kScan, Strategy::kSplitScan,
                 Strategy::kBatchOfFewRows, Strategy::kGroupBySegment);
}

Plan SoftmaxCall::MakePlan() const {
  if (HasNoResult()) return {kNothing};
  if (problem.segments == 0) return {NameOf(kStrategyNames, Strategy::kFill)};
  return is_backward ? PlanReduction<ProductSum>(*this, JB_DISPATCH(DispatchFloating))
                     : ReductionAs<LogSumExpCall>().MakePlan();
}

bool SoftmaxCall::Run(ffi::ThreadPool& pool) const {
  if (HasNoResult()) return true;
  SoftmaxCall call = *this;
  const auto numbers = NumberSegmentsWithRows(&call);
  return DispatchOr(true, type, JB_DISPATCH(DispatchFloating), [&](auto tag) {
    using T = typename decltype(tag)::type;
    return is_backward ? Gradient<T>(pool, call) : Softmax<T>(pool, call);
  });
}

}  // namespace jax_baracuda::segment
