# JAX_BARACUDA_INSTRUMENTATION instruments the CPU module for tests: with a sanitizer, or to count executed lines
# (coverage). tests/sanitizers/cpu.py loads the module, and preloads the sanitizer's runtime into the process.
set(JAX_BARACUDA_INSTRUMENTATION "" CACHE STRING
  "address (and undefined behaviour), thread, coverage, or empty for none")
set_property(CACHE JAX_BARACUDA_INSTRUMENTATION PROPERTY STRINGS "" address thread coverage)

set(optimization -O1)
if(JAX_BARACUDA_INSTRUMENTATION STREQUAL "address")
  # -O0: optimising the many checks of undefined behaviour would dominate the build time.
  set(optimization -O0)
  set(instrumentation_options -fsanitize=address,undefined -fno-sanitize-recover=all -D_GLIBCXX_ASSERTIONS)
elseif(JAX_BARACUDA_INSTRUMENTATION STREQUAL "thread")
  set(instrumentation_options -fsanitize=thread)
  target_sources(_cpu PRIVATE tests/sanitizers/thread_memory.cc)
  set_source_files_properties(tests/sanitizers/thread_memory.cc PROPERTIES COMPILE_OPTIONS "-fno-builtin")
elseif(JAX_BARACUDA_INSTRUMENTATION STREQUAL "coverage")
  set(instrumentation_options --coverage -fprofile-update=atomic)
elseif(NOT JAX_BARACUDA_INSTRUMENTATION STREQUAL "")
  message(FATAL_ERROR
    "JAX_BARACUDA_INSTRUMENTATION must be address, thread, coverage or empty, got \"${JAX_BARACUDA_INSTRUMENTATION}\"")
endif()

if(JAX_BARACUDA_INSTRUMENTATION)
  # Disables target_clones: compiling for several instruction sets would triple the build time and test nothing more.
  target_compile_options(_cpu PRIVATE ${instrumentation_options} -g1 -fno-omit-frame-pointer "-Dtarget_clones(...)=")
  target_link_options(_cpu PRIVATE ${instrumentation_options})
  # Low optimisation, so that accesses and lines of the source are checked before the compiler removes them.
  target_compile_options(_cpu PRIVATE ${optimization} -fno-tree-vectorize)
endif()
