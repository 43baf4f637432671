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

// ---------------------------------------------------------------------------------------------------------------------
// Strategies.

// The first five are how blocks of an operand are made, in the order of their cost.
enum class Strategy {
  kDense,            // read in place
  kPeriodic,         // one repeated row or element, expanded once
  kRows,             // copied row by row, or read in place if the block is inside a row
  kFilledRows,       // each row filled with one element
  kFilledShortRows,  // the same, with fixed-size stores
  kNothing,
  // Sums. For the first three, the array to sum fits in a block:
  kSumFewNumbers,   // few contiguous numbers
  kSumNumbers,      // more contiguous numbers, in lanes
  kSumRows,         // rows
  kSumLines,        // a larger array, line by line
  kSumPartsOfLines  // the same, in parts that are added up at the end
};

constexpr const char* kStrategyNames[] = {
    "dense",           "periodic",    "rows",     "filled_rows", "filled_short_rows", "nothing",
    "sum_few_numbers", "sum_numbers", "sum_rows", "sum_lines",   "sum_parts_of_lines"};
constexpr int kSelectStrategies = 6;  // the first six: those of where

// Lanes of kSumNumbers.
constexpr int64_t kLanes = 16;

// Rows of one repeated element up to ShortRowElements are filled by stores of StoreElements elements.
constexpr int64_t StoreElements(int64_t element_bytes) { return std::max<int64_t>(1, 16 / element_bytes); }
constexpr int64_t ShortRowElements(int64_t element_bytes) { return 8 * StoreElements(element_bytes); }

Strategy StrategyOfOperand(const Repetition& repetition, int64_t element_bytes) {
  if (repetition.IsScalar()) return Strategy::kPeriodic;
  if (repetition.IsDense()) return Strategy::kDense;
  if (repetition.stride[0] != 0) {
    const bool is_one_row = repetition.rank == 2 && repetition.size[0] <= kBlockBytes / element_bytes;
    return is_one_row ? Strategy::kPeriodic : Strategy::kRows;
  }
  const bool has_short_rows = repetition.size[0] <= ShortRowElements(element_bytes);
  return has_short_rows ? Strategy::kFilledShortRows : Strategy::kFilledRows;
}

// The strategy of the most expensive operand.
Strategy ChooseStrategy(const SelectCall& call) {
  if (call.size == 0) return Strategy::kNothing;
  return std::max({StrategyOfOperand(call.a.repetition, call.element_bytes),
                   StrategyOfOperand(call.b.repetition, call.element_bytes),
                   StrategyOfOperand(call.cond.repetition, /*element_bytes=*/1)});
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

template <typename T, bool kBothSummed>
JB_CPU_CLONES void AddLine(const uint8_t* cond, bool inverted, const T* dy, int64_t count, ComputeType<T>* sums,
                           ComputeType<T>* other_sums, T* other) {
  AddElements<T, kBothSummed>(cond, inverted, dy, count, sums, other_sums, other);
}

// Sums `outer` contiguous arrays [rows, inner] over their rows, to sums[outer, inner]; likewise other_sums.
template <typename T, bool kBothSummed>
JB_CPU_CLONES void SumShortArrays(Strategy strategy, const uint8_t* cond, bool inverted, const T* dy, int64_t outer,
                                  int64_t rows, int64_t inner, ComputeType<T>* sums, ComputeType<T>* other_sums,
                                  T* other) {
  using C = ComputeType<T>;
  for (int64_t i = 0; i < outer; ++i) {
    if (strategy == Strategy::kSumFewNumbers) {
      C totals[2] = {};
      for (int64_t row = 0; row < rows; ++row) {
        AddElements<T, kBothSummed>(cond + row, inverted, dy + row, 1, &totals[0], &totals[1],
                                    kBothSummed ? nullptr : other + row);
      }
      sums[i] = totals[0];
      if (kBothSummed) other_sums[i] = totals[1];
    } else if (strategy == Strategy::kSumNumbers) {
      C lanes[2][kLanes] = {};
      for (int64_t row = 0; row < rows; row += kLanes) {
        const int64_t count = std::min(kLanes, rows - row);
        AddElements<T, kBothSummed>(cond + row, inverted, dy + row, count, lanes[0], lanes[1],
                                    kBothSummed ? nullptr : other + row);
      }
      for (int k = 0; k < (kBothSummed ? 2 : 1); ++k) {
        for (int64_t half = kLanes / 2; half > 0; half /= 2) {
          for (int64_t lane = 0; lane < half; ++lane) lanes[k][lane] += lanes[k][lane + half];
        }
        (k == 0 ? sums : other_sums)[i] = lanes[k][0];
      }
    } else {
      C* const own = sums + i * inner;
      C* const other_own = kBothSummed ? other_sums + i * inner : nullptr;
      std::fill_n(own, inner, C{0});
      if (kBothSummed) std::fill_n(other_own, inner, C{0});
      for (int64_t row = 0; row < rows; ++row) {
        const int64_t first = row * inner;
        AddElements<T, kBothSummed>(cond + first, inverted, dy + first, inner, own, other_own,
                                    kBothSummed ? nullptr : other + first);
      }
    }
    cond += rows * inner;
    dy += rows * inner;
    if (!kBothSummed) other += rows * inner;
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Operands.

// An operand, block by block. Cheap if blocks are visited in order, or if one row is repeated throughout.
template <typename T>
class Blocks {
 public:
  explicit Blocks(const Operand& operand)
      : data_(static_cast<const T*>(operand.data)),
        repetition_(operand.repetition),
        strategy_(StrategyOfOperand(operand.repetition, sizeof(T))) {
    if (strategy_ != Strategy::kPeriodic) return;
    period_ = repetition_.IsScalar() ? 1 : repetition_.size[0];
    if (period_ == 0) return;  // no elements
    std::copy_n(data_, period_, buffer_);
    const int64_t total = kBlockElements<T> + period_;
    for (int64_t filled = period_; filled < total; filled *= 2) {
      std::copy_n(buffer_, std::min(filled, total - filled), buffer_ + filled);
    }
  }

  // `count` elements, at most kBlockElements<T>, from output element `first` on.
  const T* At(int64_t first, int64_t count) {
    if (strategy_ == Strategy::kPeriodic) return buffer_ + first % period_;
    if (strategy_ == Strategy::kDense) return data_ + first;
    if (first != next_) Seek(first);
    next_ = first + count;
    const bool is_contiguous = strategy_ == Strategy::kRows;
    for (int64_t done = 0; done < count;) {
      if (strategy_ == Strategy::kFilledShortRows && index_[0] == 0) {
        done += FillShortRows(count - done, buffer_ + done);
        if (done == count) break;
      }
      const T* const from = data_ + offset_ + (is_contiguous ? index_[0] : 0);
      const int64_t run = std::min(repetition_.size[0] - index_[0], count - done);
      const bool is_whole_block = run == count;
      index_[0] += run;
      if (index_[0] == repetition_.size[0]) NextRow();
      if (is_whole_block && is_contiguous) return from;
      if (is_contiguous) {
        std::memcpy(static_cast<void*>(buffer_ + done), from, static_cast<size_t>(run) * sizeof(T));
      } else {
        std::fill_n(buffer_ + done, run, *from);
      }
      done += run;
    }
    return buffer_;
  }

 private:
  void Seek(int64_t element) {
    offset_ = 0;
    for (int i = 0; i < repetition_.rank; ++i) {
      index_[i] = element % repetition_.size[i];
      element /= repetition_.size[i];
      if (i > 0) offset_ += index_[i] * repetition_.stride[i];
    }
  }

  // Fills whole short rows, each with one element, while their stride is constant. Returns the number of elements.
  JB_INLINE int64_t FillShortRows(int64_t count, T* to) {
    const int64_t length = repetition_.size[0], stride = repetition_.stride[1];
    const int64_t rows = std::min(repetition_.size[1] - index_[1], count / length);
    if (rows == 0) return 0;
    const T* from = data_ + offset_;
    T* const end = to + rows * length;
    // Fixed-size stores; the next row overwrites the excess.
    if (length <= kFew) {
      for (T* row = to; row < end; row += length, from += stride) std::fill_n(row, kFew, *from);
    } else {
      for (T* row = to; row < end; row += length, from += stride) {
        for (int64_t i = 0; i < length; i += kFew) std::fill_n(row + i, kFew, *from);
      }
    }
    index_[1] += rows - 1;
    offset_ += (rows - 1) * stride;
    NextRow();
    return rows * length;
  }

  void NextRow() {
    index_[0] = 0;
    for (int i = 1; i < repetition_.rank; ++i) {
      offset_ += repetition_.stride[i];
      if (++index_[i] < repetition_.size[i]) return;
      offset_ -= repetition_.size[i] * repetition_.stride[i];
      index_[i] = 0;
    }
  }

  static constexpr int64_t kFew = StoreElements(sizeof(T));

  const T* data_;
  const Repetition& repetition_;
  const Strategy strategy_;
  int64_t period_ = 0;              // of kPeriodic, in elements
  int64_t next_ = -1, offset_ = 0;  // the next output element, and the offset of its row in data_
  int64_t index_[kMaxDimensions];   // indices of the next element
  alignas(64) T buffer_[2 * kBlockElements<T>];
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
// Sums. They are added up line by line. A line is a tile of a long row, or enough short rows to fill vectors. The lines
// depend only on shapes, so the sums are the same for any number of threads.

constexpr int64_t kTile = 1024;
constexpr int64_t kShortRow = 256;
constexpr int64_t kMaxParts = 64;     // limits parts * tiles * outer
constexpr int64_t kMinLines = 32;     // per part
constexpr int64_t kLinesOfSum = 256;  // lines added up in the compute type before they are added to double sums

// The split of a sum into lines; the sum has results.
struct LinesOfSum {
  int64_t rows_of_line, tiles, parts, rows_of_part;

  explicit LinesOfSum(const Sum& sum)
      : rows_of_line(std::clamp<int64_t>(kShortRow / sum.inner, 1, std::max<int64_t>(1, sum.rows))),
        tiles(CeilDivide(sum.inner, kTile)) {
    const int64_t lines = CeilDivide(sum.rows, rows_of_line), units = sum.outer * tiles;
    parts = std::clamp<int64_t>(lines / kMinLines, 1, CeilDivide(kMaxParts, units));
    rows_of_part = CeilDivide(lines, parts) * rows_of_line;
  }
};

Strategy ChooseStrategy(const SplitCall& call) {
  const Sum& sum = call.sum;
  if ((call.num_sums() == 0 ? call.size : sum.results()) == 0) return Strategy::kNothing;
  if (call.num_sums() == 0) return StrategyOfOperand(call.cond.repetition, /*element_bytes=*/1);
  const LinesOfSum lines(sum);
  if (lines.parts > 1) return Strategy::kSumPartsOfLines;
  if (sum.rows * sum.inner > kBlockBytes / call.element_bytes) return Strategy::kSumLines;
  if (sum.inner > 1) return Strategy::kSumRows;
  return sum.rows < kLanes ? Strategy::kSumFewNumbers : Strategy::kSumNumbers;
}

template <typename T>
class Sums {
 public:
  using C = ComputeType<T>;

  Sums(const SplitCall& call, Strategy strategy)
      : call_(call),
        sum_(call.sum),
        strategy_(strategy),
        both_are_summed_(call.num_sums() == 2),
        first_sums_(static_cast<C*>(call.a_is_summed ? call.da : call.db)),
        second_sums_(both_are_summed_ ? static_cast<C*>(call.db) : nullptr),
        other_(static_cast<T*>(both_are_summed_   ? nullptr
                               : call.a_is_summed ? call.db
                                                  : call.da)),
        lines_(call.sum) {}

  // Returns false if an allocation fails.
  bool Run(ffi::ThreadPool& pool) {
    if (strategy_ != Strategy::kSumLines && strategy_ != Strategy::kSumPartsOfLines) {
      SumBlocks(pool);
      return true;
    }
    const int64_t all_results = call_.num_sums() * sum_.results(), bytes = call_.size * sizeof(T);
    if (!both_are_summed_) AdviseHugePages(other_, bytes);
    const std::unique_ptr<double[]> partials = Allocate<double>(lines_.parts == 1 ? 0 : lines_.parts * all_results);
    if (partials == nullptr) return false;
    partials_ = partials.get();
    ForEachRange(pool, sum_.outer * lines_.tiles * lines_.parts, 2 * bytes, [&](int64_t begin, int64_t end) {
      Blocks<uint8_t> cond(call_.cond);
      for (int64_t unit = begin; unit < end; ++unit) {
        AddPart(unit / lines_.parts / lines_.tiles, unit / lines_.parts % lines_.tiles, unit % lines_.parts, &cond);
      }
    });
    if (lines_.parts == 1) return true;
    ForEachRange(pool, all_results, lines_.parts * all_results * 8, [&](int64_t begin, int64_t end) {
      for (int64_t result = begin; result < end; ++result) {
        double total = 0;
        for (int64_t part = 0; part < lines_.parts; ++part) total += partials_[part * all_results + result];
        Write(result, total);
      }
    });
    return true;
  }

 private:
  // For arrays so short that one or more fit in a block.
  void SumBlocks(ffi::ThreadPool& pool) {
    const int64_t elements = sum_.rows * sum_.inner, at_once = kBlockElements<T> / std::max<int64_t>(1, elements);
    const T* const dy = static_cast<const T*>(call_.dy);
    ForEachRange(pool, sum_.outer, 2 * call_.size * static_cast<int64_t>(sizeof(T)), [&](int64_t begin, int64_t end) {
      Blocks<uint8_t> cond(call_.cond);
      for (int64_t outer = begin; outer < end; outer += at_once) {
        const int64_t count = std::min(at_once, end - outer), first = outer * elements, result = outer * sum_.inner;
        const uint8_t* const flags = elements == 0 ? nullptr : cond.At(first, count * elements);
        if (both_are_summed_) {
          SumShortArrays<T, true>(strategy_, flags, false, dy + first, count, sum_.rows, sum_.inner,
                                  first_sums_ + result, second_sums_ + result, nullptr);
        } else {
          SumShortArrays<T, false>(strategy_, flags, !call_.a_is_summed, dy + first, count, sum_.rows, sum_.inner,
                                   first_sums_ + result, nullptr, other_ + first);
        }
      }
    });
  }

  void AddPart(int64_t outer, int64_t tile, int64_t part, Blocks<uint8_t>* cond) {
    const int64_t first_column = ChunkBegin(sum_.inner, lines_.tiles, tile);
    const int64_t columns = ChunkBegin(sum_.inner, lines_.tiles, tile + 1) - first_column;
    const int64_t width = columns * lines_.rows_of_line;
    const int64_t first_row = std::min(sum_.rows, part * lines_.rows_of_part);
    const int64_t end_row = std::min(sum_.rows, first_row + lines_.rows_of_part);
    const T* const dy = static_cast<const T*>(call_.dy);
    C sums[2][kTile];
    double totals[2][kTile];
    for (int k = 0; k < 2; ++k) {
      std::fill_n(sums[k], width, C{0});
      std::fill_n(totals[k], width, 0.0);
    }
    int64_t lines = 0;
    for (int64_t row = first_row; row < end_row; row += lines_.rows_of_line) {
      const int64_t count = std::min(lines_.rows_of_line, end_row - row) * columns;
      const int64_t first = (outer * sum_.rows + row) * sum_.inner + first_column;
      const uint8_t* const flags = cond->At(first, count);
      if (both_are_summed_) {
        AddLine<T, true>(flags, false, dy + first, count, sums[0], sums[1], nullptr);
      } else {
        AddLine<T, false>(flags, !call_.a_is_summed, dy + first, count, sums[0], nullptr, other_ + first);
      }
      if (++lines % kLinesOfSum == 0) Flush(sums, totals, width);
    }
    Flush(sums, totals, width);
    for (int k = 0; k < call_.num_sums(); ++k) {
      for (int64_t column = 0; column < columns; ++column) {
        double total = 0;
        for (int64_t i = column; i < width; i += columns) total += totals[k][i];
        const int64_t result = (k * sum_.outer + outer) * sum_.inner + first_column + column;
        if (lines_.parts == 1) {
          Write(result, total);
        } else {
          partials_[part * call_.num_sums() * sum_.results() + result] = total;
        }
      }
    }
  }

  void Flush(C (*sums)[kTile], double (*totals)[kTile], int64_t width) const {
    for (int k = 0; k < call_.num_sums(); ++k) {
      for (int64_t i = 0; i < width; ++i) {
        totals[k][i] += sums[k][i];
        sums[k][i] = 0;
      }
    }
  }

  void Write(int64_t result, double total) const {
    const int64_t results = sum_.results();
    (result < results ? first_sums_[result] : second_sums_[result - results]) = static_cast<C>(total);
  }

  const SplitCall& call_;
  const Sum& sum_;
  const Strategy strategy_;
  const bool both_are_summed_;
  C *const first_sums_, *const second_sums_;
  T* const other_;
  const LinesOfSum lines_;
  double* partials_ = nullptr;
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
  const Strategy strategy = ChooseStrategy(call);
  if (strategy == Strategy::kNothing) return ffi::Error::Success();
  bool has_memory = true;
  if (call.num_sums() == 0) {
    DispatchBytes(call.element_bytes, [&](auto tag) { Split<typename decltype(tag)::type>(pool, call); });
  } else {
    DispatchFloating(call.type,
                     [&](auto tag) { has_memory = Sums<typename decltype(tag)::type>(call, strategy).Run(pool); });
  }
  return Status(kOp, /*is_supported=*/true, has_memory, "dy", dy);
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
