// The segments without rows, where rows come in the order of their segments: gaps between the segments of neighbouring
// rows.
//
// Who sees both rows of a narrow gap fills it on the way. Wide gaps, and those before the first segment with a row and
// after the last one, may be of any size; they are found by binary searches of the ids for every kGapChunk-th
// segment, and filled by as many warps as there are segments to look after, and more where most segments must have no
// rows. Both go by the ids alone, so that nobody has to wait for those who reduce.
#pragma once

#include "ffi/core/warp.cuh"
#include "ffi/segment/engine/device.cuh"

namespace jax_baracuda::segment {

inline constexpr int kGapChunk = 32;
inline constexpr int kMaxNarrowGap = kGapChunk;  // no less than a chunk, so that wide gaps cross a chunk's ends
inline constexpr int kMaxWarpChunks = 31;        // of a warp: each lane searches for one end of a chunk
inline constexpr int kFilledFeatures = 256;      // of the rows of a warp's chunks, about, where most of them are empty

// Whatever the ids, a gap that passes as narrow has no more than kMaxNarrowGap segments.
__device__ __forceinline__ bool IsNarrowGap(uint32_t before, uint32_t segment) {
  return before != kDropped && segment != kDropped && segment - before - 2 < static_cast<uint32_t>(kMaxNarrowGap);
}

// Writes the reduction of nothing to the segments [begin, end).
template <typename Reduction, int kVec>
__device__ __forceinline__ void FillGap(const typename Reduction::Outputs& outputs, int64_t begin, int64_t end,
                                        int64_t features, int64_t feature) {
  typename Reduction::template Accumulator<kVec> nothing;
  nothing.Start();
  for (int64_t segment = begin; segment < end; ++segment) nothing.Store(outputs, segment, features, feature);
}

// Chunks of a warp. Where there are more segments than rows, wide ones are work enough for a warp each.
JB_HOST_DEVICE int64_t GapWarpChunks(const Problem& problem) {
  if (problem.rows >= problem.segments || problem.features * kMaxWarpChunks <= kFilledFeatures) return kMaxWarpChunks;
  return CeilDivide(kFilledFeatures, problem.features);
}

JB_HOST_DEVICE int64_t GapWarpsPerBatch(const Problem& problem) {
  return CeilDivide(CeilDivide(problem.segments, kGapChunk), GapWarpChunks(problem));
}

// Writes the reduction of nothing to the wide gaps of a warp's chunks. `id_of(row)` is the id of a row of an element
// of the batch, `first_result` the place of its first segment among the results.
template <typename Reduction, int kVec, typename IdOf>
__device__ __forceinline__ void FillWideGaps(const Problem& problem, const typename Reduction::Outputs& outputs,
                                             int64_t first_result, int64_t warp, IdOf&& id_of) {
  const int lane = threadIdx.x % 32;
  const int64_t segments = problem.segments, warp_chunks = GapWarpChunks(problem);
  const int64_t chunk = min((warp * warp_chunks + lane) * kGapChunk, segments);
  int64_t begin = 0, end = problem.rows;  // of the rows among which the first of a segment from `chunk` on lies
  while (begin < end) {
    const int64_t middle = (begin + end) / 2;
    if (id_of(middle) < chunk) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  // The gap around the end of the chunk.
  const int64_t before = begin > 0 ? max(id_of(begin - 1), int64_t{-1}) : -1;
  const int64_t after = begin < problem.rows ? min(id_of(begin), segments) : segments;
  const bool is_wide = before < 0 || after == segments || after - before - 1 > kMaxNarrowGap;
  const int64_t next_chunk = __shfl_down_sync(kFullWarp, chunk, 1);
  const int64_t next_before = __shfl_down_sync(kFullWarp, before, 1);
  const bool next_is_wide = __shfl_down_sync(kFullWarp, is_wide, 1);
  uint32_t empty = 0;  // segments of the chunk that are in a wide gap
  if (lane < warp_chunks && (is_wide || next_is_wide)) {
    const int count = static_cast<int>(next_chunk - chunk);
    for (int i = 0; i < count; ++i) {
      const bool is_empty = (is_wide && chunk + i < after) || (next_is_wide && chunk + i > next_before);
      empty |= static_cast<uint32_t>(is_empty) << i;
    }
  }

  typename Reduction::template Accumulator<kVec> nothing;
  nothing.Start();
  const int64_t row_vectors = problem.features / kVec;
  for (uint32_t lanes = __ballot_sync(kFullWarp, empty != 0); lanes != 0; lanes &= lanes - 1) {
    const int owner = __ffs(lanes) - 1;
    const uint32_t owner_empty = __shfl_sync(kFullWarp, empty, owner);
    const int64_t first_segment = first_result + __shfl_sync(kFullWarp, chunk, owner);
    for (int64_t i = lane; i < kGapChunk * row_vectors; i += 32) {
      const int64_t segment = i / row_vectors;
      if (((owner_empty >> segment) & 1) == 0) continue;
      nothing.Store(outputs, first_segment + segment, problem.features, (i - segment * row_vectors) * kVec);
    }
  }
}

}  // namespace jax_baracuda::segment
