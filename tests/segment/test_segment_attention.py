"""segment_attention: values and gradients against float64 NumPy and plain JAX, and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases

from jax_baracuda import segment_attention, segment_plan
from jax_baracuda._examples.segment import attention

# (nodes, edges, segments, heads, row_shape)
SIZES = (
    (1, 1, 1, (), ()),
    (5, 0, 4, (2,), (3,)),
    (50, 900, 41, (), (7,)),
    (50, 900, 41, (4,), (8,)),
    (30, 4000, 6, (2, 3), (5,)),
    (2000, 9000, 12_000, (8,), (16,)),
)


def reference(logits: np.ndarray, data: np.ndarray, gather_ids: np.ndarray, ids: np.ndarray, segments: int) -> Any:
    """Attention in float64, with the probabilities rounded to the dtype of the logits."""
    output = np.zeros((segments, *data.shape[1:]))
    for segment in np.unique(ids[(ids >= 0) & (ids < segments)]):
        edges = np.flatnonzero(ids == segment)
        exponentials = np.exp(logits[edges].astype(np.float64) - logits[edges].max(axis=0).astype(np.float64))
        weights = (exponentials / exponentials.sum(axis=0)).astype(logits.dtype).astype(np.float64)
        rows = data[gather_ids[edges]].astype(np.float64)
        output[segment] = (weights.reshape(*weights.shape, *[1] * (rows.ndim - weights.ndim)) * rows).sum(axis=0)
    return output


@pytest.mark.parametrize("form", ["ids", "deterministic", "plan"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", cases.FLOATING)
def test_value(rng: np.random.Generator, dtype: str, sizes: Any, form: str) -> None:
    """Values are right, also with dropped edges. Two runs give the same bits if the call promises that."""
    nodes, edges, segments, heads, features = sizes
    logits = (3 * rng.normal(size=(edges, *heads))).astype(jnp.dtype(dtype))
    data = rng.normal(size=(nodes, *heads, *features)).astype(jnp.dtype(dtype))
    gather_ids, ids = rng.integers(0, nodes, edges), rng.integers(-1, segments + 1, edges)

    @jax.jit
    def run(logits: Any, data: Any) -> jax.Array:
        if form == "plan":
            return segment_attention(logits, data, plan=segment_plan(ids, segments, gather_ids, nodes))
        return segment_attention(logits, data, gather_ids, ids, segments, deterministic=form == "deterministic")

    with cases.x64_for(dtype):
        output, again = run(logits, data), run(logits, data)
    assert output.dtype == data.dtype
    if form != "ids" or cases.PLATFORM == "cpu":
        assert np.asarray(output).tobytes() == np.asarray(again).tobytes()
    eps = float(jnp.finfo(data.dtype).eps)  # a probability near a rounding boundary may be rounded either way
    expected = reference(logits, data, gather_ids, ids, segments)
    bound = 4 * eps * reference(logits, np.abs(data), gather_ids, ids, segments) + 1e-6 * (eps > 1e-4)
    bound += 16 * float(jnp.finfo(jnp.promote_types(data.dtype, jnp.float32)).eps)
    assert (np.abs(np.asarray(output, np.float64) - expected) <= bound).all()


@pytest.mark.parametrize("form", ["ids", "plan"])
def test_gradients(rng: np.random.Generator, form: str) -> None:
    """First and second derivatives by logits and data agree with plain JAX in float64."""
    with cases.x64_for("float64"):
        logits, data = rng.normal(size=(40, 2)), rng.normal(size=(9, 2, 3))
        ids = rng.integers(0, 9, 40), rng.integers(0, 7, 40)
        plan = segment_plan(ids[1], 7, ids[0], 9)

        def ours(logits: Any, data: Any) -> jax.Array:
            if form == "plan":
                return segment_attention(logits, data, plan=plan)
            return segment_attention(logits, data, *ids, 7)

        def loss(call: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
            return lambda logits, data: (call(logits, data) ** 2).sum()

        def gradient_of_gradient(call: Callable[..., jax.Array]) -> Any:
            def squares(*arrays: Any) -> jax.Array:
                return sum((g**2).sum() for g in jax.grad(loss(call), (0, 1))(*arrays))

            return jax.jit(jax.grad(squares, (0, 1)))(logits, data)

        def by_jax(logits: Any, data: Any) -> jax.Array:
            return attention(logits, data, *ids, 7)

        for of in (lambda call: jax.jit(jax.grad(loss(call), (0, 1)))(logits, data), gradient_of_gradient):
            jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-11), of(ours), of(by_jax))


DATA, LOGITS, IDS = np.ones((4, 2, 3), np.float32), np.ones((5, 2), np.float32), np.zeros(5, np.int32)


@pytest.mark.parametrize(
    ("error", "call"),
    [
        ("TypeError: logits must be an array, got list", lambda: segment_attention([1.0], DATA, IDS, IDS, 2)),
        ("TypeError: logits must be .* floating", lambda: segment_attention(IDS, DATA, IDS, IDS, 2)),
        ("TypeError: data must be .* floating", lambda: segment_attention(LOGITS, IDS, IDS, IDS, 2)),
        (r"ValueError: logits must be \[E\]", lambda: segment_attention(LOGITS[:3], DATA, IDS, IDS, 2)),
        (r"ValueError: logits must be \[E\]", lambda: segment_attention(np.ones((5, 3)), DATA, IDS, IDS, 2)),
        ("TypeError: num_segments must be given, or a plan", lambda: segment_attention(LOGITS, DATA, IDS, IDS)),
        ("TypeError: plan must be a SegmentPlan, got dict", lambda: segment_attention(LOGITS, DATA, plan={})),
        (
            "ValueError: belong to the plan; pass none of them, got gather_ids",
            lambda: segment_attention(LOGITS, DATA, IDS, plan=segment_plan(IDS, 2, IDS, 4)),
        ),
    ],
)
def test_errors(error: str, call: Callable[[], Any]) -> None:
    with cases.raises(error, "segment_attention: .*"):
        call()
