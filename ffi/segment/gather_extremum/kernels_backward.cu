// The gradient of maxima and minima of gathered rows: a bit for each cell that an edge won, and the sums of the selected
// cotangents over the edges of each row. Of the cells of a hot segment, which many edges share, each edge won few: most
// rows of cotangents are not read at all.
#include "ffi/core/warp.cuh"
#include "ffi/segment/extremum/arithmetic.h"
#include "ffi/segment/gather_extremum/launch.cuh"
#include "ffi/segment/gather_sum/reduction.cuh"

namespace jax_baracuda::segment {
namespace {

constexpr int kSelectThreads = 256;
constexpr int kEdgesInFlight = 4;
constexpr int kWordBits = 32;

struct SelectArguments {
  GatherExtremumBackwardCall call;
  uint32_t* selection;  // [batch, edges, words]
  int64_t edges_of_block;
  int64_t blocks_per_batch;
};

// A group of kLanes threads takes an edge, each of them kVec neighbouring features at once.
template <typename T, int kVec, int kLanes, bool kSharesTies>
__global__ void __launch_bounds__(kSelectThreads) SelectKernel(const __grid_constant__ SelectArguments a) {
  constexpr int kGroups = kSelectThreads / kLanes;
  constexpr int kWordLanes = kLanes < kWordBits / kVec ? kLanes : kWordBits / kVec;  // whose bits make a word
  using C = ComputeType<T>;
  const GatherExtremumBackwardCall& call = a.call;
  const int64_t edges = call.problem.rows, features = call.problem.features, words = call.SelectionWords();
  const int64_t b = blockIdx.x / a.blocks_per_batch, rows = call.problem.segments;
  const int64_t first = (blockIdx.x - b * a.blocks_per_batch) * a.edges_of_block + threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes;
  const int64_t first_cell = call.winner_is_shared ? 0 : b * call.num_rows * features;
  const int32_t* const winners = call.winner + first_cell;
  const T* const extrema = static_cast<const T*>(call.extrema) + first_cell;
  const T* const data = static_cast<const T*>(call.gathered) + (call.gathered_is_shared ? 0 : b * rows * features);
  const int32_t* const segment_ids =
      call.segment_ids_of_edges + (call.segment_ids_of_edges_are_shared ? 0 : b * edges);
  const int32_t* const gather_ids = call.gather_ids_of_edges + (call.gather_ids_of_edges_are_shared ? 0 : b * edges);
  const int32_t* const order = call.forward_order + (call.forward_order_is_shared ? 0 : b * edges);

  int32_t edge[kEdgesInFlight];
  uint32_t segment[kEdgesInFlight], row[kEdgesInFlight];
#pragma unroll
  for (int u = 0; u < kEdgesInFlight; ++u) {
    const int64_t place = first + u * kGroups;
    edge[u] = static_cast<int32_t>(place);
    segment[u] = kDropped;
    row[u] = 0;
    if (place >= edges) continue;
    const int32_t id = __ldg(segment_ids + place);
    if (static_cast<uint64_t>(id) < static_cast<uint64_t>(call.num_rows)) segment[u] = id;
    if constexpr (kSharesTies) {
      row[u] = static_cast<uint32_t>(min(max(int64_t{__ldg(gather_ids + place)}, int64_t{0}), rows - 1));
    }
    if (call.forward_order != nullptr) {
      // Whatever a caller passes, nothing else is written.
      edge[u] = static_cast<int32_t>(min(max(int64_t{__ldg(order + place)}, int64_t{0}), edges - 1));
    }
  }
  for (int64_t begin = 0; begin < features; begin += kLanes * kVec) {  // for all threads of a warp: they shuffle
    const int64_t feature = begin + lane * kVec;
    Vector<int32_t, kVec> winner[kEdgesInFlight];
#pragma unroll
    for (int u = 0; u < kEdgesInFlight; ++u) {
      winner[u] = Repeat<kVec>(kNoWinner);
      if (segment[u] != kDropped && feature < features) {
        winner[u] = LoadVector<kVec>(winners + segment[u] * features + feature);
      }
    }
    uint32_t bits[kEdgesInFlight];
#pragma unroll
    for (int u = 0; u < kEdgesInFlight; ++u) {
      bits[u] = 0;
      bool has_tie = false;
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        bits[u] |= static_cast<uint32_t>(winner[u].lane[i] == edge[u]) << i;
        has_tie |= IsTie(winner[u].lane[i]);
      }
      if constexpr (kSharesTies) {
        if (has_tie) {
          const Vector<T, kVec> own = LoadVector<kVec>(data + row[u] * features + feature);
          const Vector<T, kVec> best = LoadVector<kVec>(extrema + segment[u] * features + feature);
#pragma unroll
          for (int i = 0; i < kVec; ++i) {
            const bool attains = static_cast<C>(own.lane[i]) == static_cast<C>(best.lane[i]);
            bits[u] |= static_cast<uint32_t>(IsTie(winner[u].lane[i]) && attains) << i;
          }
        }
      }
      bits[u] <<= feature % kWordBits;
    }
#pragma unroll
    for (int step = 1; step < kWordLanes; step *= 2) {
#pragma unroll
      for (uint32_t& word : bits) word |= __shfl_xor_sync(kFullWarp, word, step);
    }
    if (lane % kWordLanes != 0 || feature >= features) continue;
#pragma unroll
    for (int u = 0; u < kEdgesInFlight; ++u) {
      if (first + u * kGroups < edges) {
        a.selection[(b * edges + edge[u]) * words + feature / kWordBits] = bits[u];
      }
    }
  }
}

template <typename T, int kVec, int kLanes>
CudaStatus LaunchSelect(SelectArguments a, cudaStream_t stream) {
  const Problem& problem = a.call.problem;
  a.edges_of_block = kSelectThreads / kLanes * kEdgesInFlight;
  a.blocks_per_batch = CeilDivide(problem.rows, a.edges_of_block);
  const uint32_t blocks = static_cast<uint32_t>(problem.batch * a.blocks_per_batch);
  if (a.call.shares_ties) {
    SelectKernel<T, kVec, kLanes, true><<<blocks, kSelectThreads, 0, stream>>>(a);
  } else {
    SelectKernel<T, kVec, kLanes, false><<<blocks, kSelectThreads, 0, stream>>>(a);
  }
  return JB_LAUNCH_STATUS(SelectKernel);
}

template <typename T, int kVec>
CudaStatus LaunchSelect(const SelectArguments& a, cudaStream_t stream) {
  const int64_t vectors = a.call.problem.features / kVec;
  if (vectors <= 2) return LaunchSelect<T, kVec, 2>(a, stream);
  if (vectors <= 8) return LaunchSelect<T, kVec, 8>(a, stream);
  return LaunchSelect<T, kVec, 32>(a, stream);
}

GatherGrid MakeGrid(const GatherExtremumBackwardCall& call) {
  return MakeGatherGrid(call.problem, call.indices_are_sorted, call.num_rows, call.problem.features);
}

Plan PlanReduce(const GatherExtremumBackwardCall& call) {
  return PlanGather(call.problem, MakeGrid(call), ElementBytes(call.type), SumStateBytes(call.type));
}

}  // namespace

Plan PlanGatherExtremumBackward(const GatherExtremumBackwardCall& call) {
  if (call.problem.HasNoResult()) return {kNothing};
  const Plan plan = PlanReduce(call);
  ScratchSizes sizes;
  sizes.Add(plan.scratch_bytes);
  sizes.Add(call.problem.batch * call.problem.rows * call.SelectionWords() * sizeof(uint32_t));
  return {plan.strategy, sizes.total};
}

CudaStatus LaunchGatherExtremumBackward(const GatherExtremumBackwardCall& arguments, cudaStream_t stream) {
  const Problem& problem = arguments.problem;
  if (problem.HasNoResult()) return {};
  if (!SegmentsFit(problem.segments) || !SegmentsFit(arguments.num_rows) ||
      arguments.scratch_bytes < PlanGatherExtremumBackward(arguments).scratch_bytes) {
    return JB_CUDA_STATUS(cudaErrorInvalidValue);
  }
  GatherExtremumBackwardCall call = arguments;
  ScratchCarver carver(arguments.scratch);
  call.scratch = carver.Take<char>(PlanReduce(call).scratch_bytes);
  uint32_t* const selection = carver.Take<uint32_t>(problem.batch * problem.rows * call.SelectionWords());
  CudaStatus status = JB_CUDA_STATUS(cudaErrorInvalidValue);
  DispatchFloating(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (problem.rows > 0) {
      const SelectArguments a{call, selection};
      status = problem.features % 4 == 0 ? LaunchSelect<T, 4>(a, stream) : LaunchSelect<T, 1>(a, stream);
      if (!status.ok()) return;
    }
    Gathering<T> gathering = GatheringOf<T>(call, /*clips=*/false);
    gathering.selection = selection;
    gathering.selection_words = call.SelectionWords();
    status = ReduceGathered<GatherSumReduction<T, EdgeInput::kSelection>>(
        call, MakeGrid(call), gathering, SumStateBytes(call.type), {call.d_data, /*is_wide=*/false}, stream);
  });
  return status;
}

}  // namespace jax_baracuda::segment
