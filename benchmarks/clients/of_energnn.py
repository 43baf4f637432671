"""energnn: the training step of a recurrent graph network that solves the equations of power grids."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from energnn.model.coupler.message_passing import message_passing_function
from energnn.model.decoder import equivariant_decoder
from energnn.model.ready_to_use import SmallRecurrentEquivariantGNN
from energnn.problem.example import LinearSystemProblemGenerator
from flax import nnx

import jax_baracuda as jb
from benchmarks.clients import Program

SIZE_OF, SMALL = "buses of each of 8 grids, at most", 16


def our_gather(*, coordinates: jax.Array, addresses: jax.Array) -> jax.Array:
    """Replaces energnn's gather. Rows that its address does not have are multiplied by zero later."""
    return jb.take_rows(coordinates, addresses)


def our_scatter_add(*, accumulator: jax.Array, increment: jax.Array, addresses: jax.Array) -> jax.Array:
    return accumulator + jb.segment_sum(increment, addresses, len(accumulator))


@contextlib.contextmanager
def with_our_functions() -> Iterator[None]:
    with (
        mock.patch.object(message_passing_function, "gather", our_gather),
        mock.patch.object(equivariant_decoder, "gather", our_gather),
        mock.patch.object(message_passing_function, "scatter_add", our_scatter_add),
    ):
        yield


def program(dtype: Any, buses: int) -> Program:
    batch = LinearSystemProblemGenerator(seed=0, n_max=buses).generate_problem_batch(8)
    model = SmallRecurrentEquivariantGNN(
        in_structure=batch.context_structure, out_structure=batch.decision_structure, dtype=dtype
    )
    graph, weights, others = nnx.split(model, nnx.Param, ...)

    def loss(weights: Any, context: Any, solution: jax.Array) -> jax.Array:
        decision, _ = nnx.merge(graph, weights, others).forward_batch(graph=context)
        return jnp.nanmean((decision.feature_flat_array - solution) ** 2)

    return Program(
        jax.value_and_grad(loss),
        (weights, batch.context, batch.oracle.feature_flat_array),
        rtol=1e-3 if dtype is None else 0.05,
        atol=1e-4 if dtype is None else 0.02,
        edit=with_our_functions,
    )


PROGRAMS: dict[str, Callable[[int], Program]] = {
    "training, float32": functools.partial(program, None),
    "training, bfloat16": functools.partial(program, jnp.bfloat16),
}
