"""Depthwise causal convolution over time, as in Mamba (Gu and Dao, 2023), with states, packed sequences and decoding.

Every channel has a short filter of its own, of 1 to 8 taps, which sees the present and the past only. Training runs it
over whole sequences, in either layout, several sequences packed into one row or one sequence cut into chunks that hand
on a state; decoding runs it over one new input at a time, in place in the state. The backward kernel computes again
what it needs of the forward pass, so nothing but the inputs is kept.

The file reads top to bottom: public functions, reference in plain JAX, ops (one per native kernel), derivative rules,
canonicalisation of arguments, examples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jax_baracuda._core import jax_versions
from jax_baracuda._core.arrays import FLOATING_DTYPES, as_array, compute_dtype, in_automatic_mode, split_as
from jax_baracuda._core.autodiff import Differentiable, map_together
from jax_baracuda._core.batch import batch_of
from jax_baracuda._core.docstrings import with_shared_parts
from jax_baracuda._core.guarantees import Guarantee
from jax_baracuda._core.op import Op
from jax_baracuda._core.sharding import Dimensions

Activation = Literal["silu", "swish"] | None

MOST_TAPS = 8
"""The greatest width of a filter."""

_documented = with_shared_parts(
    {
        "x": """\
x: ``[B, C, L]``, or ``[B, L, C]`` with `channels_last`; a real floating dtype. float16, bfloat16, float32 and float64
  have kernels; other dtypes run as plain JAX.""",
        "parameters": """\
weight: ``[C, W]`` with 1 <= W <= 8, the last tap for the present input; the dtype of `x`, or float32 where `x` has
  fewer than 32 bits.
bias: ``[C]`` or None; the dtype of `x`, or float32 where `x` has fewer than 32 bits.""",
        "activation": """\
activation: None, or "silu" ("swish" is the same): ``act(z) = z * sigmoid(z)``.""",
        "channels_last": """\
channels_last: whether `x` is ``[B, L, C]``. States are ``[B, C, ...]`` in either case.""",
        "sequences": """\
initial_state: ``[B, C, W - 1]`` with the dtype of `x`: the inputs before t = 0, the newest last. Default: zeros.
segment_ids: ``[B, L]``, any integer dtype: the sequence that each input belongs to. A tap that reaches into an input
  with another id counts as zero, whatever that input is, NaN included. Equal ids are one sequence, adjacent or not.
  The initial state belongs to the sequence of the first id of its row.""",
        "raises": """\
TypeError: an argument is no array or has an unsuitable dtype.
ValueError: shapes do not fit, the filter is wider than 8 or has no tap, or the activation is unknown.""",
        "forward_mode": """\
Derivatives of any order exist. ``jax.jvp`` and ``jax.jacfwd`` of this function need its twin of the same name in
:mod:`jax_baracuda.forward_mode`.""",
    }
)


@overload
def causal_conv1d(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    activation: Activation = None,
    channels_last: bool = False,
    initial_state: ArrayLike | None = None,
    return_final_state: Literal[False] = False,
    segment_ids: ArrayLike | None = None,
) -> Array: ...


@overload
def causal_conv1d(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    activation: Activation = None,
    channels_last: bool = False,
    initial_state: ArrayLike | None = None,
    return_final_state: Literal[True],
    segment_ids: ArrayLike | None = None,
) -> tuple[Array, Array]: ...


@overload
def causal_conv1d(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    activation: Activation = None,
    channels_last: bool = False,
    initial_state: ArrayLike | None = None,
    return_final_state: bool = False,
    segment_ids: ArrayLike | None = None,
) -> Array | tuple[Array, Array]: ...


@_documented
def causal_conv1d(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    activation: Activation = None,
    channels_last: bool = False,
    initial_state: ArrayLike | None = None,
    return_final_state: bool = False,
    segment_ids: ArrayLike | None = None,
) -> Array | tuple[Array, Array]:
    """Depthwise causal convolution: each channel over its own past, as in Mamba (Gu and Dao, 2023).

    ``y[b, c, t] = act(sum { weight[c, k] * x[b, c, t - (W-1-k)] : 0 <= k < W } + bias[c])``, where `x` before t = 0 is
    `initial_state`, or zero.

    Args:
      {x}
      {parameters}
      {activation}
      {channels_last}
      {sequences}
      return_final_state: whether to return the state that continues the last sequence, too.

    Returns:
      y with the shape and dtype of `x`, or ``(y, final_state)``. The final state, ``[B, C, W - 1]`` with the dtype of
      `x`, holds the last W - 1 inputs, those of the initial state included where L < W - 1; with `segment_ids`, inputs
      of another sequence than the last one's are zero in it.

    Raises:
      {raises}

    Numerical guarantees: products are added in float32 (float64 for float64), where the activation is computed too, and
    the result is rounded once to the dtype. The final state is exact. Bit-equal from run to run.

    Gradient: as in :func:`causal_conv1d_backward`, with respect to `x`, `weight`, `bias` and `initial_state`, through y
    and through the final state. Nothing but the arguments is kept for the backward pass.
    {forward_mode}
    """
    call = _canonicalize("causal_conv1d", x, weight, bias, activation, channels_last, initial_state, segment_ids)
    if not return_final_state:
        return _convolution(call.params, *call.operands)
    if call.num_kept == 0:
        return _convolution(call.params, *call.operands), call.empty_state()
    return _convolution_and_state(call.params, *call.operands)


@_documented
def causal_conv1d_backward(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None,
    dy: ArrayLike,
    *,
    activation: Activation = None,
    channels_last: bool = False,
    initial_state: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    d_final_state: ArrayLike | None = None,
) -> tuple[Array, Array, Array | None] | tuple[Array, Array, Array | None, Array]:
    """Gradient of :func:`causal_conv1d`.

    With ``dz = dy * act'(z)``, where z is the sum that the activation is applied to:
    ``dx[b, c, t] = sum { weight[c, W-1-j] * dz[b, c, t + j] : 0 <= j < W }``,
    ``dweight[c, W-1-j] = sum over b and t of dz[b, c, t] * x[b, c, t - j]``, ``dbias[c] = sum over b and t of dz``.

    Args:
      {x}
      {parameters}
      dy: the cotangent of y, with the shape and dtype of `x`.
      {activation}
      {channels_last}
      {sequences}
      d_final_state: ``[B, C, W - 1]`` with the dtype of `x`: the cotangent of the final state. Default: zeros.

    Returns:
      ``(dx, dweight, dbias)``, each with the shape and dtype of what it is the cotangent of; dbias is None where `bias`
      is. Where `initial_state` is given, ``(dx, dweight, dbias, d_initial_state)``.

    Raises:
      {raises}

    Numerical guarantees: sums are accumulated in float32 (float64 for float64) and rounded once. All of them are added
    in a fixed order: bit-equal from run to run, and independent of scheduling.

    Gradient: derivatives of any order and in either mode exist.
    """
    name = "causal_conv1d_backward"
    call = _canonicalize(name, x, weight, bias, activation, channels_last, initial_state, segment_ids)
    x, weight = call.operands[:2]
    dy = as_array(name, "dy", dy)
    _check_like_x(name, "dy", dy, x, x.shape)
    if d_final_state is not None:
        d_final_state = as_array(name, "d_final_state", d_final_state)
        _check_like_x(name, "d_final_state", d_final_state, x, call.state_shape)
        d_final_state = d_final_state if call.num_kept > 0 else None
    dx, dweight, dbias, *d_states = _gradients(call.params, call.operands, dy, d_final_state)
    if initial_state is not None and not d_states:
        d_states = [call.empty_state()]
    dbias = None if bias is None else dbias.astype(call.operands[2].dtype)
    return dx, dweight.astype(weight.dtype), dbias, *d_states


@_documented
def causal_conv1d_update(
    x: ArrayLike,
    state: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    activation: Activation = None,
    channels_last: bool = False,
) -> tuple[Array, Array]:
    """:func:`causal_conv1d` of the next inputs of a sequence, for decoding: the state holds the inputs before.

    Args:
      x: ``[B, C]``, one new input, or ``[B, C, T]``, several of them (``[B, T, C]`` with `channels_last`); a real
        floating dtype. float16, bfloat16, float32 and float64 have kernels; other dtypes run as plain JAX.
      state: ``[B, C, K]`` with any K >= W - 1 and the dtype of `x`: the last K inputs, the newest last; zeros at the
        start of a sequence.
      {parameters}
      {activation}
      {channels_last}

    Returns:
      ``(y, new_state)`` with the shapes and the dtype of `x` and `state`. The new state is the last K inputs again: the
      oldest fall out. Where `state` is donated (or carried by a loop), it is updated in place.

    Raises:
      {raises}

    Numerical guarantees: y as in :func:`causal_conv1d`; the new state is exact.

    Gradient: with respect to all four arrays, as in :func:`causal_conv1d_backward`.
    {forward_mode}
    """
    name = "causal_conv1d_update"
    x = as_array(name, "x", x)
    time = -2 if channels_last else -1
    is_single = x.ndim == 2
    call = _canonicalize(
        name, jnp.expand_dims(x, time) if is_single else x, weight, bias, activation, channels_last, None, None
    )
    x, *parameters = call.operands
    state = as_array(name, "state", state)
    _check_dtype_of_x(name, "state", state, x)
    examples, channels, _ = call.state_shape
    if state.ndim != 3 or state.shape[:2] != (examples, channels) or state.shape[2] < call.num_kept:
        raise ValueError(
            f"{name}: state must have shape [B, C, K] = ({examples}, {channels}, K) with K >= W - 1 = {call.num_kept} "
            f"to fit x and weight, got {state.shape}"
        )
    params = _UpdateParams(call.params.channels_last, call.params.silu, call.params.has_bias)
    y, new_state = _update(params, x, state, *parameters)
    return jnp.squeeze(y, time) if is_single else y, new_state


# ----------------------------------------------------------------------------------------------------------------------
# Reference in plain JAX. Signals are [..., B, C, L], or [..., B, L, C] where channels are last.


def _time_axis(channels_last: bool) -> int:
    return -2 if channels_last else -1


def _in_layout(values: Array, channels_last: bool) -> Array:
    """Values ``[..., C, L]`` in the layout of the signal, and back."""
    return jnp.swapaxes(values, -1, -2) if channels_last else values


def _optional(operands: Sequence[Array], *presence: bool) -> list[Array | None]:
    """The optional operands of a call, None in place of those that are left out."""
    remaining = iter(operands)
    return [next(remaining) if is_present else None for is_present in presence]


def _taps(segment_ids: Array, width: int) -> Array:
    """For each input of ``[B, L]``, bit j says whether the input j steps back belongs to the same sequence."""
    examples, length = segment_ids.shape
    taps = jnp.zeros(segment_ids.shape, jnp.uint8)
    if 0 in segment_ids.shape:
        return taps
    before = jnp.broadcast_to(segment_ids[:, :1], (examples, width - 1))
    ids = jnp.concatenate([before, segment_ids], axis=1)
    for steps_back in range(width):
        start = width - 1 - steps_back
        is_same = jax.lax.slice_in_dim(ids, start, start + length, axis=1) == segment_ids
        taps |= is_same.astype(jnp.uint8) << steps_back
    return taps


def _with_history(x: Array, initial_state: Array | None, num_kept: int, channels_last: bool) -> Array:
    """The signal with its `num_kept` inputs before t = 0."""
    time = _time_axis(channels_last)
    if initial_state is not None:
        return jnp.concatenate([_in_layout(initial_state, channels_last), x], axis=time)
    padding = [(0, 0)] * x.ndim
    padding[time] = (num_kept, 0)
    return jnp.pad(x, padding)


def _final_state(
    x: Array, initial_state: Array | None, taps: Array | None, *, num_kept: int, channels_last: bool
) -> Array:
    """The last `num_kept` inputs ``[..., B, C, W - 1]``, those of other sequences than the last one's as zeros."""
    time = _time_axis(channels_last)
    spec = jax_versions.explicit_spec(jax.typeof(x))

    def last_inputs(x: Array, *initial_state: Array) -> tuple[Array]:
        if not jax_versions.is_static_shape(x.shape) or x.shape[time] < num_kept:
            x = _with_history(x, *(initial_state or (None,)), num_kept, channels_last)
        end = x.shape[time]
        return (jax.lax.slice_in_dim(x, end - num_kept, end, axis=time),)

    if spec is not None and spec[time] is not None:
        # Explicit mode does not slice what is split.
        last_inputs = in_automatic_mode(last_inputs, jax.typeof(x), [*spec[:time], None, *spec[len(spec) + time + 1 :]])
    [tail] = last_inputs(x, *(() if initial_state is None else (initial_state,)))
    tail = _in_layout(tail, channels_last)
    if taps is None or 0 in taps.shape:
        return tail
    steps_back = np.arange(num_kept - 1, -1, -1, dtype=np.uint8).reshape(*[1] * (taps.ndim - 1), -1)
    is_same = (taps[..., -1:] >> steps_back) & 1
    return jnp.where(is_same[..., None, :] == 1, tail, 0)


def _plain_convolution(
    x: Array,
    weight: Array,
    bias: Array | None,
    initial_state: Array | None,
    taps: Array | None,
    *,
    channels_last: bool,
    silu: bool,
) -> Array:
    """The convolution as shifted sums, in the dtype of its operands. All of them have a leading batch dimension."""
    time = _time_axis(channels_last)
    width, length = weight.shape[-1], x.shape[time]
    inputs = _with_history(x, initial_state, width - 1, channels_last)

    def per_channel(values: Array) -> Array:
        return _in_layout(values[:, None, :, None], channels_last)

    output = jnp.zeros((), x.dtype) if bias is None else per_channel(bias)
    for steps_back in range(width):
        start = width - 1 - steps_back
        shifted = jax.lax.slice_in_dim(inputs, start, start + length, axis=time)
        factor = per_channel(weight[..., start])
        if taps is None:
            output = output + factor * shifted
        else:
            is_same = _in_layout(((taps >> steps_back) & 1)[:, :, None, :], channels_last) == 1
            # Twice, so that neither an infinite input nor an infinite weight meets a zero, in the gradient either.
            output = output + jnp.where(is_same, factor * jnp.where(is_same, shifted, 0), 0)
    return output * jax.nn.sigmoid(output) if silu else output


def _widened(batch: int, dtype: Any, *operands: Array | None) -> list[Array | None]:
    """The operands in the dtype of accumulation, and with the whole batch."""
    return [None if x is None else jnp.broadcast_to(x.astype(dtype), (batch, *x.shape[1:])) for x in operands]


def _reference_convolution(
    x: Array,
    weight: Array,
    *optional: Array,
    channels_last: bool,
    silu: bool,
    has_bias: bool,
    has_initial_state: bool,
    has_taps: bool,
) -> tuple[Array]:
    bias, initial_state, taps = _optional(optional, has_bias, has_initial_state, has_taps)
    batch = batch_of(x, weight, *optional)
    operands = _widened(batch, compute_dtype(x.dtype), x, weight, bias, initial_state)
    return (_plain_convolution(*operands, taps, channels_last=channels_last, silu=silu).astype(x.dtype),)


def _reference_backward(
    x: Array,
    weight: Array,
    dy: Array,
    *optional: Array,
    channels_last: bool,
    silu: bool,
    has_bias: bool,
    has_initial_state: bool,
    has_taps: bool,
    has_d_final_state: bool,
) -> tuple[Array, ...]:
    bias, initial_state, taps, d_final_state = _optional(
        optional, has_bias, has_initial_state, has_taps, has_d_final_state
    )
    batch = batch_of(x, weight, dy, *optional)
    bias = jnp.zeros(weight.shape[:2], weight.dtype) if bias is None else bias
    primals = [x, weight, bias] if initial_state is None else [x, weight, bias, initial_state]
    cotangents = [dy] if d_final_state is None else [dy, d_final_state]
    dtype = compute_dtype(x.dtype)

    def outputs(x: Array, weight: Array, bias: Array, initial_state: Array | None = None) -> list[Array]:
        y = _plain_convolution(x, weight, bias, initial_state, taps, channels_last=channels_last, silu=silu)
        if not has_d_final_state:
            return [y]
        state = _final_state(x, initial_state, taps, num_kept=weight.shape[-1] - 1, channels_last=channels_last)
        return [y, state]

    _, vjp = jax.vjp(outputs, *_widened(batch, dtype, *primals))
    dx, dweight, dbias, *d_states = vjp(_widened(batch, dtype, *cotangents))
    return dx.astype(x.dtype), dweight, dbias, *(d_state.astype(x.dtype) for d_state in d_states)


def _reference_update(
    x: Array, state: Array, weight: Array, *optional: Array, channels_last: bool, silu: bool, has_bias: bool, **_: bool
) -> tuple[Array, Array]:
    batch = batch_of(x, state, weight, *optional)
    x, state = (jnp.broadcast_to(signal, (batch, *signal.shape[1:])) for signal in (x, state))
    recent = state[..., state.shape[-1] - (weight.shape[-1] - 1) :]
    operands = _widened(batch, compute_dtype(x.dtype), x, weight, *_optional(optional, has_bias), recent)
    y = _plain_convolution(*operands, None, channels_last=channels_last, silu=silu).astype(x.dtype)
    new_state = jnp.concatenate([state, _in_layout(x, channels_last)], axis=-1)
    return y, new_state[..., new_state.shape[-1] - state.shape[-1] :]


# ----------------------------------------------------------------------------------------------------------------------
# Ops: one per native kernel.

WEIGHT = ("batch", "channel", "tap")
BIAS = ("batch", "channel")
STATE = ("batch", "example", "channel", "state")
TAPS = ("batch", "example", "time")


def _signal(channels_last: bool) -> Dimensions:
    return ("batch", "example", "time", "channel") if channels_last else ("batch", "example", "channel", "time")


def _present(*choices: tuple[Dimensions, bool]) -> tuple[Dimensions, ...]:
    return tuple(dimensions for dimensions, is_present in choices if is_present)


def _shard_backward(
    kernel: Callable[..., Sequence[Array]], axes: Mapping[str, tuple[str, ...]], *operands: Array, **params: Any
) -> Sequence[Array]:
    """The gradients of the parameters are sums over all examples."""
    dx, dweight, dbias, *d_states = kernel(*operands)
    if example_axes := axes.get("example", ()):
        dweight, dbias = jax.lax.psum((dweight, dbias), example_axes)
    return dx, dweight, dbias, *d_states


def _backward_types(
    x: Any, weight: Any, *others: Any, has_initial_state: bool, **_: Any
) -> list[tuple[tuple[int, ...], Any]]:
    batch = batch_of(x, weight, *others)
    dtype = np.dtype(compute_dtype(x.dtype))
    channels, width = weight.shape[1:]
    types = [((batch, *x.shape[1:]), x.dtype), ((batch, channels, width), dtype), ((batch, channels), dtype)]
    if has_initial_state:
        types.append(((batch, x.shape[1], channels, width - 1), x.dtype))
    return types


def _plan_parameters(
    x: Any,
    weight: Any,
    *others: Any,
    channels_last: bool,
    silu: bool,
    has_initial_state: bool = False,
    has_taps: bool = False,
    has_d_final_state: bool = False,
    **_: Any,
) -> dict[str, int]:
    batch = batch_of(x, weight, *others)
    return {
        "batch": batch,
        "x_is_shared": x.shape[0] != batch,
        "examples": x.shape[1],
        "channels": weight.shape[1],
        "length": x.shape[_time_axis(channels_last)],
        "width": weight.shape[2],
        "channels_last": channels_last,
        "silu": silu,
        "has_initial_state": has_initial_state,
        "has_taps": has_taps,
        "has_d_final_state": has_d_final_state,
        "element_bytes": np.dtype(x.dtype).itemsize,
    }


def _backward_plan_parameters(x: Any, weight: Any, dy: Any, *others: Any, **params: Any) -> dict[str, int]:
    parameters = _plan_parameters(x, weight, dy, *others, **params)
    return parameters | {"dy_is_shared": dy.shape[0] != parameters["batch"]}


def _update_plan_parameters(x: Any, state: Any, weight: Any, *others: Any, **params: Any) -> dict[str, int]:
    return _plan_parameters(x, weight, state, *others, **params) | {"state_length": state.shape[3]}


def _sum_guarantee(dtype: str, platform: str, **_: bool) -> Guarantee:
    accumulator = np.dtype(compute_dtype(jnp.dtype(dtype))).name
    return Guarantee(accumulator, "accumulated", deterministic=True, bit_stable_on_same_hardware=True)


CAUSAL_CONV1D = Op(
    name="causal_conv1d",
    operands=lambda *, channels_last, has_bias, has_initial_state, has_taps, **_: (
        _signal(channels_last),
        WEIGHT,
        *_present((BIAS, has_bias), (STATE, has_initial_state), (TAPS, has_taps)),
    ),
    results=lambda *, channels_last, **_: (_signal(channels_last),),
    result_types=lambda x, *others, **_: [((batch_of(x, *others), *x.shape[1:]), x.dtype)],
    reference=_reference_convolution,
    dtypes=FLOATING_DTYPES,
    guarantee=_sum_guarantee,
    attributes=("channels_last", "silu", "has_bias", "has_initial_state", "has_taps"),
    plan_parameters=_plan_parameters,
    whole=("time", "tap", "state"),
)

CAUSAL_CONV1D_BACKWARD = Op(
    name="causal_conv1d_backward",
    operands=lambda *, channels_last, has_bias, has_initial_state, has_taps, has_d_final_state, **_: (
        _signal(channels_last),
        WEIGHT,
        _signal(channels_last),
        *_present((BIAS, has_bias), (STATE, has_initial_state), (TAPS, has_taps), (STATE, has_d_final_state)),
    ),
    results=lambda *, channels_last, has_initial_state, **_: (
        _signal(channels_last),
        WEIGHT,
        BIAS,
        *_present((STATE, has_initial_state)),
    ),
    result_types=_backward_types,
    reference=_reference_backward,
    dtypes=FLOATING_DTYPES,
    guarantee=_sum_guarantee,
    attributes=("channels_last", "silu", "has_bias", "has_initial_state", "has_taps", "has_d_final_state"),
    plan_parameters=_backward_plan_parameters,
    whole=("time", "tap", "state"),
    reduced=("example",),
    shard_program=_shard_backward,
)

CAUSAL_CONV1D_UPDATE = Op(
    name="causal_conv1d_update",
    operands=lambda *, channels_last, has_bias, **_: (
        _signal(channels_last),
        STATE,
        WEIGHT,
        *_present((BIAS, has_bias)),
    ),
    results=lambda *, channels_last, **_: (_signal(channels_last), STATE),
    result_types=lambda x, state, *others, **_: [
        ((batch_of(x, state, *others), *signal.shape[1:]), x.dtype) for signal in (x, state)
    ],
    reference=_reference_update,
    dtypes=FLOATING_DTYPES,
    guarantee=_sum_guarantee,
    attributes=("batched", "channels_last", "silu", "has_bias"),
    plan_parameters=_update_plan_parameters,
    whole=("time", "tap", "state"),
    in_place={1: 1},
    batch_optional=True,
)


# ----------------------------------------------------------------------------------------------------------------------
# Derivative rules. Arrays have no batch dimension here; JAX adds it under vmap.


@dataclasses.dataclass(frozen=True)
class _Params:
    """The static arguments of a convolution, under the names that the ops take them by."""

    channels_last: bool
    silu: bool
    has_bias: bool
    has_initial_state: bool
    has_taps: bool


@dataclasses.dataclass(frozen=True)
class _UpdateParams:
    channels_last: bool
    silu: bool
    has_bias: bool


def _call_op(op: Op, *operands: Array, **params: bool) -> list[Array]:
    return [result[0] for result in op(*(operand[None] for operand in operands), **params)]


def _gradients(params: _Params, operands: Sequence[Array], dy: Array, d_final_state: Array | None) -> list[Array]:
    """``[dx, dweight, dbias]`` and the gradient of the initial state, if there is one.

    Those of the parameters are in the dtype of accumulation, and dbias is there without a bias, too.
    """
    x, weight, *optional = operands
    d_state = () if d_final_state is None else (d_final_state,)
    return _call_op(
        CAUSAL_CONV1D_BACKWARD,
        *(x, weight, dy, *optional, *d_state),
        **dataclasses.asdict(params),
        has_d_final_state=d_final_state is not None,
    )


def _convolution_rules(with_final_state: bool) -> Differentiable:
    def primal(params: _Params, *operands: Array) -> Array | tuple[Array, Array]:
        [y] = _call_op(CAUSAL_CONV1D, *operands, **dataclasses.asdict(params))
        if not with_final_state:
            return y
        x, weight, *optional = operands
        _, initial_state, taps = _optional(optional, params.has_bias, params.has_initial_state, params.has_taps)
        state = _final_state(x, initial_state, taps, num_kept=weight.shape[1] - 1, channels_last=params.channels_last)
        return map_together((y, state), operands)

    def forward(params: _Params, *operands: Array) -> tuple[Array | tuple[Array, Array], tuple[Array, ...]]:
        return primal(params, *operands), operands

    def backward(params: _Params, operands: tuple[Array, ...], cotangents: Any) -> tuple[Array | None, ...]:
        dy, d_final_state = cotangents if with_final_state else (cotangents, None)
        dx, dweight, dbias, *d_states = _gradients(params, operands, dy, d_final_state)
        return dx, dweight, *((dbias,) if params.has_bias else ()), *d_states, *((None,) if params.has_taps else ())

    return Differentiable(primal, forward, backward)


_convolution = _convolution_rules(with_final_state=False)
_convolution_and_state = _convolution_rules(with_final_state=True)


def _update_primal(params: _UpdateParams, x: Array, state: Array, *parameters: Array) -> tuple[Array, Array]:
    # Without the batch dimension, so that XLA updates the state in place.
    y, new_state = CAUSAL_CONV1D_UPDATE(x, state, *parameters, batched=False, **dataclasses.asdict(params))
    return y, new_state


def _update_forward(params: _UpdateParams, *operands: Array) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    return _update_primal(params, *operands), operands


def _update_vjp(
    params: _UpdateParams, operands: tuple[Array, ...], cotangents: tuple[Array, Array]
) -> tuple[Array, ...]:
    """Of the new state, the last W - 1 inputs are the convolution's final state, and the others older inputs."""
    x, state, weight, *bias = operands
    dy, d_new_state = cotangents
    # The parts of a state that is split over devices need not be divisible by their number.
    state, d_new_state = split_as(state, state, (0, 1, None)), split_as(d_new_state, d_new_state, (0, 1, None))
    num_kept = weight.shape[1] - 1
    num_older = state.shape[2] - num_kept
    has_state = num_kept > 0
    conv_params = _Params(**dataclasses.asdict(params), has_initial_state=has_state, has_taps=False)
    recent, d_final_state = (state[..., num_older:], d_new_state[..., num_older:]) if has_state else (None, None)
    conv_operands = (x, weight, *bias, *((recent,) if has_state else ()))
    dx, dweight, dbias, *d_states = _gradients(conv_params, conv_operands, dy, d_final_state)
    d_state = d_states[0] if has_state else jnp.zeros((*state.shape[:2], 0), state.dtype)
    if num_older > 0:
        time = _time_axis(params.channels_last)
        # What is older in the new state, in its place among all inputs: those of the state and the new ones.
        nothing = [(0, 0)] * 2
        d_inputs = jnp.pad(d_new_state[..., :num_older], [*nothing, (x.shape[time], num_kept)])
        d_state = jnp.pad(d_state, [*nothing, (num_older, 0)]) + d_inputs[..., : state.shape[2]]
        dx = dx + _in_layout(d_inputs[..., state.shape[2] :], params.channels_last)
    return dx, d_state, dweight, *((dbias,) if params.has_bias else ())


_update = Differentiable(_update_primal, _update_forward, _update_vjp)


# ----------------------------------------------------------------------------------------------------------------------
# Canonicalisation of arguments, shared by the whole family.


@dataclasses.dataclass(frozen=True)
class _Convolution:
    """Checked arguments of a convolution."""

    params: _Params
    operands: tuple[Array, ...]
    """x, weight, and those of bias, initial state and taps that are there"""
    state_shape: tuple[int, int, int]

    @property
    def num_kept(self) -> int:
        """How many inputs a state holds."""
        return self.state_shape[2]

    def empty_state(self) -> Array:
        """The state of a filter that sees no input but the present one."""
        return jnp.zeros(self.state_shape, self.operands[0].dtype)


def _canonicalize(
    name: str,
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None,
    activation: Activation,
    channels_last: bool,
    initial_state: ArrayLike | None,
    segment_ids: ArrayLike | None,
) -> _Convolution:
    """Checks the arguments that all functions share."""
    x, weight = as_array(name, "x", x), as_array(name, "weight", weight)
    channels_last = bool(channels_last)
    layout = "[B, L, C] (channels_last=True)" if channels_last else "[B, C, L] (channels_last=False)"
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name}: x must have a real floating dtype, got {x.dtype}")
    if x.ndim != 3:
        raise ValueError(f"{name}: x must have shape {layout}, got {x.shape}")
    channel_axis, time_axis = (2, 1) if channels_last else (1, 2)
    examples, channels, length = (x.shape[axis] for axis in (0, channel_axis, time_axis))
    _check_parameter_dtype(name, "weight", weight, x)
    if weight.ndim != 2 or weight.shape[0] != channels:
        raise ValueError(
            f"{name}: weight must have shape [C, W] = ({channels}, W) to fit x of shape {layout} = {x.shape}, "
            f"got {weight.shape}"
        )
    width = weight.shape[1]
    if not 1 <= width <= MOST_TAPS:
        raise ValueError(f"{name}: weight must have shape [C, W] with 1 <= W <= {MOST_TAPS}, got {weight.shape}")
    state_shape = (examples, channels, width - 1)
    optional = []
    if bias is not None:
        bias = as_array(name, "bias", bias)
        _check_parameter_dtype(name, "bias", bias, x)
        if bias.shape != (channels,):
            raise ValueError(
                f"{name}: bias must have shape [C] = ({channels},) to fit x of shape {layout} = {x.shape}, "
                f"got {bias.shape}"
            )
        optional.append(bias)
    is_silu = _is_silu(name, activation)
    if initial_state is not None:
        initial_state = as_array(name, "initial_state", initial_state)
        _check_like_x(name, "initial_state", initial_state, x, state_shape)
        if width > 1:
            optional.append(split_as(initial_state, x, (0, channel_axis, None)))
    if segment_ids is not None:
        ids = _checked_ids(name, segment_ids, (examples, length))
        if width > 1:
            optional.append(_taps(split_as(ids, x, (0, None)), width))
    params = _Params(
        channels_last=channels_last,
        silu=is_silu,
        has_bias=bias is not None,
        has_initial_state=initial_state is not None and width > 1,
        has_taps=segment_ids is not None and width > 1,
    )
    return _Convolution(params, (x, weight, *optional), state_shape)


def _check_parameter_dtype(name: str, argument: str, parameter: Array, x: Array) -> None:
    if parameter.dtype not in (x.dtype, compute_dtype(x.dtype)):
        dtypes = " or ".join(dict.fromkeys((str(x.dtype), str(np.dtype(compute_dtype(x.dtype))))))
        raise TypeError(f"{name}: {argument} must have dtype {dtypes} where x has {x.dtype}, got {parameter.dtype}")


def _check_dtype_of_x(name: str, argument: str, value: Array, x: Array) -> None:
    if value.dtype != x.dtype:
        raise TypeError(f"{name}: {argument} must have the dtype of x, {x.dtype}, got {value.dtype}")


def _check_like_x(name: str, argument: str, value: Array, x: Array, shape: tuple[int, ...]) -> None:
    _check_dtype_of_x(name, argument, value, x)
    if value.shape != shape:
        raise ValueError(f"{name}: {argument} must have shape {shape} to fit x and weight, got {value.shape}")


def _checked_ids(name: str, segment_ids: ArrayLike, shape: tuple[int, int]) -> Array:
    ids = as_array(name, "segment_ids", segment_ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"{name}: segment_ids must have an integer dtype, got {ids.dtype}")
    if ids.shape != shape:
        raise ValueError(f"{name}: segment_ids must have shape [B, L] = {shape}, got {ids.shape}")
    return ids


def _is_silu(name: str, activation: Activation) -> bool:
    if activation is None:
        return False
    if not isinstance(activation, str) or activation not in ("silu", "swish"):
        raise ValueError(f"{name}: activation must be None, 'silu' or 'swish', got {activation!r}")
    return True
