// Sums of gathered rows, with or without weights.
#include "ffi/segment/gather_sum/reduction.cuh"

namespace jax_baracuda::segment {
namespace {

ReducePlan PlanOf(const GatherSumCall& call) {
  return PlanGathered(call, call.has_weights ? call.FeaturesPerHead() : call.problem.features,
                      SumStateBytes(call.type));
}

// The Input of weighted sums: each row is scaled by the weights of its edge, one per head.
template <typename T>
struct WeightedRows : Edges {
  static constexpr bool kTakesEdges = true;

  const T* weights;  // [batch or 1, edges, heads]
  bool weights_are_shared;
  int64_t heads, features_per_head;

  void Advance(int64_t element, int64_t edges, int64_t features) {
    Edges::Advance(element, edges, features);
    if (!weights_are_shared) weights += element * edges * heads;
  }
  // The position of the first edge's weight.
  __device__ __forceinline__ int64_t At(int64_t b, int64_t edges, int64_t column) const {
    return (weights_are_shared ? 0 : b * edges * heads) + column / features_per_head;
  }

  template <int kVec>
  struct Row : ComingRow<T, kVec> {
    T weight;

    __device__ __forceinline__ void Load(const WeightedRows& input, const T* data, const SourceRow& source,
                                         const RowPlace& place) {
      this->LoadGathered(data, source, place);
      const bool exists = source.row != kDropped;
      weight =
          exists ? __ldg(input.weights + (place.at + source.edge * input.heads)) : static_cast<T>(ComputeType<T>{0});
    }
    template <typename Cells, typename Outputs>
    __device__ __forceinline__ void AddTo(Cells& cells, const Outputs&) const {
      cells.AddScaled(Unpack<T, kVec>(this->values), weight);
    }
  };
};

}  // namespace

Plan GatherSumCall::CudaPlan() const { return PlanOf(*this).Summary(); }

CudaStatus GatherSumCall::LaunchOnCuda(cudaStream_t stream) const {
  const ReducePlan plan = PlanOf(*this);
  return LaunchFor(type, JB_DISPATCH(DispatchFloating), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Edges edges = EdgesOf(*this, clips_gather_ids);
    const auto reduce = [&](const auto& input) {
      return LaunchReduction<GatherSumReduction<T>>(*this, plan, {output, is_wide}, stream, input);
    };
    return has_weights ? reduce(WeightedRows<T>{edges, static_cast<const T*>(weights), weights_are_shared, heads,
                                                FeaturesPerHead()})
                       : reduce(GatheredRows<T>{edges});
  });
}

}  // namespace jax_baracuda::segment
