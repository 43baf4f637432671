"""Ragged batches and pools of states: random operands, and the references of the matrix in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from causal_conv1d import matrix

ACTIVATIONS = {None: lambda z: z, "silu": jax.nn.silu}


def ragged(given: Mapping[str, Any], batch: Any, activation: str | None = "silu") -> tuple[Any, Any]:
    """y and the new states, for ``batch == (cu_seqlens, state_slots, has_state)``. The first start is 0."""
    cu_seqlens, slots, has_state = batch
    names = {"ends": jnp.asarray(cu_seqlens)[1:], "state_slots": jnp.asarray(slots), "has_state": has_state}
    return matrix.ragged_reference(ACTIVATIONS[activation], {**given, **names})


def updated(
    given: Mapping[str, Any], slots: Any, num_accepted: Any = None, activation: str | None = "silu"
) -> tuple[Any, Any]:
    """y ``[B, T, C]`` and the new states, for ``x [B, T, C]``."""
    accepted = {} if num_accepted is None else {"num_accepted": jnp.asarray(num_accepted)}
    arrays = {**given, "x": jnp.swapaxes(given["x"], 1, 2), "state": given["states"], "state_slots": jnp.asarray(slots)}
    y, states = matrix.pool_reference(ACTIVATIONS[activation], {**arrays, **accepted})
    return jnp.swapaxes(y, 1, 2), states


def in_float64(reference: Any, arrays: Mapping[str, Any], *others: Any) -> tuple[np.ndarray, np.ndarray]:
    """The results of one of these references."""
    with jax.enable_x64(True):
        wide = {name: np.asarray(x).astype(np.float64) for name, x in arrays.items()}
        y, states = jax.jit(lambda wide: reference(wide, *others))(wide)
    return np.asarray(y), np.asarray(states)


def random_parameters(
    rng: np.random.Generator,
    shape: tuple[int, ...],
    pool: tuple[int, int],
    width: int,
    dtype: str = "float32",
    parameter_dtype: str | None = None,
    has_bias: bool = True,
) -> dict[str, np.ndarray]:
    """x of this shape, which ends with the channels, a pool of ``(slots, K)``, weight and bias."""

    def normal(dtype: str, *size: int) -> np.ndarray:
        return rng.normal(size=size).astype(jnp.dtype(dtype))

    channels, own = shape[-1], parameter_dtype or dtype
    arrays = {
        "x": normal(dtype, *shape),
        "states": normal(dtype, pool[0], channels, pool[1]),
        "weight": normal(own, channels, width),
    }
    return arrays | ({"bias": normal(own, channels)} if has_bias else {})


def random_batch(
    rng: np.random.Generator, tokens: int, sequences: int, slots: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """cu_seqlens, slots and has_state. Some sequences are short or empty, and the last tokens are padding."""
    used = tokens - int(rng.integers(0, 1 + tokens // 4))
    ends = np.sort(rng.integers(0, used + 1, sequences))
    short = rng.random(sequences) < 0.5
    ends[1:] = np.where(short[1:], ends[:-1] + rng.integers(0, 5, max(sequences - 1, 0)), ends[1:])
    ends = np.minimum(np.maximum.accumulate(ends), used) if sequences else ends
    return (
        np.concatenate([[0], ends]).astype(np.int32),
        random_slots(rng, sequences, slots),
        rng.random(sequences) < 0.6,
    )


def random_slots(rng: np.random.Generator, sequences: int, slots: int) -> np.ndarray:
    """Different slots where there are enough. Some are outside of the pool."""
    chosen = rng.permutation(max(slots, sequences))[:sequences]
    return np.where(rng.random(sequences) < 0.2, rng.choice([-1, -7, slots, slots + 3], sequences), chosen).astype(
        np.int32
    )
