#include "ffi/segment/engine/list_rows_cpu.h"

#include <cstdint>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define JB_HAS_AVX512_INTRINSICS 1
#endif

namespace jax_baracuda::segment {
namespace {

int64_t ListFrom(int64_t i, const int32_t* ids, int64_t count, int32_t first, uint32_t size, int64_t num_listed,
                 int32_t* listed) {
  for (; i < count; ++i) {
    listed[num_listed] = static_cast<int32_t>(i);
    num_listed += static_cast<uint32_t>(ids[i]) - static_cast<uint32_t>(first) < size ? 1 : 0;
  }
  return num_listed;
}

int64_t ListOnAny(const int32_t* ids, int64_t count, int32_t first, uint32_t size, int32_t* listed) {
  return ListFrom(0, ids, count, first, size, 0, listed);
}

#ifdef JB_HAS_AVX512_INTRINSICS

// Stores full vectors, because some processors store parts of a vector slowly.
__attribute__((target("avx512f,popcnt"))) int64_t ListByAvx512(const int32_t* ids, int64_t count, int32_t first,
                                                               uint32_t size, int32_t* listed) {
  constexpr int64_t kVector = 16;
  static_assert(kVector <= kListSlack);
  const __m512i first_id = _mm512_set1_epi32(first), num_ids = _mm512_set1_epi32(static_cast<int32_t>(size));
  __m512i places = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  int64_t num_listed = 0, i = 0;
  for (; i + kVector <= count; i += kVector) {
    const __m512i offsets = _mm512_sub_epi32(_mm512_loadu_si512(ids + i), first_id);
    const __mmask16 is_listed = _mm512_cmplt_epu32_mask(offsets, num_ids);
    _mm512_storeu_si512(listed + num_listed, _mm512_maskz_compress_epi32(is_listed, places));
    num_listed += __builtin_popcount(is_listed);
    places = _mm512_add_epi32(places, _mm512_set1_epi32(kVector));
  }
  return ListFrom(i, ids, count, first, size, num_listed, listed);
}

bool HasAvx512() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f");
}

const auto kList = HasAvx512() ? ListByAvx512 : ListOnAny;

#else

constexpr auto kList = ListOnAny;

#endif

}  // namespace

int64_t ListRows(const int32_t* ids, int64_t count, int32_t first, uint32_t size, int32_t* listed) {
  return kList(ids, count, first, size, listed);
}

}  // namespace jax_baracuda::segment
