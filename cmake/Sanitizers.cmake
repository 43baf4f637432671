# For tests of the CPU kernels: JAX_BARACUDA_SANITIZER instruments the CPU module, which then needs the sanitizer's
# runtime in the process that loads it (tests/sanitizers/cpu.py puts it there).
set(JAX_BARACUDA_SANITIZER "" CACHE STRING "address (and undefined behaviour), thread, or empty for none")
set_property(CACHE JAX_BARACUDA_SANITIZER PROPERTY STRINGS "" address thread)

if(JAX_BARACUDA_SANITIZER STREQUAL "address")
  set(sanitizer_options -fsanitize=address,undefined -fno-sanitize-recover=all -D_GLIBCXX_ASSERTIONS)
elseif(JAX_BARACUDA_SANITIZER STREQUAL "thread")
  set(sanitizer_options -fsanitize=thread)
  target_sources(_cpu PRIVATE tests/sanitizers/thread_memory.cc)
  set_source_files_properties(tests/sanitizers/thread_memory.cc PROPERTIES COMPILE_OPTIONS "-fno-builtin")
elseif(NOT JAX_BARACUDA_SANITIZER STREQUAL "")
  message(FATAL_ERROR "JAX_BARACUDA_SANITIZER must be address, thread or empty, got \"${JAX_BARACUDA_SANITIZER}\"")
endif()

if(JAX_BARACUDA_SANITIZER)
  # Once, not for each instruction set: `target_clones` would treble the time and show nothing more.
  target_compile_options(_cpu PRIVATE ${sanitizer_options} -g1 -fno-omit-frame-pointer "-Dtarget_clones(...)=")
  target_link_options(_cpu PRIVATE ${sanitizer_options})
  # Sanitizers check what the source accesses, whatever the compiler makes of it.
  set_source_files_properties(${CPU_SOURCES} PROPERTIES COMPILE_OPTIONS "-O1;-fno-trapping-math;-fno-math-errno")
endif()
