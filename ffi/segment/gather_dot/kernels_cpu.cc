// The CPU kernels of gather_segment_dot.

#include <algorithm>
#include <cstdint>

#include "ffi/segment/engine/gathered_rows_cpu.h"
#include "ffi/segment/gather_dot/call.h"

namespace jax_baracuda::segment {
namespace {

// Accumulates kSums partial sums, so that it vectorises, and adds them up in pairs.
template <typename C, typename X, typename Y>
JB_INLINE C Dot(const X* x, const Y* y, int64_t count) {
  constexpr int kSums = 16;
  C sum{0};
  int64_t i = 0;
  if (count >= kSums) {
    C sums[kSums] = {};
    for (; i + kSums <= count; i += kSums) {
      JB_VECTORIZE
      for (int k = 0; k < kSums; ++k) sums[k] += static_cast<C>(x[i + k]) * static_cast<C>(y[i + k]);
    }
    for (int half = kSums / 2; half > 0; half /= 2) {
      for (int k = 0; k < half; ++k) sums[k] += sums[k + half];
    }
    sum = sums[0];
  }
  for (; i < count; ++i) sum += static_cast<C>(x[i]) * static_cast<C>(y[i]);
  return sum;
}

template <typename T>
JB_CPU_CLONES void DotEdges(const GatherDotCall call, int64_t batch, int64_t edge_begin, int64_t edge_end) {
  using C = ComputeType<T>;
  const Problem& problem = call.problem;
  const int64_t heads = call.heads, head_features = call.head_features, features = heads * head_features;
  const T* const cells = call.cells.Of<T>(batch, problem.segments * features);
  const T* const data = call.Data().Of<T>(batch, call.num_rows * features);
  const int32_t* const gather_ids = call.gather_ids.Of<int32_t>(batch, problem.rows);
  const EdgeNumbers numbers(call.edge_order.Of<int32_t>(batch, problem.rows), problem.rows);
  const SegmentIds ids(call);
  const int64_t first_id = problem.IdIndex(batch, 0);
  const auto row_of = [&](int64_t edge)
                          __attribute__((always_inline)) { return NearestRow(gather_ids[edge], call.num_rows); };
  for (int64_t edge = edge_begin; edge < edge_end; ++edge) {
    const int64_t segment = ids[first_id + edge];
    const bool is_member =
        static_cast<uint64_t>(segment) < static_cast<uint64_t>(problem.segments) && call.num_rows > 0;
    if (edge + kPrefetchDistance < edge_end && call.num_rows > 0) {
      PrefetchRow(data + row_of(edge + kPrefetchDistance) * features, features);
      const int64_t upcoming = ids[first_id + edge + kPrefetchDistance];
      if (static_cast<uint64_t>(upcoming) < static_cast<uint64_t>(problem.segments)) {
        PrefetchRow(cells + upcoming * features, features);
      }
    }
    const int64_t first = (batch * problem.rows + numbers[edge]) * heads;
    const auto store = [&](int64_t head, C sum) __attribute__((always_inline)) {
      if (call.is_wide) {
        static_cast<C*>(call.output)[first + head] = sum;
      } else {
        Store(sum, static_cast<T*>(call.output) + first + head);
      }
    };
    if (!is_member) {
      for (int64_t head = 0; head < heads; ++head) store(head, C{0});
      continue;
    }
    WithNumbers(cells + segment * features, features, [&](const auto* x) __attribute__((always_inline)) {
      WithNumbers(data + row_of(edge) * features, features, [&](const auto* y) __attribute__((always_inline)) {
        for (int64_t head = 0; head < heads; ++head) {
          store(head, Dot<C>(x + head * head_features, y + head * head_features, head_features));
        }
      });
    });
  }
}

}  // namespace

std::vector<const char*> GatherDotCall::Strategies() { return {kNothing, "edges"}; }

Plan GatherDotCall::MakePlan() const { return {HasNoElement() ? kNothing : "edges"}; }

bool GatherDotCall::Run(ffi::ThreadPool& pool) const {
  if (HasNoElement()) return true;
  DispatchFloating(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (edge_order.data != nullptr) {
      // Edges missing from an invalid order get 0.
      const int64_t products = problem.batch * problem.rows * heads;
      WriteZeroBytes(pool, output, products * (is_wide ? sizeof(ComputeType<T>) : sizeof(T)));
    }
    const int64_t edge_bytes = 2 * problem.features * static_cast<int64_t>(sizeof(T));
    ForEachRangeOfBatch(pool, problem.batch, problem.rows, problem.rows * edge_bytes,
                        [&](int64_t batch, int64_t begin, int64_t end) { DotEdges<T>(*this, batch, begin, end); });
  });
  return true;
}

}  // namespace jax_baracuda::segment
