"""``vmap`` of ``vmap``: the two batches stay two dimensions, so a batch that is split over devices stays split."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.cases import PLATFORM, assert_same_bits
from support.meshes import COLLECTIVES

import jax_baracuda
from jax_baracuda import (
    causal_conv1d,
    causal_conv1d_update,
    rope,
    rope_qk,
    segment_softmax,
    where,
    write_slice,
    write_slices,
)

OUTER, INNER = 3, len(jax.devices())
NUM_SEGMENTS = 5

Function = Callable[..., Any]


def sum_of_squares(function: Function) -> Function:
    return lambda *arrays: sum(jnp.sum(x**2) for x in jax.tree.leaves(function(*arrays)))


def _segment_calls() -> dict[str, tuple[Function, str]]:
    names = ("max", "min", "sum", "mean", "prod", "argmax")
    functions = {name: getattr(jax_baracuda, f"segment_{name}") for name in names} | {"softmax": segment_softmax}
    calls: dict[str, tuple[Function, str]] = {}
    for name, function in functions.items():

        def call(x: Any, ids: Any, function: Function = function) -> Any:
            return function(x, ids, NUM_SEGMENTS)

        calls[f"segment_{name}"] = call, "x ids"
        if name != "argmax":
            calls[f"gradient of segment_{name}"] = jax.grad(sum_of_squares(call)), "x ids"
        if name in ("max", "prod", "softmax"):
            calls[f"second derivative of segment_{name}"] = (
                jax.grad(sum_of_squares(jax.grad(sum_of_squares(call)))),
                "x ids",
            )
    return calls


def _convolve(x: Any, weight: Any) -> Any:
    return causal_conv1d(x[None], weight, activation="silu")


def _update(x: Any, weight: Any) -> Any:
    return causal_conv1d_update(x[None, :, :1], x[None, :, 1:5], weight)


def _rotate_both(x: Any) -> Any:
    return rope_qk(x[None, None], x[None, None, :, :])


def _select(x: Any, y: Any) -> Any:
    return where(x > 0, y, x[:1])


def _write(x: Any, start: Any) -> Any:
    return write_slice(x, x[:2], (start, 0))


CALLS: dict[str, tuple[Function, str]] = _segment_calls() | {
    "causal_conv1d": (_convolve, "x weight"),
    "gradients of causal_conv1d": (jax.grad(sum_of_squares(_convolve), (0, 1)), "x weight"),
    "causal_conv1d_update": (_update, "x weight"),
    "gradients of causal_conv1d_update": (jax.grad(sum_of_squares(_update), (0, 1)), "x weight"),
    "rope": (lambda x: rope(x[None, None]), "x"),
    "gradient of rope": (jax.grad(sum_of_squares(lambda x: rope(x[None, None]))), "x"),
    "rope_qk": (_rotate_both, "x"),
    "where": (_select, "x y"),
    "gradients of where": (jax.grad(sum_of_squares(_select), (0, 1)), "x y"),
    "write_slice": (_write, "x start"),
    "gradient of write_slice": (jax.grad(sum_of_squares(_write)), "x start"),
    "write_slices": (lambda x, start: write_slices([x, x + 1], [x[:2], x[:1]], (start, 0)), "x start"),
}


def make_arrays(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Arrays with both batches in front. Small integers, so that sums and products are exact in any order."""
    rows, features = 10, 6

    def integers(*shape: int) -> np.ndarray:
        return rng.integers(-3, 4, (OUTER, INNER, *shape)).astype(np.float32)

    return {
        "x": integers(rows, features),
        "y": integers(rows, features),
        "ids": rng.integers(-1, NUM_SEGMENTS + 1, (OUTER, INNER, rows)).astype(np.int32),
        "weight": integers(rows, 4),
        "start": rng.integers(-2, rows + 2, (OUTER, INNER)).astype(np.int32),
    }


ROUNDED = ("segment_mean", "segment_softmax", "causal_conv1d", "rope")
"""Calls with quotients, exponentials and sines: on a GPU, a batch may change how XLA rounds the rest of the program."""


def assert_same(name: str, got: np.ndarray, want: Any) -> None:
    """Asserts the bits of the call without a batch. On GPUs, some calls may round differently."""
    if PLATFORM == "cpu" or not any(rounded in name for rounded in ROUNDED):
        assert_same_bits(got, np.asarray(want), name)
    else:
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.skipif(INNER == 1, reason="there is only one device")
@pytest.mark.parametrize("shared", ["nothing shared", "others shared"])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_split_inner_batch(rng: np.random.Generator, axis_type: AxisType, name: str, shared: str) -> None:
    """Values are right and split like the operands, without a collective."""
    if jax.__version_info__ < (0, 9) and axis_type == AxisType.Explicit and name.startswith("second"):
        pytest.skip("JAX 0.8 loses the sharding of cotangents that are mapped through jax.sharding.auto_axes")
    function, names = CALLS[name]
    arrays = [make_arrays(rng)[name] for name in names.split()]
    mapped: list[int | None] = [0] * len(arrays)
    if shared == "others shared":
        if len(arrays) == 1:
            pytest.skip("there is no other operand")
        arrays[1:] = [x[0, 0] for x in arrays[1:]]
        mapped[1:] = [None] * (len(arrays) - 1)
    nested = jax.vmap(jax.vmap(function, mapped), mapped)
    mesh = jax.make_mesh((INNER,), ("batch",), axis_types=(axis_type,))
    with jax.set_mesh(mesh):
        specs = [P() if axis is None else P(None, "batch") for axis in mapped]
        operands = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
        program = jax.jit(nested).lower(*operands).compile()
        results = jax.tree.leaves(program(*operands))
        text = program.as_text()
        for result in results:
            assert result.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "batch")), result.ndim)
        results = [np.asarray(result) for result in results]
    assert not re.search(rf" ({'|'.join(COLLECTIVES)})(-start)?\(", text)
    of_one = jax.jit(function)
    for i in range(OUTER):
        for j in range(INNER):
            each = [x if axis is None else x[i, j] for x, axis in zip(arrays, mapped, strict=True)]
            for got, want in zip(results, jax.tree.leaves(of_one(*each)), strict=True):
                assert_same(name, got[i, j], want)


@pytest.mark.parametrize("name", CALLS)
def test_three_batches(rng: np.random.Generator, name: str) -> None:
    """Values are right if each of several operands is shared by another one of three batches."""
    function, names = CALLS[name]
    sizes = (2, 3, 2)
    arrays, axes = [], []
    for k, of_operand in enumerate(names.split()):
        x = make_arrays(rng)[of_operand]
        mapped = [level for level in range(3) if len(names.split()) == 1 or level != k]
        shape = tuple(sizes[level] for level in mapped)
        x = np.stack([np.roll(x[0, 0], i, axis=0) if x.ndim > 2 else x[0, 0] + i for i in range(np.prod(shape))])
        arrays.append(x.reshape(*shape, *x.shape[1:]))
        axes.append(mapped)
    nested = function
    for level in reversed(range(3)):
        nested = jax.vmap(nested, [0 if level in mapped else None for mapped in axes])
    results = [np.asarray(result) for result in jax.tree.leaves(jax.jit(nested)(*arrays))]
    of_one = jax.jit(function)
    for index in np.ndindex(*sizes):
        each = [x[tuple(index[level] for level in mapped)] for x, mapped in zip(arrays, axes, strict=True)]
        for got, want in zip(results, jax.tree.leaves(of_one(*each)), strict=True):
            assert_same(name, got[index], want)
