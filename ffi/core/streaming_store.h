// Stores that bypass the caches, for results larger than any cache and written in random order. An ordinary store would
// first read each cache line from memory.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "ffi/core/alignment.h"

namespace jax_baracuda {

// Copies bytes. Streams with SSE2 if both addresses and the size are multiples of kVectorBytes.
inline void StreamBytes(void* to, const void* from, int64_t bytes) {
#if defined(__SSE2__)
  if (AreAligned(kVectorBytes, to, from) && bytes % kVectorBytes == 0) {
    auto* target = static_cast<__m128i*>(to);
    const auto* source = static_cast<const __m128i*>(from);
    for (int64_t i = 0; i < bytes / kVectorBytes; ++i) _mm_stream_si128(target + i, _mm_load_si128(source + i));
    return;
  }
#endif
  std::memcpy(to, from, static_cast<size_t>(bytes));
}

// Makes this thread's streamed stores visible to other threads before its later stores.
inline void FinishStreaming() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace jax_baracuda
