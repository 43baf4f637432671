# Prints what is built, the estimated time, and the options. (pip shows it with -v.) Minutes are for one core of a
# server: an architecture takes 6 on an otherwise idle core and 13 on a thread of a fully loaded machine; the estimate
# is 10.
set(minutes 3)
set(what "the CPU module")
if(JAX_BARACUDA_CUDA_COMPILER_FOUND)
  string(REGEX REPLACE "-[a-z]+" "" generations "${CMAKE_CUDA_ARCHITECTURES}")
  list(REMOVE_DUPLICATES generations)
  list(LENGTH generations count)
  math(EXPR minutes "${minutes} + 10 * ${count}")
  list(JOIN CMAKE_CUDA_ARCHITECTURES ", " architectures)
  string(APPEND what " and the CUDA module for ${architectures}")
endif()
cmake_host_system_information(RESULT cores QUERY NUMBER_OF_LOGICAL_CORES)
math(EXPR here "(${minutes} + ${cores} - 1) / ${cores}")
message(STATUS "jax_baracuda: building ${what}: about ${minutes} minutes on one core, ${here} on the ${cores} here")
if(JAX_BARACUDA_CUDA_COMPILER_FOUND)
  message(STATUS
    "jax_baracuda: JAX_BARACUDA_CUDA=OFF builds no CUDA module; JAX_BARACUDA_CUDA_ARCHITECTURES names GPU "
    "architectures, such as 90-real, or is \"portable\": all of them; where it is empty, the build is for the GPUs of "
    "this machine, and portable where there are none")
endif()
