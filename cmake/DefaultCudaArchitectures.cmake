# Machine code for each generation that this nvcc knows (code for X.0 runs on every X.y), and PTX for later ones.
execute_process(COMMAND "${CMAKE_CUDA_COMPILER}" --list-gpu-code
  OUTPUT_VARIABLE supported OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
foreach(architecture IN ITEMS 80 90 100 120)
  if(supported MATCHES "sm_${architecture}(\n|$)")
    list(APPEND JAX_BARACUDA_CUDA_ARCHITECTURES "${architecture}-real")
    set(newest ${architecture})
  endif()
endforeach()
list(APPEND JAX_BARACUDA_CUDA_ARCHITECTURES "${newest}-virtual")
