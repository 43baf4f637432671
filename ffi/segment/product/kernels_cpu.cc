// The CPU kernels of segment_prod and its gradient. The arithmetic of arithmetic.h is written here so that loops over
// features vectorise, with the same results: without branches, and in a shorter form for rows of nothing but ordinary
// numbers.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "ffi/core/bit_cast.h"
#include "ffi/segment/engine/rows_cpu.h"
#include "ffi/segment/product/arithmetic.h"
#include "ffi/segment/product/handler.h"

namespace jax_baracuda::segment {
namespace {

template <typename C>
using SignedBits = std::conditional_t<sizeof(C) == 4, int32_t, int64_t>;

template <typename C>
struct Format : FloatingFormat<C> {
  using Bits = SignedBits<C>;
  static constexpr Bits kSign = std::numeric_limits<Bits>::min();
  static constexpr Bits kOne = static_cast<Bits>(FloatingFormat<C>::kExponentBias) << FloatingFormat<C>::kMantissaBits;
  static constexpr Bits kMantissa = (Bits{1} << FloatingFormat<C>::kMantissaBits) - 1;
};

// The exponent field of a number.
template <typename C>
JB_INLINE typename Format<C>::Bits FieldOf(C value) {
  return (BitCast<typename Format<C>::Bits>(value) >> Format<C>::kMantissaBits) & Format<C>::kExponentMask;
}

// 0 if a number is normal and its exponent field kMargin away at least from those of zero and infinity, else 1. (An
// integer, so that a loop can gather it for many numbers.)
template <typename C>
JB_INLINE typename Format<C>::Bits IsUnusual(C value) {
  constexpr int kMargin = 4;
  const auto field = FieldOf(value);
  return field < kMargin || field > Format<C>::kExponentMask - kMargin ? 1 : 0;
}

// A number as the factor that it is to a mantissa, and what it adds to a packed product.
template <typename C>
struct Factor {
  C mantissa;        // with the sign; 1 for what is zero, infinite or NaN
  int32_t exponent;  // 0 for those
  int32_t kind;      // their ProductClass, or kZero
  int32_t is_special;

  JB_INLINE explicit Factor(C value) {
    using F = Format<C>;
    using Bits = typename F::Bits;
    constexpr int kShift = F::kMantissaBits + 1;  // makes subnormal numbers normal
    const Bits field = FieldOf(value);
    const C scaled = value * (field == 0 ? PowerOfTwo<C>(kShift) : C{1});
    const Bits bits = BitCast<Bits>(scaled), scaled_field = FieldOf(scaled);
    const bool special = scaled_field == 0 || scaled_field == F::kExponentMask;
    mantissa = BitCast<C>((bits & (special ? F::kSign : F::kSign | F::kMantissa)) | F::kOne);
    exponent = special ? 0 : static_cast<int32_t>(scaled_field - F::kExponentBias - (field == 0 ? kShift : 0));
    kind = scaled_field == 0 ? kZero : (bits & F::kMantissa) == 0 ? kInfinity : kNan;
    kind = special ? kind : static_cast<int32_t>(kZero);
    is_special = special ? 1 : 0;
  }
};

constexpr int32_t kMaxExponent = (1 << 25) - 4096;

JB_INLINE int32_t AddExponentAndClamp(int32_t packed, int32_t exponent) {
  const int32_t sum = (packed >> 6) + exponent;
  return std::min(std::max(sum, -kMaxExponent), kMaxExponent) * 64 + (packed & 63);
}

template <typename C>
JB_INLINE void Multiply(C value, C& mantissa, int32_t& packed) {
  const Factor<C> factor(value);
  const C product = mantissa * factor.mantissa;
  const bool is_above = std::fabs(product) >= C{2};
  mantissa = product * (is_above ? C{0.5} : C{1});
  const int32_t next = AddExponentAndClamp(packed, factor.exponent + (is_above ? 1 : 0));
  const int32_t one_more = ((packed >> factor.kind) & 3) < 2 ? factor.is_special : 0;
  packed = next + (one_more << factor.kind);
}

// A mantissa under reduction is within 2^-kHeldExponent and 2^kHeldExponent, and brought back to [1, 2) only where it
// would leave them. In between a row is one product a cell, which rounds as that of mantissas in [1, 2) does.
template <typename C>
inline constexpr int kHeldExponent = FloatingFormat<C>::kExponentBias / 2 - 3;

// 0 if a mantissa may be held like that, else 1; products with a zero, an infinity, a NaN or a subnormal number may not.
template <typename C>
JB_INLINE typename Format<C>::Bits LeavesHeldRange(C mantissa) {
  return std::abs(FieldOf(mantissa) - Format<C>::kExponentBias) > kHeldExponent<C> ? 1 : 0;
}

// Brings a mantissa that is held back to [1, 2).
template <typename C>
JB_INLINE void Normalize(C& mantissa, int32_t& packed) {
  using F = Format<C>;
  const auto bits = BitCast<typename F::Bits>(mantissa);
  packed = AddExponentAndClamp(packed, static_cast<int32_t>(FieldOf(mantissa) - F::kExponentBias));
  mantissa = BitCast<C>((bits & (F::kSign | F::kMantissa)) | F::kOne);
}

// The number that a mantissa which is held and a packed product stand for.
template <typename C>
JB_INLINE C Value(C mantissa, int32_t packed) {
  using F = Format<C>;
  using Bits = typename F::Bits;
  // Two steps of which only the last one can round. Beyond the bounds the number is zero or infinite.
  constexpr int32_t kMax = F::kExponentBias + F::kMantissaBits + 4 + kHeldExponent<C>;
  const int32_t exponent = std::min(std::max(packed >> 6, -kMax), kMax), half = exponent >> 1;
  const auto power = [](int32_t e) __attribute__((always_inline)) {
    return BitCast<C>(static_cast<Bits>(e + F::kExponentBias) << F::kMantissaBits);
  };
  const C scaled = mantissa * power(half) * power(exponent - half);
  constexpr C kInfinite = std::numeric_limits<C>::infinity(), kNoNumber = std::numeric_limits<C>::quiet_NaN();
  const bool has_zero = (packed & (3 << kZero)) != 0, has_infinity = (packed & (3 << kInfinity)) != 0;
  const bool is_nan = (packed & (3 << kNan)) != 0 || (has_zero && has_infinity);
  Bits magnitude = BitCast<Bits>(scaled) & ~F::kSign;
  magnitude = has_infinity ? BitCast<Bits>(kInfinite) : magnitude;
  magnitude = has_zero ? Bits{0} : magnitude;
  magnitude = is_nan ? BitCast<Bits>(kNoNumber) : magnitude;
  return BitCast<C>(magnitude | (BitCast<Bits>(mantissa) & F::kSign));
}

// The product of all members but one and of `by`, which may bring it back into range.
template <typename C>
JB_INLINE C ValueWithout(C value, C mantissa, int32_t packed, C by) {
  const Factor<C> factor(value), other(by);
  const int32_t one_less = ((packed >> factor.kind) & 3) == 1 ? factor.is_special : 0;
  const int32_t others = AddExponentAndClamp(packed, other.exponent - factor.exponent) - (one_less << factor.kind);
  const int32_t one_more = ((others >> other.kind) & 3) < 2 ? other.is_special : 0;
  return Value(mantissa / factor.mantissa * other.mantissa, others + (one_more << other.kind));
}

// The product of all members but one, where the number is not unusual and the product not extreme.
template <typename C>
JB_INLINE C ValueWithoutOrdinary(C value, C mantissa, int32_t packed) {
  using F = Format<C>;
  using Bits = typename F::Bits;
  return mantissa / value * BitCast<C>(static_cast<Bits>((packed >> 6) + F::kExponentBias) << F::kMantissaBits);
}

// 0 if a product is of ordinary numbers alone and its exponent, with and without that of one of them, that of a normal
// number, else 1.
template <typename C>
JB_INLINE int32_t IsExtreme(int32_t packed, C value) {
  constexpr int32_t kBias = FloatingFormat<C>::kExponentBias, kMax = kBias - 2;
  const int32_t exponent = packed >> 6, others = exponent - (static_cast<int32_t>(FieldOf(value)) - kBias);
  return (packed & 63) != 0 || std::abs(exponent) > kMax || std::abs(others) > kMax ? 1 : 0;
}

template <typename T>
struct FloatingProduct {
  using Element = T;
  using First = ComputeType<T>;
  using Second = int32_t;
  static constexpr bool kRounds = true, kHoldsRuns = true, kFoldsBoth = false;

  T* output;
  First* mantissa;  // with `packed` the residual, or nullptr
  int32_t* packed;

  JB_INLINE CellsOf<FloatingProduct> ResultCells() const { return {mantissa, packed}; }  // if there is a residual

  JB_INLINE void Start(int64_t count, CellsOf<FloatingProduct> cells) const {
    std::fill_n(cells.first, count, First{1});
    std::fill_n(cells.second, count, 0);
  }

  template <typename Number>
  JB_INLINE void Fold(const Number* values, int32_t /*row*/, int64_t width, CellsOf<FloatingProduct> cells) const {
    SignedBits<First> leaves = 0;
    JB_VECTORIZE
    for (int64_t i = 0; i < width; ++i) leaves |= LeavesHeldRange(cells.first[i] * static_cast<First>(values[i]));
    if (leaves == 0) {
      JB_VECTORIZE
      for (int64_t i = 0; i < width; ++i) cells.first[i] *= static_cast<First>(values[i]);
    } else {
      JB_VECTORIZE
      for (int64_t i = 0; i < width; ++i) {
        Normalize(cells.first[i], cells.second[i]);
        Multiply(static_cast<First>(values[i]), cells.first[i], cells.second[i]);
      }
    }
  }

  JB_INLINE void Merge(int64_t count, CellsOf<FloatingProduct> later, CellsOf<FloatingProduct> cells) const {
    for (int64_t i = 0; i < count; ++i) {
      Normalize(cells.first[i], cells.second[i]);
      Normalize(later.first[i], later.second[i]);
      Product<First> product{cells.first[i], cells.second[i]};
      MergeProduct(product, Product<First>{later.first[i], later.second[i]});
      cells.first[i] = product.mantissa;
      cells.second[i] = product.packed;
    }
  }

  JB_INLINE void WriteEmpty(int64_t count, int64_t first_cell) const {
    std::fill_n(output + first_cell, count, static_cast<T>(First{1}));
    if (mantissa != nullptr) Start(count, ResultCells() + first_cell);
  }

  JB_INLINE void Write(int64_t count, int64_t first_cell, const int32_t* /*counts*/,
                       CellsOf<FloatingProduct> cells) const {
    T* const to = output + first_cell;
    int32_t are_packed = 0;
    JB_VECTORIZE
    for (int64_t i = 0; i < count; ++i) are_packed |= cells.second[i];
    if (are_packed == 0) {
      WriteNumbers(cells.first, count, to);  // what Value is of these
    } else {
      StoreEach(count, to,
                [&](int64_t i) __attribute__((always_inline)) { return Value(cells.first[i], cells.second[i]); });
    }
    if (mantissa == nullptr) return;
    JB_VECTORIZE
    for (int64_t i = 0; i < count; ++i) Normalize(cells.first[i], cells.second[i]);
    WriteNumbers(cells.first, count, mantissa + first_cell);
    WriteNumbers(cells.second, count, packed + first_cell);
  }
};

// Of unsigned integers, which wrap.
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

constexpr int64_t kBlockNumbers = 128;  // of a block of narrow rows: one number that is not ordinary makes all slower

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

// For rows of any width, so that it is compiled once.
template <typename T, typename C>
JB_CPU_CLONES void GradientOfAnyRow(const T* d_output, const C* mantissa, const int32_t* packed, const T* data,
                                    int64_t width, T* d_row) {
  JB_VECTORIZE
  for (int64_t i = 0; i < width; ++i) {
    Store(ValueWithout(static_cast<C>(data[i]), mantissa[i], packed[i], static_cast<C>(d_output[i])), d_row + i);
  }
}

template <typename T, typename C, typename Number>
JB_INLINE void GradientOfPart(const T* d_output, const C* mantissa, const int32_t* packed, const T* data,
                              const Number* d_numbers, const Number* numbers, int64_t width, T* d_row) {
  SignedBits<C> unusual = 0;
  int32_t extreme = 0;
  JB_VECTORIZE
  for (int64_t i = 0; i < width; ++i) {
    unusual |= IsUnusual(static_cast<C>(numbers[i]));
    extreme |= IsExtreme(packed[i], static_cast<C>(numbers[i]));
  }
  if (unusual == 0 && extreme == 0) {
    StoreEach(width, d_row, [&](int64_t i) __attribute__((always_inline)) {
      const C others = ValueWithoutOrdinary(static_cast<C>(numbers[i]), mantissa[i], packed[i]);
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

// The product, and its cotangent, of the segment of each row of a block, so that a loop over narrow rows vectorises.
template <typename T>
struct ProductsOfRows {
  T d_output[kBlockNumbers];
  ComputeType<T> mantissa[kBlockNumbers];
  int32_t packed[kBlockNumbers];
};

template <typename T>
JB_CPU_CLONES void Gradient(const Problem problem, int64_t batch, int64_t row_begin, int64_t row_end,
                            const GradientArrays<T> arrays) {
  const int64_t features = problem.features, of_batch = batch * problem.segments * features;
  const T* const d_output = arrays.d_output + (arrays.d_output_is_shared ? 0 : of_batch);
  const auto* const mantissa = arrays.mantissa + (arrays.product_is_shared ? 0 : of_batch);
  const int32_t* const packed = arrays.packed + (arrays.product_is_shared ? 0 : of_batch);
  const T* const data = arrays.data + problem.DataRow(batch, 0) * features;
  const auto of_narrow_rows = [&](auto width) __attribute__((always_inline)) {
    T* const d_data = arrays.d_data + batch * problem.rows * width;
    const auto of_ids = [&](int64_t ids_begin, int64_t ids_end, const int32_t* row_ids,
                            int64_t first_segment) __attribute__((always_inline)) {
      ProductsOfRows<T> of_rows;
      for (int64_t begin = ids_begin; begin < ids_end; begin += kBlockNumbers / width) {
        const int64_t end = std::min(begin + kBlockNumbers / width, ids_end);
        bool has_dropped = false;
        for (int64_t row = begin; row < end; ++row) {
          const int64_t segment = row_ids[row - ids_begin], first = (row - begin) * width;
          const bool is_member = static_cast<uint64_t>(segment) < static_cast<uint64_t>(problem.segments);
          const int64_t cell = is_member ? (first_segment + segment) * width : 0;
          has_dropped = has_dropped || !is_member;
          for (int64_t i = 0; i < width; ++i) {
            of_rows.d_output[first + i] = d_output[cell + i];
            of_rows.mantissa[first + i] = mantissa[cell + i];
            of_rows.packed[first + i] = packed[cell + i];
          }
        }
        GradientOfRow(of_rows.d_output, of_rows.mantissa, of_rows.packed, data + begin * width, (end - begin) * width,
                      d_data + begin * width);
        for (int64_t row = begin; has_dropped && row < end; ++row) {
          const int64_t segment = row_ids[row - ids_begin];
          if (static_cast<uint64_t>(segment) >= static_cast<uint64_t>(problem.segments)) {
            WriteZeros(d_data + row * width, width);
          }
        }
      }
    };
    ForEachBlockOfIds(problem, arrays.ids, batch, row_begin, row_end, of_ids);
  };
  if (problem.segments > 0 && DispatchNarrow(features, of_narrow_rows)) return;
  const auto prefetch = [&](int64_t segment) __attribute__((always_inline)) {
    PrefetchRow(d_output + segment * features, features);
    PrefetchRow(mantissa + segment * features, features);
    PrefetchRow(packed + segment * features, features);
  };
  WriteRowsOfSegments(problem, arrays.ids, batch, row_begin, row_end, features, arrays.d_data, prefetch,
                      [&](int64_t row, int64_t segment, T* d_row) __attribute__((always_inline)) {
                        const int64_t first = segment * features;
                        GradientOfRow(d_output + first, mantissa + first, packed + first, data + row * features,
                                      features, d_row);
                      });
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
    ForEachChunkOfRows(pool, call.problem, arrays.d_data, sizeof(T),
                       [&](int64_t batch, int64_t row_begin, int64_t row_end) {
                         Gradient(call.problem, batch, row_begin, row_end, arrays);
                       });
  });
  return true;
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
