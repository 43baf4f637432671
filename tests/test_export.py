"""Programs that ``jax.export`` has written run in another process, by the kernels."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import instrumented, programs
from support.processes import run_python

import jax_baracuda as jb
from jax_baracuda._core.native import NATIVE_MODULES
from jax_baracuda._examples import all_examples, examples_of
from jax_baracuda._examples.example import Example, value_and_gradient

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


def test_all_native_targets_may_be_exported() -> None:
    allowed = {str(check) for check in jb.DISABLE_JAX_EXPORT_CHECKS}
    for native in NATIVE_MODULES.values():
        if native.module is not None:
            assert allowed == {f"custom_call:jax_baracuda.{target}" for target in native.targets}


KNOWN_DIMS = {"tap", "state", "half", "two"}
"""Those whose sizes must be known; of rotations, also the features."""
CONSTRAINTS = ("new <= time", "part <= example")


@pytest.mark.parametrize("example", all_examples(), ids=lambda example: example.name)
def test_symbolic_sizes(rng: np.random.Generator, example: Example) -> None:
    """A program that is exported once is plain JAX, and agrees with kernels at other sizes: value and gradient."""
    known = KNOWN_DIMS | ({"feature"} if example.name.startswith("rope") else set())
    small = example.sizes["small"]
    names = sorted(example.dims & small.keys() - known)
    constraints = [text for text in CONSTRAINTS if set(names).issuperset(text.split(" <= "))]
    dims = jax.export.symbolic_shape(", ".join(names), constraints=constraints)
    symbolic = {**small, **dict(zip(names, dims, strict=True))}
    large = {name: 2 * size + 1 if name in names else size for name, size in small.items()}
    example = dataclasses.replace(example, sizes={"symbolic": symbolic, "large": large})
    differentiated = example.differentiated("float32")

    def program(operands: Any, cotangents: Any, of_dims: Any) -> Any:
        return value_and_gradient(example.call("symbolic"), differentiated)(operands, cotangents)

    types = example.operand_types("float32", "symbolic")
    of_dims = [jax.ShapeDtypeStruct((dim,), np.float32) for dim in dims]  # a program knows them by shapes alone
    cotangents = jax.eval_shape(example.call("symbolic"), **types)
    exported = jax.export.export(jax.jit(program))(types, cotangents, of_dims)

    operands = example.make_operands(rng, "float32", "large")
    call = example.call("large")
    cotangents = jax.tree.map(lambda x: rng.normal(1, size=x.shape).astype(x.dtype), jax.eval_shape(call, **operands))
    of_dims = [np.zeros(large[name], np.float32) for name in names]
    actual = jax.tree.leaves(exported.call(operands, cotangents, of_dims))
    expected = jax.tree.leaves(jax.jit(value_and_gradient(call, differentiated))(operands, cotangents))
    for got, want in zip(actual, expected, strict=True):
        scale = np.sqrt(np.mean(np.square(np.asarray(want, np.float64))))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * scale)
