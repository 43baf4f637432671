"""Arrays without elements, whose other dimensions are so large that no integer holds their product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_baracuda as jb

HUGE = 2**40
ROWS = ((0, HUGE, HUGE), "float32")
IDS = ((0,), "int32")
Array = tuple[tuple[int, ...], str]


def reduction(name: str, num_segments: int = 0) -> Callable[..., jax.Array]:
    return lambda data, ids: getattr(jb, name)(data, ids, num_segments)


def gradient(function: Callable[..., jax.Array], argnums: Any = 0) -> Callable[..., Any]:
    return jax.grad(lambda *args: function(*args).astype(jnp.float32).sum(), argnums)


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
    "where": (jb.where, [(ROWS[0], "bool"), ROWS, ((1, 1, 1), "float32")], [ROWS[0]]),
    "gradient of where": (
        lambda cond, dy: jb.where_backward(dy, cond, a_shape=(0, 1, 1)),
        [(ROWS[0], "bool"), ROWS],
        [(0, 1, 1), ROWS[0]],
    ),
    "rope": (jb.rope, [((0, 2**61, 3, 8), "bfloat16")], [(0, 2**61, 3, 8)]),
    "causal_conv1d": (jb.causal_conv1d, [((0, 4, 2**62), "float32"), ((4, 4), "float32")], [(0, 4, 2**62)]),
    "gradient of causal_conv1d": (
        gradient(jb.causal_conv1d, (0, 1)),
        [((0, 4, 2**62), "float32"), ((4, 4), "float32")],
        [(0, 4, 2**62), (4, 4)],
    ),
    "write_slice": (append, [ROWS, ((0, 2, HUGE), "float32")], [ROWS[0]]),
    "gradient of write_slice": (gradient(append, (0, 1)), [ROWS, ((0, 2, HUGE), "float32")], [ROWS[0], (0, 2, HUGE)]),
}


@pytest.mark.parametrize("name", CALLS)
def test_shapes(name: str) -> None:
    function, arrays, expected = CALLS[name]
    results = jax.jit(function)(*(jnp.zeros(shape, dtype) for shape, dtype in arrays))
    assert [x.shape for x in jax.tree.leaves(results)] == expected
    for x in jax.tree.leaves(results):
        if x.size > 0:  # sums of nothing
            np.testing.assert_array_equal(x, 0)
