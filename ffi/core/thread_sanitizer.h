// Tells ThreadSanitizer the order that XLA and the standard library bring into what threads do. They are not
// instrumented, so without it whatever one thread hands to another would look like a race.
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

// What threads did before HappensBefore(x) comes before what a thread does after HappensAfter(x). Only addresses count.
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

// Gives tasks time to start, so that they share in work that one thread would else have done before they wake.
inline void LetTasksStart() {
#ifdef JB_THREAD_SANITIZER
  std::this_thread::sleep_for(std::chrono::microseconds(200));
#endif
}

// Lives while a handler runs. XLA hands on the memory of handlers that have returned, so these come before those that
// start later; handlers that overlap are not ordered.
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
