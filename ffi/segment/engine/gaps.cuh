// The segments without rows, where rows come in the order of their segments: gaps between the segments of neighbouring
// rows.
//
// Who sees both rows of a narrow gap fills it on the way. Wide gaps, and those before the first segment with a row and
// after the last one, may be of any size; they are found by binary searches of the ids for every kGapStretch-th
// segment, and filled by as many warps as there are segments to look after. Both go by the ids alone, so that nobody
// has to wait for those who reduce.
#pragma once

#include "ffi/segment/engine/device.cuh"

namespace jax_baracuda::segment {

inline constexpr int kGapStretch = 32;
inline constexpr int kMostNarrowGap = kGapStretch;  // no less than a stretch, so that wide gaps cross a stretch's ends
inline constexpr int kWarpStretches = 31;           // of a warp: each lane searches for one end of a stretch

// Whatever the ids, a gap that passes as narrow has no more than kMostNarrowGap segments.
__device__ __forceinline__ bool IsNarrowGap(uint32_t before, uint32_t segment) {
  return before != kDropped && segment != kDropped && segment - before - 2 < static_cast<uint32_t>(kMostNarrowGap);
}

// Writes the reduction of nothing to the segments [begin, end).
template <typename Reduction, int kVec>
__device__ __forceinline__ void FillGap(const typename Reduction::Outputs& outputs, int64_t begin, int64_t end,
                                        int64_t features, int64_t feature) {
  typename Reduction::template Accumulator<kVec> nothing;
  nothing.Start();
  for (int64_t segment = begin; segment < end; ++segment) nothing.Store(outputs, segment, features, feature);
}

JB_HOST_DEVICE int64_t GapWarpsPerBatch(int64_t segments) {
  return CeilDivide(CeilDivide(segments, kGapStretch), kWarpStretches);
}

// Writes the reduction of nothing to the wide gaps of a warp's stretches. `id_of(row)` is the id of a row of an element
// of the batch, `first_result` the place of its first segment among the results.
template <typename Reduction, int kVec, typename IdOf>
__device__ __forceinline__ void FillWideGaps(const Problem& problem, const typename Reduction::Outputs& outputs,
                                             int64_t first_result, int64_t warp, IdOf&& id_of) {
  constexpr uint32_t kAllLanes = 0xffffffffu;
  const int lane = threadIdx.x % 32;
  const int64_t segments = problem.segments;
  const int64_t stretch = min((warp * kWarpStretches + lane) * kGapStretch, segments);
  int64_t begin = 0, end = problem.rows;  // of the rows among which the first of a segment from `stretch` on lies
  while (begin < end) {
    const int64_t middle = (begin + end) / 2;
    if (id_of(middle) < stretch) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  // The gap around the end of the stretch.
  const int64_t before = begin > 0 ? max(id_of(begin - 1), int64_t{-1}) : -1;
  const int64_t after = begin < problem.rows ? min(id_of(begin), segments) : segments;
  const bool is_wide = before < 0 || after == segments || after - before - 1 > kMostNarrowGap;
  const int64_t next_stretch = __shfl_down_sync(kAllLanes, stretch, 1);
  const int64_t next_before = __shfl_down_sync(kAllLanes, before, 1);
  const bool next_is_wide = __shfl_down_sync(kAllLanes, is_wide, 1);
  uint32_t empty = 0;  // segments of the stretch that are in a wide gap
  if (lane < kWarpStretches && (is_wide || next_is_wide)) {
    const int count = static_cast<int>(next_stretch - stretch);
    for (int i = 0; i < count; ++i) {
      const bool is_empty = (is_wide && stretch + i < after) || (next_is_wide && stretch + i > next_before);
      empty |= static_cast<uint32_t>(is_empty) << i;
    }
  }

  typename Reduction::template Accumulator<kVec> nothing;
  nothing.Start();
  const int64_t row_vectors = problem.features / kVec;
  for (uint32_t lanes = __ballot_sync(kAllLanes, empty != 0); lanes != 0; lanes &= lanes - 1) {
    const int owner = __ffs(lanes) - 1;
    const uint32_t owner_empty = __shfl_sync(kAllLanes, empty, owner);
    const int64_t first_segment = first_result + __shfl_sync(kAllLanes, stretch, owner);
    for (int64_t i = lane; i < kGapStretch * row_vectors; i += 32) {
      const int64_t segment = i / row_vectors;
      if (((owner_empty >> segment) & 1) == 0) continue;
      nothing.Store(outputs, first_segment + segment, problem.features, (i - segment * row_vectors) * kVec);
    }
  }
}

}  // namespace jax_baracuda::segment
