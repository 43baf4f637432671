"""Programs that ``jax.export`` has written run in another process, by the kernels."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from support import cases, instrumented, programs
from support.processes import run_python

import jax_baracuda as jb
from jax_baracuda._core.native import NATIVE_MODULES
from jax_baracuda._examples import examples_of
from jax_baracuda._examples.example import Example

pytestmark = pytest.mark.versions

FUNCTIONS = ("segment_max", "segment_sum", "gather_segment_max", "causal_conv1d", "rope_qk", "where", "write_slice")

RUN_WHAT_WAS_EXPORTED = """
import sys
from pathlib import Path
import jax
import numpy as np
import jax_baracuda

for path in Path(sys.argv[1]).glob("*.exported"):
    operands = np.load(path.with_suffix(".operands.npz")).values()
    results = jax.export.deserialize(bytearray(path.read_bytes())).call(*operands)
    np.savez(path.with_suffix(".results.npz"), *jax.tree.leaves(results))
"""


def test_exported_programs_run_in_another_process(tmp_path: Path, rng: np.random.Generator) -> None:
    """Value and gradient, the same bits as in this process."""
    pytest.importorskip("flatbuffers", reason="JAX serializes programs with it, and does not install it")
    expected = {}
    for name in FUNCTIONS:
        program = programs.program_of(rng, examples_of(name)[0])
        expected[name] = program.results()
        function = jax.jit(program.function)
        exported = jax.export.export(function, disabled_checks=jb.DISABLE_JAX_EXPORT_CHECKS)(*program.operands)
        assert "@jax_baracuda." in exported.mlir_module(), f"{name}: no kernel is called"
        (tmp_path / f"{name}.exported").write_bytes(exported.serialize())
        np.savez(tmp_path / f"{name}.operands.npz", *program.operands)
    run_python(instrumented.first_lines() + RUN_WHAT_WAS_EXPORTED, tmp_path)
    for name, arrays in expected.items():
        results = np.load(tmp_path / f"{name}.results.npz").values()
        for result, array in zip(results, arrays, strict=True):
            np.testing.assert_array_equal(result, array, err_msg=name)


without_cuda_module = pytest.mark.filterwarnings("ignore:.* runs as plain JAX on cuda:RuntimeWarning")
"""An installation without CUDA kernels says so where a program is lowered for CUDA."""


@without_cuda_module
@programs.each_function
def test_programs_for_several_platforms(example: Example, rng: np.random.Generator) -> None:
    """Value and gradient, lowered and exported for platforms of which all or some have kernels."""
    program = programs.program_of(rng, example)
    function, expected = jax.jit(program.function), program.results()
    for platforms in (("cpu", "cuda"), ("tpu", cases.PLATFORM)):
        function.trace(*program.operands).lower(lowering_platforms=platforms)
        export = jax.export.export(function, platforms=platforms, disabled_checks=jb.DISABLE_JAX_EXPORT_CHECKS)
        exported = export(*program.operands)
        assert "@jax_baracuda." in exported.mlir_module(), f"{platforms}: no kernel is called"
        for result, array in zip(jax.tree.leaves(exported.call(*program.operands)), expected, strict=True):
            np.testing.assert_array_equal(result, array, err_msg=str(platforms))


@without_cuda_module
def test_donated_argument_of_program_for_several_platforms(rng: np.random.Generator) -> None:
    """It may be overwritten on each platform, and the results are the same."""
    x = rng.normal(size=(2, 4, 16, 8)).astype(np.float32)
    expected = np.asarray(jb.rope(x))
    function = jax.jit(jb.rope, donate_argnums=0)
    export = jax.export.export(function, platforms=("cpu", "cuda"), disabled_checks=jb.DISABLE_JAX_EXPORT_CHECKS)
    np.testing.assert_array_equal(export(x).call(jax.device_put(x)), expected)


def test_all_native_targets_may_be_exported() -> None:
    allowed = {str(check) for check in jb.DISABLE_JAX_EXPORT_CHECKS}
    for native in NATIVE_MODULES.values():
        if native.module is not None:
            assert allowed == {f"custom_call:jax_baracuda.{target}" for target in native.targets}
