"""causal_conv1d on several devices: right, sharded results. Collectives only sum gradients and exchange halos."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from causal_conv1d.reference import (
    LAYOUTS,
    Problem,
    check_gradients,
    check_outputs,
    expected_gradients,
    expected_outputs,
    in_layout,
    make_problem,
)
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support import cases
from support.cases import assert_same_bits
from support.meshes import MESH_SHAPE, collectives, exchanges

from jax_baracuda import causal_conv1d, causal_conv1d_update

pytestmark = cases.on_two_devices

WIDTH = 4
ARRAYS = ("x", "weight", "bias", "initial_state")
"""The differentiable operands."""

each_layout = pytest.mark.parametrize("channels_last", LAYOUTS, ids=["channels first", "channels last"])


def make_mesh(axis_type: AxisType) -> Mesh:
    return jax.make_mesh(MESH_SHAPE, ("examples", "channels"), axis_types=(axis_type,) * 2)


# How [B, C, L] is split.
SPLITS = {
    "examples": P("examples", None, None),
    "channels": P(None, "channels", None),
    "examples and channels": P("examples", "channels", None),
    "examples over both axes": P(("examples", "channels"), None, None),
    "time": P(None, None, "examples"),
}


def signal_spec(split: P, channels_last: bool) -> P:
    examples, channels, time = split
    return P(examples, time, channels) if channels_last else split


def specs_of(split: P, channels_last: bool) -> dict[str, P]:
    """The specs of all operands, given the spec of a signal with channels first."""
    examples, channels, _ = split
    return {
        "x": signal_spec(split, channels_last),
        "weight": P(channels, None),
        "bias": P(channels),
        "initial_state": P(examples, channels, None),
        "segment_ids": P(examples, None),
        "dy": signal_spec(split, channels_last),
        "d_state": P(examples, channels, None),
    }


def make_operands(
    rng: np.random.Generator, channels_last: bool, examples: int = 16, length: int = 24
) -> dict[str, np.ndarray]:
    problem = make_problem(rng, (examples, 6, length), WIDTH, has_state=True, has_ids=True)
    return problem.operands(channels_last) | {
        "segment_ids": problem.segment_ids,
        "dy": in_layout(rng.normal(size=(examples, 6, length)).astype(np.float32), channels_last),
        "d_state": rng.normal(size=problem.state_shape).astype(np.float32),
    }


def outputs_and_gradients(channels_last: bool, operands: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    others = dict(operands)
    dy, d_state, ids = (others.pop(name) for name in ("dy", "d_state", "segment_ids"))
    outputs, vjp = jax.vjp(lambda arrays: Problem(arrays, ids, "silu").call(arrays, channels_last), others)
    return outputs, vjp((dy, d_state))[0]


def problem_of(operands: dict[str, Any], channels_last: bool) -> Problem:
    arrays = {name: operands[name] for name in ARRAYS}
    return Problem(arrays | {"x": in_layout(operands["x"], channels_last)}, operands["segment_ids"], "silu")


def check(actual: Any, operands: dict[str, Any], channels_last: bool) -> None:
    """Checks the result of :func:`outputs_and_gradients` of these operands."""
    problem, (outputs, gradients) = problem_of(operands, channels_last), actual
    check_outputs(problem, channels_last, *outputs)
    dy = in_layout(operands["dy"], channels_last)
    check_gradients(gradients, expected_gradients(problem, dy, operands["d_state"]), channels_last)


def put(mesh: Mesh, operands: dict[str, Any], specs: dict[str, P]) -> dict[str, jax.Array]:
    return {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in operands.items()}


@each_layout
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_sharded_operands(rng: np.random.Generator, axis_type: AxisType, split: str, channels_last: bool) -> None:
    """Results are right and sharded like the operands. The only collectives sum the parameters' gradients.

    Where time is split, neighbours also exchange the inputs at the borders of shards.
    """
    operands, specs = make_operands(rng, channels_last), specs_of(SPLITS[split], channels_last)
    function = functools.partial(outputs_and_gradients, channels_last)
    mesh = make_mesh(axis_type)
    with jax.set_mesh(mesh):
        placed = put(mesh, operands, specs)
        actual = jax.jit(function)(placed)
        check(actual, operands, channels_last)
        of_both = collectives(function, placed)
        of_value = collectives(lambda operands: function(operands)[0], placed)
        results = {"dy": actual[0][0], "d_state": actual[0][1]} | actual[1]
        for name, result in results.items():
            assert result.sharding.is_equivalent_to(NamedSharding(mesh, specs[name]), result.ndim), name
        if split == "time":
            # Neighbours exchange only halos, which are smaller than a shard.
            most = 16 * 6 * WIDTH * (1 if cases.PLATFORM == "cpu" else 2)  # GPUs join some exchanges
            assert (
                max(x.size for x in exchanges(function, placed)) <= most < operands["x"].size // mesh.shape["examples"]
            )
            return
    assert sum(of_value.values()) == 0, of_value
    examples_are_split = SPLITS[split][0] is not None
    assert sum(of_both.values()) == of_both["all-reduce"] <= 2 * examples_are_split, of_both


@each_layout
def test_parameters_that_are_not_split_as_the_signal_is(rng: np.random.Generator, channels_last: bool) -> None:
    """In explicit mode, each gradient has the sharding of its primal, however the operands are sharded."""
    operands, mesh = make_operands(rng, channels_last), make_mesh(AxisType.Explicit)
    split = specs_of(P("examples", "channels", None), channels_last)
    for whole in (("weight", "bias"), ("initial_state",), ("segment_ids",), ("x", "dy"), tuple(split)):
        specs = split | {name: P() for name in whole}
        # Cotangents have the types of the results, which follow x.
        specs |= {"dy": specs["x"], "d_state": split["d_state"] if "x" not in whole else P()}
        with jax.set_mesh(mesh):
            placed = put(mesh, operands, specs)

            @jax.jit
            def run(operands: dict[str, jax.Array]) -> Any:
                others = dict(operands)
                dy, d_state, ids = (others.pop(name) for name in ("dy", "d_state", "segment_ids"))
                outputs, vjp = jax.vjp(lambda arrays: Problem(arrays, ids, "silu").call(arrays, channels_last), others)
                cotangents = tuple(
                    jax.sharding.reshard(d, jax.typeof(y).sharding) for d, y in zip((dy, d_state), outputs, strict=True)
                )
                gradients = vjp(cotangents)[0]
                for name, gradient in gradients.items():
                    assert jax.typeof(gradient).sharding == jax.typeof(others[name]).sharding, name
                return outputs, gradients

            check(run(placed), operands, channels_last)


@pytest.mark.parametrize("length", [24, 2])
def test_operands_that_are_split_differently(rng: np.random.Generator, length: int) -> None:
    """In explicit mode, ids and states may be split over other axes than the signal, or over time."""
    operands = make_operands(rng, False, length=length)
    function, mesh = functools.partial(outputs_and_gradients, False), make_mesh(AxisType.Explicit)
    specs = specs_of(P("examples", "channels", None), False)
    for others in (
        {"segment_ids": P("channels", None), "initial_state": P("channels", None, None)},
        {"segment_ids": P(None, "channels"), "initial_state": P(None, None, None)},
    ):
        with jax.set_mesh(mesh):
            check(jax.jit(function)(put(mesh, operands, specs | others)), operands, False)


@each_layout
@pytest.mark.parametrize("time_axes", ["examples", ("examples", "channels"), ("channels", "examples")])
@pytest.mark.parametrize("length", [8, 24, 25, 40])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_time_over_devices(
    rng: np.random.Generator, width: int, length: int, time_axes: str | tuple[str, ...], channels_last: bool
) -> None:
    """Results are right for time shards shorter than the filter, as long and longer, and for uneven shards.

    The mesh axes that split time may be in another order than in the mesh.
    """
    mesh = make_mesh(AxisType.Auto)
    split = NamedSharding(mesh, signal_spec(P(None, None, time_axes), channels_last))
    problem = make_problem(rng, (2, 3, length), width, has_state=width > 1, has_ids=length % 3 == 1)
    dy = in_layout(rng.normal(size=(2, 3, length)).astype(np.float32), channels_last)

    def call(arrays: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
        x = jax.lax.with_sharding_constraint(arrays["x"], split)
        return problem.call(arrays | {"x": x}, channels_last)

    @jax.jit
    def run(arrays: dict[str, Any], dy: jax.Array) -> Any:
        (y, state), vjp = jax.vjp(call, arrays)
        return (y, state), vjp((jax.lax.with_sharding_constraint(dy, split), jnp.ones_like(state)))[0]

    outputs, gradients = run(problem.operands(channels_last), dy)
    check_outputs(problem, channels_last, *outputs)
    expected = expected_gradients(problem, in_layout(dy, channels_last), np.ones(problem.state_shape))
    check_gradients(gradients, expected, channels_last)


def test_derivatives_over_split_time(rng: np.random.Generator) -> None:
    """Second derivatives, with vmap and checkpoint, equal one device's exactly: all sums are of small integers."""
    mesh = make_mesh(AxisType.Auto)
    x = rng.integers(-2, 3, (3, 2, 3, 24)).astype(np.float32)
    weight = rng.integers(-2, 3, (3, WIDTH)).astype(np.float32)

    def loss(x: jax.Array, weight: jax.Array) -> jax.Array:
        return (jax.checkpoint(causal_conv1d)(x, weight) ** 2).sum()

    def second(x: jax.Array, weight: jax.Array) -> Any:
        dx = jax.vmap(jax.grad(loss), (0, None))
        return jax.grad(lambda x, weight: (dx(x, weight) * jnp.cos(jnp.pi * x)).sum(), argnums=(0, 1))(x, weight)

    expected = jax.jit(second)(x, weight)
    placed = jax.device_put(x, NamedSharding(mesh, P(None, None, None, "examples")))
    jax.tree.map(np.testing.assert_array_equal, jax.jit(second)(placed, weight), expected)


def test_examples_that_do_not_divide_evenly(rng: np.random.Generator) -> None:
    operands, mesh = make_operands(rng, True, examples=13), make_mesh(AxisType.Auto)
    function = functools.partial(outputs_and_gradients, True)

    def constrained(operands: dict[str, Any]) -> Any:
        x = jax.lax.with_sharding_constraint(operands["x"], NamedSharding(mesh, P("examples", None, "channels")))
        return function(operands | {"x": x})

    check(jax.jit(constrained)(operands), operands, True)


@each_layout
def test_sharded_update(rng: np.random.Generator, channels_last: bool) -> None:
    """Decoding on several devices needs no collective, and updates a donated state in place."""
    mesh = make_mesh(AxisType.Auto)
    shapes = {"x": (16, 6), "state": (16, 6, 5), "weight": (6, 4), "bias": (6,)}
    specs = {
        "x": P("examples", "channels"),
        "state": P("examples", "channels", None),
        "weight": P("channels", None),
        "bias": P("channels"),
    }
    operands = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}

    def update(state: Any, others: dict[str, Any]) -> Any:
        return causal_conv1d_update(state=state, **others, activation="silu", channels_last=channels_last)

    others = {name: x for name, x in operands.items() if name != "state"}
    placed = put(mesh, operands, specs)
    state = placed.pop("state")
    assert sum(collectives(update, state, placed).values()) == 0
    y, new_state = jax.jit(update, donate_argnums=0)(state, placed)
    assert state.is_deleted()
    inputs = {"x": operands["x"][..., None], "initial_state": operands["state"][..., -3:]}
    expected_outputs(Problem(others | inputs, None, "silu"))[0].check(np.asarray(y)[..., None])
    assert_same_bits(new_state, np.concatenate([operands["state"], inputs["x"]], axis=2)[..., 1:])
    assert new_state.sharding.is_equivalent_to(NamedSharding(mesh, specs["state"]), 3)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, specs["x"]), 2)


def test_gradient_of_an_update_whose_state_is_split_along_time(rng: np.random.Generator) -> None:
    """The filter reads an odd number of states, which explicit sharding could not split. All sums are exact."""
    mesh = make_mesh(AxisType.Explicit)
    shapes = {"x": (4, 6, 5), "state": (4, 6, 8), "weight": (6, 4)}
    specs = {"x": P(), "state": P(None, None, "examples"), "weight": P()}
    operands = {name: rng.integers(-3, 4, shape).astype(np.float32) for name, shape in shapes.items()}

    def gradient(operands: dict[str, Any]) -> Any:
        def loss(operands: dict[str, Any]) -> Any:
            y, state = causal_conv1d_update(**operands)
            return (y**2).sum() + (state**3).sum()

        return jax.grad(loss)(operands)

    expected = gradient(operands)
    with jax.set_mesh(mesh):
        jax.tree.map(np.testing.assert_array_equal, jax.jit(gradient)(put(mesh, operands, specs)), expected)


@pytest.mark.parametrize("mapped", ["x", "weight", "all"])
def test_sharded_batch_of_vmap(rng: np.random.Generator, mapped: str) -> None:
    """A mapped axis split over devices needs no collective: the gradients of shared operands are mapped, too."""
    problems = [make_operands(rng, False, examples=2) for _ in range(8)]
    axes = {name: 0 if mapped in (name, "all") or name in ("dy", "d_state") else None for name in problems[0]}
    operands = {
        name: np.stack([p[name] for p in problems]) if axes[name] == 0 else problems[0][name] for name in problems[0]
    }
    function = jax.vmap(functools.partial(outputs_and_gradients, False), (axes,))
    mesh = make_mesh(AxisType.Auto)
    specs = {name: P("examples") if axes[name] == 0 else P() for name in operands}
    placed = put(mesh, operands, specs)
    results = jax.jit(function)(placed)
    for k in range(len(problems)):
        of_one = {name: x if axes[name] is None else x[k] for name, x in operands.items()}
        check(jax.tree.map(lambda x, k=k: x[k], results), of_one, False)
    assert sum(collectives(function, placed).values()) == 0


@pytest.mark.parametrize("check_vma", [True, False])
@each_layout
def test_shard_map_over_channels(rng: np.random.Generator, channels_last: bool, check_vma: bool) -> None:
    operands, specs = make_operands(rng, channels_last), specs_of(P(None, "channels", None), channels_last)
    function = functools.partial(outputs_and_gradients, channels_last)
    out_specs = (specs["dy"], specs["d_state"]), {name: specs[name] for name in ARRAYS}
    mapped = jax.shard_map(
        function, mesh=make_mesh(AxisType.Auto), in_specs=(specs,), out_specs=out_specs, check_vma=check_vma
    )
    check(jax.jit(mapped)(operands), operands, channels_last)
    assert sum(collectives(mapped, operands).values()) == 0


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradient_through_shard_map_over_examples(rng: np.random.Generator, check_vma: bool) -> None:
    """The gradient of parameters that all devices share is the sum over the devices."""
    operands, specs = make_operands(rng, True), specs_of(P("examples", None, None), True)
    problem = problem_of(operands, True)
    ids = operands.pop("segment_ids")
    weights = operands.pop("dy")
    operands.pop("d_state")

    def loss(arrays: dict[str, Any], ids: Any, weights: Any) -> Any:
        y, state = Problem(arrays, ids, "silu").call(arrays, True)
        return (y * weights).sum() + (state**2).sum()

    mapped = jax.shard_map(
        lambda *args: jax.lax.psum(loss(*args), "examples"),
        mesh=make_mesh(AxisType.Auto),
        in_specs=({name: specs[name] for name in operands}, specs["segment_ids"], specs["dy"]),
        out_specs=P(),
        check_vma=check_vma,
    )
    _, final_state = expected_outputs(problem)
    expected = expected_gradients(problem, in_layout(weights, True), 2 * final_state)
    check_gradients(jax.jit(jax.grad(mapped))(operands, ids, weights), expected, True)


def test_shard_map_over_one_of_two_axes(rng: np.random.Generator) -> None:
    """Results are right if the other axis is left to the partitioner."""
    operands, specs = make_operands(rng, False), specs_of(P(None, "channels", None), False)
    function = functools.partial(outputs_and_gradients, False)
    out_specs = (specs["dy"], specs["d_state"]), {name: specs[name] for name in ARRAYS}
    mesh = make_mesh(AxisType.Auto)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=(specs,), out_specs=out_specs, axis_names={"channels"})
    placed = put(mesh, operands, specs_of(P("examples", "channels", None), False))
    check(jax.jit(mapped)(placed), operands, False)


def test_outputs_are_those_of_the_reference(rng: np.random.Generator) -> None:
    """On one device, too, outputs and gradients agree with the reference."""
    operands = make_operands(rng, False)
    outputs, gradients = outputs_and_gradients(False, operands)
    check((outputs, gradients), operands, False)
    assert jnp.isfinite(outputs[0]).all()
