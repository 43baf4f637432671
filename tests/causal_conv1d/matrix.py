"""Declarations of the convolutions, and their reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from support.matrix.calls import (
    ABSENT,
    FLOATING,
    Call,
    Operand,
    Options,
    Problem,
    Rule,
    declare,
    finite_numbers,
    passed,
)

Sizes = Mapping[str, Any]


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


def _wide(dtype: str, options: Options) -> str:
    is_narrow = dtype in ("float16", "bfloat16")
    return "float32" if options["parameter_dtype"] == "wide" and is_narrow else dtype


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
LARGE_SIZES: dict[str, Sizes] = {
    "long": {"example": 1, "channel": 24, "time": 20_003, "tap": 4},
    "long, aligned": {"example": 2, "channel": 64, "time": 8192, "tap": 4},
    "many channels": {"example": 2, "channel": 2050, "time": 300, "tap": 3},
    "many examples": {"example": 1000, "channel": 32, "time": 40, "tap": 2},
    "wide filter, long": {"example": 3, "channel": 96, "time": 2048, "tap": 7},
}

NO_LAST_OF_NONE = Rule(
    "without an input there is no last sequence",
    lambda segment_ids, size: segment_ids is not ABSENT and size == "empty",
)
WIDER = Rule(
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
    wide = _wide(dtype, options)
    operands = {
        "x": Operand("x", _signal(options), finite_numbers),
        "weight": Operand("weight", ("channel", "tap"), finite_numbers, dtype=wide),
    }
    if options["bias"]:
        operands["bias"] = Operand("bias", ("channel",), finite_numbers, dtype=wide)
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
    operands = _parameters(dtype, options)
    names = tuple(operands)

    def bound(activation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arrays: Any) -> Any:
            y, state = _run(activation, options, dict(zip(names, arrays, strict=True)))
            return (y, state) if options["return_final_state"] else y

        return call

    def apply(function: Callable[..., Any], *arrays: Any) -> Any:
        given = dict(zip(names, arrays, strict=True))
        return function(**given, **passed(options, "activation", "channels_last", "return_final_state"))

    plain, majorant = _ACTIVATIONS[options["activation"]]
    state = (("example", "channel", "state"),) if options["return_final_state"] else ()
    return Problem(
        operands=tuple(operands.values()),
        apply=apply,
        reference=bound(plain),
        majorant=bound(majorant),
        results=(_signal(options), *state),
        terms=sizes["tap"] * max(1, sizes["example"] * sizes["time"]),
        draw_cotangents=finite_numbers,
        free=("example", "channel"),
        carry=(0, 0),
    )


declare(
    Call(
        name="causal_conv1d",
        dtypes=FLOATING,
        sizes=SIZES,
        large_sizes=LARGE_SIZES,
        options={**OPTIONS, "return_final_state": (ABSENT, True)},
        strategy_options=STRATEGY_OPTIONS,
        problem=_forward_problem,
        rules=(NO_LAST_OF_NONE, WIDER),
        has_carry=True,
    )
)


def _backward_problem(dtype: str, options: Options, sizes: Sizes) -> Problem:
    operands = _parameters(dtype, options)
    operands["d_output"] = Operand("d_output", _signal(options), finite_numbers)
    if options["d_final_state"]:
        operands["d_final_state"] = Operand("d_final_state", ("example", "channel", "state"), finite_numbers)
    names = tuple(operands)
    primals = [name for name in ("x", "weight", "bias", "initial_state") if name in operands]

    def bound(activation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arrays: Any) -> Any:
            given = dict(zip(names, arrays, strict=True))

            def forward(*chosen: Any) -> tuple[Any, Any]:
                return _run(activation, options, {**given, **dict(zip(primals, chosen, strict=True))})

            (_, state), pull = jax.vjp(forward, *(given[name] for name in primals))
            return pull((given["d_output"], given.get("d_final_state", jnp.zeros_like(state))))

        return call

    def apply(function: Callable[..., Any], *arrays: Any) -> Any:
        given = dict(zip(names, arrays, strict=True))
        return function(**given, **passed(options, "activation", "channels_last"))

    plain, majorant = _ACTIVATIONS[options["activation"]]
    return Problem(
        operands=tuple(operands.values()),
        apply=apply,
        reference=bound(plain),
        majorant=bound(majorant),
        results=tuple(operands[name].dims for name in primals),
        result_dtypes=tuple(operands[name].dtype for name in primals),
        rounded_dims=("time",),
        terms=sizes["tap"] * max(1, sizes["example"] * sizes["time"]),
        draw_cotangents=finite_numbers,
    )


declare(
    Call(
        name="causal_conv1d_backward",
        dtypes=FLOATING,
        sizes=SIZES,
        large_sizes=LARGE_SIZES,
        options={**OPTIONS, "d_final_state": (ABSENT, "given")},
        strategy_options=STRATEGY_OPTIONS,
        problem=_backward_problem,
        rules=(NO_LAST_OF_NONE, WIDER),
    )
)


def _update_problem(dtype: str, options: Options, sizes: Sizes) -> Problem:
    wide = _wide(dtype, options)
    is_single = options["inputs"] == "one"
    signal = ("example", "channel") if is_single else _signal(options)
    operands = {
        "x": Operand("x", signal, finite_numbers),
        "state": Operand(
            "state", ("example", "channel", "old" if options["state"] == "long" else "state"), finite_numbers
        ),
        "weight": Operand("weight", ("channel", "tap"), finite_numbers, dtype=wide),
    }
    if options["bias"]:
        operands["bias"] = Operand("bias", ("channel",), finite_numbers, dtype=wide)
    names = tuple(operands)

    def bound(activation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arrays: Any) -> Any:
            given = dict(zip(names, arrays, strict=True))
            x = given["x"][:, :, None] if is_single else _swapped(given["x"], options["channels_last"])
            kept = given["weight"].shape[1] - 1
            inputs = jnp.concatenate([given["state"], x], axis=2)
            length = given["state"].shape[2]
            state = given["state"][:, :, length - kept :]
            y, _ = reference(activation, x, given["weight"], given.get("bias"), state, None)
            y = y[:, :, 0] if is_single else _swapped(y, options["channels_last"])
            return y, inputs[:, :, inputs.shape[2] - length :]

        return call

    plain, majorant = _ACTIVATIONS[options["activation"]]
    return Problem(
        operands=tuple(operands.values()),
        apply=lambda function, *arrays: function(
            **dict(zip(names, arrays, strict=True)), **passed(options, "activation", "channels_last")
        ),
        reference=bound(plain),
        majorant=bound(majorant),
        results=(signal, operands["state"].dims),
        terms=sizes["tap"] * max(1, sizes["example"] * sizes["time"]),
        draw_cotangents=finite_numbers,
        free=("example", "channel"),
        carry=(1, 1),
    )


declare(
    Call(
        name="causal_conv1d_update",
        dtypes=FLOATING,
        sizes=SIZES,
        large_sizes={k: LARGE_SIZES[k] for k in ("many channels", "many examples")},
        options={
            "inputs": ("one", "several"),
            "state": ("exact", "long"),
            **{name: OPTIONS[name] for name in ("bias", "activation", "channels_last", "parameter_dtype")},
        },
        problem=_update_problem,
        rules=(WIDER,),
        has_carry=True,
    )
)
