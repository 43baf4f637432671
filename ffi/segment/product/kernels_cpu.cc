// The CPU kernels of segment_prod and its gradient. Rows with only ordinary numbers use a shorter form of the
// arithmetic of arithmetic.h, with the same results.
//
// The gradient multiplies products and cotangents once per cell. Each row then divides these numerators by its numbers.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>
#include <type_traits>

#include "ffi/segment/engine/map_rows_cpu.h"
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

template <typename C>
JB_INLINE bool AnyIsShifted(const C* cells, int64_t count) {
  SignedBits<C> any = 0;
  JB_VECTORIZE
  for (int64_t i = 0; i < count; ++i) any |= IsShifted(cells[i]) ? 1 : 0;
  return any != 0;
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
    if (!AnyIsShifted(later.first, count)) return FoldNumbers(later.first, count, cells);
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
    if (AnyIsShifted(cells.first, count)) {
      StoreEach(count, to, [&](int64_t i) __attribute__((always_inline)) { return ValueOf(ProductOf(cells, i)); });
    } else {
      WriteNumbers(cells.first, count, to);
    }
    if (mantissa == nullptr) return;
    JB_VECTORIZE
    for (int64_t i = 0; i < count; ++i) {
      const auto residual = Residual<First>::Of(cells.first[i], ProductOf(cells, i).packed);
      packed[first_cell + i] = residual.packed;
      mantissa[first_cell + i] = residual.mantissa;
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

constexpr int64_t kDividedNumbers = 128;  // one unusual number slows down so many

// Bounds of exponents, so that intermediates of (product * cotangent) / number neither overflow nor underflow.
template <typename C>
inline constexpr SignedBits<C> kMaxProduct = FloatingFormat<C>::kExponentBias / 2;
template <typename C>
inline constexpr SignedBits<C> kMaxOther = kMaxProduct<C> / 2 - 1;

// Products of cells times their cotangents; NaN for a cell that needs the general formula.
template <typename T, typename C>
JB_CPU_CLONES void WriteNumerators(const T* d_output, const C* mantissa, const int32_t* packed, int64_t count, C* to) {
  JB_VECTORIZE
  for (int64_t i = 0; i < count; ++i) {
    const C factor = static_cast<C>(d_output[i]);
    const Residual<C> residual{mantissa[i], packed[i]};
    const SignedBits<C> exponent = residual.Exponent();
    const C product = WithExponent(residual.mantissa, exponent);
    const bool is_enough = (residual.packed & kCountMask) == 0 && std::abs(exponent) <= kMaxProduct<C> &&
                           (factor == 0 || std::abs(ExponentOf(factor)) <= kMaxOther<C>);
    to[i] = is_enough ? product * factor : std::numeric_limits<C>::quiet_NaN();
  }
}

// Writes the gradient as numerator / number. Returns false if a number needs the general formula.
template <typename T, typename C>
JB_CPU_CLONES bool Divide(const C* numerators, const T* data, int64_t count, T* d_data) {
  SignedBits<C> unusual = 0;
  ForEachPart(data, count, [&](int64_t begin, int64_t part, const auto* numbers) __attribute__((always_inline)) {
    JB_VECTORIZE
    for (int64_t i = 0; i < part; ++i) {
      const C numerator = numerators[begin + i];
      const bool is_far = std::abs(ExponentOf(static_cast<C>(numbers[i]))) > kMaxOther<C>;
      unusual |= numerator != numerator || is_far ? 1 : 0;
    }
    StoreEach(part, d_data + begin, [&](int64_t i) __attribute__((always_inline)) {
      return numerators[begin + i] / static_cast<C>(numbers[i]);
    });
  });
  return unusual == 0;
}

// The general formula.
template <typename T, typename C>
JB_CPU_CLONES void WriteGradients(const T* d_output, const C* mantissa, const int32_t* packed, const T* data,
                                  int64_t count, T* d_data) {
  JB_VECTORIZE
  for (int64_t i = 0; i < count; ++i) {
    const Residual<C> product{mantissa[i], packed[i]};
    Store(product.OfOthersTimes(static_cast<C>(data[i]), static_cast<C>(d_output[i])), d_data + i);
  }
}

// Returns false if allocation fails.
template <typename T>
bool GradientOfAll(ffi::ThreadPool& pool, const ProductBackwardCall& call) {
  using C = ComputeType<T>;
  const Problem& problem = call.problem;
  if (problem.batch * problem.rows * problem.features == 0) return true;
  const T* const d_output = static_cast<const T*>(call.d_output);
  const C* const mantissa = static_cast<const C*>(call.mantissa);
  const int64_t cells = problem.segments * problem.features, chunks = ChunksFor(pool, cells * sizeof(C));
  const auto numerators = Allocate<C>(problem.batch * cells);
  if (numerators == nullptr) return false;
  ParallelFor(pool, problem.batch * chunks, [&](int64_t index) {
    const int64_t batch = index / chunks, begin = ChunkBegin(cells, chunks, index % chunks);
    const int64_t product = (call.product_is_shared ? 0 : batch * cells) + begin;
    WriteNumerators(d_output + (call.d_output_is_shared ? 0 : batch * cells) + begin, mantissa + product,
                    call.packed + product, ChunkBegin(cells, chunks, index % chunks + 1) - begin,
                    numerators.get() + batch * cells + begin);
  });
  const auto compute = [&](const NumberBlock& block, const C* const* of_cells, T* to) {
    const T* const data = static_cast<const T*>(call.data) + block.First(problem.rows, problem.data_is_shared);
    C of_mantissa[kMappedNumbers];
    T of_d_output[kMappedNumbers];
    int32_t of_packed[kMappedNumbers];
    bool has_cells = false;
    for (int64_t begin = 0; begin < block.count(); begin += kDividedNumbers) {
      const int64_t count = std::min(kDividedNumbers, block.count() - begin);
      if (Divide(of_cells[0] + begin, data + begin, count, to + begin)) continue;
      if (!has_cells) {
        GatherCells(block, d_output, call.d_output_is_shared, static_cast<T*>(of_d_output));
        GatherCells(block, mantissa, call.product_is_shared, static_cast<C*>(of_mantissa));
        GatherCells(block, call.packed, call.product_is_shared, static_cast<int32_t*>(of_packed));
        has_cells = true;
      }
      WriteGradients(of_d_output + begin, of_mantissa + begin, of_packed + begin, data + begin, count, to + begin);
    }
  };
  T* const d_data = static_cast<T*>(call.d_data);
  RowMap<T, 1, decltype(compute)>{problem, {numerators.get()}, d_data, compute}.Run(pool, SegmentIds(call));
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
