// The drivers of the CPU kernels: how rows are shared among threads. See rows_cpu.h.
#include "ffi/segment/engine/rows_cpu.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>

#include "ffi/core/integers.h"
#include "ffi/segment/engine/list_rows_cpu.h"

namespace jax_baracuda::segment {
namespace {

constexpr int64_t kMinWorkOfRow = 32;  // minimum work counted per row, in bytes
constexpr int64_t kNearCacheBytes = 4 * 1024 * 1024;
constexpr int64_t kMinRowsPerRangeCellRow = 8;  // a range's own cells must also be initialised and merged
constexpr int64_t kMaxRoundedRanges = 64;
constexpr int64_t kMinBytesPerRoundedRange = 64 * 1024;
constexpr int64_t kMinFeatureBytesPerBlock = 256;
constexpr int64_t kSortedBlockBytes = 16 * 1024;   // cells of segments that are reduced together
constexpr int64_t kGroupedBlockBytes = 4 * 1024;   // likewise, while wide rows stream through the same cache
constexpr int64_t kMinBytesPerPart = 1024 * 1024;  // rows and cells per part of the segments
constexpr int64_t kMaxSegmentParts = 16;           // each part reads all ids
constexpr int64_t kMinElementsOfFewRows = 64;      // threads may share the rows of an element in smaller batches

struct SegmentRange {
  int64_t begin, end;
};

// Ids as 32 bits; -1 if outside [0, segments).
JB_CPU_CLONES void ConvertIds(const int64_t* ids, int64_t count, int64_t segments, int32_t* to) {
  JB_VECTORIZE
  for (int64_t i = 0; i < count; ++i) {
    const bool is_member = static_cast<uint64_t>(ids[i]) < static_cast<uint64_t>(segments);
    to[i] = is_member ? static_cast<int32_t>(ids[i]) : -1;
  }
}

// Converts up to `count` ids to their offset from *first_segment, or -1 if out of range. Returns how many it converted:
// only one if segments exceed 32 bits.
int64_t Convert(const int64_t* ids, int64_t count, int64_t segments, int32_t* to, int64_t* first_segment) {
  if (segments <= std::numeric_limits<int32_t>::max()) {
    ConvertIds(ids, count, segments, to);
    return count;
  }
  const bool is_member = static_cast<uint64_t>(*ids) < static_cast<uint64_t>(segments);
  *first_segment = is_member ? *ids : 0;
  *to = is_member ? 0 : -1;
  return 1;
}

// Whether ids ascend. It compares blocks of ids, because compilers do not vectorise a loop that may end at any id.
template <typename Id>
JB_AVX2_CLONES bool Ascend(const Id* ids, int64_t count) {
  constexpr int64_t kBlock = 512;
  for (int64_t begin = 1; begin < count; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, count);
    Id descends = 0;
    JB_VECTORIZE
    for (int64_t i = begin; i < end; ++i) descends |= ids[i] < ids[i - 1] ? 1 : 0;
    if (descends != 0) return false;
  }
  return true;
}

// Calls body with the ids as a typed array.
template <typename Body>
auto Visit(SegmentIds ids, const Body& body) {
  return ids.are_64_bit ? body(static_cast<const int64_t*>(ids.values)) : body(static_cast<const int32_t*>(ids.values));
}

// The first index in [begin, end) with an id of at least `id`, for sorted ids.
int64_t LowerBound(SegmentIds ids, int64_t begin, int64_t end, int64_t id) {
  return Visit(ids, [&](const auto* values) -> int64_t {
    const auto is_below = [](auto a, int64_t b) { return int64_t{a} < b; };
    return std::lower_bound(values + begin, values + end, id, is_below) - values;
  });
}

// The distance between the `count` numbers of one thread and those of the next, so that they share no cache line.
int64_t Padded(int64_t count) { return RoundUp(count, kCacheLine) + kCacheLine; }

// Calls body(block) for blocks of up to `max_rows` rows that together are the rows [row_begin, row_end) of a batch
// element; if `are_listed`, only the rows of `segments`. Loops over rows are compiled for 32-bit ids only; 64-bit ids
// are converted block by block.
void ForEachBlockOfRows(const Problem& problem, SegmentIds ids, int64_t batch, int64_t row_begin, int64_t row_end,
                        SegmentRange segments, bool are_listed, int64_t max_rows,
                        FunctionRef<void(const RowBlock&)> body) {
  max_rows = std::min(max_rows, kConvertedIds);
  const int64_t first_id = problem.IdIndex(batch, 0);
  int32_t converted[kConvertedIds], listed[kConvertedIds + kListSlack], listed_ids[kConvertedIds];
  for (int64_t begin = row_begin, end; begin < row_end; begin = end) {
    const int32_t* block_ids = static_cast<const int32_t*>(ids.values) + first_id + begin;
    int64_t first_segment = 0, known = std::min(max_rows + kScanPrefetchDistance, row_end - begin);
    end = std::min(begin + max_rows, row_end);
    if (ids.are_64_bit) {
      end = begin + Convert(static_cast<const int64_t*>(ids.values) + first_id + begin, end - begin, problem.segments,
                            converted, &first_segment);
      block_ids = converted;
      known = end - begin;
    }
    if (!are_listed) {
      body({end - begin, known, begin, first_segment, kAllOffsets.values, block_ids});
      continue;
    }
    const auto id_of = [&](int64_t segment) {
      return static_cast<int32_t>(std::clamp<int64_t>(segment - first_segment, 0, std::numeric_limits<int32_t>::max()));
    };
    const int32_t first = id_of(segments.begin);
    const uint32_t size = static_cast<uint32_t>(id_of(segments.end) - first);
    const int64_t num_listed = ListRows(block_ids, end - begin, first, size, listed);
    for (int64_t i = 0; i < num_listed; ++i) listed_ids[i] = block_ids[listed[i]];
    body({num_listed, num_listed, begin, first_segment, listed, listed_ids});
  }
}

UntypedCells CellsAfter(UntypedCells cells, CellType type, int64_t count) {
  const auto after = [&](void* numbers, int64_t bytes) -> void* {
    return numbers == nullptr ? nullptr : static_cast<char*>(numbers) + count * bytes;
  };
  return {after(cells.first, type.first_bytes), after(cells.second, type.second_bytes)};
}

// Memory for unfinished cells; numbers that `results` can hold need none.
class CellMemory {
 public:
  // Returns false if allocation fails.
  bool Allocate(CellType type, int64_t count, UntypedCells results) {
    type_ = type;
    results_ = results;
    if (results.first == nullptr) first_ = jax_baracuda::Allocate<char>(count * type.first_bytes);
    if (results.second == nullptr && type.second_bytes > 0) {
      second_ = jax_baracuda::Allocate<char>(count * type.second_bytes);
    }
    return (results.first != nullptr || first_ != nullptr) &&
           (results.second != nullptr || type.second_bytes == 0 || second_ != nullptr);
  }

  // The cells at `place` of the memory, or at `result_place` of the results.
  UntypedCells At(int64_t place, int64_t result_place) const {
    const UntypedCells own = CellsAfter({first_.get(), second_.get()}, type_, place),
                       of_results = CellsAfter(results_, type_, result_place);
    return {own.first != nullptr ? own.first : of_results.first,
            own.second != nullptr ? own.second : of_results.second};
  }

 private:
  CellType type_;
  UntypedCells results_;
  Memory<char> first_, second_;
};

// Initialises the cells of some segments and features of a batch element.
FoldTarget StartCells(const RowReduction& reduction, int64_t batch, SegmentRange segments, int64_t feature_begin,
                      int64_t width, UntypedCells cells, int32_t* row_counts) {
  const int64_t num_segments = segments.end - segments.begin;
  const FoldTarget target{cells,
                          row_counts,
                          batch,
                          segments.begin,
                          static_cast<uint64_t>(reduction.problem.segments),
                          feature_begin,
                          width,
                          ExceedsNearCache(num_segments * width, reduction.type.Bytes()),
                          reduction.problem.rows >= kMinRowsPerRun * reduction.problem.segments,
                          /*ids_ascend=*/false,
                          /*rows_are_scattered=*/false};
  reduction.StartTarget(num_segments, target);
  return target;
}

// Folds blocks of rows into the cells of `num_segments` segments, which are started.
void FoldBlocks(const RowReduction& reduction, int64_t num_segments, const FoldTarget& target,
                ForEachBlock for_each_block) {
  if (reduction.FoldUnchecked(for_each_block, num_segments, target)) return;
  for_each_block([&](const RowBlock& block) { reduction.Fold(block, target); });
}

// Folds the rows [row_begin, row_end), in order, into the cells of `segments`. With `are_listed`, rows of other segments
// are skipped; otherwise there must be none.
void FoldInOrder(SegmentIds ids, const RowReduction& reduction, int64_t row_begin, int64_t row_end,
                 SegmentRange segments, bool are_listed, FoldTarget target) {
  target.has_runs = target.has_runs && !are_listed;  // listed rows have few
  FoldBlocks(reduction, segments.end - segments.begin, target, [&](FunctionRef<void(const RowBlock&)> fold) {
    ForEachBlockOfRows(reduction.problem, ids, target.batch, row_begin, row_end, segments, are_listed,
                       reduction.block_rows, fold);
  });
}

// One thread's cells, of a few segments at a time, from their start to their results.
class CellsOfThread {
 public:
  CellsOfThread(const RowReduction& reduction, int32_t* row_counts) : reduction_(reduction), row_counts_(row_counts) {}

  // For up to max_segments segments at a time, with some of their features. Returns false if allocation fails.
  bool Allocate(int64_t max_segments, int64_t feature_begin, int64_t width) {
    feature_begin_ = feature_begin;
    width_ = width;
    if (row_counts_ != nullptr && feature_begin != 0) {
      own_counts_ = jax_baracuda::Allocate<int32_t>(max_segments);
      if (own_counts_ == nullptr) return false;
    }
    return memory_.Allocate(reduction_.type, max_segments * width, reduction_.ResultCells());
  }

  FoldTarget Start(int64_t batch, SegmentRange segments) const {
    return StartCells(reduction_, batch, segments, feature_begin_, width_,
                      memory_.At(0, FirstCell(batch, segments.begin)), Counts(batch, segments.begin));
  }

  void Write(const FoldTarget& target, SegmentRange segments) const {
    const int64_t cells = (segments.end - segments.begin) * width_;
    if (cells == 0) return;
    reduction_.Write(cells, FirstCell(target.batch, segments.begin), target.row_counts, target.cells);
  }

 private:
  int64_t FirstCell(int64_t batch, int64_t segment) const {
    const Problem& problem = reduction_.problem;
    return (batch * problem.segments + segment) * problem.features + feature_begin_;
  }

  // The thread with the first features writes the counts of a segment for all.
  int32_t* Counts(int64_t batch, int64_t segment) const {
    if (row_counts_ == nullptr || own_counts_ != nullptr) return own_counts_.get();
    return row_counts_ + batch * reduction_.problem.segments + segment;
  }

  const RowReduction& reduction_;
  int32_t* row_counts_;
  Memory<int32_t> own_counts_;
  int64_t feature_begin_ = 0, width_ = 0;
  CellMemory memory_;
};

// The number of segments whose cells stay in the L1 cache together.
int64_t SegmentsAtOnce(const RowReduction& reduction, int64_t block_bytes) {
  const int64_t bytes = std::max<int64_t>(reduction.problem.features, 1) * reduction.type.Bytes();
  return std::clamp<int64_t>(block_bytes / bytes, 1, reduction.problem.segments);
}

// The number of ranges of rows per batch element. If merging rounds, it depends on shapes only, so that the result does
// not depend on the number of threads.
int64_t NumRanges(const Problem& problem, bool rounds, int64_t row_bytes, int64_t num_threads) {
  const int64_t max_ranges = problem.rows / (kMinRowsPerRangeCellRow * problem.segments);
  if (!rounds) return std::clamp<int64_t>(max_ranges, 1, CeilDivide(num_threads, problem.batch));
  return std::clamp<int64_t>(std::min(max_ranges, problem.rows * row_bytes / kMinBytesPerRoundedRange), 1,
                             std::max<int64_t>(1, kMaxRoundedRanges / problem.batch));
}

// Reduces ranges of rows separately, then merges their cells.
bool ReduceRanges(ffi::ThreadPool& pool, SegmentIds ids, const RowReduction& reduction, int64_t num_ranges,
                  int32_t* row_counts) {
  const Problem& problem = reduction.problem;
  const int64_t cells_per_batch = problem.segments * problem.features;
  const int64_t padded_cells = Padded(cells_per_batch), padded_counts = Padded(problem.segments);
  CellMemory first_memory, later_memory;  // of the first range, of all others
  Memory<int32_t> later_counts;
  if (!first_memory.Allocate(reduction.type, problem.batch * padded_cells, reduction.ResultCells()) ||
      !later_memory.Allocate(reduction.type, problem.batch * (num_ranges - 1) * padded_cells, {})) {
    return false;
  }
  if (row_counts != nullptr) {
    later_counts = Allocate<int32_t>(problem.batch * (num_ranges - 1) * padded_counts);
    if (later_counts == nullptr) return false;
  }
  const auto cells_of = [&](int64_t batch, int64_t range, int64_t cell) {
    return range == 0 ? first_memory.At(batch * padded_cells + cell, batch * cells_per_batch + cell)
                      : later_memory.At((batch * (num_ranges - 1) + range - 1) * padded_cells + cell, 0);
  };
  const auto counts_of = [&](int64_t batch, int64_t range) -> int32_t* {
    if (row_counts == nullptr) return nullptr;
    return range == 0 ? row_counts + batch * problem.segments
                      : later_counts.get() + (batch * (num_ranges - 1) + range - 1) * padded_counts;
  };
  const SegmentRange segments{0, problem.segments};
  const int64_t row_bytes = problem.features * reduction.type.first_bytes;
  ForEachRange(pool, problem.batch * num_ranges, problem.batch * problem.rows * std::max(row_bytes, kMinWorkOfRow),
               [&](int64_t begin, int64_t end) {
                 for (int64_t index = begin; index < end; ++index) {
                   const int64_t batch = index / num_ranges, range = index % num_ranges;
                   const FoldTarget target = StartCells(reduction, batch, segments, 0, problem.features,
                                                        cells_of(batch, range, 0), counts_of(batch, range));
                   FoldInOrder(ids, reduction, ChunkBegin(problem.rows, num_ranges, range),
                               ChunkBegin(problem.rows, num_ranges, range + 1), segments, /*are_listed=*/false, target);
                 }
               });
  if (row_counts != nullptr) {
    ParallelFor(pool, problem.batch, [&](int64_t batch) {
      int32_t* const counts = counts_of(batch, 0);
      for (int64_t range = 1; range < num_ranges; ++range) {
        const int32_t* const later = counts_of(batch, range);
        for (int64_t i = 0; i < problem.segments; ++i) counts[i] += later[i];
      }
    });
  }
  const int64_t cell_bytes = num_ranges * reduction.type.first_bytes;
  ForEachRangeOfBatch(pool, problem.batch, cells_per_batch, cells_per_batch * cell_bytes,
                      [&](int64_t batch, int64_t begin, int64_t end) {
                        const UntypedCells cells = cells_of(batch, 0, begin);
                        for (int64_t range = 1; range < num_ranges; ++range) {
                          reduction.Merge(end - begin, cells_of(batch, range, begin), cells);
                        }
                        const int32_t* const counts =
                            row_counts == nullptr ? nullptr : counts_of(batch, 0) + begin / problem.features;
                        reduction.Write(end - begin, batch * cells_per_batch + begin, counts, cells);
                      });
  return true;
}

// Calls reduce(batch, part, cells) for `parts` parts of each batch element, with cells for max_segments segments.
// Returns false if allocation fails.
bool ForEachPartOfSegments(ffi::ThreadPool& pool, const RowReduction& reduction, int64_t parts, int64_t max_segments,
                           int32_t* row_counts, FunctionRef<void(int64_t, int64_t, const CellsOfThread&)> reduce) {
  std::atomic<bool> has_memory{true};
  ParallelFor(pool, reduction.problem.batch * parts, [&](int64_t index) {
    CellsOfThread cells(reduction, row_counts);
    if (cells.Allocate(max_segments, 0, reduction.problem.features)) {
      reduce(index / parts, index % parts, cells);
    } else {
      has_memory = false;
    }
  });
  return has_memory;
}

// Reduces sorted rows, a few segments at a time, so that their cells stay in the L1 cache.
bool ReduceSorted(ffi::ThreadPool& pool, SegmentIds ids, const RowReduction& reduction, int64_t parts,
                  int32_t* row_counts) {
  const Problem& problem = reduction.problem;
  const int64_t max_segments = SegmentsAtOnce(reduction, kSortedBlockBytes);
  const auto reduce = [&](int64_t batch, int64_t part, const CellsOfThread& cells) {
    const int64_t first_id = problem.IdIndex(batch, 0);
    // Parts have equal numbers of rows, rounded up to complete segments.
    const auto bound = [&](int64_t i) {
      if (i == 0) return int64_t{0};
      if (i == parts || problem.rows == 0) return problem.segments;
      const int64_t last_row = ChunkBegin(problem.rows, parts, i);
      return std::clamp<int64_t>(ids[first_id + last_row], -1, problem.segments - 1) + 1;
    };
    const auto first_row = [&](int64_t segment) {
      return LowerBound(ids, first_id, first_id + problem.rows, segment) - first_id;
    };
    const int64_t part_end = bound(part + 1);
    int64_t begin = bound(part), row_begin = first_row(begin);
    while (begin < part_end) {
      const int64_t end = std::min(begin + max_segments, part_end), row_end = first_row(end);
      FoldTarget target = cells.Start(batch, {begin, end});
      target.ids_ascend = true;
      FoldInOrder(ids, reduction, row_begin, row_end, {begin, end}, /*are_listed=*/false, target);
      cells.Write(target, {begin, end});
      begin = end;
      row_begin = row_end;
    }
  };
  return ForEachPartOfSegments(pool, reduction, parts, max_segments, row_counts, reduce);
}

// Reduces the rows in order. Each thread owns a part of the segments and skips the rows of others.
bool ReduceSegmentParts(ffi::ThreadPool& pool, SegmentIds ids, const RowReduction& reduction, int64_t parts,
                        int32_t* row_counts) {
  const Problem& problem = reduction.problem;
  const auto reduce = [&](int64_t batch, int64_t part, const CellsOfThread& cells) {
    const SegmentRange segments{ChunkBegin(problem.segments, parts, part),
                                ChunkBegin(problem.segments, parts, part + 1)};
    const FoldTarget target = cells.Start(batch, segments);
    FoldInOrder(ids, reduction, 0, problem.rows, segments, /*are_listed=*/true, target);
    cells.Write(target, segments);
  };
  return ForEachPartOfSegments(pool, reduction, parts, CeilDivide(problem.segments, parts), row_counts, reduce);
}

int64_t BytesOfWork(const Problem& problem, int64_t row_bytes) {
  return problem.batch * (problem.rows + problem.segments) * std::max(row_bytes, kMinWorkOfRow);
}

int64_t RowBytes(const RowReduction& reduction) { return reduction.problem.features * reduction.type.element_bytes; }

// Numbers the segments of several elements of the batch in turn; -1 for dropped rows.
void NumberSegments(const Problem& problem, SegmentIds ids, int64_t first_element, int64_t elements, int32_t* to) {
  Visit(ids, [&](const auto* values) {
    for (int64_t element = 0; element < elements; ++element) {
      const auto* const of_element = values + problem.IdIndex(first_element + element, 0);
      for (int64_t row = 0; row < problem.rows; ++row) {
        const int64_t id = of_element[row];
        const bool is_member = static_cast<uint64_t>(id) < static_cast<uint64_t>(problem.segments);
        *to++ = static_cast<int32_t>(is_member ? element * problem.segments + id : -1);
      }
    }
  });
}

// Reduces several elements of the batch at a time. Starting one alone would take longer than reducing it.
bool ReduceElements(ffi::ThreadPool& pool, SegmentIds ids, const RowReduction& reduction, int32_t* row_counts) {
  const Problem& problem = reduction.problem;
  const CellType type = reduction.type;
  const int64_t at_once = ElementsAtOnce(problem, type);
  const bool are_together = reduction.FoldsElementsTogether();
  std::atomic<bool> has_memory{true};
  const auto reduce_range = [&](int64_t range_begin, int64_t range_end) {
    CellsOfThread cells(reduction, row_counts);
    if (!cells.Allocate(at_once * problem.segments, 0, problem.features)) {
      has_memory = false;
      return;
    }
    int32_t numbered[kConvertedIds];
    if (are_together && problem.ids_are_shared) NumberSegments(problem, ids, 0, at_once, numbered);
    for (int64_t begin = range_begin, end; begin < range_end; begin = end) {
      end = std::min(begin + at_once, range_end);
      const SegmentRange segments{0, (end - begin) * problem.segments};
      FoldTarget target = cells.Start(begin, segments);
      if (are_together) {
        if (!problem.ids_are_shared) NumberSegments(problem, ids, begin, end - begin, numbered);
        target.num_segments = static_cast<uint64_t>(segments.end);
        FoldBlocks(reduction, segments.end, target, [&](FunctionRef<void(const RowBlock&)> fold) {
          const int64_t rows = (end - begin) * problem.rows;
          for (int64_t row = 0, count; row < rows; row += count) {
            count = std::min(reduction.block_rows, rows - row);
            fold({count, count, row, 0, kAllOffsets.values, numbered + row});
          }
        });
      } else {
        for (FoldTarget of_element = target; of_element.batch < end; ++of_element.batch) {
          FoldInOrder(ids, reduction, 0, problem.rows, {0, problem.segments}, /*are_listed=*/false, of_element);
          of_element.cells = CellsAfter(of_element.cells, type, problem.segments * problem.features);
          if (row_counts != nullptr) of_element.row_counts += problem.segments;
        }
      }
      cells.Write(target, segments);
    }
  };
  ForEachRange(pool, problem.batch, BytesOfWork(problem, RowBytes(reduction)), reduce_range);
  return has_memory;
}

// `then` may be nullptr.
bool ReduceGroups(ffi::ThreadPool& pool, SegmentIds ids, const RowReduction& reduction, int32_t* row_counts,
                  const FunctionRef<void(const Block&, const RowBlock&)>* then) {
  const Problem& problem = reduction.problem;
  const int64_t num_threads = NumThreadsFor(pool, BytesOfWork(problem, RowBytes(reduction)));
  const int64_t item_size = reduction.splits_features ? reduction.type.element_bytes : 0;
  const auto reduce = [&](const Block& block, const GroupedRows& grouped) {
    const int64_t width = block.feature_end - block.feature_begin;
    // The results of some features of several segments are not contiguous.
    const int64_t max_segments = width < problem.features ? 1 : SegmentsAtOnce(reduction, kGroupedBlockBytes);
    CellsOfThread cells(reduction, row_counts);
    if (!cells.Allocate(max_segments, block.feature_begin, width)) return false;
    for (int64_t begin = block.segment_begin, end; begin < block.segment_end; begin = end) {
      end = std::min(begin + max_segments, block.segment_end);
      FoldTarget target = cells.Start(block.batch, {begin, end});
      target.rows_are_scattered = true;
      const auto for_each_block = [&](FunctionRef<void(const RowBlock&)> body) {
        grouped.ForEachBlock(begin - block.segment_begin, end - block.segment_begin, begin, reduction.block_rows, body);
      };
      FoldBlocks(reduction, end - begin, target, for_each_block);
      cells.Write(target, {begin, end});
      if (then != nullptr) for_each_block([&](const RowBlock& rows) { (*then)(block, rows); });
    }
    return true;
  };
  return ForEachGroupedBlock(pool, problem, item_size, num_threads, ids, reduce);
}

}  // namespace

bool AreSorted(const Problem& problem, SegmentIds ids) {
  for (int64_t b = 0; b < (problem.ids_are_shared ? 1 : problem.batch); ++b) {
    const auto is_sorted = [&](const auto* values) { return Ascend(values + b * problem.rows, problem.rows); };
    if (!Visit(ids, is_sorted)) return false;
  }
  return true;
}

bool GroupedRows::Group(const Problem& problem, int64_t batch, int64_t segment_begin, int64_t segment_end,
                        SegmentIds ids, bool ids_are_sorted) {
  const int64_t num_segments = segment_end - segment_begin;
  const int64_t first_id = problem.IdIndex(batch, 0), end_id = first_id + problem.rows;
  ends_.reset(new (std::nothrow) int32_t[num_segments + 1]());
  if (ends_ == nullptr) return false;
  if (ids_are_sorted) {
    first_row_ = static_cast<int32_t>(LowerBound(ids, first_id, end_id, segment_begin) - first_id);
    size_ = static_cast<int32_t>(LowerBound(ids, first_id, end_id, segment_end) - first_id) - first_row_;
    for (int64_t i = 0; i < size_; ++i) ++ends_[ids[first_id + first_row_ + i] - segment_begin];
    for (int64_t i = 1; i < num_segments; ++i) ends_[i] += ends_[i - 1];
    return true;
  }
  const auto members = Allocate<int32_t>(problem.rows + 1);
  if (members == nullptr) return false;
  return Visit(ids, [&](const auto* all_ids) {
    const auto* const row_ids = all_ids + first_id;
    // Branch-free, since ids are unpredictable. A row outside the segments is overwritten by the next one.
    int64_t num_members = 0;
    for (int64_t row = 0; row < problem.rows; ++row) {
      members[num_members] = static_cast<int32_t>(row);
      const int64_t segment = row_ids[row];
      num_members += static_cast<int64_t>(segment >= segment_begin) & static_cast<int64_t>(segment < segment_end);
    }
    size_ = static_cast<int32_t>(num_members);
    rows_ = Allocate<int32_t>(num_members);
    if (rows_ == nullptr) return false;
    for (int64_t i = 0; i < num_members; ++i) ++ends_[row_ids[members[i]] - segment_begin + 1];
    for (int64_t i = 0; i < num_segments; ++i) ends_[i + 1] += ends_[i];
    // Placing a row increments its segment's start, so that in the end all starts have become ends.
    for (int64_t i = 0; i < num_members; ++i) rows_[ends_[row_ids[members[i]] - segment_begin]++] = members[i];
    return true;
  });
}

void GroupedRows::ForEachBlock(int64_t begin, int64_t end, int64_t first_segment, int64_t max_rows,
                               FunctionRef<void(const RowBlock&)> body) const {
  int32_t ids[kConvertedIds + kPrefetchDistance];
  int64_t first_group = begin;
  const int32_t last = End(end - 1);
  for (int32_t place = Begin(begin), block_end; place < last; place = block_end) {
    block_end = static_cast<int32_t>(std::min<int64_t>(place + max_rows, last));
    const int64_t count = block_end - place, known = std::min<int64_t>(count + kPrefetchDistance, size_ - place);
    while (End(first_group) <= place) ++first_group;
    int64_t group = first_group;
    for (int32_t i = place, group_end; i < place + known; i = group_end) {
      while (End(group) <= i) ++group;
      group_end = static_cast<int32_t>(std::min<int64_t>(End(group), place + known));
      std::fill(ids + (i - place), ids + (group_end - place), static_cast<int32_t>(group - begin));
    }
    if (rows_ == nullptr) {
      body({count, known, first_row_ + place, first_segment, kAllOffsets.values, ids});
    } else {
      body({count, known, 0, first_segment, rows_.get() + place, ids});
    }
  }
}

bool ForEachGroupedBlock(ffi::ThreadPool& pool, const Problem& problem, int64_t item_size, int64_t num_threads,
                         SegmentIds ids, FunctionRef<bool(const Block&, const GroupedRows&)> body) {
  // One thread per range groups the rows of a batch element for `segment_ranges` ranges of segments. Then
  // `feature_ranges` threads work on each range.
  const int64_t blocks = CeilDivide(num_threads, std::max<int64_t>(1, problem.batch));
  const int64_t segment_ranges = std::clamp<int64_t>(problem.segments / kMinSegmentsPerBlock, 1, blocks);
  const int64_t feature_ranges =
      std::clamp<int64_t>(problem.features * item_size / kMinFeatureBytesPerBlock, 1, blocks / segment_ranges);
  const auto block_of = [&](int64_t group, int64_t feature_range) {
    const int64_t segment_range = group % segment_ranges;
    return Block{group / segment_ranges, ChunkBegin(problem.segments, segment_ranges, segment_range),
                 ChunkBegin(problem.segments, segment_ranges, segment_range + 1),
                 ChunkBegin(problem.features, feature_ranges, feature_range),
                 ChunkBegin(problem.features, feature_ranges, feature_range + 1)};
  };
  const bool ids_are_sorted = AreSorted(problem, ids);
  const int64_t num_groups = problem.batch * segment_ranges;
  const std::unique_ptr<GroupedRows[]> groups(new (std::nothrow) GroupedRows[num_groups]);
  if (groups == nullptr) return false;
  std::atomic<bool> has_memory{true};
  ParallelFor(pool, num_groups, [&](int64_t group) {
    const Block block = block_of(group, 0);
    if (!groups[group].Group(problem, block.batch, block.segment_begin, block.segment_end, ids, ids_are_sorted) ||
        (feature_ranges == 1 && !body(block, groups[group]))) {
      has_memory = false;
    }
  });
  if (feature_ranges == 1 || !has_memory) return has_memory;
  ParallelFor(pool, num_groups * feature_ranges, [&](int64_t index) {
    const int64_t group = index / feature_ranges;
    if (!body(block_of(group, index % feature_ranges), groups[group])) has_memory = false;
  });
  return has_memory;
}

bool ReducesInOrder(const Problem& problem, int64_t element_bytes, int64_t cell_bytes) {
  const int64_t row_bytes = problem.features * element_bytes, narrow_bytes = element_bytes >= 4 ? 128 : 64;
  const bool cells_stay_near = problem.segments * problem.features * cell_bytes <= kNearCacheBytes;
  return row_bytes < narrow_bytes || (cells_stay_near && problem.rows >= kMinRowsPerCellRow * problem.segments);
}

int64_t ElementsAtOnce(const Problem& problem, CellType type) {
  if (problem.batch < kMinElementsOfFewRows) return 0;
  const int64_t cell_bytes = problem.segments * std::max<int64_t>(problem.features, 1) * type.Bytes();
  return std::min(kConvertedIds / std::max<int64_t>(problem.rows, 1),
                  kSortedBlockBytes / std::max<int64_t>(cell_bytes, 1));
}

Strategy ChooseScan(const Problem& problem, bool rounds, int64_t row_bytes) {
  return rounds && NumRanges(problem, rounds, row_bytes, /*num_threads=*/1) > 1 ? Strategy::kSplitScan
                                                                                : Strategy::kScan;
}

Strategy ChooseStrategy(const Problem& problem, CellType type, bool has_counts) {
  if (problem.batch * problem.segments == 0 || (problem.features == 0 && !has_counts)) return Strategy::kNothing;
  if (ElementsAtOnce(problem, type) > 0) return Strategy::kBatchOfFewRows;
  return ReducesInOrder(problem, type.element_bytes, type.Bytes())
             ? ChooseScan(problem, type.rounds, problem.features * type.element_bytes)
             : Strategy::kGroupBySegment;
}

int64_t NumThreadsFor(ffi::ThreadPool& pool, int64_t total_bytes) {
  return std::min(ChunksFor(pool, total_bytes), NumThreadsOf(pool));
}

bool Scan(ffi::ThreadPool& pool, SegmentIds ids, const RowReduction& reduction, int32_t* row_counts) {
  const Problem& problem = reduction.problem;
  const bool rounds = reduction.type.rounds;
  const int64_t row_bytes = RowBytes(reduction), total_bytes = BytesOfWork(problem, row_bytes);
  const int64_t num_threads = NumThreadsFor(pool, total_bytes);
  const int64_t num_ranges = NumRanges(problem, rounds, row_bytes, num_threads);
  if (ChooseScan(problem, rounds, row_bytes) == Strategy::kScan) {
    const int64_t parts = CeilDivide(std::min(num_threads, total_bytes / kMinBytesPerPart + 1), problem.batch);
    if (AreSorted(problem, ids)) return ReduceSorted(pool, ids, reduction, parts, row_counts);
    const int64_t segment_parts = std::min({parts, problem.segments, kMaxSegmentParts});
    if (segment_parts > 1 && total_bytes >= 2 * kMinBytesPerPart && num_ranges == 1) {
      return ReduceSegmentParts(pool, ids, reduction, segment_parts, row_counts);
    }
  }
  return ReduceRanges(pool, ids, reduction, num_ranges, row_counts);
}

bool ReduceAll(ffi::ThreadPool& pool, SegmentIds ids, const RowReduction& reduction, int32_t* row_counts) {
  switch (ChooseStrategy(reduction.problem, reduction.type, row_counts != nullptr)) {
    case Strategy::kNothing:
      return true;
    case Strategy::kBatchOfFewRows:
      return ReduceElements(pool, ids, reduction, row_counts);
    case Strategy::kGroupBySegment:
      return ReduceGroups(pool, ids, reduction, row_counts, /*then=*/nullptr);
    default:
      return Scan(pool, ids, reduction, row_counts);
  }
}

bool ReduceGrouped(ffi::ThreadPool& pool, SegmentIds ids, const RowReduction& reduction,
                   FunctionRef<void(const Block&, const RowBlock&)> then) {
  return ReduceGroups(pool, ids, reduction, /*row_counts=*/nullptr, &then);
}

void WriteDroppedRows(ffi::ThreadPool& pool, const Problem& problem, SegmentIds ids, void* result,
                      int64_t element_bytes) {
  const int64_t row_bytes = problem.features * element_bytes, rows = problem.batch * problem.rows;
  ForEachRange(pool, rows, rows * sizeof(int64_t), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t segment = ids[problem.ids_are_shared ? i % problem.rows : i];
      if (segment >= 0 && segment < problem.segments) continue;
      WriteZeros(static_cast<char*>(result) + i * row_bytes, row_bytes);
    }
  });
}

void ForEachBlockOfResult(ffi::ThreadPool& pool, const Problem& problem, SegmentIds ids, int64_t element_bytes,
                          int64_t max_rows, FunctionRef<void(int64_t, const RowBlock&)> body) {
  const int64_t bytes_per_batch = problem.rows * problem.features * element_bytes;
  const int64_t chunks = ChunksFor(pool, bytes_per_batch);
  const auto visit = [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      const int64_t batch = index / chunks, chunk = index % chunks;
      ForEachBlockOfRows(problem, ids, batch, ChunkBegin(problem.rows, chunks, chunk),
                         ChunkBegin(problem.rows, chunks, chunk + 1), SegmentRange{0, problem.segments},
                         /*are_listed=*/false, max_rows, [&](const RowBlock& block) { body(batch, block); });
    }
  };
  ForEachRange(pool, problem.batch * chunks, problem.batch * bytes_per_batch, visit);
}

}  // namespace jax_baracuda::segment
