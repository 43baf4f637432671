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

SIZE_OF, SIZES = "buses a grid", (16, 256)


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

    def step(weights: Any, others: Any, context: Any, solution: jax.Array) -> tuple[jax.Array, Any]:
        """As in energnn's trainer: the normaliser's state, too, is an argument of what is differentiated."""

        def decide(weights: Any, others: Any) -> tuple[jax.Array, Any]:
            model = nnx.merge(graph, weights, others)
            decision, _ = model.forward_batch(graph=context)
            return decision.feature_flat_array, nnx.split(model, nnx.Param, ...)[2]

        decision, pull_back, _ = jax.vjp(decide, weights, others, has_aux=True)
        errors = jnp.nan_to_num(decision - solution)
        return jnp.mean(errors**2), pull_back(errors.astype(decision.dtype))[0]

    return Program(
        step,
        (weights, others, batch.context, batch.oracle.feature_flat_array),
        rtol=1e-3 if dtype is None else 0.05,
        atol=1e-4 if dtype is None else 0.02,
        edit=with_our_functions,
    )


PROGRAMS: dict[str, Callable[[int], Program]] = {
    "training, float32": functools.partial(program, None),
    "training, bfloat16": functools.partial(program, jnp.bfloat16),
}
