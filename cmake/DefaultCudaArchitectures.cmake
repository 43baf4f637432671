# Machine code for each generation that this nvcc knows (code for X.0 runs on every X.y), and PTX of the oldest, which
# the driver compiles for every newer GPU that has no machine code here: 11.0 today, and later generations.
execute_process(COMMAND "${CMAKE_CUDA_COMPILER}" --list-gpu-code
  OUTPUT_VARIABLE supported OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
foreach(architecture IN ITEMS 80 90 100 120)
  if(supported MATCHES "sm_${architecture}(\n|$)")
    if(NOT JAX_BARACUDA_CUDA_ARCHITECTURES)
      list(APPEND JAX_BARACUDA_CUDA_ARCHITECTURES "${architecture}-virtual")
    endif()
    list(APPEND JAX_BARACUDA_CUDA_ARCHITECTURES "${architecture}-real")
  endif()
endforeach()
