# The architectures to build for if JAX_BARACUDA_CUDA_ARCHITECTURES is empty or "portable". Empty means those of this
# machine's GPUs, if the driver reports any: building one architecture takes a quarter of the time of all.
execute_process(COMMAND "${CMAKE_CUDA_COMPILER}" --list-gpu-code
  OUTPUT_VARIABLE supported OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
string(REPLACE "\n" ";" supported "${supported}")

if(NOT JAX_BARACUDA_CUDA_ARCHITECTURES STREQUAL "portable")
  find_program(NVIDIA_SMI_EXECUTABLE nvidia-smi)
  if(NVIDIA_SMI_EXECUTABLE)
    execute_process(COMMAND "${NVIDIA_SMI_EXECUTABLE}" --query-gpu=compute_cap --format=csv,noheader
      OUTPUT_VARIABLE capabilities RESULT_VARIABLE status ERROR_QUIET TIMEOUT 30)
    if(status EQUAL 0)
      string(REGEX MATCHALL "[0-9]+[.][0-9]" capabilities "${capabilities}")
    else()
      set(capabilities)
    endif()
    foreach(capability IN LISTS capabilities)
      string(REPLACE "." "" architecture "${capability}")
      # If this nvcc does not know X.y: code for X.0 runs on every X.y.
      string(REGEX REPLACE ".$" "0" generation "${architecture}")
      foreach(candidate IN ITEMS ${architecture} ${generation})
        if(candidate GREATER_EQUAL 80 AND "sm_${candidate}" IN_LIST supported)
          list(APPEND gpu_architectures "${candidate}-real")
          break()
        endif()
      endforeach()
    endforeach()
    list(REMOVE_DUPLICATES gpu_architectures)
  endif()
endif()

if(gpu_architectures)
  set(JAX_BARACUDA_CUDA_ARCHITECTURES ${gpu_architectures})
else()
  # Machine code for each generation that this nvcc knows (code for X.0 runs on every X.y), and PTX of the oldest. The
  # driver compiles the PTX for newer GPUs without machine code here: 11.0 today, and later generations.
  set(JAX_BARACUDA_CUDA_ARCHITECTURES "")
  foreach(architecture IN ITEMS 80 90 100 120)
    if("sm_${architecture}" IN_LIST supported)
      if(NOT JAX_BARACUDA_CUDA_ARCHITECTURES)
        list(APPEND JAX_BARACUDA_CUDA_ARCHITECTURES "${architecture}-virtual")
      endif()
      list(APPEND JAX_BARACUDA_CUDA_ARCHITECTURES "${architecture}-real")
    endif()
  endforeach()
endif()
