// The gradient for repeated operands, whose cotangents are sums. One pass over dy, viewed as [outer, rows, inner], sums
// over the rows. If the rows are split into parts, or both cotangents are sums, a second kernel adds up the partial
// sums.
#include <algorithm>
#include <numeric>

#include "ffi/core/partial_sums.cuh"
#include "ffi/core/warp.cuh"
#include "ffi/where/tuning.h"
#include "ffi/where/where.cuh"
#include "ffi/where/where_device.cuh"

namespace jax_baracuda::where {
namespace {

inline constexpr int kThreads = 256;
inline constexpr int kVectorsInFlight = Tuning::kVectorsInFlight;
inline constexpr int kLineBytes = 128;

// The minimum number of threads whose vectors form whole rows.
inline int64_t ThreadsOfWholeRows(const Sum& sum, int elements_of_vector) {
  return std::lcm(sum.inner, int64_t{elements_of_vector}) / elements_of_vector;
}

// The assignment of work to threads. If rows are longer than a block, a block processes a tile of one row per step.
// Otherwise a group of threads processes several whole rows per step, so that a thread always has the same columns.
struct SumPlan {
  int group = kThreads;  // threads per group: a power of two
  int used;              // threads of a group that have work
  int64_t rows_of_step = 1, tiles = 1;
  int64_t blocks_of_outer;  // blocks per tile and part
  int64_t rows_of_part, parts;

  SumPlan(const Sum& sum, int elements_of_vector, int element_bytes) {
    const int64_t of_whole_rows = ThreadsOfWholeRows(sum, elements_of_vector);
    if (of_whole_rows <= kThreads) {
      const int64_t vectors = CeilDivide(sum.rows * sum.inner, elements_of_vector);
      const int64_t of_line = kLineBytes / (elements_of_vector * element_bytes);
      const int64_t min_threads = std::max(of_whole_rows, std::min(of_line, vectors));
      while (sum.outer > 1 && group / 2 >= min_threads && group * Tuning::kMinSteps > vectors) group /= 2;
      used = static_cast<int>(group / of_whole_rows * of_whole_rows);
      rows_of_step = used * elements_of_vector / sum.inner;
    } else {
      const int64_t vectors_of_row = sum.inner / elements_of_vector;
      tiles = CeilDivide(vectors_of_row, kThreads);
      used = static_cast<int>(CeilDivide(vectors_of_row, tiles));
    }
    blocks_of_outer = CeilDivide(sum.outer, kThreads / group);
    const int64_t steps = std::max<int64_t>(1, CeilDivide(sum.rows, rows_of_step));
    const int64_t wanted_blocks = sum.inner == 1 ? Tuning::kWantedBlocksOfNumbers : Tuning::kWantedBlocks;
    const int64_t wanted = CeilDivide(wanted_blocks, blocks_of_outer * tiles);
    const int64_t steps_of_part = CeilDivide(steps, std::clamp<int64_t>(steps / Tuning::kMinSteps, 1, wanted));
    rows_of_part = steps_of_part * rows_of_step;
    parts = CeilDivide(steps, steps_of_part);
  }

  int64_t blocks() const { return blocks_of_outer * tiles * parts; }
};

// Whether vectors do not cross into the next element of `outer`, and a thread's vectors always have the same columns.
inline bool VectorsFit(const Sum& sum, int elements_of_vector) {
  return (sum.outer == 1 || sum.rows * sum.inner % elements_of_vector == 0) &&
         (sum.inner % elements_of_vector == 0 || ThreadsOfWholeRows(sum, elements_of_vector) <= kThreads);
}

// The first sum adds dy where the condition is true, or where it is false if `inverted` is all ones. The rest of dy
// goes to a second sum, or to `other`.
template <typename T, int kVec>
struct Arguments {
  Sum sum;
  SumPlan plan;
  const T* dy;
  Repeated<uint8_t, kVec> cond;
  uint32_t inverted;
  T* other;
  ComputeType<T>* sums;  // [1 or 2, outer, inner, parts]
};

template <typename T, int kVec, bool kBothSummed>
class Accumulator {
 public:
  using C = ComputeType<T>;
  static constexpr int kSums = kBothSummed ? 2 : 1;

  __device__ __forceinline__ explicit Accumulator(const Arguments<T, kVec>& a) : a_(a) {}

  __device__ __forceinline__ void Add(int64_t element, const Packed<uint8_t, kVec>& flags, const Packed<T, kVec>& dy) {
    Mask<kVec> mask(flags);
#pragma unroll
    for (uint32_t& word : mask.words) word ^= a_.inverted;
    const Packed<T, kVec> nothing{}, chosen = Choose<T, kVec>(mask, dy, nothing);
    const Packed<T, kVec> rest = Choose<T, kVec>(mask, nothing, dy);
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
    const T dy = a_.dy[element];
#pragma unroll
    for (int k = 0; k < kVec; ++k) {
      if (k != i) continue;
      if (is_chosen) sums_[0][k] += static_cast<C>(dy);
      if (kBothSummed && !is_chosen) sums_[kSums - 1][k] += static_cast<C>(dy);
    }
    if (!kBothSummed) a_.other[element] = is_chosen ? T(0.0f) : dy;
  }

  __device__ __forceinline__ const C* sums(int k) const { return sums_[k]; }

  __device__ __forceinline__ C Total(int k) const {
    C total = 0;
#pragma unroll
    for (int i = 0; i < kVec; ++i) total += sums_[k][i];
    return total;
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

// The sum over the threads of a group, valid in its first thread. `shared` has kThreads / kWarpThreads elements.
template <typename C>
__device__ __forceinline__ C SumOfGroup(C value, int group, C* shared) {
  const int width = min(group, kWarpThreads);
  for (int offset = width / 2; offset > 0; offset /= 2) value += __shfl_down_sync(kFullWarp, value, offset, width);
  if (group <= kWarpThreads) return value;
  const int warp = threadIdx.x / kWarpThreads;
  if (threadIdx.x % kWarpThreads == 0) shared[warp] = value;
  __syncthreads();
  for (int i = 1; i < group / kWarpThreads && threadIdx.x % group == 0; ++i) value += shared[warp + i];
  return value;
}

template <typename T, int kVec, bool kBothSummed>
__global__ void __launch_bounds__(kThreads) SumRows(const __grid_constant__ Arguments<T, kVec> a) {
  using C = ComputeType<T>;
  constexpr int kSums = kBothSummed ? 2 : 1;
  __shared__ C shared[kSums][kThreads * kVec];
  const SumPlan& plan = a.plan;
  const Sum& sum = a.sum;
  // 32 bits suffice: there are fewer than 2^31 blocks.
  const unsigned parts = static_cast<unsigned>(plan.parts), tiles = static_cast<unsigned>(plan.tiles);
  const int64_t part = blockIdx.x % parts, tile = blockIdx.x / parts % tiles;
  const int group = threadIdx.x / plan.group, lane = threadIdx.x % plan.group;
  const int64_t outer = int64_t{blockIdx.x / (parts * tiles)} * (kThreads / plan.group) + group;
  const int64_t column = (tile * plan.used + lane) * kVec;  // in a long row, or in all short rows of a step
  const bool has_work = outer < sum.outer && lane < plan.used && (tiles == 1 || column < sum.inner);

  Accumulator<T, kVec, kBothSummed> accumulator(a);
  if (has_work) {
    const int64_t first_row = part * plan.rows_of_part, step = plan.rows_of_step * sum.inner;
    const int64_t end = (outer * sum.rows + min(sum.rows, first_row + plan.rows_of_part)) * sum.inner;
    int64_t element = (outer * sum.rows + first_row) * sum.inner + column;
    for (; element + (kVectorsInFlight - 1) * step + kVec <= end; element += kVectorsInFlight * step) {
      Packed<uint8_t, kVec> flags[kVectorsInFlight];
      Packed<T, kVec> dy[kVectorsInFlight];
#pragma unroll
      for (int i = 0; i < kVectorsInFlight; ++i) {
        flags[i] = a.cond.Load(element + i * step);
        dy[i] = LoadPacked<kVec>(a.dy + element + i * step);
      }
#pragma unroll
      for (int i = 0; i < kVectorsInFlight; ++i) accumulator.Add(element + i * step, flags[i], dy[i]);
    }
    for (; element + kVec <= end; element += step) {
      accumulator.Add(element, a.cond.Load(element), LoadPacked<kVec>(a.dy + element));
    }
    for (int i = 0; element + i < end; ++i) accumulator.AddOne(element + i, i);
  }

  const int64_t results = sum.outer * sum.inner;
  const auto write = [&](int k, int64_t result, C value) {
    a.sums[(k * results + result) * plan.parts + part] = value;
  };
  if (sum.inner == 1) {
#pragma unroll
    for (int k = 0; k < kSums; ++k) {
      const C total = SumOfGroup(accumulator.Total(k), plan.group, shared[k]);
      if (has_work && lane == 0) write(k, outer, total);
    }
    return;
  }
  if (plan.rows_of_step == 1) {
#pragma unroll
    for (int k = 0; k < kSums; ++k) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        if (has_work) write(k, outer * sum.inner + column + i, accumulator.sums(k)[i]);
      }
    }
    return;
  }
  // Adds up the rows of a step pairwise, within each group.
  const int inner = static_cast<int>(sum.inner), first = group * plan.group * kVec;
#pragma unroll
  for (int k = 0; k < kSums; ++k) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) shared[k][threadIdx.x * kVec + i] = accumulator.sums(k)[i];
  }
  __syncthreads();
  for (int rows = static_cast<int>(plan.rows_of_step); rows > 1;) {
    const int half = (rows + 1) / 2;
#pragma unroll
    for (int k = 0; k < kSums; ++k) {
      for (int i = lane; i < (rows - half) * inner; i += plan.group) {
        shared[k][first + i] += shared[k][first + half * inner + i];
      }
    }
    __syncthreads();
    rows = half;
  }
  if (outer >= sum.outer) return;
#pragma unroll
  for (int k = 0; k < kSums; ++k) {
    for (int i = lane; i < inner; i += plan.group) write(k, outer * inner + i, shared[k][first + i]);
  }
}

// Adds up the parts of each result with `lanes` threads.
template <typename C>
__global__ void __launch_bounds__(kThreads)
    AddParts(const C* parts, int64_t num_parts, int64_t results, int lanes, C* first_sums, C* second_sums) {
  __shared__ double shared[kThreads];
  const int lane = threadIdx.x % lanes;
  const int64_t result = int64_t{blockIdx.x} * (kThreads / lanes) + threadIdx.x / lanes;
  const int64_t all_results = second_sums == nullptr ? results : 2 * results;
  const double total = SumPartials(parts + result * num_parts, result < all_results ? num_parts : 0, /*stride=*/1, lane,
                                   lanes, shared + threadIdx.x, /*slot_stride=*/1);
  if (lane != 0 || result >= all_results) return;
  (result < results ? first_sums[result] : second_sums[result - results]) = static_cast<C>(total);
}

template <typename C>
CudaStatus LaunchAddParts(const C* parts, int64_t num_parts, int64_t results, C* first_sums, C* second_sums,
                          cudaStream_t stream) {
  int lanes = 1;
  while (lanes < kThreads && lanes * Tuning::kPartsOfLane < num_parts) lanes *= 2;
  const int64_t blocks = CeilDivide((second_sums == nullptr ? 1 : 2) * results, kThreads / lanes);
  AddParts<C><<<GridSize(blocks), kThreads, 0, stream>>>(parts, num_parts, results, lanes, first_sums, second_sums);
  return JB_LAUNCH_STATUS(AddParts);
}

template <typename T, int kVec>
CudaStatus LaunchSumsOf(const SplitCall& call, cudaStream_t stream) {
  using C = ComputeType<T>;
  const bool both_are_summed = call.a_is_summed && call.b_is_summed;
  C* const first_sums = static_cast<C*>(call.a_is_summed ? call.da : call.db);
  C* const second_sums = both_are_summed ? static_cast<C*>(call.db) : nullptr;
  T* const other = both_are_summed ? nullptr : static_cast<T*>(call.a_is_summed ? call.db : call.da);
  const SumPlan plan(call.sum, kVec, sizeof(T));
  const bool is_direct = plan.parts == 1 && !both_are_summed;
  const Arguments<T, kVec> arguments{call.sum,
                                     plan,
                                     static_cast<const T*>(call.dy),
                                     Repeated<uint8_t, kVec>(call.cond),
                                     call.a_is_summed ? 0u : ~0u,
                                     other,
                                     is_direct ? first_sums : static_cast<C*>(call.scratch)};
  const auto kernel = both_are_summed ? SumRows<T, kVec, true> : SumRows<T, kVec, false>;
  kernel<<<GridSize(plan.blocks()), kThreads, 0, stream>>>(arguments);
  JB_RETURN_IF_LAUNCH_ERROR(SumRows);
  if (is_direct) return {};
  return LaunchAddParts(static_cast<const C*>(call.scratch), plan.parts, call.sum.results(), first_sums, second_sums,
                        stream);
}

bool AreVectors(const SplitCall& call, bool are_aligned) {
  const int vec = kVectorBytes / call.element_bytes;
  return are_aligned && RowsSuffice(vec, call.cond) && VectorsFit(call.sum, vec);
}

}  // namespace

SplitStrategy ChooseSumStrategy(const SplitCall& call, bool are_aligned) {
  const Sum& sum = call.sum;
  if (sum.results() == 0) return SplitStrategy::kNothing;
  const bool are_vectors = AreVectors(call, are_aligned);
  const int vec = are_vectors ? kVectorBytes / call.element_bytes : 1;
  const SumPlan plan(sum, vec, call.element_bytes);
  const bool has_tail = sum.rows * sum.inner % vec != 0;
  SplitStrategy first = sum.inner == 1 ? !are_vectors ? SplitStrategy::kSumNumbersByElement
                                         : has_tail   ? SplitStrategy::kSumNumbersWithTail
                                                      : SplitStrategy::kSumNumbers
                        : plan.rows_of_step == 1
                            ? !are_vectors ? SplitStrategy::kSumLongRowsByElement : SplitStrategy::kSumLongRows
                        : !are_vectors ? SplitStrategy::kSumShortRowsByElement
                        : has_tail     ? SplitStrategy::kSumShortRowsWithTail
                                       : SplitStrategy::kSumShortRows;
  return static_cast<SplitStrategy>(static_cast<int>(first) + (plan.parts > 1 ? 1 : 0));
}

int64_t SumScratchBytes(const Sum& sum, int64_t element_bytes, int num_sums) {
  if (num_sums == 0 || sum.results() == 0) return 0;
  int64_t most_parts = 1;
  for (const int elements_of_vector : {1, static_cast<int>(kVectorBytes / element_bytes)}) {
    if (!VectorsFit(sum, elements_of_vector)) continue;
    most_parts = std::max(most_parts, SumPlan(sum, elements_of_vector, static_cast<int>(element_bytes)).parts);
  }
  if (num_sums == 1 && most_parts == 1) return 0;
  return num_sums * sum.results() * most_parts * std::max<int64_t>(sizeof(float), element_bytes);
}

CudaStatus LaunchSums(const SplitCall& call, cudaStream_t stream) {
  if (call.sum.results() == 0) return {};
  const bool are_vectors = AreVectors(call, AreAligned(kVectorBytes, call.dy, call.cond.data, call.da, call.db));
  CudaStatus status = JB_CUDA_STATUS(cudaErrorInvalidValue);
  DispatchFloating(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    status = are_vectors ? LaunchSumsOf<T, kVectorBytes / sizeof(T)>(call, stream) : LaunchSumsOf<T, 1>(call, stream);
  });
  return status;
}

}  // namespace jax_baracuda::where
