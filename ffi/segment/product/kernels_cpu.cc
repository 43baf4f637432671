// The CPU kernels of segment_prod and its gradient. Rows with only ordinary numbers use a shorter form of the
// arithmetic of arithmetic.h, with the same results.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <type_traits>

#include "ffi/segment/engine/map_rows_cpu.h"
#include "ffi/segment/product/arithmetic.h"
#include "ffi/segment/product/call.h"

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

// The excess of a magnitude over the smallest normal number, in units of the last place. It wraps, so that one comparison
// tells unshifted cells from all other numbers.
template <typename C>
JB_INLINE BitsOf<C> ExcessOverSmallest(C value) {
  return 2 * (BitCast<BitsOf<C>>(value) - (BitsOf<C>{1} << FloatingFormat<C>::kMantissaBits));
}
template <typename C>
inline constexpr BitsOf<C> kFirstShiftedExcess =
    BitsOf<C>{2 * (kFirstShiftedField<C> - 1)} << FloatingFormat<C>::kMantissaBits;

// 0 if `product` is normal and of the same form as the cell, so that it can replace the cell; otherwise 1.
template <typename C>
JB_INLINE SignedBits<C> LeavesSide(C cell, C product) {
  const auto field = FieldOf(product);
  return field == 0 || field == FloatingFormat<C>::kExponentMask || IsShifted(cell) != IsShifted(product) ? 1 : 0;
}

// Without checks, every cell is the plain product. With subnormal numbers as zeros, a product that was ever zero,
// infinite or NaN never becomes ordinary again. So a product that is ordinary in the end was so after every row.
template <typename T, bool kChecks = true>
struct FloatingProduct {
  using Element = T;
  using First = ComputeType<T>;
  using Second = int64_t;
  using Narrow = FloatingProduct<First, kChecks>;
  using Unchecked = FloatingProduct<T, false>;
  static constexpr bool kRounds = true;
  static constexpr bool kSecondIsRare = true;  // only shifted cells have one

  T* output;
  First* mantissa;  // with `packed`, the residual; or nullptr
  int32_t* packed;

  JB_INLINE Cells<First, Second> ResultCells() const {
    return mantissa == nullptr ? CellsAt<FloatingProduct>(output) : Cells<First, Second>{mantissa, nullptr};
  }

  JB_INLINE void Start(int64_t count, Cells<First, Second> cells) const { std::fill_n(cells.first, count, First{1}); }

  JB_INLINE void Fold(const T* values, int32_t /*row*/, int64_t width, Cells<First, Second> cells) const {
    ForEachPart(values, width, [&](int64_t begin, int64_t count, const auto* numbers) __attribute__((always_inline)) {
      FoldNumbers(numbers, count, cells + begin);
    });
  }

  template <typename Number>
  JB_INLINE static void FoldNumbers(const Number* values, int64_t width, Cells<First, Second> cells) {
    if constexpr (!kChecks) return Multiply(values, width, cells.first);
    if (width > kMaxNarrowWidth) {
      // Almost all wide rows end here: neither the cells nor the products are shifted.
      BitsOf<First> excess = 0;
      JB_VECTORIZE
      for (int64_t i = 0; i < width; ++i) {
        const First cell = cells.first[i], product = cell * static_cast<First>(values[i]);
        excess = std::max(excess, std::max(ExcessOverSmallest(cell), ExcessOverSmallest(product)));
      }
      if (excess < kFirstShiftedExcess<First>) return Multiply(values, width, cells.first);
    }
    SignedBits<First> leaves = 0;
    JB_VECTORIZE
    for (int64_t i = 0; i < width; ++i) {
      leaves |= LeavesSide(cells.first[i], cells.first[i] * static_cast<First>(values[i]));
    }
    if (leaves == 0) return Multiply(values, width, cells.first);
    JB_VECTORIZE
    for (int64_t i = 0; i < width; ++i) {
      SetShifted(ProductTimes(ProductOf(cells, i), static_cast<First>(values[i])), cells, i);
    }
  }

  template <typename Number>
  JB_INLINE static void Multiply(const Number* values, int64_t width, First* cells) {
    JB_VECTORIZE
    for (int64_t i = 0; i < width; ++i) cells[i] *= static_cast<First>(values[i]);
  }

  JB_INLINE Narrow ForNarrow() const { return {}; }
  void Convert(const T* from, int64_t count, First* to) const { Widen(from, count, to); }

  JB_INLINE void Merge(int64_t count, Cells<First, Second> later, Cells<First, Second> cells) const {
    if (!AnyIsShifted(later.first, count)) return FoldNumbers(later.first, count, cells);
    for (int64_t i = 0; i < count; ++i) {
      SetShifted(ProductOfBoth(ProductOf(cells, i), ProductOf(later, i)), cells, i);
    }
  }

  JB_INLINE bool EndUnchecked(int64_t count, Cells<First, Second> cells) const {
    BitsOf<First> excess = 0;
    JB_VECTORIZE
    for (int64_t i = 0; i < count; ++i) excess = std::max(excess, ExcessOverSmallest(cells.first[i]));
    if (excess < kFirstShiftedExcess<First>) return true;
    for (int64_t i = 0; i < count; ++i) {
      const auto field = FieldOf(cells.first[i]);
      if (field == 0 || field == FloatingFormat<First>::kExponentMask) return false;
      if (!IsShifted(cells.first[i])) continue;
      SetShifted({MantissaOf(cells.first[i]), ExponentOf(cells.first[i]) * (1 << kCountBits)}, cells, i);
    }
    return true;
  }

  JB_INLINE static Product<First> ProductOf(Cells<First, Second> cells, int64_t i) {
    return {cells.first[i], IsShifted(cells.first[i]) ? cells.second[i] : 0};
  }

  // Stores a product whose mantissa is in [1, 4).
  JB_INLINE static void SetShifted(Product<First> product, Cells<First, Second> cells, int64_t i) {
    constexpr int kShift = kShiftedField<First> - FloatingFormat<First>::kExponentBias;
    cells.first[i] = product.mantissa * PowerOfTwo<First>(kShift);
    cells.second[i] = product.packed - kShift * (1 << kCountBits);
  }

  JB_INLINE void Write(int64_t count, int64_t first_cell, const int32_t* /*counts*/, Cells<First, Second> cells) const {
    T* const to = output + first_cell;
    if (AnyIsShifted(cells.first, count)) {
      StoreEach(count, to, [&](int64_t i) __attribute__((always_inline)) { return ValueOf(ProductOf(cells, i)); });
      WriteResiduals(cells.first, count, first_cell,
                     [&](int64_t i) __attribute__((always_inline)) { return ProductOf(cells, i).packed; });
    } else {
      WriteNumbers(cells.first, count, to);
      WriteResiduals(cells.first, count, first_cell,
                     [](int64_t) __attribute__((always_inline)) { return SignedBits<First>{0}; });
    }
  }

  template <typename PackedOf>
  JB_INLINE void WriteResiduals(const First* mantissas, int64_t count, int64_t first_cell,
                                const PackedOf& packed_of) const {
    if (mantissa == nullptr) return;
    JB_VECTORIZE
    for (int64_t i = 0; i < count; ++i) {
      const auto residual = Residual<First>::Of(mantissas[i], packed_of(i));
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
template <typename C>
constexpr SignedBits<C> kMaxExponent = FloatingFormat<C>::kExponentBias / 4 - 1;

// The numerators of gradients, product * cotangent; NaN where the general formula is needed. The bounds of exponents keep
// the intermediates from overflow and underflow.
template <typename T, typename C>
JB_CPU_CLONES void WriteNumerators(const T* d_output, const C* mantissa, const int32_t* packed, int64_t count,
                                   C* numerators) {
  constexpr int32_t kUnit = 1 << kCountBits;
  ForEachPart(d_output, count, [&](int64_t begin, int64_t part, const auto* factors) __attribute__((always_inline)) {
    JB_VECTORIZE
    for (int64_t i = 0; i < part; ++i) {
      const C factor = static_cast<C>(factors[i]);
      const Residual<C> product{mantissa[begin + i], packed[begin + i]};
      const bool is_far = factor != 0 && std::abs(ExponentOf(factor)) > kMaxExponent<C>;
      const bool is_unusual = (std::abs(product.packed) & ~kUnit) != 0 || is_far;
      numerators[begin + i] = is_unusual ? std::numeric_limits<C>::quiet_NaN() : product.Value() * factor;
    }
  });
}

// Writes numerator / number. Returns false if a number needs the general formula.
template <typename T, typename C>
JB_CPU_CLONES bool Divide(const C* numerators, const T* data, int64_t count, T* d_data) {
  int32_t unusual = 0;
  ForEachPart(data, count, [&](int64_t begin, int64_t part, const auto* numbers) __attribute__((always_inline)) {
    JB_VECTORIZE
    for (int64_t i = 0; i < part; ++i) {
      const C numerator = numerators[begin + i];
      const bool is_far = std::abs(ExponentOf(static_cast<C>(numbers[i]))) > kMaxExponent<C>;
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

// Calls body(begin, count) for parts of `count` numbers.
template <typename Body>
JB_INLINE void ForEachDivision(int64_t count, const Body& body) {
  for (int64_t begin = 0; begin < count; begin += kDividedNumbers)
    body(begin, std::min(kDividedNumbers, count - begin));
}

template <typename T>
class ProductGradient {
 public:
  using C = ComputeType<T>;

  explicit ProductGradient(const ProductBackwardCall& call)
      : call_(call),
        d_output_(call.d_output, call.problem.segments * call.problem.features),
        mantissa_(call.mantissa, call.problem.segments * call.problem.features),
        packed_(call.packed, call.problem.segments * call.problem.features) {}

  // Returns false if memory allocation fails.
  bool Write(ffi::ThreadPool& pool) const {
    const Problem& problem = call_.problem;
    if (problem.batch * problem.rows * problem.features == 0) return true;
    // Wide rows read their cells from memory about as fast as from an array that is made for them.
    const bool is_narrow = problem.features <= kMaxGatheredWidth;
    const bool has_few_cells = is_narrow ? problem.segments <= 2 * problem.rows : 2 * problem.segments <= problem.rows;
    if (has_few_cells) return WriteFromNumerators(pool);
    WriteFromCells(pool);
    return true;
  }

 private:
  // Computes a numerator for each cell, so that rows gather one number instead of three.
  bool WriteFromNumerators(ffi::ThreadPool& pool) const {
    const Problem& problem = call_.problem;
    const bool are_shared = call_.d_output.is_shared && call_.mantissa.is_shared;
    const int64_t cells = problem.segments * problem.features, batches = are_shared ? 1 : problem.batch;
    const auto numerators = Allocate<C>(batches * cells);
    if (numerators == nullptr) return false;
    const int64_t cell_bytes = sizeof(T) + 2 * sizeof(C) + sizeof(int32_t);
    ForEachRangeOfBatch(pool, batches, cells, cells * cell_bytes, [&](int64_t batch, int64_t begin, int64_t end) {
      const auto at = [&](const auto& array) { return array.Of(batch) + begin; };
      WriteNumerators(at(d_output_), at(mantissa_), at(packed_), end - begin, numerators.get() + batch * cells + begin);
    });
    const auto compute = [&](const NumberBlock& block, T* to, const C* of_block) {
      const T* const data = DataOf(block);
      ForEachDivision(block.count(), [&](int64_t begin, int64_t count) {
        if (Divide(of_block + begin, data + begin, count, to + begin)) return;
        T d_output[kDividedNumbers];
        C mantissa[kDividedNumbers];
        int32_t packed[kDividedNumbers];
        for (int64_t i = 0; i < count; ++i) {
          const auto number = [&](const auto& array) {
            const int64_t row = (begin + i) / block.width, feature = (begin + i) % block.width;
            return array.Of(block.batch)[block.Cell(row) + feature];
          };
          d_output[i] = number(d_output_);
          mantissa[i] = number(mantissa_);
          packed[i] = number(packed_);
        }
        WriteGradients(d_output, mantissa, packed, data + begin, count, to + begin);
      });
    };
    Map(pool, compute, BatchArray<C>(numerators.get(), are_shared ? 0 : cells));
    return true;
  }

  void WriteFromCells(ffi::ThreadPool& pool) const {
    const auto compute = [&](const NumberBlock& block, T* to, const T* d_output, const C* mantissa,
                             const int32_t* packed) {
      const T* const data = DataOf(block);
      ForEachDivision(block.count(), [&](int64_t begin, int64_t count) {
        C numerators[kDividedNumbers];
        WriteNumerators(d_output + begin, mantissa + begin, packed + begin, count, numerators);
        if (Divide(numerators, data + begin, count, to + begin)) return;
        WriteGradients(d_output + begin, mantissa + begin, packed + begin, data + begin, count, to + begin);
      });
    };
    Map(pool, compute, d_output_, mantissa_, packed_);
  }

  template <typename Compute, typename... Numbers>
  void Map(ffi::ThreadPool& pool, const Compute& compute, const BatchArray<Numbers>&... arrays) const {
    RowMap(call_.problem, static_cast<T*>(call_.d_data), compute, arrays...).Run(pool, SegmentIds(call_));
  }

  const T* DataOf(const NumberBlock& block) const {
    return call_.data.Of<T>(block.batch, call_.problem.rows * call_.problem.features) + block.First();
  }

  const ProductBackwardCall& call_;
  const BatchArray<T> d_output_;
  const BatchArray<C> mantissa_;
  const BatchArray<int32_t> packed_;
};

template <typename T>
using ProductOf = std::conditional_t<kIsFloating<T>, FloatingProduct<T>, IntegerProduct<T>>;

}  // namespace

std::vector<const char*> ProductCall::Strategies() { return RoundingStrategies(); }

Plan ProductCall::MakePlan() const { return PlanReduction<ProductOf>(*this, JB_DISPATCH(DispatchWrapping)); }

bool ProductCall::Run(ffi::ThreadPool& pool) const {
  return DispatchOr(true, type, JB_DISPATCH(DispatchWrapping), [&](auto tag) {
    using T = typename decltype(tag)::type;
    T* const to = static_cast<T*>(output);
    if constexpr (kIsFloating<T>) {
      return ReduceRows(pool, *this, data, FloatingProduct<T>{to, static_cast<ComputeType<T>*>(mantissa), packed});
    } else {
      return ReduceRows(pool, *this, data, IntegerProduct<T>{to});
    }
  });
}

std::vector<const char*> ProductBackwardCall::Strategies() { return GatherStrategies(); }

Plan ProductBackwardCall::MakePlan() const { return PlanOfGather(problem); }

bool ProductBackwardCall::Run(ffi::ThreadPool& pool) const {
  return DispatchOr(true, type, JB_DISPATCH(DispatchFloating),
                    [&](auto tag) { return ProductGradient<typename decltype(tag)::type>(*this).Write(pool); });
}

}  // namespace jax_baracuda::segment
