"""Programs that ``jax.export`` has written run by kernels, also in another process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases, instrumented, programs
from support.processes import run_python

import jax_baracuda as jb
from jax_baracuda._core.native import NATIVE_MODULES
from jax_baracuda._examples import all_examples
from jax_baracuda._examples.example import Example, value_and_gradient

pytestmark = pytest.mark.versions

RUN_WHAT_WAS_EXPORTED = """
import sys
from pathlib import Path
import jax
import jax.numpy as jnp
import numpy as np
import jax_baracuda

for path in Path(sys.argv[1]).glob("*.exported"):
    operands = np.load(path.with_suffix(".operands.npz")).values()
    results = jax.export.deserialize(bytearray(path.read_bytes())).call(*operands)
    np.savez(path.with_suffix(".results.npz"), *jax.tree.leaves(results))
"""


def test_exported_programs_run_in_another_process(tmp_path: Path, rng: np.random.Generator) -> None:
    """Value and gradient are the same as in this process."""
    pytest.importorskip("flatbuffers", reason="JAX serializes programs with it, and does not install it")
    expected = {}
    for name, example in programs.FIRST_EXAMPLES.items():
        program = programs.program_of(rng, example)
        expected[name] = program.results()
        function = jax.jit(program.function)
        exported = jax.export.export(function, disabled_checks=jb.DISABLE_JAX_EXPORT_CHECKS)(*program.operands)
        assert "@jax_baracuda." in exported.mlir_module(), f"{name}: no kernel is called"
        (tmp_path / f"{name}.exported").write_bytes(exported.serialize())
        np.savez(tmp_path / f"{name}.operands.npz", *program.operands)
    run_python(instrumented.first_lines() + RUN_WHAT_WAS_EXPORTED, tmp_path)
    for name, arrays in expected.items():
        results = np.load(tmp_path / f"{name}.results.npz").values()
        programs.assert_same(programs.FIRST_EXAMPLES[name], list(results), arrays, name)


without_cuda_module = pytest.mark.filterwarnings("ignore:.* runs as plain JAX on cuda:RuntimeWarning")
"""Without CUDA kernels, lowering a program for CUDA gives a warning."""


@without_cuda_module
@programs.each_function
def test_programs_for_several_platforms(example: Example, rng: np.random.Generator) -> None:
    """Value and gradient can be lowered and exported for several platforms. All, some or none of these have kernels."""
    program = programs.program_of(rng, example)
    function, expected = jax.jit(program.function), program.results()
    without_kernels = function.trace(*program.operands).lower(lowering_platforms=("tpu",))
    assert "@jax_baracuda." not in without_kernels.as_text()
    for platforms in (("cpu", "cuda"), ("tpu", cases.PLATFORM)):
        function.trace(*program.operands).lower(lowering_platforms=platforms)
        export = jax.export.export(function, platforms=platforms, disabled_checks=jb.DISABLE_JAX_EXPORT_CHECKS)
        exported = export(*program.operands)
        assert "@jax_baracuda." in exported.mlir_module(), f"{platforms}: no kernel is called"
        for result, array in zip(jax.tree.leaves(exported.call(*program.operands)), expected, strict=True):
            np.testing.assert_array_equal(result, array, err_msg=str(platforms))


@without_cuda_module
def test_donated_argument_of_program_for_several_platforms(rng: np.random.Generator) -> None:
    """A donated argument may be overwritten on each platform, and results are the same."""
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


KNOWN_DIMS = {"tap", "state", "entry", "half", "two", "section"}
"""Dimensions whose sizes must be known."""
KNOWN_TOO = {
    "rope": "feature",
    "graph_dot_product": "feature1",
    "causal_conv1d_ragged": "sequence",
    "causal_conv1d_update, a pool": "time",
}
"""By the first words of examples: what must be known, too. The scale of dot products follows from the features."""
CONSTRAINTS = ("new <= time", "part <= example")


@pytest.mark.parametrize("example", all_examples(), ids=lambda example: example.name)
def test_symbolic_sizes(rng: np.random.Generator, example: Example) -> None:
    """A program that is exported once runs as plain JAX. Value and gradient agree with kernels at other sizes."""
    known = KNOWN_DIMS | {dim for words, dim in KNOWN_TOO.items() if example.name.startswith(words)}
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


def exported_with(function: Callable[..., Any], shapes: str, *arrays: np.ndarray) -> list[np.ndarray]:
    """The results of a program that was exported for arrays of symbolic shapes, such as ``"n,d; n"``."""
    scope = jax.export.SymbolicScope()
    types = [
        jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape.strip(), scope=scope), x.dtype)
        for shape, x in zip(shapes.split(";"), arrays, strict=True)
    ]
    return [np.asarray(x) for x in jax.tree.leaves(jax.export.export(jax.jit(function))(*types).call(*arrays))]


ROWS, SEGMENTS = 23, 6


def rows_and_ids(rng: np.random.Generator, dtype: str = "int32") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, their ids, and an array with one row per segment. Some ids are out of range."""
    data = rng.integers(-3, 4, (ROWS, 3)).astype(np.float32)
    return data, rng.integers(-1, SEGMENTS + 1, ROWS).astype(dtype), np.zeros((SEGMENTS, 1), np.float32)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32"])
def test_symbolic_sizes_and_ids_of_any_dtype(rng: np.random.Generator, dtype: str) -> None:
    """Ids are dropped, clamped and counted from the end by symbolic sizes."""
    data, ids, cells = rows_and_ids(rng, dtype)

    def sums(data: Any, ids: Any, cells: Any) -> Any:
        num_segments = cells.shape[0]
        by_mode = [jb.segment_sum(data, ids, num_segments, mode=mode) for mode in (None, "clip")]
        taken = jb.take_rows(cells + jnp.arange(num_segments)[:, None], ids[0])
        return *by_mode, jb.gather_segment_sum(data, ids, ids, num_segments), taken

    actual = exported_with(sums, "n,d; n; s,1", data, ids, cells)
    places = ids.astype(np.int64)
    rows = np.clip(np.where(places < 0, places + ROWS, places), 0, ROWS - 1)
    for result, terms, segments in (
        (actual[0], data, places),
        (actual[1], data, np.clip(places, 0, SEGMENTS - 1)),
        (actual[2], data[rows], places),
    ):
        expected = np.zeros((SEGMENTS, 3))
        is_member = (segments >= 0) & (segments < SEGMENTS)
        np.add.at(expected, segments[is_member], terms[is_member])
        np.testing.assert_array_equal(result, expected)
    first = places[0] + SEGMENTS * (places[0] < 0)
    np.testing.assert_array_equal(actual[3], [min(first, SEGMENTS - 1)])


@pytest.mark.parametrize("name", ["sum", "mean", "max", "min"])
def test_plans_of_symbolic_sizes(rng: np.random.Generator, name: str) -> None:
    """Value and gradient are right for reductions of rows and of gathered rows."""
    data, ids, cells = rows_and_ids(rng)
    senders = rng.integers(-ROWS, ROWS, ROWS).astype(np.int32)
    reduce, gather = getattr(jb, f"segment_{name}"), getattr(jb, f"gather_segment_{name}")

    def results(data: Any, ids: Any, senders: Any, cells: Any, with_plan: bool = True) -> Any:
        def of(function: Any, *gathered: Any) -> Any:
            if with_plan:
                plan = jb.segment_plan(ids, cells.shape[0], *gathered, *[data.shape[0] for _ in gathered])
                value, vjp = jax.vjp(lambda data: function(data, plan=plan), data)
            else:
                value, vjp = jax.vjp(lambda data: function(data, *gathered, ids, cells.shape[0]), data)
            return value, vjp(jnp.ones_like(value))

        return of(reduce), of(gather, senders)

    actual = exported_with(results, "n,d; n; n; s,1", data, ids, senders, cells)
    expected = jax.tree.leaves(results(data, ids, senders, cells, with_plan=False))
    for got, want in zip(actual, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("asks", [False, True], ids=["by rules", "kernels if any"])
def test_redirected_programs_of_symbolic_sizes(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, asks: bool
) -> None:
    """Calls with symbolic sizes are left to JAX."""
    if not asks:
        cases.use_rules(monkeypatch)
    data, ids, cells = rows_and_ids(rng)
    ids = ids.clip(0, SEGMENTS - 1)

    def program(data: Any, ids: Any, cells: Any) -> Any:
        sums = jax.ops.segment_sum(data, ids, cells.shape[0])
        taken, vjp = jax.vjp(lambda cells: cells[ids], cells)
        window = jax.lax.dynamic_update_slice(data, data[:1], (ids[0], 0))
        return sums, cells.at[ids].add(data), vjp(taken), window, jax.ops.segment_max(data, ids, cells.shape[0])

    expected = exported_with(program, "n,d; n; s,d", data, ids, np.zeros((SEGMENTS, 3), np.float32))
    with jb.redirect(indexed_updates=True, slice_updates=True) as report:
        actual = exported_with(program, "n,d; n; s,d", data, ids, np.zeros((SEGMENTS, 3), np.float32))
    for got, want in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(got, want)
    assert not report.redirected
    assert len(report.kept) == 5


def test_symbolic_sizes_have_no_kernel(rng: np.random.Generator) -> None:
    data, ids, cells = rows_and_ids(rng)

    def sums(data: Any, ids: Any, cells: Any) -> jax.Array:
        return jb.segment_sum(data, ids, cells.shape[0], implementation="kernel")

    for shapes in ("23,3; 23; s,1", "n,3; n; 6,1"):
        with pytest.raises(ValueError, match="segment_sum: implementation='kernel' .* its shapes are symbolic"):
            exported_with(sums, shapes, data, ids, cells)
