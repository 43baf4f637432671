"""Gradients of means of 16 bits: cotangents are divided in float32, by counts that 16 bits cannot hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases

import jax_baracuda as jb

COUNTS = (257, 2049, 1, 4099, 3, 771)
"""float16 holds all whole numbers up to 2048, bfloat16 up to 256."""


def gradient_of_mean(d_output: Any, data: Any, ids: Any) -> Any:
    return jax.vjp(lambda data: jb.segment_mean(data, ids, len(COUNTS)), data)[1](d_output)[0]


def mean_backward(d_output: Any, data: Any, ids: Any) -> Any:
    return jb.segment_mean_backward(d_output, ids)


def gradient_of_gathered_mean(d_output: Any, data: Any, ids: Any) -> Any:
    """Every edge gathers its own row, so the gradient of a row is a single quotient."""
    edges = jnp.arange(len(ids)), ids, len(COUNTS)
    return jax.vjp(lambda data: jb.gather_segment_mean(data, *edges), data)[1](d_output)[0]


@pytest.mark.parametrize("implementation", ["kernel", "xla"])
@pytest.mark.parametrize("gradient", [gradient_of_mean, mean_backward, gradient_of_gathered_mean])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_cotangents_are_divided_in_float32(
    rng: np.random.Generator, dtype: str, gradient: Callable[..., Any], implementation: Any
) -> None:
    ids = rng.permutation(np.repeat(np.arange(len(COUNTS), dtype=np.int32), COUNTS))
    data = np.zeros((len(ids), 5)).astype(jnp.dtype(dtype))
    d_output = rng.normal(size=(len(COUNTS), 5)).astype(jnp.dtype(dtype))
    with jb.implementation(implementation):
        actual = jax.jit(gradient)(d_output, data, ids)
    cases.reference_mean_gradient(d_output, data, ids).check(np.asarray(actual))
