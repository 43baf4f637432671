// Softmax and its gradient: a reduction of the rows to cells, and then each row from the cells of its segment.
#include <cmath>

#include "ffi/core/scratch.h"
#include "ffi/segment/engine/map_rows.cuh"
#include "ffi/segment/engine/reduce.cuh"
#include "ffi/segment/logsumexp/logsumexp.h"
#include "ffi/segment/softmax/call.h"
#include "ffi/segment/sum/reduction.cuh"

namespace jax_baracuda::segment {
namespace {

template <typename T>
struct Probability {
  using C = ComputeType<T>;

  BatchArray<T> logits;
  const C *maxima, *totals;  // [batch, segments, features]
  Problem problem;

  template <int kVec>
  __device__ __forceinline__ Vector<T, kVec> At(int64_t b, uint32_t segment, int64_t row, int64_t feature) const {
    const int64_t cell = (b * problem.segments + segment) * problem.features + feature;
    const auto values = Widen(LoadStreaming<kVec>(logits.Of(b) + row * problem.features + feature));
    const auto of_maxima = LoadVector<kVec>(maxima + cell), of_totals = LoadVector<kVec>(totals + cell);
    Vector<T, kVec> probabilities;
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const C weight = std::exp(values.lane[i] - of_maxima.lane[i]);
      probabilities.lane[i] = static_cast<T>(weight / of_totals.lane[i]);
    }
    return probabilities;
  }
};

template <typename T>
struct Gradient {
  using C = ComputeType<T>;

  BatchArray<T> probabilities, d_probabilities;
  const C* sums;  // of products [batch, segments, features]
  Problem problem;

  template <int kVec>
  __device__ __forceinline__ Vector<T, kVec> At(int64_t b, uint32_t segment, int64_t row, int64_t feature) const {
    const int64_t element = row * problem.features + feature;
    const auto p = Widen(LoadStreaming<kVec>(probabilities.Of(b) + element));
    const auto d_p = Widen(LoadStreaming<kVec>(d_probabilities.Of(b) + element));
    const auto of_sums = LoadVector<kVec>(sums + (b * problem.segments + segment) * problem.features + feature);
    Vector<T, kVec> gradient;
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      gradient.lane[i] = static_cast<T>(p.lane[i] * (d_p.lane[i] - of_sums.lane[i]));
    }
    return gradient;
  }
};

// The sums of the products of two arrays (see engine/reduction.cuh).
template <typename T>
struct ProductSumReduction {
  using Element = T;
  static constexpr int kRowsInFlight = 4;
  static constexpr int kTileBlocks = 6;
  using C = ComputeType<T>;
  using Outputs = typename SumReduction<C>::Outputs;

  template <int kCount>
  struct Accumulator : SumReduction<C>::template Accumulator<kCount> {
    __device__ __forceinline__ void AddPair(const Vector<T, kCount>& x, const Vector<T, kCount>& y) {
      const auto wide_x = Widen(x), wide_y = Widen(y);
#pragma unroll
      for (int i = 0; i < kCount; ++i) this->sum[i] += wide_x.lane[i] * wide_y.lane[i];
    }
  };
};

// Few sorted rows are sorted again, because that launch reads pairs of rows, too, and needs no merge.
bool SortsAgain(const Problem& problem) {
  const int64_t elements = problem.rows * problem.features;
  return UsesFewUnsortedRows(problem) && problem.batch * elements <= Tuning::kMaxElementsOfFewSortedPairs &&
         elements <= Tuning::kMaxElementsOfFewSortedPairsToSegment * problem.segments;
}

ReducePlan PlanOfProducts(const SoftmaxCall& call) {
  return PlanPairs(call, call.indices_are_sorted && !SortsAgain(call.problem), AccumulatorBytes(call.type));
}

// How the rows are reduced to cells.
Plan PlanOfCells(const SoftmaxCall& call) {
  return call.is_backward ? PlanOfProducts(call).Summary() : call.ReductionAs<LogSumExpCall>().MakePlan();
}

// Gives the rest of the scratch, behind the cells, to the reduction.
template <typename Call>
Call ReductionWithScratch(const SoftmaxCall& call, ScratchCarver* carver) {
  Call reduction = call.ReductionAs<Call>();
  reduction.scratch_bytes = PlanOfCells(call).scratch_bytes;
  reduction.scratch = carver->Take<char>(reduction.scratch_bytes);
  return reduction;
}

template <typename T, typename Function>
CudaStatus LaunchMap(const SoftmaxCall& call, const Function& function, cudaStream_t stream) {
  return LaunchMapRows(call.problem, call.segment_ids, call.ids_are_64_bit, function, static_cast<T*>(call.output),
                       stream);
}

template <typename T>
CudaStatus LaunchForward(const SoftmaxCall& call, cudaStream_t stream) {
  using C = ComputeType<T>;
  const Problem& problem = call.problem;
  ScratchCarver carver(call.scratch);
  C* const maxima = carver.Take<C>(problem.NumCells());
  C* const totals = carver.Take<C>(problem.NumCells());
  auto reduction = ReductionWithScratch<LogSumExpCall>(call, &carver);
  reduction.maxima = maxima;
  reduction.totals = totals;
  JB_RETURN_IF_CUDA_ERROR(reduction.Run(stream));
  const Probability<T> function{{call.inputs[0], problem.rows * problem.features}, maxima, totals, problem};
  return LaunchMap<T>(call, function, stream);
}

template <typename T>
CudaStatus LaunchBackward(const SoftmaxCall& call, cudaStream_t stream) {
  using C = ComputeType<T>;
  const Problem& problem = call.problem;
  ScratchCarver carver(call.scratch);
  C* const sums = carver.Take<C>(problem.NumCells());
  const auto reduction = ReductionWithScratch<SumCall>(call, &carver);
  const RowPairs<T> pairs{static_cast<const T*>(call.inputs[1].data), call.inputs[1].is_shared};
  JB_RETURN_IF_CUDA_ERROR(
      LaunchReduction<ProductSumReduction<T>>(reduction, PlanOfProducts(call), {sums}, stream, pairs));
  const int64_t elements = problem.rows * problem.features;
  const Gradient<T> function{{call.inputs[0], elements}, {call.inputs[1], elements}, sums, problem};
  return LaunchMap<T>(call, function, stream);
}

}  // namespace

std::vector<const char*> SoftmaxCall::Strategies(bool is_backward) {
  return is_backward ? TileStrategies() : ReduceStrategies();
}

Plan SoftmaxCall::MakePlan() const {
  if (HasNoResult()) return {kNothing};
  if (problem.segments == 0) return {NameOf(kStrategyNames, Strategy::kFill)};
  const Plan of_cells = PlanOfCells(*this);
  const int64_t cell_bytes = problem.NumCells() * AccumulatorBytes(type);
  ScratchSizes sizes;
  sizes.Add(cell_bytes);
  if (!is_backward) sizes.Add(cell_bytes);
  sizes.Add(of_cells.scratch_bytes);
  return {of_cells.strategy, sizes.total};
}

CudaStatus SoftmaxCall::Run(cudaStream_t stream) const {
  if (HasNoResult()) return {};
  if (scratch_bytes < MakePlan().scratch_bytes) return JB_CUDA_STATUS(cudaErrorInvalidValue);
  return LaunchFor(type, JB_DISPATCH(DispatchFloating), [&](auto tag) {
    using T = typename decltype(tag)::type;
    return is_backward ? LaunchBackward<T>(*this, stream) : LaunchForward<T>(*this, stream);
  });
}

}  // namespace jax_baracuda::segment
