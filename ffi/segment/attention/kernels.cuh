// The CUDA kernels of attention over edges: reductions in tiles (see engine/reduction.cuh) whose rows are edges.
//
// Each thread has one vector of a head's features. The threads of a head add up their terms of the logit by shuffles;
// they always belong to one group and one warp, because a head is a power of two of vectors. Heads of given logits may
// be narrower than a vector, whose threads then have narrower vectors.
//
// Loading and computing an edge takes about as long as its bytes, so instructions count here: addresses are products of
// 32-bit numbers, which take one instruction, and all lanes of a warp shuffle together.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "ffi/core/warp.cuh"
#include "ffi/segment/attention/arithmetic.h"
#include "ffi/segment/attention/call.h"
#include "ffi/segment/engine/reduce.cuh"

namespace jax_baracuda::segment {

__device__ __forceinline__ float AttentionExp(float x) { return __expf(x); }
__device__ __forceinline__ double AttentionExp(double x) { return exp(x); }

// A total is at least 1, from the edge that has the maximum, or 0.
__device__ __forceinline__ float ApproximateInverse(float total) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(total));
  return total == 0.0f ? 0.0f : inverse;
}
__device__ __forceinline__ double ApproximateInverse(double total) { return InverseTotal(total); }

// Sums over the threads of a head, which are neighbours: `lanes` is a power of two. All lanes of the warp take part.
template <typename C, int kSums>
__device__ __forceinline__ void SumOverHead(C (&sums)[kSums], int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2) {
#pragma unroll
    for (C& sum : sums) sum += __shfl_xor_sync(kFullWarp, sum, step);
  }
}

// The address this many bytes after another.
template <typename T>
__device__ __forceinline__ const T* At(const T* address, uint64_t bytes) {
  return reinterpret_cast<const T*>(reinterpret_cast<const char*>(address) + bytes);
}

// The heads of a call, for the accumulators' results and for the terms of the logits.
template <typename T, typename Score>
struct AttentionHeads {
  Score score;
  const T* score_weights;  // [heads, features of a head]
  int64_t heads;
  int log_features;  // of a head, to the base 2

  __device__ __forceinline__ int64_t HeadOf(int64_t feature) const { return feature >> log_features; }
  __device__ __forceinline__ bool IsFirst(int64_t feature) const {
    return (static_cast<uint32_t>(feature) & ((1u << log_features) - 1)) == 0;
  }
  template <int kVec>
  __device__ __forceinline__ int Lanes() const {
    return (1 << log_features) / kVec;
  }
};

// The arrays of one batch element.
template <typename T, typename Score>
struct AttentionArrays : AttentionHeads<T, Score> {
  using C = ComputeType<T>;

  const T *query, *key, *value, *d_output;
  const C *bias, *maxima, *totals, *means;
  const int32_t* rows_of_edges;
  int64_t rows;
  uint32_t row_bytes, head_bytes;  // of a row's features, and of a number for each of its heads

  __device__ __forceinline__ uint32_t NearestRow(uint32_t edge) const {
    return static_cast<uint32_t>(min(max(int64_t{__ldg(rows_of_edges + edge)}, int64_t{0}), rows - 1));
  }
  // Bytes from the start of an array with a vector for each row or segment, or with a number for each head of those or
  // of each edge, to what a thread loads.
  __device__ __forceinline__ uint64_t OfRow(uint32_t row, const RowPlace& place) const {
    return uint64_t{row} * row_bytes + place.column * sizeof(T);
  }
  __device__ __forceinline__ uint64_t OfHead(uint32_t row, const RowPlace& place) const {
    return uint64_t{row} * head_bytes + place.at * sizeof(C);
  }
};

template <typename T, typename Score>
AttentionHeads<T, Score> HeadsOf(const AttentionCall& call, int64_t b) {
  int log_features = 0;
  while (int64_t{1} << log_features < call.head_features) ++log_features;
  return {Score::Of(call), call.score_weights.Of<T>(b, call.heads * call.head_features), call.heads, log_features};
}

template <typename T, typename Score>
AttentionArrays<T, Score> ArraysOf(const AttentionCall& call, int64_t segments, int64_t rows, int64_t b) {
  using C = ComputeType<T>;
  const int64_t features = call.heads * call.head_features, heads = call.heads;
  AttentionArrays<T, Score> arrays{HeadsOf<T, Score>(call, b)};
  arrays.query = call.query.Of<T>(b, segments * features);
  arrays.key = call.key.Of<T>(b, rows * features);
  arrays.value = call.value.Of<T>(b, rows * features);
  arrays.bias = call.bias.Of<C>(b, call.problem.rows * heads);
  arrays.d_output = call.d_output.Of<T>(b, segments * features);
  arrays.maxima = call.maxima.Of<C>(b, segments * heads);
  arrays.totals = call.totals.Of<C>(b, segments * heads);
  arrays.means = call.means.Of<C>(b, segments * heads);
  arrays.rows_of_edges = call.rows_of_edges.Of<int32_t>(b, call.problem.rows);
  arrays.rows = rows;
  arrays.row_bytes = static_cast<uint32_t>(features * sizeof(T));
  arrays.head_bytes = static_cast<uint32_t>(heads * sizeof(C));
  return arrays;
}

// The Input of the three passes, without the Row.
template <typename T, typename Score>
struct AttentionEdges : Edges {
  static constexpr bool kNeedsEdges = true, kSharesLanes = true;
  AttentionArrays<T, Score> arrays;

  // The head of a thread.
  __device__ __forceinline__ int64_t At(int64_t, int64_t, int64_t column) const { return arrays.HeadOf(column); }
};

// The vectors of an edge that enter its logit, on their way.
template <typename T, typename Score, int kVec>
struct ScoredEdge {
  using C = ComputeType<T>;

  Packed<T, kVec> query, key, value;
  C bias;
  bool participates;  // the edge has a row and a segment; otherwise nothing else is set

  __device__ __forceinline__ void LoadScored(const AttentionArrays<T, Score>& arrays, uint32_t segment, uint32_t row,
                                             uint32_t edge, const RowPlace& place) {
    const uint64_t of_row = arrays.OfRow(row, place);
    if constexpr (!Score::kIsGiven) {
      key = LoadPacked<kVec>(At(arrays.key, of_row));
      query = LoadPacked<kVec>(At(arrays.query, arrays.OfRow(segment, place)));
    }
    if constexpr (!Score::kIsAdditive) value = LoadPacked<kVec>(At(arrays.value, of_row));
    bias = arrays.bias == nullptr ? C{0} : __ldg(At(arrays.bias, arrays.OfHead(edge, place)));
  }

  __device__ __forceinline__ const Packed<T, kVec>& Values() const { return Score::kIsAdditive ? key : value; }

  // The elements i of the query, the key and the score weights, for a function of Score.
  template <typename Function>
  __device__ __forceinline__ void ForEach(const AttentionHeads<T, Score>& heads, int64_t column,
                                          Function&& function) const {
    C queries[kVec], keys[kVec], weights[kVec] = {};
    Widen<T, kVec>(query, queries);
    Widen<T, kVec>(key, keys);
    if constexpr (Score::kIsAdditive) Widen<T, kVec>(LoadPacked<kVec>(heads.score_weights + column), weights);
#pragma unroll
    for (int i = 0; i < kVec; ++i) function(i, queries[i], keys[i], weights[i]);
  }

  // What the thread's features add to the sum in the logit.
  __device__ __forceinline__ C OwnTerms(const AttentionHeads<T, Score>& heads, int64_t column) const {
    C sum{0};
    if constexpr (!Score::kIsGiven) {
      ForEach(heads, column, [&](int, C q, C k, C w) { sum += heads.score.Term(q, k, w); });
    }
    return sum;
  }
  __device__ __forceinline__ C Logit(const AttentionHeads<T, Score>& heads, C sum) const {
    if constexpr (Score::kIsGiven) {
      return bias;
    } else {
      return heads.score.Logit(sum) + bias;
    }
  }
};

// One element of the batch, as kernels see it. The edges of given logits that have no row make up one more segment,
// whose sums are not stored.
template <typename Call>
Problem ProblemOfElement(const Call& call) {
  Problem problem = call.problem;
  problem.batch = problem.batch > 0;
  if constexpr (std::is_same_v<Call, AttentionByRowCall>) {
    if (call.score == ScoreKind::kGiven && !problem.HasNoResult()) ++problem.segments;
  }
  return problem;
}

// `state_cells`: numbers of the accumulation type per cell of an accumulator.
template <typename Call>
ReducePlan PlanAttention(const Call& call, int state_cells) {
  const Problem problem = ProblemOfElement(call);
  const int64_t element_bytes = ElementBytes(call.type), width = call.head_features;
  const int64_t vector = RowVector(width, element_bytes);
  // At most a warp, also for a call whose heads a program pads before the kernel runs.
  const int64_t unit = std::clamp<int64_t>(width / vector, 1, 32);
  int64_t max_edges = 0;
  if (!problem.HasNoResult()) {
    const FeatureLanes lanes = AssignFeatures(problem.features / vector, 32, static_cast<int>(unit));
    max_edges = std::max(Tuning::kMaxEdgesOfSmallAttention, Tuning::kMaxStepsOfSmallAttention * RowsOfSmallStep(lanes));
  }
  const Strategy strategy = StrategyOfEdges(problem, vector, static_cast<int>(unit), max_edges);
  return MakeReducePlan(problem, strategy, 1, width, element_bytes, state_cells * AccumulatorBytes(call.type),
                        static_cast<int>(unit));
}

// Launches a reduction for each element of the batch, with its own arrays. `outputs_of(heads, T{}, b)` gives the results
// of element b.
template <template <typename, typename> class Reduction, template <typename, typename> class Input, bool kAllowsGiven,
          typename Call, typename OutputsOf>
CudaStatus LaunchAttention(const Call& call, const ReducePlan& plan, int64_t segments, int64_t rows,
                           cudaStream_t stream, const OutputsOf& outputs_of) {
  constexpr auto kMaxRowBytes = int64_t{UINT32_MAX};
  if (call.heads * call.head_features * ElementBytes(call.type) > kMaxRowBytes || call.heads * 8 > kMaxRowBytes) {
    return JB_CUDA_STATUS(cudaErrorInvalidValue);
  }
  const auto launch = [&](auto element_tag, auto score, int64_t b) {
    using T = typename decltype(element_tag)::type;
    using Score = decltype(score);
    GatheringCall element = call;
    element.problem = ProblemOfElement(call);
    const int64_t first_id = call.problem.IdIndex(b, 0);
    element.segment_ids = static_cast<const char*>(call.segment_ids) + first_id * (call.ids_are_64_bit ? 8 : 4);
    Input<T, Score> input{};
    static_cast<Edges&>(input) = EdgesOf(call, Input<T, Score>::kClips);
    input.Advance(b, call.problem.rows, call.problem.features);
    input.arrays = ArraysOf<T, Score>(call, segments, rows, b);
    const auto outputs = outputs_of(HeadsOf<T, Score>(call, b), T{}, b);
    return LaunchReduction<Reduction<T, Score>>(element, plan, outputs, stream, input);
  };
  return LaunchFor(call.type, JB_DISPATCH(DispatchFloating), [&](auto tag) -> CudaStatus {
    using C = ComputeType<typename decltype(tag)::type>;
    return DispatchScore<C, kAllowsGiven>(call, [&](auto score) -> CudaStatus {
      for (int64_t b = 0; b < call.problem.batch; ++b) JB_RETURN_IF_CUDA_ERROR(launch(tag, score, b));
      return {};
    });
  });
}

}  // namespace jax_baracuda::segment
