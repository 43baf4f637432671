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
template <typename Id>
__device__ __forceinline__ int64_t FirstRowFrom(int64_t segment, int64_t rows, const Id* ids) {
  constexpr int kParts = 8;
  int64_t begin = 0, end = rows;
  while (begin < end) {
    const int64_t part = CeilDivide(end - begin, static_cast<int64_t>(kParts));
    Id last_ids[kParts];
#pragma unroll
    for (int i = 0; i < kParts; ++i) last_ids[i] = __ldg(ids + min(begin + (i + 1) * part, end) - 1);
    int parts_below = 0;  // complete parts whose last id is below `segment`
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      parts_below += begin + (i + 1) * part <= end && static_cast<int64_t>(last_ids[i]) < segment;
    }
    begin += parts_below * part;
    end = min(begin + part - 1, end);
  }
  return begin;
}

// Writes the reduction of no rows to the wide gaps of this block, one of the first `gap_blocks`.
template <typename Reduction, int kVec>
__device__ __forceinline__ void FillWideGaps(const TileArguments<Reduction>& a) {
  const int64_t rows = a.problem.rows, segments = a.problem.segments;
  const int64_t warps_per_batch = GapWarpsPerBatch(a.problem), warp_chunks = GapWarpChunks(a.problem);
  const int64_t warp_of_all = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  const int64_t b = warp_of_all / warps_per_batch, warp = warp_of_all - b * warps_per_batch;
  if (b >= a.problem.batch) return;
  const int64_t ids_offset = a.problem.ids_are_shared ? 0 : b * rows;
  const auto id_of = [&](int64_t row) {
    return a.sorted_segments != nullptr ? static_cast<int64_t>(__ldg(a.sorted_segments + row))
                                        : a.ids.Id(ids_offset + row);
  };
  const auto first_row_from = [&](int64_t segment) {
    if (a.sorted_segments != nullptr) return FirstRowFrom(segment, rows, a.sorted_segments);
    if (a.ids.are_64_bit) return FirstRowFrom(segment, rows, static_cast<const long long*>(a.ids.ids) + ids_offset);
    return FirstRowFrom(segment, rows, static_cast<const int*>(a.ids.ids) + ids_offset);
  };

  const int lane = threadIdx.x % 32;
  const int64_t chunk = min((warp * warp_chunks + lane) * kGapChunk, segments);
  const int64_t begin = first_row_from(chunk);
  // The gap around the end of the chunk.
  const int64_t before = begin > 0 ? max(id_of(begin - 1), int64_t{-1}) : -1;
  const int64_t after = begin < rows ? min(id_of(begin), segments) : segments;
  const bool is_wide = before < 0 || after == segments || after - before - 1 > kMaxNarrowGap;
  const int64_t next_chunk = __shfl_down_sync(kFullWarp, chunk, 1);
  const int64_t next_before = __shfl_down_sync(kFullWarp, before, 1);
  const bool next_is_wide = __shfl_down_sync(kFullWarp, is_wide, 1);
  uint32_t empty = 0;  // bit mask: segments of the chunk that are in a wide gap
  if (lane < warp_chunks && (is_wide || next_is_wide)) {
    const int count = static_cast<int>(next_chunk - chunk);
    for (int i = 0; i < count; ++i) {
      const bool is_empty = (is_wide && chunk + i < after) || (next_is_wide && chunk + i > next_before);
      empty |= static_cast<uint32_t>(is_empty) << i;
    }
  }

  typename Reduction::template Accumulator<kVec> nothing;
  nothing.Start();
  const int64_t first_result = a.first_segment + b * segments;
  const int64_t features = a.problem.features, row_vectors = features / kVec;
  for (uint32_t lanes = __ballot_sync(kFullWarp, empty != 0); lanes != 0; lanes &= lanes - 1) {
    const int owner = __ffs(lanes) - 1;
    const uint32_t owner_empty = __shfl_sync(kFullWarp, empty, owner);
    const int64_t first_segment = first_result + __shfl_sync(kFullWarp, chunk, owner);
    for (int64_t i = lane; i < kGapChunk * row_vectors; i += 32) {
      const int64_t segment = i / row_vectors;
      if (((owner_empty >> segment) & 1) == 0) continue;
      nothing.Store(a.outputs, first_segment + segment, features, (i - segment * row_vectors) * kVec);
    }
  }
}

}  // namespace jax_baracuda::segment
