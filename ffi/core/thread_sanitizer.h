// Tells ThreadSanitizer about synchronisation inside XLA and the standard library. They are not instrumented, so every
// hand-over between threads would look like a race.
#pragma once

#if defined(__SANITIZE_THREAD__)
#define JB_THREAD_SANITIZER
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define JB_THREAD_SANITIZER
#endif
#endif

#ifdef JB_THREAD_SANITIZER
#include <chrono>
#include <thread>

extern "C" void __tsan_acquire(void* address);
extern "C" void __tsan_release(void* address);
#endif

namespace jax_baracuda {

// Actions before HappensBefore(x) happen before actions after HappensAfter(x). Only the address matters.
inline void HappensBefore([[maybe_unused]] void* address) {
#ifdef JB_THREAD_SANITIZER
  __tsan_release(address);
#endif
}

inline void HappensAfter([[maybe_unused]] void* address) {
#ifdef JB_THREAD_SANITIZER
  __tsan_acquire(address);
#endif
}

// Gives tasks time to start. Otherwise the calling thread would finish small work before any other thread wakes.
inline void LetTasksStart() {
#ifdef JB_THREAD_SANITIZER
  std::this_thread::sleep_for(std::chrono::microseconds(200));
#endif
}

// Lives while a handler runs. XLA reuses the memory of handlers that have returned, so a returned handler happens
// before one that starts later. Overlapping handlers are not ordered.
class ScopedHandler {
 public:
  ScopedHandler() { HappensAfter(&returned_); }
  ~ScopedHandler() { HappensBefore(&returned_); }
  ScopedHandler(const ScopedHandler&) = delete;
  ScopedHandler& operator=(const ScopedHandler&) = delete;

 private:
  static inline char returned_ = 0;
};

}  // namespace jax_baracuda
