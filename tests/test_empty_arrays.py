"""Empty arrays with other dimensions so large that no integer can hold their product."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support import meshes

import jax_baracuda as jb
from jax_baracuda import forward_mode
from jax_baracuda._core.selection import Implementation

HUGE = 2**40
ROWS = ((0, HUGE, HUGE), "float32")
IDS = ((0,), "int32")
Array = tuple[tuple[int, ...], str]


def reduction(name: str, num_segments: int = 0) -> Callable[..., jax.Array]:
    return lambda data, ids: getattr(jb, name)(data, ids, num_segments)


def gradient(function: Callable[..., jax.Array], argnums: Any = 0) -> Callable[..., Any]:
    return jax.grad(lambda *args: function(*args).astype(jnp.float32).sum(), argnums)


def tangent(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    return lambda x, *args: jax.jvp(lambda x: function(x, *args), (x,), (x,))[1]


def append(dest: jax.Array, source: jax.Array) -> jax.Array:
    return jb.write_slice(dest, source, (0, (1, 3), 0))


CALLS: dict[str, tuple[Callable[..., Any], list[Array], list[tuple[int, ...]]]] = {
    **{
        name: (reduction(name), [ROWS, IDS], [ROWS[0]])
        for name in (
            *("segment_max", "segment_min", "segment_argmax", "segment_argmin"),
            *("segment_sum", "segment_mean", "segment_prod", "segment_softmax"),
        )
    },
    "segment_softmax of four": (reduction("segment_softmax", 4), [ROWS, IDS], [ROWS[0]]),
    **{
        f"gradient of {name}": (gradient(reduction(name)), [ROWS, IDS], [ROWS[0]])
        for name in ("segment_max", "segment_sum", "segment_mean", "segment_prod", "segment_softmax")
    },
    **{
        f"tangent of {name}": (
            tangent(lambda data, ids, name=name: getattr(forward_mode, name)(data, ids, 0)),
            [ROWS, IDS],
            [ROWS[0]],
        )
        for name in ("segment_max", "segment_sum", "segment_mean", "segment_prod", "segment_softmax")
    },
    "where": (jb.where, [(ROWS[0], "bool"), ROWS, ((1, 1, 1), "float32")], [ROWS[0]]),
    "gradient of where": (
        lambda cond, dy: jb.where_backward(dy, cond, a_shape=(0, 1, 1)),
        [(ROWS[0], "bool"), ROWS],
        [(0, 1, 1), ROWS[0]],
    ),
    "rope": (jb.rope, [((0, 2**61, 3, 8), "bfloat16")], [(0, 2**61, 3, 8)]),
    "gradient of rope, interleaved": (
        gradient(functools.partial(jb.rope, interleaved=True)),
        [((0, 2**61, 3, 8), "bfloat16")],
        [(0, 2**61, 3, 8)],
    ),
    "causal_conv1d": (jb.causal_conv1d, [((0, 4, 2**62), "float32"), ((4, 4), "float32")], [(0, 4, 2**62)]),
    "gradient of causal_conv1d": (
        gradient(jb.causal_conv1d, (0, 1)),
        [((0, 4, 2**62), "float32"), ((4, 4), "float32")],
        [(0, 4, 2**62), (4, 4)],
    ),
    "write_slice": (append, [ROWS, ((0, 2, HUGE), "float32")], [ROWS[0]]),
    "gradient of write_slice": (gradient(append, (0, 1)), [ROWS, ((0, 2, HUGE), "float32")], [ROWS[0], (0, 2, HUGE)]),
}


@pytest.mark.parametrize("implementation", ["kernel", "xla"])
@pytest.mark.parametrize("name", CALLS)
def test_shapes(name: str, implementation: Implementation) -> None:
    if name == "segment_softmax of four" and implementation == "xla":
        pytest.skip("XLA has no shape of so many cells")
    function, arrays, expected = CALLS[name]
    with jb.implementation(implementation):
        results = jax.jit(function)(*(jnp.zeros(shape, dtype) for shape, dtype in arrays))
    assert [x.shape for x in jax.tree.leaves(results)] == expected
    for x in jax.tree.leaves(results):
        if x.size > 0:  # sums of nothing
            np.testing.assert_array_equal(x, 0)


def test_messages_of_no_edges() -> None:
    """Sums over no edges and their gradients are zeros, also without rows or segments, in both implementations."""
    none = jnp.zeros(0, jnp.int32)
    for implementation in ("kernel", "xla"):
        for num_rows, num_segments in ((0, 3), (3, 0), (0, 0)):
            data = jnp.ones((num_rows, 2))
            output, pull_back = jax.vjp(
                lambda x, m=num_segments, by=implementation: jb.gather_segment_sum(x, none, none, m, implementation=by),
                data,
            )
            np.testing.assert_array_equal(output, np.zeros((num_segments, 2)))
            np.testing.assert_array_equal(pull_back(jnp.ones_like(output))[0], np.zeros((num_rows, 2)))


@pytest.mark.parametrize("implementation", [None, "kernel", "xla"])
def test_in_shard_map(implementation: Implementation | None) -> None:
    """Sums of no rows are zeros, also if features are split."""
    mesh = jax.make_mesh(meshes.MESH_SHAPE, ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    data, ids = jnp.zeros((0, 4)), jnp.zeros(0, jnp.int32)

    def result_by(implementation: Implementation | None) -> jax.Array:
        split = {"in_specs": (P(None, "x"), P()), "out_specs": P(None, "x")}
        reduce = functools.partial(jb.segment_sum, num_segments=3, implementation=implementation)
        return jax.jit(jax.shard_map(reduce, mesh=mesh, **split))(data, ids)

    try:
        result_by("xla")
    except jax.errors.JaxRuntimeError as error:
        if "expected at least one operand" not in str(error):
            raise
        pytest.skip("this version of XLA compiles no such program of plain JAX either")
    np.testing.assert_array_equal(result_by(implementation), np.zeros((3, 4)))
