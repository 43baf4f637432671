// Sums and means: the choice of a kernel.
#include "ffi/segment/sum.cuh"

#include "ffi/segment/reduce.cuh"
#include "ffi/segment/sum_device.cuh"
#include "ffi/segment/sum_table.cuh"

namespace jax_baracuda::segment {
namespace {

struct Plan {
  bool takes_table;  // atomic additions to a table in global memory; else in registers: see reduce.cuh
  Way way;
};

int64_t ComputeBytes(int64_t element_bytes) { return element_bytes == 8 ? 8 : 4; }

int64_t StateBytes(int64_t element_bytes, bool is_mean) { return ComputeBytes(element_bytes) * (is_mean ? 2 : 1); }

constexpr int64_t kMostTableRowBytes = 64;
constexpr int64_t kSmallBytes = int64_t{1} << 24;

// The rule, from shapes and flags alone: what reduce.cuh takes, but narrow rows in any order, or few, are cheaper to
// add to a table than to bring into order, unless so many go to each cell that they wait for each other. Atomic
// additions come in the order of time, so not where the sum must be deterministic.
Plan ChoosePlan(const Problem& problem, int64_t element_bytes, bool indices_are_sorted, bool deterministic,
                bool is_mean) {
  const Way way = ChooseWay(problem, element_bytes, StateBytes(element_bytes, is_mean), indices_are_sorted);
  if (way != Way::kOrderTiles || deterministic) return {false, way};
  const int64_t row_bytes = problem.features * element_bytes;
  const bool is_small = problem.batch * problem.rows * row_bytes <= kSmallBytes;
  const bool is_contended = problem.rows / 2048 >= problem.segments;
  return {((row_bytes <= kMostTableRowBytes || is_small) && !is_contended) || !OrderFits(problem), way};
}

int64_t ScratchBytes(const Problem& problem, const Plan& plan, int64_t element_bytes, bool is_mean) {
  if (!plan.takes_table) {
    return ReduceScratchBytes(problem, plan.way, element_bytes, StateBytes(element_bytes, is_mean));
  }
  ScratchSizes sizes;
  if (ComputeBytes(element_bytes) != element_bytes) {
    sizes.Add(problem.batch * problem.segments * problem.features * ComputeBytes(element_bytes));
  }
  return sizes.total;
}

template <typename T>
struct Launcher {
  using C = ComputeType<T>;
  const SumArguments& arguments;
  const Plan plan;
  cudaStream_t stream;

  const Problem& problem = arguments.problem;
  T* output = static_cast<T*>(arguments.output);

  cudaError_t Launch() const {
    if (plan.takes_table) {
      return arguments.scratch_bytes < ScratchBytes(problem, plan, sizeof(T), arguments.count != nullptr)
                 ? cudaErrorInvalidValue
                 : Table();
    }
    if constexpr (kIsFloating<T>) {
      if (arguments.count != nullptr) return Reduce<MeanReduction<T>>({output, arguments.count});
    }
    return Reduce<SumReduction<T>>({output});
  }

 private:
  template <typename Reduction>
  cudaError_t Reduce(const typename Reduction::Outputs& outputs) const {
    return LaunchReduction<Reduction>(arguments, plan.way, StateBytes(sizeof(T), arguments.count != nullptr), outputs,
                                      nullptr, stream);
  }

  cudaError_t Table() const {
    const int64_t cells = problem.batch * problem.segments * problem.features;
    SumTableArguments<T> a{};
    a.data = static_cast<const T*>(arguments.data);
    a.ids = {arguments.segment_ids, arguments.ids_are_64_bit, problem.segments};
    a.problem = problem;
    a.table = sizeof(C) == sizeof(T) ? reinterpret_cast<C*>(output) : static_cast<C*>(arguments.scratch);
    a.count = arguments.count;
    if (cudaError_t e = cudaMemsetAsync(a.table, 0, cells * sizeof(C), stream)) return e;
    if (a.count != nullptr) {
      const int64_t bytes = problem.batch * problem.segments * sizeof(int32_t);
      if (cudaError_t e = cudaMemsetAsync(a.count, 0, bytes, stream)) return e;
    }
    constexpr int kWidest = 16 / sizeof(C);
    if (cudaError_t e = problem.features % kWidest == 0              ? AddRows<kWidest>(a)
                        : kWidest > 2 && problem.features % 2 == 0   ? AddRows<2>(a)
                                                                     : AddRows<1>(a)) {
      return e;
    }
    if (sizeof(C) == sizeof(T) && a.count == nullptr) return cudaSuccess;
    FinishSumTableKernel<T><<<static_cast<uint32_t>(CeilDivide(cells, 256)), 256, 0, stream>>>(
        a.table, a.count, problem.features, cells, output);
    return cudaGetLastError();
  }

  template <int kVec>
  cudaError_t AddRows(SumTableArguments<T> a) const {
    constexpr int kWidest = 16 / sizeof(C);
    const bool is_aligned = problem.batch == 1 || problem.data_is_shared || problem.rows % kWidest == 0;
    if (problem.features == 1 && is_aligned) {
      a.blocks_per_batch = CeilDivide(problem.rows, int64_t{kSumTableThreads} * kWidest);
      SingleFeatureSumKernel<T, kWidest>
          <<<static_cast<uint32_t>(problem.batch * a.blocks_per_batch), kSumTableThreads, 0, stream>>>(a);
    } else {
      a.blocks_per_batch =
          CeilDivide(problem.rows * (problem.features / kVec), int64_t{kSumTableThreads} * kSumVectorsInFlight);
      SumTableKernel<T, kVec>
          <<<static_cast<uint32_t>(problem.batch * a.blocks_per_batch), kSumTableThreads, 0, stream>>>(a);
    }
    return cudaGetLastError();
  }
};

}  // namespace

int64_t SumScratchBytes(const Problem& problem, int64_t element_bytes, bool indices_are_sorted, bool deterministic,
                        bool is_mean) {
  if (problem.HasNoResult()) return 0;
  const Plan plan = ChoosePlan(problem, element_bytes, indices_are_sorted, deterministic, is_mean);
  return ScratchBytes(problem, plan, element_bytes, is_mean);
}

cudaError_t LaunchSum(const SumArguments& arguments, cudaStream_t stream) {
  const Problem& problem = arguments.problem;
  const bool is_mean = arguments.count != nullptr;
  cudaError_t error = cudaErrorInvalidValue;
  if (problem.HasNoResult()) {
    // Counts exist without features.
    if (!is_mean || problem.batch * problem.segments == 0) return cudaSuccess;
    return cudaMemsetAsync(arguments.count, 0, problem.batch * problem.segments * sizeof(int32_t), stream);
  }
  if (!SegmentsFit(problem.segments)) return error;
  DispatchWrapping(arguments.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Plan plan =
        ChoosePlan(problem, sizeof(T), arguments.indices_are_sorted, arguments.deterministic, is_mean);
    error = Launcher<T>{arguments, plan, stream}.Launch();
  });
  return error;
}

}  // namespace jax_baracuda::segment
