"""Settings that must precede the import of JAX, and fixtures for all tests.

Variables:
  JAX_PLATFORMS=cuda: run the same tests on a GPU.
  JAX_BARACUDA_REQUIRE=cuda (or cpu): fail if tests would run on another platform, or would skip without it.
  JAX_BARACUDA_TEST_SEED=<int>: the seed of random inputs (default: 0).
  JAX_BARACUDA_INSTRUMENTED=<folder>: test the instrumented CPU module in this folder, not the installed one.
  JAX_BARACUDA_TEST_LARGE=1: also run, on a CPU, the tests of arrays with more than 2^31 elements.
  JAX_BARACUDA_TEST_STRIDE=<int>: run about one in this many cases of each test: the same ones in each run, others with
    another version of JAX.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import zlib
from collections.abc import Iterator
from types import SimpleNamespace

# Both flags concern one back end and are ignored by the other.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Programs run once or twice here, so LLVM need not optimise them. XLA's older fusion emitters take half the time,
# because they set up no MLIR for each program. What XLA fuses and allocates stays the same.
has_gpu_plugin = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
if (
    os.environ.get("JAX_PLATFORMS", "" if has_gpu_plugin else "cpu") == "cpu"
    and "xla_backend_optimization_level" not in os.environ["XLA_FLAGS"]
):
    os.environ["XLA_FLAGS"] += (
        " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
        " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
    )
# Fills results and scratch memory with one bits before each kernel, so that missing writes show.
os.environ.setdefault("JAX_BARACUDA_POISON", "1")

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from support import instrumented  # noqa: E402

if folder := os.environ.get("JAX_BARACUDA_INSTRUMENTED"):
    instrumented.load(folder)
from support import cases  # noqa: E402  (after the environment is set)

from jax_baracuda._core.native import NATIVE_MODULES, NativeModule  # noqa: E402
from jax_baracuda.ops.segment import edge_attention  # noqa: E402


@pytest.hookimpl(trylast=True)  # after the options -k and -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Every test keeps its first case. A hash selects the others, so that no parameter value is always left out."""
    stride = int(os.environ.get("JAX_BARACUDA_TEST_STRIDE", "1"))
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    tests: set[str] = set()
    for item in items:
        test = item.nodeid.partition("[")[0]
        is_drawn = zlib.crc32(f"{jax.__version__} {item.nodeid}".encode()) % stride == 0
        keeps = is_drawn or test not in tests
        (kept if keeps else left_out).append(item)
        tests.add(test)
    if left_out:
        items[:] = kept
        config.hook.pytest_deselected(items=left_out)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A random generator for this test alone; every failure shows its seed."""
    seed = [int(os.environ.get("JAX_BARACUDA_TEST_SEED", "0")), zlib.crc32(request.node.nodeid.encode())]
    request.node.add_report_section("setup", "random seed", f"np.random.default_rng({seed})")
    return np.random.default_rng(seed)


@pytest.fixture(scope="session", autouse=True)
def kernels_are_there() -> None:
    """Without the platform's native module, ops would run as plain JAX, and the tests would prove nothing."""
    if cases.REQUIRED_PLATFORM not in (None, cases.PLATFORM):
        pytest.fail(f"JAX_BARACUDA_REQUIRE={cases.REQUIRED_PLATFORM}, but JAX runs on {cases.PLATFORM}", pytrace=False)
    if (problem := cases.native_problem(cases.PLATFORM)) is not None:
        pytest.fail(f"there are no kernels for {cases.PLATFORM}: {problem}", pytrace=False)


@pytest.fixture
def padded_heads() -> Iterator[None]:
    """Heads of attention over edges are padded and split as for GPUs, on every platform."""
    ops = (
        edge_attention.GRAPH_ATTENTION,
        edge_attention.GRAPH_ATTENTION_BACKWARD_BY_SEGMENT,
        edge_attention.GRAPH_ATTENTION_BACKWARD_BY_ROW,
    )
    saved = [(op, dict(op.alternatives)) for op in ops]
    for op in ops:
        of_gpus = {rule: program for rule, program in op.alternatives.items() if rule.platform == "cuda"}
        op.alternatives.clear()
        op.alternatives.update({dataclasses.replace(rule, platform=cases.PLATFORM): x for rule, x in of_gpus.items()})
    yield
    for op, alternatives in saved:
        op.alternatives.clear()
        op.alternatives.update(alternatives)


@pytest.fixture
def cuda_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake CUDA module, so that programs for CUDA can be lowered on any machine."""
    cpu = NATIVE_MODULES["cpu"]
    module = SimpleNamespace(plan=cpu.module.plan, device_problem=lambda: None)
    monkeypatch.setitem(NATIVE_MODULES, "cuda", NativeModule("cuda", module, cpu.targets, None))
