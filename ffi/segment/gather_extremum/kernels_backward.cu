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
constexpr int kEdgesInFlight = 8;

struct SelectArguments {
  GatherExtremumBackwardCall call;
  uint32_t* selection;  // [batch, edges, words]
  int64_t edges_of_block;
  int64_t blocks_per_batch;
};

// A lane of a warp takes a feature of each word. Where rows are narrow, groups of `kLanes` lanes take an edge each.
template <typename T, int kLanes, bool kSharesTies>
__global__ void __launch_bounds__(kSelectThreads) SelectKernel(const __grid_constant__ SelectArguments a) {
  constexpr int kGroups = 32 / kLanes;
  using C = ComputeType<T>;
  const GatherExtremumBackwardCall& call = a.call;
  const int64_t edges = call.problem.rows, features = call.problem.features, words = call.SelectionWords();
  const int64_t b = blockIdx.x / a.blocks_per_batch;
  const int lane = threadIdx.x % 32, group = lane / kLanes, warp = threadIdx.x / 32;
  const int64_t first =
      (blockIdx.x - b * a.blocks_per_batch) * a.edges_of_block + warp * (kGroups * kEdgesInFlight) + group;
  const int64_t first_cell = call.winner_is_shared ? 0 : b * call.num_rows * features;
  const int64_t num_gathered = call.problem.segments;
  const int32_t* const winners = call.winner + first_cell;
  const T* const data = static_cast<const T*>(call.gathered) + (call.gathered_is_shared ? 0 : b * num_gathered * features);
  const T* const extrema = static_cast<const T*>(call.extrema) + first_cell;
  const int32_t* const segment_ids =
      call.segment_ids_of_edges + (call.segment_ids_of_edges_are_shared ? 0 : b * edges);
  const int32_t* const gather_ids = call.gather_ids_of_edges + (call.gather_ids_of_edges_are_shared ? 0 : b * edges);

  int32_t number[kEdgesInFlight];
  uint32_t segment[kEdgesInFlight], row[kEdgesInFlight];
#pragma unroll
  for (int u = 0; u < kEdgesInFlight; ++u) {
    const int64_t place = first + u * kGroups;
    number[u] = static_cast<int32_t>(place);
    segment[u] = kDropped;
    row[u] = 0;
    if (place >= edges) continue;
    const int32_t id = __ldg(segment_ids + place);
    if (static_cast<uint64_t>(id) < static_cast<uint64_t>(call.num_rows)) segment[u] = id;
    if constexpr (kSharesTies) {
      row[u] = static_cast<uint32_t>(min(max(int64_t{__ldg(gather_ids + place)}, int64_t{0}), num_gathered - 1));
    }
    if (call.forward_order != nullptr) {
      const int64_t edge = __ldg(call.forward_order + (call.forward_order_is_shared ? 0 : b * edges) + place);
      // Whatever a caller passes, nothing else is written.
      number[u] = static_cast<int32_t>(min(max(edge, int64_t{0}), edges - 1));
    }
  }
  for (int64_t word = 0; word < words; ++word) {
    const int64_t feature = word * 32 + lane % kLanes;
    int32_t winner[kEdgesInFlight];
#pragma unroll
    for (int u = 0; u < kEdgesInFlight; ++u) {
      const bool has_cell = segment[u] != kDropped && feature < features;
      winner[u] = has_cell ? __ldg(winners + segment[u] * features + feature) : kNoWinner;
    }
    T value[kSharesTies ? kEdgesInFlight : 1], extremum[kSharesTies ? kEdgesInFlight : 1];
    if constexpr (kSharesTies) {
#pragma unroll
      for (int u = 0; u < kEdgesInFlight; ++u) {
        value[u] = static_cast<T>(C{0});
        extremum[u] = static_cast<T>(C{1});
        if (!IsTie(winner[u])) continue;
        value[u] = data[row[u] * features + feature];
        extremum[u] = extrema[segment[u] * features + feature];
      }
    }
#pragma unroll
    for (int u = 0; u < kEdgesInFlight; ++u) {
      bool wins = winner[u] == number[u];
      if constexpr (kSharesTies) wins |= static_cast<C>(value[u]) == static_cast<C>(extremum[u]);
      const uint32_t bits = __ballot_sync(kFullWarp, wins) >> (group * kLanes) & (kFullWarp >> (32 - kLanes));
      if (lane % kLanes == 0 && first + u * kGroups < edges) {
        a.selection[(b * edges + number[u]) * words + word] = bits;
      }
    }
  }
}

template <typename T, int kLanes>
CudaStatus LaunchSelect(SelectArguments a, cudaStream_t stream) {
  const Problem& problem = a.call.problem;
  a.edges_of_block = kSelectThreads / kLanes * kEdgesInFlight;
  a.blocks_per_batch = CeilDivide(problem.rows, a.edges_of_block);
  const uint32_t blocks = static_cast<uint32_t>(problem.batch * a.blocks_per_batch);
  if (a.call.shares_ties) {
    SelectKernel<T, kLanes, true><<<blocks, kSelectThreads, 0, stream>>>(a);
  } else {
    SelectKernel<T, kLanes, false><<<blocks, kSelectThreads, 0, stream>>>(a);
  }
  return JB_LAUNCH_STATUS(SelectKernel);
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
      status = problem.features <= 4    ? LaunchSelect<T, 4>(a, stream)
               : problem.features <= 8  ? LaunchSelect<T, 8>(a, stream)
               : problem.features <= 16 ? LaunchSelect<T, 16>(a, stream)
                                        : LaunchSelect<T, 32>(a, stream);
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
