// The CPU kernels of where and its gradient.
//
// Work is split into blocks that fit the L1 cache. Repeated operands are expanded block by block, so that one
// vectorised loop handles all of them.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>

#include "ffi/core/bit_cast.h"
#include "ffi/core/cpu_clones.h"
#include "ffi/core/cpu_kernel.h"
#include "ffi/core/huge_pages.h"
#include "ffi/core/integers.h"
#include "ffi/core/parallel_for.h"
#include "ffi/core/strategies.h"
#include "ffi/core/target_table.h"
#include "ffi/where/where.h"
#include "ffi/where/where_handler.h"

namespace jax_baracuda::where {
namespace {

constexpr int64_t kBlockBytes = 8192;

template <typename T>
constexpr int64_t kBlockElements = kBlockBytes / static_cast<int64_t>(sizeof(T));

enum class Strategy {
  kNothing,
  kDense,      // all operands have the shape of the result
  kBroadcast,  // some operand is expanded
  kSums,
};

constexpr const char* kStrategyNames[] = {"nothing", "dense", "broadcast", "sums"};
constexpr int kSelectStrategies = 3;  // the first three: those of where

Strategy ChooseStrategy(const SelectCall& call) {
  if (call.size == 0) return Strategy::kNothing;
  const bool are_dense = call.a.repetition.IsDense() && call.b.repetition.IsDense() && call.cond.repetition.IsDense();
  return are_dense ? Strategy::kDense : Strategy::kBroadcast;
}

Strategy ChooseStrategy(const SplitCall& call) {
  if (call.num_sums() > 0) return call.sum.results() == 0 ? Strategy::kNothing : Strategy::kSums;
  if (call.size == 0) return Strategy::kNothing;
  return call.cond.repetition.IsDense() ? Strategy::kDense : Strategy::kBroadcast;
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
JB_CPU_CLONES void SplitBlock(const uint8_t* __restrict cond, const T* __restrict dy, int64_t count, T* __restrict da,
                              T* __restrict db) {
  JB_VECTORIZE
  for (int64_t i = 0; i < count; ++i) {
    const T value = dy[i];
    da[i] = Selected(cond[i] != 0, value, T{});
    db[i] = Selected(cond[i] != 0, T{}, value);
  }
}

// Adds dy[i], if it is chosen, to sums[i]. The rest (0 if dy[i] is chosen, otherwise dy[i]) is added to other_sums[i]
// if kBothSummed, and otherwise stored to other[i].
template <typename T, bool kBothSummed>
JB_INLINE void AddElements(const uint8_t* __restrict cond, bool inverted, const T* __restrict dy, int64_t count,
                           ComputeType<T>* __restrict sums, ComputeType<T>* __restrict other_sums,
                           T* __restrict other) {
  using C = ComputeType<T>;
  using Bits = BitsOf<T>;
  JB_VECTORIZE
  for (int64_t i = 0; i < count; ++i) {
    const Bits value = BitCast<Bits>(dy[i]);
    const bool is_chosen = (cond[i] != 0) != inverted;
    sums[i] += static_cast<C>(BitCast<T>(Selected(is_chosen, value, Bits{})));
    const Bits rest = Selected(is_chosen, Bits{}, value);
    if constexpr (kBothSummed) {
      other_sums[i] += static_cast<C>(BitCast<T>(rest));
    } else {
      std::memcpy(other + i, &rest, sizeof(rest));
    }
  }
}

// Narrow rows are added several at once, so that vector instructions are full. Longer arrays use more numbers at once.
constexpr int64_t kMinAtOnce = 16, kMaxAtOnce = 256;

// Adds `outer` contiguous arrays [rows, inner], over their rows, to sums[outer, inner]; likewise other_sums.
template <typename T, bool kBothSummed>
JB_CPU_CLONES void AddArrays(const uint8_t* cond, bool inverted, const T* dy, int64_t outer, int64_t rows,
                             int64_t inner, ComputeType<T>* sums, ComputeType<T>* other_sums, T* other) {
  using C = ComputeType<T>;
  const int64_t elements = rows * inner, wanted = std::clamp(elements / 8, kMinAtOnce, kMaxAtOnce);
  const int64_t rows_at_once = elements < kMinAtOnce ? 1 : std::clamp<int64_t>(wanted / inner, 1, rows);
  const auto add = [&](auto width, C* to, C* other_to) __attribute__((always_inline)) {
    for (int64_t first = 0; first < elements; first += width) {
      AddElements<T, kBothSummed>(cond + first, inverted, dy + first, std::min<int64_t>(width, elements - first), to,
                                  other_to, kBothSummed ? nullptr : other + first);
    }
  };
  for (int64_t i = 0; i < outer; ++i) {
    if (rows_at_once > 1) {
      C at_once[2][kMaxAtOnce];
      const int64_t width = rows_at_once * inner;
      for (int k = 0; k < (kBothSummed ? 2 : 1); ++k) std::fill_n(at_once[k], width, C{0});
      add(width, at_once[0], at_once[1]);
      for (int k = 0; k < (kBothSummed ? 2 : 1); ++k) {
        for (int64_t left = rows_at_once; left > 1;) {
          const int64_t half = (left + 1) / 2;
          for (int64_t column = 0; column < (left - half) * inner; ++column) {
            at_once[k][column] += at_once[k][half * inner + column];
          }
          left = half;
        }
        for (int64_t column = 0; column < inner; ++column) (k == 0 ? sums : other_sums)[column] += at_once[k][column];
      }
    } else if (inner == 1) {
      add(std::integral_constant<int64_t, 1>{}, sums, other_sums);
    } else {
      add(inner, sums, other_sums);
    }
    cond += elements;
    dy += elements;
    sums += inner;
    if (kBothSummed) {
      other_sums += inner;
    } else {
      other += elements;
    }
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
  AdviseHugePages(output, bytes);
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
  const T* const dy = static_cast<const T*>(call.dy);
  T *const da = static_cast<T*>(call.da), *const db = static_cast<T*>(call.db);
  const int64_t bytes = call.size * static_cast<int64_t>(sizeof(T));
  AdviseHugePages(da, bytes);
  AdviseHugePages(db, bytes);
  ForEachRange(pool, call.size, 3 * bytes, [&](int64_t begin, int64_t end) {
    Blocks<uint8_t> cond(call.cond);
    ForEachBlock<T>(begin, end, [&](int64_t first, int64_t count) {
      SplitBlock(cond.At(first, count), dy + first, count, da + first, db + first);
    });
  });
}

// ---------------------------------------------------------------------------------------------------------------------
// Sums. Work is cut by shapes alone, so the sums are the same for any number of threads.

constexpr int64_t kTile = 1024;                 // columns of long rows that are added up together
constexpr int64_t kMaxParts = 64;               // limits parts * tiles * outer
constexpr int64_t kMinElementsOfPart = 32'768;  // of a tile
constexpr int64_t kRowsOfSum = 256;             // rows added up in the compute type before they are added in double

template <typename T>
class Sums {
 public:
  using C = ComputeType<T>;

  explicit Sums(const SplitCall& call)
      : call_(call),
        sum_(call.sum),
        both_are_summed_(call.num_sums() == 2),
        first_sums_(static_cast<C*>(call.a_is_summed ? call.da : call.db)),
        second_sums_(both_are_summed_ ? static_cast<C*>(call.db) : nullptr),
        other_(static_cast<T*>(both_are_summed_   ? nullptr
                               : call.a_is_summed ? call.db
                                                  : call.da)),
        bytes_(call.size * static_cast<int64_t>(sizeof(T))) {}

  // Returns false if an allocation fails.
  bool Run(ffi::ThreadPool& pool) {
    if (!both_are_summed_) AdviseHugePages(other_, bytes_);
    if (sum_.rows * sum_.inner > kBlockElements<T>) return RunParts(pool);
    RunBlocks(pool);
    return true;
  }

 private:
  // Adds arrays of dy from element `first` on. `flags` are their elements of the condition.
  void Add(const uint8_t* flags, int64_t first, int64_t outer, int64_t rows, int64_t inner, C* sums,
           C* other_sums) const {
    const T* const dy = static_cast<const T*>(call_.dy) + first;
    if (both_are_summed_) {
      AddArrays<T, true>(flags, false, dy, outer, rows, inner, sums, other_sums, nullptr);
    } else {
      AddArrays<T, false>(flags, !call_.a_is_summed, dy, outer, rows, inner, sums, nullptr, other_ + first);
    }
  }

  // For arrays so short that one or more fit in a block.
  void RunBlocks(ffi::ThreadPool& pool) {
    const int64_t elements = sum_.rows * sum_.inner, at_once = kBlockElements<T> / std::max<int64_t>(1, elements);
    ForEachRange(pool, sum_.outer, 2 * bytes_, [&](int64_t begin, int64_t end) {
      Blocks<uint8_t> cond(call_.cond);
      for (int64_t outer = begin; outer < end; outer += at_once) {
        const int64_t count = std::min(at_once, end - outer), first = outer * elements, result = outer * sum_.inner;
        C* const other_sums = both_are_summed_ ? second_sums_ + result : nullptr;
        WriteZeros(first_sums_ + result, count * sum_.inner);
        if (both_are_summed_) WriteZeros(other_sums, count * sum_.inner);
        if (elements == 0) continue;
        Add(cond.At(first, count * elements), first, count, sum_.rows, sum_.inner, first_sums_ + result, other_sums);
      }
    });
  }

  // For longer arrays, cut into tiles of columns and parts of rows.
  bool RunParts(ffi::ThreadPool& pool) {
    tiles_ = CeilDivide(sum_.inner, kTile);
    rows_at_once_ = tiles_ > 1 ? 1 : kBlockElements<T> / sum_.inner;
    const int64_t all_results = call_.num_sums() * sum_.results();
    const int64_t wanted_parts = std::clamp<int64_t>(sum_.rows * std::min(sum_.inner, kTile) / kMinElementsOfPart, 1,
                                                     CeilDivide(kMaxParts, sum_.outer * tiles_));
    rows_of_part_ = RoundUp(CeilDivide(sum_.rows, wanted_parts), rows_at_once_);
    parts_ = CeilDivide(sum_.rows, rows_of_part_);
    const std::unique_ptr<double[]> partials = Allocate<double>(parts_ == 1 ? 0 : parts_ * all_results);
    if (partials == nullptr) return false;
    ForEachRange(pool, sum_.outer * tiles_ * parts_, 2 * bytes_, [&](int64_t begin, int64_t end) {
      Blocks<uint8_t> cond(call_.cond);
      for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t part = unit % parts_;
        AddPart(unit / parts_ / tiles_, unit / parts_ % tiles_, part, partials.get() + part * all_results, &cond);
      }
    });
    if (parts_ == 1) return true;
    ForEachRange(pool, all_results, parts_ * all_results * 8, [&](int64_t begin, int64_t end) {
      for (int64_t result = begin; result < end; ++result) {
        double total = 0;
        for (int64_t part = 0; part < parts_; ++part) total += partials[part * all_results + result];
        Write(result, total);
      }
    });
    return true;
  }

  void AddPart(int64_t outer, int64_t tile, int64_t part, double* partials, Blocks<uint8_t>* cond) {
    const int64_t first_column = ChunkBegin(sum_.inner, tiles_, tile);
    const int64_t columns = ChunkBegin(sum_.inner, tiles_, tile + 1) - first_column;
    const int64_t end = std::min(sum_.rows, (part + 1) * rows_of_part_);
    C sums[2][kTile];
    double totals[2][kTile];
    for (int k = 0; k < call_.num_sums(); ++k) WriteZeros(totals[k], columns);
    for (int64_t row = part * rows_of_part_; row < end;) {
      const int64_t end_of_sum = std::min(end, row + std::max(rows_at_once_, kRowsOfSum));
      for (int k = 0; k < call_.num_sums(); ++k) WriteZeros(sums[k], columns);
      for (; row < end_of_sum; row += rows_at_once_) {
        const int64_t rows = std::min(rows_at_once_, end_of_sum - row);
        const int64_t first = (outer * sum_.rows + row) * sum_.inner + first_column;
        Add(cond->At(first, rows * columns), first, /*outer=*/1, rows, columns, sums[0], sums[1]);
      }
      row = end_of_sum;
      for (int k = 0; k < call_.num_sums(); ++k) {
        for (int64_t i = 0; i < columns; ++i) totals[k][i] += sums[k][i];
      }
    }
    for (int k = 0; k < call_.num_sums(); ++k) {
      const int64_t first_result = (k * sum_.outer + outer) * sum_.inner + first_column;
      for (int64_t i = 0; i < columns; ++i) {
        if (parts_ == 1) {
          Write(first_result + i, totals[k][i]);
        } else {
          partials[first_result + i] = totals[k][i];
        }
      }
    }
  }

  void Write(int64_t result, double total) const {
    const int64_t results = sum_.results();
    (result < results ? first_sums_[result] : second_sums_[result - results]) = static_cast<C>(total);
  }

  const SplitCall& call_;
  const Sum& sum_;
  const bool both_are_summed_;
  C *const first_sums_, *const second_sums_;
  T* const other_;
  const int64_t bytes_;
  int64_t tiles_ = 1, rows_at_once_ = 1, rows_of_part_ = 1, parts_ = 1;
};

// ---------------------------------------------------------------------------------------------------------------------
// The handlers.

ffi::Error SelectHandler(ffi::ThreadPool pool, ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::AnyBuffer cond,
                         ffi::Result<ffi::AnyBuffer> output) {
  SelectCall call;
  JB_RETURN_IF_ERROR(DecodeSelect("where", a, b, cond, *output, &call));
  if (ChooseStrategy(call) == Strategy::kNothing) return ffi::Error::Success();
  DispatchBytes(call.element_bytes, [&](auto tag) { Select<typename decltype(tag)::type>(pool, call); });
  return ffi::Error::Success();
}

ffi::Error SplitHandler(ffi::ThreadPool pool, ffi::AnyBuffer dy, ffi::AnyBuffer cond, ffi::Result<ffi::AnyBuffer> da,
                        ffi::Result<ffi::AnyBuffer> db) {
  constexpr const char* kOp = "where_backward";
  SplitCall call;
  JB_RETURN_IF_ERROR(DecodeSplit(kOp, dy, cond, *da, *db, &call));
  if (ChooseStrategy(call) == Strategy::kNothing) return ffi::Error::Success();
  bool has_memory = true;
  if (call.num_sums() == 0) {
    DispatchBytes(call.element_bytes, [&](auto tag) { Split<typename decltype(tag)::type>(pool, call); });
  } else {
    DispatchFloating(call.type, [&](auto tag) { has_memory = Sums<typename decltype(tag)::type>(call).Run(pool); });
  }
  return MemoryStatus(kOp, has_memory);
}

Plan PlanSelect(const PlanParameters& parameters) {
  return Plan{NameOf(kStrategyNames, ChooseStrategy(SelectOf(parameters)))};
}

Plan PlanSplit(const PlanParameters& parameters) {
  return Plan{NameOf(kStrategyNames, ChooseStrategy(SplitOf(parameters)))};
}

JB_CPU_TARGET("where", SelectHandler, BindSelect<ffi::ThreadPool>(), PlanSelect, kStrategyNames,
              kStrategyNames + kSelectStrategies);
JB_CPU_TARGET("where_backward", SplitHandler, BindSplit<ffi::ThreadPool>(), PlanSplit, JB_NAMES(kStrategyNames));

}  // namespace
}  // namespace jax_baracuda::where
