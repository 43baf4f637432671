// Dot products of each edge's segment and gathered row: the gradient of the edge weights.
#include <algorithm>
#include <type_traits>

#include "ffi/core/cuda_status.h"
#include "ffi/core/divider.cuh"
#include "ffi/core/warp.cuh"
#include "ffi/segment/engine/device.cuh"
#include "ffi/segment/engine/tuning.h"
#include "ffi/segment/gather_dot/call.h"

namespace jax_baracuda::segment {
namespace {

constexpr int kThreads = 128;
constexpr int kMaxEdges = 1024;  // per block; their ids are in shared memory

template <typename T>
struct DotArguments {
  GatherDotCall call;
  SegmentIds ids;
  ShortDivider heads;
  int lanes;  // threads per product, a power of two
  int edges_of_block;
  int64_t blocks_per_batch;
};

// A group of threads computes one product, of one edge and head. Neighbouring groups compute neighbouring heads, so
// that a warp reads contiguous parts of a row.
template <typename T, int kVec>
__global__ void __launch_bounds__(kThreads, Tuning::kDotBlocks) DotKernel(const __grid_constant__ DotArguments<T> a) {
  using C = ComputeType<T>;
  constexpr int kProductsInFlight = Tuning::kDotsInFlight;
  __shared__ uint32_t segments[kMaxEdges], rows[kMaxEdges];
  const GatherDotCall& call = a.call;
  const Problem& problem = call.problem;
  const int64_t b = blockIdx.x / a.blocks_per_batch;
  const int64_t first_edge = (blockIdx.x - b * a.blocks_per_batch) * a.edges_of_block;
  const int edges = static_cast<int>(min(problem.rows - first_edge, static_cast<int64_t>(a.edges_of_block)));
  const int64_t first_id = (problem.ids_are_shared ? 0 : b * problem.rows) + first_edge;
  const int32_t* const gather_ids = call.gather_ids.Of<int32_t>(b, problem.rows) + first_edge;
  for (int edge = threadIdx.x; edge < edges; edge += kThreads) {
    const int64_t id = __ldg(gather_ids + edge);
    rows[edge] = static_cast<uint32_t>(min(max(id, int64_t{0}), call.num_rows - 1));
    segments[edge] = call.num_rows == 0 ? kDropped : a.ids[first_id + edge];
  }
  __syncthreads();

  const int heads = static_cast<int>(call.heads), products = edges * heads;
  const int64_t head_features = call.head_features, features = heads * head_features;
  const int groups = kThreads / a.lanes, group = threadIdx.x / a.lanes, lane = threadIdx.x % a.lanes;
  const T* const cells = call.cells.Of<T>(b, problem.segments * features);
  const T* const data = BatchOperand{call.data, problem.data_is_shared}.Of<T>(b, call.num_rows * features);

  // All threads make the same number of steps, because sums are shuffled between lanes.
  for (int first = 0; first < products; first += groups * kProductsInFlight) {
    C sum[kProductsInFlight] = {};
    for (int64_t feature = lane * kVec; feature < head_features; feature += a.lanes * kVec) {
      Packed<T, kVec> x[kProductsInFlight], y[kProductsInFlight];
#pragma unroll
      for (int u = 0; u < kProductsInFlight; ++u) {
        const int product = min(first + u * groups + group, products - 1);
        const int edge = static_cast<int>(a.heads.Quotient(static_cast<uint32_t>(product)));
        const int64_t element = (product - edge * heads) * head_features + feature;
        const uint32_t segment = segments[edge];
        if (segment != kDropped) {
          x[u] = LoadPacked<kVec>(cells + element + FirstElement(segment, features));
          y[u] = LoadPacked<kVec>(data + element + FirstElement(rows[edge], features));
        } else {
          x[u] = y[u] = Packed<T, kVec>{};
        }
      }
#pragma unroll
      for (int u = 0; u < kProductsInFlight; ++u) {
        C wide_x[kVec], wide_y[kVec];
        Widen<T, kVec>(x[u], wide_x);
        Widen<T, kVec>(y[u], wide_y);
#pragma unroll
        for (int i = 0; i < kVec; ++i) sum[u] += wide_x[i] * wide_y[i];
      }
    }
    for (int step = a.lanes / 2; step > 0; step /= 2) {
#pragma unroll
      for (C& s : sum) s += __shfl_xor_sync(kFullWarp, s, step);
    }
    if (lane != 0) continue;
#pragma unroll
    for (int u = 0; u < kProductsInFlight; ++u) {
      const int product = first + u * groups + group;
      if (product >= products) break;
      const int place = static_cast<int>(a.heads.Quotient(static_cast<uint32_t>(product)));
      int64_t edge = first_edge + place;
      if (call.edge_order.data != nullptr) {
        edge = __ldg(call.edge_order.Of<int32_t>(b, problem.rows) + edge);
        edge = min(max(edge, int64_t{0}), problem.rows - 1);  // clamped: an invalid order must not write out of bounds
      }
      const int64_t target = (b * problem.rows + edge) * heads + (product - place * heads);
      if (call.is_wide) {
        static_cast<C*>(call.output)[target] = sum[u];
      } else {
        static_cast<T*>(call.output)[target] = static_cast<T>(sum[u]);
      }
    }
  }
}

}  // namespace

std::vector<const char*> GatherDotCall::Strategies() { return {kNothing, "edge_vectors"}; }

Plan GatherDotCall::MakePlan() const { return {HasNoElement() ? kNothing : "edge_vectors"}; }

CudaStatus GatherDotCall::Run(cudaStream_t stream) const {
  if (HasNoElement()) return {};
  if (!SegmentsFit(problem.segments) || !SegmentsFit(num_rows) || !FeaturesFit(heads * head_features) ||
      heads > (int64_t{1} << 20)) {
    return JB_CUDA_STATUS(cudaErrorInvalidValue);
  }
  return LaunchFor(type, JB_DISPATCH(DispatchFloating), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto launch = [&](auto vector) -> CudaStatus {
      constexpr int kVec = decltype(vector)::value;
      DotArguments<T> a{};
      a.call = *this;
      a.ids = {segment_ids, ids_are_64_bit, problem.segments};
      a.heads = ShortDivider(static_cast<uint64_t>(heads));
      a.lanes = 1;
      while (a.lanes < 32 && a.lanes * kVec < head_features) a.lanes *= 2;
      // A few edges are spread over the whole GPU, many are read in several steps per block.
      const int64_t products_of_step = int64_t{kThreads / a.lanes} * Tuning::kDotsInFlight;
      const int64_t resident = products_of_step * Tuning::kMultiprocessors * Tuning::kDotBlocks;
      const int64_t steps =
          std::clamp(problem.batch * problem.rows * heads / resident, int64_t{1}, int64_t{Tuning::kDotSteps});
      const int64_t edges = CeilDivide(products_of_step * steps, heads);
      a.edges_of_block = static_cast<int>(std::min(edges, int64_t{kMaxEdges}));
      a.blocks_per_batch = CeilDivide(problem.rows, a.edges_of_block);
      if (edge_order.data != nullptr) {
        // Edges missing from an invalid order get 0.
        const int64_t outputs = problem.batch * problem.rows * heads;
        const size_t bytes = outputs * (is_wide ? sizeof(ComputeType<T>) : sizeof(T));
        JB_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(output, 0, bytes, stream));
      }
      DotKernel<T, kVec><<<GridSize(problem.batch * a.blocks_per_batch), kThreads, 0, stream>>>(a);
      return JB_LAUNCH_STATUS(DotKernel);
    };
    // Unlike reductions, products also have vectors of 8 bytes of 32-bit numbers.
    if constexpr (sizeof(T) == 4) {
      if (head_features % 4 == 2) return launch(std::integral_constant<int, 2>{});
    }
    return DispatchRowVector<T>(head_features, launch);
  });
}

}  // namespace jax_baracuda::segment
