// The selection, and its gradient without sums. Elements are plain bytes, moved in 16-byte vectors.
#include "ffi/core/strategies.h"
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

template <typename T, int kVec, typename Values, typename Flags>
__global__ void __launch_bounds__(kThreads) Select(const __grid_constant__ Values a, const __grid_constant__ Values b,
                                                   const __grid_constant__ Flags cond, T* output, int64_t size) {
  ForVector<kVec>(
      size,
      [&](int64_t first) {
        const Packed<uint8_t, kVec> flags = cond.Load(first);
        const Packed<T, kVec> a_vector = a.Load(first), b_vector = b.Load(first);
        StorePacked<T, kVec>(output + first, Blend<T, kVec>(Mask<kVec>(flags), a_vector, b_vector));
      },
      [&](int64_t element) { output[element] = cond.At(element) != 0 ? a.At(element) : b.At(element); });
}

template <typename T, int kVec, typename Flags>
__global__ void __launch_bounds__(kThreads)
    Split(const __grid_constant__ Flags cond, const T* d_output, T* da, T* db, int64_t size) {
  ForVector<kVec>(
      size,
      [&](int64_t first) {
        const Mask<kVec> mask(cond.Load(first));
        const Packed<T, kVec> vector = LoadPacked<kVec>(d_output + first), nothing{};
        StorePacked<T, kVec>(da + first, Blend<T, kVec>(mask, vector, nothing));
        StorePacked<T, kVec>(db + first, Blend<T, kVec>(mask, nothing, vector));
      },
      [&](int64_t element) {
        const bool is_chosen = cond.At(element) != 0;
        da[element] = is_chosen ? d_output[element] : T{};
        db[element] = is_chosen ? T{} : d_output[element];
      });
}

// Arrays of the whole shape and numbers, the usual operands, are faster without the offsets of repeated ones.
bool IsDenseOrScalar(const Operand& operand) { return operand.repetition.IsDense() || operand.repetition.IsScalar(); }

// Values is the class of a and b, Flags that of cond.
template <typename T, int kVec, template <typename, int> class Values, template <typename, int> class Flags>
CudaStatus LaunchSelectOf(const SelectCall& call, cudaStream_t stream) {
  Select<T, kVec><<<Blocks<kVec>(call.size), kThreads, 0, stream>>>(Values<T, kVec>(call.a), Values<T, kVec>(call.b),
                                                                    Flags<uint8_t, kVec>(call.cond),
                                                                    static_cast<T*>(call.output), call.size);
  return JB_LAUNCH_STATUS(Select);
}

template <typename T, int kVec, template <typename, int> class Flags>
CudaStatus LaunchSplitOf(const SplitCall& call, cudaStream_t stream) {
  Split<T, kVec><<<Blocks<kVec>(call.size), kThreads, 0, stream>>>(
      Flags<uint8_t, kVec>(call.cond), static_cast<const T*>(call.d_output), static_cast<T*>(call.da),
      static_cast<T*>(call.db), call.size);
  return JB_LAUNCH_STATUS(Split);
}

Strategy Choose(const SelectCall& call) {
  if (call.size == 0) return Strategy::kNothing;
  const int vec = kVectorBytes / call.element_bytes;
  const bool are_vectors = AreAligned(kVectorBytes, call.a.data, call.b.data, call.cond.data, call.output) &&
                           RowsSuffice(vec, call.a) && RowsSuffice(vec, call.b) && RowsSuffice(vec, call.cond);
  return are_vectors ? Strategy::kVectors : Strategy::kElements;
}

SplitPlan Choose(const SplitCall& call) {
  if (call.num_sums() > 0) return ChooseSums(call);
  if (call.size == 0) return {Strategy::kNothing};
  const bool are_vectors = AreAligned(kVectorBytes, call.d_output, call.cond.data, call.da, call.db) &&
                           RowsSuffice(kVectorBytes / call.element_bytes, call.cond);
  return {are_vectors ? Strategy::kVectors : Strategy::kElements};
}

}  // namespace

std::vector<const char*> SelectCall::Strategies() {
  return NamesOf(kStrategyNames, Strategy::kNothing, Strategy::kVectors, Strategy::kElements);
}

Plan SelectCall::MakePlan() const { return {NameOf(kStrategyNames, Choose(*this))}; }

CudaStatus SelectCall::Run(cudaStream_t stream) const {
  const Strategy strategy = Choose(*this);
  if (strategy == Strategy::kNothing) return {};
  const bool are_repeated = !IsDenseOrScalar(a) || !IsDenseOrScalar(b), is_cond_repeated = !IsDenseOrScalar(cond);
  return LaunchFor(element_bytes, JB_DISPATCH(DispatchBytes), [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int kVec = kVectorBytes / sizeof(T);
    if (strategy == Strategy::kElements) return LaunchSelectOf<T, 1, Repeated, Repeated>(*this, stream);
    return are_repeated       ? LaunchSelectOf<T, kVec, Repeated, Repeated>(*this, stream)
           : is_cond_repeated ? LaunchSelectOf<T, kVec, DenseOrScalar, Repeated>(*this, stream)
                              : LaunchSelectOf<T, kVec, DenseOrScalar, DenseOrScalar>(*this, stream);
  });
}

std::vector<const char*> SplitCall::Strategies() { return {JB_NAMES(kStrategyNames)}; }

Plan SplitCall::MakePlan() const {
  const SplitPlan plan = Choose(*this);
  return {NameOf(kStrategyNames, plan.strategy), plan.scratch_bytes};
}

CudaStatus SplitCall::Run(cudaStream_t stream) const {
  const SplitPlan plan = Choose(*this);
  if (plan.strategy == Strategy::kNothing) return {};
  if (num_sums() > 0) return LaunchSums(*this, plan, stream);
  return LaunchFor(element_bytes, JB_DISPATCH(DispatchBytes), [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int kVec = kVectorBytes / sizeof(T);
    if (plan.strategy == Strategy::kElements) return LaunchSplitOf<T, 1, Repeated>(*this, stream);
    return IsDenseOrScalar(cond) ? LaunchSplitOf<T, kVec, DenseOrScalar>(*this, stream)
                                 : LaunchSplitOf<T, kVec, Repeated>(*this, stream);
  });
}

}  // namespace jax_baracuda::where
