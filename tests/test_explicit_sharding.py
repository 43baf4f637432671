"""Explicit sharding: results equal those of one device, and cotangents have the sharding of their primals.

The operands of a call are split differently. Calls are made with and without optional arguments.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from segment.reference import SOFTMAX
from support import cases, programs
from support.meshes import MESH_SHAPE

import jax_baracuda
from jax_baracuda import (
    segment_max_backward,
    segment_min_backward,
    segment_plan,
    segment_prod_backward,
    segment_softmax_backward,
    unsorted_segment_max_backward,
    where,
    write_slice,
)
from jax_baracuda._core.arrays import reshard_like
from jax_baracuda._examples import all_examples
from jax_baracuda._examples.example import Example

NUM_SEGMENTS = 8
pytestmark = cases.on_two_devices

Function = Callable[..., Any]
Call = tuple[Function, dict[str, P]]


def sum_of_squares(function: Function) -> Function:
    return lambda *arrays: sum(jnp.sum(x**2) for x in jax.tree.leaves(function(*arrays)))


def gradient(function: Function, argnums: int | tuple[int, ...] = 0) -> Function:
    return jax.grad(sum_of_squares(function), argnums)


SHAPES: dict[str, tuple[int, ...]] = {
    "rows": (16, 6),
    "other_rows": (16, 6),
    "one_row": (1, 6),
    "features": (6,),
    "ids": (16,),
    "cells": (NUM_SEGMENTS, 6),
    "cache": (8, 12, 6),
    "window": (8, 2, 6),
}


IDS = np.array([-1, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 5, NUM_SEGMENTS], np.int32)
"""Each segment has 0, 1, 2 or 4 rows, so that means and shares of ties are exact."""


def make_array(rng: np.random.Generator, call: str, name: str) -> np.ndarray:
    """An operand that makes most calls exact: small integers, without ties for extrema; powers of two for products."""
    shape = SHAPES[name]
    if name == "ids":
        return rng.permutation(IDS)
    if "prod" in call:
        return rng.choice(np.float32([-2, -1, 1, 2]), shape)
    if name == "rows" and re.search("max|min", call):
        return rng.permuted(np.tile(np.arange(shape[0])[:, None] - 8, shape[1]), axis=0).astype(np.float32)
    return rng.integers(-3, 4, shape).astype(np.float32)


def allowed_error(call: str, arrays: Sequence[np.ndarray]) -> np.ndarray | float:
    """How much results may differ from those of one device, element by element."""
    eps = float(np.finfo(np.float32).eps)
    if call == "second derivative of segment_softmax":
        # Each result is a probability times sums over at most 4 rows. Terms are products of about 10 factors up to 4.
        data, ids = arrays
        probabilities = SOFTMAX.value(data, ids, NUM_SEGMENTS).exact
        return 2 * 4 * 10 * 4 * eps * probabilities.astype(np.float64)
    return 0.0


ROWS_AND_FEATURES = {"rows": P("x", "y"), "ids": P("x")}


def _segment_calls() -> dict[str, Call]:
    calls: dict[str, Call] = {}
    for name in ("max", "min", "sum", "mean", "prod", "softmax"):
        reduce = functools.partial(getattr(jax_baracuda, f"segment_{name}"), num_segments=NUM_SEGMENTS)
        calls[f"gradient of segment_{name} of broadcast data"] = (
            gradient(reduce),
            {"one_row": P(None, "y"), "ids": P("x")},
        )
        calls[f"second derivative of segment_{name}"] = gradient(gradient(reduce)), ROWS_AND_FEATURES
    for backward in (
        segment_max_backward,
        segment_min_backward,
        segment_prod_backward,
        unsorted_segment_max_backward,
    ):
        for of_rows in (P("x", None), P(), P("x", "y")):
            split = {"cells": P(None, "y"), "rows": of_rows, "ids": P("x") if of_rows else P()}
            calls[f"{backward.__name__}, rows {of_rows}"] = backward, split
            calls[f"gradients of {backward.__name__}, rows {of_rows}"] = gradient(backward, (0, 1)), split
    calls["segment_softmax_backward"] = (
        lambda d, p, ids: segment_softmax_backward(d, p, ids, NUM_SEGMENTS),
        {"rows": P(None, "y"), "other_rows": P("x", None), "ids": P("x")},
    )
    return calls


def _select(a: Any, b: Any) -> Any:
    return where(a > 0, a * b, b)


CALLS: dict[str, Call] = _segment_calls() | {
    "second derivatives of where": (
        gradient(gradient(_select, (0, 1)), (0, 1)),
        {"rows": P("x", None), "other_rows": P(None, "y")},
    ),
    "second derivatives of where of a row": (
        gradient(gradient(_select, (0, 1)), (0, 1)),
        {"rows": P("x", "y"), "features": P("y")},
    ),
    "second derivatives of write_slice": (
        gradient(gradient(lambda cache, window: write_slice(cache, window * window, (0, 3, 0)), (0, 1)), (0, 1)),
        {"cache": P("x", None, "y"), "window": P()},
    ),
}


@pytest.mark.versions
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto], ids=str)
def test_operands_split_differently(rng: np.random.Generator, axis_type: AxisType, name: str) -> None:
    function, specs = CALLS[name]
    arrays = [make_array(rng, name, operand) for operand in specs]
    expected = jax.tree.leaves(jax.jit(function)(*arrays))
    mesh = jax.make_mesh(MESH_SHAPE, ("x", "y"), axis_types=(axis_type,) * 2)
    with jax.set_mesh(mesh):
        operands = [
            jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs.values(), strict=True)
        ]
        results = jax.tree.leaves(jax.jit(function)(*operands))
        if axis_type == AxisType.Explicit and "gradient" in name and "_backward" not in name:
            for result, operand in zip(results, operands, strict=False):
                assert result.sharding.is_equivalent_to(operand.sharding, operand.ndim)
    error = allowed_error(name, arrays)
    for got, want in zip(results, expected, strict=True):
        got, want = (np.asarray(x).astype(np.float64) for x in (got, want))
        is_wrong = ~((got == want) | (np.abs(got - want) <= error))
        assert not is_wrong.any(), (
            f"{is_wrong.sum()} of {is_wrong.size} elements are wrong: {got[is_wrong][:5]}, not {want[is_wrong][:5]}"
        )


@pytest.mark.versions
def test_sums_that_are_not_reduced_are_refused() -> None:
    mesh = jax.make_mesh(MESH_SHAPE, ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    spec = P(None, unreduced={"x"})
    for name in ("segment_sum", "segment_max", "segment_mean"):
        message = f"{name}: out_sharding must not be unreduced"
        with jax.set_mesh(mesh), pytest.raises(NotImplementedError, match=message):
            getattr(jax_baracuda, name)(np.ones(4, np.float32), np.zeros(4, int), 2, out_sharding=spec)


# ----------------------------------------------------------------------------------------------------------------------
# Operands with unrelated shardings.

NOT_MAPPED = [example for example in all_examples() if example.mapped is None]
"""JAX maps no arrays whose mapped dimensions are split differently."""
SPLIT_SIZES = {"row": 16, "feature": 8, "feature1": 8, "segment": NUM_SEGMENTS, "node": 8, "example": 8, "channel": 8}
SPLIT_SIZES |= {"time": 24, "new": 8, "head": 8, "q_head": 8, "k_head": 16, "sequence": 4, "batch": 8}
EDGES = ("data", "senders", "receivers")

WITH_PLAN: dict[str, tuple[Sequence[str], Function]] = {
    **{
        name: (EDGES, lambda data, plan, name=name: getattr(jax_baracuda, name)(data, plan=plan))
        for name in ("gather_segment_sum", "gather_segment_mean", "gather_segment_max", "gather_segment_min")
    },
    "segment_attention": (EDGES, lambda data, plan: jax_baracuda.segment_attention(jnp.arange(16.0), data, plan=plan)),
    **{
        f.__name__: (
            ("data", "receivers"),
            lambda data, plan, f=f: f(
                jnp.ones((data.shape[0] if f is segment_softmax_backward else 8, 8)), data, plan=plan
            ),
        )
        for f in (segment_max_backward, segment_prod_backward, segment_softmax_backward)
    },
    "transposed": (EDGES, lambda data, plan: jax_baracuda.gather_segment_max(data, plan=plan.transposed)),
    **{
        name: (("data", "receivers"), lambda data, plan, name=name: getattr(jax_baracuda, name)(data, plan=plan))
        for name in ("segment_sum", "segment_max", "segment_prod", "segment_softmax", "segment_argmax", "take_rows")
    },
}


def random_spec(rng: np.random.Generator, shape: tuple[int, ...]) -> P:
    entries: list[Any] = [None] * len(shape)
    parts = [1] * len(shape)
    for axis, size in zip(("x", "y"), MESH_SHAPE, strict=True):
        at = rng.integers(-1, len(shape))
        if at >= 0 and shape[at] % (parts[at] * size) == 0:
            entries[at] = axis if entries[at] is None else (entries[at], axis)
            parts[at] *= size
    return P(*entries)


def assert_split_results_agree(
    function: Function, arrays: Sequence[np.ndarray], specs: Sequence[P], axis_type: AxisType
) -> None:
    expected = jax.tree.leaves(jax.jit(function)(*arrays))
    mesh = jax.make_mesh(MESH_SHAPE, ("x", "y"), axis_types=(axis_type,) * 2)
    with jax.set_mesh(mesh):
        split = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
        results = jax.tree.leaves(jax.jit(function)(*split))
    for got, want in zip(results, expected, strict=True):
        largest = np.abs(np.where(np.isfinite(want), want, 0)).max(initial=1)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * largest)


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto], ids=str)
@pytest.mark.parametrize("example", NOT_MAPPED, ids=lambda example: example.name)
def test_unrelated_shardings(rng: np.random.Generator, example: Example, axis_type: AxisType) -> None:
    """Results agree for random shardings, and if one axis splits the last dimension of every operand. In explicit mode,
    gradients have the shardings of the operands."""
    example = dataclasses.replace(example, sizes={"split": {**example.sizes["small"], **SPLIT_SIZES}})
    operands = example.make_operands(rng, "float32", "split")
    call, names = example.call("split"), example.differentiated("float32")

    def value_and_gradients(*arrays: jax.Array) -> Any:
        given = dict(zip(operands, arrays, strict=True))
        ones = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), jax.eval_shape(call, **given))
        value, vjp = jax.vjp(lambda chosen: call(**{**given, **chosen}), {name: given[name] for name in names})
        gradients = vjp(jax.tree.map(lambda x, y: reshard_like(x, jax.typeof(y)), ones, value)) if names else ({},)
        for name, gradient in gradients[0].items():
            assert axis_type == AxisType.Auto or jax.typeof(gradient) == jax.typeof(given[name]), name
        return value, gradients

    arrays = list(operands.values())
    last = [P(*[None] * (x.ndim - 1), "x") if x.ndim and x.shape[-1] % MESH_SHAPE[0] == 0 else P() for x in arrays]
    for specs in (last, [random_spec(rng, x.shape) for x in arrays]):
        assert_split_results_agree(value_and_gradients, arrays, specs, axis_type)


@pytest.mark.parametrize("name", WITH_PLAN)
def test_plans_of_split_ids(rng: np.random.Generator, name: str) -> None:
    """Plans may be made from ids with different shardings, or be sharded themselves."""
    operands, function = WITH_PLAN[name]
    receivers, senders = rng.permutation(IDS), rng.integers(-9, 9, 16).astype(np.int32)
    data = rng.normal(size=(8 if name == "take_rows" or "senders" in operands else 16, 8)).astype(np.float32)
    gathered = (senders, 8) if "senders" in operands else ()
    plan = segment_plan(receivers.clip(0, 7), NUM_SEGMENTS, *gathered)
    leaves, structure = jax.tree.flatten(plan)

    def both(call: Function, data: jax.Array) -> Any:
        if name == "segment_argmax":
            return call(data)
        return call(data), gradient(lambda data: jnp.where(jnp.isfinite(value := call(data)), value, 0))(data)

    def of_split_ids(data: jax.Array, receivers: jax.Array, *senders: jax.Array) -> Any:
        plan = segment_plan(receivers, NUM_SEGMENTS, *senders, *gathered[1:])
        return both(lambda data: function(data, plan), data), plan

    def of_split_plan(data: jax.Array, *leaves: jax.Array) -> Any:
        return both(lambda data: function(data, jax.tree.unflatten(structure, leaves)), data)

    ids = [receivers.clip(0, 7), *gathered[:1]]
    for _ in range(2):
        for call, arrays in ((of_split_ids, [data, *ids]), (of_split_plan, [data, *map(np.asarray, leaves)])):
            specs = [random_spec(rng, x.shape) for x in arrays]
            assert_split_results_agree(call, arrays, specs, AxisType.Explicit)


@pytest.mark.versions
@programs.each_function
def test_jacobians(rng: np.random.Generator, example: Example) -> None:
    """JAX maps the derivative over a basis that has no mesh."""
    operands, names = example.make_operands(rng, "float32", "small"), example.differentiated("float32")
    if not names:
        pytest.skip("it has no derivative")

    def jacobian(*arrays: jax.Array) -> Any:
        given = dict(zip(operands, arrays, strict=True))
        return jax.jacrev(lambda x: example.call("small")(**{**given, names[0]: x}))(given[names[0]])

    arrays = list(operands.values())
    for specs in ([P() for _ in arrays], [random_spec(rng, x.shape) for x in arrays]):
        assert_split_results_agree(jacobian, arrays, specs, AxisType.Explicit)


@pytest.mark.parametrize("dims", [0, 1, 2])
def test_rows_whose_dimensions_are_merged(rng: np.random.Generator, dims: int) -> None:
    """Weights of the first dimensions of a row, any of which is split, or of the others."""
    data, weights = rng.normal(size=(8, 4, 4, 4)).astype(np.float32), rng.normal(size=(16, 4, 4)).astype(np.float32)
    weights = weights[(slice(None), *[slice(None)] * dims, *[0] * (2 - dims))]
    ids = np.arange(16) % 8

    def call(data: jax.Array, weights: jax.Array) -> jax.Array:
        return jax_baracuda.gather_segment_sum(data, ids, ids, 8, weights=weights)

    for split in (P(None, "x"), P(None, None, "x"), P(None, None, None, "x")):
        for implementation in ("kernel", "xla"):
            with jax_baracuda.implementation(implementation):
                specs = [split, P("x")]
                assert_split_results_agree(gradient(call, (0, 1)), [data, weights], specs, AxisType.Explicit)
