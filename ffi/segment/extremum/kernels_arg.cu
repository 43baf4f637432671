// The rows of maxima and minima: argmax and argmin.
#include "ffi/segment/engine/reduce.cuh"
#include "ffi/segment/extremum/reduction.cuh"

namespace jax_baracuda::segment {

std::vector<const char*> ArgCall::Strategies() { return ReduceStrategies(); }

Plan ArgCall::MakePlan() const { return PlanByRule(*this, PairStateBytes(type)).Summary(); }

CudaStatus ArgCall::Run(cudaStream_t stream) const {
  return LaunchFor(type, JB_DISPATCH(DispatchWide), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const typename ArgReduction<T>::Outputs outputs{row, static_cast<int32_t>(problem.rows),
                                                    FlipWordMask<T>(type, is_minimum)};
    const ReducePlan plan = PlanByRule(*this, PairStateBytes(type));
    return LaunchReduction<ArgReduction<T>>(*this, plan, outputs, stream);
  });
}

}  // namespace jax_baracuda::segment
