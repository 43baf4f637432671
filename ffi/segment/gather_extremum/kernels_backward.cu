// The gradient of maxima and minima of gathered rows. For each row, it sums over the row's edges the cotangents of the
// cells that they won.
#include "ffi/segment/gather_extremum/call.h"
#include "ffi/segment/gather_sum/reduction.cuh"

namespace jax_baracuda::segment {
namespace {

ReducePlan PlanOf(const GatheringCall& call) {
  return PlanGathered(call, call.problem.features, AccumulatorBytes(call.type));
}

// The sum of the elements of each row that its edge won. A row loads and holds twice as much as in other sums. More
// resident blocks then hide more latency than more rows in flight.
template <typename T>
struct WonReduction : GatherSumReduction<T> {
  static constexpr int kRowsInFlight = sizeof(T) == 8 ? 1 : 2;
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

// The Input if one edge wins a cell: gathered rows have the winners of their cells.
template <typename T>
struct RowsWithWinners : Edges {
  static constexpr bool kNeedsEdges = true;

  const int32_t* winners;  // [batch or 1, num_rows, features]
  bool winners_are_shared;

  void Advance(int64_t element, int64_t edges, int64_t features) {
    Edges::Advance(element, edges, features);
    if (!winners_are_shared) winners += element * num_rows * features;
  }

  template <int kVec>
  struct Row : RowInFlight<T, kVec> {
    Vector<int32_t, kVec> winners;

    __device__ __forceinline__ void Load(const RowsWithWinners& input, const T* data, const SourceRow& source,
                                         const RowPlace& place) {
      this->LoadGathered(data, source, place);
      this->number = static_cast<int32_t>(source.edge);
      winners = Repeat<kVec>(int32_t{-1});
      if (source.row == kDropped) return;
      winners = LoadVector<kVec>(input.winners + place.column + FirstElement(source.row, place.features));
    }
    template <typename Cells, typename Outputs>
    __device__ __forceinline__ void AddTo(Cells& cells, const Outputs&) const {
      cells.AddWon(this->values, [&](int i) { return winners.lane[i] == this->number; });
    }
  };
};

// The Input if tied edges share a cell: an edge won the cells whose extremum equals the element of its segment in
// `reduced`, the data of the forward pass. This also holds if only one edge attains the extremum, and a NaN equals
// nothing.
template <typename T>
struct RowsWithExtrema : Edges {
  static constexpr bool kNeedsEdges = false;

  const T* extrema;  // [batch or 1, num_rows, features]
  bool extrema_are_shared;
  const T* reduced;  // [batch or 1, segments, features]
  bool reduced_is_shared;
  int64_t segments;

  void Advance(int64_t element, int64_t edges, int64_t features) {
    Edges::Advance(element, edges, features);
    if (!extrema_are_shared) extrema += element * num_rows * features;
    if (reduced_is_shared) reduced -= element * segments * features;  // Load numbers segments over the whole batch
  }

  template <int kVec>
  struct Row : RowInFlight<T, kVec> {
    Packed<T, kVec> extrema, reduced;

    __device__ __forceinline__ void Load(const RowsWithExtrema& input, const T* data, const SourceRow& source,
                                         const RowPlace& place) {
      this->LoadGathered(data, source, place);
      extrema = Pack(Repeat<kVec>(static_cast<T>(ComputeType<T>{0})));
      reduced = Pack(Repeat<kVec>(static_cast<T>(ComputeType<T>{1})));
      if (source.row != kDropped && place.segment >= 0) {
        extrema = LoadPacked<kVec>(input.extrema + place.column + FirstElement(source.row, place.features));
        reduced = LoadPacked<kVec>(input.reduced + place.segment * place.features + place.column);
      }
    }
    template <typename Cells, typename Outputs>
    __device__ __forceinline__ void AddTo(Cells& cells, const Outputs&) const {
      const Vector<T, kVec> attained = Unpack<T, kVec>(extrema), own = Unpack<T, kVec>(reduced);
      cells.AddWon(this->values, [&](int i) {
        return static_cast<ComputeType<T>>(attained.lane[i]) == static_cast<ComputeType<T>>(own.lane[i]);
      });
    }
  };
};

}  // namespace

std::vector<const char*> GatherExtremumBackwardCall::Strategies() { return EdgeStrategies(); }

Plan GatherExtremumBackwardCall::MakePlan() const { return PlanOf(*this).Summary(); }

CudaStatus GatherExtremumBackwardCall::Run(cudaStream_t stream) const {
  // Batch elements that share arrays are launched one by one. That takes no more scratch than the whole batch at once.
  GatheringCall at_once = *this;
  const bool shares_arrays = problem.data_is_shared || winner.is_shared || (shares_ties && gathered.is_shared);
  if (shares_arrays) at_once.problem.batch = problem.batch > 0;
  const ReducePlan plan = PlanOf(at_once);
  const Edges edges = EdgesOf(*this, /*clips=*/false);
  return LaunchFor(type, JB_DISPATCH(DispatchFloating), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto reduce = [&](const auto& input) {
      return LaunchReduction<WonReduction<T>>(*this, plan, {d_data, /*is_wide=*/false}, stream, input);
    };
    return shares_ties
               ? reduce(RowsWithExtrema<T>{edges, static_cast<const T*>(extrema.data), extrema.is_shared,
                                           static_cast<const T*>(gathered.data), gathered.is_shared, problem.segments})
               : reduce(RowsWithWinners<T>{edges, static_cast<const int32_t*>(winner.data), winner.is_shared});
  });
}

}  // namespace jax_baracuda::segment
