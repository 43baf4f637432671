// The gradient of maxima and minima of gathered rows. For each row, it sums over the row's edges the cotangents of the
// cells that they won.
#include "ffi/segment/gather_extremum/call.h"
#include "ffi/segment/gather_sum/reduction.cuh"

namespace jax_baracuda::segment {
namespace {

ReducePlan PlanOf(const GatherExtremumBackwardCall& call) {
  return PlanGathered(call, call.problem.features, SumStateBytes(call.type));
}

// The sum of the elements of each row that its edge won. A row loads and holds twice as much as in other sums. More
// resident blocks then hide more latency than more rows in flight.
template <typename T>
struct WonReduction : GatherSumReduction<T> {
  static constexpr int kRowsInFlight = sizeof(T) == 4 ? 2 : 1;
  using typename GatherSumReduction<T>::C;

  template <int kCount>
  struct Accumulator : GatherSumReduction<T>::template Accumulator<kCount> {
    template <typename Wins>
    __device__ __forceinline__ void AddWon(const Packed<T, kCount>& values, Wins&& wins) {
      uint32_t won = 0;
#pragma unroll
      for (int i = 0; i < kCount; ++i) won |= static_cast<uint32_t>(wins(i)) << i;
      const Vector<C, kCount> wide = Widen(Unpack<T, kCount>(values));
#pragma unroll
      for (int i = 0; i < kCount; ++i) this->sum.sum[i] += (won >> i & 1) != 0 ? wide.lane[i] : C{0};
    }
  };
};

// The Input if one edge wins a cell: gathered rows have the winners of their cells. The batch shares no winners.
template <typename T>
struct RowsWithWinners : Edges {
  static constexpr bool kTakesEdges = true;

  const int32_t* winners;  // [batch, num_rows, features]

  RowsWithWinners From(int64_t element, int64_t edges, int64_t features) const {
    RowsWithWinners from = *this;
    from.Advance(element, edges);
    from.winners += element * num_rows * features;
    return from;
  }
  __device__ __forceinline__ int64_t At(int64_t, int64_t, int64_t) const { return 0; }

  template <int kVec>
  struct Row : ComingRow<T, kVec> {
    Vector<int32_t, kVec> winners;

    __device__ __forceinline__ void Load(const RowsWithWinners& input, const T* data, const SourceRow& source,
                                         const RowPlace& place) {
      this->LoadGathered(data, source, place);
      this->number = static_cast<int32_t>(source.edge);
      winners = Repeat<kVec>(int32_t{-1});
      if (source.row == kDropped) return;
      winners = LoadVector<kVec>(input.winners + source.row * place.features + place.column);
    }
    template <typename Cells, typename Outputs>
    __device__ __forceinline__ void AddTo(Cells& cells, const Outputs&) const {
      cells.AddWon(this->values, [&](int i) { return winners.lane[i] == this->number; });
    }
  };
};

// The Input if tied edges share a cell: an edge won the cells whose extremum equals the element of its segment in
// `reduced`, the data of the forward pass. This also holds if only one edge attains the extremum, and a NaN equals
// nothing. The batch shares neither array.
template <typename T>
struct RowsWithExtrema : Edges {
  static constexpr bool kTakesEdges = false;

  const T* extrema;  // [batch, num_rows, features]
  const T* reduced;  // [batch, segments, features]

  RowsWithExtrema From(int64_t element, int64_t edges, int64_t features) const {
    RowsWithExtrema from = *this;
    from.Advance(element, edges);
    from.extrema += element * num_rows * features;
    return from;
  }
  __device__ __forceinline__ int64_t At(int64_t, int64_t, int64_t) const { return 0; }

  template <int kVec>
  struct Row : ComingRow<T, kVec> {
    Vector<T, kVec> extrema, reduced;

    __device__ __forceinline__ void Load(const RowsWithExtrema& input, const T* data, const SourceRow& source,
                                         const RowPlace& place) {
      this->LoadGathered(data, source, place);
      extrema = Repeat<kVec>(static_cast<T>(ComputeType<T>{0}));
      reduced = Repeat<kVec>(static_cast<T>(ComputeType<T>{1}));
      if (source.row == kDropped || place.segment < 0) return;
      extrema = LoadVector<kVec>(input.extrema + source.row * place.features + place.column);
      reduced = LoadVector<kVec>(input.reduced + place.segment * place.features + place.column);
    }
    template <typename Cells, typename Outputs>
    __device__ __forceinline__ void AddTo(Cells& cells, const Outputs&) const {
      cells.AddWon(this->values, [&](int i) {
        return static_cast<ComputeType<T>>(extrema.lane[i]) == static_cast<ComputeType<T>>(reduced.lane[i]);
      });
    }
  };
};

template <typename T>
CudaStatus SumOfWinners(const GatherExtremumBackwardCall& call, cudaStream_t stream) {
  const auto reduce = [&](const auto& input) {
    return ReduceGathered<WonReduction<T>>(call, PlanOf(call), input, {call.d_data, /*is_wide=*/false}, stream);
  };
  const Edges edges = EdgesOf(call, /*clips=*/false);
  return call.shares_ties ? reduce(RowsWithExtrema<T>{edges, static_cast<const T*>(call.extrema),
                                                      static_cast<const T*>(call.gathered)})
                          : reduce(RowsWithWinners<T>{edges, call.winner});
}

// The call of one batch element.
template <typename T>
GatherExtremumBackwardCall ElementOf(const GatherExtremumBackwardCall& call, int64_t b) {
  const auto of_element = [&](const auto* array, bool is_shared, int64_t size) {
    return array == nullptr || is_shared ? array : array + b * size;
  };
  const Problem& problem = call.problem;
  const int64_t cells = call.num_rows * problem.features, elements = problem.segments * problem.features;
  GatherExtremumBackwardCall element = call;
  element.problem.batch = 1;
  element.data = of_element(static_cast<const T*>(call.data), problem.data_is_shared, cells);
  element.segment_ids = of_element(static_cast<const char*>(call.segment_ids), problem.ids_are_shared,
                                   problem.rows * (call.ids_are_64_bit ? 8 : 4));
  element.gather_ids = of_element(call.gather_ids, call.gather_ids_are_shared, problem.rows);
  element.edge_order = of_element(call.edge_order, call.edge_order_is_shared, problem.rows);
  element.winner = of_element(call.winner, call.winner_is_shared, cells);
  element.extrema = of_element(static_cast<const T*>(call.extrema), call.winner_is_shared, cells);
  element.gathered = of_element(static_cast<const T*>(call.gathered), call.gathered_is_shared, elements);
  element.d_data = static_cast<T*>(call.d_data) + b * elements;
  return element;
}

}  // namespace

Plan GatherExtremumBackwardCall::CudaPlan() const { return PlanOf(*this).Summary(); }

CudaStatus GatherExtremumBackwardCall::LaunchOnCuda(cudaStream_t stream) const {
  if (problem.HasNoResult()) return {};
  const bool is_shared = problem.data_is_shared || winner_is_shared || (gathered != nullptr && gathered_is_shared);
  CudaStatus status = JB_CUDA_STATUS(cudaErrorInvalidValue);
  DispatchFloating(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (problem.batch == 1 || !is_shared) {
      status = SumOfWinners<T>(*this, stream);
      return;
    }
    for (int64_t b = 0; b < problem.batch; ++b) {
      status = SumOfWinners<T>(ElementOf<T>(*this, b), stream);
      if (!status.ok()) return;
    }
  });
  return status;
}

}  // namespace jax_baracuda::segment
