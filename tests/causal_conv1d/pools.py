"""Ragged batches and pools of states: a NumPy reference in float64, sequence by sequence, and random operands."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

PARAMETERS = ("x", "states", "weight", "bias")
"""The differentiable operands."""


def convolved(x: np.ndarray, history: np.ndarray, weight: np.ndarray, bias: Any, activation: str | None) -> np.ndarray:
    """One sequence: ``x [L, C]`` after ``history [C, W - 1]``."""
    width = weight.shape[1]
    inputs = np.concatenate([history.T, x])
    z = np.zeros(x.shape) + (0 if bias is None else bias)
    for tap in range(width):
        z = z + weight[:, tap] * inputs[tap : tap + len(x)]
    with np.errstate(over="ignore"):
        return z if activation is None else z / (1 + np.exp(-z))


def last_inputs(x: np.ndarray, history: np.ndarray, count: int) -> np.ndarray:
    """The last inputs ``[C, count]`` of a sequence."""
    inputs = np.concatenate([history, x.T], axis=1)
    return inputs[:, inputs.shape[1] - count :]


def _wide(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: None if x is None else np.asarray(x).astype(np.float64) for name, x in arrays.items()}


def reference_ragged(
    arrays: dict[str, Any], cu_seqlens: Any, slots: Any, has_state: Any, activation: str | None
) -> tuple[np.ndarray, np.ndarray]:
    given = _wide(arrays)
    x, old, weight, bias = given["x"], given["states"], given["weight"], given.get("bias")
    kept, y, new = weight.shape[1] - 1, np.zeros(x.shape), old.copy()
    for n, (begin, end) in enumerate(zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True)):
        if begin == end:
            continue
        slot = int(slots[n])
        is_slot = 0 <= slot < len(old)
        history = old[slot, :, :kept] if is_slot and has_state[n] else np.zeros((x.shape[1], kept))
        y[begin:end] = convolved(x[begin:end], history, weight, bias, activation)
        if is_slot:
            new[slot, :, :kept] = last_inputs(x[begin:end], history, kept)
    return y, new


def reference_update(
    arrays: dict[str, Any], slots: Any, num_accepted: Any, activation: str | None
) -> tuple[np.ndarray, np.ndarray]:
    """For ``x [B, T, C]``."""
    given = _wide(arrays)
    x, old, weight, bias = given["x"], given["states"], given["weight"], given.get("bias")
    kept, y, new = weight.shape[1] - 1, np.zeros(x.shape), old.copy()
    written = kept if num_accepted is None or kept == 0 else kept - 1 + x.shape[1]
    for n, inputs in enumerate(x):
        slot, first = int(slots[n]), 0
        if num_accepted is not None:
            first = min(max(int(num_accepted[n]), 1), old.shape[2] - kept + 1) - 1
        is_slot = 0 <= slot < len(old)
        history = old[slot, :, first : first + kept] if is_slot else np.zeros((x.shape[2], kept))
        y[n] = convolved(inputs, history, weight, bias, activation)
        if is_slot:
            new[slot, :, :written] = last_inputs(inputs, history, written)
    return y, new


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
