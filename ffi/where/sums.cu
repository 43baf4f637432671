// The gradient for repeated operands, whose cotangents are sums. One pass over d_output, viewed as [outer, rows, inner],
// sums over the rows. If the rows are split into parts, a second kernel adds up the partial sums.
#include <algorithm>
#include <numeric>

#include "ffi/core/partial_sums.cuh"
#include "ffi/where/tuning.h"
#include "ffi/where/where.cuh"
#include "ffi/where/where_device.cuh"

namespace jax_baracuda::where {
namespace {

inline constexpr int kThreads = 256;
inline constexpr int kVectorsInFlight = Tuning::kVectorsInFlight;
inline constexpr int kLineBytes = 128, kNumbersOfSector = 8;

// The minimum number of threads whose vectors form whole rows.
inline int64_t ThreadsOfWholeRows(const Sum& sum, int elements_of_vector) {
  return std::lcm(sum.inner, int64_t{elements_of_vector}) / elements_of_vector;
}

SumTiling MakeTiling(const Sum& sum, int elements_of_vector, int element_bytes) {
  SumTiling tiling{};
  tiling.group = kThreads;
  tiling.rows_of_step = tiling.tiles = 1;
  const int64_t of_whole_rows = ThreadsOfWholeRows(sum, elements_of_vector);
  if (of_whole_rows <= kThreads) {
    const int64_t vectors = CeilDivide(sum.rows * sum.inner, elements_of_vector);
    const int64_t of_line = kLineBytes / (elements_of_vector * element_bytes);
    const int64_t min_threads = std::max(of_whole_rows, std::min(of_line, vectors));
    int& group = tiling.group;
    while (sum.outer > 1 && group / 2 >= min_threads && group * Tuning::kMinSteps > vectors) group /= 2;
    tiling.used = static_cast<int>(group / of_whole_rows * of_whole_rows);
    tiling.rows_of_step = tiling.used * elements_of_vector / sum.inner;
  } else {
    const int64_t vectors_of_row = sum.inner / elements_of_vector;
    tiling.tiles = CeilDivide(vectors_of_row, kThreads);
    tiling.used = static_cast<int>(CeilDivide(vectors_of_row, tiling.tiles));
  }
  tiling.blocks_of_outer = CeilDivide(sum.outer, kThreads / tiling.group);
  const int64_t steps = std::max<int64_t>(1, CeilDivide(sum.rows, tiling.rows_of_step));
  const int64_t wanted_blocks = sum.inner == 1 ? Tuning::kWantedBlocksOfNumbers : Tuning::kWantedBlocks;
  const int64_t wanted = CeilDivide(wanted_blocks, tiling.blocks_of_outer * tiling.tiles);
  const int64_t steps_of_part = CeilDivide(steps, std::clamp<int64_t>(steps / Tuning::kMinSteps, 1, wanted));
  tiling.rows_of_part = steps_of_part * tiling.rows_of_step;
  tiling.parts = CeilDivide(steps, steps_of_part);
  return tiling;
}

// Whether vectors do not cross into the next element of `outer`, and a thread's vectors always have the same columns.
inline bool VectorsFit(const Sum& sum, int elements_of_vector) {
  return (sum.outer == 1 || sum.rows * sum.inner % elements_of_vector == 0) &&
         (sum.inner % elements_of_vector == 0 || ThreadsOfWholeRows(sum, elements_of_vector) <= kThreads);
}

// The first sum adds d_output where the condition is true, or where it is false if `inverted` is all ones. The rest of
// d_output goes to a second sum, or to `other`.
template <typename T, int kVec>
struct Arguments {
  Sum sum;
  SumTiling tiling;
  const T* d_output;
  Repeated<uint8_t, kVec> cond;
  const uint8_t* dense_cond;  // nullptr if the condition is repeated
  uint32_t inverted;
  T* other;
  ComputeType<T>* sums[2];  // [parts, outer, inner]
  int64_t results_of_part;  // the distance between the results of neighbouring parts, in numbers
};

template <typename T, int kVec, bool kBothSummed>
class Accumulator {
 public:
  using C = ComputeType<T>;
  static constexpr int kSums = kBothSummed ? 2 : 1;

  __device__ __forceinline__ explicit Accumulator(const Arguments<T, kVec>& a) : a_(a) {}

  __device__ __forceinline__ void Add(int64_t element, const Packed<uint8_t, kVec>& flags,
                                      const Packed<T, kVec>& d_output) {
    Mask<kVec> mask(flags);
#pragma unroll
    for (uint32_t& word : mask.words) word ^= a_.inverted;
    const Packed<T, kVec> nothing{}, chosen = Blend<T, kVec>(mask, d_output, nothing);
    const Packed<T, kVec> rest = Blend<T, kVec>(mask, nothing, d_output);
    AddTo(0, chosen);
    if constexpr (kBothSummed) {
      AddTo(1, rest);
    } else {
      StorePacked<T, kVec>(a_.other + element, rest);
    }
  }

  // Adds one element to column i of the vector.
  __device__ __forceinline__ void AddOne(int64_t element, int i) {
    const bool is_chosen = (a_.cond.At(element) != 0) != (a_.inverted != 0);
    const T d_output = a_.d_output[element];
#pragma unroll
    for (int k = 0; k < kVec; ++k) {
      if (k != i) continue;
      if (is_chosen) sums_[0][k] += static_cast<C>(d_output);
      if (kBothSummed && !is_chosen) sums_[kSums - 1][k] += static_cast<C>(d_output);
    }
    if (!kBothSummed) a_.other[element] = is_chosen ? T(0.0f) : d_output;
  }

  // The sums of the thread's columns. A single column has one sum, in the first element.
  __device__ __forceinline__ const C* Finish(int k) {
    if (a_.sum.inner == 1) {
#pragma unroll
      for (int i = 1; i < kVec; ++i) sums_[k][0] += sums_[k][i];
    }
    return sums_[k];
  }

 private:
  __device__ __forceinline__ void AddTo(int k, const Packed<T, kVec>& word) {
    C values[kVec];
    Widen<T, kVec>(word, values);
#pragma unroll
    for (int i = 0; i < kVec; ++i) sums_[k][i] += values[i];
  }

  const Arguments<T, kVec>& a_;
  C sums_[kSums][kVec] = {};
};

template <typename T, int kVec, bool kBothSummed>
__global__ void __launch_bounds__(kThreads) SumRows(const __grid_constant__ Arguments<T, kVec> a) {
  using C = ComputeType<T>;
  constexpr int kSums = kBothSummed ? 2 : 1;
  __shared__ C shared[kSums][kThreads * kVec];
  const SumTiling& tiling = a.tiling;
  const Sum& sum = a.sum;
  // 32 bits suffice: there are fewer than 2^31 blocks.
  const unsigned parts = static_cast<unsigned>(tiling.parts), tiles = static_cast<unsigned>(tiling.tiles);
  const int64_t part = blockIdx.x % parts, tile = blockIdx.x / parts % tiles;
  const int group = threadIdx.x / tiling.group, lane = threadIdx.x % tiling.group;
  const int64_t outer = int64_t{blockIdx.x / (parts * tiles)} * (kThreads / tiling.group) + group;
  const int64_t column = (tile * tiling.used + lane) * kVec;  // in a long row, or in all short rows of a step
  const bool has_work = outer < sum.outer && lane < tiling.used && (tiles == 1 || column < sum.inner);

  Accumulator<T, kVec, kBothSummed> accumulator(a);
  if (has_work) {
    const int64_t first_row = part * tiling.rows_of_part, step = tiling.rows_of_step * sum.inner;
    const int64_t end = (outer * sum.rows + min(sum.rows, first_row + tiling.rows_of_part)) * sum.inner;
    int64_t element = (outer * sum.rows + first_row) * sum.inner + column;
    for (; element + (kVectorsInFlight - 1) * step + kVec <= end; element += kVectorsInFlight * step) {
      Packed<uint8_t, kVec> flags[kVectorsInFlight];
      Packed<T, kVec> d_output[kVectorsInFlight];
#pragma unroll
      for (int i = 0; i < kVectorsInFlight; ++i) d_output[i] = LoadPacked<kVec>(a.d_output + element + i * step);
      // One branch for all loads. Repeated::Load branches at each, and a branch waits for the load in it.
      if (a.dense_cond != nullptr) {
#pragma unroll
        for (int i = 0; i < kVectorsInFlight; ++i) flags[i] = LoadPacked<kVec>(a.dense_cond + element + i * step);
      } else {
#pragma unroll
        for (int i = 0; i < kVectorsInFlight; ++i) flags[i] = a.cond.Load(element + i * step);
      }
#pragma unroll
      for (int i = 0; i < kVectorsInFlight; ++i) accumulator.Add(element + i * step, flags[i], d_output[i]);
    }
    for (; element + kVec <= end; element += step) {
      accumulator.Add(element, a.cond.Load(element), LoadPacked<kVec>(a.d_output + element));
    }
    for (int i = 0; element + i < end; ++i) accumulator.AddOne(element + i, i);
  }

  // Adds up the rows of a step pairwise, within each group.
  const int values = sum.inner == 1 ? 1 : kVec;  // per thread
  const int first = group * tiling.group * values;
  const int64_t first_column = tile * tiling.used * kVec;  // 0 if rows are short
  const int columns = static_cast<int>(min(sum.inner - first_column, int64_t{tiling.used} * values));
#pragma unroll
  for (int k = 0; k < kSums; ++k) {
    const C* const sums = accumulator.Finish(k);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      if (i < values) shared[k][threadIdx.x * values + i] = sums[i];
    }
  }
  __syncthreads();
  for (int rows = tiles > 1 ? 1 : tiling.used * values / columns; rows > 1;) {
    const int half = (rows + 1) / 2;
#pragma unroll
    for (int k = 0; k < kSums; ++k) {
      for (int i = lane; i < (rows - half) * columns; i += tiling.group) {
        shared[k][first + i] += shared[k][first + half * columns + i];
      }
    }
    __syncthreads();
    rows = half;
  }
  if (outer >= sum.outer) return;
#pragma unroll
  for (int k = 0; k < kSums; ++k) {
    for (int i = lane; i < columns; i += tiling.group) {
      a.sums[k][part * a.results_of_part + outer * sum.inner + first_column + i] = shared[k][first + i];
    }
  }
}

// Adds up the parts of each result with `lanes` threads. Neighbouring threads have neighbouring results, so that a warp
// reads whole sectors.
template <typename C>
__global__ void __launch_bounds__(kThreads) AddParts(const C* parts, int64_t num_parts, int64_t results,
                                                     int64_t all_results, int lanes, C* first_sums, C* second_sums) {
  __shared__ double shared[kThreads];
  const int results_of_block = kThreads / lanes, lane = threadIdx.x / results_of_block;
  const int64_t result = int64_t{blockIdx.x} * results_of_block + threadIdx.x % results_of_block;
  const double total = SumPartials(parts + result, result < all_results ? num_parts : 0, /*stride=*/all_results, lane,
                                   lanes, shared + threadIdx.x, /*own_stride=*/results_of_block);
  if (lane != 0 || result >= all_results) return;
  (result < results ? first_sums[result] : second_sums[result - results]) = static_cast<C>(total);
}

template <typename T, int kVec>
CudaStatus LaunchSumsOf(const SplitCall& call, const SumTiling& tiling, cudaStream_t stream) {
  using C = ComputeType<T>;
  const bool both_are_summed = call.num_sums() == 2, has_parts = tiling.parts > 1;
  const int64_t results = call.sum.results(), all_results = call.num_sums() * results;
  C* const first_sums = static_cast<C*>(call.a_is_summed ? call.da : call.db);
  C* const second_sums = both_are_summed ? static_cast<C*>(call.db) : nullptr;
  C* const parts = static_cast<C*>(call.scratch);  // [parts, 1 or 2, outer, inner]
  const Arguments<T, kVec> arguments{
      call.sum,
      tiling,
      static_cast<const T*>(call.d_output),
      Repeated<uint8_t, kVec>(call.cond),
      call.cond.repetition.IsDense() ? static_cast<const uint8_t*>(call.cond.data) : nullptr,
      call.a_is_summed ? 0u : ~0u,
      both_are_summed ? nullptr : static_cast<T*>(call.a_is_summed ? call.db : call.da),
      {has_parts ? parts : first_sums, has_parts ? parts + results : second_sums},
      all_results};
  const auto kernel = both_are_summed ? SumRows<T, kVec, true> : SumRows<T, kVec, false>;
  kernel<<<GridSize(tiling.blocks()), kThreads, 0, stream>>>(arguments);
  JB_RETURN_IF_LAUNCH_ERROR(SumRows);
  if (!has_parts) return {};
  int lanes = 1;
  const int max_lanes = kThreads / static_cast<int>(std::min<int64_t>(all_results, kNumbersOfSector));
  while (2 * lanes <= max_lanes && lanes * Tuning::kPartsOfLane < tiling.parts) lanes *= 2;
  AddParts<C><<<GridSize(CeilDivide(all_results, kThreads / lanes)), kThreads, 0, stream>>>(
      parts, tiling.parts, results, all_results, lanes, first_sums, second_sums);
  return JB_LAUNCH_STATUS(AddParts);
}

}  // namespace

SplitPlan ChooseSums(const SplitCall& call) {
  const Sum& sum = call.sum;
  if (sum.results() == 0) return {Strategy::kNothing};
  const int vec = kVectorBytes / call.element_bytes;
  SplitPlan plan{Strategy::kSumElements, MakeTiling(sum, 1, call.element_bytes)};
  int64_t most_parts = plan.tiling.parts;
  if (RowsSuffice(vec, call.cond) && VectorsFit(sum, vec)) {
    const SumTiling of_vectors = MakeTiling(sum, vec, call.element_bytes);
    most_parts = std::max(most_parts, of_vectors.parts);
    if (AreAligned(kVectorBytes, call.d_output, call.cond.data, call.da, call.db)) {
      plan = {Strategy::kSumVectors, of_vectors};
    }
  }
  // The same for aligned and other arrays, because XLA allocates the scratch before it knows addresses.
  if (most_parts > 1) {
    plan.scratch_bytes =
        call.num_sums() * sum.results() * most_parts * std::max<int64_t>(sizeof(float), call.element_bytes);
  }
  return plan;
}

CudaStatus LaunchSums(const SplitCall& call, const SplitPlan& plan, cudaStream_t stream) {
  if (call.scratch_bytes < plan.scratch_bytes) return JB_CUDA_STATUS(cudaErrorInvalidValue);
  return LaunchFor(call.type, JB_DISPATCH(DispatchFloating), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto launch =
        plan.strategy == Strategy::kSumVectors ? LaunchSumsOf<T, kVectorBytes / sizeof(T)> : LaunchSumsOf<T, 1>;
    return launch(call, plan.tiling, stream);
  });
}

}  // namespace jax_baracuda::where
