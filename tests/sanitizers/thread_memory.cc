// memcpy, memmove and memset of the CPU module under ThreadSanitizer. The sanitizer's own do not help: it ignores calls
// of library functions, because most come from code that is not instrumented. These functions report their accesses.
#include <dlfcn.h>

#include <cstddef>

extern "C" {

void __tsan_read_range(void* address, size_t size);
void __tsan_write_range(void* address, size_t size);

#define JB_THIS_MODULE_ONLY __attribute__((visibility("hidden"), no_sanitize_thread))

JB_THIS_MODULE_ONLY void* memcpy(void* to, const void* from, size_t size) {
  static const auto next = reinterpret_cast<void* (*)(void*, const void*, size_t)>(dlsym(RTLD_NEXT, "memcpy"));
  __tsan_read_range(const_cast<void*>(from), size);
  __tsan_write_range(to, size);
  return next(to, from, size);
}

JB_THIS_MODULE_ONLY void* memmove(void* to, const void* from, size_t size) {
  static const auto next = reinterpret_cast<void* (*)(void*, const void*, size_t)>(dlsym(RTLD_NEXT, "memmove"));
  __tsan_read_range(const_cast<void*>(from), size);
  __tsan_write_range(to, size);
  return next(to, from, size);
}

JB_THIS_MODULE_ONLY void* memset(void* to, int value, size_t size) {
  static const auto next = reinterpret_cast<void* (*)(void*, int, size_t)>(dlsym(RTLD_NEXT, "memset"));
  __tsan_write_range(to, size);
  return next(to, value, size);
}

}  // extern "C"
