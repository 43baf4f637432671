"""Signals and states of more than 2^31 elements: kernels read and write the right elements beyond 2^31."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from causal_conv1d.reference import LAYOUTS, Convolution, expected_gradients, expected_outputs, in_layout, part_of
from support.cases import assert_same_bits
from support.large import noise, require_gpu_memory

from jax_baracuda import causal_conv1d, causal_conv1d_backward, causal_conv1d_update

CHANNELS, LENGTH, WIDTH = 2**16 + 3, 33_000, 4
CHECKED = np.array([0, 1, 2**15, CHANNELS - 2, CHANNELS - 1])
"""The compared channels. With channels first, the last two lie beyond element 2^31."""

each_layout = pytest.mark.parametrize("channels_last", LAYOUTS, ids=["channels first", "channels last"])


def of_checked(signal: Any, channels_last: bool) -> np.ndarray:
    """The compared channels, as ``[B, C, L]``."""
    taken = signal[:, :, CHECKED] if channels_last else signal[:, CHECKED]
    return np.asarray(in_layout(taken, channels_last))


@each_layout
def test_signals(rng: np.random.Generator, channels_last: bool) -> None:
    """Outputs and the gradients of signal and parameters are right for signals of more than 2^31 elements."""
    require_gpu_memory(40)
    assert CHECKED[-2] * LENGTH > 2**31
    shape = (1, LENGTH, CHANNELS) if channels_last else (1, CHANNELS, LENGTH)
    x, dy = noise(shape, 1), noise(shape, 2)
    weight, bias = (rng.normal(size=size).astype(np.float32) for size in ((CHANNELS, WIDTH), (CHANNELS,)))
    options = {"activation": "silu", "channels_last": channels_last}
    arrays = {"x": of_checked(x, channels_last), "weight": weight[CHECKED], "bias": bias[CHECKED]}
    problem = Convolution(arrays, activation="silu")
    expected_y, _ = expected_outputs(problem)
    no_state = np.zeros(problem.state_shape)
    expected = expected_gradients(problem, of_checked(dy, channels_last), no_state)

    y = of_checked(jax.jit(lambda *operands: causal_conv1d(*operands, **options))(x, weight, bias), channels_last)
    for k, channel in enumerate(CHECKED):
        part_of(expected_y, np.s_[:, k]).check(y[:, k], f"channel {channel}")
    backward = jax.jit(lambda *operands: causal_conv1d_backward(*operands, **options))
    dx, dweight, dbias = backward(dy, x, weight, bias)
    dx = of_checked(dx, channels_last)
    for k, channel in enumerate(CHECKED):
        part_of(expected["x"], np.s_[:, k]).check(dx[:, k], f"dx of channel {channel}")
    expected["weight"].check(dweight[CHECKED], "dweight")
    expected["bias"].check(dbias[CHECKED], "dbias")


@each_layout
def test_length(channels_last: bool) -> None:
    """For one channel of more than 2^31 inputs, both ends of the results and the sums are right."""
    require_gpu_memory(40)
    length = 2**31 + 77
    shape = (1, length, 1) if channels_last else (1, 1, length)
    weight = np.array([[1, -2, 4, 8]], np.float32)
    time = 1 if channels_last else 2
    x = jax.jit(lambda: (jax.lax.broadcasted_iota(jnp.uint32, shape, time) % 256).astype(jnp.bfloat16))()

    def part(signal: jax.Array, start: int) -> jax.Array:
        # jax.numpy may slice with 32-bit starts.
        return jax.lax.slice_in_dim(signal.reshape(-1), start, start + 60)

    y = jax.jit(lambda x: causal_conv1d(x, weight, channels_last=channels_last))(x)
    for start in (0, 2**31 - 40, length - 60):
        times = np.arange(start - 3, start + 60)
        inputs = np.where(times < 0, 0, times % 256)
        expected = np.convolve(inputs, weight[0, ::-1], "valid").astype(np.float32).astype(jnp.bfloat16)
        assert_same_bits(part(y, start), expected, f"from {start}")
    del y
    backward = jax.jit(lambda x: causal_conv1d_backward(x, x, weight, channels_last=channels_last))
    dx, dweight, _ = backward(x)
    for start in (0, 2**31 - 40, length - 60):
        times = np.arange(start, start + 63)
        cotangents = np.where(times < length, times % 256, 0)
        expected = np.convolve(cotangents, weight[0], "valid").astype(np.float32).astype(jnp.bfloat16)
        assert_same_bits(part(dx, start), expected, f"dx from {start}")
    # Sums over t of x[t] * x[t - j], period by period and then the rest.
    t = np.arange(length - 256 * (length // 256), dtype=np.float64)
    period = np.arange(256)
    for steps in range(WIDTH):
        whole = (length // 256) * (period * ((period - steps) % 256)).sum()
        before_start = sum(k * ((k - steps) % 256) for k in range(steps))
        exact = whole + (t * ((t - steps) % 256)).sum() - before_start
        np.testing.assert_allclose(dweight[0, WIDTH - 1 - steps], exact, rtol=1e-4)


def test_state() -> None:
    """A state of more than 2^31 elements is updated in place, up to its last element."""
    require_gpu_memory(20)
    examples, channels, num_states = 2**16 + 3, 8192, 4
    assert (examples - 3) * channels * num_states >= 2**31
    shape = (examples, channels, num_states)
    x, weight = noise(shape[:2], 3), np.full((channels, WIDTH), 0.5, np.float32)
    checked = jnp.asarray([0, 1, 2**15, examples - 2, examples - 1])
    state = noise(shape, 4)
    before = np.asarray(state[checked])
    y, state = jax.jit(causal_conv1d_update, donate_argnums=1)(x, state, weight)
    new = np.asarray(x[checked])
    assert_same_bits(state[checked], np.concatenate([before, new[..., None]], axis=2)[..., 1:])
    used = Convolution({"x": new[..., None], "weight": weight, "initial_state": before[..., 1:]})
    expected_outputs(used)[0].check(np.asarray(y[checked])[..., None])
