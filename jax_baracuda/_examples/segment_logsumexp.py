"""Example calls of the logarithm of sums of exponentials."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import jax_baracuda as jb
from jax_baracuda._examples.segment import FROM_RESULTS, NUMBERS, TIMED, gather, reductions


def logsumexp(data: Array, segment_ids: Array, num_segments: int, **options: Any) -> Array:
    """The same in plain JAX, with the same arguments."""
    maxima = jax.ops.segment_max(jax.lax.stop_gradient(data), segment_ids, num_segments, **options)
    maxima = jnp.where(jnp.isinf(maxima), 0, maxima)
    exponentials = jnp.exp(data - gather(maxima, segment_ids, **options))
    return maxima + jnp.log(jax.ops.segment_sum(exponentials, segment_ids, num_segments, **options))


EXAMPLES = [*reductions(jb.segment_logsumexp, logsumexp, FROM_RESULTS, NUMBERS, sorted_timed=TIMED)]
