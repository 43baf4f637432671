// The gradient of attention over edges, in two passes: by segment, whose edges gather keys and values, and by row, whose
// edges gather queries and cotangents. Both compute the logits again, so that nothing is kept per edge. Given logits need
// the pass by row alone.
#include "ffi/segment/attention/kernels.cuh"

namespace jax_baracuda::segment {
namespace {

// Sums of kSums vectors per cell: the gradients that a pass adds up.
template <typename T, int kSums, int kInFlight = 1>
struct GradientSums {
  using Element = T;
  // A row loads so much that more resident blocks hide more latency than more rows in flight.
  static constexpr int kRowsInFlight = kInFlight;
  static constexpr int kTileBlocks = 6;
  using C = ComputeType<T>;

  template <int kCount>
  struct alignas(sizeof(C)) Accumulator {
    C sum[kSums][kCount];

    __device__ __forceinline__ void Start() {
#pragma unroll
      for (auto& of_one : sum) {
#pragma unroll
        for (C& x : of_one) x = C{0};
      }
    }
    template <typename Outputs>
    __device__ __forceinline__ void Merge(const Accumulator& other, const Outputs&) {
#pragma unroll
      for (int k = 0; k < kSums; ++k) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) sum[k][i] += other.sum[k][i];
      }
    }
    template <typename Outputs>
    __device__ __forceinline__ void Store(const Outputs& outputs, int64_t segment, int64_t features,
                                          int64_t feature) const {
      outputs.Store(segment * features + feature, sum);
    }
  };
};

// The gradients of the queries and, if additive, of the score weights by segment.
template <typename T, typename Score>
struct BySegmentReduction : GradientSums<T, Score::kIsAdditive ? 2 : 1> {
  using C = ComputeType<T>;

  struct Outputs : AttentionHeads<T, Score> {
    T* d_query;
    C *d_bias, *d_score_weights;

    template <int kSums, int kCount>
    __device__ __forceinline__ void Store(int64_t at, const C (&sum)[kSums][kCount]) const {
      StoreNarrow<T, kCount>(d_query + at, sum[0]);
      if constexpr (kSums > 1) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) d_score_weights[at + i] = sum[1][i];
      }
    }
  };
};

// The gradients of the keys and of the values, in this order; one sum if the keys are the values, or if there are none.
// Two float32 rows of given logits fit the registers.
template <typename T, typename Score>
struct ByRowReduction
    : GradientSums<T, Score::kIsAdditive || Score::kIsGiven ? 1 : 2, Score::kIsGiven && sizeof(T) == 4 ? 2 : 1> {
  using C = ComputeType<T>;

  struct Outputs : AttentionHeads<T, Score> {
    T *d_key, *d_value;
    int64_t cells;
    C* d_bias;  // of given logits

    template <int kSums, int kCount>
    __device__ __forceinline__ void Store(int64_t at, const C (&sum)[kSums][kCount]) const {
      if (Score::kIsGiven && at >= cells) return;  // the sum of edges without a row
      StoreNarrow<T, kCount>((Score::kIsGiven ? d_value : d_key) + at, sum[0]);
      if constexpr (kSums > 1) StoreNarrow<T, kCount>(d_value + at, sum[1]);
    }
  };
};

// An edge with the cotangent and the softmax of its segment.
template <typename T, typename Score, int kVec>
struct EdgeGradient : ScoredEdge<T, Score, kVec> {
  using C = ComputeType<T>;

  Packed<T, kVec> d_output;
  C maximum, total, mean;

  __device__ __forceinline__ void LoadGradient(const AttentionArrays<T, Score>& arrays, uint32_t segment, uint32_t row,
                                               const SourceRow& source, uint32_t own, const RowPlace& place) {
    this->participates = source.row != kDropped && own != kDropped;
    if (!this->participates) return;
    this->LoadScored(arrays, segment, row, source.edge, place);
    d_output = LoadPacked<kVec>(At(arrays.d_output, arrays.OfRow(segment, place)));
    const uint64_t of_head = arrays.OfHead(segment, place);
    maximum = __ldg(At(arrays.maxima, of_head));
    total = __ldg(At(arrays.totals, of_head));
    mean = __ldg(At(arrays.means, of_head));
  }

  C probability, d_logit;

  template <typename Outputs>
  __device__ __forceinline__ void Prepare(const Outputs& outputs, int64_t column) {
    C d_outputs[kVec], values[kVec], sums[Score::kIsGiven ? 1 : 2] = {};  // the last one: of the logit
    Widen<T, kVec>(d_output, d_outputs);
    Widen<T, kVec>(this->Values(), values);
#pragma unroll
    for (int i = 0; i < kVec; ++i) sums[0] += d_outputs[i] * values[i];
    if constexpr (!Score::kIsGiven) sums[1] = this->OwnTerms(outputs, column);
    SumOverHead(sums, outputs.template Lanes<kVec>());
    const C d_probability = sums[0];
    const C distance = this->Logit(outputs, sums[std::size(sums) - 1]) - maximum;  // given logits need no sum
    // A distance is above 0 if the maximum was rounded otherwise.
    probability = AttentionExp(distance > C{0} ? C{0} : distance) * ApproximateInverse(total);
    d_logit = probability * (d_probability - mean);
  }
};

template <typename T, typename Score>
struct BySegmentEdges : AttentionEdges<T, Score> {
  static constexpr bool kClips = true;

  template <int kVec>
  struct Row : EdgeGradient<T, Score, kVec> {
    using C = ComputeType<T>;
    uint32_t edge;
    int64_t column, head;

    __device__ __forceinline__ void Load(const BySegmentEdges& input, const T*, const SourceRow& source,
                                         const RowPlace& place) {
      const auto segment = static_cast<uint32_t>(place.segment);
      edge = source.edge;
      column = place.column;
      head = place.at;
      this->LoadGradient(input.arrays, segment, source.row, source, /*own=*/segment, place);
    }
    template <typename Cells, typename Outputs>
    __device__ __forceinline__ void AddTo(Cells& cells, const Outputs& outputs) const {
      if (!this->participates) return;
      const C d_sum = outputs.score.OfSum(this->d_logit);
      this->ForEach(outputs, column, [&](int i, C query, C key, C weight) {
        cells.sum[0][i] += d_sum * outputs.score.ByQuery(query, key, weight);
        if constexpr (Score::kIsAdditive) cells.sum[1][i] += d_sum * outputs.score.Leaky(query + key);
      });
      if (outputs.d_bias != nullptr && outputs.IsFirst(column)) {
        outputs.d_bias[edge * outputs.heads + head] = this->d_logit;
      }
    }
  };
};

template <typename T, typename Score>
struct ByRowEdges : AttentionEdges<T, Score> {
  static constexpr bool kClips = false;

  template <int kVec>
  struct Row : EdgeGradient<T, Score, kVec> {
    using C = ComputeType<T>;
    uint32_t edge;
    int64_t column, head;

    __device__ __forceinline__ void Load(const ByRowEdges& input, const T*, const SourceRow& source,
                                         const RowPlace& place) {
      const auto own = static_cast<uint32_t>(place.segment);
      edge = source.edge;
      column = place.column;
      head = place.at;
      const bool has_no_row = Score::kIsGiven && own == input.arrays.rows;
      const uint32_t row = has_no_row ? input.arrays.NearestRow(edge) : own;
      this->LoadGradient(input.arrays, /*segment=*/source.row, row, source, own, place);
    }
    template <typename Cells, typename Outputs>
    __device__ __forceinline__ void AddTo(Cells& cells, const Outputs& outputs) const {
      if constexpr (Score::kIsGiven) {
        // Edges that take no part have a gradient of 0.
        if (outputs.IsFirst(column)) {
          outputs.d_bias[edge * outputs.heads + head] = this->participates ? this->d_logit : C{0};
        }
      }
      if (!this->participates) return;
      C d_outputs[kVec];
      Widen<T, kVec>(this->d_output, d_outputs);
      if constexpr (Score::kIsGiven) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) cells.sum[0][i] += this->probability * d_outputs[i];
      } else {
        const C d_sum = outputs.score.OfSum(this->d_logit);
        this->ForEach(outputs, column, [&](int i, C query, C key, C weight) {
          const C of_value = this->probability * d_outputs[i];
          cells.sum[0][i] += d_sum * outputs.score.ByKey(query, key, weight);
          cells.sum[Score::kIsAdditive ? 0 : 1][i] += of_value;
        });
      }
    }
  };
};

template <typename Call>
ReducePlan PlanOf(const Call& call) {
  return PlanAttention(call, /*state_cells=*/2);
}

}  // namespace

template <typename T, typename Score>
inline constexpr bool kOnlyWidestVectors<BySegmentReduction<T, Score>> = true;
template <typename T, typename Score>
inline constexpr bool kOnlyWidestVectors<ByRowReduction<T, Score>> = !Score::kIsGiven;
// A vector of several cells has its place in several results.
template <typename T, typename Score>
inline constexpr bool kStoresCellsAlone<BySegmentReduction<T, Score>> = false;
template <typename T, typename Score>
inline constexpr bool kStoresCellsAlone<ByRowReduction<T, Score>> = false;

Plan AttentionBySegmentCall::MakePlan() const { return PlanOf(*this).Summary(); }
Plan AttentionByRowCall::MakePlan() const { return PlanOf(*this).Summary(); }

CudaStatus AttentionBySegmentCall::Run(cudaStream_t stream) const {
  if (d_bias != nullptr) {
    // Dropped edges get 0.
    JB_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(d_bias, 0, BiasBytes(*this), stream));
  }
  return LaunchAttention<BySegmentReduction, BySegmentEdges, /*kAllowsGiven=*/false>(
      *this, PlanOf(*this), problem.segments, num_rows, stream, [&](auto of_heads, auto element, int64_t b) {
        using T = decltype(element);
        const int64_t cells = problem.segments * problem.features;
        typename BySegmentReduction<T, decltype(of_heads.score)>::Outputs outputs{of_heads};
        outputs.d_query = static_cast<T*>(d_query) + b * cells;
        using C = ComputeType<T>;
        outputs.d_bias = d_bias == nullptr ? nullptr : static_cast<C*>(d_bias) + b * problem.rows * heads;
        outputs.d_score_weights = d_score_weights == nullptr ? nullptr : static_cast<C*>(d_score_weights) + b * cells;
        return outputs;
      });
}

CudaStatus AttentionByRowCall::Run(cudaStream_t stream) const {
  if (d_bias != nullptr && problem.segments == 0) {
    // No kernel runs, which would write the gradients of all edges.
    JB_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(d_bias, 0, BiasBytes(*this), stream));
  }
  return LaunchAttention<ByRowReduction, ByRowEdges, /*kAllowsGiven=*/true>(
      *this, PlanOf(*this), num_rows, problem.segments, stream, [&](auto of_heads, auto element, int64_t b) {
        using T = decltype(element);
        const int64_t cells = problem.segments * problem.features;
        typename ByRowReduction<T, decltype(of_heads.score)>::Outputs outputs{of_heads};
        outputs.d_key = d_key == nullptr ? nullptr : static_cast<T*>(d_key) + b * cells;
        outputs.d_value = d_value == nullptr ? nullptr : static_cast<T*>(d_value) + b * cells;
        outputs.cells = cells;
        using C = ComputeType<T>;
        outputs.d_bias = d_bias == nullptr ? nullptr : static_cast<C*>(d_bias) + b * problem.rows * heads;
        return outputs;
      });
}

}  // namespace jax_baracuda::segment
