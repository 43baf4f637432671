// Work assignment of the kernels for [.., length, channels]. A thread processes a vector of neighbouring channels for a
// run of consecutive times. Neighbouring threads have neighbouring vectors, and the runs of a block are consecutive.
#pragma once

#include <cstdint>

#include "ffi/causal_conv1d/causal_conv1d.cuh"
#include "ffi/causal_conv1d/conv_device.cuh"
#include "ffi/causal_conv1d/tuning.h"
#include "ffi/core/async_copy.cuh"

namespace jax_baracuda::causal_conv1d {

template <typename T>
inline constexpr int kWidestChannels = WidestChannels(sizeof(T));

struct ChannelsLastGrid {
  ChannelsLastPlan plan;
  int vector;     // channels per thread
  int64_t bands;  // examples of the whole batch times blocks_down
  Divider by_blocks_across, by_blocks_down;

  ChannelsLastGrid(const Problem& problem, const ConvolutionPlan& convolution_plan, int widest_vector)
      : plan(convolution_plan.channels_last),
        vector(convolution_plan.strategy == Strategy::kChannelsLast ? widest_vector : 1),
        bands(problem.batch * problem.examples * plan.blocks_down),
        by_blocks_across(CeilDivide(problem.channels, int64_t{plan.lanes} * vector)),
        by_blocks_down(plan.blocks_down) {}
};

// The position of a thread of a channels-last kernel: `count` times from `begin` on; 0 past the end.
struct ChannelsLastPlace {
  int64_t example, block_down, channel, begin;
  int count;

  __device__ __forceinline__ ChannelsLastPlace(const Geometry& geometry, const ChannelsLastGrid& grid, int vector) {
    const int64_t block = blockIdx.x, band = grid.by_blocks_across.Quotient(block);
    const int64_t block_across = block - band * static_cast<int64_t>(grid.by_blocks_across.divisor);
    example = grid.by_blocks_down.Quotient(band);
    block_down = band - example * static_cast<int64_t>(grid.by_blocks_down.divisor);
    channel = (block_across * grid.plan.lanes + threadIdx.x) * vector;
    begin = (block_down * grid.plan.runs + threadIdx.y) * grid.plan.run;
    count = static_cast<int>(max(min(geometry.length - begin, int64_t{grid.plan.run}), int64_t{0}));
  }

  __device__ __forceinline__ int64_t Index(const Geometry& geometry, int64_t of_example) const {
    return (of_example * geometry.length + begin) * geometry.channels + channel;
  }
  template <typename T>
  __device__ __forceinline__ const T* In(const Input<T>& input, const Geometry& geometry) const {
    return input.data + Index(geometry, input.Example(geometry, example));
  }
  // The same position in an array [examples, length].
  template <typename T>
  __device__ __forceinline__ const T* Times(const Input<T>& input, const Geometry& geometry) const {
    return input.data + input.Example(geometry, example) * geometry.length + begin;
  }
};

// Launches kernel_of(width, channels, has_masks), called with compile-time constants, on `arguments` and a grid.
template <typename T, typename Arguments, typename KernelOf>
CudaStatus LaunchOnGrid(const ConvolutionCall& call, const ConvolutionPlan& plan, const Arguments& arguments,
                        cudaStream_t stream, const KernelOf& kernel_of) {
  const ChannelsLastGrid grid(call.problem, plan, kWidestChannels<T>);
  // The rare kernels with one channel per thread always check masks, which saves instantiations.
  const auto launch = [&](auto width, auto channels, auto has_masks) {
    const auto kernel = kernel_of(width, channels, has_masks);
    const int64_t blocks = grid.bands * static_cast<int64_t>(grid.by_blocks_across.divisor);
    kernel<<<GridSize(blocks), dim3(grid.plan.lanes, grid.plan.runs), 0, stream>>>(arguments, grid);
    return JB_LAUNCH_STATUS(kernel for channels last);
  };
  return DispatchKernel(call.problem.width, call.problem.has_same_sequence, [&](auto width, auto has_masks) {
    return grid.vector == 1 ? launch(width, std::integral_constant<int, 1>{}, std::true_type{})
                            : launch(width, std::integral_constant<int, kWidestChannels<T>>{}, has_masks);
  });
}

// Sets past[k] to the inputs kPast - k steps before the position of `x`; the first `left_out` may be anything. Runs
// have at least kPast times, so either all or none of these inputs are before time 0.
template <int kVec, int kPast, typename T>
__device__ __forceinline__ void LoadPast(const Geometry& geometry, const T* x, const InitialState<T>& state,
                                         const ChannelsLastPlace& at, int left_out, ComputeType<T> (*past)[kVec]) {
  static_assert(kPast <= Tuning::kMinRun);
  if (at.begin > 0) {
    Packed<T, kVec> words[kPast + 1];  // + 1: kPast may be 0
#pragma unroll
    for (int k = 0; k < kPast; ++k) words[k] = LoadPacked<kVec>(x + (k - kPast) * geometry.channels);
#pragma unroll
    for (int k = 0; k < kPast; ++k) Widen<T, kVec>(words[k], past[k]);
  } else {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      const T* end = state.End(geometry, at.example, at.channel + v);
#pragma unroll
      for (int k = 0; k < kPast; ++k) {
        past[k][v] = end != nullptr && k >= left_out ? static_cast<ComputeType<T>>(end[k - kPast]) : ComputeType<T>{0};
      }
    }
  }
}

// A circular buffer in shared memory with a thread's vectors of several times. Copies are committed in groups of kGroup
// times; the prefetch distance is all whole groups that fit.
template <typename T, int kVec, int kTimes, int kGroup>
struct TimeStages {
  static_assert((kTimes & (kTimes - 1)) == 0);
  static constexpr int kBytes = kVec * static_cast<int>(sizeof(T));
  static constexpr int kBlockBytes = kTimes * kChannelsLastThreads * kBytes;
  static constexpr int kGroupTimes = kGroup, kGroups = kTimes / kGroup, kAhead = kGroups * kGroup;

  // `time` is relative to a multiple of kGroup.
  static __device__ __forceinline__ constexpr bool BeginsGroup(int time) { return time % kGroup == 0; }
  static __device__ __forceinline__ constexpr bool EndsGroup(int time) { return (time + 1) % kGroup == 0; }

  char* data;  // this thread's vector of time 0

  explicit __device__ __forceinline__ TimeStages(void* shared)
      : data(static_cast<char*>(shared) + (threadIdx.y * blockDim.x + threadIdx.x) * kBytes) {}

  __device__ __forceinline__ T* At(int time) const {
    return reinterpret_cast<T*>(data + (time & (kTimes - 1)) * (kChannelsLastThreads * kBytes));
  }
  __device__ __forceinline__ void Load(int time, const T* vector, bool is_there) const {
    CopyAsync<kBytes>(At(time), vector, is_there);
  }
  __device__ __forceinline__ void Read(int time, ComputeType<T>* values) const {
    Widen<T, kVec>(LoadPacked<kVec>(At(time)), values);
  }
};

// The inputs of the newest kWidth times are in a circular buffer of registers. Time `row` of the run has the index (row
// + kWidth - 1) % kWidth. This is a compile-time constant if loops are unrolled by kRowsOfCircle rows.
template <int kWidth>
inline constexpr int kRowsOfCircle = kWidth > 2 ? kWidth : 4;

// z of row i after a multiple of kWidth; bit j of `mask` is for the inputs j steps back.
template <int kWidth, int kVec, bool kHasMasks, typename C>
__device__ __forceinline__ void ConvolveRow(const C (*weight)[kWidth], const C* bias, const C (*inputs)[kVec], int i,
                                            uint32_t mask, C* z) {
#pragma unroll
  for (int v = 0; v < kVec; ++v) z[v] = bias[v];
#pragma unroll
  for (int k = 0; k < kWidth; ++k) {
    if (!kHasMasks || (mask >> (kWidth - 1 - k) & 1u)) {
#pragma unroll
      for (int v = 0; v < kVec; ++v) z[v] = fma(weight[v][k], inputs[(i + k) % kWidth][v], z[v]);
    }
  }
}

}  // namespace jax_baracuda::causal_conv1d
