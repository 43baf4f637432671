"""The declaration of segment_logsumexp for the matrix of combinations."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from segment.matrix import declare_reduction, finite_logits, logits, majorant_softmax, reference_max
from support.matrix.calls import FLOATING, segment_sum, take_cells


def reference(data: Any, ids: Any, num_segments: int) -> Any:
    """In float64, with derivatives of every order."""
    maxima = reference_max(jax.lax.stop_gradient(data), ids, num_segments, first_wins=True, counts_identity=False)
    maxima = jnp.where(jnp.isinf(maxima), 0, maxima)
    is_member = take_cells(jnp.ones(maxima.shape, bool), ids, False)
    exponents = jnp.where(is_member, data - take_cells(maxima, ids), -jnp.inf)
    total = segment_sum(jnp.exp(exponents), ids, num_segments)
    return jnp.where(total == 0, -jnp.inf, jnp.log(jnp.where(total == 0, 1, total)) + maxima)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def majorant(data: Any, ids: Any, num_segments: int) -> Any:
    """What rounding errors are relative to. The sum has errors near 1, the result has errors of its size. Its gradient
    has the errors of a softmax, which do not grow with the result."""
    largest = reference(jnp.abs(jnp.where(jnp.isfinite(data), data, 0)), ids, num_segments)
    return 1 + jnp.maximum(largest, 0)


@majorant.defjvp
def _majorant_jvp(num_segments: int, primals: Any, tangents: Any) -> tuple[Any, Any]:
    data, ids = primals
    finite = jnp.maximum(data, -1e30)  # in a segment of -inf, softmax is NaN
    weights = majorant_softmax(finite, ids, num_segments)
    return majorant(data, ids, num_segments), segment_sum(weights * tangents[0], ids, num_segments)


declare_reduction(
    "segment_logsumexp",
    FLOATING,
    lambda options: reference,
    lambda options, sizes: logits if options["values"] == "special" else finite_logits,
    majorant_of=lambda options: majorant,
    options={"values": ("finite", "special")},
)
