"""causal_conv1d on several devices: time over devices, and decoding."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from causal_conv1d.reference import (
    LAYOUTS,
    Convolution,
    check_gradients,
    check_outputs,
    expected_gradients,
    expected_outputs,
    in_layout,
    make_convolution,
)
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support import cases
from support.cases import assert_same_bits
from support.meshes import collectives, make_mesh

from jax_baracuda import causal_conv1d_update

pytestmark = cases.on_two_devices

WIDTH = 4
NAMES = ("examples", "channels")

each_layout = pytest.mark.parametrize("channels_last", LAYOUTS, ids=["channels first", "channels last"])


def signal_spec(split: P, channels_last: bool) -> P:
    examples, channels, time = split
    return P(examples, time, channels) if channels_last else split


def put(mesh: Mesh, operands: dict[str, Any], specs: dict[str, P]) -> dict[str, jax.Array]:
    return {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in operands.items()}


@each_layout
@cases.each_pair(
    length=[8, 24, 25, 40, 88],
    width=[1, 2, 4, 8, 10],
    time_axes=["examples", ("examples", "channels"), ("channels", "examples")],
)
def test_time_over_devices(
    rng: np.random.Generator, width: int, length: int, time_axes: str | tuple[str, ...], channels_last: bool
) -> None:
    """Results are right for time shards shorter than the filter, as long and longer, and for uneven shards.

    The mesh axes that split time may be in another order than in the mesh.
    """
    mesh = make_mesh(names=NAMES)
    split = NamedSharding(mesh, signal_spec(P(None, None, time_axes), channels_last))
    problem = make_convolution(rng, (2, 3, length), width, has_state=width > 1, has_ids=length % 3 == 1)
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


@each_layout
def test_sharded_update(rng: np.random.Generator, channels_last: bool) -> None:
    """Decoding on several devices needs no collective, and updates a donated state in place."""
    mesh = make_mesh(names=NAMES)
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
    expected_outputs(Convolution(others | inputs, None, "silu"))[0].check(np.asarray(y)[..., None])
    assert_same_bits(new_state, np.concatenate([operands["state"], inputs["x"]], axis=2)[..., 1:])
    assert new_state.sharding.is_equivalent_to(NamedSharding(mesh, specs["state"]), 3)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, specs["x"]), 2)
