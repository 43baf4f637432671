"""Example calls of the convolutions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jax_baracuda as jb
from jax_baracuda._core.arrays import reshard_as
from jax_baracuda._examples.example import (
    ROUNDED_ONCE,
    Example,
    Operand,
    Sizes,
    Tolerance,
    distinct_slots,
    flags,
    integers,
)

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
    time, state_length = (1 if channels_last else 2), weight.shape[1] - 1
    inputs, ids = x, segment_ids
    if initial_state is not None:
        state = jnp.swapaxes(initial_state, 1, 2) if channels_last else initial_state
        inputs = jnp.concatenate([state, x], axis=time)
        if ids is not None:
            ids = jnp.concatenate([jnp.repeat(ids[:, :1], state_length, axis=1), ids], axis=1)
    z = jnp.zeros((), x.dtype) if bias is None else along_channels(bias, channels_last)
    for steps in range(state_length + 1):
        tap = shifted(inputs, steps, time)
        if ids is not None:
            tap = jnp.where(jnp.expand_dims(shifted(ids, steps, 1) == ids, 3 - time), tap, 0)
        z = z + along_channels(weight[:, state_length - steps], channels_last) * tap
    z = jax.lax.slice_in_dim(z, z.shape[time] - x.shape[time], None, axis=time)
    y = z if activation is None else jax.nn.silu(z)
    if not return_final_state:
        return y
    return y, final_state(inputs, ids, state_length, time)


def final_state(inputs: Array, ids: Array | None, state_length: int, time: int) -> Array:
    state = jax.lax.slice_in_dim(inputs, inputs.shape[time] - state_length, None, axis=time)
    state = jnp.swapaxes(state, 1, 2) if time == 1 else state
    return state if ids is None else jnp.where((ids[:, -state_length:] == ids[:, -1:])[:, None], state, 0)


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


def causal_conv1d_ragged(
    x: Array,
    states: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    cu_seqlens: Array,
    state_slots: Array,
    has_state: Array,
    activation: str | None = None,
) -> tuple[Array, Array]:
    """For slots that are all different, and a pool of rows of the filter's length minus one."""
    width, tokens, count = weight.shape[1], x.shape[0], state_slots.shape[0]
    state_length, time = width - 1, jnp.arange(x.shape[0])
    sequence = jnp.sum(cu_seqlens[None, 1:] <= time[:, None], axis=1)  # the number of sequences that ended before
    own = jnp.minimum(sequence, count - 1)
    position = time - cu_seqlens[own]
    is_slot = (state_slots >= 0) & (state_slots < states.shape[0])
    old = jnp.where((is_slot & has_state)[:, None, None], states[jnp.clip(state_slots, 0, states.shape[0] - 1)], 0)

    def before(position: Array, own: Array, at: Array) -> Array:
        """The inputs ``[.., C]`` at a position of a sequence; negative positions are entries of the state."""
        of_state = old[own, :, jnp.clip(state_length + position, 0, state_length - 1)]
        return jnp.where((position < 0)[..., None], of_state, x[jnp.clip(at, 0, tokens - 1)])

    z = jnp.zeros((), x.dtype) if bias is None else bias
    for steps in range(width):
        z = z + weight[:, state_length - steps] * before(position - steps, own, time - steps)
    y = jnp.where((sequence < count)[:, None], z if activation is None else jax.nn.silu(z), 0)
    back = jnp.arange(state_length) - state_length
    new = before(
        (cu_seqlens[1:] - cu_seqlens[:-1])[:, None] + back, jnp.arange(count)[:, None], cu_seqlens[1:, None] + back
    )
    writes = is_slot & (cu_seqlens[1:] > cu_seqlens[:-1])
    slots = jnp.where(writes, state_slots, states.shape[0])
    return y, states.at[slots].set(jnp.swapaxes(new, 1, 2), mode="drop")


def of_ragged_batch(function: Callable[..., Any], ends: Array, **others: Any) -> Any:
    whole = reshard_as(ends, ends, (None,))
    return function(cu_seqlens=jnp.concatenate([jnp.zeros(1, ends.dtype), whole]), **others)


def causal_conv1d_update_pool(
    x: Array,
    state: Array,
    weight: Array,
    bias: Array,
    *,
    state_slots: Array,
    num_accepted: Array | None = None,
    **options: Any,
) -> tuple[Array, Array]:
    """For a pool of states, and slots that are all different."""
    pool, state_length = state, weight.shape[1] - 1
    is_slot = (state_slots >= 0) & (state_slots < pool.shape[0])
    first = jnp.zeros_like(state_slots) if num_accepted is None else num_accepted - 1
    rows, entries = jnp.clip(state_slots, 0, pool.shape[0] - 1), first[:, None] + jnp.arange(state_length)
    old = jnp.where(is_slot[:, None, None], jnp.swapaxes(pool[rows[:, None], :, entries], 1, 2), 0)
    y, new = causal_conv1d_update(x, old, weight, bias, **options)
    if num_accepted is not None:
        new = jnp.concatenate([old[:, :, 1:], jnp.swapaxes(x, 1, 2) if options.get("channels_last") else x], axis=2)
    slots = jnp.where(is_slot, state_slots, pool.shape[0])
    return y, pool.at[slots, :, : new.shape[2]].set(new, mode="drop")


# ----------------------------------------------------------------------------------------------------------------------
# The table


def packed(rng: np.random.Generator, shape: tuple[int, ...], sizes: Sizes) -> np.ndarray:
    """Ids of packed sequences."""
    return np.cumsum(rng.random(shape) < 4 / shape[-1], axis=-1)


def ends_of_sequences(rng: np.random.Generator, shape: tuple[int, ...], sizes: Sizes) -> np.ndarray:
    """The ends of sequences that follow each other. Some are empty, and some tokens are padding."""
    return np.sort(rng.integers(0, sizes["token"] + 1, shape), axis=-1)


CHECKED = {
    "small": {"example": 2, "channel": 5, "time": 11, "tap": 4, "state": 3},
    "check": {"example": 2, "channel": 33, "time": 1027, "tap": 4, "state": 3},
}
SERVED = {
    "small": {"token": 23, "sequence": 4, "slot": 9, "channel": 5, "tap": 4, "state": 3},
    "check": {"token": 3001, "sequence": 41, "slot": 67, "channel": 33, "tap": 4, "state": 3},
}
PREFILLED = {
    "cpu": {"token": 2048, "sequence": 8, "slot": 64, "channel": 1024, "tap": 4, "state": 3},
    "cuda": {"token": 65_536, "sequence": 64, "slot": 512, "channel": 4096, "tap": 4, "state": 3},
}
POOLED = {
    "small": {"example": 3, "channel": 5, "time": 2, "slot": 9, "tap": 4, "entry": 4},
    "check": {"example": 17, "channel": 33, "time": 3, "slot": 67, "tap": 4, "entry": 5},
}
DECODED_POOLS = {
    "cpu": {"example": 16, "channel": 8192, "slot": 64, "tap": 4, "entry": 3},
    "cuda": {"example": 256, "channel": 8192, "slot": 4096, "tap": 4, "entry": 3},
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

OF_POOLS: Tolerance = TOLERANCE | {"bfloat16": (4e-3, 1.6e-2), "float16": (5e-4, 2e-3)}
"""Gradients of inputs beside a state, and of parameters, are sums of two or three rounded parts."""

X = {False: Operand(("example", "channel", "time")), True: Operand(("example", "time", "channel"))}
WEIGHT, BIAS = Operand(("channel", "tap")), Operand(("channel",))
STATE = Operand(("example", "channel", "state"))
IDS = Operand(("example", "time"), packed, "int32")
POOL, UPDATED_POOL = Operand(("slot", "channel", "state")), Operand(("slot", "channel", "entry"))
DRAFTS, ACCEPTED = Operand(("example", "time", "channel")), Operand(("example",), integers(1, 3), "int32")


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
    *(
        Example(
            jb.causal_conv1d_update,
            causal_conv1d_update_pool,
            {
                "x": x,
                "state": UPDATED_POOL,
                **PARAMETERS,
                "state_slots": Operand(("example",), distinct_slots, "int32"),
                **more,
            },
            {**POOLED, **timed},
            variant,
            options,
            tolerance=OF_POOLS,
        )
        for variant, x, more, options, timed in (
            ("a pool", Operand(("example", "channel")), {}, SILU, DECODED_POOLS),
            ("a pool, drafts", DRAFTS, {"num_accepted": ACCEPTED}, SILU | LAST, {}),
        )
    ),
    Example(
        jb.causal_conv1d_ragged,
        causal_conv1d_ragged,
        {
            "x": Operand(("token", "channel")),
            "states": POOL,
            **PARAMETERS,
            "ends": Operand(("sequence",), ends_of_sequences, "int32"),
            "state_slots": Operand(("sequence",), distinct_slots, "int32"),
            "has_state": Operand(("sequence",), flags, "bool"),
        },
        {**SERVED, **PREFILLED},
        "",
        SILU,
        of_ragged_batch,
        tolerance=OF_POOLS,
    ),
]
