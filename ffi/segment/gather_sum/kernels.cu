// Sums of gathered rows, with or without weights.
#include "ffi/segment/gather_sum/reduction.cuh"

namespace jax_baracuda::segment {
namespace {

// Whether each feature has a weight of its own. Weights are then loaded by vectors, as rows are.
bool HasWeightVectors(const GatherSumCall& call) { return call.has_weights && call.FeaturesPerHead() == 1; }

ReducePlan PlanOf(const GatherSumCall& call) {
  const bool has_heads = call.has_weights && !HasWeightVectors(call);
  return PlanGathered(call, has_heads ? call.FeaturesPerHead() : call.problem.features, AccumulatorBytes(call.type));
}

// The Input of weighted sums: each row is scaled by the weights of its edge, one per head, or one per feature with
// kHasWeightVectors.
template <typename T, bool kHasWeightVectors>
struct WeightedRows : Edges {
  static constexpr bool kNeedsEdges = true;

  const T* weights;  // [batch or 1, edges, heads]
  bool weights_are_shared;
  int64_t heads, features_per_head;

  void Advance(int64_t element, int64_t edges, int64_t features) {
    Edges::Advance(element, edges, features);
    if (!weights_are_shared) weights += element * edges * heads;
  }
  // The position of the first edge's weight.
  __device__ __forceinline__ int64_t At(int64_t b, int64_t edges, int64_t column) const {
    return (weights_are_shared ? 0 : b * edges * heads) + (kHasWeightVectors ? column : column / features_per_head);
  }

  template <int kVec>
  struct Row : RowInFlight<T, kVec> {
    static constexpr int kWeights = kHasWeightVectors ? kVec : 1;
    Packed<T, kWeights> weights;

    __device__ __forceinline__ void Load(const WeightedRows& input, const T* data, const SourceRow& source,
                                         const RowPlace& place) {
      this->LoadGathered(data, source, place);
      if (source.row != kDropped) {
        weights = LoadPacked<kWeights>(input.weights + (place.at + source.edge * input.heads));
      } else {
        weights = Packed<T, kWeights>{};
      }
    }
    template <typename Cells, typename Outputs>
    __device__ __forceinline__ void AddTo(Cells& cells, const Outputs&) const {
      const Vector<T, kWeights> own = Unpack<T, kWeights>(weights);
      Vector<T, kVec> scales;
#pragma unroll
      for (int i = 0; i < kVec; ++i) scales.lane[i] = own.lane[i % kWeights];
      cells.AddScaled(Unpack<T, kVec>(this->values), scales);
    }
  };
};

}  // namespace

std::vector<const char*> GatherSumCall::Strategies() { return EdgeStrategies(); }

Plan GatherSumCall::MakePlan() const { return PlanOf(*this).Summary(); }

CudaStatus GatherSumCall::Run(cudaStream_t stream) const {
  const ReducePlan plan = PlanOf(*this);
  return LaunchFor(type, JB_DISPATCH(DispatchFloating), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Edges edges = EdgesOf(*this, clips_gather_ids);
    const auto reduce_weighted = [&](auto has_vectors) {
      constexpr bool kHasWeightVectors = decltype(has_vectors)::value;
      using Input = WeightedRows<T, kHasWeightVectors>;
      const Input input{edges, static_cast<const T*>(weights.data), weights.is_shared, heads, FeaturesPerHead()};
      using Reduction = GatherSumReduction<T, kHasWeightVectors>;
      return LaunchReduction<Reduction>(*this, plan, {output, is_wide}, stream, input);
    };
    if (HasWeightVectors(*this)) return reduce_weighted(std::true_type{});
    if (has_weights) return reduce_weighted(std::false_type{});
    return LaunchReduction<GatherSumReduction<T>>(*this, plan, {output, is_wide}, stream, GatheredRows<T>{edges});
  });
}

}  // namespace jax_baracuda::segment
