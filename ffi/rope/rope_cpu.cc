// The CPU kernels of rope.
//
// Sines and cosines of a block of positions are computed once, into a table that fits the L1 or L2 cache. All heads of
// all examples with these positions use the table.

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "ffi/core/cpu_kernel.h"
#include "ffi/core/integers.h"
#include "ffi/core/parallel_for.h"
#include "ffi/core/strategies.h"
#include "ffi/rope/rope.h"
#include "ffi/rope/rows_cpu.h"

namespace jax_baracuda::rope {
namespace {

constexpr int64_t kTableBytes = 32 * 1024;

enum class Strategy {
  kNothing,
  kHeadsOfPosition,  // contiguous rows are the heads of one position, which share their angles
  kPositionsOfHead,  // contiguous rows are the positions of one head
};

constexpr const char* kStrategyNames[] = {"nothing", "heads_of_position", "positions_of_head"};

Strategy Choose(const Call& call) {
  if (call.HasNoElement()) return Strategy::kNothing;
  return call.problem.heads_first && call.problem.length > 1 ? Strategy::kPositionsOfHead : Strategy::kHeadsOfPosition;
}

// Rotates all tensors. Returns false if an allocation fails. Examples are numbered through the whole batch.
template <typename T>
bool RotateAll(ffi::ThreadPool& pool, const Call& call, Strategy strategy) {
  using C = ComputeType<T>;
  const Problem& problem = call.problem;
  const bool heads_are_rows = strategy == Strategy::kHeadsOfPosition;
  const int64_t examples = problem.batch * problem.examples, features = problem.features;
  const int64_t bytes_of_head = problem.length * features * static_cast<int64_t>(sizeof(T));
  // The examples of a group have the same angles.
  const int64_t examples_of_group = !call.ExamplesShareAngles() ? 1
                                    : call.BatchSharesAngles()  ? examples
                                                                : problem.examples;
  const int64_t block_length =
      std::clamp<int64_t>(kTableBytes / static_cast<int64_t>(2 * sizeof(C)) / problem.pairs, 1, problem.length);
  const int64_t blocks = CeilDivide(problem.length, block_length), tables = examples / examples_of_group * blocks;
  // Runs of contiguous rows: those of one head at the positions of a block, or of all heads of a tensor.
  const int64_t runs_of_example = heads_are_rows ? call.num_tensors : call.AllHeads();
  const int64_t runs = examples_of_group * runs_of_example;
  // If there are fewer tables than chunks, several chunks share a block, each with its own table.
  const int64_t wanted_chunks = ChunksFor(pool, examples * call.AllHeads() * bytes_of_head);
  const int64_t parts = std::min(CeilDivide(wanted_chunks, tables), runs);
  const int64_t chunks = std::min(wanted_chunks, tables * parts);
  const RotatedPart part_of_row{features, problem.pairs, problem.first_rotated};

  const auto rotate_run = [&](int64_t example, int64_t run, int64_t begin, int64_t length, const Table<T>& table) {
    const Tensor* tensor = call.tensors;
    if (heads_are_rows) {
      tensor += run;
    } else if (run >= tensor->heads) {
      run -= tensor->heads;
      ++tensor;
    }
    const int64_t rows_of_example = tensor->heads * problem.length;
    const int64_t x_example = tensor->x.is_shared ? example % problem.examples : example;
    const T* const x = static_cast<const T*>(tensor->x.data) + x_example * rows_of_example * features;
    T* const y = static_cast<T*>(tensor->y) + example * rows_of_example * features;
    const auto rotate = [&](int64_t first_row, int64_t rows, int64_t i, int64_t angle_stride) {
      RotateRows(problem.interleaved, x + first_row * features, rows, part_of_row, table.At(i), angle_stride,
                 y + first_row * features);
    };
    if (!heads_are_rows) return rotate(run * problem.length + begin, length, 0, table.stride());
    for (int64_t i = 0; i < length; ++i) rotate((begin + i) * tensor->heads, tensor->heads, i, 0);
  };
  std::atomic<bool> has_memory{true};
  ParallelFor(pool, chunks, [&](int64_t chunk) {
    Table<T> table(problem, call.frequencies, call.positions, ScaleOf<T>(call), block_length);
    if (!table.has_memory()) {
      has_memory = false;
      return;
    }
    const int64_t end = ChunkBegin(tables * parts, chunks, chunk + 1);
    for (int64_t index = ChunkBegin(tables * parts, chunks, chunk); index < end; ++index) {
      const int64_t part = index % parts, block = index / parts % blocks;
      const int64_t first_example = index / parts / blocks * examples_of_group;
      const int64_t begin = block * block_length, length = std::min(block_length, problem.length - begin);
      table.Compute(first_example, begin, length);
      const int64_t end_run = ChunkBegin(runs, parts, part + 1);
      for (int64_t run = ChunkBegin(runs, parts, part); run < end_run; ++run) {
        rotate_run(first_example + run / runs_of_example, run % runs_of_example, begin, length, table);
      }
    }
  });
  return has_memory;
}

}  // namespace

std::vector<const char*> Call::Strategies() { return {JB_NAMES(kStrategyNames)}; }

Plan Call::MakePlan() const { return {NameOf(kStrategyNames, Choose(*this))}; }

bool Call::Run(ffi::ThreadPool& pool) const {
  const Strategy strategy = Choose(*this);
  if (strategy == Strategy::kNothing) return true;
  return DispatchOr(true, type, JB_DISPATCH(DispatchFloating),
                    [&](auto tag) { return RotateAll<typename decltype(tag)::type>(pool, *this, strategy); });
}

}  // namespace jax_baracuda::rope
