// The CPU kernels of where and its gradient.
//
// Work is split into blocks that fit the L1 cache. The strategies:
//   blocks: a block of the operands is selected or split by one vectorised loop. Repeated operands are expanded first.
//   sums: the same for the gradient of repeated operands; blocks of a cotangent that is summed are added up.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>

#include "ffi/core/cpu_clones.h"
#include "ffi/core/cpu_kernel.h"
#include "ffi/core/float16_cpu.h"
#include "ffi/core/integers.h"
#include "ffi/core/parallel_for.h"
#include "ffi/core/strategies.h"
#include "ffi/where/where.h"

namespace jax_baracuda::where {
namespace {

constexpr int64_t kBlockBytes = 8192;

template <typename T>
constexpr int64_t kBlockElements = kBlockBytes / static_cast<int64_t>(sizeof(T));

enum class Strategy { kNothing, kBlocks, kSums };

constexpr const char* kStrategyNames[] = {"nothing", "blocks", "sums"};

Strategy ChooseStrategy(const SelectCall& call) { return call.size == 0 ? Strategy::kNothing : Strategy::kBlocks; }

Strategy ChooseStrategy(const SplitCall& call) {
  if (call.num_sums() > 0) return call.sum.results() == 0 ? Strategy::kNothing : Strategy::kSums;
  return call.size == 0 ? Strategy::kNothing : Strategy::kBlocks;
}

// ---------------------------------------------------------------------------------------------------------------------
// Kernels.

template <typename T>
JB_INLINE T Selected(bool condition, T a, T b) {
  return condition ? a : b;
}

JB_INLINE Bytes16 Selected(bool condition, Bytes16 a, Bytes16 b) {
  return {{Selected(condition, a.halves[0], b.halves[0]), Selected(condition, a.halves[1], b.halves[1])}};
}

template <typename T>
JB_CPU_CLONES void SelectBlock(const uint8_t* __restrict cond, const T* __restrict a, const T* __restrict b,
                               int64_t count, T* __restrict output) {
  JB_VECTORIZE
  for (int64_t i = 0; i < count; ++i) {
    const T if_true = a[i], if_false = b[i];
    output[i] = Selected(cond[i] != 0, if_true, if_false);
  }
}

template <typename T>
JB_CPU_CLONES void SplitBlock(const uint8_t* __restrict cond, const T* __restrict d_output, int64_t count,
                              T* __restrict da, T* __restrict db) {
  JB_VECTORIZE
  for (int64_t i = 0; i < count; ++i) {
    const T value = d_output[i];
    da[i] = Selected(cond[i] != 0, value, T{});
    db[i] = Selected(cond[i] != 0, T{}, value);
  }
}

// Rows narrower than this are added several at once, so that vector instructions are full.
constexpr int64_t kAtOnce = 128;

// Adds `outer` contiguous arrays [rows, inner], over their rows, to sums[outer, inner].
template <typename T>
JB_CPU_CLONES void AddArrays(const T* values, int64_t outer, int64_t rows, int64_t inner, ComputeType<T>* sums) {
  using C = ComputeType<T>;
  const int64_t elements = rows * inner, rows_at_once = std::clamp<int64_t>(kAtOnce / inner, 1, rows);
  const int64_t width = rows_at_once * inner;
  for (int64_t i = 0; i < outer; ++i, values += elements, sums += inner) {
    C at_once[kAtOnce];
    C* const to = rows_at_once > 1 ? at_once : sums;
    if (rows_at_once > 1) WriteZeros(at_once, width);
    for (int64_t first = 0; first < elements; first += width) {
      AddNumbers(values + first, std::min(width, elements - first), to);
    }
    if (rows_at_once == 1) continue;
    for (int64_t left = rows_at_once, half; left > 1; left = half) {
      half = (left + 1) / 2;
      for (int64_t column = 0; column < (left - half) * inner; ++column) to[column] += to[half * inner + column];
    }
    for (int64_t column = 0; column < inner; ++column) sums[column] += to[column];
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Operands.

// An operand, block by block. Cheap if blocks are visited in order.
template <typename T>
class Blocks {
 public:
  explicit Blocks(const Operand& operand)
      : data_(static_cast<const T*>(operand.data)),
        repetition_(operand.repetition),
        is_dense_(operand.repetition.IsDense()),
        is_scalar_(operand.repetition.IsScalar()) {
    if (is_scalar_) std::fill_n(buffer_, kBlockElements<T>, *data_);
  }

  // `count` elements, at most kBlockElements<T>, from output element `first` on.
  const T* At(int64_t first, int64_t count) {
    if (is_dense_) return data_ + first;
    if (is_scalar_) return buffer_;
    if (first != next_) Seek(first);
    next_ = first + count;
    const int64_t length = repetition_.size[0], stride = repetition_.stride[1];
    const bool is_contiguous = repetition_.stride[0] != 0;
    for (int64_t done = 0; done < count;) {
      // A part of one row, or whole rows while their stride is constant.
      const int64_t run = std::min(length - index_[0], count - done);
      const int64_t rows = run < length ? 1 : std::min(repetition_.size[1] - index_[1], (count - done) / length);
      const T* from = data_ + offset_ + (is_contiguous ? index_[0] : 0);
      Advance(run, rows);
      if (is_contiguous && run == count) return from;
      T* const to = buffer_ + done;
      done += rows * run;
      if (is_contiguous) {
        for (T* row = to; row < buffer_ + done; row += run, from += stride) {
          std::memcpy(static_cast<void*>(row), from, static_cast<size_t>(run) * sizeof(T));
        }
        continue;
      }
      // Stores of a fixed size are several times faster for short rows. The next row overwrites the excess.
      for (T* row = to; row < buffer_ + done; row += run, from += stride) {
        for (int64_t i = 0; i < run; i += kFewElements) std::fill_n(row + i, kFewElements, *from);
      }
    }
    return buffer_;
  }

 private:
  static constexpr int64_t kFewElements = std::max<int64_t>(1, 16 / sizeof(T));

  void Seek(int64_t element) {
    offset_ = 0;
    for (int i = 0; i < repetition_.rank; ++i) {
      index_[i] = element % repetition_.size[i];
      element /= repetition_.size[i];
      if (i > 0) offset_ += index_[i] * repetition_.stride[i];
    }
  }

  // Moves by a part of a row, or by whole rows of one index of dimension 2.
  void Advance(int64_t run, int64_t rows) {
    index_[0] += run;
    if (index_[0] < repetition_.size[0]) return;
    index_[0] = 0;
    for (int i = 1; i < repetition_.rank; ++i) {
      const int64_t steps = i == 1 ? rows : 1;
      offset_ += steps * repetition_.stride[i];
      index_[i] += steps;
      if (index_[i] < repetition_.size[i]) return;
      offset_ -= repetition_.size[i] * repetition_.stride[i];
      index_[i] = 0;
    }
  }

  const T* data_;
  const Repetition& repetition_;
  const bool is_dense_, is_scalar_;
  int64_t next_ = -1, offset_ = 0;  // the next output element, and the offset of its row in data_
  int64_t index_[kMaxDimensions];   // indices of the next element
  alignas(64) T buffer_[kBlockElements<T> + kFewElements];
};

// Calls body(first, count) for the blocks of a range.
template <typename T, typename Body>
void ForEachBlock(int64_t begin, int64_t end, const Body& body) {
  for (int64_t first = begin; first < end; first += kBlockElements<T>) {
    body(first, std::min(kBlockElements<T>, end - first));
  }
}

template <typename T>
void Select(ffi::ThreadPool& pool, const SelectCall& call) {
  T* const output = static_cast<T*>(call.output);
  const int64_t bytes = call.size * static_cast<int64_t>(sizeof(T));
  // Counts each byte once as work: no other kernel needs so little time per byte.
  ForEachRange(pool, call.size, bytes, [&](int64_t begin, int64_t end) {
    Blocks<T> a(call.a), b(call.b);
    Blocks<uint8_t> cond(call.cond);
    ForEachBlock<T>(begin, end, [&](int64_t first, int64_t count) {
      SelectBlock(cond.At(first, count), a.At(first, count), b.At(first, count), count, output + first);
    });
  });
}

template <typename T>
void Split(ffi::ThreadPool& pool, const SplitCall& call) {
  const T* const d_output = static_cast<const T*>(call.d_output);
  T *const da = static_cast<T*>(call.da), *const db = static_cast<T*>(call.db);
  const int64_t bytes = call.size * static_cast<int64_t>(sizeof(T));
  ForEachRange(pool, call.size, 3 * bytes, [&](int64_t begin, int64_t end) {
    Blocks<uint8_t> cond(call.cond);
    ForEachBlock<T>(begin, end, [&](int64_t first, int64_t count) {
      SplitBlock(cond.At(first, count), d_output + first, count, da + first, db + first);
    });
  });
}

// ---------------------------------------------------------------------------------------------------------------------
// Sums. Work is cut by shapes alone, so the sums are the same for any number of threads.

constexpr int64_t kTile = 1024;                 // columns of long rows that are added up together
constexpr int64_t kMaxParts = 64;               // limits parts * tiles * outer
constexpr int64_t kMinElementsOfPart = 32'768;  // of a tile
constexpr int64_t kRowsOfSum = 256;             // rows added up in the compute type before they are added in double

// The cotangents, number 0 for a and number 1 for b. A summed one has a sum per column of each array [rows, inner] of
// d_output.
template <typename T>
class Sums {
 public:
  using C = ComputeType<T>;

  explicit Sums(const SplitCall& call)
      : call_(call),
        sum_(call.sum),
        is_summed_{call.a_is_summed, call.b_is_summed},
        results_{call.da, call.db},
        bytes_(call.size * static_cast<int64_t>(sizeof(T))) {}

  // Returns false if an allocation fails.
  bool Run(ffi::ThreadPool& pool) {
    if (sum_.rows * sum_.inner > kBlockElements<T>) return RunLong(pool);
    RunShort(pool);
    return true;
  }

 private:
  C* SumsOf(int k) const { return static_cast<C*>(results_[k]); }

  // Splits a block: `outer` arrays [rows, inner] of d_output from element `first` on. sums[k] is [outer, inner].
  void AddBlock(int64_t first, int64_t outer, int64_t rows, int64_t inner, Blocks<uint8_t>* cond,
                C* const (&sums)[2]) const {
    using Number = std::conditional_t<sizeof(T) == sizeof(uint16_t), uint16_t, T>;  // loops over structs are slow
    T buffers[2][kBlockElements<T>];
    T* split[2];
    for (int k = 0; k < 2; ++k) split[k] = is_summed_[k] ? buffers[k] : static_cast<T*>(results_[k]) + first;
    const int64_t count = outer * rows * inner;
    SplitBlock(cond->At(first, count), static_cast<const Number*>(call_.d_output) + first, count,
               reinterpret_cast<Number*>(split[0]), reinterpret_cast<Number*>(split[1]));
    for (int k = 0; k < 2; ++k) {
      if (is_summed_[k]) AddArrays(split[k], outer, rows, inner, sums[k]);
    }
  }

  // For arrays so short that one or more fit in a block.
  void RunShort(ffi::ThreadPool& pool) const {
    const int64_t elements = sum_.rows * sum_.inner, at_once = kBlockElements<T> / std::max<int64_t>(1, elements);
    ForEachRange(pool, sum_.outer, 2 * bytes_, [&](int64_t begin, int64_t end) {
      Blocks<uint8_t> cond(call_.cond);
      for (int64_t outer = begin; outer < end; outer += at_once) {
        const int64_t count = std::min(at_once, end - outer);
        C* const sums[2] = {SumsOf(0) + outer * sum_.inner, SumsOf(1) + outer * sum_.inner};
        for (int k = 0; k < 2; ++k) {
          if (is_summed_[k]) WriteZeros(sums[k], count * sum_.inner);
        }
        if (elements > 0) AddBlock(outer * elements, count, sum_.rows, sum_.inner, &cond, sums);
      }
    });
  }

  // For longer arrays, cut into tiles of columns and parts of rows.
  bool RunLong(ffi::ThreadPool& pool) {
    tiles_ = CeilDivide(sum_.inner, kTile);
    rows_at_once_ = tiles_ > 1 ? 1 : kBlockElements<T> / sum_.inner;
    const int64_t wanted_parts = std::clamp<int64_t>(sum_.rows * std::min(sum_.inner, kTile) / kMinElementsOfPart, 1,
                                                     CeilDivide(kMaxParts, sum_.outer * tiles_));
    rows_of_part_ = RoundUp(CeilDivide(sum_.rows, wanted_parts), rows_at_once_);
    parts_ = CeilDivide(sum_.rows, rows_of_part_);
    const int64_t all_results = 2 * sum_.results();
    const auto partials = Allocate<double>(parts_ == 1 ? 0 : parts_ * all_results);
    if (partials == nullptr) return false;
    ForEachRange(pool, sum_.outer * tiles_ * parts_, 2 * bytes_, [&](int64_t begin, int64_t end) {
      Blocks<uint8_t> cond(call_.cond);
      for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t part = unit % parts_;
        AddPart(unit / parts_ / tiles_, unit / parts_ % tiles_, part, &cond, partials.get() + part * all_results);
      }
    });
    if (parts_ == 1) return true;
    ForEachRange(pool, all_results, parts_ * all_results * 8, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int k = i < sum_.results() ? 0 : 1;
        if (!is_summed_[k]) continue;
        double total = 0;
        for (int64_t part = 0; part < parts_; ++part) total += partials[part * all_results + i];
        SumsOf(k)[i - k * sum_.results()] = static_cast<C>(total);
      }
    });
    return true;
  }

  // Writes the sums of a part to `partials`, or to the results if there is only one part.
  void AddPart(int64_t outer, int64_t tile, int64_t part, Blocks<uint8_t>* cond, double* partials) const {
    const int64_t first_column = ChunkBegin(sum_.inner, tiles_, tile);
    const int64_t columns = ChunkBegin(sum_.inner, tiles_, tile + 1) - first_column;
    const int64_t end = std::min(sum_.rows, (part + 1) * rows_of_part_);
    double totals[2][kTile] = {};
    for (int64_t row = part * rows_of_part_; row < end;) {
      C numbers[2][kTile] = {};
      C* const sums[2] = {numbers[0], numbers[1]};
      const int64_t end_of_sum = std::min(end, row + std::max(rows_at_once_, kRowsOfSum));
      for (int64_t rows; row < end_of_sum; row += rows) {
        rows = std::min(rows_at_once_, end_of_sum - row);
        AddBlock((outer * sum_.rows + row) * sum_.inner + first_column, /*outer=*/1, rows, columns, cond, sums);
      }
      for (int k = 0; k < 2; ++k) {
        for (int64_t i = 0; i < columns; ++i) totals[k][i] += static_cast<double>(numbers[k][i]);
      }
    }
    for (int k = 0; k < 2; ++k) {
      if (!is_summed_[k]) continue;
      const int64_t first = outer * sum_.inner + first_column;
      if (parts_ == 1) {
        std::transform(totals[k], totals[k] + columns, SumsOf(k) + first, [](double x) { return static_cast<C>(x); });
      } else {
        std::copy_n(totals[k], columns, partials + k * sum_.results() + first);
      }
    }
  }

  const SplitCall& call_;
  const Sum& sum_;
  const bool is_summed_[2];
  void* const results_[2];
  const int64_t bytes_;
  int64_t tiles_ = 1, rows_at_once_ = 1, rows_of_part_ = 1, parts_ = 1;
};

}  // namespace

std::vector<const char*> SelectCall::Strategies() {
  return NamesOf(kStrategyNames, Strategy::kNothing, Strategy::kBlocks);
}

Plan SelectCall::MakePlan() const { return {NameOf(kStrategyNames, ChooseStrategy(*this))}; }

bool SelectCall::Run(ffi::ThreadPool& pool) const {
  if (ChooseStrategy(*this) == Strategy::kNothing) return true;
  DispatchBytes(element_bytes, [&](auto tag) { Select<typename decltype(tag)::type>(pool, *this); });
  return true;
}

std::vector<const char*> SplitCall::Strategies() { return {JB_NAMES(kStrategyNames)}; }

Plan SplitCall::MakePlan() const { return {NameOf(kStrategyNames, ChooseStrategy(*this))}; }

bool SplitCall::Run(ffi::ThreadPool& pool) const {
  if (ChooseStrategy(*this) == Strategy::kNothing) return true;
  if (num_sums() == 0) {
    DispatchBytes(element_bytes, [&](auto tag) { Split<typename decltype(tag)::type>(pool, *this); });
    return true;
  }
  return DispatchOr(true, type, JB_DISPATCH(DispatchFloating),
                    [&](auto tag) { return Sums<typename decltype(tag)::type>(*this).Run(pool); });
}

}  // namespace jax_baracuda::where
