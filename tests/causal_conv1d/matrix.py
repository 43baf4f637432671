"""Declarations of the convolutions, and their reference."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from support.matrix.calls import (
    ABSENT,
    FLOATING,
    Constraint,
    Draw,
    Operand,
    Options,
    Problem,
    Sizes,
    ascending,
    by_name,
    declare,
    finite_numbers,
    integers,
    passed,
)

from jax_baracuda._core.arrays import reshard_as


def _majorant_silu(z: Any) -> Any:
    """For positive z. Its derivatives bound the derivatives of silu, and their changes by an error of z."""
    return z * (1.1 + z * (0.25 + 0.06 * z))


def reference(
    activation: Callable[..., Any],
    x: Any,
    weight: Any,
    bias: Any,
    state: Any,
    segment_ids: Any,
) -> tuple[Any, Any]:
    """y and the final state of signals ``[B, C, L]``."""
    examples, channels, length = x.shape
    kept = weight.shape[1] - 1
    inputs = jnp.concatenate([jnp.zeros((examples, channels, kept)) if state is None else state, x], axis=2)
    ids = jnp.zeros((examples, length), jnp.int64) if segment_ids is None else segment_ids.astype(jnp.int64)
    first = ids[:, :1] if length else jnp.zeros((examples, 1), jnp.int64)
    input_ids = jnp.concatenate([jnp.broadcast_to(first, (examples, kept)), ids], axis=1)
    z = 0.0 if bias is None else bias[:, None]
    for tap in range(kept + 1):
        is_same = (input_ids[:, tap : tap + length] == ids)[:, None]
        z = z + weight[:, tap, None] * jnp.where(is_same, inputs[:, :, tap : tap + length], 0)
    last = ids[:, -1:] if length else first
    is_last = (input_ids[:, length:] == last)[:, None]
    return activation(jnp.broadcast_to(z, x.shape)), jnp.where(is_last, inputs[:, :, length:], 0)


def _swapped(x: Any, channels_last: Any) -> Any:
    return jnp.swapaxes(x, -1, -2) if channels_last else x


def _signal(options: Options) -> tuple[str, ...]:
    return ("example", "time", "channel") if options["channels_last"] else ("example", "channel", "time")


def _weights(dtype: str, options: Options) -> dict[str, Operand]:
    """The filter and, if the call has one, the bias."""
    is_wide = options["parameter_dtype"] == "wide" and dtype in ("float16", "bfloat16")
    dims = {"weight": ("channel", "tap")} | ({"bias": ("channel",)} if options["bias"] else {})
    return {name: Operand(name, of, finite_numbers, dtype="float32" if is_wide else dtype) for name, of in dims.items()}


def _problem(options: Options, operands: Mapping[str, Operand], run: Callable[..., Any], **fields: Any) -> Problem:
    """`run`: ``(activation, **arrays)``, the call in plain JAX."""
    plain, majorant = (functools.partial(run, activation) for activation in _ACTIVATIONS[options["activation"]])
    return Problem(
        operands=tuple(operands.values()),
        reference=plain,
        majorant=majorant,
        draw_cotangents=finite_numbers,
        **fields,
    )


def same_sequences(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Runs of equal ids. Ids recur."""
    return np.cumsum(rng.random(shape) < 0.2, axis=-1).astype(dtype) % 3


_ACTIVATIONS = {ABSENT: (lambda z: z, lambda z: z), "silu": (jax.nn.silu, _majorant_silu)}
_ACTIVATIONS["swish"] = _ACTIVATIONS["silu"]

SIZES: dict[str, Sizes] = {
    "small": {"example": 4, "channel": 4, "time": 8, "tap": 4},
    "odd": {"example": 3, "channel": 5, "time": 13, "tap": 3},
    "one": {"example": 1, "channel": 1, "time": 1, "tap": 1},
    "wide filter": {"example": 2, "channel": 2, "time": 24, "tap": 8},
    "wider than kernels": {"example": 2, "channel": 4, "time": 16, "tap": 11},
    "short": {"example": 2, "channel": 8, "time": 2, "tap": 4},
    "empty": {"example": 2, "channel": 4, "time": 0, "tap": 4},
    "no examples": {"example": 0, "channel": 4, "time": 6, "tap": 2},
    "few rows": {"example": 2, "channel": 3, "time": 40, "tap": 4},
    "rows": {"example": 3, "channel": 24, "time": 100, "tap": 4},
    "vectors": {"example": 2, "channel": 64, "time": 64, "tap": 4},
}
SHORT_ROWS: dict[str, Sizes] = {"short rows": {"example": 2, "channel": 24, "time": 9, "tap": 4}}
LARGE_SIZES: dict[str, Sizes] = {
    "long": {"example": 1, "channel": 24, "time": 20_003, "tap": 4},
    "long, aligned": {"example": 2, "channel": 64, "time": 8192, "tap": 4},
    "many channels": {"example": 2, "channel": 2050, "time": 300, "tap": 3},
    "many examples": {"example": 1000, "channel": 32, "time": 40, "tap": 2},
    "wide filter, long": {"example": 3, "channel": 96, "time": 2048, "tap": 7},
}

NO_LAST_OF_NONE = Constraint(
    "without an input there is no last sequence",
    lambda segment_ids, size: segment_ids is not ABSENT and size == "empty",
)
WIDER = Constraint(
    "only 16-bit signals may have wider parameters",
    lambda parameter_dtype, dtype: parameter_dtype == "wide" and dtype in ("float32", "float64"),
)

OPTIONS = {
    "bias": (ABSENT, "given"),
    "activation": (ABSENT, "silu", "swish"),
    "channels_last": (ABSENT, True),
    "initial_state": (ABSENT, "given"),
    "segment_ids": (ABSENT, "int32", "int64", "uint8"),
    "parameter_dtype": ("same", "wide"),
}


STRATEGY_OPTIONS = tuple(
    {"channels_last": channels_last, "initial_state": state, "segment_ids": ids}
    for channels_last in (ABSENT, True)
    for state in (ABSENT, "given")
    for ids in (ABSENT, "int32")
)


def _parameters(dtype: str, options: Options) -> dict[str, Operand]:
    operands = {"x": Operand("x", _signal(options), finite_numbers)} | _weights(dtype, options)
    if options["initial_state"]:
        operands["initial_state"] = Operand("initial_state", ("example", "channel", "state"), finite_numbers)
    if options["segment_ids"]:
        operands["segment_ids"] = Operand(
            "segment_ids", ("example", "time"), same_sequences, dtype=options["segment_ids"]
        )
    return operands


def _run(activation: Callable[..., Any], options: Options, arrays: Mapping[str, Any]) -> tuple[Any, Any]:
    channels_last = options["channels_last"]
    y, state = reference(
        activation,
        _swapped(arrays["x"], channels_last),
        arrays["weight"],
        *(arrays.get(name) for name in ("bias", "initial_state", "segment_ids")),
    )
    return _swapped(y, channels_last), state


def _forward_problem(dtype: str, options: Options, sizes: Sizes) -> Problem:
    def run(activation: Callable[..., Any], **arrays: Any) -> Any:
        y, state = _run(activation, options, arrays)
        return (y, state) if options["return_final_state"] else y

    state = (("example", "channel", "state"),) if options["return_final_state"] else ()
    return _problem(
        options,
        _parameters(dtype, options),
        run,
        apply=by_name(options, "activation", "channels_last", "return_final_state"),
        results=(_signal(options), *state),
        terms=sizes["tap"] * max(1, sizes["example"] * sizes["time"]),
        free=("example", "channel"),
        carry=(0, 0),
    )


declare(
    name="causal_conv1d",
    dtypes=FLOATING,
    sizes=SIZES,
    large_sizes=LARGE_SIZES,
    options={**OPTIONS, "return_final_state": (ABSENT, True)},
    strategy_options=STRATEGY_OPTIONS,
    problem=_forward_problem,
    constraints=(NO_LAST_OF_NONE, WIDER),
    has_carry=True,
)


def _backward_problem(dtype: str, options: Options, sizes: Sizes) -> Problem:
    operands = _parameters(dtype, options)
    operands["d_output"] = Operand("d_output", _signal(options), finite_numbers)
    if options["d_final_state"]:
        operands["d_final_state"] = Operand("d_final_state", ("example", "channel", "state"), finite_numbers)
    primals = [name for name in ("x", "weight", "bias", "initial_state") if name in operands]

    def run(activation: Callable[..., Any], d_output: Any, d_final_state: Any = None, **given: Any) -> Any:
        def forward(*chosen: Any) -> tuple[Any, Any]:
            return _run(activation, options, {**given, **dict(zip(primals, chosen, strict=True))})

        (_, state), pull = jax.vjp(forward, *(given[name] for name in primals))
        return pull((d_output, jnp.zeros_like(state) if d_final_state is None else d_final_state))

    return _problem(
        options,
        operands,
        run,
        apply=by_name(options, "activation", "channels_last"),
        results=tuple(operands[name].dims for name in primals),
        result_dtypes=tuple(operands[name].dtype for name in primals),
        rounded_dims=("time",),
        terms=sizes["tap"] * max(1, sizes["example"] * sizes["time"]),
    )


declare(
    name="causal_conv1d_backward",
    dtypes=FLOATING,
    sizes=SIZES,
    large_sizes=LARGE_SIZES,
    options={**OPTIONS, "d_final_state": (ABSENT, "given")},
    strategy_options=STRATEGY_OPTIONS,
    problem=_backward_problem,
    constraints=(NO_LAST_OF_NONE, WIDER),
)


def _pool_problem(dtype: str, options: Options, sizes: Sizes) -> Problem:
    """Updates of states in a pool."""
    is_single = options["inputs"] == "one"
    signal = ("example", "channel") if is_single else _signal(options)
    operands = {
        "x": Operand("x", signal, finite_numbers),
        "state": Operand("state", ("slot", "channel", "entry"), finite_numbers),
        **_weights(dtype, options),
        "state_slots": Operand("state_slots", ("example",), slots(sizes["slot"]), dtype="int32"),
    }
    if options["slots"] == "accepted":
        num_inputs = 1 if is_single else sizes["time"]
        operands["num_accepted"] = Operand("num_accepted", ("example",), slots(num_inputs), dtype="int32")

    def run(activation: Callable[..., Any], x: Any, **others: Any) -> Any:
        x = x[:, :, None] if is_single else _swapped(x, options["channels_last"])
        y, pool = pool_reference(activation, {**others, "x": x})
        return y[:, :, 0] if is_single else _swapped(y, options["channels_last"]), pool

    return _problem(
        options,
        operands,
        run,
        apply=by_name(options, "activation", "channels_last"),
        results=(signal, ("slot", "channel", "entry")),
        gradient_roundings=2,
        terms=sizes["tap"] * max(1, sizes["example"] * sizes["time"]),
        free=("channel",),
        carry=(1, 1),
    )


def _update_problem(dtype: str, options: Options, sizes: Sizes) -> Problem:
    if options["slots"] is not ABSENT:
        return _pool_problem(dtype, options, sizes)
    is_single = options["inputs"] == "one"
    signal = ("example", "channel") if is_single else _signal(options)
    state_dims = ("example", "channel", "old" if options["state"] == "long" else "state")
    operands = {
        "x": Operand("x", signal, finite_numbers),
        "state": Operand("state", state_dims, finite_numbers),
        **_weights(dtype, options),
    }

    def run(activation: Callable[..., Any], x: Any, state: Any, weight: Any, bias: Any = None) -> Any:
        x = x[:, :, None] if is_single else _swapped(x, options["channels_last"])
        length = state.shape[2]
        inputs = jnp.concatenate([state, x], axis=2)
        recent = state[:, :, length - (weight.shape[1] - 1) :]
        y, _ = reference(activation, x, weight, bias, recent, None)
        y = y[:, :, 0] if is_single else _swapped(y, options["channels_last"])
        return y, inputs[:, :, inputs.shape[2] - length :]

    return _problem(
        options,
        operands,
        run,
        apply=by_name(options, "activation", "channels_last"),
        results=(signal, state_dims),
        terms=sizes["tap"] * max(1, sizes["example"] * sizes["time"]),
        free=("example", "channel"),
        carry=(1, 1),
    )


def _update_has(operand: str, slots: str | None) -> bool:
    if operand == "num_accepted":
        return slots == "accepted"
    return operand != "state_slots" or slots is not ABSENT


def _with_pool(sizes: Sizes) -> Sizes:
    return {"slot": 5, "entry": sizes["tap"] - 1 + sizes["time"], **sizes}


declare(
    name="causal_conv1d_update",
    dtypes=FLOATING,
    sizes={name: _with_pool(sizes) for name, sizes in (SIZES | SHORT_ROWS).items()},
    large_sizes={name: _with_pool(LARGE_SIZES[name]) for name in ("many channels", "many examples")},
    options={
        "inputs": ("one", "several"),
        "state": ("exact", "long"),
        "slots": (ABSENT, "given", "accepted"),
        **{name: OPTIONS[name] for name in ("bias", "activation", "channels_last", "parameter_dtype")},
    },
    strategy_options=tuple({"slots": x, "inputs": y} for x in (ABSENT, "given") for y in ("one", "several")),
    problem=_update_problem,
    constraints=(
        WIDER,
        Constraint("pools have rows of one length", lambda slots, state: slots is not ABSENT and state == "long"),
        Constraint(
            "vmap maps an operand that the call has",
            lambda batch, slots: batch.startswith("one:") and not _update_has(batch[4:], slots),
        ),
    ),
    has_carry=True,
)


# ----------------------------------------------------------------------------------------------------------------------
# Pools of states.


def ends_of_sequences(length: int) -> Draw:
    """The ends of sequences that follow each other, some of them empty. Some tokens may be padding."""
    return ascending(integers(0, length))


def slots(size: int) -> Draw:
    """Random slots, some of them equal or outside of the pool."""
    return integers(-2, size + 2)


def flags(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return rng.random(shape) < 0.5


def _is_slot(pool: Any, slots: Any) -> Any:
    return (slots >= 0) & (slots < pool.shape[0])


def _old_states(pool: Any, slots: Any, is_read: Any) -> Any:
    rows = jnp.take(pool, jnp.clip(slots, 0, max(pool.shape[0] - 1, 0)), axis=0, mode="clip")
    return jnp.where(is_read[:, None, None], rows, 0)


def _with_states(pool: Any, slots: Any, is_written: Any, states: Any) -> Any:
    """Each slot gets the state of the last sequence that writes it."""
    size, count = pool.shape[0], slots.shape[0]
    if count == 0:
        return pool
    places = jnp.where(is_written, slots, size)
    last = jnp.full(size + 1, -1).at[places].max(jnp.arange(count))[:size]
    new = jnp.take(states, jnp.maximum(last, 0), axis=0)
    written = states.shape[2]
    return pool.at[:, :, :written].set(jnp.where((last >= 0)[:, None, None], new, pool[:, :, :written]))


def pool_reference(activation: Callable[..., Any], arrays: Mapping[str, Any]) -> tuple[Any, Any]:
    """y and the new pool of inputs x ``[B, C, T]``."""
    x, pool, own_slots, weight = (arrays[name] for name in ("x", "state", "state_slots", "weight"))
    kept, num_inputs, has_accepted = weight.shape[1] - 1, x.shape[2], "num_accepted" in arrays
    first = jnp.zeros(x.shape[0], jnp.int32)
    if has_accepted:
        first = jnp.clip(arrays["num_accepted"], 1, pool.shape[2] - kept + 1) - 1
    entries = first[:, None] + jnp.arange(kept)
    rows = _old_states(pool, own_slots, _is_slot(pool, own_slots))
    state = jnp.take_along_axis(rows, entries[:, None], axis=2)
    y, _ = reference(activation, x, weight, arrays.get("bias"), state, None)
    written = 0 if kept == 0 else kept - 1 + num_inputs if has_accepted else kept
    inputs = jnp.concatenate([state, x], axis=2)[:, :, kept + num_inputs - written :]
    return y, _with_states(pool, own_slots, _is_slot(pool, own_slots) & (num_inputs > 0), inputs)


def ragged_reference(activation: Callable[..., Any], arrays: Mapping[str, Any]) -> tuple[Any, Any]:
    """y and the new pool of tokens x ``[T, C]``. The first sequence begins with the first token."""
    x, pool, weight = arrays["x"], arrays["states"], arrays["weight"]
    ends, own_slots = (arrays[name].astype(jnp.int64) for name in ("ends", "state_slots"))
    kept, tokens, count = weight.shape[1] - 1, x.shape[0], own_slots.shape[0]
    begins = jnp.concatenate([jnp.zeros(1, ends.dtype), ends])[:-1]
    if tokens == 0 or count == 0:
        return jnp.zeros(x.shape), pool
    old = _old_states(pool, own_slots, _is_slot(pool, own_slots) & arrays["has_state"])[:, :, :kept]
    time = jnp.arange(tokens)
    is_member = (time[:, None] >= begins) & (time[:, None] < ends)
    sequence = jnp.argmax(is_member, axis=1)

    def inputs_at(sequence: Any, position: Any) -> Any:
        """Of a sequence at a position, which is negative for entries of its state."""
        of_tokens = jnp.take(x, jnp.clip(begins[sequence] + position, 0, tokens - 1), axis=0)
        if kept == 0:
            return of_tokens
        of_state = old[sequence, :, jnp.clip(kept + position, 0, kept - 1)]
        return jnp.where((position < 0)[..., None], of_state, of_tokens)

    position = time - begins[sequence]
    z = arrays.get("bias", 0.0)
    for tap in range(kept + 1):
        z = z + weight[:, tap] * inputs_at(sequence, position - kept + tap)
    is_token = jnp.any(is_member, axis=1)[:, None]
    y = jnp.where(is_token, activation(jnp.where(is_token, jnp.broadcast_to(z, x.shape), 1)), 0)
    back = jnp.arange(kept) - kept
    new = inputs_at(jnp.arange(count)[:, None], (ends - begins)[:, None] + back)
    writes = _is_slot(pool, own_slots) & (ends > begins)
    return y, _with_states(pool, own_slots, writes, jnp.swapaxes(new, 1, 2))


RAGGED_SIZES: dict[str, Sizes] = {
    "small": {"token": 16, "sequence": 4, "slot": 4, "channel": 4, "tap": 4},
    "odd": {"token": 13, "sequence": 3, "slot": 7, "channel": 5, "tap": 3},
    "one": {"token": 1, "sequence": 1, "slot": 1, "channel": 1, "tap": 1},
    "wide filter": {"token": 40, "sequence": 4, "slot": 5, "channel": 2, "tap": 8},
    "wider than kernels": {"token": 30, "sequence": 3, "slot": 4, "channel": 4, "tap": 11},
    "many sequences": {"token": 64, "sequence": 40, "slot": 50, "channel": 8, "tap": 4},
    "no tokens": {"token": 0, "sequence": 2, "slot": 3, "channel": 4, "tap": 4},
    "no sequences": {"token": 6, "sequence": 0, "slot": 3, "channel": 4, "tap": 2},
}
LARGE_RAGGED_SIZES: dict[str, Sizes] = {
    "long": {"token": 8192, "sequence": 9, "slot": 20, "channel": 64, "tap": 4},
    "many channels": {"token": 300, "sequence": 7, "slot": 9, "channel": 2050, "tap": 3},
}


def _ragged_problem(dtype: str, options: Options, sizes: Sizes) -> Problem:
    pool = ("slot", "channel", "old" if options["states"] == "long" else "state")
    operands = {
        "x": Operand("x", ("token", "channel"), finite_numbers),
        "states": Operand("states", pool, finite_numbers),
        **_weights(dtype, options),
        "ends": Operand("ends", ("sequence",), ends_of_sequences(sizes["token"]), dtype=options["integers"]),
        "state_slots": Operand("state_slots", ("sequence",), slots(sizes["slot"]), dtype=options["integers"]),
        "has_state": Operand("has_state", ("sequence",), flags, dtype="bool"),
    }

    def run(activation: Callable[..., Any], **arrays: Any) -> Any:
        return ragged_reference(activation, arrays)

    def apply(function: Callable[..., Any], ends: Any, **others: Any) -> Any:
        cu_seqlens = jnp.concatenate([jnp.zeros(1, ends.dtype), reshard_as(ends, ends, (None,))])
        return function(**others, cu_seqlens=cu_seqlens, **passed(options, "activation"))

    return _problem(
        options,
        operands,
        run,
        apply=apply,
        results=(("token", "channel"), pool),
        gradient_roundings=2,
        terms=sizes["tap"] * max(1, sizes["token"]),
        free=("channel",),
        carry=(1, 1),
    )


declare(
    name="causal_conv1d_ragged",
    dtypes=FLOATING,
    sizes=RAGGED_SIZES,
    large_sizes=LARGE_RAGGED_SIZES,
    options={
        "states": ("exact", "long"),
        "integers": ("int32", "int64", "uint8"),
        **{name: OPTIONS[name] for name in ("bias", "activation", "parameter_dtype")},
    },
    problem=_ragged_problem,
    constraints=(
        WIDER,
        Constraint(
            "small integers hold few tokens",
            lambda integers, size: integers == "uint8" and size in LARGE_RAGGED_SIZES,
        ),
    ),
    has_carry=True,
)
