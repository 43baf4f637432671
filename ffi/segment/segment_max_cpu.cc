// The CPU kernels of segment_max and its gradient.
//
// Forward: the result is cut into blocks of (batch element, segment range, feature range). A block belongs to one
// thread, which walks all rows in order and folds those of its segments: no atomics, the same result on any number of
// threads, and nothing depends on whether the ids are sorted. Features are split first, because then every row is
// read by all threads but each byte by one; segments are split where rows are too narrow for that.
// Backward: rows are independent.

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "ffi/core/cpu_clones.h"
#include "ffi/core/parallel_for.h"
#include "ffi/core/target_table.h"
#include "ffi/segment/segment_max_handler.h"

namespace jax_baracuda::segment {
namespace {

constexpr int64_t kMinFeatureBytesPerBlock = 128;  // two cache lines
constexpr int64_t kPrefetchDistance = 8;           // rows

struct SegmentIds {
  const void* values;
  bool are_64_bit;

  int64_t operator[](int64_t i) const {
    return are_64_bit ? static_cast<const int64_t*>(values)[i] : static_cast<const int32_t*>(values)[i];
  }
};

struct Block {
  int64_t batch;
  int64_t segment_begin, segment_end;
  int64_t feature_begin, feature_end;
};

struct Blocking {
  int64_t segment_ranges;
  int64_t feature_ranges;

  Blocking(const Problem& problem, int64_t item_size, int64_t num_threads) {
    const int64_t blocks_per_batch_element = (num_threads + problem.batch - 1) / std::max<int64_t>(1, problem.batch);
    feature_ranges = std::clamp<int64_t>(problem.features * item_size / kMinFeatureBytesPerBlock, 1,
                                         blocks_per_batch_element);
    const int64_t wanted_segment_ranges = (blocks_per_batch_element + feature_ranges - 1) / feature_ranges;
    segment_ranges = std::clamp<int64_t>(problem.segments, 1, wanted_segment_ranges);
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

template <typename T>
JB_CPU_CLONES void MaxOfBlock(const Problem& problem, const Block& block, const T* data, SegmentIds ids, T* output) {
  const int64_t features = problem.features, width = block.feature_end - block.feature_begin;
  T* const cells = output + block.batch * problem.segments * features + block.feature_begin;
  const T* const rows = data + problem.DataRow(block.batch, 0) * features + block.feature_begin;
  const int64_t first_id = problem.IdIndex(block.batch, 0);
  for (int64_t segment = block.segment_begin; segment < block.segment_end; ++segment) {
    std::fill_n(cells + segment * features, width, MaxIdentity<T>());
  }
  for (int64_t row = 0; row < problem.rows; ++row) {
    if (row + kPrefetchDistance < problem.rows) {
      const int64_t coming = ids[first_id + row + kPrefetchDistance];
      if (coming >= block.segment_begin && coming < block.segment_end) __builtin_prefetch(cells + coming * features, 1);
    }
    const int64_t segment = ids[first_id + row];
    if (segment < block.segment_begin || segment >= block.segment_end) continue;
    T* const cell = cells + segment * features;
    const T* const values = rows + row * features;
    if (width == 1) {
      cell[0] = Larger(cell[0], values[0]);
      continue;
    }
#pragma GCC ivdep
    for (int64_t i = 0; i < width; ++i) cell[i] = Larger(cell[i], values[i]);
  }
}

template <typename T>
JB_CPU_CLONES void MaxAndWinnerOfBlock(const Problem& problem, const Block& block, const T* data, SegmentIds ids,
                                       bool first_wins, T* output, int32_t* winner) {
  const int64_t features = problem.features, width = block.feature_end - block.feature_begin;
  const int64_t first_cell = block.batch * problem.segments * features + block.feature_begin;
  T* const cells = output + first_cell;
  int32_t* const winners = winner + first_cell;
  const T* const rows = data + problem.DataRow(block.batch, 0) * features + block.feature_begin;
  const int64_t first_id = problem.IdIndex(block.batch, 0);
  for (int64_t segment = block.segment_begin; segment < block.segment_end; ++segment) {
    std::fill_n(cells + segment * features, width, MaxIdentity<T>());
    std::fill_n(winners + segment * features, width, kNoWinner);
  }
  for (int64_t row = 0; row < problem.rows; ++row) {
    const int64_t segment = ids[first_id + row];
    if (segment < block.segment_begin || segment >= block.segment_end) continue;
    T* const best = cells + segment * features;
    int32_t* const best_row = winners + segment * features;
    const T* const values = rows + row * features;
#pragma GCC ivdep
    for (int64_t i = 0; i < width; ++i) {
      Cell<T> cell{best[i], best_row[i]};
      AddRow(cell, values[i], static_cast<int32_t>(row), first_wins);
      best[i] = cell.best;
      best_row[i] = cell.winner;
    }
  }
  for (int64_t segment = block.segment_begin; segment < block.segment_end; ++segment) {
    for (int64_t i = segment * features; i < segment * features + width; ++i) {
      winners[i] = FinalWinner(Cell<T>{cells[i], winners[i]});
    }
  }
}

template <typename T>
JB_CPU_CLONES void GradientOfRows(const BackwardBuffers& buffers, int64_t batch, int64_t row_begin, int64_t row_end,
                                  SegmentIds ids, const T* d_output, const int32_t* winner, T* d_data) {
  const Problem& problem = buffers.problem;
  const int64_t features = problem.features, cells_per_batch = problem.segments * features;
  d_output += buffers.d_output_is_shared ? 0 : batch * cells_per_batch;
  const int64_t first_winner = buffers.winner_is_shared ? 0 : batch * cells_per_batch;
  for (int64_t row = row_begin; row < row_end; ++row) {
    T* const d_values = d_data + (batch * problem.rows + row) * features;
    const int64_t segment = ids[problem.IdIndex(batch, row)];
    if (segment < 0 || segment >= problem.segments) {
      std::fill_n(d_values, features, static_cast<T>(ComputeType<T>{0}));
      continue;
    }
    const T* const d_cells = d_output + segment * features;
    const int32_t* const winners = winner + first_winner + segment * features;
    const int32_t this_row = static_cast<int32_t>(row);
    int32_t lowest_winner = 0;
#pragma GCC ivdep
    for (int64_t i = 0; i < features; ++i) {
      d_values[i] = winners[i] == this_row ? d_cells[i] : static_cast<T>(ComputeType<T>{0});
      lowest_winner = std::min(lowest_winner, winners[i]);
    }
    if (!IsTie(lowest_winner) || buffers.data == nullptr) continue;
    const T* const values = static_cast<const T*>(buffers.data) + problem.DataRow(batch, row) * features;
    const T* const maxima = static_cast<const T*>(buffers.output) + first_winner + segment * features;
    for (int64_t i = 0; i < features; ++i) {
      if (IsTie(winners[i])) d_values[i] = TiedGradient(winners[i], values[i], maxima[i], d_cells[i]);
    }
  }
}

ffi::Error Forward(const char* op, ffi::ThreadPool& pool, const ffi::AnyBuffer& data,
                   const ffi::AnyBuffer& segment_ids, const ffi::AnyBuffer& output, const ffi::AnyBuffer* winner,
                   bool first_wins) {
  ForwardBuffers decoded;
  JB_RETURN_IF_ERROR(DecodeForward(op, data, segment_ids, output, winner, &decoded));
  const Problem& problem = decoded.problem;
  const SegmentIds ids{segment_ids.untyped_data(), decoded.ids_are_64_bit};
  const auto run = [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* const values = static_cast<const T*>(data.untyped_data());
    T* const maxima = static_cast<T*>(output.untyped_data());
    const int64_t bytes = problem.batch * (problem.rows + problem.segments) * problem.features * sizeof(T);
    const int64_t num_threads = std::min<int64_t>(ChunksFor(pool, bytes), std::max<int64_t>(1, pool.num_threads()));
    const Blocking blocking(problem, sizeof(T), num_threads);
    ParallelFor(pool, blocking.Count(problem), [&](int64_t index) {
      const Block block = blocking.Get(problem, index);
      if constexpr (kIsFloating<T>) {
        if (decoded.winner != nullptr) {
          MaxAndWinnerOfBlock<T>(problem, block, values, ids, first_wins, maxima, decoded.winner);
          return;
        }
      }
      MaxOfBlock<T>(problem, block, values, ids, maxima);
    });
  };
  const bool supported =
      winner != nullptr ? DispatchFloating(decoded.type, run) : DispatchOrdered(decoded.type, run);
  return supported ? ffi::Error::Success() : UnsupportedType(op, "data", data.element_type());
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
  const Problem& problem = decoded.problem;
  const SegmentIds ids{segment_ids.untyped_data(), decoded.ids_are_64_bit};
  const bool supported = DispatchFloating(decoded.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t bytes_per_batch_element = problem.rows * problem.features * sizeof(T);
    const int64_t chunks = ChunksFor(pool, bytes_per_batch_element);
    ParallelFor(pool, problem.batch * chunks, [&](int64_t index) {
      const int64_t chunk = index % chunks;
      GradientOfRows<T>(decoded, index / chunks, ChunkBegin(problem.rows, chunks, chunk),
                        ChunkBegin(problem.rows, chunks, chunk + 1), ids,
                        static_cast<const T*>(d_output.untyped_data()),
                        static_cast<const int32_t*>(winner.untyped_data()),
                        static_cast<T*>(d_data->untyped_data()));
    });
  });
  return supported ? ffi::Error::Success() : UnsupportedType(kOp, "d_output", d_output.element_type());
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
