// Rows of a result, each computed from its numbers and those of the cells of its segment, on CPUs. There are two ways:
// - In order. The numbers of cells are first copied to those of narrow rows, block by block, so that loops run over all
//   numbers of a block.
// - Grouped by segment, together with the reduction that computes the cells, if that groups rows: while the rows of a few
//   segments are in a near cache. Results larger than the caches are written past them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <tuple>

#include "ffi/segment/engine/rows_cpu.h"

namespace jax_baracuda::segment {

inline constexpr int64_t kMappedNumbers = 2048;   // the numbers of a block
inline constexpr int64_t kMaxGatheredWidth = 32;  // rows of up to this width are narrow

// Consecutive numbers of a result [batch, rows, features]: those of a few rows, or some of one row.
struct NumberBlock {
  RowBlock rows;
  int64_t batch, segments, features;  // features of a row
  int64_t feature_begin, width;       // the features of the block

  int64_t count() const { return rows.count * width; }
  // The index of the first number in an array [rows, features].
  int64_t First() const { return rows.first_row * features + feature_begin; }
  JB_INLINE bool IsMember(int64_t row) const {
    return static_cast<uint64_t>(rows.ids[row]) < static_cast<uint64_t>(segments);
  }
  // The first cell of a row in an array [segments, features]; an arbitrary one for a dropped row.
  JB_INLINE int64_t Cell(int64_t row) const {
    const int64_t segment = IsMember(row) ? rows.first_segment + rows.ids[row] : 0;
    return segment * features + feature_begin;
  }
};

// Copies to each number of a block that of its cell in an array [segments, features]; an arbitrary one for dropped
// rows. Returns whether there are such rows.
template <typename T>
JB_AVX2_CLONES bool GatherCells(const NumberBlock block, const T* cells, T* to) {
  bool has_dropped = false;
  WithWidth(block.width, [&](auto width) __attribute__((always_inline)) {
    T* next = to;
    for (int64_t row = 0; row < block.rows.count; ++row, next += width) {
      std::memcpy(next, cells + block.Cell(row), static_cast<size_t>(width) * sizeof(T));
      has_dropped |= !block.IsMember(row);
    }
  });
  return has_dropped;
}

// Computes blocks of a result from the numbers of rows and of the cells of their segments:
// compute(block, to, of_cells...) writes them, given the numbers of each of the arrays of cells,
// [batch or 1, segments, features].
template <typename T, typename Compute, typename... Numbers>
struct RowMap {
  const Problem& problem;
  T* result;
  Compute compute;
  std::tuple<BatchArray<Numbers>...> arrays;

  RowMap(const Problem& problem, T* result, const Compute& compute, BatchArray<Numbers>... arrays)
      : problem(problem), result(result), compute(compute), arrays(arrays...) {}

  T* At(const NumberBlock& block) const {
    return result + block.batch * problem.rows * problem.features + block.First();
  }

  // A block of narrow rows, one after another. The cells are copied, so that loops run over all numbers.
  void WriteNarrow(const NumberBlock& block) const {
    alignas(kCacheLine) char memory[(sizeof(Numbers) + ...) * kMappedNumbers];
    char* next = memory;
    bool has_dropped = false;
    const auto gather = [&](const auto& array, auto* to) {
      has_dropped = GatherCells(block, array.Of(block.batch), to);
      next += kMappedNumbers * sizeof(*to);
      return to;
    };
    const auto of_cells = std::apply(
        [&](const BatchArray<Numbers>&... array) {
          return std::tuple<const Numbers*...>{gather(array, reinterpret_cast<Numbers*>(next))...};
        },
        arrays);
    T* const to = At(block);
    std::apply([&](const Numbers*... numbers) { compute(block, to, numbers...); }, of_cells);
    for (int64_t row = 0; has_dropped && row < block.rows.count; ++row) {
      if (!block.IsMember(row)) WriteZeros(to + row * block.width, block.width);
    }
  }

  // Each row of a block, with some of its features. If streamed, it is written past the caches.
  void WriteWide(int64_t batch, const RowBlock& rows, int64_t feature_begin, int64_t feature_end,
                 bool is_streamed) const {
    alignas(kCacheLine) char memory[kMappedNumbers * sizeof(T) + kCacheLine];
    for (int64_t i = 0; i < rows.count; ++i) {
      const RowBlock row{1, 1, rows.first_row + rows.offsets[i], rows.first_segment, kAllOffsets.values, rows.ids + i};
      for (int64_t begin = feature_begin; begin < feature_end; begin += kMappedNumbers) {
        const NumberBlock block{
            row, batch, problem.segments, problem.features, begin, std::min(kMappedNumbers, feature_end - begin)};
        if (!block.IsMember(0)) {
          WriteZeros(At(block), block.width);
          continue;
        }
        if (i + kPrefetchDistance < rows.known) {
          const NumberBlock upcoming{{1, 1, 0, rows.first_segment, nullptr, rows.ids + i + kPrefetchDistance},
                                     batch,
                                     problem.segments,
                                     problem.features,
                                     begin,
                                     block.width};
          std::apply(
              [&](const BatchArray<Numbers>&... array) {
                (PrefetchRow(array.Of(batch) + upcoming.Cell(0), block.width), ...);
              },
              arrays);
        }
        const auto compute_to = [&](T* to) {
          std::apply(
              [&](const BatchArray<Numbers>&... array) { compute(block, to, array.Of(batch) + block.Cell(0)...); },
              arrays);
        };
        T* const to = At(block);
        if (!is_streamed) {
          compute_to(to);
          continue;
        }
        T* const computed = reinterpret_cast<T*>(memory + reinterpret_cast<uintptr_t>(to) % kCacheLine);
        compute_to(computed);
        StreamLines(to, computed, block.width * static_cast<int64_t>(sizeof(T)));
      }
    }
    if (is_streamed) FinishStreaming();
  }

  // All rows, in order.
  void Run(ffi::ThreadPool& pool, SegmentIds ids) const {
    const int64_t features = problem.features;
    if (problem.segments == 0) {
      return WriteZeroBytes(pool, result, problem.batch * problem.rows * features * sizeof(T));
    }
    const bool is_narrow = features > 0 && features <= kMaxGatheredWidth;
    ForEachBlockOfResult(pool, problem, ids, sizeof(T), is_narrow ? kMappedNumbers / features : kConvertedIds,
                         [&](int64_t batch, const RowBlock& rows) {
                           if (!is_narrow) return WriteWide(batch, rows, 0, features, /*is_streamed=*/false);
                           WriteNarrow({rows, batch, problem.segments, features, 0, features});
                         });
  }

  // Reduces the rows to the cells, then does what Run does. If rows are grouped by segment, the results of a few segments
  // are computed right after their rows are reduced, while these are in a near cache. Returns false if memory allocation
  // fails.
  bool RunAfter(ffi::ThreadPool& pool, SegmentIds ids, const RowReduction& reduction) const {
    if (ChooseStrategy(problem, reduction.type, /*has_counts=*/false) != Strategy::kGroupBySegment) {
      const bool has_memory = ReduceAll(pool, ids, reduction);
      if (has_memory) Run(pool, ids);
      return has_memory;
    }
    const int64_t result_bytes = problem.batch * problem.rows * problem.features * static_cast<int64_t>(sizeof(T));
    WriteDroppedRows(pool, problem, ids, result, sizeof(T));
    return ReduceGrouped(pool, ids, reduction, [&](const Block& block, const RowBlock& rows) {
      WriteWide(block.batch, rows, block.feature_begin, block.feature_end, result_bytes >= kMinStreamedBytes);
    });
  }
};

}  // namespace jax_baracuda::segment
