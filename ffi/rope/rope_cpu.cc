// The CPU kernels of rope.
//
// Sines and cosines of a block of positions are computed once, into a table that fits the L1 or L2 cache. All heads of
// all examples with these positions use the table.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>

#include "ffi/core/cpu_clones.h"
#include "ffi/core/cpu_kernel.h"
#include "ffi/core/float16_cpu.h"
#include "ffi/core/huge_pages.h"
#include "ffi/core/integers.h"
#include "ffi/core/parallel_for.h"
#include "ffi/core/strategies.h"
#include "ffi/core/target_table.h"
#include "ffi/rope/rope.h"
#include "ffi/rope/rope_handler.h"

namespace jax_baracuda::rope {
namespace {

constexpr int64_t kTableBytes = 32 * 1024;

enum class Strategy {
  kNothing,
  kHeadsOfPosition,  // contiguous rows are the heads of one position, which share their angles
  kPositionsOfHead,  // contiguous rows are the positions of one head
};

constexpr const char* kStrategyNames[] = {"nothing", "heads_of_position", "positions_of_head"};

Strategy ChooseStrategy(const Problem& problem, int64_t all_heads) {
  if (problem.HasNoElement(all_heads)) return Strategy::kNothing;
  return problem.heads_first && problem.length > 1 ? Strategy::kPositionsOfHead : Strategy::kHeadsOfPosition;
}

// The cosines, then the sines, of one position. `angles` is a buffer. `are_near`: all angles are within the limit of
// IsNear.
template <typename T>
JB_CPU_CLONES void ComputeRotations(double position, const double* frequencies, int64_t pairs, bool are_near,
                                    Rotation<AngleType<T>> scale, double* angles, ComputeType<T>* cos_sin) {
  JB_VECTORIZE
  for (int64_t i = 0; i < pairs; ++i) angles[i] = position * frequencies[i];
  for (int64_t i = 0; !are_near && i < pairs; ++i) angles[i] = Nearer<T>(angles[i]);
  JB_VECTORIZE
  for (int64_t i = 0; i < pairs; ++i) {
    const Rotation<ComputeType<T>> rotation = Scaled<T>(RotationByNear<T>(angles[i]), scale);
    cos_sin[i] = rotation.cos;
    cos_sin[pairs + i] = rotation.sin;
  }
}

// The sines and cosines of a block of positions.
template <typename T>
class Table {
 public:
  using C = ComputeType<T>;

  Table(const Call& call, int64_t max_length)
      : call_(call),
        pairs_(call.problem.pairs),
        frequencies_(Allocate<double>(pairs_)),
        angles_(Allocate<double>(pairs_)),
        numbers_(Allocate<C>(2 * max_length * pairs_)) {}

  bool has_memory() const { return frequencies_ != nullptr && angles_ != nullptr && numbers_ != nullptr; }

  // For positions [begin, begin + length) of an example.
  void Compute(int64_t example, int64_t begin, int64_t length) {
    const Problem& problem = call_.problem;
    const int64_t batch = example / problem.examples;
    LoadFrequencies(batch);
    const Positions& positions = call_.positions;
    const int64_t first =
        PositionsOf(positions, batch, problem.examples, example % problem.examples) * problem.length + begin;
    for (int64_t i = 0; i < length; ++i) {
      const double position = positions.data == nullptr ? static_cast<double>(begin + i)
                              : positions.are_64_bit
                                  ? static_cast<double>(static_cast<const int64_t*>(positions.data)[first + i])
                                  : static_cast<double>(static_cast<const int32_t*>(positions.data)[first + i]);
      const bool are_near = IsNear<T>(position * largest_frequency_);  // false for NaN
      ComputeRotations<T>(position, frequencies_.get(), pairs_, are_near, ScaleOf<T>(call_), angles_.get(),
                          numbers_.get() + i * stride());
    }
  }

  // The cosines of a position, followed by its sines.
  const C* At(int64_t i) const { return numbers_.get() + i * stride(); }
  int64_t stride() const { return 2 * pairs_; }

 private:
  void LoadFrequencies(int64_t batch) {
    const int64_t row = call_.frequencies.are_shared ? 0 : batch;
    if (row == loaded_row_) return;
    const C* const from = static_cast<const C*>(call_.frequencies.data) + row * 2 * pairs_;
    largest_frequency_ = 0;
    for (int64_t i = 0; i < pairs_; ++i) {
      frequencies_[i] = Frequency(from[i], from[pairs_ + i]);
      const double size = std::fabs(frequencies_[i]);
      if (size > largest_frequency_ || std::isnan(size)) largest_frequency_ = size;
    }
    loaded_row_ = row;
  }

  const Call& call_;
  const int64_t pairs_;
  const std::unique_ptr<double[]> frequencies_, angles_;
  const std::unique_ptr<C[]> numbers_;
  double largest_frequency_ = 0;
  int64_t loaded_row_ = -1;
};

// Two neighbouring 16-bit elements as one word, so that the conversions need no shuffles.
typedef uint32_t PairWord __attribute__((aligned(2), may_alias));

template <typename T>
JB_INLINE float ElementOf(uint32_t half_of_word) {
  T element;
  element.bits = static_cast<uint16_t>(half_of_word);
  return element;
}

template <bool kInterleaved, typename T, typename C>
JB_INLINE void RotateRow(const T* x, int64_t pairs, const C* cos, T* y) {
  const C* const sin = cos + pairs;
  if constexpr (!kInterleaved) {
    JB_VECTORIZE
    for (int64_t i = 0; i < pairs; ++i) {
      C a = static_cast<C>(x[i]), b = static_cast<C>(x[i + pairs]);
      Rotate(cos[i], sin[i], &a, &b);
      Store(a, y + i);
      Store(b, y + i + pairs);
    }
  } else if constexpr (sizeof(T) == sizeof(uint16_t)) {
    const PairWord* const from = reinterpret_cast<const PairWord*>(x);
    PairWord* const to = reinterpret_cast<PairWord*>(y);
    JB_VECTORIZE
    for (int64_t i = 0; i < pairs; ++i) {
      const uint32_t word = from[i];
      C a = ElementOf<T>(word & 0xffffu), b = ElementOf<T>(word >> 16);
      Rotate(cos[i], sin[i], &a, &b);
      const uint32_t low = static_cast<T>(a).bits, high = static_cast<T>(b).bits;
      to[i] = low | high << 16;
    }
  } else {
    JB_VECTORIZE
    for (int64_t i = 0; i < pairs; ++i) {
      C a = x[2 * i], b = x[2 * i + 1];
      Rotate(cos[i], sin[i], &a, &b);
      y[2 * i] = a;
      y[2 * i + 1] = b;
    }
  }
}

// Rotates contiguous rows. The angles of the next row are angle_stride numbers further.
template <bool kInterleaved, typename T, typename C>
JB_CPU_CLONES void RotateRows(const T* x, int64_t rows, int64_t features, int64_t pairs, const C* cos_sin,
                              int64_t angle_stride, T* y) {
  const auto rotate = [&](auto pairs_of_row) __attribute__((always_inline)) {
    for (int64_t row = 0; row < rows; ++row) {
      RotateRow<kInterleaved>(x, pairs_of_row, cos_sin, y);
      if (features > 2 * pairs && y != x) std::memcpy(y + 2 * pairs, x + 2 * pairs, (features - 2 * pairs) * sizeof(T));
      x += features;
      y += features;
      cos_sin += angle_stride;
    }
  };
  // Constant sizes for short rows, where the overhead of a loop would be as large as its body.
  if (!DispatchConstant<8, 16, 32>(pairs, rotate)) rotate(pairs);
}

// The same. Rows of float16 without copied features are converted many at once, and rotated as float32.
template <bool kInterleaved, typename T>
void RotateAnyRows(const T* x, int64_t rows, int64_t features, int64_t pairs, const ComputeType<T>* cos_sin,
                   int64_t angle_stride, T* y) {
  if constexpr (kIsWidenedAtOnce<T>) {
    if (features == 2 * pairs && features <= kWidenedAtOnce) {
      float numbers[kWidenedAtOnce];
      const int64_t rows_at_once = kWidenedAtOnce / features;
      for (int64_t begin = 0; begin < rows; begin += rows_at_once) {
        const int64_t count = std::min(rows_at_once, rows - begin), first = begin * features;
        Widen(x + first, count * features, numbers);
        RotateRows<kInterleaved>(numbers, count, features, pairs, cos_sin + begin * angle_stride, angle_stride,
                                 numbers);
        Narrow(numbers, count * features, y + first);
      }
      return;
    }
  }
  RotateRows<kInterleaved>(x, rows, features, pairs, cos_sin, angle_stride, y);
}

// Rotates all tensors. Returns false if an allocation fails. Examples are numbered through the whole batch.
template <typename T>
bool RotateAll(ffi::ThreadPool& pool, const Call& call, Strategy strategy) {
  using C = ComputeType<T>;
  const Problem& problem = call.problem;
  const bool heads_are_rows = strategy == Strategy::kHeadsOfPosition;
  const int64_t examples = problem.batch * problem.examples, features = problem.features;
  const int64_t bytes_of_head = problem.length * features * static_cast<int64_t>(sizeof(T));
  for (int i = 0; i < call.num_tensors; ++i) {
    const Tensor& tensor = call.tensors[i];
    if (tensor.y != tensor.x) AdviseHugePages(tensor.y, examples * tensor.heads * bytes_of_head);
  }
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
  const auto rotate_rows = problem.interleaved ? RotateAnyRows<true, T> : RotateAnyRows<false, T>;

  const auto rotate_run = [&](int64_t example, int64_t run, int64_t begin, int64_t length, const Table<T>& table) {
    const Tensor* tensor = call.tensors;
    if (heads_are_rows) {
      tensor += run;
    } else if (run >= tensor->heads) {
      run -= tensor->heads;
      ++tensor;
    }
    const int64_t rows_of_example = tensor->heads * problem.length;
    const int64_t x_example = tensor->is_shared ? example % problem.examples : example;
    const T* const x = static_cast<const T*>(tensor->x) + x_example * rows_of_example * features;
    T* const y = static_cast<T*>(tensor->y) + example * rows_of_example * features;
    const auto rotate = [&](int64_t first_row, int64_t rows, int64_t i, int64_t angle_stride) {
      rotate_rows(x + first_row * features, rows, features, problem.pairs, table.At(i), angle_stride,
                  y + first_row * features);
    };
    if (!heads_are_rows) return rotate(run * problem.length + begin, length, 0, table.stride());
    for (int64_t i = 0; i < length; ++i) rotate((begin + i) * tensor->heads, tensor->heads, i, 0);
  };
  std::atomic<bool> has_memory{true};
  ParallelFor(pool, chunks, [&](int64_t chunk) {
    Table<T> table(call, block_length);
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

ffi::Error Run(ffi::ThreadPool pool, const char* op, const Call& call) {
  const Strategy strategy = ChooseStrategy(call.problem, call.AllHeads());
  if (strategy == Strategy::kNothing) return ffi::Error::Success();
  bool has_memory = true;
  DispatchFloating(call.type,
                   [&](auto tag) { has_memory = RotateAll<typename decltype(tag)::type>(pool, call, strategy); });
  return MemoryStatus(op, has_memory);
}

Plan PlanRope(const PlanParameters& parameters) {
  return Plan{NameOf(kStrategyNames, ChooseStrategy(ProblemOf(parameters), parameters.at("heads")))};
}

JB_CPU_TARGET("rope", (HandleRope<ffi::ThreadPool, Run, false>), BindRope<ffi::ThreadPool>(), PlanRope,
              JB_NAMES(kStrategyNames));
JB_CPU_TARGET("rope_backward", (HandleRope<ffi::ThreadPool, Run, true>), BindRope<ffi::ThreadPool>(), PlanRope,
              JB_NAMES(kStrategyNames));
JB_CPU_TARGET("rope_qk", (HandleRopeQk<ffi::ThreadPool, Run, false>), BindRopeQk<ffi::ThreadPool>(), PlanRope,
              JB_NAMES(kStrategyNames));
JB_CPU_TARGET("rope_qk_backward", (HandleRopeQk<ffi::ThreadPool, Run, true>), BindRopeQk<ffi::ThreadPool>(), PlanRope,
              JB_NAMES(kStrategyNames));

}  // namespace
}  // namespace jax_baracuda::rope
