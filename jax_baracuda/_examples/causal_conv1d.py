"""Example calls of the convolutions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jax_baracuda as jb
from jax_baracuda._examples.example import ROUNDED_ONCE, Example, Operand, Sizes, Tolerance

# ----------------------------------------------------------------------------------------------------------------------
# Plain JAX


def shifted(x: Array, steps: int, axis: int) -> Array:
    """The values `steps` earlier along the axis, or later if `steps` is negative; zero outside of `x`."""
    edges = [(0, 0, 0)] * x.ndim
    edges[axis] = (steps, -steps, 0)
    return jax.lax.pad(x, jnp.zeros((), x.dtype), edges)


def along_channels(parameter: Array, channels_last: bool) -> Array:
    return parameter if channels_last else parameter[:, None]


def causal_conv1d(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    activation: str | None = None,
    channels_last: bool = False,
    initial_state: Array | None = None,
    return_final_state: bool = False,
    segment_ids: Array | None = None,
) -> Any:
    """The convolution as a sum of shifted inputs."""
    time, kept = (1 if channels_last else 2), weight.shape[1] - 1
    inputs, ids = x, segment_ids
    if initial_state is not None:
        state = jnp.swapaxes(initial_state, 1, 2) if channels_last else initial_state
        inputs = jnp.concatenate([state, x], axis=time)
        if ids is not None:
            ids = jnp.concatenate([jnp.repeat(ids[:, :1], kept, axis=1), ids], axis=1)
    z = jnp.zeros((), x.dtype) if bias is None else along_channels(bias, channels_last)
    for steps in range(kept + 1):
        tap = shifted(inputs, steps, time)
        if ids is not None:
            tap = jnp.where(jnp.expand_dims(shifted(ids, steps, 1) == ids, 3 - time), tap, 0)
        z = z + along_channels(weight[:, kept - steps], channels_last) * tap
    z = jax.lax.slice_in_dim(z, z.shape[time] - x.shape[time], None, axis=time)
    y = z if activation is None else jax.nn.silu(z)
    if not return_final_state:
        return y
    return y, final_state(inputs, ids, kept, time)


def final_state(inputs: Array, ids: Array | None, kept: int, time: int) -> Array:
    state = jax.lax.slice_in_dim(inputs, inputs.shape[time] - kept, None, axis=time)
    state = jnp.swapaxes(state, 1, 2) if time == 1 else state
    return state if ids is None else jnp.where((ids[:, -kept:] == ids[:, -1:])[:, None], state, 0)


def causal_conv1d_backward(
    d_output: Array,
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    initial_state: Array | None = None,
    d_final_state: Array | None = None,
    **options: Any,
) -> tuple[Array | None, ...]:
    given = {"x": x, "weight": weight, "bias": bias, "initial_state": initial_state}

    def forward(given: Any) -> Any:
        return causal_conv1d(**given, return_final_state=d_final_state is not None, **options)

    _, vjp = jax.vjp(forward, given)
    gradients = vjp(d_output if d_final_state is None else (d_output, d_final_state))[0]
    return tuple(gradients[name] for name in given if name != "initial_state" or initial_state is not None)


def causal_conv1d_update(
    x: Array,
    state: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    activation: str | None = None,
    channels_last: bool = False,
) -> tuple[Array, Array]:
    """For a state of the filter's length minus one."""
    if x.ndim == 3:
        options: Any = {"activation": activation, "channels_last": channels_last, "return_final_state": True}
        return causal_conv1d(x, weight, bias, initial_state=state, **options)
    z = weight[:, -1] * x + (0 if bias is None else bias)
    for steps in range(1, weight.shape[1]):
        z = z + weight[:, -1 - steps] * state[:, :, -steps]
    return z if activation is None else jax.nn.silu(z), jnp.concatenate([state[:, :, 1:], x[:, :, None]], axis=2)


# ----------------------------------------------------------------------------------------------------------------------
# The table


def packed(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype, sizes: Sizes) -> np.ndarray:
    """Ids of packed sequences."""
    return np.cumsum(rng.random(shape) < 4 / shape[-1], axis=-1).astype(dtype)


CHECKED = {
    "small": {"example": 2, "channel": 5, "time": 11, "tap": 4, "state": 3},
    "check": {"example": 2, "channel": 33, "time": 1027, "tap": 4, "state": 3},
}
TIMED = {
    "cpu": {"example": 2, "channel": 1024, "time": 2048, "tap": 4},
    "cuda": {"example": 8, "channel": 5120, "time": 4096, "tap": 4},
}
DECODED = {
    "cpu": {"example": 16, "channel": 8192, "tap": 4, "state": 3},
    "cuda": {"example": 128, "channel": 8192, "tap": 4, "state": 3},
}

TOLERANCE: Tolerance = ROUNDED_ONCE | {"float32": (2e-6, 1e-5)}
OF_GRADIENTS: Tolerance = ROUNDED_ONCE | {"float32": (1e-5, 1e-5)}
"""Gradients of parameters are sums over all inputs."""

X = {False: Operand(("example", "channel", "time")), True: Operand(("example", "time", "channel"))}
WEIGHT, BIAS = Operand(("channel", "tap")), Operand(("channel",))
STATE = Operand(("example", "channel", "state"))
IDS = Operand(("example", "time"), packed, "int32")


SILU, LAST = {"activation": "silu"}, {"channels_last": True}
PARAMETERS = {"weight": WEIGHT, "bias": BIAS}
EVERYTHING = {**PARAMETERS, "initial_state": STATE, "segment_ids": IDS}


def of_sequences() -> Iterator[Example]:
    """Convolutions, and the gradients of those with all parameters."""
    for variant, operands, options, timed in (
        ("", {"weight": WEIGHT}, {}, {}),
        ("channels last", {"weight": WEIGHT}, LAST, {}),
        ("silu", PARAMETERS, SILU, TIMED),
        ("silu, channels last", PARAMETERS, SILU | LAST, TIMED),
        ("everything, channels first", EVERYTHING, SILU, {}),
        ("everything, channels last", EVERYTHING, SILU | LAST, {}),
    ):
        x, sizes = X["channels_last" in options], {**CHECKED, **timed}
        has_state = operands is EVERYTHING
        operands = {"x": x, **operands}
        forward = options | {"return_final_state": True} if has_state else options
        yield Example(jb.causal_conv1d, causal_conv1d, operands, sizes, variant, forward, tolerance=TOLERANCE)
        if "bias" in operands:
            operands = {"d_output": x, **operands, **({"d_final_state": STATE} if has_state else {})}
            functions = jb.causal_conv1d_backward, causal_conv1d_backward
            yield Example(*functions, operands, sizes, variant, options, tolerance=OF_GRADIENTS)


EXAMPLES = [
    *of_sequences(),
    *(
        Example(
            jb.causal_conv1d_update,
            causal_conv1d_update,
            {"x": x, "state": STATE, **parameters},
            {**CHECKED, **timed},
            variant,
            options,
            tolerance=TOLERANCE,
        )
        for variant, x, parameters, options, timed in (
            ("", Operand(("example", "channel")), PARAMETERS, SILU, DECODED),
            ("several inputs", X[False], PARAMETERS, {}, {}),
            ("several inputs, channels last", X[True], {"weight": WEIGHT}, LAST, {}),
        )
    ),
]
