#include "ffi/core/float16_cpu.h"

#include <cstdint>

#include "ffi/core/cpu_clones.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#include <immintrin.h>
#define JB_HAS_F16C_INTRINSICS 1
#endif

namespace jax_baracuda {
namespace {

JB_CPU_CLONES void WidenOnAny(const Float16* from, int64_t count, float* to) {
  JB_VECTORIZE
  for (int64_t i = 0; i < count; ++i) to[i] = from[i];
}

JB_CPU_CLONES void AddWidenedOnAny(const Float16* from, int64_t count, float* sums) {
  JB_VECTORIZE
  for (int64_t i = 0; i < count; ++i) sums[i] += from[i];
}

JB_CPU_CLONES void NarrowOnAny(const float* from, int64_t count, Float16* to) {
  JB_VECTORIZE
  for (int64_t i = 0; i < count; ++i) Store(from[i], to + i);
}

#ifdef JB_HAS_F16C_INTRINSICS

#define JB_F16C __attribute__((target("avx2,f16c")))

constexpr int64_t kVector = 8;

// The last vector overlaps the one before it.
JB_F16C void WidenByF16c(const Float16* from, int64_t count, float* to) {
  const auto convert = [&](int64_t i) JB_F16C {
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  };
  for (int64_t i = 0; i + kVector <= count; i += kVector) convert(i);
  if (count % kVector == 0) return;
  if (count > kVector) return convert(count - kVector);
  for (int64_t i = 0; i < count; ++i) to[i] = _cvtsh_ss(from[i].bits);
}

JB_F16C void AddWidenedByF16c(const Float16* from, int64_t count, float* sums) {
  int64_t i = 0;
  for (; i + kVector <= count; i += kVector) {
    const __m256 numbers = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
    _mm256_storeu_ps(sums + i, _mm256_add_ps(_mm256_loadu_ps(sums + i), numbers));
  }
  for (; i < count; ++i) sums[i] += _cvtsh_ss(from[i].bits);
}

JB_F16C void NarrowByF16c(const float* from, int64_t count, Float16* to) {
  constexpr int kToNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  const auto convert = [&](int64_t i) JB_F16C {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), kToNearest));
  };
  for (int64_t i = 0; i + kVector <= count; i += kVector) convert(i);
  if (count % kVector == 0) return;
  if (count > kVector) return convert(count - kVector);
  for (int64_t i = 0; i < count; ++i) to[i].bits = _cvtss_sh(from[i], kToNearest);
}

bool HasF16c() {
  unsigned eax, ebx, ecx, edx;  // not every compiler accepts "f16c" in __builtin_cpu_supports
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

const auto kWiden = HasF16c() ? WidenByF16c : WidenOnAny;
const auto kAddWidened = HasF16c() ? AddWidenedByF16c : AddWidenedOnAny;
const auto kNarrow = HasF16c() ? NarrowByF16c : NarrowOnAny;

#else

constexpr auto kWiden = WidenOnAny;
constexpr auto kAddWidened = AddWidenedOnAny;
constexpr auto kNarrow = NarrowOnAny;

#endif

}  // namespace

void Widen(const Float16* from, int64_t count, float* to) { kWiden(from, count, to); }

JB_CPU_CLONES void Widen(const BFloat16* from, int64_t count, float* to) {
  JB_VECTORIZE
  for (int64_t i = 0; i < count; ++i) to[i] = from[i];
}

void AddWidened(const Float16* from, int64_t count, float* sums) { kAddWidened(from, count, sums); }

void Narrow(const float* from, int64_t count, Float16* to) { kNarrow(from, count, to); }

JB_CPU_CLONES void Narrow(const float* from, int64_t count, BFloat16* to) {
  JB_VECTORIZE
  for (int64_t i = 0; i < count; ++i) Store(from[i], to + i);
}

}  // namespace jax_baracuda
