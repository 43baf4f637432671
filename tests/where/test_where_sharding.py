"""where on several devices: right, sharded results. The only collectives sum gradients of repeated operands."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support import cases
from support.cases import assert_same_memory
from support.meshes import MESH_SHAPE, collectives
from where.reference import make_condition

from jax_baracuda import where, where_backward

pytestmark = cases.on_two_devices

SHAPE = (8, 6, 4)

SPLITS = {
    "rows": P("x", None, None),
    "columns": P(None, "y", None),
    "rows and columns": P("x", "y", None),
    "columns and depth": P(None, "y", "x"),
    "rows over both axes": P(("x", "y"), None, None),
}

OPERANDS = {
    "whole": (SHAPE, SHAPE, SHAPE),
    "repeated condition": ((8, 1, 4), SHAPE, SHAPE),
    "scalar": (SHAPE, SHAPE, ()),
    "row": (SHAPE, SHAPE, (4,)),
    "column": (SHAPE, (8, 6, 1), SHAPE),
    "different sums": (SHAPE, (6, 1), (8, 1, 1)),
}

each_axis_type = pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
each_split = pytest.mark.parametrize("split", SPLITS)
each_choice = pytest.mark.parametrize("operands", OPERANDS)


def make_mesh(axis_type: AxisType) -> Mesh:
    return jax.make_mesh(MESH_SHAPE, ("x", "y"), axis_types=(axis_type,) * 2)


def spec_of(shape: tuple[int, ...], split: P) -> P:
    """The spec of an operand of this shape, given the spec of the full shape."""
    return P(*(axes if size != 1 else None for size, axes in zip(shape, split[3 - len(shape) :], strict=True)))


def make_arrays(rng: np.random.Generator, operands: str, dtype: Any = "float32") -> tuple[np.ndarray, ...]:
    """A condition and small integers. Sums of these are exact."""
    shapes = OPERANDS[operands]
    numbers = (rng.integers(-8, 9, shape).astype(jnp.dtype(dtype)) for shape in (*shapes[1:], SHAPE))
    return make_condition(rng, shapes[0]), *numbers


def value_and_gradients(cond: Any, a: Any, b: Any, dy: Any) -> tuple[Any, ...]:
    value, vjp = jax.vjp(functools.partial(where, cond), a, b)
    return value, *vjp(dy)


def put(mesh: Mesh, arrays: tuple[np.ndarray, ...], split: P) -> list[jax.Array]:
    return [jax.device_put(x, NamedSharding(mesh, spec_of(x.shape, split))) for x in arrays]


@each_axis_type
@each_split
@each_choice
def test_sharded_operands(rng: np.random.Generator, operands: str, split: str, axis_type: AxisType) -> None:
    """Results are right and sharded like the operands. The only collectives sum gradients of repeated operands."""
    arrays, mesh = make_arrays(rng, operands), make_mesh(axis_type)
    expected = value_and_gradients(*arrays)
    with jax.set_mesh(mesh):
        placed = put(mesh, arrays, SPLITS[split])
        actual = jax.jit(value_and_gradients)(*placed)
        for got, want, like in zip(actual, expected, (placed[3], *placed[1:3]), strict=True):
            assert_same_memory(got, np.asarray(want))
            assert got.sharding.is_equivalent_to(like.sharding, got.ndim)
        of_value = collectives(where, *placed[:3])
        of_both = collectives(value_and_gradients, *placed)
    assert sum(of_value.values()) == 0, of_value
    num_repeated = sum(x.shape != SHAPE for x in arrays[1:3])
    assert sum(of_both.values()) == of_both["all-reduce"] <= 2 * num_repeated, of_both


@pytest.mark.parametrize("dtype", ["bfloat16", "float64", "int32", "complex64"])
def test_dtypes(rng: np.random.Generator, dtype: str) -> None:
    """Devices with a single row of a sum use the same accumulation dtype as devices with more."""
    mesh = make_mesh(AxisType.Auto)
    with cases.x64_for(dtype):
        cond, a, b, dy = make_arrays(rng, "row", dtype)
        split = NamedSharding(mesh, P(("x", "y"), None, None))
        placed = [jax.device_put(x, split if x.ndim == 3 else NamedSharding(mesh, P())) for x in (cond, a, b, dy)]
        assert_same_memory(jax.jit(where)(*placed[:3]), np.asarray(where(cond, a, b)))
        if dtype == "int32":
            return
        backward = functools.partial(where_backward, b_shape=(4,))
        for got, want in zip(jax.jit(backward)(placed[3], placed[0]), backward(dy, cond), strict=True):
            assert_same_memory(got, np.asarray(want))


def test_sizes_that_do_not_divide_evenly(rng: np.random.Generator) -> None:
    mesh = make_mesh(AxisType.Auto)
    cond, x = make_condition(rng, (13, 5)), rng.integers(-8, 9, (13, 5)).astype(np.float32)

    def constrained(cond: Any, x: Any) -> Any:
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("x", "y")))
        return value_and_gradients(cond, x, x[0], x)

    for got, want in zip(jax.jit(constrained)(cond, x), value_and_gradients(cond, x, x[0], x), strict=True):
        assert_same_memory(got, np.asarray(want))


@pytest.mark.parametrize("whole", ["cond", "a", "b", "all"])
def test_explicit_mode_with_operands_that_are_split_differently(rng: np.random.Generator, whole: str) -> None:
    """Each gradient has the sharding of its primal, however the operands are sharded."""
    arrays, mesh = make_arrays(rng, "column"), make_mesh(AxisType.Explicit)
    expected = value_and_gradients(*arrays)
    with jax.set_mesh(mesh):
        placed = put(mesh, arrays, SPLITS["rows and columns"])
        for i, name in enumerate(("cond", "a", "b")):
            if whole in (name, "all"):
                placed[i] = jax.device_put(arrays[i], NamedSharding(mesh, P()))

        @jax.jit
        def run(cond: Any, a: Any, b: Any, dy: Any) -> Any:
            value, vjp = jax.vjp(functools.partial(where, cond), a, b)
            gradients = vjp(jax.sharding.reshard(dy, jax.typeof(value).sharding))
            for gradient, primal in zip(gradients, (a, b), strict=True):
                assert jax.typeof(gradient).sharding == jax.typeof(primal).sharding
            return value, *gradients

        for got, want in zip(run(*placed), expected, strict=True):
            assert_same_memory(got, np.asarray(want))


@each_axis_type
def test_second_derivatives(rng: np.random.Generator, axis_type: AxisType) -> None:
    mesh = make_mesh(axis_type)
    cond, a, b, _ = make_arrays(rng, "row")

    def loss(a: Any, b: Any, cond: Any) -> Any:
        return (where(cond, a, b) ** 3).sum()

    def second(a: Any, b: Any, cond: Any) -> Any:
        return jax.grad(lambda a, b: sum((g**2).sum() for g in jax.grad(loss, (0, 1))(a, b, cond)), (0, 1))(a, b)

    expected = second(a, b, cond)
    with jax.set_mesh(mesh):
        actual = jax.jit(second)(*put(mesh, (a, b, cond), SPLITS["rows and columns"]))
        for got, want in zip(actual, expected, strict=True):
            assert_same_memory(got, np.asarray(want))  # polynomials of small integers are exact


@pytest.mark.parametrize("mapped", [(0, None, None, 0), (None, 0, None, 0), (0, 0, 0, 0)], ids=str)
def test_sharded_batch_of_vmap(rng: np.random.Generator, mapped: tuple[int | None, ...]) -> None:
    """A mapped axis split over devices needs no collective: the gradients of shared operands are mapped, too."""
    problems = [make_arrays(rng, "row") for _ in range(8)]
    stacked = [np.stack(x) if axis == 0 else x[0] for x, axis in zip(zip(*problems, strict=True), mapped, strict=True)]
    function = jax.vmap(value_and_gradients, mapped)
    expected, mesh = function(*stacked), make_mesh(AxisType.Auto)
    specs = (P("x") if axis == 0 else P() for axis in mapped)
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(stacked, specs, strict=True)]
    for got, want in zip(jax.jit(function)(*placed), expected, strict=True):
        assert_same_memory(got, np.asarray(want))
    assert sum(collectives(function, *placed).values()) == 0


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(rng: np.random.Generator, check_vma: bool) -> None:
    arrays, split = make_arrays(rng, "column"), SPLITS["rows and columns"]
    specs = tuple(spec_of(x.shape, split) for x in arrays)
    mapped = jax.shard_map(
        value_and_gradients,
        mesh=make_mesh(AxisType.Auto),
        in_specs=specs,
        out_specs=(specs[3], *specs[1:3]),
        check_vma=check_vma,
    )
    for got, want in zip(jax.jit(mapped)(*arrays), value_and_gradients(*arrays), strict=True):
        assert_same_memory(got, np.asarray(want))
    assert sum(collectives(mapped, *arrays).values()) == 0


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradient_through_shard_map(rng: np.random.Generator, check_vma: bool) -> None:
    """The gradient of an operand that all devices share is the sum over the devices."""
    cond, a, b, dy = make_arrays(rng, "row")

    def loss(b: Any, cond: Any, a: Any, dy: Any) -> Any:
        return (where(cond, a, b) * dy).sum()

    mapped = jax.shard_map(
        lambda *args: jax.lax.psum(loss(*args), "x"),
        mesh=make_mesh(AxisType.Auto),
        in_specs=(P(), P("x"), P("x"), P("x")),
        out_specs=P(),
        check_vma=check_vma,
    )
    got = jax.jit(jax.grad(mapped, (0, 2)))(b, cond, a, dy)
    want = jax.grad(loss, (0, 2))(b, cond, a, dy)
    jax.tree.map(lambda got, want: assert_same_memory(got, np.asarray(want)), got, want)
