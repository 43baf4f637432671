# Sets JAX_BARACUDA_CUDA_COMPILER_FOUND, or JAX_BARACUDA_WITHOUT_CUDA: why the CUDA module is not built. If nvcc is not on
# the PATH, also looks in /usr/local/cuda and in the pip packages of CUDA, and sets CMAKE_CUDA_COMPILER.
set(JAX_BARACUDA_CUDA_COMPILER_FOUND FALSE)
set(JAX_BARACUDA_WITHOUT_CUDA "")
if(JAX_BARACUDA_CUDA STREQUAL "OFF")
  set(JAX_BARACUDA_WITHOUT_CUDA "JAX_BARACUDA_CUDA=OFF was set")
  message(STATUS "jax_baracuda: CUDA module not built, because ${JAX_BARACUDA_WITHOUT_CUDA}")
  return()
endif()

if(JAX_BARACUDA_CUDA STREQUAL "AUTO" AND NOT JAX_BARACUDA_CUDA_ARCHITECTURES)
  # Without a GPU nothing here could run the CUDA kernels, and they take most of the build time.
  find_program(NVIDIA_SMI_EXECUTABLE nvidia-smi HINTS /usr/lib/wsl/lib)
  set(gpus "")
  if(NVIDIA_SMI_EXECUTABLE)
    execute_process(COMMAND "${NVIDIA_SMI_EXECUTABLE}" --list-gpus OUTPUT_VARIABLE gpus ERROR_QUIET TIMEOUT 30)
  endif()
  if(NOT gpus MATCHES "GPU [0-9]")
    set(JAX_BARACUDA_WITHOUT_CUDA "no GPU was found")
    message(STATUS
      "jax_baracuda: no GPU found, building the CPU module alone; JAX_BARACUDA_CUDA=ON pip install . builds the CUDA "
      "kernels as well")
    return()
  endif()
endif()

if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  set(nvcc_hints "$ENV{CUDA_HOME}/bin" "$ENV{CUDA_PATH}/bin" /usr/local/cuda/bin)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c "import site, sys; print(';'.join(site.getsitepackages() + sys.path))"
    OUTPUT_VARIABLE site_directories OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  # An isolated build does not see the environment it installs into; VIRTUAL_ENV names it.
  file(GLOB environment_site_directories "$ENV{VIRTUAL_ENV}/lib/python3*/site-packages")
  foreach(directory IN LISTS site_directories environment_site_directories)
    file(GLOB pip_toolkits "${directory}/nvidia/cu[0-9]*/bin" "${directory}/nvidia/cuda_nvcc/bin")
    list(APPEND nvcc_hints ${pip_toolkits})
  endforeach()
  find_program(NVCC_EXECUTABLE nvcc HINTS ${nvcc_hints})
  if(NVCC_EXECUTABLE)
    set(CMAKE_CUDA_COMPILER "${NVCC_EXECUTABLE}")
  endif()
endif()

include(CheckLanguage)
check_language(CUDA)
if(CMAKE_CUDA_COMPILER)
  set(JAX_BARACUDA_CUDA_COMPILER_FOUND TRUE)
  message(STATUS "jax_baracuda: building the CUDA module with ${CMAKE_CUDA_COMPILER}")
elseif(JAX_BARACUDA_CUDA STREQUAL "ON")
  message(FATAL_ERROR
    "jax_baracuda: JAX_BARACUDA_CUDA=ON, but no working CUDA compiler was found. Install the CUDA toolkit and put nvcc "
    "on the PATH (or set CUDACXX), or install the compiler from PyPI into the active virtual environment: "
    "pip install 'nvidia-cuda-nvcc' 'nvidia-cuda-cccl' 'nvidia-cuda-runtime' 'nvidia-cuda-crt' 'nvidia-nvvm'. "
    "JAX_BARACUDA_CUDA=AUTO builds the CPU module alone instead.")
else()
  set(JAX_BARACUDA_WITHOUT_CUDA "no CUDA compiler was found")
  message(STATUS
    "jax_baracuda: a GPU but no CUDA compiler found, building the CPU module alone; JAX_BARACUDA_CUDA=ON pip install . "
    "says what to install")
endif()
