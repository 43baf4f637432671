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
#include <type_traits>

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

// ---------------------------------------------------------------------------------------------------------------------
// Kernels.

// For positions with all angles within the limit of IsNear.
template <typename T, typename C>
JB_CPU_CLONES void NearRotations(double position, const double* frequencies, int64_t pairs,
                                 Rotation<AngleType<T>> scale, C* cos, C* sin) {
  JB_VECTORIZE
  for (int64_t i = 0; i < pairs; ++i) {
    const Rotation<C> rotation = Scaled<T>(RotationByNear<T>(position * frequencies[i]), scale);
    cos[i] = rotation.cos;
    sin[i] = rotation.sin;
  }
}

template <typename T, typename C>
void FarRotations(double position, const double* frequencies, int64_t pairs, Rotation<AngleType<T>> scale, C* cos,
                  C* sin) {
  for (int64_t i = 0; i < pairs; ++i) {
    const Rotation<C> rotation = Scaled<T>(RotationByNear<T>(Nearer<T>(position * frequencies[i])), scale);
    cos[i] = rotation.cos;
    sin[i] = rotation.sin;
  }
}

// Two neighbouring 16-bit elements as one word, so that the conversions need no shuffles.
typedef uint32_t PairWord __attribute__((aligned(2), may_alias));

template <typename T>
JB_INLINE float ElementOf(uint32_t half_of_word) {
  T element;
  element.bits = static_cast<uint16_t>(half_of_word);
  return element;
}

template <bool kInterleaved, typename T, typename C>
JB_INLINE void RotateRow(const T* x, int64_t pairs, const C* cos, const C* sin, T* y) {
  if constexpr (!kInterleaved) {
    JB_VECTORIZE
    for (int64_t i = 0; i < pairs; ++i) {
      const C a = static_cast<C>(x[i]), b = static_cast<C>(x[i + pairs]);
      Store(a * cos[i] - b * sin[i], y + i);
      Store(b * cos[i] + a * sin[i], y + i + pairs);
    }
  } else if constexpr (sizeof(T) == sizeof(uint16_t)) {
    const PairWord* const from = reinterpret_cast<const PairWord*>(x);
    PairWord* const to = reinterpret_cast<PairWord*>(y);
    JB_VECTORIZE
    for (int64_t i = 0; i < pairs; ++i) {
      const uint32_t word = from[i];
      const C a = ElementOf<T>(word & 0xffffu), b = ElementOf<T>(word >> 16);
      const uint32_t low = static_cast<T>(a * cos[i] - b * sin[i]).bits;
      const uint32_t high = static_cast<T>(b * cos[i] + a * sin[i]).bits;
      to[i] = low | high << 16;
    }
  } else {
    JB_VECTORIZE
    for (int64_t i = 0; i < pairs; ++i) {
      const C a = x[2 * i], b = x[2 * i + 1];
      y[2 * i] = a * cos[i] - b * sin[i];
      y[2 * i + 1] = b * cos[i] + a * sin[i];
    }
  }
}

// Rotates contiguous rows. The angles of the next row are angle_stride numbers further.
template <bool kInterleaved, typename T, typename C>
JB_CPU_CLONES void RotateRows(const T* x, int64_t rows, int64_t features, int64_t pairs, const C* cos, const C* sin,
                              int64_t angle_stride, T* y) {
  const auto rotate = [&](auto pairs_of_row) __attribute__((always_inline)) {
    for (int64_t row = 0; row < rows; ++row) {
      RotateRow<kInterleaved>(x, pairs_of_row, cos, sin, y);
      if (features > 2 * pairs && y != x) std::memcpy(y + 2 * pairs, x + 2 * pairs, (features - 2 * pairs) * sizeof(T));
      x += features;
      y += features;
      cos += angle_stride;
      sin += angle_stride;
    }
  };
  // Constant sizes for short rows, where the overhead of a loop would be as large as its body.
  if (!DispatchConstant<8, 16, 32>(pairs, rotate)) rotate(pairs);
}

// The same for float16 rows without copied features: converts many numbers at once, and rotates them as float32.
template <bool kInterleaved>
void RotateWidenedRows(const Float16* x, int64_t rows, int64_t features, int64_t pairs, const float* cos,
                       const float* sin, int64_t angle_stride, Float16* y) {
  float numbers[kWidenedAtOnce];
  const int64_t rows_at_once = std::max<int64_t>(kWidenedAtOnce / features, 1);
  for (int64_t begin = 0; begin < rows; begin += rows_at_once) {
    const int64_t count = std::min(rows_at_once, rows - begin), first = begin * features;
    Widen(x + first, count * features, numbers);
    RotateRows<kInterleaved>(numbers, count, features, pairs, cos + begin * angle_stride, sin + begin * angle_stride,
                             angle_stride, numbers);
    Narrow(numbers, count * features, y + first);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// The loops over the kernels.

// Examples are numbered through the whole batch. The examples of a group have the same angles.
template <typename T>
class Kernel {
 public:
  using C = ComputeType<T>;

  Kernel(const Call& call, Strategy strategy)
      : call_(call),
        problem_(call.problem),
        heads_are_rows_(strategy == Strategy::kHeadsOfPosition),
        all_heads_(call.AllHeads()),
        examples_of_group_(ExamplesOfGroup(call)),
        block_length_(std::clamp<int64_t>(kTableBytes / static_cast<int64_t>(2 * sizeof(C)) / call.problem.pairs, 1,
                                          call.problem.length)) {}

  // Returns false if an allocation fails.
  bool Run(ffi::ThreadPool& pool) const {
    const int64_t examples = problem_.batch * problem_.examples;
    const int64_t example_bytes = problem_.length * problem_.features * static_cast<int64_t>(sizeof(T));
    for (int i = 0; i < call_.num_tensors; ++i) {
      const Tensor& tensor = call_.tensors[i];
      if (tensor.y != tensor.x) AdviseHugePages(tensor.y, examples * tensor.heads * example_bytes);
    }
    // If there are fewer blocks of positions than chunks, several chunks share a block, each with its own table.
    const int64_t blocks = CeilDivide(problem_.length, block_length_);
    const int64_t tables = examples / examples_of_group_ * blocks;
    const int64_t runs = examples_of_group_ * RunsOfExample();
    const int64_t wanted_chunks = ChunksFor(pool, examples * all_heads_ * example_bytes);
    const int64_t parts = std::min(CeilDivide(wanted_chunks, tables), runs);
    const int64_t chunks = std::min(wanted_chunks, tables * parts);
    std::atomic<bool> has_memory{true};
    ParallelFor(pool, chunks, [&](int64_t chunk) {
      Angles angles(*this);
      if (!angles.Allocate()) {
        has_memory = false;
        return;
      }
      const int64_t end = ChunkBegin(tables * parts, chunks, chunk + 1);
      for (int64_t index = ChunkBegin(tables * parts, chunks, chunk); index < end; ++index) {
        const int64_t table = index / parts, part = index % parts;
        const int64_t first_example = table / blocks * examples_of_group_;
        const int64_t begin = table % blocks * block_length_;
        const int64_t length = std::min(block_length_, problem_.length - begin);
        angles.Compute(first_example, begin, length);
        const int64_t end_run = ChunkBegin(runs, parts, part + 1);
        for (int64_t run = ChunkBegin(runs, parts, part); run < end_run; ++run) {
          Rotate(first_example + run / RunsOfExample(), run % RunsOfExample(), begin, length, angles);
        }
      }
    });
    return has_memory;
  }

 private:
  // The table of a block of positions.
  class Angles {
   public:
    explicit Angles(const Kernel& kernel) : call_(kernel.call_), block_length_(kernel.block_length_) {}

    // Returns false if an allocation fails.
    bool Allocate() {
      const int64_t pairs = call_.problem.pairs;
      frequencies_ = jax_baracuda::Allocate<double>(pairs);
      table_ = jax_baracuda::Allocate<C>(2 * block_length_ * pairs);
      return frequencies_ != nullptr && table_ != nullptr;
    }

    // For positions [begin, begin + length) of an example.
    void Compute(int64_t example, int64_t begin, int64_t length) {
      const Problem& problem = call_.problem;
      const int64_t batch = example / problem.examples;
      LoadFrequencies(batch);
      for (int64_t i = 0; i < length; ++i) {
        const double position = Position(batch, example % problem.examples, begin + i);
        const bool is_near = IsNear<T>(position * largest_frequency_);  // false for NaN
        C* const cos = table_.get() + 2 * i * problem.pairs;
        (is_near ? NearRotations<T, C> : FarRotations<T, C>)(position, frequencies_.get(), problem.pairs,
                                                             ScaleOf<T>(call_), cos, cos + problem.pairs);
      }
    }

    const C* CosOf(int64_t i) const { return table_.get() + 2 * i * call_.problem.pairs; }
    const C* SinOf(int64_t i) const { return CosOf(i) + call_.problem.pairs; }
    int64_t stride() const { return 2 * call_.problem.pairs; }

   private:
    void LoadFrequencies(int64_t batch) {
      const int64_t row = call_.frequencies.are_shared ? 0 : batch, pairs = call_.problem.pairs;
      if (row == loaded_row_) return;
      const C* const from = static_cast<const C*>(call_.frequencies.data) + row * 2 * pairs;
      largest_frequency_ = 0;
      for (int64_t i = 0; i < pairs; ++i) {
        frequencies_[i] = Frequency(from[i], from[pairs + i]);
        const double size = std::fabs(frequencies_[i]);
        if (size > largest_frequency_ || std::isnan(size)) largest_frequency_ = size;
      }
      loaded_row_ = row;
    }

    double Position(int64_t batch, int64_t example, int64_t i) const {
      const Positions& positions = call_.positions;
      if (positions.data == nullptr) return static_cast<double>(i);
      int64_t row = positions.are_shared_by_batch ? 0 : batch;
      if (!positions.are_shared_by_examples) row = row * call_.problem.examples + example;
      const int64_t index = row * call_.problem.length + i;
      return positions.are_64_bit ? static_cast<double>(static_cast<const int64_t*>(positions.data)[index])
                                  : static_cast<double>(static_cast<const int32_t*>(positions.data)[index]);
    }

    const Call& call_;
    const int64_t block_length_;
    std::unique_ptr<double[]> frequencies_;
    double largest_frequency_ = 0;
    int64_t loaded_row_ = -1;
    std::unique_ptr<C[]> table_;
  };

  static int64_t ExamplesOfGroup(const Call& call) {
    if (!call.ExamplesShareAngles()) return 1;
    return call.problem.examples * (call.BatchSharesAngles() ? call.problem.batch : 1);
  }

  // Runs of contiguous rows: those of one head at the positions of a block, or of all heads of a tensor.
  int64_t RunsOfExample() const { return heads_are_rows_ ? call_.num_tensors : all_heads_; }

  void Rotate(int64_t example, int64_t run, int64_t begin, int64_t length, const Angles& angles) const {
    const Tensor* tensor = call_.tensors;
    if (heads_are_rows_) {
      tensor += run;
    } else if (run >= tensor->heads) {
      run -= tensor->heads;
      ++tensor;
    }
    const int64_t x_example = tensor->is_shared ? example % problem_.examples : example;
    const auto rotate = [&](int64_t row_of_example, int64_t rows, int64_t i, int64_t angle_stride) {
      const int64_t rows_of_example = tensor->heads * problem_.length;
      const int64_t x_row = x_example * rows_of_example + row_of_example;
      const int64_t y_row = example * rows_of_example + row_of_example;
      const T* const x = static_cast<const T*>(tensor->x) + x_row * problem_.features;
      T* const y = static_cast<T*>(tensor->y) + y_row * problem_.features;
      const auto by = [&](auto kernel) {
        kernel(x, rows, problem_.features, problem_.pairs, angles.CosOf(i), angles.SinOf(i), angle_stride, y);
      };
      if constexpr (kIsWidenedAtOnce<T>) {
        if (problem_.features == 2 * problem_.pairs && problem_.features <= kWidenedAtOnce) {
          return by(problem_.interleaved ? RotateWidenedRows<true> : RotateWidenedRows<false>);
        }
      }
      by(problem_.interleaved ? RotateRows<true, T, C> : RotateRows<false, T, C>);
    };
    if (!heads_are_rows_) return rotate(run * problem_.length + begin, length, 0, angles.stride());
    for (int64_t i = 0; i < length; ++i) rotate((begin + i) * tensor->heads, tensor->heads, i, 0);
  }

  const Call& call_;
  const Problem& problem_;
  const bool heads_are_rows_;
  const int64_t all_heads_;
  const int64_t examples_of_group_;
  const int64_t block_length_;
};

ffi::Error Run(ffi::ThreadPool pool, const char* op, const Call& call) {
  const Strategy strategy = ChooseStrategy(call.problem, call.AllHeads());
  if (strategy == Strategy::kNothing) return ffi::Error::Success();
  bool has_memory = true;
  DispatchFloating(call.type,
                   [&](auto tag) { has_memory = Kernel<typename decltype(tag)::type>(call, strategy).Run(pool); });
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
