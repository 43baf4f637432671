"""Explicit sharding: results equal those of one device, and cotangents have the sharding of their primals.

The operands of a call are split differently.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from segment.reference import DIFFERENTIABLE, Reduction
from support import cases, programs, recorded
from support.meshes import MESH_SHAPE, make_mesh

import jax_baracuda
from jax_baracuda._core.arrays import reshard_like
from jax_baracuda._examples import all_examples
from jax_baracuda._examples.example import Example

pytestmark = cases.on_two_devices

Function = Callable[..., Any]


@pytest.mark.versions
def test_sums_that_are_not_reduced_are_refused() -> None:
    mesh = make_mesh(AxisType.Explicit)
    spec = P(None, unreduced={"x"})
    for name in ("segment_sum", "segment_max", "segment_mean"):
        message = f"{name}: out_sharding must not be unreduced"
        with jax.set_mesh(mesh), pytest.raises(NotImplementedError, match=message):
            getattr(jax_baracuda, name)(np.ones(4, np.float32), np.zeros(4, int), 2, out_sharding=spec)


# ----------------------------------------------------------------------------------------------------------------------
# Operands with unrelated shardings.

NOT_MAPPED = [example for example in all_examples() if example.mapped is None]
"""JAX maps no arrays whose mapped dimensions are split differently."""
SPLIT_SIZES = {"row": 16, "feature": 8, "feature1": 8, "segment": 8, "node": 8, "example": 8, "channel": 8}
SPLIT_SIZES |= {"time": 24, "new": 8, "head": 8, "q_head": 8, "k_head": 16, "sequence": 4, "batch": 8}
each_axis_type = pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto], ids=str)
each_example = pytest.mark.parametrize("example", NOT_MAPPED, ids=lambda example: example.name)


def of_split_sizes(example: Example) -> Example:
    sizes = {**example.sizes["small"], **SPLIT_SIZES}
    if "entry" in sizes:
        sizes["entry"] = sizes["tap"] + sizes["time"]  # a state must hold all new inputs
    return dataclasses.replace(example, sizes={"small": sizes})


def sum_of_squares(results: Any) -> jax.Array:
    """Extrema of empty segments are infinite."""
    floating = (x for x in jax.tree.leaves(results) if jnp.issubdtype(x.dtype, jnp.floating))
    return sum(jnp.sum(jnp.where(jnp.isfinite(x), x, 0) ** 2) for x in floating)


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
    mesh = make_mesh(axis_type)
    with jax.set_mesh(mesh):
        split = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
        results = jax.tree.leaves(jax.jit(function)(*split))
    for got, want in zip(results, expected, strict=True):
        largest = np.abs(np.where(np.isfinite(want), want, 0)).max(initial=1)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * largest)


@each_axis_type
@each_example
def test_unrelated_shardings(rng: np.random.Generator, example: Example, axis_type: AxisType) -> None:
    """Results agree for random shardings, and if one axis splits the last dimension of every operand. In explicit mode,
    gradients have the shardings of the operands."""
    example = of_split_sizes(example)
    operands = example.make_operands(rng, "float32", "small")
    call, names = example.call("small"), example.differentiated("float32")

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


@pytest.mark.versions
@each_axis_type
@programs.each_function
def test_second_derivatives(rng: np.random.Generator, example: Example, axis_type: AxisType) -> None:
    """Derivatives of gradients agree for random shardings. So do the first two derivatives of public gradients."""
    example = of_split_sizes(example)
    operands, names = programs.exact_operands(rng, example), programs.differentiable_operands(example)
    if not names:
        pytest.skip("it has no derivative")

    def gradients(*arrays: jax.Array) -> Any:
        given = dict(zip(operands, arrays, strict=True))
        first = jax.grad(lambda chosen: sum_of_squares(example.call("small")(**{**given, **chosen})))
        second = jax.grad(lambda chosen: sum_of_squares(first(chosen)))
        return second({name: given[name] for name in names})

    arrays = list(operands.values())
    assert_split_results_agree(gradients, arrays, [random_spec(rng, x.shape) for x in arrays], axis_type)


@each_axis_type
@pytest.mark.parametrize("reduction", DIFFERENTIABLE, ids=str)
def test_gradient_of_broadcast_data(rng: np.random.Generator, reduction: Reduction, axis_type: AxisType) -> None:
    """One row for all ids, whose gradient is a sum over devices."""
    row, ids = rng.normal(size=(1, 6)).astype(np.float32), rng.integers(-1, 9, 16).astype(np.int32)
    gradient = jax.grad(lambda row, ids: sum_of_squares(reduction(row, ids, 8)))
    assert_split_results_agree(gradient, [row, ids], [P(None, "y"), P("x")], axis_type)


WITH_PLAN = [x for x in NOT_MAPPED if recorded.takes_plan(x) and "indices_are_sorted" not in x.options]


@pytest.mark.parametrize("example", WITH_PLAN, ids=lambda example: example.name)
def test_plans_of_split_ids(rng: np.random.Generator, example: Example) -> None:
    """Plans may be made from ids with different shardings, or be sharded themselves."""
    example = of_split_sizes(example)
    operands, names = programs.exact_operands(rng, example), programs.differentiable_operands(example)
    others = {name: x for name, x in operands.items() if name not in recorded.IDS}
    leaves, structure = jax.tree.flatten(recorded.plan_of(example, operands))

    def both(plan: Any, given: dict[str, Any]) -> Any:
        def call(chosen: dict[str, Any]) -> Any:
            return recorded.by_plan(example, {**given, **chosen}, plan)

        chosen = {name: given[name] for name in names}
        return call(chosen), jax.grad(lambda chosen: sum_of_squares(call(chosen)))(chosen) if names else ()

    def of_split_ids(*arrays: jax.Array) -> Any:
        given = dict(zip(operands, arrays, strict=True))
        plan = recorded.plan_of(example, given)
        return both(plan, given), plan

    def of_split_plan(*arrays: jax.Array) -> Any:
        plan = jax.tree.unflatten(structure, arrays[: len(leaves)])
        return both(plan, dict(zip(others, arrays[len(leaves) :], strict=True)))

    of_plan = [*map(np.asarray, leaves), *others.values()]
    for call, arrays in ((of_split_ids, [*operands.values()]), (of_split_plan, of_plan)):
        for _ in range(2):
            assert_split_results_agree(call, arrays, [random_spec(rng, x.shape) for x in arrays], AxisType.Explicit)


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

    gradient = jax.grad(lambda *arrays: sum_of_squares(call(*arrays)), (0, 1))
    for split in (P(None, "x"), P(None, None, "x"), P(None, None, None, "x")):
        for implementation in ("kernel", "xla"):
            with jax_baracuda.implementation(implementation):
                specs = [split, P("x")]
                assert_split_results_agree(gradient, [data, weights], specs, AxisType.Explicit)
