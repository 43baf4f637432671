# For tests of the CPU kernels: JAX_BARACUDA_INSTRUMENTATION instruments the CPU module, which tests/sanitizers/cpu.py
# loads. A sanitizer needs its runtime in the process, which the same script puts there; coverage counts the runs of
# lines.
set(JAX_BARACUDA_INSTRUMENTATION "" CACHE STRING
  "address (and undefined behaviour), thread, coverage, or empty for none")
set_property(CACHE JAX_BARACUDA_INSTRUMENTATION PROPERTY STRINGS "" address thread coverage)

set(optimization -O1)
if(JAX_BARACUDA_INSTRUMENTATION STREQUAL "address")
  # Optimising all the checks of undefined behaviour would take most of the time of the build.
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
  # Once, not for each instruction set: `target_clones` would treble the time and show nothing more.
  target_compile_options(_cpu PRIVATE ${instrumentation_options} -g1 -fno-omit-frame-pointer "-Dtarget_clones(...)=")
  target_link_options(_cpu PRIVATE ${instrumentation_options})
  # What the source accesses and reaches counts, whatever the compiler makes of it.
  set_source_files_properties(${CPU_SOURCES} PROPERTIES COMPILE_OPTIONS
    "${optimization};-fno-trapping-math;-fno-math-errno")
endif()
