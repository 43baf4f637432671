// How the CPU kernels of the segment ops traverse the rows. Results do not depend on the number of threads, nor on
// whether the ids are sorted.
//
// A reduction has three strategies. All accumulate in ComputeType, so that 16-bit types vectorise, or in double:
// - Scan: each range of rows is folded, in order, into its own cells; then the cells of the ranges are merged. Used if
//   rows are narrow, or if the cells fit in a near cache. kScan has two variants with the same result: sorted ids are
//   reduced a few neighbouring segments at a time, and instead of a single range, each thread reduces the rows of its
//   own segments.
// - Group by segment: each thread owns a range of segments (or of features, if there are few segments). A counting sort
//   of row numbers groups its rows by segment. A segment's cells then stay in the L1 cache while its rows stream by,
//   and are written once.
// - Batch of few rows: the cells of several elements of a batch stay in the L1 cache together. Where possible, their rows
//   are folded as those of one element with as many times the segments.
//
// Kernels take small structs by value. Through a reference, the compiler would have to reload them after every store,
// which might alias them.
//
// The drivers, which share rows among threads, exist once (rows_cpu.cc). They know a reduction as a RowReduction. Only
// loops over rows and features are templates, over a Reduction. It has the types
//   Element         of a row
//   First, Second   the one or two numbers of an unfinished cell; Second may be NoNumber
//   Narrow          the reduction that folds narrow rows after Convert, often for several types; may be itself
// and the constant kRounds (whether merging in another grouping changes the bits). Two constants are optional:
// kSecondIsRare (whether few cells have a second number: Start leaves it unset, and it is not prefetched) and kKeepsRows
// (whether cells keep the numbers of rows). The functions are
//   Start(count, cells)                       initialises `count` cells
//   Fold(values, row, width, cells)           folds a row into `width` cells; rows of a cell come in ascending order
//   ForNarrow(), Convert(from, count, to)     the Narrow reduction, and elements as its elements; unless Narrow is itself
//   Merge(count, later, cells)                merges cells of a later range of rows into those of the earlier ranges
//   Write(count, first_cell, counts, cells)   writes results from cell `first_cell` of [batch, segments, features] on.
//                                             counts[0] is the number of rows of that cell's segment, counts[1] that of
//                                             the next one (only if the caller of ReduceAll asked for counts)
//   ResultCells()                             the results as cells, if these can hold the unfinished numbers; otherwise
//                                             nullptr
// A reduction that must check each row may have the type
//   Unchecked       a reduction with the same cells, whose Fold checks nothing and sees subnormal numbers as zeros
// and the function
//   EndUnchecked(count, cells)                makes cells of an Unchecked reduction its own; false if some are lost, and
//                                             then the rows are folded again, with checks
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>

#include "ffi/core/alignment.h"
#include "ffi/core/cpu_clones.h"
#include "ffi/core/cpu_kernel.h"
#include "ffi/core/float16_cpu.h"
#include "ffi/core/function_ref.h"
#include "ffi/core/parallel_for.h"
#include "ffi/core/strategies.h"
#include "ffi/core/streaming_store.h"
#include "ffi/core/subnormals.h"
#include "ffi/segment/problem.h"

namespace jax_baracuda::segment {

inline constexpr int64_t kMinRowsPerCellRow = 2;
inline constexpr int64_t kMinSegmentsPerBlock = 64;
inline constexpr int64_t kMinStreamedBytes = 32 * 1024 * 1024;
inline constexpr int64_t kPrefetchDistance = 6;       // in rows
inline constexpr int64_t kScanPrefetchDistance = 16;  // in narrow rows
inline constexpr int64_t kConvertedIds = 1024;        // ids converted at a time, and the most rows of a block
inline constexpr int64_t kConvertedNumbers = 2048;    // numbers converted together
inline constexpr int64_t kMaxNarrowWidth = 8;
inline constexpr int64_t kMinRowsPerRun = 16;  // of a segment, to keep its cell in registers: a run ends with a branch

enum class Strategy {
  kNothing,
  kFill,            // no segments: all rows are dropped
  kScan,            // rows in order; one range, or one per thread if merging does not round
  kSplitScan,       // rows in order; ranges depend on shapes only, because merging rounds
  kBatchOfFewRows,  // rows in order, of several elements of a batch at a time
  kGroupBySegment,  // rows grouped by segment
  kStreamedGroups,  // the same, with streaming stores of row results
  kGather,          // rows in order, each computed from its segment's cells
};

inline constexpr const char* kStrategyNames[] = {
    kNothing, "fill", "scan", "split_scan", "batch_of_few_rows", "group_by_segment", "group_by_segment_streamed",
    "gather"};

struct SegmentIds {
  const void* values;
  bool are_64_bit;

  explicit SegmentIds(const SegmentCall& call) : values(call.segment_ids), are_64_bit(call.ids_are_64_bit) {}

  int64_t operator[](int64_t i) const {
    return are_64_bit ? static_cast<const int64_t*>(values)[i] : static_cast<const int32_t*>(values)[i];
  }
};

// Whether the ids of every batch element ascend.
bool AreSorted(const Problem& problem, SegmentIds ids);

// Whether so many numbers are too large for a near cache, so that prefetching random ones pays.
inline bool ExceedsNearCache(int64_t numbers, int64_t bytes) { return numbers * bytes > 512 * 1024; }

// Prefetches a whole row. Rows found through ids are scattered, so the hardware prefetcher cannot predict them.
template <typename T>
JB_INLINE void PrefetchRow(const T* row, int64_t width) {
  const char* const begin = reinterpret_cast<const char*>(row);
  for (int64_t byte = 0; byte < width * static_cast<int64_t>(sizeof(T)); byte += kCacheLine) {
    __builtin_prefetch(begin + byte);
  }
}

// Whether loops for narrow rows take rows of this width.
inline bool IsNarrow(int64_t width) { return width >= 1 && width <= kMaxNarrowWidth && HasAvx2(); }

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

// Up to kConvertedIds rows of a batch element, or of several (see FoldsElementsTogether), in order or grouped by segment.
// Row first_row + offsets[i] belongs to segment first_segment + ids[i], or to none if ids[i] is not in [0, segments). The
// first `known` offsets may be read for prefetching: those of the block, and the next ones as far as available. The same
// holds for ids.
struct RowBlock {
  int64_t count, known;
  int64_t first_row, first_segment;
  const int32_t* offsets;
  const int32_t* ids;
};

// The offsets of a block without gaps: 0, 1, 2, ... They cost one load per row, but loops need to be compiled for one
// kind of block only.
struct AllOffsets {
  int32_t values[kConvertedIds + kScanPrefetchDistance];

  constexpr AllOffsets() : values() {
    for (int32_t i = 0; i < kConvertedIds + kScanPrefetchDistance; ++i) values[i] = i;
  }
};
inline constexpr AllOffsets kAllOffsets;

// The rows of a block as numbers of another type, converted into `memory` at the same offsets. `rows` are stored from
// the block's first row on.
template <typename T, typename Number, typename Convert>
void ConvertBlock(const RowBlock& block, const T* rows, int64_t features, Number* memory, const Convert& convert) {
  if (block.offsets == kAllOffsets.values || features <= kMaxNarrowWidth) {
    if (block.count > 0) convert(rows, (block.offsets[block.count - 1] + 1) * features, memory);
    return;
  }
  for (int64_t i = 0; i < block.count; ++i) {
    const int64_t number = block.offsets[i] * features;
    convert(rows + number, features, memory + number);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Reductions, as the drivers know them.

struct CellType {
  int64_t element_bytes;              // of an element of a row
  int64_t first_bytes, second_bytes;  // of the numbers of an unfinished cell; 0: no second number
  bool rounds;                        // whether merging in another grouping changes the bits
  bool second_is_rare;                // whether few cells have a second number

  // The bytes that most cells use.
  int64_t Bytes() const { return first_bytes + (second_is_rare ? 0 : second_bytes); }
};

// Unfinished cells: one array per kind of number.
struct UntypedCells {
  void* first;
  void* second;  // nullptr if there is no second number
};

// The unfinished cells that rows are folded into: [segments from segment_begin on, width].
struct FoldTarget {
  UntypedCells cells;
  int32_t* row_counts;  // of these segments, or nullptr
  int64_t batch;
  int64_t segment_begin;
  uint64_t num_segments;         // all segments of the problem, or of the elements that are reduced together
  int64_t feature_begin, width;  // the features of the cells
  bool cells_exceed_cache;       // too large for a near cache, so that prefetching a random cell pays
  bool has_runs;                 // whether neighbouring rows may well belong to one segment
  bool ids_ascend;               // those of a block, so that the rows of a segment are neighbours
  bool rows_are_scattered;
};

// Calls its argument for blocks of rows.
using ForEachBlock = FunctionRef<void(FunctionRef<void(const RowBlock&)>)>;

class RowReduction {
 public:
  // `block_rows` is the largest block for Fold. With `splits_features`, threads may split rows.
  RowReduction(const Problem& problem, CellType type, int64_t block_rows, bool splits_features)
      : problem(problem), type(type), block_rows(block_rows), splits_features(splits_features) {}
  RowReduction(const RowReduction&) = delete;

  const Problem problem;
  const CellType type;
  const int64_t block_rows;
  const bool splits_features;

  // Whether Fold takes rows of several elements of the batch at once. These continue the rows of element target.batch,
  // and ids number the segments of all.
  virtual bool FoldsElementsTogether() const { return false; }
  virtual UntypedCells ResultCells() const = 0;
  virtual void Start(int64_t count, UntypedCells cells) const = 0;
  virtual void Fold(const RowBlock& block, const FoldTarget& target) const = 0;
  // Folds blocks into the cells of `num_segments` segments, without checks. Returns false if the reduction cannot, or if
  // checks are needed; the cells are then as they were started.
  virtual bool FoldUnchecked(ForEachBlock /*for_each_block*/, int64_t /*num_segments*/, const FoldTarget&) const {
    return false;
  }
  virtual void Merge(int64_t count, UntypedCells later, UntypedCells cells) const = 0;
  virtual void Write(int64_t count, int64_t first_cell, const int32_t* counts, UntypedCells cells) const = 0;

  void StartTarget(int64_t num_segments, const FoldTarget& target) const {
    Start(num_segments * target.width, target.cells);
    if (target.row_counts != nullptr) std::fill_n(target.row_counts, num_segments, 0);
  }

 protected:
  ~RowReduction() = default;
};

// Whether to scan rows in order rather than group them.
bool ReducesInOrder(const Problem& problem, int64_t element_bytes, int64_t cell_bytes);

// The number of elements of a batch that are reduced at a time; 0 if it has too few elements, or these have too many rows
// or cells.
int64_t ElementsAtOnce(const Problem& problem, CellType type);

Strategy ChooseScan(const Problem& problem, bool rounds, int64_t row_bytes);
Strategy ChooseStrategy(const Problem& problem, CellType type, bool has_counts);

// The number of threads worth waking for this much work.
int64_t NumThreadsFor(ffi::ThreadPool& pool, int64_t total_bytes);

// Reduces all rows, in order or as ChooseStrategy says; return false if allocation fails. `row_counts`, if not nullptr,
// receives the number of rows of each segment [batch, segments].
bool Scan(ffi::ThreadPool& pool, SegmentIds ids, const RowReduction& reduction, int32_t* row_counts = nullptr);
bool ReduceAll(ffi::ThreadPool& pool, SegmentIds ids, const RowReduction& reduction, int32_t* row_counts = nullptr);

// ---------------------------------------------------------------------------------------------------------------------
// Loops over rows, for a Reduction.

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

template <typename Reduction>
JB_INLINE CellsOf<Reduction> TypedCells(UntypedCells cells) {
  return {static_cast<typename Reduction::First*>(cells.first), static_cast<typename Reduction::Second*>(cells.second)};
}

template <typename Reduction>
inline constexpr bool kHasSecond = !std::is_same_v<typename Reduction::Second, NoNumber>;

template <typename Reduction, typename = void>
inline constexpr bool kSecondIsRare = false;
template <typename Reduction>
inline constexpr bool kSecondIsRare<Reduction, std::void_t<decltype(Reduction::kSecondIsRare)>> =
    Reduction::kSecondIsRare;

template <typename Reduction, typename = void>
inline constexpr bool kKeepsRows = false;
template <typename Reduction>
inline constexpr bool kKeepsRows<Reduction, std::void_t<decltype(Reduction::kKeepsRows)>> = Reduction::kKeepsRows;

template <typename Reduction>
constexpr CellType CellTypeOf() {
  return {sizeof(typename Reduction::Element), sizeof(typename Reduction::First),
          kHasSecond<Reduction> ? sizeof(typename Reduction::Second) : 0, Reduction::kRounds, kSecondIsRare<Reduction>};
}

template <typename Reduction, typename = void>
inline constexpr bool kHasUnchecked = false;
template <typename Reduction>
inline constexpr bool kHasUnchecked<Reduction, std::void_t<typename Reduction::Unchecked>> = kCanFlushSubnormals;

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

// Calls fold(i, segment - segment_begin) for the rows i of a block that belong to a segment.
template <typename Reduction, typename Fold>
JB_INLINE void ForEachMember(const RowBlock& block, const FoldTarget& target, int64_t width, const Fold& fold) {
  const CellsOf<Reduction> cells = TypedCells<Reduction>(target.cells);
  const int64_t first = block.first_segment - target.segment_begin;
  for (int64_t i = 0; i < block.count; ++i) {
    if (target.cells_exceed_cache && i + kScanPrefetchDistance < block.known) {
      const int64_t upcoming = block.ids[i + kScanPrefetchDistance];
      if (static_cast<uint64_t>(upcoming) < target.num_segments) {
        PrefetchCells<Reduction>(cells + (first + upcoming) * width, width);
      }
    }
    const int64_t id = block.ids[i];
    if (static_cast<uint64_t>(id) < target.num_segments) fold(i, first + id);
  }
}

// ForEachMember for ids that ascend: takes rows of several parts of the block in turn. Parts share no segment, so the CPU
// overlaps their additions, while each addition to one cell waits for the one before.
template <typename Fold>
JB_INLINE void ForEachMemberOfParts(const RowBlock& block, const FoldTarget& target, const Fold& fold) {
  constexpr int kParts = 4;
  const int64_t first = block.first_segment - target.segment_begin;
  const auto fold_row = [&](int64_t i) __attribute__((always_inline)) {
    const int64_t id = block.ids[i];
    if (static_cast<uint64_t>(id) < target.num_segments) fold(i, first + id);
  };
  int64_t begins[kParts + 1] = {}, steps = block.count;
  for (int part = 1; part <= kParts; ++part) {
    int64_t& begin = begins[part];
    begin = std::max(begins[part - 1], block.count * part / kParts);
    while (begin > 0 && begin < block.count && block.ids[begin] == block.ids[begin - 1]) ++begin;
    steps = std::min(steps, begin - begins[part - 1]);
  }
  for (int64_t i = 0; i < steps; ++i) {
    for (int part = 0; part < kParts; ++part) fold_row(begins[part] + i);
  }
  for (int part = 0; part < kParts; ++part) {
    for (int64_t i = begins[part] + steps; i < begins[part + 1]; ++i) fold_row(i);
  }
}

JB_INLINE int32_t RowNumber(const RowBlock& block, int64_t i) {
  return static_cast<int32_t>(block.first_row) + block.offsets[i];
}

// Folds a block of narrow rows; loops over their features are compiled for each width. Row i of the block is row
// places[i] of `rows`; this is i if target.has_runs or target.ids_ascend.
template <typename Reduction>
JB_AVX2 void FoldNarrow(const RowBlock block, const int32_t* places, const typename Reduction::Element* rows,
                        const Reduction reduction, const FoldTarget target) {
  const CellsOf<Reduction> cells = TypedCells<Reduction>(target.cells);
  if (target.has_runs && target.width == 1) {
    HeldCell<Reduction> held(cells, target.row_counts);
    ForEachMember<Reduction>(block, target, 1, [&](int64_t i, int64_t segment) __attribute__((always_inline)) {
      held.MoveTo(segment);
      reduction.Fold(rows + i, RowNumber(block, i), 1, held.cells());
    });
    held.Release();
    return;
  }
  DispatchNarrow(target.width, [&](auto width) __attribute__((always_inline)) {
    if (width == 1 && target.ids_ascend) {
      return ForEachMemberOfParts(block, target, [&](int64_t i, int64_t segment) __attribute__((always_inline)) {
        reduction.Fold(rows + i, RowNumber(block, i), 1, cells + segment);
        if (target.row_counts != nullptr) ++target.row_counts[segment];
      });
    }
    ForEachMember<Reduction>(block, target, width, [&](int64_t i, int64_t segment) __attribute__((always_inline)) {
      reduction.Fold(rows + places[i] * width, RowNumber(block, i), width, cells + segment * width);
      if (target.row_counts != nullptr) ++target.row_counts[segment];
    });
  });
}

// Folds a block of rows of any width, `stride` elements apart.
template <typename Reduction>
JB_CPU_CLONES void FoldWide(const RowBlock block, const int32_t* places, const typename Reduction::Element* rows,
                            int64_t stride, const Reduction reduction, const FoldTarget target) {
  const CellsOf<Reduction> cells = TypedCells<Reduction>(target.cells);
  const int64_t width = target.width;
  const bool has_gaps = block.offsets != kAllOffsets.values;  // which the hardware prefetcher cannot predict
  ForEachMember<Reduction>(block, target, width, [&](int64_t i, int64_t segment) __attribute__((always_inline)) {
    if (has_gaps && i + kPrefetchDistance < block.known) {
      PrefetchRow(rows + places[i + kPrefetchDistance] * stride, width);
    }
    reduction.Fold(rows + places[i] * stride, RowNumber(block, i), width, cells + segment * width);
    if (target.row_counts != nullptr) ++target.row_counts[segment];
  });
}

template <typename Reduction>
void FoldRows(const RowBlock& block, const int32_t* places, const typename Reduction::Element* rows,
              const Reduction& reduction, const FoldTarget& target) {
  if (IsNarrow(target.width)) {
    FoldNarrow(block, places, rows, reduction, target);
  } else {
    FoldWide(block, places, rows, target.width, reduction, target);
  }
}

template <typename Reduction>
JB_AVX2_CLONES void MergeCells(const Reduction& reduction, int64_t count, CellsOf<Reduction> later,
                               CellsOf<Reduction> cells) {
  reduction.Merge(count, later, cells);
}

template <typename Reduction>
JB_AVX2_CLONES bool EndUncheckedCells(const Reduction& reduction, int64_t count, CellsOf<Reduction> cells) {
  return reduction.EndUnchecked(count, cells);
}

template <typename Reduction>
JB_AVX2_CLONES void WriteCells(const Reduction& reduction, int64_t count, int64_t first_cell, const int32_t* counts,
                               CellsOf<Reduction> cells) {
  reduction.Write(count, first_cell, counts, cells);
}

// The RowReduction of a Reduction, but for Fold, which depends on where rows come from.
template <typename Reduction>
class TypedReduction : public RowReduction {
 public:
  TypedReduction(const Problem& problem, int64_t block_rows, bool splits_features, const Reduction& reduction,
                 CellType type = CellTypeOf<Reduction>())
      : RowReduction(problem, type, block_rows, splits_features), reduction(reduction) {}

  const Reduction reduction;

  UntypedCells ResultCells() const final {
    const CellsOf<Reduction> cells = reduction.ResultCells();
    return {cells.first, cells.second};
  }
  void Start(int64_t count, UntypedCells cells) const final { reduction.Start(count, TypedCells<Reduction>(cells)); }
  void Merge(int64_t count, UntypedCells later, UntypedCells cells) const final {
    MergeCells(reduction, count, TypedCells<Reduction>(later), TypedCells<Reduction>(cells));
  }
  void Write(int64_t count, int64_t first_cell, const int32_t* counts, UntypedCells cells) const final {
    WriteCells(reduction, count, first_cell, counts, TypedCells<Reduction>(cells));
  }
};

// Rows of up to this width are converted together, if they are converted at all: that is faster than one by one.
template <typename Reduction>
inline constexpr int64_t kMaxConvertedWidth = std::is_same_v<typename Reduction::Narrow, Reduction> ? 0
                                              : kIsWidenedAtOnce<typename Reduction::Element>       ? 64
                                                                                                    : kMaxNarrowWidth;

// The largest block of rows in memory order that FoldOwnRows takes.
template <typename Reduction>
int64_t MaxBlockRows(const Problem& problem) {
  const bool are_converted = problem.features > 0 && problem.features <= kMaxConvertedWidth<Reduction>;
  return are_converted ? kConvertedNumbers / problem.features : kConvertedIds;
}

// Folds a block of rows in memory order, `stride` elements apart. `rows` is that of offset 0.
template <typename Reduction>
void FoldOwnRows(const RowBlock& block, const typename Reduction::Element* rows, int64_t stride,
                 const Reduction& reduction, const FoldTarget& target) {
  using Element = typename Reduction::Element;
  constexpr bool kFoldsWideNumbers = kMaxConvertedWidth<Reduction> > kMaxNarrowWidth;
  if constexpr (std::is_same_v<typename Reduction::Narrow, Reduction>) {
    if (IsNarrow(target.width)) return FoldNarrow(block, block.offsets, rows, reduction, target);
  } else if (!target.rows_are_scattered && target.width > 0 && target.width <= kMaxConvertedWidth<Reduction> &&
             (kFoldsWideNumbers || IsNarrow(target.width))) {
    typename Reduction::Narrow::Element numbers[kConvertedNumbers];
    ConvertBlock(block, rows, target.width, numbers,
                 [&](const Element* from, int64_t count, auto* to) { reduction.Convert(from, count, to); });
    if constexpr (kFoldsWideNumbers) return FoldRows(block, block.offsets, numbers, reduction.ForNarrow(), target);
    return FoldNarrow(block, block.offsets, numbers, reduction.ForNarrow(), target);
  }
  FoldWide(block, block.offsets, rows, stride, reduction, target);
}

// The reduction of rows [batch or 1, rows, features] in memory order.
template <typename Reduction>
class DirectReduction final : public TypedReduction<Reduction> {
 public:
  using Element = typename Reduction::Element;

  DirectReduction(const Problem& problem, const void* data, const Reduction& reduction)
      : TypedReduction<Reduction>(problem, MaxBlockRows<Reduction>(problem), /*splits_features=*/true, reduction),
        data_(static_cast<const Element*>(data)) {}

  bool FoldsElementsTogether() const override { return !this->problem.data_is_shared && !kKeepsRows<Reduction>; }

  void Fold(const RowBlock& block, const FoldTarget& target) const override {
    FoldOwnRows(block, FirstRow(block, target), this->problem.features, this->reduction, target);
  }

  bool FoldUnchecked(ForEachBlock for_each_block, int64_t num_segments, const FoldTarget& target) const override {
    if constexpr (kHasUnchecked<Reduction>) {
      {
        const ScopedZerosForSubnormals zeros;
        for_each_block([&](const RowBlock& block) {
          FoldOwnRows(block, FirstRow(block, target), this->problem.features, typename Reduction::Unchecked{}, target);
        });
      }
      const CellsOf<Reduction> cells = TypedCells<Reduction>(target.cells);
      if (EndUncheckedCells(this->reduction, num_segments * target.width, cells)) return true;
      this->StartTarget(num_segments, target);
    }
    return false;
  }

 private:
  const Element* FirstRow(const RowBlock& block, const FoldTarget& target) const {
    const Problem& problem = this->problem;
    return data_ + problem.DataRow(target.batch, block.first_row) * problem.features + target.feature_begin;
  }

  const Element* data_;
};

// The plan of a call that reduces rows of type T by Reduction<T>, for the T that dispatch(type, body) finds.
template <template <typename> class Reduction, typename Dispatch>
Plan PlanReduction(const SegmentCall& call, const Dispatch& dispatch, bool has_counts = false) {
  const Strategy strategy = DispatchOr(Strategy::kNothing, call.type, dispatch, [&](auto tag) {
    return ChooseStrategy(call.problem, CellTypeOf<Reduction<typename decltype(tag)::type>>(), has_counts);
  });
  return Plan{NameOf(kStrategyNames, strategy)};
}

// The strategies of a reduction whose merge rounds, and of one whose merge does not.
inline std::vector<const char*> RoundingStrategies() {
  return NamesOf(kStrategyNames, Strategy::kNothing, Strategy::kScan, Strategy::kSplitScan, Strategy::kBatchOfFewRows,
                 Strategy::kGroupBySegment);
}

inline std::vector<const char*> ExactStrategies() {
  return NamesOf(kStrategyNames, Strategy::kNothing, Strategy::kScan, Strategy::kBatchOfFewRows,
                 Strategy::kGroupBySegment);
}

// Reduces the rows `data` of a call.
template <typename Reduction>
bool ReduceRows(ffi::ThreadPool& pool, const SegmentCall& call, const void* data, const Reduction& reduction,
                int32_t* row_counts = nullptr) {
  return ReduceAll(pool, SegmentIds(call), DirectReduction<Reduction>(call.problem, data, reduction), row_counts);
}

// ---------------------------------------------------------------------------------------------------------------------
// Rows grouped by segment.

// The rows of a range of segments of one batch element, grouped by segment and ascending within each.
class GroupedRows {
 public:
  // Groups the rows of segments [segment_begin, segment_end). Returns false if allocation fails.
  bool Group(const Problem& problem, int64_t batch, int64_t segment_begin, int64_t segment_end, SegmentIds ids,
             bool ids_are_sorted);

  // [Begin(i), End(i)) are the positions of the rows of segment segment_begin + i.
  int32_t Begin(int64_t i) const { return i == 0 ? 0 : ends_[i - 1]; }
  int32_t End(int64_t i) const { return ends_[i]; }

  // The rows of segments [begin, end), counted from segment_begin, in blocks whose first_segment is `first_segment`,
  // that of `begin`.
  void ForEachBlock(int64_t begin, int64_t end, int64_t first_segment, int64_t max_rows,
                    FunctionRef<void(const RowBlock&)> body) const;

 private:
  std::unique_ptr<int32_t[]> ends_;
  Memory<int32_t> rows_;  // nullptr if the ids are sorted
  int32_t first_row_ = 0;
  int32_t size_ = 0;
};

// The part of the grouped rows that one thread reduces.
struct Block {
  int64_t batch;
  int64_t segment_begin, segment_end;
  int64_t feature_begin, feature_end;
};

// Groups all rows and calls body(block, grouped rows of its segments) for blocks that `num_threads` threads share.
// Features of `item_size` bytes may be split, too; 0 keeps them whole. Returns false if allocation fails, here or in
// body.
bool ForEachGroupedBlock(ffi::ThreadPool& pool, const Problem& problem, int64_t item_size, int64_t num_threads,
                         SegmentIds ids, FunctionRef<bool(const Block&, const GroupedRows&)> body);

// Reduces all rows, grouped by segment. Calls then(block, rows) for the rows of a few segments whose results are written.
// Returns false if allocation fails.
bool ReduceGrouped(ffi::ThreadPool& pool, SegmentIds ids, const RowReduction& reduction,
                   FunctionRef<void(const Block&, const RowBlock&)> then);

// ---------------------------------------------------------------------------------------------------------------------
// Results with one row per input row.

// Memory for `count` elements, with the same offset within a cache line as `like`.
template <typename T>
class StreamBuffer {
 public:
  explicit StreamBuffer(int64_t count) : memory_(Allocate<char>(count * sizeof(T) + kCacheLine)) {}

  // nullptr if the allocation failed.
  T* At(const void* like) const {
    if (memory_ == nullptr) return nullptr;
    const uintptr_t offset = reinterpret_cast<uintptr_t>(like) % kCacheLine;
    return reinterpret_cast<T*>(memory_.get() + offset);
  }

 private:
  Memory<char> memory_;
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

inline Plan PlanOfGather(const Problem& problem) { return {NameOf(kStrategyNames, ChooseGather(problem))}; }

inline std::vector<const char*> GatherStrategies() {
  return NamesOf(kStrategyNames, Strategy::kNothing, Strategy::kGather);
}

// Calls body(batch, block) for blocks of up to `max_rows` rows, in order, that together are all rows of a result [batch,
// rows, features].
void ForEachBlockOfResult(ffi::ThreadPool& pool, const Problem& problem, SegmentIds ids, int64_t element_bytes,
                          int64_t max_rows, FunctionRef<void(int64_t, const RowBlock&)> body);

// Writes zeros to the dropped rows of a result [batch, rows, features].
void WriteDroppedRows(ffi::ThreadPool& pool, const Problem& problem, SegmentIds ids, void* result,
                      int64_t element_bytes);

// Writes the rows of a block to the result of a batch element: write(row, segment, to) for the rows of a segment, zeros
// for dropped rows. Calls prefetch(segment) ahead.
template <typename T, typename Prefetch, typename Write>
JB_INLINE void WriteRowsOfBlock(const RowBlock& block, int64_t num_segments, int64_t width, T* result,
                                const Prefetch& prefetch, const Write& write) {
  const uint64_t segments = static_cast<uint64_t>(num_segments);
  const bool is_in_order = block.offsets == kAllOffsets.values;
  T* next = result + block.first_row * width;
  for (int64_t i = 0; i < block.count; ++i, next += width) {
    if (i + kPrefetchDistance < block.known) {
      const int64_t upcoming = block.ids[i + kPrefetchDistance];
      if (static_cast<uint64_t>(upcoming) < segments) prefetch(block.first_segment + upcoming);
    }
    const int64_t id = block.ids[i], row = is_in_order ? block.first_row + i : RowNumber(block, i);
    T* const to = is_in_order ? next : result + row * width;
    if (static_cast<uint64_t>(id) < segments) {
      write(row, block.first_segment + id, to);
    } else {
      WriteZeros(to, width);
    }
  }
}

}  // namespace jax_baracuda::segment
