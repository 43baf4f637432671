// How the CPU kernels of the segment ops traverse the rows. Results do not depend on the number of threads, nor on
// whether the ids are sorted.
//
// A reduction has two strategies. Both accumulate in ComputeType, so that 16-bit types vectorise:
// - Scan: each range of rows is folded, in order, into its own cells; then the cells of the ranges are merged. Used if
//   rows are narrow, or if the cells fit in a near cache. kScan has two variants with the same result: sorted ids are
//   reduced a few neighbouring segments at a time, and instead of a single range, each thread reduces the rows of its
//   own segments.
// - Group by segment: each thread owns a range of segments (or of features, if there are few segments). A counting sort
//   of row numbers groups its rows by segment. A segment's cells then stay in the L1 cache while its rows stream by,
//   and are written once.
//
// Kernels take small structs by value. Through a reference, the compiler would have to reload them after every store,
// which might alias them.
//
// A Reduction says how rows are folded and results are written. It has the types Element (of a row), First and Second
// (the one or two numbers of an unfinished cell; Second may be NoNumber). It has the constants kRounds (whether merging
// in another grouping changes the bits) and kHoldsRuns (whether every row changes its cell, so that a run of rows of
// one segment should keep its cell in registers). kSecondIsRare is optional (whether few cells have a second number, so
// that it is not prefetched). The functions are
//   Start(count, cells)                       initialises `count` cells
//   Fold(values, row, width, cells)           folds a row into `width` cells; rows of a cell come in ascending order.
//                                             With kFoldsWidened, the values may be (kFoldsBoth) or are always of First
//   Merge(count, later, cells)                merges cells of a later range of rows into those of the earlier ranges
//   Write(count, first_cell, counts, cells)   writes results from cell `first_cell` of [batch, segments, features] on.
//                                             counts[0] is the number of rows of that cell's segment, counts[1] that of
//                                             the next one (only if the caller of ReduceAll asked for counts)
//   ResultCells()                             the results as cells, if these can hold the unfinished numbers; otherwise
//                                             nullptr
//   WriteEmpty(count, first_cell)             the same as Start and Write, for cells without rows; only if cheaper
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <type_traits>

#include "ffi/core/alignment.h"
#include "ffi/core/cpu_clones.h"
#include "ffi/core/cpu_kernel.h"
#include "ffi/core/float16_cpu.h"
#include "ffi/core/function_ref.h"
#include "ffi/core/huge_pages.h"
#include "ffi/core/integers.h"
#include "ffi/core/parallel_for.h"
#include "ffi/core/streaming_store.h"
#include "ffi/core/target_table.h"
#include "ffi/segment/decoding.h"
#include "ffi/segment/engine/list_rows_cpu.h"
#include "ffi/segment/problem.h"

namespace jax_baracuda::segment {

inline constexpr int64_t kMinWorkOfRow = 32;  // minimum work counted per row, in bytes
inline constexpr int64_t kNearCacheBytes = 4 * 1024 * 1024;
inline constexpr int64_t kFarCellBytes = 512 * 1024;  // cells of more bytes in total are prefetched
inline constexpr int64_t kMinRowsPerCellRow = 2;
inline constexpr int64_t kMinRowsPerRangeCellRow = 8;  // a range's own cells must also be initialised and merged
inline constexpr int64_t kMaxRoundedRanges = 64;
inline constexpr int64_t kMinBytesPerRoundedRange = 64 * 1024;
inline constexpr int64_t kMinSegmentsPerBlock = 64;
inline constexpr int64_t kMinFeatureBytesPerBlock = 256;
inline constexpr int64_t kSortedBlockBytes = 16 * 1024;   // cells of segments that are reduced together
inline constexpr int64_t kMinBytesPerPart = 1024 * 1024;  // rows and cells per part of the segments
inline constexpr int64_t kMaxSegmentParts = 16;           // each part reads all ids
inline constexpr int64_t kMinStreamedBytes = 32 * 1024 * 1024;
inline constexpr int64_t kCacheLine = 64;
inline constexpr int64_t kPrefetchDistance = 6;       // in rows
inline constexpr int64_t kScanPrefetchDistance = 16;  // in narrow rows
inline constexpr int64_t kWidenedNumbers = 2048;      // numbers converted together

// Rows up to this width are faster to convert together than one by one.
template <typename T>
inline constexpr int64_t kMaxWidenedWidth = kIsWidenedAtOnce<T> ? 64 : 8;

enum class Strategy {
  kNothing,
  kFill,            // no segments: all rows are dropped
  kScan,            // rows in order; one range, or one per thread if merging does not round
  kSplitScan,       // rows in order; ranges depend on shapes only, because merging rounds
  kGroupBySegment,  // rows grouped by segment
  kStreamedGroups,  // the same, with streaming stores of row results
  kGather,          // rows in order, each computed from its segment's cells
};

inline const char* StrategyName(Strategy strategy) {
  switch (strategy) {
    case Strategy::kNothing:
      return kNothing;
    case Strategy::kFill:
      return "fill";
    case Strategy::kScan:
      return "scan";
    case Strategy::kSplitScan:
      return "split_scan";
    case Strategy::kGroupBySegment:
      return "group_by_segment";
    case Strategy::kStreamedGroups:
      return "group_by_segment_streamed";
    case Strategy::kGather:
      return "gather";
  }
  return "";
}

// The plan of a call: choose(TypeTag<T>{}) for the type that dispatch(type, body) finds.
template <typename Dispatch, typename Choose>
Plan PlanOfType(const SegmentCall& call, const Dispatch& dispatch, const Choose& choose) {
  Strategy strategy = Strategy::kNothing;
  dispatch(call.type, [&](auto tag) { strategy = choose(tag); });
  return Plan{StrategyName(strategy)};
}

// Runs a call with kRun(pool, call), which returns false if memory allocation fails.
template <typename Call, bool (*kRun)(ffi::ThreadPool&, const Call&)>
ffi::Error RunOnCpu(ffi::ThreadPool pool, const char* op, ffi::RemainingRets scratch, Call* call) {
  if (!scratch.empty()) return InvalidArgument(op, "scratch is among the results, expected none");
  return MemoryStatus(op, kRun(pool, *call));
}

inline constexpr int64_t kConvertedIds = 1024;  // converted at a time

// Ids as 32 bits; -1 if outside [0, segments).
template <typename Id>
JB_CPU_CLONES void ConvertIds(const Id* ids, int64_t count, int64_t segments, int32_t* to) {
  JB_VECTORIZE
  for (int64_t i = 0; i < count; ++i) {
    const bool is_member = static_cast<uint64_t>(ids[i]) < static_cast<uint64_t>(segments);
    to[i] = is_member ? static_cast<int32_t>(ids[i]) : -1;
  }
}

struct SegmentIds {
  const void* values;
  bool are_64_bit;

  explicit SegmentIds(const SegmentCall& call) : values(call.segment_ids), are_64_bit(call.ids_are_64_bit) {}

  int64_t operator[](int64_t i) const {
    return are_64_bit ? static_cast<const int64_t*>(values)[i] : static_cast<const int32_t*>(values)[i];
  }

  // Calls body with the ids as a typed array.
  template <typename Body>
  JB_INLINE auto Visit(const Body& body) const {
    return are_64_bit ? body(static_cast<const int64_t*>(values)) : body(static_cast<const int32_t*>(values));
  }

  bool AreSorted(int64_t begin, int64_t end) const {
    return Visit([&](const auto* ids) { return std::is_sorted(ids + begin, ids + end); });
  }

  // The first index in [begin, end) with an id of at least `id`, for sorted ids.
  int64_t LowerBound(int64_t begin, int64_t end, int64_t id) const {
    return Visit([&](const auto* ids) -> int64_t {
      return std::lower_bound(ids + begin, ids + end, id, [](auto a, int64_t b) { return int64_t{a} < b; }) - ids;
    });
  }

  // Converts up to `count` 64-bit ids from index `first` on to their offset from *first_segment, or -1 if out of range.
  // Returns how many it converted: only one if segments exceed 32 bits.
  __attribute__((noinline)) int64_t Convert(int64_t first, int64_t count, int64_t segments, int32_t* to,
                                            int64_t* first_segment) const {
    const int64_t* const ids = static_cast<const int64_t*>(values) + first;
    if (segments > std::numeric_limits<int32_t>::max()) {
      const bool is_member = static_cast<uint64_t>(*ids) < static_cast<uint64_t>(segments);
      *first_segment = is_member ? *ids : 0;
      *to = is_member ? 0 : -1;
      return 1;
    }
    *first_segment = 0;
    const int64_t converted = std::min(count, kConvertedIds);
    ConvertIds(ids, converted, segments, to);
    return converted;
  }
};

inline bool EachBatchIsSorted(const Problem& problem, SegmentIds ids) {
  for (int64_t b = 0; b < (problem.ids_are_shared ? 1 : problem.batch); ++b) {
    if (!ids.AreSorted(b * problem.rows, (b + 1) * problem.rows)) return false;
  }
  return true;
}

// Prefetches a whole row. Rows found through ids are scattered, so the hardware prefetcher cannot predict them.
template <typename T>
JB_INLINE void PrefetchRow(const T* row, int64_t width) {
  const char* const begin = reinterpret_cast<const char*>(row);
  for (int64_t byte = 0; byte < width * static_cast<int64_t>(sizeof(T)); byte += kCacheLine) {
    __builtin_prefetch(begin + byte);
  }
}

inline constexpr int64_t kMaxNarrowWidth = 8;

// Whether DispatchNarrow takes rows of this width.
inline bool IsNarrow(int64_t width) { return width >= 1 && width <= kMaxNarrowWidth; }

// Calls body with the width as a constant if rows are narrow; otherwise returns false.
template <typename Body>
JB_INLINE bool DispatchNarrow(int64_t width, const Body& body) {
  return DispatchConstant<1, 2, 3, 4, 5, 6, 7, 8>(width, body);
}

// Calls body with `width`, as a constant if it is small: otherwise loop overhead exceeds the work on so few features.
template <typename Body>
JB_INLINE void WithWidth(int64_t width, const Body& body) {
  if (!DispatchNarrow(width, body)) body(width);
}

// Pointers to unfinished cells: one array per kind of number.
struct NoNumber {};

template <typename First, typename Second>
struct Cells {
  First* first;
  Second* second;  // nullptr for NoNumber

  JB_INLINE Cells operator+(int64_t count) const {
    return Cells{first + count, std::is_same_v<Second, NoNumber> ? nullptr : second + count};
  }
};

template <typename Reduction>
using CellsOf = Cells<typename Reduction::First, typename Reduction::Second>;

template <typename Reduction, typename = void>
inline constexpr bool kWritesEmpty = false;
template <typename Reduction>
inline constexpr bool
    kWritesEmpty<Reduction, std::void_t<decltype(std::declval<const Reduction&>().WriteEmpty(int64_t{}, int64_t{}))>> =
        true;

// Whether rows may be converted to First before they are folded.
template <typename Reduction>
inline constexpr bool kFoldsWidened =
    !std::is_same_v<typename Reduction::Element, ComputeType<typename Reduction::Element>> &&
    std::is_same_v<typename Reduction::First, ComputeType<typename Reduction::Element>>;

template <typename Reduction>
inline constexpr bool kHasSecond = !std::is_same_v<typename Reduction::Second, NoNumber>;

template <typename Reduction, typename = void>
inline constexpr bool kSecondIsRare = false;
template <typename Reduction>
inline constexpr bool kSecondIsRare<Reduction, std::void_t<decltype(Reduction::kSecondIsRare)>> =
    Reduction::kSecondIsRare;

template <typename Reduction>
constexpr int64_t CellBytes() {
  return sizeof(typename Reduction::First) + (kHasSecond<Reduction> ? sizeof(typename Reduction::Second) : 0);
}

// Uses a result array as cells if it has the type of a cell's first number; otherwise nullptr.
template <typename Reduction, typename T>
JB_INLINE CellsOf<Reduction> CellsAt(T* first, typename Reduction::Second* second = nullptr) {
  if constexpr (std::is_same_v<T, typename Reduction::First>) return {first, second};
  return {nullptr, nullptr};
}

// Writes numbers of cells as results, unless they are there already.
template <typename Number, typename T>
JB_INLINE void WriteNumbers(const Number* from, int64_t count, T* to) {
  if constexpr (std::is_same_v<Number, T>) {
    if (from != to) std::copy_n(from, count, to);
  } else if constexpr (kIsWidenedAtOnce<T>) {
    Narrow(from, count, to);
  } else {
    JB_VECTORIZE
    for (int64_t i = 0; i < count; ++i) Store(from[i], to + i);
  }
}

template <typename Reduction>
constexpr bool FoldsBoth() {
  if constexpr (kFoldsWidened<Reduction>)
    return Reduction::kFoldsBoth || !kIsWidenedAtOnce<typename Reduction::Element>;
  return false;
}

// Folds a row; converts it first if that is faster.
template <typename Reduction>
JB_INLINE void FoldRow(const Reduction& reduction, const typename Reduction::Element* values, int32_t row,
                       int64_t width, CellsOf<Reduction> cells) {
  if constexpr (kFoldsWidened<Reduction> && !FoldsBoth<Reduction>()) {
    ForEachPart(values, width, [&](int64_t begin, int64_t count, const auto* part) __attribute__((always_inline)) {
      reduction.Fold(part, row, count, cells + begin);
    });
  } else {
    reduction.Fold(values, row, width, cells);
  }
}

// Prefetches both ends of a narrow row of cells, which may straddle two cache lines.
template <typename Reduction>
JB_INLINE void PrefetchCells(CellsOf<Reduction> cells, int64_t width) {
  __builtin_prefetch(cells.first, /*rw=*/1);
  __builtin_prefetch(cells.first + width - 1, /*rw=*/1);
  if constexpr (kHasSecond<Reduction> && !kSecondIsRare<Reduction>) {
    __builtin_prefetch(cells.second, /*rw=*/1);
    __builtin_prefetch(cells.second + width - 1, /*rw=*/1);
  }
}

// The distance between the `count` numbers of one thread and those of the next, so that they share no cache line.
template <typename Number>
constexpr int64_t Padded(int64_t count) {
  constexpr int64_t kNumbersOfLine = kCacheLine / sizeof(Number);
  return RoundUp(count, kNumbersOfLine) + kNumbersOfLine;
}

template <typename Reduction>
constexpr int64_t PaddedCells(int64_t count) {
  const int64_t of_first = Padded<typename Reduction::First>(count);
  if constexpr (std::is_same_v<typename Reduction::Second, NoNumber>) {
    return of_first;
  } else {
    return std::max(of_first, Padded<typename Reduction::Second>(count));
  }
}

// Memory for unfinished cells; numbers that `results` can hold need none.
template <typename Reduction>
class CellMemory {
 public:
  // Returns false if allocation fails.
  bool Allocate(int64_t count, CellsOf<Reduction> results) {
    results_ = results;
    if (results.first == nullptr) {
      first_ = jax_baracuda::Allocate<typename Reduction::First>(count);
      if (first_ == nullptr) return false;
    }
    if constexpr (kHasSecond<Reduction>) {
      if (results.second == nullptr) {
        second_ = jax_baracuda::Allocate<typename Reduction::Second>(count);
        if (second_ == nullptr) return false;
      }
    }
    return true;
  }

  // The cells at `place` of the memory, or at `result_place` of the results.
  CellsOf<Reduction> At(int64_t place, int64_t result_place) const {
    CellsOf<Reduction> cells{first_ == nullptr ? results_.first + result_place : first_.get() + place, nullptr};
    if constexpr (kHasSecond<Reduction>) {
      cells.second = second_ == nullptr ? results_.second + result_place : second_.get() + place;
    }
    return cells;
  }

 private:
  CellsOf<Reduction> results_;
  std::unique_ptr<typename Reduction::First[]> first_;
  std::unique_ptr<typename Reduction::Second[]> second_;
};

// ---------------------------------------------------------------------------------------------------------------------
// Sources of rows. `At` gives the rows of a batch element, from a feature on; `stride` is the width of a full row.

// Rows in memory order.
template <typename T>
struct DirectRows {
  const T* data;                                 // [batch or 1, rows, features]
  static constexpr bool kSplitsFeatures = true;  // whether threads may split a row

  struct Element {
    static constexpr bool kAreInOrder = true;  // rows are in memory order

    const T* rows;
    int64_t first_row = 0;

    // The same rows, numbered from `row` on.
    JB_INLINE Element From(int64_t row, int64_t stride) const { return {rows + row * stride, row}; }
    JB_INLINE void Prefetch(int32_t row, int64_t stride, int64_t width) const {
      PrefetchRow(rows + row * stride, width);
    }
    // Nothing: the hardware prefetcher predicts sequential rows.
    JB_INLINE void PrefetchNarrow(int32_t /*row*/, int64_t /*width*/) const {}
    template <typename Reduction>
    JB_INLINE void Fold(const Reduction& reduction, int32_t row, int64_t stride, int64_t width,
                        CellsOf<Reduction> cells) const {
      FoldRow(reduction, rows + row * stride, static_cast<int32_t>(first_row + row), width, cells);
    }
  };

  JB_INLINE Element At(const Problem& problem, int64_t batch, int64_t feature) const {
    return {data + problem.DataRow(batch, 0) * problem.features + feature};
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// Rows grouped by segment.

// The rows of a range of segments of one batch element, grouped by segment and ascending within each.
class GroupedRows {
 public:
  // Groups the rows of segments [segment_begin, segment_end). Returns false if allocation fails.
  bool Group(const Problem& problem, int64_t batch, int64_t segment_begin, int64_t segment_end, SegmentIds ids,
             bool ids_are_sorted) {
    const int64_t num_segments = segment_end - segment_begin;
    const int64_t first_id = problem.IdIndex(batch, 0), end_id = first_id + problem.rows;
    ends_.reset(new (std::nothrow) int32_t[num_segments + 1]());
    if (ends_ == nullptr) return false;
    if (ids_are_sorted) {
      first_row_ = static_cast<int32_t>(ids.LowerBound(first_id, end_id, segment_begin) - first_id);
      size_ = static_cast<int32_t>(ids.LowerBound(first_id, end_id, segment_end) - first_id) - first_row_;
      for (int64_t i = 0; i < size_; ++i) ++ends_[ids[first_id + first_row_ + i] - segment_begin];
      for (int64_t i = 1; i < num_segments; ++i) ends_[i] += ends_[i - 1];
      return true;
    }
    const auto members = Allocate<int32_t>(problem.rows + 1);
    if (members == nullptr) return false;
    return ids.Visit([&](const auto* all_ids) {
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

  int32_t Size() const { return size_; }

  // [Begin(i), End(i)) are the positions of the rows of segment segment_begin + i.
  int32_t Begin(int64_t i) const { return i == 0 ? 0 : ends_[i - 1]; }
  int32_t End(int64_t i) const { return ends_[i]; }
  int32_t operator[](int32_t place) const { return rows_ == nullptr ? first_row_ + place : rows_[place]; }

 private:
  std::unique_ptr<int32_t[]> ends_;
  std::unique_ptr<int32_t[]> rows_;  // nullptr if the ids are sorted
  int32_t first_row_ = 0;
  int32_t size_ = 0;
};

// The part of the grouped rows that one thread reduces.
struct Block {
  int64_t batch;
  int64_t segment_begin, segment_end;
  int64_t feature_begin, feature_end;
};

// One thread per range groups the rows of a batch element for `segment_ranges` ranges of segments. Then
// `feature_ranges` threads work on each range.
struct Blocking {
  int64_t segment_ranges;
  int64_t feature_ranges;

  // `item_size` is the size of an element in bytes; 0 to keep features whole.
  Blocking(const Problem& problem, int64_t item_size, int64_t num_threads) {
    const int64_t blocks = (num_threads + problem.batch - 1) / std::max<int64_t>(1, problem.batch);
    segment_ranges = std::clamp<int64_t>(problem.segments / kMinSegmentsPerBlock, 1, blocks);
    feature_ranges =
        std::clamp<int64_t>(problem.features * item_size / kMinFeatureBytesPerBlock, 1, blocks / segment_ranges);
  }

  Block Get(const Problem& problem, int64_t group, int64_t feature_range) const {
    const int64_t segment_range = group % segment_ranges;
    return Block{group / segment_ranges, ChunkBegin(problem.segments, segment_ranges, segment_range),
                 ChunkBegin(problem.segments, segment_ranges, segment_range + 1),
                 ChunkBegin(problem.features, feature_ranges, feature_range),
                 ChunkBegin(problem.features, feature_ranges, feature_range + 1)};
  }
};

// Groups all rows and calls body(block, grouped rows of its segments) for every block. Returns false if allocation
// fails, here or in body.
inline bool ForEachGroupedBlock(ffi::ThreadPool& pool, const Problem& problem, const Blocking& blocking, SegmentIds ids,
                                FunctionRef<bool(const Block&, const GroupedRows&)> body) {
  const bool ids_are_sorted = EachBatchIsSorted(problem, ids);
  const int64_t num_groups = problem.batch * blocking.segment_ranges, feature_ranges = blocking.feature_ranges;
  const std::unique_ptr<GroupedRows[]> groups(new (std::nothrow) GroupedRows[num_groups]);
  if (groups == nullptr) return false;
  std::atomic<bool> has_memory{true};
  ParallelFor(pool, num_groups, [&](int64_t group) {
    const Block block = blocking.Get(problem, group, 0);
    if (!groups[group].Group(problem, block.batch, block.segment_begin, block.segment_end, ids, ids_are_sorted) ||
        (feature_ranges == 1 && !body(block, groups[group]))) {
      has_memory = false;
    }
  });
  if (feature_ranges == 1 || !has_memory) return has_memory;
  ParallelFor(pool, num_groups * feature_ranges, [&](int64_t index) {
    const int64_t group = index / feature_ranges;
    if (!body(blocking.Get(problem, group, index % feature_ranges), groups[group])) has_memory = false;
  });
  return has_memory;
}

// Calls body(row) for the rows at positions [begin, end), and prefetch(row) for rows ahead.
template <typename Prefetch, typename Body>
JB_INLINE void ForEachGroupedRow(const GroupedRows& grouped, int32_t begin, int32_t end, const Prefetch& prefetch,
                                 const Body& body) {
  const int32_t size = grouped.Size();
  for (int32_t place = begin; place < end; ++place) {
    if (place + kPrefetchDistance < size) prefetch(grouped[place + kPrefetchDistance]);
    body(grouped[place]);
  }
}

// Reduces the rows of one block; returns false if allocation fails.
template <typename Reduction, typename Rows>
JB_CPU_CLONES bool ReduceGrouped(const Problem problem, const Block block, const GroupedRows& grouped,
                                 const Rows all_rows, const Reduction reduction, int32_t* row_counts) {
  const int64_t features = problem.features, width = block.feature_end - block.feature_begin;
  CellMemory<Reduction> memory;
  if (!memory.Allocate(width, reduction.ResultCells())) return false;
  const auto rows = all_rows.At(problem, block.batch, block.feature_begin);
  const auto prefetch = [&](int32_t row) __attribute__((always_inline)) { rows.Prefetch(row, features, width); };
  for (int64_t segment = block.segment_begin; segment < block.segment_end; ++segment) {
    const int64_t group = segment - block.segment_begin, segment_index = block.batch * problem.segments + segment;
    const int32_t begin = grouped.Begin(group), end = grouped.End(group), count = end - begin;
    const int64_t first_cell = segment_index * features + block.feature_begin;
    if constexpr (kWritesEmpty<Reduction>) {
      if (count == 0) {
        if (row_counts != nullptr && block.feature_begin == 0) row_counts[segment_index] = 0;
        reduction.WriteEmpty(width, first_cell);
        continue;
      }
    }
    const CellsOf<Reduction> cells = memory.At(0, first_cell);
    reduction.Start(width, cells);
    ForEachGroupedRow(grouped, begin, end, prefetch, [&](int32_t row) __attribute__((always_inline)) {
      rows.Fold(reduction, row, features, width, cells);
    });
    if (row_counts != nullptr && block.feature_begin == 0) row_counts[segment_index] = count;
    reduction.Write(width, first_cell, &count, cells);
  }
  return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// Rows in order.

// Calls body(begin, end, ids, first_segment) for blocks that together are the rows [row_begin, row_end) of a batch
// element. Row r of a block belongs to segment first_segment + ids[r - begin], or to none if ids[r - begin] is not in
// [0, segments). So loops over rows are compiled for 32-bit ids only; 64-bit ids are converted block by block.
template <typename Body>
JB_INLINE void ForEachBlockOfIds(const Problem& problem, SegmentIds ids, int64_t batch, int64_t row_begin,
                                 int64_t row_end, const Body& body) {
  const int64_t first_id = problem.IdIndex(batch, 0);
  int32_t converted[kConvertedIds];
  for (int64_t begin = row_begin, end; begin < row_end; begin = end) {
    const int32_t* block = static_cast<const int32_t*>(ids.values) + first_id + begin;
    int64_t first_segment = 0;
    end = row_end;
    if (ids.are_64_bit) {
      end = begin + ids.Convert(first_id + begin, row_end - begin, problem.segments, converted, &first_segment);
      block = converted;
    }
    body(begin, end, block, first_segment);
  }
}

struct SegmentRange {
  int64_t begin, end;
};

// Up to kConvertedIds rows of a batch element, in order. Row Row(i) belongs to segment first_segment + ids[i], or to
// none if ids[i] is not in [0, segments). The first `known` ids may be read for prefetching: those of the block, and
// the next ones as far as available.
struct RowBlock {
  int64_t count, known;
  int64_t first_row, first_segment;
  const int32_t* offsets;
  const int32_t* ids;

  JB_INLINE int64_t Row(int64_t i) const { return first_row + offsets[i]; }

  // The same offsets and ids, with the rows stored from `row` on.
  RowBlock From(int64_t row) const { return {count, known, row, first_segment, offsets, ids}; }
  // The same ids for rows that are stored contiguously from 0 on.
  RowBlock OfAll() const;
};

// The offsets 0, 1, 2, ... of a block without gaps. So loops are compiled once, at the cost of one load per row for
// these blocks.
struct AllOffsets {
  int32_t values[kConvertedIds + kScanPrefetchDistance];

  constexpr AllOffsets() : values() {
    for (int32_t i = 0; i < kConvertedIds + kScanPrefetchDistance; ++i) values[i] = i;
  }
};
inline constexpr AllOffsets kAllOffsets;

inline RowBlock RowBlock::OfAll() const { return {count, known, 0, first_segment, kAllOffsets.values, ids}; }

// Calls body(block) for blocks of up to `max_rows` rows that together are the rows [row_begin, row_end) of a batch
// element; if `are_listed`, only the rows of `segments`.
__attribute__((noinline)) inline void ForEachBlockOfRows(const Problem& problem, SegmentIds ids, int64_t batch,
                                                         int64_t row_begin, int64_t row_end, SegmentRange segments,
                                                         bool are_listed, int64_t max_rows,
                                                         FunctionRef<void(const RowBlock&)> body) {
  max_rows = std::min(max_rows, kConvertedIds);
  int32_t listed[kConvertedIds + kListSlack], listed_ids[kConvertedIds];
  const auto of_ids = [&](int64_t begin, int64_t end, const int32_t* row_ids, int64_t first_segment) {
    const auto id_of = [&](int64_t segment) {
      return static_cast<int32_t>(std::clamp<int64_t>(segment - first_segment, 0, std::numeric_limits<int32_t>::max()));
    };
    const int32_t first = id_of(segments.begin);
    const uint32_t size = static_cast<uint32_t>(id_of(segments.end) - first);
    for (; begin < end; begin += max_rows, row_ids += max_rows) {
      const int64_t count = std::min(max_rows, end - begin);
      if (are_listed) {
        const int64_t num_listed = ListRows(row_ids, count, first, size, listed);
        for (int64_t i = 0; i < num_listed; ++i) listed_ids[i] = row_ids[listed[i]];
        body({num_listed, num_listed, begin, first_segment, listed, listed_ids});
      } else {
        const int64_t known = std::min(count + kScanPrefetchDistance, end - begin);
        body({count, known, begin, first_segment, kAllOffsets.values, row_ids});
      }
    }
  };
  ForEachBlockOfIds(problem, ids, batch, row_begin, row_end, of_ids);
}

// Keeps the cell of the current segment in registers, for rows of one feature.
template <typename Reduction>
class HeldCell {
 public:
  JB_INLINE HeldCell(CellsOf<Reduction> all, int32_t* row_counts) : all_(all), row_counts_(row_counts) {}

  JB_INLINE void MoveTo(int64_t segment) {
    if (segment != segment_) {
      Release();
      segment_ = segment;
      first_ = all_.first[segment];
      if constexpr (kHoldsSecond) second_ = all_.second[segment];
    }
    ++rows_;
  }

  JB_INLINE void Release() {
    if (rows_ == 0) return;
    all_.first[segment_] = first_;
    if constexpr (kHoldsSecond) all_.second[segment_] = second_;
    if (row_counts_ != nullptr) row_counts_[segment_] += rows_;
    rows_ = 0;
  }

  JB_INLINE CellsOf<Reduction> cells() {
    if constexpr (kSecondIsRare<Reduction>) return {&first_, all_.second + segment_};
    return {&first_, &second_};
  }

 private:
  static constexpr bool kHoldsSecond = kHasSecond<Reduction> && !kSecondIsRare<Reduction>;

  CellsOf<Reduction> all_;
  int32_t* row_counts_;
  int64_t segment_ = -1;
  int32_t rows_ = 0;
  typename Reduction::First first_{};
  typename Reduction::Second second_{};
};

// Whether the cells are too large for a near cache, so that prefetching a random one pays.
inline bool AreFar(int64_t cells, int64_t cell_bytes) { return cells * cell_bytes > kFarCellBytes; }

// The rows of a block as ComputeType<T>: in place, or converted into `memory` at the same offsets.
template <typename T>
const ComputeType<T>* NumbersOf(const RowBlock& block, const T* rows, int64_t features, ComputeType<T>* memory) {
  const T* const first = rows + block.first_row * features;
  if constexpr (std::is_same_v<T, ComputeType<T>>) {
    return first;
  } else {
    const bool are_all = block.offsets == kAllOffsets.values;
    if (are_all || features <= kMaxNarrowWidth) {
      if (block.count > 0) Widen(first, (block.offsets[block.count - 1] + 1) * features, memory);
    } else {
      for (int64_t i = 0; i < block.count; ++i) {
        const int64_t number = block.offsets[i] * features;
        Widen(first + number, features, memory + number);
      }
    }
    return memory;
  }
}

// The destination of a block's rows: the cells of `segments`.
template <typename Reduction>
struct FoldTarget {
  CellsOf<Reduction> cells;
  int32_t* row_counts;
  int64_t segment_begin;
  uint64_t num_segments;  // all segments of the problem
  int64_t features;
  bool cells_are_far;
  bool rows_are_far;  // for gathered rows
  bool holds_runs;    // only for blocks of all rows
};

// Calls fold(offset, segment - segment_begin) for the rows of a block that belong to a segment; offset_of(i) is the
// offset of row i.
template <typename Reduction, typename RowsOfElement, typename OffsetOf, typename Fold>
JB_INLINE void ForEachMember(const RowBlock& block, const RowsOfElement& rows, const FoldTarget<Reduction>& target,
                             int64_t width, const OffsetOf& offset_of, const Fold& fold) {
  const int64_t first = block.first_segment - target.segment_begin;
  const bool rows_are_far = !RowsOfElement::kAreInOrder && target.rows_are_far;
  const bool looks_ahead = target.cells_are_far || rows_are_far;
  for (int64_t i = 0; i < block.count; ++i) {
    const int64_t ahead = i + kScanPrefetchDistance;
    if (looks_ahead && ahead < block.known) {
      const int64_t coming = block.ids[ahead];
      if (static_cast<uint64_t>(coming) < target.num_segments) {
        if (target.cells_are_far) PrefetchCells<Reduction>(target.cells + (first + coming) * width, width);
        if (rows_are_far) rows.PrefetchNarrow(offset_of(ahead), width);
      }
    }
    const int64_t id = block.ids[i];
    if (static_cast<uint64_t>(id) < target.num_segments) fold(offset_of(i), first + id);
  }
}

// Folds a block of narrow rows; loops over their features are compiled for each width.
template <typename Reduction, typename RowsOfElement>
JB_CPU_CLONES_OF_NARROW void FoldNarrow(const RowBlock block, const RowsOfElement all_rows, const Reduction reduction,
                                        const FoldTarget<Reduction> target) {
  const auto rows = all_rows.From(block.first_row, target.features);
  if (Reduction::kHoldsRuns && target.holds_runs && target.features == 1) {
    HeldCell<Reduction> held(target.cells, target.row_counts);
    ForEachMember(
        block, rows, target, 1, [](int64_t i) __attribute__((always_inline)) { return static_cast<int32_t>(i); },
        [&](int32_t offset, int64_t segment) __attribute__((always_inline)) {
          held.MoveTo(segment);
          rows.Fold(reduction, offset, 1, 1, held.cells());
        });
    held.Release();
    return;
  }
  DispatchNarrow(target.features, [&](auto width) __attribute__((always_inline)) {
    ForEachMember(
        block, rows, target, width, [&](int64_t i) __attribute__((always_inline)) { return block.offsets[i]; },
        [&](int32_t offset, int64_t segment) __attribute__((always_inline)) {
          rows.Fold(reduction, offset, width, width, target.cells + segment * width);
          if (target.row_counts != nullptr) ++target.row_counts[segment];
        });
  });
}

template <typename Reduction, typename RowsOfElement>
JB_CPU_CLONES void FoldWide(const RowBlock block, const RowsOfElement all_rows, const Reduction reduction,
                            const FoldTarget<Reduction> target) {
  const int64_t width = target.features;
  const auto rows = all_rows.From(block.first_row, width);
  ForEachMember(
      block, rows, target, width, [&](int64_t i) __attribute__((always_inline)) { return block.offsets[i]; },
      [&](int32_t offset, int64_t segment) __attribute__((always_inline)) {
        rows.Fold(reduction, offset, width, width, target.cells + segment * width);
        if (target.row_counts != nullptr) ++target.row_counts[segment];
      });
}

template <typename Reduction, typename RowsOfElement>
void FoldBlock(const RowBlock& block, const RowsOfElement& rows, const Reduction& reduction,
               const FoldTarget<Reduction>& target) {
  if (IsNarrow(target.features)) {
    FoldNarrow(block, rows, reduction, target);
  } else {
    FoldWide(block, rows, reduction, target);
  }
}

// Initialises the cells of `segments`. Without `are_listed`, only rows of these segments, or of none, may be folded
// into them.
template <typename Reduction>
FoldTarget<Reduction> StartCells(const Problem& problem, const Reduction& reduction, SegmentRange segments,
                                 bool are_listed, CellsOf<Reduction> cells, int32_t* row_counts) {
  const int64_t num_segments = segments.end - segments.begin, features = problem.features;
  reduction.Start(num_segments * features, cells);
  if (row_counts != nullptr) std::fill_n(row_counts, num_segments, 0);
  return {cells,
          row_counts,
          segments.begin,
          static_cast<uint64_t>(problem.segments),
          features,
          AreFar(num_segments * features, CellBytes<Reduction>()),
          AreFar(problem.segments * features, CellBytes<Reduction>()),
          !are_listed};  // listed rows have few runs
}

// Folds the rows [row_begin, row_end) of a batch element, in order, into the cells of `segments`. With `are_listed`,
// rows of other segments are skipped; otherwise there must be none.
template <typename Reduction, typename Rows>
void FoldInOrder(const Problem& problem, SegmentIds ids, const Rows& all_rows, const Reduction& reduction,
                 int64_t batch, int64_t row_begin, int64_t row_end, SegmentRange segments, bool are_listed,
                 CellsOf<Reduction> cells, int32_t* row_counts) {
  const int64_t features = problem.features;
  const auto rows = all_rows.At(problem, batch, 0);
  const auto for_each_block = [&](int64_t max_rows, FunctionRef<void(const RowBlock&)> fold) {
    ForEachBlockOfRows(problem, ids, batch, row_begin, row_end, segments, are_listed, max_rows, fold);
  };
  if constexpr (decltype(rows)::kAreInOrder && kFoldsWidened<Reduction>) {
    if (features > 0 && features <= kMaxWidenedWidth<typename Reduction::Element>) {
      using Widened = typename Reduction::Widened;
      const auto target = StartCells(problem, Widened{}, segments, are_listed, cells, row_counts);
      float numbers[kWidenedNumbers];
      for_each_block(kWidenedNumbers / features, [&](const RowBlock& block) {
        FoldBlock(block.From(0), DirectRows<float>::Element{NumbersOf(block, rows.rows, features, numbers)}, Widened{},
                  target);
      });
    } else {
      const auto target = StartCells(problem, reduction, segments, are_listed, cells, row_counts);
      for_each_block(kConvertedIds, [&](const RowBlock& block) { FoldWide(block, rows, reduction, target); });
    }
  } else {
    const auto target = StartCells(problem, reduction, segments, are_listed, cells, row_counts);
    for_each_block(kConvertedIds, [&](const RowBlock& block) { FoldBlock(block, rows, reduction, target); });
  }
}

template <typename Reduction>
JB_CPU_CLONES void MergeCells(const Reduction& reduction, int64_t count, CellsOf<Reduction> later,
                              CellsOf<Reduction> cells) {
  reduction.Merge(count, later, cells);
}

template <typename Reduction>
JB_CPU_CLONES void WriteCells(const Reduction& reduction, int64_t count, int64_t first_cell, const int32_t* counts,
                              CellsOf<Reduction> cells) {
  reduction.Write(count, first_cell, counts, cells);
}

inline int64_t NumThreads(ffi::ThreadPool& pool, int64_t total_bytes) {
  return std::min<int64_t>(ChunksFor(pool, total_bytes), std::max<int64_t>(1, pool.num_threads()));
}

// The number of ranges of rows per batch element. If merging rounds, it depends on shapes only, so that the result does
// not depend on the number of threads.
template <typename Reduction>
int64_t NumRanges(const Problem& problem, int64_t row_bytes, int64_t num_threads) {
  if constexpr (Reduction::kRounds) {
    const int64_t max_ranges = std::min(problem.rows / (kMinRowsPerRangeCellRow * problem.segments),
                                        problem.rows * row_bytes / kMinBytesPerRoundedRange);
    return std::clamp<int64_t>(max_ranges, 1, std::max<int64_t>(1, kMaxRoundedRanges / problem.batch));
  } else {
    return std::clamp<int64_t>(problem.rows / (kMinRowsPerRangeCellRow * problem.segments), 1,
                               CeilDivide(num_threads, problem.batch));
  }
}

// Initialises the cells of `segments` of a batch element and folds the rows [row_begin, row_end) into them: (batch,
// row_begin, row_end, segments, are_listed, cells, row_counts). Without `are_listed`, no row belongs to another
// segment.
template <typename Reduction>
using FoldRows = FunctionRef<void(int64_t, int64_t, int64_t, SegmentRange, bool, CellsOf<Reduction>, int32_t*)>;

// Reduces ranges of rows separately, then merges their cells.
template <typename Reduction>
bool ReduceRanges(ffi::ThreadPool& pool, const Problem& problem, int64_t num_ranges, const Reduction& reduction,
                  int32_t* row_counts, FoldRows<Reduction> fold) {
  const int64_t cells_per_batch = problem.segments * problem.features;
  const int64_t padded_cells = PaddedCells<Reduction>(cells_per_batch);
  const int64_t padded_counts = Padded<int32_t>(problem.segments);
  CellMemory<Reduction> first_memory, later_memory;  // of the first range, of all others
  std::unique_ptr<int32_t[]> later_counts;
  if (!first_memory.Allocate(problem.batch * padded_cells, reduction.ResultCells()) ||
      !later_memory.Allocate(problem.batch * (num_ranges - 1) * padded_cells, {})) {
    return false;
  }
  if (row_counts != nullptr) {
    later_counts = Allocate<int32_t>(problem.batch * (num_ranges - 1) * padded_counts);
    if (later_counts == nullptr) return false;
  }
  const auto cells_of = [&](int64_t batch, int64_t range) {
    return range == 0 ? first_memory.At(batch * padded_cells, batch * cells_per_batch)
                      : later_memory.At((batch * (num_ranges - 1) + range - 1) * padded_cells, 0);
  };
  const auto counts_of = [&](int64_t batch, int64_t range) -> int32_t* {
    if (row_counts == nullptr) return nullptr;
    return range == 0 ? row_counts + batch * problem.segments
                      : later_counts.get() + (batch * (num_ranges - 1) + range - 1) * padded_counts;
  };
  const int64_t row_bytes = problem.features * static_cast<int64_t>(sizeof(typename Reduction::First));
  ForEachRange(pool, problem.batch * num_ranges, problem.batch * problem.rows * std::max(row_bytes, kMinWorkOfRow),
               [&](int64_t begin, int64_t end) {
                 for (int64_t index = begin; index < end; ++index) {
                   const int64_t batch = index / num_ranges, range = index % num_ranges;
                   fold(batch, ChunkBegin(problem.rows, num_ranges, range),
                        ChunkBegin(problem.rows, num_ranges, range + 1), SegmentRange{0, problem.segments},
                        /*are_listed=*/false, cells_of(batch, range), counts_of(batch, range));
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
  const int64_t cell_bytes = sizeof(typename Reduction::First);
  const int64_t chunks = ChunksFor(pool, num_ranges * cells_per_batch * cell_bytes);
  ParallelFor(pool, problem.batch * chunks, [&](int64_t index) {
    const int64_t batch = index / chunks, begin = ChunkBegin(cells_per_batch, chunks, index % chunks),
                  count = ChunkBegin(cells_per_batch, chunks, index % chunks + 1) - begin;
    if (count == 0) return;
    const CellsOf<Reduction> cells = cells_of(batch, 0) + begin;
    for (int64_t range = 1; range < num_ranges; ++range) {
      MergeCells(reduction, count, cells_of(batch, range) + begin, cells);
    }
    const int32_t* const counts = row_counts == nullptr ? nullptr : counts_of(batch, 0) + begin / problem.features;
    WriteCells(reduction, count, batch * cells_per_batch + begin, counts, cells);
  });
  return true;
}

// Reduces each segment by one thread. For each of `parts` parts of a batch element, reduce(batch, part,
// reduce_segments) calls reduce_segments(row_begin, row_end, segments, are_listed) for its segments, up to max_segments
// at a time. Returns false if allocation fails.
template <typename Reduction, typename Reduce>
bool ReduceParts(ffi::ThreadPool& pool, const Problem& problem, const Reduction& reduction, int64_t parts,
                 int64_t max_segments, int32_t* row_counts, FoldRows<Reduction> fold, const Reduce& reduce) {
  const int64_t features = problem.features;
  std::atomic<bool> has_memory{true};
  ParallelFor(pool, problem.batch * parts, [&](int64_t index) {
    const int64_t batch = index / parts;
    CellMemory<Reduction> memory;
    if (!memory.Allocate(max_segments * features, reduction.ResultCells())) {
      has_memory = false;
      return;
    }
    reduce(batch, index % parts, [&](int64_t row_begin, int64_t row_end, SegmentRange segments, bool are_listed) {
      const int64_t first_segment = batch * problem.segments + segments.begin, first_cell = first_segment * features;
      const CellsOf<Reduction> cells = memory.At(0, first_cell);
      int32_t* const counts = row_counts == nullptr ? nullptr : row_counts + first_segment;
      fold(batch, row_begin, row_end, segments, are_listed, cells, counts);
      if (features > 0) WriteCells(reduction, (segments.end - segments.begin) * features, first_cell, counts, cells);
    });
  });
  return has_memory;
}

// Reduces sorted rows, a few segments at a time, so that their cells stay in the L1 cache.
template <typename Reduction>
bool ReduceSorted(ffi::ThreadPool& pool, const Problem& problem, SegmentIds ids, const Reduction& reduction,
                  int64_t parts, int32_t* row_counts, FoldRows<Reduction> fold) {
  const int64_t block_segments = std::clamp<int64_t>(
      kSortedBlockBytes / (std::max<int64_t>(problem.features, 1) * CellBytes<Reduction>()), 1, problem.segments);
  const auto reduce = [&](int64_t batch, int64_t part, const auto& reduce_segments) {
    const int64_t first_id = problem.IdIndex(batch, 0);
    // Parts have equal numbers of rows, rounded up to complete segments.
    const auto bound = [&](int64_t i) {
      if (i == 0) return int64_t{0};
      if (i == parts || problem.rows == 0) return problem.segments;
      const int64_t last_row = ChunkBegin(problem.rows, parts, i);
      return std::clamp<int64_t>(ids[first_id + last_row], -1, problem.segments - 1) + 1;
    };
    const auto first_row = [&](int64_t segment) {
      return ids.LowerBound(first_id, first_id + problem.rows, segment) - first_id;
    };
    const int64_t part_end = bound(part + 1);
    int64_t begin = bound(part), row_begin = first_row(begin);
    while (begin < part_end) {
      const int64_t end = std::min(begin + block_segments, part_end), row_end = first_row(end);
      reduce_segments(row_begin, row_end, SegmentRange{begin, end}, /*are_listed=*/false);
      begin = end;
      row_begin = row_end;
    }
  };
  return ReduceParts(pool, problem, reduction, parts, block_segments, row_counts, fold, reduce);
}

// Reduces the rows in order. Each thread owns a part of the segments and skips the rows of others.
template <typename Reduction>
bool ReduceSegmentParts(ffi::ThreadPool& pool, const Problem& problem, const Reduction& reduction, int64_t parts,
                        int32_t* row_counts, FoldRows<Reduction> fold) {
  const auto reduce = [&](int64_t /*batch*/, int64_t part, const auto& reduce_segments) {
    const SegmentRange segments{ChunkBegin(problem.segments, parts, part),
                                ChunkBegin(problem.segments, parts, part + 1)};
    reduce_segments(0, problem.rows, segments, /*are_listed=*/true);
  };
  return ReduceParts(pool, problem, reduction, parts, CeilDivide(problem.segments, parts), row_counts, fold, reduce);
}

template <typename T>
inline constexpr int64_t kNarrowRowBytes = sizeof(T) >= 4 ? 128 : 64;

// Whether to scan rows in order rather than group them.
template <typename T>
bool ReducesInOrder(const Problem& problem, int64_t row_bytes, int64_t cell_bytes) {
  const bool cells_stay_near = problem.segments * problem.features * cell_bytes <= kNearCacheBytes;
  return row_bytes < kNarrowRowBytes<T> || (cells_stay_near && problem.rows >= kMinRowsPerCellRow * problem.segments);
}

template <typename Reduction>
Strategy ChooseScan(const Problem& problem, int64_t row_bytes) {
  return Reduction::kRounds && NumRanges<Reduction>(problem, row_bytes, /*num_threads=*/1) > 1 ? Strategy::kSplitScan
                                                                                               : Strategy::kScan;
}

template <typename Reduction>
Strategy ChooseStrategy(const Problem& problem, bool has_counts) {
  if (problem.batch * problem.segments == 0 || (problem.features == 0 && !has_counts)) return Strategy::kNothing;
  const int64_t row_bytes = problem.features * static_cast<int64_t>(sizeof(typename Reduction::Element));
  return ReducesInOrder<typename Reduction::Element>(problem, row_bytes, CellBytes<Reduction>())
             ? ChooseScan<Reduction>(problem, row_bytes)
             : Strategy::kGroupBySegment;
}

inline int64_t BytesOfWork(const Problem& problem, int64_t row_bytes) {
  return problem.batch * (problem.rows + problem.segments) * std::max(row_bytes, kMinWorkOfRow);
}

// Reduces all rows in order; returns false if allocation fails.
template <typename Reduction>
bool Scan(ffi::ThreadPool& pool, const Problem& problem, SegmentIds ids, int64_t row_bytes, const Reduction& reduction,
          int32_t* row_counts, FoldRows<Reduction> fold) {
  const int64_t total_bytes = BytesOfWork(problem, row_bytes), num_threads = NumThreads(pool, total_bytes);
  const int64_t parts = CeilDivide(std::min(num_threads, total_bytes / kMinBytesPerPart + 1), problem.batch);
  if (ChooseScan<Reduction>(problem, row_bytes) == Strategy::kScan) {
    if (EachBatchIsSorted(problem, ids)) {
      return ReduceSorted(pool, problem, ids, reduction, parts, row_counts, fold);
    }
    const int64_t segment_parts = std::min({parts, problem.segments, kMaxSegmentParts});
    if (segment_parts > 1 && total_bytes >= 2 * kMinBytesPerPart &&
        NumRanges<Reduction>(problem, row_bytes, num_threads) == 1) {
      return ReduceSegmentParts(pool, problem, reduction, segment_parts, row_counts, fold);
    }
  }
  return ReduceRanges(pool, problem, NumRanges<Reduction>(problem, row_bytes, num_threads), reduction, row_counts,
                      fold);
}

template <typename Reduction, typename Rows>
bool Scan(ffi::ThreadPool& pool, const Problem& problem, SegmentIds ids, const Rows& rows, const Reduction& reduction,
          int32_t* row_counts = nullptr) {
  const int64_t row_bytes = problem.features * static_cast<int64_t>(sizeof(typename Reduction::Element));
  const auto fold = [&](int64_t batch, int64_t row_begin, int64_t row_end, SegmentRange segments, bool are_listed,
                        CellsOf<Reduction> cells, int32_t* counts) {
    FoldInOrder(problem, ids, rows, reduction, batch, row_begin, row_end, segments, are_listed, cells, counts);
  };
  return Scan<Reduction>(pool, problem, ids, row_bytes, reduction, row_counts, fold);
}

// Reduces all rows; returns false if allocation fails. `row_counts`, if not nullptr, receives the number of rows of
// each segment [batch, segments].
template <typename Reduction, typename Rows>
bool ReduceAll(ffi::ThreadPool& pool, const Problem& problem, SegmentIds ids, const Rows& rows,
               const Reduction& reduction, int32_t* row_counts = nullptr) {
  const Strategy strategy = ChooseStrategy<Reduction>(problem, row_counts != nullptr);
  if (strategy == Strategy::kNothing) return true;
  if (strategy != Strategy::kGroupBySegment) return Scan(pool, problem, ids, rows, reduction, row_counts);
  const int64_t item_size = sizeof(typename Reduction::Element);
  const int64_t num_threads = NumThreads(pool, BytesOfWork(problem, problem.features * item_size));
  const Blocking blocking(problem, Rows::kSplitsFeatures ? item_size : 0, num_threads);
  return ForEachGroupedBlock(pool, problem, blocking, ids, [&](const Block& block, const GroupedRows& grouped) {
    return ReduceGrouped(problem, block, grouped, rows, reduction, row_counts);
  });
}

// ---------------------------------------------------------------------------------------------------------------------
// Results with one row per input row.

// Memory for `count` elements, with the same offset within a cache line as `like`.
template <typename T>
class StreamBuffer {
 public:
  explicit StreamBuffer(int64_t count) : memory_(Allocate<char>(count * sizeof(T) + 2 * kCacheLine)) {}

  // nullptr if the allocation failed.
  T* At(const void* like) const {
    if (memory_ == nullptr) return nullptr;
    const uintptr_t offset = reinterpret_cast<uintptr_t>(like) % kCacheLine;
    return reinterpret_cast<T*>(AlignUp(memory_.get(), kCacheLine) + offset);
  }

 private:
  std::unique_ptr<char[]> memory_;
};

// Copies bytes between addresses with the same offset within a cache line. Whole lines are streamed.
inline void StreamLines(void* to, const void* from, int64_t bytes) {
  const int64_t until_line = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(to) % kCacheLine);
  const int64_t head = std::min(until_line, bytes), lines = (bytes - head) / kCacheLine * kCacheLine;
  char* const target = static_cast<char*>(to);
  const char* const source = static_cast<const char*>(from);
  std::memcpy(target, source, static_cast<size_t>(head));
  StreamBytes(target + head, source + head, lines);
  std::memcpy(target + head + lines, source + head + lines, static_cast<size_t>(bytes - head - lines));
}

// For gradients that need only the cells of their segment.
inline Strategy ChooseGather(const Problem& problem) {
  return problem.batch * problem.rows * problem.features == 0 ? Strategy::kNothing : Strategy::kGather;
}

inline Plan PlanOfGather(const PlanParameters& parameters) {
  return {StrategyName(ChooseGather(CallOf<SegmentCall>(parameters).problem))};
}

// Calls body(batch, row_begin, row_end) for chunks of the rows of a result [batch, rows, features].
inline void ForEachChunkOfRows(ffi::ThreadPool& pool, const Problem& problem, void* result, int64_t element_bytes,
                               FunctionRef<void(int64_t, int64_t, int64_t)> body) {
  const int64_t bytes_per_batch = problem.rows * problem.features * element_bytes;
  AdviseHugePages(result, problem.batch * bytes_per_batch);
  const int64_t chunks = ChunksFor(pool, bytes_per_batch);
  ParallelFor(pool, problem.batch * chunks, [&](int64_t index) {
    const int64_t chunk = index % chunks;
    body(index / chunks, ChunkBegin(problem.rows, chunks, chunk), ChunkBegin(problem.rows, chunks, chunk + 1));
  });
}

// Writes zeros to the dropped rows of a batch element. Only blocks with the first segments do so, each in its own
// features.
template <typename T>
void WriteDroppedRows(const Problem& problem, const Block& block, SegmentIds ids, T* result) {
  if (block.segment_begin != 0) return;
  T* const rows = result + block.batch * problem.rows * problem.features;
  for (int64_t row = 0; row < problem.rows; ++row) {
    const int64_t segment = ids[problem.IdIndex(block.batch, row)];
    if (segment >= 0 && segment < problem.segments) continue;
    WriteZeros(rows + row * problem.features + block.feature_begin, block.feature_end - block.feature_begin);
  }
}

// Writes the rows [row_begin, row_end) of a batch element of a result: write(row, segment, to) for the rows of a
// segment, zeros for dropped rows. Calls prefetch(segment) ahead.
template <typename T, typename Prefetch, typename Write>
JB_INLINE void WriteRowsOfSegments(const Problem& problem, SegmentIds ids, int64_t batch, int64_t row_begin,
                                   int64_t row_end, int64_t width, T* result, const Prefetch& prefetch,
                                   const Write& write) {
  const uint64_t segments = static_cast<uint64_t>(problem.segments);
  T* to = result + (batch * problem.rows + row_begin) * width;
  ForEachBlockOfIds(problem, ids, batch, row_begin, row_end,
                    [&](int64_t begin, int64_t end, const int32_t* row_ids, int64_t first_segment)
                        __attribute__((always_inline)) {
                          for (int64_t row = begin; row < end; ++row, to += width) {
                            if (row + kPrefetchDistance < end) {
                              const int64_t coming = row_ids[row - begin + kPrefetchDistance];
                              if (static_cast<uint64_t>(coming) < segments) prefetch(first_segment + coming);
                            }
                            const int64_t segment = row_ids[row - begin];
                            if (static_cast<uint64_t>(segment) < segments) {
                              write(row, first_segment + segment, to);
                            } else {
                              WriteZeros(to, width);
                            }
                          }
                        });
}

}  // namespace jax_baracuda::segment
