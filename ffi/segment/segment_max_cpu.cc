// The CPU kernels of segment_max and its gradient. The result is the same on any number of threads, and nothing depends
// on whether the ids are sorted.
//
// Forward, two ways to go through the rows, both accumulating in ComputeType (so that 16-bit types vectorise):
// - In order: each thread takes a range of rows and folds them into cells of its own; the threads' cells are merged in
//   order of the ranges. For rows so narrow, or cells so few, that the cells stay in a near cache.
// - Grouped: each thread takes a range of segments (or of features, where segments are few) and groups its rows by
//   segment with a counting sort of row numbers. A segment's cells then stay in the nearest cache while its rows stream
//   by, and are written once.
// Backward, likewise: rows in order; or, where a result larger than the caches has unsorted ids, grouped by segment, so
// that winners and cotangents are read once, and the rows streamed to memory.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <type_traits>

#include "ffi/core/cpu_clones.h"
#include "ffi/core/huge_pages.h"
#include "ffi/core/parallel_for.h"
#include "ffi/core/streaming_store.h"
#include "ffi/core/target_table.h"
#include "ffi/segment/segment_max_handler.h"

namespace jax_baracuda::segment {
namespace {

constexpr int64_t kNarrowRowBytes = 64;
constexpr int64_t kNearCacheBytes = 4 * 1024 * 1024;
constexpr int64_t kMinRowsPerCellRow = 2;  // of a thread's own cells, which it must also set up and merge
constexpr int64_t kMinSegmentsPerBlock = 64;
constexpr int64_t kMinFeatureBytesPerBlock = 256;
constexpr int64_t kMinStreamedRowBytes = 256;
constexpr int64_t kMinStreamedBytes = 32 * 1024 * 1024;
constexpr int64_t kCacheLine = 64;
constexpr int64_t kPrefetchDistance = 6;  // rows

struct SegmentIds {
  const void* values;
  bool are_64_bit;

  int64_t operator[](int64_t i) const {
    return are_64_bit ? static_cast<const int64_t*>(values)[i] : static_cast<const int32_t*>(values)[i];
  }

  bool AreSorted(int64_t begin, int64_t end) const {
    const auto check = [&](const auto* ids) { return std::is_sorted(ids + begin, ids + end); };
    return are_64_bit ? check(static_cast<const int64_t*>(values)) : check(static_cast<const int32_t*>(values));
  }

  // The first index in [begin, end) of sorted ids whose id is not below `id`.
  int64_t LowerBound(int64_t begin, int64_t end, int64_t id) const {
    while (begin < end) {
      const int64_t middle = begin + (end - begin) / 2;
      if ((*this)[middle] < id) {
        begin = middle + 1;
      } else {
        end = middle;
      }
    }
    return begin;
  }
};

// Asks for a whole row ahead of its use; rows that ids point to jump about, so the hardware cannot foresee them.
template <typename T>
inline void PrefetchRow(const T* row, int64_t width) {
  const char* const begin = reinterpret_cast<const char*>(row);
  for (int64_t byte = 0; byte < width * static_cast<int64_t>(sizeof(T)); byte += kCacheLine) {
    __builtin_prefetch(begin + byte);
  }
}

// What one thread reduces in the grouped way.
struct Block {
  int64_t batch;
  int64_t segment_begin, segment_end;
  int64_t feature_begin, feature_end;
};

struct Blocking {
  int64_t segment_ranges;
  int64_t feature_ranges;

  // Splits segments, and then features.
  Blocking(const Problem& problem, int64_t item_size, int64_t num_threads) : Blocking(problem, num_threads) {
    feature_ranges = std::clamp<int64_t>(problem.features * item_size / kMinFeatureBytesPerBlock, 1,
                                         BlocksPerBatchElement(problem, num_threads) / segment_ranges);
  }

  // Splits segments alone.
  Blocking(const Problem& problem, int64_t num_threads) {
    segment_ranges = std::clamp<int64_t>(problem.segments / kMinSegmentsPerBlock, 1,
                                         BlocksPerBatchElement(problem, num_threads));
    feature_ranges = 1;
  }

  static int64_t BlocksPerBatchElement(const Problem& problem, int64_t num_threads) {
    return (num_threads + problem.batch - 1) / std::max<int64_t>(1, problem.batch);
  }

  int64_t Count(const Problem& problem) const { return problem.batch * segment_ranges * feature_ranges; }

  Block Get(const Problem& problem, int64_t index) const {
    const int64_t feature_range = index % feature_ranges;
    const int64_t segment_range = index / feature_ranges % segment_ranges;
    return Block{index / feature_ranges / segment_ranges,
                 ChunkBegin(problem.segments, segment_ranges, segment_range),
                 ChunkBegin(problem.segments, segment_ranges, segment_range + 1),
                 ChunkBegin(problem.features, feature_ranges, feature_range),
                 ChunkBegin(problem.features, feature_ranges, feature_range + 1)};
  }
};

// The rows of a block's segments, grouped by segment and ascending within each.
class GroupedRows {
 public:
  // Returns false if there is no memory.
  bool Group(const Problem& problem, const Block& block, SegmentIds ids, bool ids_are_sorted) {
    const int64_t num_segments = block.segment_end - block.segment_begin;
    const int64_t first_id = problem.IdIndex(block.batch, 0), end_id = first_id + problem.rows;
    ends_.reset(new (std::nothrow) int32_t[num_segments + 1]());
    if (ends_ == nullptr) return false;
    const auto group_of = [&](int64_t row) { return ids[first_id + row] - block.segment_begin; };
    if (ids_are_sorted) {
      first_row_ = static_cast<int32_t>(ids.LowerBound(first_id, end_id, block.segment_begin) - first_id);
      size_ = static_cast<int32_t>(ids.LowerBound(first_id, end_id, block.segment_end) - first_id) - first_row_;
      for (int64_t i = 0; i < size_; ++i) ++ends_[group_of(first_row_ + i)];
      for (int64_t i = 1; i < num_segments; ++i) ends_[i] += ends_[i - 1];
      return true;
    }
    std::unique_ptr<int32_t[]> members(new (std::nothrow) int32_t[problem.rows + 1]);
    if (members == nullptr) return false;
    // Listed without a branch on what is random. A row that is no member is overwritten by the next one.
    int64_t num_members = 0;
    for (int64_t row = 0; row < problem.rows; ++row) {
      const int64_t segment = ids[first_id + row];
      members[num_members] = static_cast<int32_t>(row);
      num_members += static_cast<int64_t>(segment >= block.segment_begin) &
                     static_cast<int64_t>(segment < block.segment_end);
    }
    size_ = static_cast<int32_t>(num_members);
    rows_.reset(new (std::nothrow) int32_t[num_members]);
    if (rows_ == nullptr) return false;
    for (int64_t i = 0; i < num_members; ++i) ++ends_[group_of(members[i]) + 1];
    for (int64_t i = 0; i < num_segments; ++i) ends_[i + 1] += ends_[i];
    // Placing a row moves its segment's start to the next place, so that in the end starts have become ends.
    for (int64_t i = 0; i < num_members; ++i) rows_[ends_[group_of(members[i])]++] = members[i];
    return true;
  }

  int32_t Size() const { return size_; }

  // [Begin(i), End(i)) are the places of the rows of the block's segment i.
  int32_t Begin(int64_t i) const { return i == 0 ? 0 : ends_[i - 1]; }
  int32_t End(int64_t i) const { return ends_[i]; }
  int32_t operator[](int32_t place) const { return rows_ == nullptr ? first_row_ + place : rows_[place]; }

 private:
  std::unique_ptr<int32_t[]> ends_;
  std::unique_ptr<int32_t[]> rows_;  // absent where the ids are sorted
  int32_t first_row_ = 0;
  int32_t size_ = 0;
};

template <typename T>
struct ForwardArrays {
  const T* data;
  SegmentIds ids;
  T* output;
  int32_t* winner;  // nullptr when only the maximum is wanted
  bool first_wins;
};

// Cells under reduction: maxima, and winners where they are wanted.
template <typename T>
class Cells {
 public:
  using C = ComputeType<T>;

  // Returns false if there is no memory.
  bool Allocate(int64_t count, bool with_winner) {
    maxima_.reset(new (std::nothrow) C[count]);
    if (with_winner) winners_.reset(new (std::nothrow) int32_t[count]);
    return maxima_ != nullptr && (winners_ != nullptr || !with_winner);
  }

  C* maxima() { return maxima_.get(); }
  int32_t* winners() { return winners_.get(); }

 private:
  std::unique_ptr<C[]> maxima_;
  std::unique_ptr<int32_t[]> winners_;
};

#define JB_INLINE __attribute__((always_inline)) inline

template <bool kWithWinner, typename C>
JB_INLINE void StartCells(int64_t width, C* maxima, int32_t* winners) {
  std::fill_n(maxima, width, MaxIdentity<C>());
  if constexpr (kWithWinner) std::fill_n(winners, width, kNoWinner);
}

template <bool kWithWinner, typename T, typename C>
JB_INLINE void FoldRow(const T* values, int32_t row, int64_t width, bool first_wins, C* maxima, int32_t* winners) {
#pragma GCC ivdep
  for (int64_t i = 0; i < width; ++i) {
    const C value = static_cast<C>(values[i]);
    if constexpr (kWithWinner) {
      Cell<C> cell{maxima[i], winners[i]};
      AddRow(cell, value, row, first_wins);
      maxima[i] = cell.best;
      winners[i] = cell.winner;
    } else {
      maxima[i] = Larger(maxima[i], value);
    }
  }
}

template <bool kWithWinner, typename T, typename C>
JB_INLINE void WriteCells(int64_t width, const C* maxima, const int32_t* winners, T* output, int32_t* winner) {
#pragma GCC ivdep
  for (int64_t i = 0; i < width; ++i) {
    output[i] = static_cast<T>(maxima[i]);
    if constexpr (kWithWinner) winner[i] = FinalWinner(Cell<C>{maxima[i], winners[i]});
  }
}

// Reduces one block in the grouped way; returns false if there is no memory.
template <bool kWithWinner, typename T>
JB_CPU_CLONES bool ReduceGrouped(const Problem& problem, const Block& block, bool ids_are_sorted,
                                 const ForwardArrays<T>& arrays) {
  const int64_t features = problem.features, width = block.feature_end - block.feature_begin;
  GroupedRows grouped;
  Cells<T> cells;
  if (!grouped.Group(problem, block, arrays.ids, ids_are_sorted) || !cells.Allocate(width, kWithWinner)) return false;
  const T* const rows = arrays.data + problem.DataRow(block.batch, 0) * features + block.feature_begin;
  const int32_t num_members = grouped.Size();
  for (int64_t segment = block.segment_begin; segment < block.segment_end; ++segment) {
    StartCells<kWithWinner>(width, cells.maxima(), cells.winners());
    const int64_t group = segment - block.segment_begin;
    for (int32_t place = grouped.Begin(group); place < grouped.End(group); ++place) {
      if (place + kPrefetchDistance < num_members) {
        PrefetchRow(rows + grouped[place + kPrefetchDistance] * features, width);
      }
      const int32_t row = grouped[place];
      FoldRow<kWithWinner>(rows + row * features, row, width, arrays.first_wins, cells.maxima(), cells.winners());
    }
    const int64_t first_cell = (block.batch * problem.segments + segment) * features + block.feature_begin;
    WriteCells<kWithWinner>(width, cells.maxima(), cells.winners(), arrays.output + first_cell,
                            kWithWinner ? arrays.winner + first_cell : nullptr);
  }
  return true;
}

// Folds the rows [row_begin, row_end) of a batch element, in order, into cells [segments, features].
template <bool kWithWinner, typename T, typename C>
JB_CPU_CLONES void FoldInOrder(const Problem& problem, int64_t batch, int64_t row_begin, int64_t row_end,
                               const ForwardArrays<T>& arrays, C* maxima, int32_t* winners) {
  const int64_t features = problem.features;
  StartCells<kWithWinner>(problem.segments * features, maxima, winners);
  const T* const rows = arrays.data + problem.DataRow(batch, 0) * features;
  const int64_t first_id = problem.IdIndex(batch, 0);
  const auto fold_rows = [&](auto width) __attribute__((always_inline)) {
    for (int64_t row = row_begin; row < row_end; ++row) {
      const int64_t segment = arrays.ids[first_id + row];
      if (segment < 0 || segment >= problem.segments) continue;
      FoldRow<kWithWinner>(rows + row * width, static_cast<int32_t>(row), width, arrays.first_wins,
                           maxima + segment * width, winners + segment * width);
    }
  };
  if (features == 1) {
    fold_rows(std::integral_constant<int64_t, 1>{});  // a loop over one feature would cost more than its body
  } else {
    fold_rows(features);
  }
}

// Merges `count` cells of a later range of rows into those of the ranges before it.
template <bool kWithWinner, typename C>
JB_CPU_CLONES void MergeCells(int64_t count, const C* later_maxima, const int32_t* later_winners, bool first_wins,
                              C* maxima, int32_t* winners) {
  for (int64_t i = 0; i < count; ++i) {
    if constexpr (kWithWinner) {
      Cell<C> cell{maxima[i], winners[i]};
      MergeCell(cell, Cell<C>{later_maxima[i], later_winners[i]}, first_wins);
      maxima[i] = cell.best;
      winners[i] = cell.winner;
    } else {
      maxima[i] = Larger(maxima[i], later_maxima[i]);
    }
  }
}

template <bool kWithWinner, typename T>
bool ReduceAllInOrder(ffi::ThreadPool& pool, const Problem& problem, int64_t num_ranges,
                      const ForwardArrays<T>& arrays) {
  const int64_t cells_per_batch = problem.segments * problem.features;
  Cells<T> cells;
  if (!cells.Allocate(problem.batch * num_ranges * cells_per_batch, kWithWinner)) return false;
  const auto cells_of = [&](int64_t batch, int64_t range) { return (batch * num_ranges + range) * cells_per_batch; };
  ParallelFor(pool, problem.batch * num_ranges, [&](int64_t index) {
    const int64_t batch = index / num_ranges, range = index % num_ranges, first = cells_of(batch, range);
    FoldInOrder<kWithWinner>(problem, batch, ChunkBegin(problem.rows, num_ranges, range),
                             ChunkBegin(problem.rows, num_ranges, range + 1), arrays, cells.maxima() + first,
                             cells.winners() + first);
  });
  const int64_t chunks = ChunksFor(pool, num_ranges * cells_per_batch * sizeof(T));
  ParallelFor(pool, problem.batch * chunks, [&](int64_t index) {
    const int64_t batch = index / chunks, begin = ChunkBegin(cells_per_batch, chunks, index % chunks),
                  count = ChunkBegin(cells_per_batch, chunks, index % chunks + 1) - begin,
                  first = cells_of(batch, 0) + begin, result = batch * cells_per_batch + begin;
    for (int64_t range = 1; range < num_ranges; ++range) {
      const int64_t later = cells_of(batch, range) + begin;
      MergeCells<kWithWinner>(count, cells.maxima() + later, cells.winners() + later, arrays.first_wins,
                              cells.maxima() + first, cells.winners() + first);
    }
    WriteCells<kWithWinner>(count, cells.maxima() + first, cells.winners() + first, arrays.output + result,
                            kWithWinner ? arrays.winner + result : nullptr);
  });
  return true;
}

bool EachBatchIsSorted(const Problem& problem, SegmentIds ids) {
  for (int64_t b = 0; b < (problem.ids_are_shared ? 1 : problem.batch); ++b) {
    if (!ids.AreSorted(b * problem.rows, (b + 1) * problem.rows)) return false;
  }
  return true;
}

template <bool kWithWinner, typename T>
bool ReduceAllGrouped(ffi::ThreadPool& pool, const Problem& problem, int64_t num_threads,
                      const ForwardArrays<T>& arrays) {
  const Blocking blocking(problem, sizeof(T), num_threads);
  const bool ids_are_sorted = EachBatchIsSorted(problem, arrays.ids);
  std::atomic<bool> has_memory{true};
  ParallelFor(pool, blocking.Count(problem), [&](int64_t index) {
    if (!ReduceGrouped<kWithWinner>(problem, blocking.Get(problem, index), ids_are_sorted, arrays)) has_memory = false;
  });
  return has_memory;
}

// Chooses the way through the rows (see the top of the file); returns false if there is no memory.
template <bool kWithWinner, typename T>
bool ReduceAll(ffi::ThreadPool& pool, const Problem& problem, const ForwardArrays<T>& arrays) {
  const int64_t row_bytes = problem.features * sizeof(T);
  const int64_t result_cells = problem.batch * problem.segments * problem.features;
  if (result_cells == 0) return true;
  AdviseHugePages(arrays.output, result_cells * sizeof(T));
  if constexpr (kWithWinner) AdviseHugePages(arrays.winner, result_cells * sizeof(int32_t));
  const int64_t total_bytes = problem.batch * (problem.rows + problem.segments) * row_bytes;
  const int64_t num_threads =
      std::min<int64_t>(ChunksFor(pool, total_bytes), std::max<int64_t>(1, pool.num_threads()));
  const int64_t cell_bytes = sizeof(ComputeType<T>) + (kWithWinner ? sizeof(int32_t) : 0);
  const bool cells_stay_near = problem.segments * problem.features * cell_bytes <= kNearCacheBytes;
  if (row_bytes < kNarrowRowBytes || (cells_stay_near && problem.rows >= kMinRowsPerCellRow * problem.segments)) {
    const int64_t threads_per_batch_element = (num_threads + problem.batch - 1) / problem.batch;
    const int64_t num_ranges =
        std::clamp<int64_t>(problem.rows / (kMinRowsPerCellRow * problem.segments), 1, threads_per_batch_element);
    return ReduceAllInOrder<kWithWinner>(pool, problem, num_ranges, arrays);
  }
  return ReduceAllGrouped<kWithWinner>(pool, problem, num_threads, arrays);
}

template <typename T>
struct BackwardArrays {
  SegmentIds ids;
  const T* d_output;
  const int32_t* winner;
  const T* data;    // absent when no winner can be a tie
  const T* output;  // likewise
  T* d_data;
  bool d_output_is_shared;
  bool winner_is_shared;
};

// The cells of a segment, and their cotangents.
template <typename T>
struct SegmentCells {
  const T* d_output;
  const int32_t* winner;
  const T* output;

  SegmentCells(const Problem& problem, const BackwardArrays<T>& arrays, int64_t batch, int64_t segment) {
    const int64_t first = segment * problem.features, of_batch = batch * problem.segments * problem.features;
    const int64_t first_winner = first + (arrays.winner_is_shared ? 0 : of_batch);
    d_output = arrays.d_output + first + (arrays.d_output_is_shared ? 0 : of_batch);
    winner = arrays.winner + first_winner;
    output = arrays.output == nullptr ? nullptr : arrays.output + first_winner;
  }

  void Prefetch(int64_t features) const {
    PrefetchRow(d_output, features);
    PrefetchRow(winner, features);
  }
};

// Writes the gradient of one row; `data` is the row itself, or nullptr when no winner can be a tie.
template <typename T>
JB_INLINE void GradientOfRow(const SegmentCells<T>& cells, const T* data, int32_t row, int64_t features, T* d_row) {
  int32_t lowest_winner = 0;
#pragma GCC ivdep
  for (int64_t i = 0; i < features; ++i) {
    // Selected as bits, which vectorises for 16-bit types too; all bits zero is +0.
    BitsOf<T> bits;
    std::memcpy(&bits, cells.d_output + i, sizeof(T));
    bits = cells.winner[i] == row ? bits : BitsOf<T>{0};
    std::memcpy(d_row + i, &bits, sizeof(T));
    lowest_winner = std::min(lowest_winner, cells.winner[i]);
  }
  if (!IsTie(lowest_winner) || data == nullptr) return;
  for (int64_t i = 0; i < features; ++i) {
    const int32_t winner = cells.winner[i];
    if (IsTie(winner)) d_row[i] = TiedGradient(winner, data[i], cells.output[i], cells.d_output[i]);
  }
}

template <typename T>
const T* DataOfRow(const Problem& problem, const BackwardArrays<T>& arrays, int64_t batch, int64_t row) {
  return arrays.data == nullptr ? nullptr : arrays.data + problem.DataRow(batch, row) * problem.features;
}

template <typename T>
JB_CPU_CLONES void GradientInOrder(const Problem& problem, int64_t batch, int64_t row_begin, int64_t row_end,
                                   const BackwardArrays<T>& arrays) {
  const int64_t features = problem.features;
  const auto is_segment = [&](int64_t id) { return id >= 0 && id < problem.segments; };
  for (int64_t row = row_begin; row < row_end; ++row) {
    if (row + kPrefetchDistance < row_end) {
      const int64_t coming = arrays.ids[problem.IdIndex(batch, row + kPrefetchDistance)];
      if (is_segment(coming)) SegmentCells<T>(problem, arrays, batch, coming).Prefetch(features);
    }
    T* const d_row = arrays.d_data + (batch * problem.rows + row) * features;
    const int64_t segment = arrays.ids[problem.IdIndex(batch, row)];
    if (is_segment(segment)) {
      GradientOfRow(SegmentCells<T>(problem, arrays, batch, segment), DataOfRow(problem, arrays, batch, row),
                    static_cast<int32_t>(row), features, d_row);
    } else {
      std::fill_n(d_row, features, static_cast<T>(ComputeType<T>{0}));
    }
  }
}

// The gradient of the rows of a block of segments. Returns false if there is no memory.
template <typename T>
JB_CPU_CLONES bool GradientGrouped(const Problem& problem, const Block& block, const BackwardArrays<T>& arrays) {
  const int64_t features = problem.features, row_bytes = features * sizeof(T);
  GroupedRows grouped;
  // One row, aligned so that it can be streamed.
  std::unique_ptr<T[]> allocated(new (std::nothrow) T[features + kCacheLine / sizeof(T)]);
  if (allocated == nullptr || !grouped.Group(problem, block, arrays.ids, /*ids_are_sorted=*/false)) return false;
  const auto address = (reinterpret_cast<uintptr_t>(allocated.get()) + kCacheLine - 1) / kCacheLine * kCacheLine;
  T* const d_row = reinterpret_cast<T*>(address);
  T* const d_rows = arrays.d_data + block.batch * problem.rows * features;
  for (int64_t segment = block.segment_begin; segment < block.segment_end; ++segment) {
    const SegmentCells<T> cells(problem, arrays, block.batch, segment);
    const int64_t group = segment - block.segment_begin;
    for (int32_t place = grouped.Begin(group); place < grouped.End(group); ++place) {
      const int32_t row = grouped[place];
      GradientOfRow(cells, DataOfRow(problem, arrays, block.batch, row), row, features, d_row);
      StreamBytes(d_rows + row * features, d_row, row_bytes);
    }
  }
  if (block.segment_begin == 0) {
    for (int64_t row = 0; row < problem.rows; ++row) {
      const int64_t segment = arrays.ids[problem.IdIndex(block.batch, row)];
      if (segment >= 0 && segment < problem.segments) continue;
      std::fill_n(d_rows + row * features, features, static_cast<T>(ComputeType<T>{0}));
    }
  }
  FinishStreaming();
  return true;
}

// Returns false if there is no memory.
template <typename T>
bool GradientOfAll(ffi::ThreadPool& pool, const Problem& problem, const BackwardArrays<T>& arrays) {
  const int64_t row_bytes = problem.features * sizeof(T), bytes_per_batch_element = problem.rows * row_bytes;
  const int64_t total_bytes = problem.batch * bytes_per_batch_element;
  AdviseHugePages(arrays.d_data, total_bytes);
  if (row_bytes >= kMinStreamedRowBytes && total_bytes >= kMinStreamedBytes &&
      problem.segments >= kMinSegmentsPerBlock && !EachBatchIsSorted(problem, arrays.ids)) {
    const Blocking blocking(problem, std::max<int64_t>(1, pool.num_threads()));
    std::atomic<bool> has_memory{true};
    ParallelFor(pool, blocking.Count(problem), [&](int64_t index) {
      if (!GradientGrouped(problem, blocking.Get(problem, index), arrays)) has_memory = false;
    });
    return has_memory;
  }
  const int64_t chunks = ChunksFor(pool, bytes_per_batch_element);
  ParallelFor(pool, problem.batch * chunks, [&](int64_t index) {
    const int64_t chunk = index % chunks;
    GradientInOrder(problem, index / chunks, ChunkBegin(problem.rows, chunks, chunk),
                    ChunkBegin(problem.rows, chunks, chunk + 1), arrays);
  });
  return true;
}

ffi::Error OutOfMemory(const char* op) {
  return ffi::Error(ffi::ErrorCode::kResourceExhausted, std::string(op) + ": out of host memory");
}

ffi::Error Forward(const char* op, ffi::ThreadPool& pool, const ffi::AnyBuffer& data,
                   const ffi::AnyBuffer& segment_ids, const ffi::AnyBuffer& output, const ffi::AnyBuffer* winner,
                   bool first_wins) {
  ForwardBuffers decoded;
  JB_RETURN_IF_ERROR(DecodeForward(op, data, segment_ids, output, winner, &decoded));
  const Problem& problem = decoded.problem;
  bool has_memory = true;
  const auto run = [&](auto tag) {
    using T = typename decltype(tag)::type;
    const ForwardArrays<T> arrays{static_cast<const T*>(data.untyped_data()),
                                  SegmentIds{segment_ids.untyped_data(), decoded.ids_are_64_bit},
                                  static_cast<T*>(output.untyped_data()), decoded.winner, first_wins};
    if constexpr (kIsFloating<T>) {
      if (arrays.winner != nullptr) {
        has_memory = ReduceAll<true>(pool, problem, arrays);
        return;
      }
    }
    has_memory = ReduceAll<false>(pool, problem, arrays);
  };
  const bool supported =
      winner != nullptr ? DispatchFloating(decoded.type, run) : DispatchOrdered(decoded.type, run);
  if (!supported) return UnsupportedType(op, "data", data.element_type());
  return has_memory ? ffi::Error::Success() : OutOfMemory(op);
}

ffi::Error SegmentMax(ffi::ThreadPool pool, ffi::AnyBuffer data, ffi::AnyBuffer segment_ids,
                      ffi::Result<ffi::AnyBuffer> output, bool /*indices_are_sorted*/) {
  return Forward("segment_max", pool, data, segment_ids, *output, nullptr, false);
}

ffi::Error SegmentMaxWithWinner(ffi::ThreadPool pool, ffi::AnyBuffer data, ffi::AnyBuffer segment_ids,
                                ffi::Result<ffi::AnyBuffer> output, ffi::Result<ffi::AnyBuffer> winner,
                                bool /*indices_are_sorted*/, bool first_wins) {
  return Forward("segment_max_with_winner", pool, data, segment_ids, *output, &*winner, first_wins);
}

ffi::Error SegmentMaxBackward(ffi::ThreadPool pool, ffi::AnyBuffer d_output, ffi::AnyBuffer winner,
                              ffi::AnyBuffer segment_ids, ffi::RemainingArgs data_and_output,
                              ffi::Result<ffi::AnyBuffer> d_data) {
  constexpr const char* kOp = "segment_max_backward";
  BackwardBuffers decoded;
  JB_RETURN_IF_ERROR(DecodeBackward(kOp, d_output, winner, segment_ids, data_and_output, *d_data, &decoded));
  bool has_memory = true;
  const bool supported = DispatchFloating(decoded.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const BackwardArrays<T> arrays{SegmentIds{segment_ids.untyped_data(), decoded.ids_are_64_bit},
                                   static_cast<const T*>(d_output.untyped_data()),
                                   static_cast<const int32_t*>(winner.untyped_data()),
                                   static_cast<const T*>(decoded.data),
                                   static_cast<const T*>(decoded.output),
                                   static_cast<T*>(d_data->untyped_data()),
                                   decoded.d_output_is_shared,
                                   decoded.winner_is_shared};
    has_memory = GradientOfAll(pool, decoded.problem, arrays);
  });
  if (!supported) return UnsupportedType(kOp, "d_output", d_output.element_type());
  return has_memory ? ffi::Error::Success() : OutOfMemory(kOp);
}

XLA_FFI_DEFINE_HANDLER(kSegmentMax, SegmentMax,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Attr<bool>("indices_are_sorted"));

XLA_FFI_DEFINE_HANDLER(kSegmentMaxWithWinner, SegmentMaxWithWinner,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Attr<bool>("indices_are_sorted")
                           .Attr<bool>("first_wins"));

XLA_FFI_DEFINE_HANDLER(kSegmentMaxBackward, SegmentMaxBackward,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .RemainingArgs()
                           .Ret<ffi::AnyBuffer>());

JB_REGISTER_TARGET("segment_max", kSegmentMax, nullptr);
JB_REGISTER_TARGET("segment_max_with_winner", kSegmentMaxWithWinner, nullptr);
JB_REGISTER_TARGET("segment_max_backward", kSegmentMaxBackward, nullptr);

}  // namespace
}  // namespace jax_baracuda::segment
