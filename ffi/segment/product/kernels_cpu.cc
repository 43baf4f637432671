// The CPU kernels of segment_prod and its gradient. Rows with only ordinary numbers use a shorter form of the
// arithmetic of arithmetic.h, with the same results.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "ffi/segment/engine/rows_cpu.h"
#include "ffi/segment/product/arithmetic.h"
#include "ffi/segment/product/handler.h"

namespace jax_baracuda::segment {
namespace {

// 1 if a number is not normal, or if its exponent field is less than kMargin away from those of zero and infinity;
// otherwise 0. (An integer, so that a vectorised loop can combine it over many numbers.)
template <typename C>
JB_INLINE SignedBits<C> IsUnusual(C value) {
  constexpr int kMargin = 4;
  const auto field = FieldOf(value);
  return field < kMargin || field > FloatingFormat<C>::kExponentMask - kMargin ? 1 : 0;
}

// The first number of an unfinished cell is the mantissa of a Product, the second its packed part. The mantissa is the
// product itself, and the second number unset, as long as the product is normal with an exponent field below
// kFirstShiftedField. Otherwise the cell is shifted: the field of its mantissa starts as kShiftedField. So the field
// tells which form a cell has. In both forms, a row costs one multiplication per cell as long as the field stays on its
// side of kFirstShiftedField.
template <typename C>
inline constexpr int kFirstShiftedField = FloatingFormat<C>::kExponentBias + FloatingFormat<C>::kExponentMask / 8;
template <typename C>
inline constexpr int kShiftedField = (kFirstShiftedField<C> + FloatingFormat<C>::kExponentMask) / 2;

template <typename C>
JB_INLINE bool IsShifted(C cell) {
  return FieldOf(cell) >= kFirstShiftedField<C>;
}

// 0 if `product` is normal and of the same form as the cell, so that it can replace the cell; otherwise 1.
template <typename C>
JB_INLINE SignedBits<C> LeavesSide(C cell, C product) {
  const auto field = FieldOf(product);
  return field == 0 || field == FloatingFormat<C>::kExponentMask || IsShifted(cell) != IsShifted(product) ? 1 : 0;
}

// The product of all members but `value`, if `value` is not unusual and the product not extreme.
template <typename C>
JB_INLINE C WithoutOrdinary(C value, Residual<C> product) {
  return MantissaOf(product.mantissa) / value * PowerOfTwo<C>(product.Exponent());
}

// 0 if all members are ordinary numbers, and the product is in the normal range both with and without `value`;
// otherwise 1.
template <typename C>
JB_INLINE SignedBits<C> IsExtreme(Residual<C> product, C value) {
  constexpr SignedBits<C> kMax = FloatingFormat<C>::kExponentBias - 2;
  const SignedBits<C> exponent = product.Exponent(), others = exponent - ExponentOf(value);
  return (product.packed & kCountMask) != 0 || std::abs(exponent) > kMax || std::abs(others) > kMax ? 1 : 0;
}

template <typename T>
struct FloatingProduct {
  using Element = T;
  using First = ComputeType<T>;
  using Second = int64_t;
  using Widened = FloatingProduct<First>;
  static constexpr bool kRounds = true, kHoldsRuns = true, kFoldsBoth = false;
  static constexpr bool kSecondIsRare = true;  // only shifted cells have one

  T* output;
  First* mantissa;  // with `packed`, the residual; or nullptr
  int32_t* packed;

  JB_INLINE CellsOf<FloatingProduct> ResultCells() const {
    return mantissa == nullptr ? CellsAt<FloatingProduct>(output) : CellsOf<FloatingProduct>{mantissa, nullptr};
  }

  JB_INLINE void Start(int64_t count, CellsOf<FloatingProduct> cells) const {
    std::fill_n(cells.first, count, First{1});
  }

  template <typename Number>
  JB_INLINE void Fold(const Number* values, int32_t /*row*/, int64_t width, CellsOf<FloatingProduct> cells) const {
    SignedBits<First> leaves = 0;
    JB_VECTORIZE
    for (int64_t i = 0; i < width; ++i) {
      leaves |= LeavesSide(cells.first[i], cells.first[i] * static_cast<First>(values[i]));
    }
    if (leaves == 0) {
      JB_VECTORIZE
      for (int64_t i = 0; i < width; ++i) cells.first[i] *= static_cast<First>(values[i]);
    } else {
      JB_VECTORIZE
      for (int64_t i = 0; i < width; ++i) {
        SetShifted(ProductTimes(ProductOf(cells, i), static_cast<First>(values[i])), cells, i);
      }
    }
  }

  JB_INLINE void Merge(int64_t count, CellsOf<FloatingProduct> later, CellsOf<FloatingProduct> cells) const {
    SignedBits<First> leaves = 0;
    JB_VECTORIZE
    for (int64_t i = 0; i < count; ++i) {
      leaves |= LeavesSide(cells.first[i], cells.first[i] * later.first[i]) | (IsShifted(later.first[i]) ? 1 : 0);
    }
    if (leaves == 0) {
      JB_VECTORIZE
      for (int64_t i = 0; i < count; ++i) cells.first[i] *= later.first[i];
      return;
    }
    for (int64_t i = 0; i < count; ++i) {
      SetShifted(ProductOfBoth(ProductOf(cells, i), ProductOf(later, i)), cells, i);
    }
  }

  JB_INLINE static Product<First> ProductOf(CellsOf<FloatingProduct> cells, int64_t i) {
    return {cells.first[i], IsShifted(cells.first[i]) ? cells.second[i] : 0};
  }

  // Stores a product whose mantissa is in [1, 4).
  JB_INLINE static void SetShifted(Product<First> product, CellsOf<FloatingProduct> cells, int64_t i) {
    constexpr int kShift = kShiftedField<First> - FloatingFormat<First>::kExponentBias;
    cells.first[i] = product.mantissa * PowerOfTwo<First>(kShift);
    cells.second[i] = product.packed - kShift * (1 << kCountBits);
  }

  JB_INLINE void WriteEmpty(int64_t count, int64_t first_cell) const {
    std::fill_n(output + first_cell, count, static_cast<T>(First{1}));
    if (mantissa == nullptr) return;
    std::fill_n(mantissa + first_cell, count, First{1});
    std::fill_n(packed + first_cell, count, 0);
  }

  JB_INLINE void Write(int64_t count, int64_t first_cell, const int32_t* /*counts*/,
                       CellsOf<FloatingProduct> cells) const {
    T* const to = output + first_cell;
    SignedBits<First> are_shifted = 0;
    JB_VECTORIZE
    for (int64_t i = 0; i < count; ++i) are_shifted |= IsShifted(cells.first[i]) ? 1 : 0;
    if (are_shifted == 0) {
      WriteNumbers(cells.first, count, to);
    } else {
      StoreEach(count, to, [&](int64_t i) __attribute__((always_inline)) { return ValueOf(ProductOf(cells, i)); });
    }
    if (mantissa == nullptr) return;
    const auto write_residuals = [&](auto packed_of) __attribute__((always_inline)) {
      JB_VECTORIZE
      for (int64_t i = 0; i < count; ++i) {
        const auto residual = Residual<First>::Of(cells.first[i], packed_of(i));
        packed[first_cell + i] = residual.packed;
        mantissa[first_cell + i] = residual.mantissa;
      }
    };
    if (are_shifted == 0) {
      write_residuals([](int64_t) __attribute__((always_inline)) { return int32_t{0}; });
    } else {
      write_residuals([&](int64_t i) __attribute__((always_inline)) { return ProductOf(cells, i).packed; });
    }
  }
};

// The product of unsigned integers, which wraps.
template <typename T>
struct IntegerProduct {
  using Element = T;
  using First = T;
  using Second = NoNumber;
  static constexpr bool kRounds = false, kHoldsRuns = true;

  T* output;

  JB_INLINE CellsOf<IntegerProduct> ResultCells() const { return {output, nullptr}; }

  JB_INLINE void Start(int64_t count, CellsOf<IntegerProduct> cells) const { std::fill_n(cells.first, count, T{1}); }

  JB_INLINE void Fold(const T* values, int32_t /*row*/, int64_t width, CellsOf<IntegerProduct> cells) const {
    JB_VECTORIZE
    for (int64_t i = 0; i < width; ++i) cells.first[i] *= values[i];
  }

  JB_INLINE void Merge(int64_t count, CellsOf<IntegerProduct> later, CellsOf<IntegerProduct> cells) const {
    JB_VECTORIZE
    for (int64_t i = 0; i < count; ++i) cells.first[i] *= later.first[i];
  }

  JB_INLINE void Write(int64_t count, int64_t first_cell, const int32_t* /*counts*/,
                       CellsOf<IntegerProduct> cells) const {
    WriteNumbers(cells.first, count, output + first_cell);
  }
};

constexpr int64_t kBlockNumbers = 128;  // per block of narrow rows; one unusual number slows down a whole block

template <typename T>
struct GradientArrays {
  SegmentIds ids;
  const T* d_output;
  const ComputeType<T>* mantissa;
  const int32_t* packed;
  const T* data;
  T* d_data;
  bool d_output_is_shared;
  bool product_is_shared;
};

// The width is not a constant, so that this is compiled once.
template <typename T, typename C>
JB_CPU_CLONES void GradientOfAnyRow(const T* d_output, const C* mantissa, const int32_t* packed, const T* data,
                                    int64_t width, T* d_row) {
  JB_VECTORIZE
  for (int64_t i = 0; i < width; ++i) {
    const Residual<C> product{mantissa[i], packed[i]};
    Store(product.OfOthersTimes(static_cast<C>(data[i]), static_cast<C>(d_output[i])), d_row + i);
  }
}

template <typename T, typename C, typename Number>
JB_INLINE void GradientOfPart(const T* d_output, const C* mantissa, const int32_t* packed, const T* data,
                              const Number* d_numbers, const Number* numbers, int64_t width, T* d_row) {
  SignedBits<C> unusual = 0;
  JB_VECTORIZE
  for (int64_t i = 0; i < width; ++i) {
    const C number = static_cast<C>(numbers[i]);
    unusual |= IsUnusual(number) | IsExtreme(Residual<C>{mantissa[i], packed[i]}, number);
  }
  if (unusual == 0) {
    StoreEach(width, d_row, [&](int64_t i) __attribute__((always_inline)) {
      const C others = WithoutOrdinary(static_cast<C>(numbers[i]), Residual<C>{mantissa[i], packed[i]});
      return static_cast<C>(d_numbers[i]) * others;
    });
  } else {
    GradientOfAnyRow(d_output, mantissa, packed, data, width, d_row);
  }
}

template <typename T, typename C>
JB_INLINE void GradientOfRow(const T* d_output, const C* mantissa, const int32_t* packed, const T* data, int64_t width,
                             T* d_row) {
  ForEachPart(d_output, data, width,
              [&](int64_t begin, int64_t count, const auto* d_numbers, const auto* numbers)
                  __attribute__((always_inline)) {
                    GradientOfPart(d_output + begin, mantissa + begin, packed + begin, data + begin, d_numbers, numbers,
                                   count, d_row + begin);
                  });
}

template <typename T>
struct CellsOfGradient {
  const T* d_output;
  const ComputeType<T>* mantissa;
  const int32_t* packed;

  JB_INLINE static CellsOfGradient OfBatch(const Problem& problem, const GradientArrays<T>& arrays, int64_t batch) {
    const int64_t first = batch * problem.segments * problem.features, product = arrays.product_is_shared ? 0 : first;
    return {arrays.d_output + (arrays.d_output_is_shared ? 0 : first), arrays.mantissa + product,
            arrays.packed + product};
  }
};

// The cells of the segments of a block's rows.
template <typename T>
struct CellsOfBlock {
  T d_output[kBlockNumbers];
  ComputeType<T> mantissa[kBlockNumbers];
  int32_t packed[kBlockNumbers];

  JB_INLINE void Copy(const CellsOfGradient<T>& cells, int64_t from, int64_t count, int64_t to) {
    for (int64_t i = 0; i < count; ++i) {
      d_output[to + i] = cells.d_output[from + i];
      mantissa[to + i] = cells.mantissa[from + i];
      packed[to + i] = cells.packed[from + i];
    }
  }
};

// Bounds of exponents, so that intermediates of (product * cotangent) / number neither overflow nor underflow.
template <typename C>
inline constexpr SignedBits<C> kMaxProduct = FloatingFormat<C>::kExponentBias / 2;
template <typename C>
inline constexpr SignedBits<C> kMaxOther = kMaxProduct<C> / 2 - 1;

// The product of each cell of [begin, end) times its cotangent; NaN if the cell needs the general formula.
template <typename T, typename C>
JB_CPU_CLONES void WriteNumerators(const CellsOfGradient<T> cells, int64_t begin, int64_t end, C* to) {
  JB_VECTORIZE
  for (int64_t i = begin; i < end; ++i) {
    const C d_output = static_cast<C>(cells.d_output[i]);
    const Residual<C> residual{cells.mantissa[i], cells.packed[i]};
    const SignedBits<C> exponent = residual.Exponent();
    const C product = WithExponent(residual.mantissa, exponent);
    const bool is_enough = (residual.packed & kCountMask) == 0 && std::abs(exponent) <= kMaxProduct<C> &&
                           (d_output == 0 || std::abs(ExponentOf(d_output)) <= kMaxOther<C>);
    to[i] = is_enough ? product * d_output : std::numeric_limits<C>::quiet_NaN();
  }
}

// Writes the gradient as numerator / number and returns true, unless an element needs the general formula.
template <typename T, typename C, typename Number>
JB_INLINE bool Divide(const C* numerators, const Number* numbers, int64_t width, T* d_row) {
  SignedBits<C> unusual = 0;
  JB_VECTORIZE
  for (int64_t i = 0; i < width; ++i) {
    const bool is_far = std::abs(ExponentOf(static_cast<C>(numbers[i]))) > kMaxOther<C>;
    unusual |= numerators[i] != numerators[i] || is_far ? 1 : 0;
  }
  if (unusual != 0) return false;
  StoreEach(width, d_row,
            [&](int64_t i) __attribute__((always_inline)) { return numerators[i] / static_cast<C>(numbers[i]); });
  return true;
}

// Whether to multiply products and cotangents once per cell, so that each row reads only one scattered array.
inline bool UsesNumerators(const Problem& problem) {
  return problem.features <= kMaxNarrowWidth ? 4 * problem.rows >= problem.segments
                                             : problem.rows >= kMinRowsPerCellRow * problem.segments;
}

// Copies the numerators of narrow rows with these ids, one row after another; arbitrary ones for dropped rows. Returns
// whether there are dropped rows. After `ids`, `coming` more ids follow.
template <typename C>
bool CopyNumerators(const C* numerators, uint64_t segments, const int32_t* ids, int64_t count, int64_t coming,
                    int64_t features, C* to) {
  bool has_dropped = false;
  DispatchNarrow(features, [&](auto width) __attribute__((always_inline)) {
    for (int64_t row = 0; row < count; ++row) {
      const int64_t ahead = row + kScanPrefetchDistance;
      if (ahead < count + coming && static_cast<uint64_t>(ids[ahead]) < segments) {
        __builtin_prefetch(numerators + ids[ahead] * width);
      }
      const bool is_member = static_cast<uint64_t>(ids[row]) < segments;
      has_dropped = has_dropped || !is_member;
      const C* const from = numerators + (is_member ? ids[row] * width : 0);
      for (int64_t i = 0; i < width; ++i) to[row * width + i] = from[i];
    }
  });
  return has_dropped;
}

// Divides the numbers of a row, or of a block of rows. Returns false if an element needs the general formula.
template <typename T, typename C>
JB_INLINE bool DivideAll(const C* numerators, const T* data, int64_t count, T* d_data) {
  bool is_done = true;
  ForEachPart(data, count, [&](int64_t first, int64_t numbers, const auto* part) __attribute__((always_inline)) {
    is_done = is_done && Divide(numerators + first, part, numbers, d_data + first);
  });
  return is_done;
}

template <typename T, typename C>
JB_CPU_CLONES bool DivideBlock(const C* numerators, const T* data, int64_t count, T* d_data) {
  return DivideAll(numerators, data, count, d_data);
}

// `numerators` are those of a batch element.
template <typename T, typename C>
void GradientOfNarrowRows(const Problem& problem, int64_t batch, int64_t row_begin, int64_t row_end,
                          const GradientArrays<T>& arrays, const C* numerators) {
  const int64_t features = problem.features, block_rows = kBlockNumbers / features;
  const auto cells = CellsOfGradient<T>::OfBatch(problem, arrays, batch);
  const T* const data = arrays.data + problem.DataRow(batch, 0) * features;
  T* const d_data = arrays.d_data + batch * problem.rows * features;
  const uint64_t segments = static_cast<uint64_t>(problem.segments);
  const auto of_ids = [&](int64_t ids_begin, int64_t ids_end, const int32_t* row_ids, int64_t first_segment) {
    C of_rows[kBlockNumbers];
    for (int64_t begin = ids_begin; begin < ids_end; begin += block_rows) {
      const int64_t end = std::min(begin + block_rows, ids_end), numbers = (end - begin) * features;
      const int32_t* const ids = row_ids + (begin - ids_begin);
      const T* const from = data + begin * features;
      T* const to = d_data + begin * features;
      const bool has_dropped = CopyNumerators(numerators + first_segment * features, segments, ids, end - begin,
                                              ids_end - end, features, of_rows);
      const auto is_member = [&](int64_t row) { return static_cast<uint64_t>(ids[row]) < segments; };
      if (!DivideBlock(of_rows, from, numbers, to)) {
        CellsOfBlock<T> block;
        for (int64_t row = 0; row < end - begin; ++row) {
          block.Copy(cells, is_member(row) ? (first_segment + ids[row]) * features : 0, features, row * features);
        }
        GradientOfAnyRow(block.d_output, block.mantissa, block.packed, from, numbers, to);
      }
      for (int64_t row = 0; has_dropped && row < end - begin; ++row) {
        if (!is_member(row)) WriteZeros(to + row * features, features);
      }
    }
  };
  ForEachBlockOfIds(problem, arrays.ids, batch, row_begin, row_end, of_ids);
}

template <typename T, typename C>
JB_CPU_CLONES void GradientOfWideRows(const Problem problem, int64_t batch, int64_t row_begin, int64_t row_end,
                                      const GradientArrays<T> arrays, const C* numerators) {
  const int64_t features = problem.features;
  const auto cells = CellsOfGradient<T>::OfBatch(problem, arrays, batch);
  const T* const data = arrays.data + problem.DataRow(batch, 0) * features;
  const auto prefetch = [&](int64_t segment)
                            __attribute__((always_inline)) { PrefetchRow(numerators + segment * features, features); };
  WriteRowsOfSegments(problem, arrays.ids, batch, row_begin, row_end, features, arrays.d_data, prefetch,
                      [&](int64_t row, int64_t segment, T* d_row) __attribute__((always_inline)) {
                        const int64_t cell = segment * features;
                        const T* const numbers = data + row * features;
                        if (DivideAll(numerators + cell, numbers, features, d_row)) return;
                        GradientOfAnyRow(cells.d_output + cell, cells.mantissa + cell, cells.packed + cell, numbers,
                                         features, d_row);
                      });
}

template <typename T>
JB_CPU_CLONES void Gradient(const Problem problem, int64_t batch, int64_t row_begin, int64_t row_end,
                            const GradientArrays<T> arrays) {
  const int64_t features = problem.features;
  const auto cells = CellsOfGradient<T>::OfBatch(problem, arrays, batch);
  const T* const data = arrays.data + problem.DataRow(batch, 0) * features;
  const auto prefetch = [&](int64_t segment) __attribute__((always_inline)) {
    PrefetchRow(cells.d_output + segment * features, features);
    PrefetchRow(cells.mantissa + segment * features, features);
    PrefetchRow(cells.packed + segment * features, features);
  };
  WriteRowsOfSegments(problem, arrays.ids, batch, row_begin, row_end, features, arrays.d_data, prefetch,
                      [&](int64_t row, int64_t segment, T* d_row) __attribute__((always_inline)) {
                        const int64_t first = segment * features;
                        GradientOfRow(cells.d_output + first, cells.mantissa + first, cells.packed + first,
                                      data + row * features, features, d_row);
                      });
}

// Returns false if allocation fails.
template <typename T>
bool GradientOfAll(ffi::ThreadPool& pool, const Problem& problem, const GradientArrays<T>& arrays) {
  using C = ComputeType<T>;
  const auto for_each_chunk = [&](const auto& body) {
    ForEachChunkOfRows(pool, problem, arrays.d_data, sizeof(T), body);
  };
  if (!UsesNumerators(problem) || problem.segments == 0) {
    for_each_chunk([&](int64_t batch, int64_t row_begin, int64_t row_end) {
      Gradient(problem, batch, row_begin, row_end, arrays);
    });
    return true;
  }
  const int64_t cells_per_batch = problem.segments * problem.features;
  const auto numerators = Allocate<C>(problem.batch * cells_per_batch);
  if (numerators == nullptr) return false;
  const int64_t chunks = ChunksFor(pool, cells_per_batch * sizeof(C));
  ParallelFor(pool, problem.batch * chunks, [&](int64_t index) {
    const int64_t batch = index / chunks, chunk = index % chunks;
    WriteNumerators(CellsOfGradient<T>::OfBatch(problem, arrays, batch), ChunkBegin(cells_per_batch, chunks, chunk),
                    ChunkBegin(cells_per_batch, chunks, chunk + 1), numerators.get() + batch * cells_per_batch);
  });
  for_each_chunk([&](int64_t batch, int64_t row_begin, int64_t row_end) {
    const C* const of_batch = numerators.get() + batch * cells_per_batch;
    if (IsNarrow(problem.features)) {
      GradientOfNarrowRows(problem, batch, row_begin, row_end, arrays, of_batch);
    } else {
      GradientOfWideRows(problem, batch, row_begin, row_end, arrays, of_batch);
    }
  });
  return true;
}

bool RunProduct(ffi::ThreadPool& pool, const ProductCall& call) {
  const Problem& problem = call.problem;
  const int64_t cells = problem.batch * problem.segments * problem.features;
  bool has_memory = true;
  DispatchWrapping(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto reduce = [&](const auto& reduction) {
      AdviseHugePages(reduction.output, cells * sizeof(T));
      has_memory =
          ReduceAll(pool, problem, SegmentIds(call), DirectRows<T>{static_cast<const T*>(call.data)}, reduction);
    };
    T* const to = static_cast<T*>(call.output);
    if constexpr (kIsFloating<T>) {
      using C = ComputeType<T>;
      if (call.mantissa != nullptr) {
        AdviseHugePages(call.mantissa, cells * sizeof(C));
        AdviseHugePages(call.packed, cells * sizeof(int32_t));
      }
      reduce(FloatingProduct<T>{to, static_cast<C*>(call.mantissa), call.packed});
    } else {
      reduce(IntegerProduct<T>{to});
    }
  });
  return has_memory;
}

bool RunProductBackward(ffi::ThreadPool& pool, const ProductBackwardCall& call) {
  bool has_memory = true;
  DispatchFloating(call.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const GradientArrays<T> arrays{SegmentIds(call),
                                   static_cast<const T*>(call.d_output),
                                   static_cast<const ComputeType<T>*>(call.mantissa),
                                   call.packed,
                                   static_cast<const T*>(call.data),
                                   static_cast<T*>(call.d_data),
                                   call.d_output_is_shared,
                                   call.product_is_shared};
    has_memory = GradientOfAll(pool, call.problem, arrays);
  });
  return has_memory;
}

Plan PlanProduct(const ProductCall& call) {
  return PlanOfType(call, JB_DISPATCH(DispatchWrapping), [&](auto tag) {
    using T = typename decltype(tag)::type;
    using Reduction = std::conditional_t<kIsFloating<T>, FloatingProduct<T>, IntegerProduct<T>>;
    return ChooseStrategy<Reduction>(call.problem, /*has_counts=*/false);
  });
}

constexpr auto kRun = RunOnCpu<ProductCall, RunProduct>;
constexpr auto kRunBackward = RunOnCpu<ProductBackwardCall, RunProductBackward>;
constexpr auto kPlan = PlanOf<PlanProduct, CallOf<ProductCall>>;

JB_CPU_TARGET("segment_prod", (HandleProduct<ffi::ThreadPool, kRun>),
              (BindCall<ffi::ThreadPool, 2, 1, ReductionOptions>()), kPlan, kNothing, "scan", "split_scan",
              "group_by_segment");
JB_CPU_TARGET("segment_prod_with_residual", (HandleProductWithResidual<ffi::ThreadPool, kRun>),
              (BindCall<ffi::ThreadPool, 2, 3, ReductionOptions>()), kPlan, kNothing, "scan", "split_scan",
              "group_by_segment");
JB_CPU_TARGET("segment_prod_backward", (HandleProductBackward<ffi::ThreadPool, kRunBackward>),
              (BindCall<ffi::ThreadPool, 5, 1, GatherOptions>()), PlanOfGather, kNothing, "gather");

}  // namespace
}  // namespace jax_baracuda::segment
