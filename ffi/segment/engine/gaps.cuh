// Empty segments of sorted rows: gaps between the segments of neighbouring rows.
//
// A thread that sees both rows around a narrow gap fills it at once. Wide gaps, and the gaps before the first row and
// after the last one, may have any size. Searches of the ids find them at every kGapChunk-th segment, and one warp per
// GapWarpChunks chunks fills them. Both read only the ids, so they need no synchronisation with the reduction.
#pragma once

#include "ffi/core/warp.cuh"
#include "ffi/segment/engine/reduction.cuh"

namespace jax_baracuda::segment {

inline constexpr int kGapChunk = 32;
inline constexpr int kMaxNarrowGap = kGapChunk;  // at least a chunk, so that every wide gap crosses a chunk boundary
inline constexpr int kMaxWarpChunks = 31;        // per warp: each lane searches for one chunk boundary
inline constexpr int kFilledFeatures = 256;      // features times chunks of a warp, if most segments are empty

// Bounded for any ids, also unsorted ones: a narrow gap has at most kMaxNarrowGap segments.
__device__ __forceinline__ bool IsNarrowGap(uint32_t before, uint32_t segment) {
  return before != kDropped && segment != kDropped && segment - before - 2 < static_cast<uint32_t>(kMaxNarrowGap);
}

// Writes the reduction of no rows to the segments [begin, end).
template <typename Reduction, int kVec>
__device__ __forceinline__ void FillGap(const typename Reduction::Outputs& outputs, int64_t begin, int64_t end,
                                        int64_t features, int64_t feature) {
  typename Reduction::template Accumulator<kVec> nothing;
  nothing.Start();
#pragma unroll 1
  for (int64_t segment = begin; segment < end; ++segment) nothing.Store(outputs, segment, features, feature);
}

// Chunks per warp. With more segments than rows, most chunks need filling, so a warp gets fewer of them.
JB_HOST_DEVICE int64_t GapWarpChunks(const Problem& problem) {
  if (problem.rows >= problem.segments || problem.features * kMaxWarpChunks <= kFilledFeatures) return kMaxWarpChunks;
  return CeilDivide(kFilledFeatures, problem.features);
}

JB_HOST_DEVICE int64_t GapWarpsPerBatch(const Problem& problem) {
  return CeilDivide(CeilDivide(problem.segments, kGapChunk), GapWarpChunks(problem));
}

// The first row whose id is at least `segment`, by a search with kParts probes a step. The probes are loaded without
// branches between them, so a step waits for memory once.
template <typename IdOf>
__device__ __forceinline__ int64_t FirstRowFrom(int64_t segment, int64_t rows, const IdOf& id_of) {
  constexpr int kParts = 8;
  int64_t begin = 0, end = rows;
  while (begin < end) {
    const int64_t part = CeilDivide(end - begin, static_cast<int64_t>(kParts));
    int64_t last_ids[kParts];
#pragma unroll
    for (int i = 0; i < kParts; ++i) last_ids[i] = id_of(min(begin + (i + 1) * part, end) - 1);
    int parts_below = 0;  // complete parts whose last id is below `segment`
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      parts_below += begin + (i + 1) * part <= end && last_ids[i] < segment;
    }
    begin += parts_below * part;
    end = min(begin + part - 1, end);
  }
  return begin;
}

struct EmptySegments {
  int64_t first;     // the first segment of a chunk, among those of all results
  uint32_t in_gaps;  // bit mask: segments of the chunk that are in a wide gap
};

// Finds the wide gaps in the chunk of this thread, which is in one of the first `gap_blocks`.
__device__ __forceinline__ EmptySegments FindWideGaps(const Problem& problem, int64_t first_result,
                                                      const SegmentIds& ids, const uint32_t* sorted_segments) {
  const int64_t rows = problem.rows, segments = problem.segments;
  const int64_t warps_per_batch = GapWarpsPerBatch(problem), warp_chunks = GapWarpChunks(problem);
  const int64_t warp_of_all = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  const int64_t b = warp_of_all / warps_per_batch, warp = warp_of_all - b * warps_per_batch;
  if (b >= problem.batch) return {0, 0};
  // Sorted segments are unsigned: those of dropped rows are last.
  const bool is_sorted = sorted_segments != nullptr, are_64_bit = !is_sorted && ids.are_64_bit;
  const int64_t first_id = is_sorted || problem.ids_are_shared ? 0 : b * rows;
  const void* const data = is_sorted ? sorted_segments : ids.ids;
  const auto wide_id_of = [&](int64_t row) { return __ldg(static_cast<const int64_t*>(data) + first_id + row); };
  const auto narrow_id_of = [&](int64_t row) {
    const uint32_t id = __ldg(static_cast<const uint32_t*>(data) + first_id + row);
    return is_sorted ? int64_t{id} : int64_t{static_cast<int32_t>(id)};
  };
  const auto id_of = [&](int64_t row) { return are_64_bit ? wide_id_of(row) : narrow_id_of(row); };

  const int lane = threadIdx.x % 32;
  const int64_t chunk = min((warp * warp_chunks + lane) * kGapChunk, segments);
  const int64_t row = are_64_bit ? FirstRowFrom(chunk, rows, wide_id_of) : FirstRowFrom(chunk, rows, narrow_id_of);
  // The gap around the start of the chunk. A narrow one becomes [segments, 0), which has no segment.
  int64_t gap_begin = row > 0 ? max(id_of(row - 1) + 1, int64_t{0}) : 0;
  int64_t gap_end = row < rows ? min(id_of(row), segments) : segments;
  if (gap_begin > 0 && gap_end < segments && gap_end - gap_begin <= kMaxNarrowGap) gap_begin = segments, gap_end = 0;
  const int64_t next_gap_begin = __shfl_down_sync(kFullWarp, static_cast<uint32_t>(gap_begin), 1);
  uint32_t in_gaps = 0;
  if (lane < warp_chunks) {
    // Bit mask: those of the chunk's segments that are below `end`.
    const auto below = [&](int64_t end) {
      const int64_t count = max(end - chunk, int64_t{0});
      return count < kGapChunk ? (1u << count) - 1 : ~uint32_t{0};
    };
    in_gaps = (below(gap_end) | ~below(next_gap_begin)) & below(segments);
  }
  return {first_result + b * segments + chunk, in_gaps};
}

// Writes the reduction of no rows to the wide gaps of this block.
template <typename Reduction, int kVec>
__device__ __forceinline__ void FillWideGaps(const TileArguments<Reduction>& a) {
  const EmptySegments empty = FindWideGaps(a.problem, a.first_segment, a.ids, a.sorted_segments);
  const int lane = threadIdx.x % 32;
  typename Reduction::template Accumulator<kVec> nothing;
  nothing.Start();
  const int64_t features = a.problem.features, row_vectors = features / kVec;
  for (uint32_t lanes = __ballot_sync(kFullWarp, empty.in_gaps != 0); lanes != 0; lanes &= lanes - 1) {
    const int owner = __ffs(lanes) - 1;
    const uint32_t in_gaps = __shfl_sync(kFullWarp, empty.in_gaps, owner);
    const int64_t first_segment = __shfl_sync(kFullWarp, empty.first, owner);
#pragma unroll 1
    for (int64_t i = lane; i < kGapChunk * row_vectors; i += 32) {
      const int64_t segment = i / row_vectors;
      if (((in_gaps >> segment) & 1) == 0) continue;
      nothing.Store(a.outputs, first_segment + segment, features, (i - segment * row_vectors) * kVec);
    }
  }
}

}  // namespace jax_baracuda::segment
