// The selection, and its gradient without sums. Elements are plain bytes, moved in 16-byte vectors.
#include "ffi/where/where.cuh"
#include "ffi/where/where_device.cuh"

namespace jax_baracuda::where {
namespace {

inline constexpr int kThreads = 128;

// One vector per thread. More vectors are not faster, and slower if two arrays are written.
template <int kVec>
uint32_t Blocks(int64_t size) {
  return GridSize(CeilDivide(size, int64_t{kThreads} * kVec));
}

// Calls of_vector(first element) for this thread's vector, or of_element(element) for each element of the tail.
template <int kVec, typename OfVector, typename OfElement>
__device__ __forceinline__ void ForVector(int64_t size, const OfVector& of_vector, const OfElement& of_element) {
  const int64_t first = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kVec;
  if (first + kVec <= size) {
    of_vector(first);
  } else {
    for (int64_t element = first; element < size; ++element) of_element(element);
  }
}

template <typename T, int kVec, typename A, typename B, typename Cond>
__global__ void __launch_bounds__(kThreads) Select(const __grid_constant__ A a, const __grid_constant__ B b,
                                                   const __grid_constant__ Cond cond, T* output, int64_t size) {
  ForVector<kVec>(
      size,
      [&](int64_t first) {
        const Packed<uint8_t, kVec> flags = cond.Load(first);
        const Packed<T, kVec> a_vector = a.Load(first), b_vector = b.Load(first);
        StorePacked<T, kVec>(output + first, Choose<T, kVec>(Mask<kVec>(flags), a_vector, b_vector));
      },
      [&](int64_t element) { output[element] = cond.At(element) != 0 ? a.At(element) : b.At(element); });
}

template <typename T, int kVec, typename Cond>
__global__ void __launch_bounds__(kThreads)
    Split(const __grid_constant__ Cond cond, const T* dy, T* da, T* db, int64_t size) {
  ForVector<kVec>(
      size,
      [&](int64_t first) {
        const Mask<kVec> mask(cond.Load(first));
        const Packed<T, kVec> vector = LoadPacked<kVec>(dy + first), nothing{};
        StorePacked<T, kVec>(da + first, Choose<T, kVec>(mask, vector, nothing));
        StorePacked<T, kVec>(db + first, Choose<T, kVec>(mask, nothing, vector));
      },
      [&](int64_t element) {
        const bool is_chosen = cond.At(element) != 0;
        da[element] = is_chosen ? dy[element] : T{};
        db[element] = is_chosen ? T{} : dy[element];
      });
}

template <typename T, int kVec, template <typename, int> class A, template <typename, int> class B,
          template <typename, int> class Cond>
CudaStatus LaunchSelectOf(const SelectCall& call, cudaStream_t stream) {
  Select<T, kVec><<<Blocks<kVec>(call.size), kThreads, 0, stream>>>(
      A<T, kVec>(call.a), B<T, kVec>(call.b), Cond<uint8_t, kVec>(call.cond), static_cast<T*>(call.output), call.size);
  return JB_LAUNCH_STATUS(Select);
}

// Calls body(TypeTag<T>{}), which returns a CudaStatus, with a type of `element_bytes` bytes.
template <typename Body>
CudaStatus WithBytes(int element_bytes, const Body& body) {
  CudaStatus status = JB_CUDA_STATUS(cudaErrorInvalidValue);
  DispatchBytes(element_bytes, [&](auto tag) { status = body(tag); });
  return status;
}

// The strategy, or with a tail the next enumerator, its WithTail variant.
template <typename Strategy>
Strategy WithTail(Strategy strategy, int64_t size, int elements_of_vector) {
  return static_cast<Strategy>(static_cast<int>(strategy) + (size % elements_of_vector == 0 ? 0 : 1));
}

SelectStrategy ChooseVectors(const SelectCall& call) {
  const Repetition &a = call.a.repetition, &b = call.b.repetition;
  if (call.cond.repetition.IsDense()) {
    if (a.IsDense() && b.IsDense()) return SelectStrategy::kDense;
    if (a.IsDense() && b.IsScalar()) return SelectStrategy::kScalarB;
    if (b.IsDense() && a.IsScalar()) return SelectStrategy::kScalarA;
  }
  if (a.IsDense() && b.IsDense()) return SelectStrategy::kRepeatedCond;
  if (a.IsDense() && b.IsScalar()) return SelectStrategy::kScalarBRepeatedCond;
  return SelectStrategy::kRepeated;
}

}  // namespace

SelectStrategy ChooseStrategy(const SelectCall& call, bool are_aligned) {
  if (call.size == 0) return SelectStrategy::kNothing;
  const int vec = kVectorBytes / call.element_bytes;
  const bool are_vectors =
      are_aligned && RowsSuffice(vec, call.a) && RowsSuffice(vec, call.b) && RowsSuffice(vec, call.cond);
  return are_vectors ? WithTail(ChooseVectors(call), call.size, vec) : SelectStrategy::kByElement;
}

CudaStatus LaunchSelect(const SelectCall& call, cudaStream_t stream) {
  const SelectStrategy strategy =
      ChooseStrategy(call, AreAligned(kVectorBytes, call.a.data, call.b.data, call.cond.data, call.output));
  if (strategy == SelectStrategy::kNothing) return {};
  return WithBytes(call.element_bytes, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int kVec = kVectorBytes / sizeof(T);
    switch (strategy) {
      case SelectStrategy::kDense:
      case SelectStrategy::kDenseWithTail:
        return LaunchSelectOf<T, kVec, Dense, Dense, Dense>(call, stream);
      case SelectStrategy::kScalarA:
      case SelectStrategy::kScalarAWithTail:
        return LaunchSelectOf<T, kVec, Scalar, Dense, Dense>(call, stream);
      case SelectStrategy::kScalarB:
      case SelectStrategy::kScalarBWithTail:
        return LaunchSelectOf<T, kVec, Dense, Scalar, Dense>(call, stream);
      case SelectStrategy::kRepeatedCond:
      case SelectStrategy::kRepeatedCondWithTail:
        return LaunchSelectOf<T, kVec, Dense, Dense, Repeated>(call, stream);
      case SelectStrategy::kScalarBRepeatedCond:
      case SelectStrategy::kScalarBRepeatedCondWithTail:
        return LaunchSelectOf<T, kVec, Dense, Scalar, Repeated>(call, stream);
      case SelectStrategy::kRepeated:
      case SelectStrategy::kRepeatedWithTail:
        return LaunchSelectOf<T, kVec, Repeated, Repeated, Repeated>(call, stream);
      default:
        return LaunchSelectOf<T, 1, Repeated, Repeated, Repeated>(call, stream);
    }
  });
}

SplitStrategy ChooseStrategy(const SplitCall& call, bool are_aligned) {
  if (call.num_sums() > 0) return ChooseSumStrategy(call, are_aligned);
  if (call.size == 0) return SplitStrategy::kNothing;
  const int vec = kVectorBytes / call.element_bytes;
  if (!are_aligned || !RowsSuffice(vec, call.cond)) return SplitStrategy::kByElement;
  return WithTail(call.cond.repetition.IsDense() ? SplitStrategy::kDense : SplitStrategy::kRepeated, call.size, vec);
}

CudaStatus LaunchSplit(const SplitCall& call, cudaStream_t stream) {
  if (call.num_sums() > 0) return LaunchSums(call, stream);
  const SplitStrategy strategy =
      ChooseStrategy(call, AreAligned(kVectorBytes, call.dy, call.cond.data, call.da, call.db));
  if (strategy == SplitStrategy::kNothing) return {};
  return WithBytes(call.element_bytes, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int kVec = kVectorBytes / sizeof(T);
    const auto launch = [&](auto cond, auto vec) {
      constexpr int kCount = decltype(vec)::value;
      Split<T, kCount><<<Blocks<kCount>(call.size), kThreads, 0, stream>>>(
          cond, static_cast<const T*>(call.dy), static_cast<T*>(call.da), static_cast<T*>(call.db), call.size);
      return JB_LAUNCH_STATUS(Split);
    };
    const std::integral_constant<int, kVec> whole;
    switch (strategy) {
      case SplitStrategy::kDense:
      case SplitStrategy::kDenseWithTail:
        return launch(Dense<uint8_t, kVec>(call.cond), whole);
      case SplitStrategy::kRepeated:
      case SplitStrategy::kRepeatedWithTail:
        return launch(Repeated<uint8_t, kVec>(call.cond), whole);
      default:
        return launch(Repeated<uint8_t, 1>(call.cond), std::integral_constant<int, 1>{});
    }
  });
}

}  // namespace jax_baracuda::where
