// The forward pass of attention over edges: a softmax in one pass, with a running maximum.
#include "ffi/segment/attention/kernels.cuh"

namespace jax_baracuda::segment {
namespace {

template <typename T, typename Score>
struct ForwardReduction {
  using Element = T;
  static constexpr int kRowsInFlight = 3;
  static constexpr int kTileBlocks = 6;
  using C = ComputeType<T>;

  struct Outputs : AttentionHeads<T, Score> {
    T* output;
    C *maxima, *totals;
  };

  // All threads of a head have its maximum and its total.
  template <int kCount>
  struct alignas(sizeof(C)) Accumulator {
    C sum[kCount];
    C maximum, total;

    __device__ __forceinline__ void Start() {
      maximum = kLowestLogit<C>;
      total = C{0};
#pragma unroll
      for (C& x : sum) x = C{0};
    }
    // fmax drops a NaN, but the total keeps it.
    __device__ __forceinline__ void AddEdge(C logit, const C (&value)[kCount]) {
      const C largest = fmax(maximum, logit);
      const C shrinkage = AttentionExp(maximum - largest), weight = AttentionExp(logit - largest);
      maximum = largest;
      total = total * shrinkage + weight;
#pragma unroll
      for (int i = 0; i < kCount; ++i) sum[i] = sum[i] * shrinkage + weight * value[i];
    }
    __device__ __forceinline__ void Merge(const Accumulator& other, const Outputs&) {
      const C largest = fmax(maximum, other.maximum);
      const C shrinkage = AttentionExp(maximum - largest), of_other = AttentionExp(other.maximum - largest);
      maximum = largest;
      total = total * shrinkage + other.total * of_other;
#pragma unroll
      for (int i = 0; i < kCount; ++i) sum[i] = sum[i] * shrinkage + other.sum[i] * of_other;
    }
    __device__ __forceinline__ void Store(const Outputs& outputs, int64_t segment, int64_t features,
                                          int64_t feature) const {
      const C inverse = InverseTotal(total);
      C result[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) result[i] = sum[i] * inverse;
      StoreNarrow<T, kCount>(outputs.output + segment * features + feature, result);
      // An empty segment is stored by wide vectors, which may hold several narrow heads.
      constexpr int kHeads = Score::kIsGiven ? kCount : 1;
#pragma unroll
      for (int i = 0; i < kHeads; ++i) {
        if (!outputs.IsFirst(feature + i)) continue;
        const int64_t head = segment * outputs.heads + outputs.HeadOf(feature + i);
        outputs.maxima[head] = maximum;
        outputs.totals[head] = total;
      }
    }
  };
};

template <typename T, typename Score>
struct ForwardEdges : AttentionEdges<T, Score> {
  static constexpr bool kClips = true;

  template <int kVec>
  struct Row : ScoredEdge<T, Score, kVec> {
    ComputeType<T> logit;

    __device__ __forceinline__ void Load(const ForwardEdges& input, const T*, const SourceRow& source,
                                         const RowPlace& place) {
      const auto segment = static_cast<uint32_t>(place.segment);
      this->participates = source.row != kDropped && segment != kDropped;
      if (this->participates) this->LoadScored(input.arrays, segment, source.row, source.edge, place);
    }
    template <typename Outputs>
    __device__ __forceinline__ void Prepare(const Outputs& outputs, int64_t column) {
      ComputeType<T> sums[] = {this->OwnTerms(outputs, column)};
      if constexpr (!Score::kIsGiven) SumOverHead(sums, outputs.template Lanes<kVec>());
      logit = this->Logit(outputs, sums[0]);
    }
    template <typename Cells, typename Outputs>
    __device__ __forceinline__ void AddTo(Cells& cells, const Outputs&) const {
      ComputeType<T> values[kVec];
      Widen<T, kVec>(this->Values(), values);
      if (this->participates) cells.AddEdge(logit, values);
    }
  };
};

}  // namespace

template <typename T, typename Score>
inline constexpr bool kStoresCellsAlone<ForwardReduction<T, Score>> = false;
template <typename T, typename Score>
inline constexpr bool kOnlyWidestVectors<ForwardReduction<T, Score>> = !Score::kIsGiven;

std::vector<const char*> AttentionCall::Strategies() { return EdgeStrategies(); }

Plan AttentionForwardCall::MakePlan() const { return PlanAttention(*this, /*state_cells=*/3).Summary(); }

CudaStatus AttentionForwardCall::Run(cudaStream_t stream) const {
  const ReducePlan plan = PlanAttention(*this, /*state_cells=*/3);
  return LaunchAttention<ForwardReduction, ForwardEdges, /*kAllowsGiven=*/true>(
      *this, plan, problem.segments, num_rows, stream, [&](auto heads, auto element, int64_t b) {
        using T = decltype(element);
        using C = ComputeType<T>;
        typename ForwardReduction<T, decltype(heads.score)>::Outputs outputs{heads};
        outputs.output = static_cast<T*>(output) + b * problem.segments * problem.features;
        outputs.maxima = static_cast<C*>(new_maxima) + b * problem.segments * this->heads;
        outputs.totals = static_cast<C*>(new_totals) + b * problem.segments * this->heads;
        return outputs;
      });
}

}  // namespace jax_baracuda::segment
