// The CPU kernels of segment_prod and its gradient. Rows with only ordinary numbers use a shorter form of the
// arithmetic of arithmetic.h, with the same results.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>
#include <type_traits>

#include "ffi/segment/engine/rows_cpu.h"
#include "ffi/segment/product/arithmetic.h"
#include "ffi/segment/product/handler.h"

namespace jax_baracuda::segment {
namespace {

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

template <typename T>
struct FloatingProduct {
  using Element = T;
  using First = ComputeType<T>;
  using Second = int64_t;
  using Narrow = FloatingProduct<First>;
  static constexpr bool kRounds = true;
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

  JB_INLINE void Fold(const T* values, int32_t /*row*/, int64_t width, CellsOf<FloatingProduct> cells) const {
    ForEachPart(values, width, [&](int64_t begin, int64_t count, const auto* numbers) __attribute__((always_inline)) {
      FoldNumbers(numbers, count, cells + begin);
    });
  }

  template <typename Number>
  JB_INLINE static void FoldNumbers(const Number* values, int64_t width, CellsOf<FloatingProduct> cells) {
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

  JB_INLINE Narrow ForNarrow() const { return {}; }
  void Convert(const T* from, int64_t count, First* to) const { Widen(from, count, to); }

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
  using Narrow = IntegerProduct;
  static constexpr bool kRounds = false;

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

// Bounds of exponents, so that intermediates of (product * cotangent) / number neither overflow nor underflow.
template <typename C>
inline constexpr SignedBits<C> kMaxProduct = FloatingFormat<C>::kExponentBias / 2;
template <typename C>
inline constexpr SignedBits<C> kMaxOther = kMaxProduct<C> / 2 - 1;

// The cells of a batch element, or copies of some of them.
template <typename T>
struct CellsOfGradient {
  const T* d_output;
  const ComputeType<T>* mantissa;
  const int32_t* packed;

  static CellsOfGradient OfBatch(const ProductBackwardCall& call, int64_t batch) {
    const int64_t first = batch * call.problem.segments * call.problem.features;
    const int64_t product = call.product_is_shared ? 0 : first;
    return {static_cast<const T*>(call.d_output) + (call.d_output_is_shared ? 0 : first),
            static_cast<const ComputeType<T>*>(call.mantissa) + product, call.packed + product};
  }
};

// The general formula, for `count` elements of a row. The cells are those from `cell` on.
template <typename T>
JB_CPU_CLONES void GradientOfAnyRow(const CellsOfGradient<T> cells, int64_t cell, const T* data, int64_t count,
                                    T* d_row) {
  using C = ComputeType<T>;
  JB_VECTORIZE
  for (int64_t i = 0; i < count; ++i) {
    const Residual<C> product{cells.mantissa[cell + i], cells.packed[cell + i]};
    Store(product.OfOthersTimes(static_cast<C>(data[i]), static_cast<C>(cells.d_output[cell + i])), d_row + i);
  }
}

// The product of each cell of [begin, end) times its cotangent; NaN if the cell needs the general formula.
template <typename T, typename C>
JB_CPU_CLONES void WriteNumerators(const CellsOfGradient<T> cells, int64_t begin, int64_t end, C* to) {
  JB_VECTORIZE
  for (int64_t i = 0; i < end - begin; ++i) {
    const C d_output = static_cast<C>(cells.d_output[begin + i]);
    const Residual<C> residual{cells.mantissa[begin + i], cells.packed[begin + i]};
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

// Whether to multiply products and cotangents once per cell, so that each row reads only one scattered array.
bool UsesNumerators(const Problem& problem) {
  if (problem.segments == 0) return false;
  return problem.features <= kMaxNarrowWidth ? 4 * problem.rows >= problem.segments
                                             : problem.rows >= kMinRowsPerCellRow * problem.segments;
}

// Copies the numerators of the narrow rows of a block, one row after another; arbitrary ones for dropped rows.
// Returns whether there are dropped rows.
template <typename C>
JB_AVX2 bool CopyNumerators(const C* numerators, const RowBlock block, uint64_t segments, int64_t features, C* to) {
  bool has_dropped = false;
  DispatchNarrow(features, [&](auto width) __attribute__((always_inline)) {
    for (int64_t i = 0; i < block.count; ++i) {
      const int64_t ahead = i + kScanPrefetchDistance;
      if (ahead < block.known && static_cast<uint64_t>(block.ids[ahead]) < segments) {
        __builtin_prefetch(numerators + (block.first_segment + block.ids[ahead]) * width);
      }
      const bool is_member = static_cast<uint64_t>(block.ids[i]) < segments;
      has_dropped = has_dropped || !is_member;
      const C* const from = numerators + (is_member ? (block.first_segment + block.ids[i]) * width : 0);
      for (int64_t j = 0; j < width; ++j) to[i * width + j] = from[j];
    }
  });
  return has_dropped;
}

// `numerators` are those of a batch element, or nullptr if they are computed for each row.
template <typename T, typename C>
JB_CPU_CLONES void GradientOfWideRows(const RowBlock block, int64_t segments, int64_t features,
                                      const CellsOfGradient<T> cells, const C* numerators, const T* data, T* d_data) {
  const auto prefetch = [&](int64_t segment) __attribute__((always_inline)) {
    if (numerators != nullptr) return PrefetchRow(numerators + segment * features, features);
    PrefetchRow(cells.d_output + segment * features, features);
    PrefetchRow(cells.mantissa + segment * features, features);
    PrefetchRow(cells.packed + segment * features, features);
  };
  WriteRowsOfBlock(block, segments, features, d_data, prefetch,
                   [&](int64_t row, int64_t segment, T* d_row) __attribute__((always_inline)) {
                     const T* const numbers = data + row * features;
                     C of_row[kWidenedAtOnce];
                     for (int64_t begin = 0; begin < features; begin += kWidenedAtOnce) {
                       const int64_t count = std::min(kWidenedAtOnce, features - begin);
                       const int64_t cell = segment * features + begin;
                       if (numerators == nullptr) WriteNumerators(cells, cell, cell + count, of_row);
                       const C* const from = numerators == nullptr ? of_row : numerators + cell;
                       if (DivideAll(from, numbers + begin, count, d_row + begin)) continue;
                       GradientOfAnyRow(cells, cell, numbers + begin, count, d_row + begin);
                     }
                   });
}

// `numerators` are those of a batch element.
template <typename T, typename C>
void GradientOfNarrowRows(const RowBlock& block, int64_t num_segments, int64_t features,
                          const CellsOfGradient<T>& cells, const C* numerators, const T* data, T* d_data) {
  const uint64_t segments = static_cast<uint64_t>(num_segments);
  const int64_t numbers = block.count * features;
  const T* const from = data + block.first_row * features;
  T* const to = d_data + block.first_row * features;
  C of_rows[kBlockNumbers];
  const bool has_dropped = CopyNumerators(numerators, block, segments, features, of_rows);
  const auto is_member = [&](int64_t i) { return static_cast<uint64_t>(block.ids[i]) < segments; };
  if (!DivideBlock(of_rows, from, numbers, to)) {
    T d_output[kBlockNumbers];
    C mantissa[kBlockNumbers];
    int32_t packed[kBlockNumbers];
    for (int64_t row = 0; row < block.count; ++row) {
      const int64_t first_cell = is_member(row) ? (block.first_segment + block.ids[row]) * features : 0;
      for (int64_t i = 0; i < features; ++i) {
        d_output[row * features + i] = cells.d_output[first_cell + i];
        mantissa[row * features + i] = cells.mantissa[first_cell + i];
        packed[row * features + i] = cells.packed[first_cell + i];
      }
    }
    GradientOfAnyRow(CellsOfGradient<T>{d_output, mantissa, packed}, 0, from, numbers, to);
  }
  for (int64_t i = 0; has_dropped && i < block.count; ++i) {
    if (!is_member(i)) WriteZeros(to + i * features, features);
  }
}

// Returns false if allocation fails.
template <typename T>
bool GradientOfAll(ffi::ThreadPool& pool, const ProductBackwardCall& call) {
  using C = ComputeType<T>;
  const Problem& problem = call.problem;
  // Without a result, arrays may have any number of segments.
  if (problem.batch == 0 || problem.rows == 0 || problem.features == 0) return true;
  const int64_t segments = problem.segments, features = problem.features, cells_per_batch = segments * features;
  std::unique_ptr<C[]> numerators;
  if (UsesNumerators(problem)) {
    numerators = Allocate<C>(problem.batch * cells_per_batch);
    if (numerators == nullptr) return false;
    const int64_t chunks = ChunksFor(pool, cells_per_batch * sizeof(C));
    ParallelFor(pool, problem.batch * chunks, [&](int64_t index) {
      const int64_t batch = index / chunks, begin = ChunkBegin(cells_per_batch, chunks, index % chunks);
      WriteNumerators(CellsOfGradient<T>::OfBatch(call, batch), begin,
                      ChunkBegin(cells_per_batch, chunks, index % chunks + 1),
                      numerators.get() + batch * cells_per_batch + begin);
    });
  }
  const bool is_narrow = numerators != nullptr && IsNarrow(features);
  ForEachBlockOfResult(pool, problem, SegmentIds(call), call.d_data, sizeof(T),
                       is_narrow ? kBlockNumbers / features : kConvertedIds, [&](int64_t batch, const RowBlock& block) {
                         const auto cells = CellsOfGradient<T>::OfBatch(call, batch);
                         const C* const of_batch =
                             numerators == nullptr ? nullptr : numerators.get() + batch * cells_per_batch;
                         const T* const data = static_cast<const T*>(call.data) + problem.DataRow(batch, 0) * features;
                         T* const d_data = static_cast<T*>(call.d_data) + batch * problem.rows * features;
                         if (is_narrow) {
                           GradientOfNarrowRows(block, segments, features, cells, of_batch, data, d_data);
                         } else {
                           GradientOfWideRows(block, segments, features, cells, of_batch, data, d_data);
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
      has_memory = ReduceRows(pool, call, call.data, reduction);
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
  DispatchFloating(call.type, [&](auto tag) { has_memory = GradientOfAll<typename decltype(tag)::type>(pool, call); });
  return has_memory;
}

Plan PlanProduct(const ProductCall& call) {
  return PlanOfType(call, JB_DISPATCH(DispatchWrapping), [&](auto tag) {
    using T = typename decltype(tag)::type;
    using Reduction = std::conditional_t<kIsFloating<T>, FloatingProduct<T>, IntegerProduct<T>>;
    return ChooseStrategy(call.problem, CellTypeOf<Reduction>(), /*has_counts=*/false);
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
