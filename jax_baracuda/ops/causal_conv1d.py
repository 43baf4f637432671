"""Depthwise causal convolution over time, as in Mamba (Gu and Dao, 2023), with states, packed sequences and decoding.

Every channel has its own short filter over present and past inputs. Kernels take filters of 1 to 8 taps. Training runs
the convolution over whole sequences, in either layout. A row may hold several packed sequences, and a sequence may be
cut into chunks that pass on a state. Decoding runs it over one new input at a time and updates the state in place. The
backward kernel recomputes the forward values it needs, so only the inputs are kept.

The file reads top to bottom: public functions, operands, reference in plain JAX, ops (one per native kernel),
derivative rules, canonicalisation of arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jax_baracuda._core import jax_versions
from jax_baracuda._core.arrays import (
    FLOATING_DTYPES,
    INTEGER_DTYPES,
    accumulation_dtype,
    as_array,
    check_choice,
    check_same_dtype,
    check_shape,
    flag,
    floating_array,
    in_automatic_mode,
    integer_array,
    reshard_as,
    whole_number,
)
from jax_baracuda._core.autodiff import KernelVjp
from jax_baracuda._core.batch import map_together
from jax_baracuda._core.functions import Params
from jax_baracuda._core.guarantees import EXACT, accumulated
from jax_baracuda._core.op import Dimensions, NamedDimensions
from jax_baracuda._core.primitives import define_op
from jax_baracuda._core.public import public_function
from jax_baracuda._core.rules import MB, at_most, fused, launch_bound, on_cpu, on_gpu, param
from jax_baracuda._core.selection import Implementation
from jax_baracuda._core.sharding import ShardAxes, ShardKernel

Activation = Literal["silu", "swish"] | None

MAX_WIDTH = 8
"""The widest filter that kernels take. Wider filters run as plain JAX."""


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
    num_segments: int | None = None,
    implementation: Implementation | None = None,
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
    num_segments: int | None = None,
    implementation: Implementation | None = None,
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
    num_segments: int | None = None,
    implementation: Implementation | None = None,
) -> Array | tuple[Array, Array]: ...


@public_function()
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
    num_segments: int | None = None,
    implementation: Implementation | None = None,
) -> Array | tuple[Array, Array]:
    """Depthwise causal convolution: each channel over its own past, as in Mamba (Gu and Dao, 2023).

    ``y[b, c, t] = act(sum { weight[c, k] * x[b, c, t - (W-1-k)] : 0 <= k < W } + bias[c])``. Before t = 0, `x` is
    `initial_state`, or zero.

    Args:
      x: ``[B, C, L]``, or ``[B, L, C]`` with `channels_last`; a real floating dtype. float16, bfloat16, float32 and
        float64 have kernels; other dtypes run as plain JAX.
      weight: ``[C, W]`` with W >= 1, the last tap for the present input; the dtype of `x`, or float32 if `x` has fewer
        than 32 bits. Filters of up to 8 taps have kernels; wider filters run as plain JAX.
      bias: ``[C]`` or None; the dtype of `x`, or float32 if `x` has fewer than 32 bits.
      activation: None, or "silu" ("swish" is the same): ``act(z) = z * sigmoid(z)``.
      channels_last: whether `x` is ``[B, L, C]``. Where L is C, the shapes would not reveal a mistake. States are
        ``[B, C, ...]`` in either case.
      initial_state: ``[B, C, W - 1]`` with the dtype of `x`: the inputs before t = 0, the newest last. Default: zeros.
      segment_ids: ``[B, L]``, any integer dtype: the sequence that each input belongs to. A tap contributes zero if its
        input has another id, even if that input is NaN. Equal ids are one sequence, adjacent or not. The initial state
        belongs to the sequence of the first id of its row.
      return_final_state: whether to also return the state that continues the last sequence, or each of them.
      num_segments: a static integer, with `segment_ids` and `return_final_state`: the final state is that of each
        sequence with an id from 0 to ``num_segments - 1``, instead of the last sequence alone.

    Returns:
      y with the shape and dtype of `x`, or ``(y, final_state)``. The final state, ``[B, C, W - 1]`` with the dtype of
      `x`, holds the last W - 1 inputs, including those of the initial state if L < W - 1. With `segment_ids`, it holds
      zeros for inputs that do not belong to the last input's sequence. With `num_segments`, it is
      ``[B, num_segments, C, W - 1]``: for each id the state after the last input of its sequence; zeros for an id that
      the row does not have.

    Raises:
      TypeError: an argument is not an array or has an unsuitable dtype.
      ValueError: shapes do not fit, the filter has no tap, the activation is unknown, or implementation="kernel" is
        asked for and there is no kernel.

    Numerical guarantees: products are added and the activation is computed in float32 (float64 for float64), and the
    result is rounded once to the dtype. The final state is exact. Bit-equal from run to run.

    Gradient: as in :func:`causal_conv1d_backward`, with respect to `x`, `weight`, `bias` and `initial_state`, through y
    and through the final state. Only the arguments are kept for the backward pass.

    Example:
      >>> import jax.numpy as jnp, jax_baracuda as jb
      >>> x = jnp.array([[[1.0, 2.0, 3.0, 4.0]]])  # [B, C, L]
      >>> weight = jnp.array([[-1.0, 1.0]])  # [C, W]: each input minus the one before
      >>> y, state = jb.causal_conv1d(x, weight, return_final_state=True)
      >>> print(y, state)
      [[[1. 1. 1. 1.]]] [[[4.]]]
    """
    name = "causal_conv1d"
    params, arrays = canonicalize(name, x, weight, bias, activation, channels_last, initial_state, segment_ids)
    returns_state = flag(name, "return_final_state", return_final_state)
    if num_segments is None:
        return _convolution(Params(params, returns_state=returns_state), **arrays)
    num_segments = whole_number(name, "num_segments", num_segments, minimum=0)
    if segment_ids is None or not returns_state:
        raise ValueError(f"{name}: num_segments needs segment_ids and return_final_state=True")
    y = _convolution(Params(params, returns_state=False), **arrays)
    return y, _states_of_segments(arrays, as_array(name, "segment_ids", segment_ids), num_segments, params)


@public_function(causal_conv1d, has_twin=False)
def causal_conv1d_backward(
    d_output: ArrayLike,
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    activation: Activation = None,
    channels_last: bool = False,
    initial_state: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    d_final_state: ArrayLike | None = None,
    implementation: Implementation | None = None,
) -> tuple[Array, Array, Array | None] | tuple[Array, Array, Array | None, Array]:
    """Gradient of :func:`causal_conv1d`.

    With ``dz = d_output * act'(z)``, where z is the sum before the activation:
    ``dx[b, c, t] = sum { weight[c, W-1-j] * dz[b, c, t + j] : 0 <= j < W }``,
    ``dweight[c, W-1-j] = sum over b and t of dz[b, c, t] * x[b, c, t - j]``, ``dbias[c] = sum over b and t of dz``.

    Args:
      d_output: the cotangent of y, with the shape and dtype of `x`.
      d_final_state: ``[B, C, W - 1]`` with the dtype of `x`: the cotangent of the final state. Default: zeros.

    Returns:
      ``(dx, dweight, dbias)``, each with the shape and dtype of its primal; dbias is None if `bias` is None. If
      `initial_state` is given, ``(dx, dweight, dbias, d_initial_state)``.

    Numerical guarantees: sums are accumulated in float32 (float64 for float64), in a fixed order, and rounded once:
    bit-equal from run to run, and independent of scheduling. If time is split over devices, dx of the W - 1 last inputs
    of a device is the rounded sum of two rounded parts.

    Gradient: derivatives of any order and in either mode exist.

    Example:
      >>> import jax.numpy as jnp, jax_baracuda as jb
      >>> x, weight = jnp.array([[[1.0, 2.0, 3.0]]]), jnp.array([[-1.0, 1.0]])
      >>> dx, dweight, dbias = jb.causal_conv1d_backward(jnp.ones_like(x), x, weight)
      >>> print(dx, dweight, dbias)
      [[[0. 0. 1.]]] [[3. 6.]] None
    """
    name = "causal_conv1d_backward"
    params, arrays = canonicalize(name, x, weight, bias, activation, channels_last, initial_state, segment_ids)
    x, weight = arrays["x"], arrays["weight"]
    shape_of_state = state_shape(x, weight)
    d_output = _array_like_x(name, "d_output", d_output, x, x.shape)
    if d_final_state is not None:
        d_final_state = _array_like_x(name, "d_final_state", d_final_state, x, shape_of_state, "[B, C, W - 1]")
    gradients = gradients_of(params, arrays, d_output, d_final_state)
    dx, dweight = gradients["x"], gradients["weight"].astype(weight.dtype)
    dbias = None if arrays["bias"] is None else gradients["bias"].astype(arrays["bias"].dtype)
    if initial_state is None:
        return dx, dweight, dbias
    return dx, dweight, dbias, gradients.get("initial_state", jnp.zeros(shape_of_state, x.dtype))


# ----------------------------------------------------------------------------------------------------------------------
# Reference in plain JAX. Signals are [B, C, L], or [B, L, C] where channels are last.


def time_axis(channels_last: bool) -> int:
    return -2 if channels_last else -1


def in_layout(values: Array, channels_last: bool) -> Array:
    """Converts values between ``[..., C, L]`` and the layout of the signal, in either direction."""
    return jnp.swapaxes(values, -1, -2) if channels_last else values


def _as_state(inputs: Array, channels_last: bool) -> Array:
    """A few inputs as a state ``[..., C, K]``.

    They are stacked one by one, because to transpose a part of a signal, XLA would transpose all of it.
    """
    if not channels_last or not 0 < inputs.shape[-2] < MAX_WIDTH:
        return in_layout(inputs, channels_last)
    return jnp.stack([inputs[..., i, :] for i in range(inputs.shape[-2])], axis=-1)


def _ids_with_history(segment_ids: Array, state_length: int) -> Array:
    """The ids ``[B, L]``, preceded by the ids of the inputs before t = 0, which belong to the first sequence."""
    before = jnp.broadcast_to(segment_ids[:, :1], (segment_ids.shape[0], state_length))
    return jnp.concatenate([before, segment_ids], axis=1)


def _reference_same_sequence(segment_ids: Array, *, width: int, ids: Array | None = None) -> tuple[Array]:
    """For each input of ``[B, L]``, bit j says whether the input j steps back belongs to the same sequence.

    `ids` are the ids preceded by those of the W - 1 inputs before them. Default: the ids of the first sequence.
    """
    same_sequence = jnp.zeros(segment_ids.shape, jnp.uint8)
    if 0 in segment_ids.shape:
        return (same_sequence,)
    ids = _ids_with_history(segment_ids, width - 1) if ids is None else ids
    for steps_back in range(width):
        start = width - 1 - steps_back
        is_same = jax.lax.slice_in_dim(ids, start, start + segment_ids.shape[1], axis=1) == segment_ids
        same_sequence |= is_same.astype(jnp.uint8) << steps_back
    return (same_sequence,)


def _with_history(x: Array, initial_state: Array | None, state_length: int, channels_last: bool) -> Array:
    """The signal, preceded by its `state_length` inputs before t = 0."""
    time = time_axis(channels_last)
    if initial_state is not None:
        return jnp.concatenate([in_layout(initial_state, channels_last), x], axis=time)
    padding = [(0, 0)] * x.ndim
    padding[time] = (state_length, 0)
    return jnp.pad(x, padding)


def _final_state(
    x: Array, initial_state: Array | None, same_sequence: Array | None, *, state_length: int, channels_last: bool
) -> Array:
    """The last `state_length` inputs ``[B, C, W - 1]``, with zeros for inputs of other sequences than the last."""
    time = time_axis(channels_last)

    def last_inputs(x: Array, *initial_state: Array) -> tuple[Array]:
        if not jax_versions.is_static_shape(x.shape) or x.shape[time] < state_length:
            x = _with_history(x, *(initial_state or (None,)), state_length, channels_last)
        end = x.shape[time]
        return (jax.lax.slice_in_dim(x, end - state_length, end, axis=time),)

    tail = _unsplit(last_inputs, time, x, *(() if initial_state is None else (initial_state,)))
    tail = _as_state(tail, channels_last)
    if same_sequence is None or 0 in same_sequence.shape:
        return tail

    def is_kept(same_sequence: Array) -> tuple[Array]:
        if state_length >= MAX_WIDTH:
            ids = _ids_with_history(same_sequence, state_length)
            return (ids[:, ids.shape[1] - state_length :] == ids[:, -1:],)
        steps_back = np.arange(state_length - 1, -1, -1, dtype=np.uint8)[None]
        return ((same_sequence[:, -1:] >> steps_back) & 1 == 1,)

    return jnp.where(_unsplit(is_kept, 1, same_sequence)[..., None, :], tail, 0)


def _states_of_segments(arrays: Mapping[str, Any], segment_ids: Array, num_segments: int, params: Params) -> Array:
    """The final state ``[B, S, C, W - 1]`` of each of the sequences 0 to S - 1 of packed signals."""
    x, weight, initial_state = arrays["x"], arrays["weight"], arrays["initial_state"]
    state_length, time = weight.shape[1] - 1, time_axis(params["channels_last"])
    examples, channels, length = x.shape[0], weight.shape[0], x.shape[time]
    shape = examples, num_segments, channels, state_length
    if 0 in (*shape, length):
        return jnp.zeros(shape, x.dtype)

    def states(x: Array, ids: Array, *initial_state: Array) -> tuple[Array]:
        segments = jnp.arange(num_segments)
        is_id = (segments <= min(jnp.iinfo(ids.dtype).max, jnp.iinfo(segments.dtype).max)) & (
            ids[:, :, None] == segments.astype(ids.dtype)
        )
        last = jnp.max(jnp.where(is_id, jnp.arange(length)[None, :, None], -1), axis=1)
        positions = last[:, :, None] - (state_length - 1) + jnp.arange(state_length)
        examples_of = jnp.arange(examples)[:, None, None]
        inside = jnp.clip(positions, 0, length - 1)  # the inputs before time 0 are of the sequence of the first one
        is_same = (last >= 0)[:, :, None] & is_id[examples_of, inside, segments[None, :, None]]
        if params["channels_last"]:
            inputs = jnp.swapaxes(x[examples_of, inside], 2, 3)
        else:
            inputs = jnp.moveaxis(x[examples_of, :, inside], 3, 2)
        before = jnp.zeros((), x.dtype)
        if initial_state:
            entries = jnp.clip(state_length + positions, 0, state_length - 1)
            before = jnp.moveaxis(initial_state[0][examples_of, :, entries], 3, 2)
        inputs = jnp.where((positions < 0)[:, :, None], before, inputs)
        return (jnp.where(is_same[:, :, None], inputs, 0),)

    operands = [x, segment_ids, *([] if initial_state is None else [initial_state])]
    spec = jax_versions.explicit_spec(jax.typeof(x))
    if spec is not None:
        channel_axis = 2 if params["channels_last"] else 1
        states = in_automatic_mode(states, jax.typeof(x), (spec[0], None, spec[channel_axis], None))
    return states(*operands)[0]


def _unsplit(function: Callable[..., tuple[Array]], axis: int, *arrays: Array) -> Array:
    """Calls a function that slices arrays along `axis`; its result is replicated along that axis.

    Under explicit sharding, JAX cannot slice along a split axis, so the call runs in automatic mode.
    """
    spec = jax_versions.explicit_spec(jax.typeof(arrays[0]))
    if spec is not None and spec[axis] is not None:
        replicated = [*spec]
        replicated[axis] = None
        function = in_automatic_mode(function, jax.typeof(arrays[0]), replicated)
    return function(*arrays)[0]


def plain_convolution(
    x: Array,
    weight: Array,
    bias: Array | None,
    initial_state: Array | None,
    same_sequence: Array | None = None,
    *,
    channels_last: bool,
    silu: bool,
) -> Array:
    """The convolution as a sum of shifted inputs, in the dtype of its weights.

    Inputs are widened after shifting, because XLA then reads 16-bit inputs faster.
    """
    time = time_axis(channels_last)
    width, length = weight.shape[-1], x.shape[time]
    is_wide = width > MAX_WIDTH
    inputs = _with_history(x, initial_state, width - 1, channels_last)
    if same_sequence is not None and 0 in same_sequence.shape:
        same_sequence = None
    if same_sequence is not None and is_wide:
        ids = _ids_with_history(same_sequence, width - 1)

    def per_channel(values: Array) -> Array:
        return in_layout(values[None, :, None], channels_last)

    def shifted_back(values: Array, steps_back: Any, axis: int) -> Array:
        start = width - 1 - steps_back
        if is_wide:
            return jax.lax.dynamic_slice_in_dim(values, start, length, axis)
        return jax.lax.slice_in_dim(values, start, start + length, axis=axis)

    def add_tap(output: Array, tap: tuple[Array, Any]) -> tuple[Array, None]:
        weights, steps_back = tap
        shifted = shifted_back(inputs, steps_back, time).astype(weight.dtype)
        factor = per_channel(weights)
        if same_sequence is None:
            return output + factor * shifted, None
        if is_wide:
            is_same = shifted_back(ids, steps_back, 1) == same_sequence
        else:
            is_same = ((same_sequence >> steps_back) & 1) == 1
        is_same = in_layout(is_same[:, None, :], channels_last)
        # Masked twice, so that no zero meets an infinite input or weight, neither here nor in the gradient.
        return output + jnp.where(is_same, factor * jnp.where(is_same, shifted, 0), 0), None

    output = jnp.zeros((), weight.dtype) if bias is None else per_channel(bias)
    for steps_back in range(1 if is_wide else width):
        output, _ = add_tap(output, (weight[..., width - 1 - steps_back], steps_back))
    if is_wide:  # a loop, so that compile time does not grow with the width and no shifted inputs are kept
        taps = jnp.flip(weight, -1).T[1:], np.arange(1, width)
        output, _ = jax.lax.scan(jax.checkpoint(add_tap, prevent_cse=False), output, taps)
    return output * jax.nn.sigmoid(output) if silu else output


def widened(x: Array, *arrays: Array | None) -> list[Any]:
    """Arrays cast to the accumulation dtype of `x`. None stays None."""
    return [None if array is None else array.astype(accumulation_dtype(x.dtype)) for array in arrays]


def reference_convolution(
    x: Array, weight: Array, bias: Array | None, *others: Array | None, channels_last: bool, silu: bool
) -> tuple[Array]:
    wide = plain_convolution(x, *widened(x, weight, bias), *others, channels_last=channels_last, silu=silu)
    return (wide.astype(x.dtype),)


def reference_backward(
    x: Array,
    weight: Array,
    d_output: Array,
    bias: Array | None,
    initial_state: Array | None,
    same_sequence: Array | None,
    d_final_state: Array | None,
    *,
    channels_last: bool,
    silu: bool,
) -> list[Array]:
    bias = jnp.zeros(weight.shape[:1], weight.dtype) if bias is None else bias
    primals = widened(x, x, weight, bias, initial_state)
    cotangents = widened(x, d_output, d_final_state)
    if initial_state is not None and same_sequence is None and x.shape[time_axis(channels_last)] == 1:
        gradients = _gradients_of_one_step(*primals, *cotangents, channels_last=channels_last, silu=silu)
    else:

        def outputs(x: Array, weight: Array, bias: Array, initial_state: Array | None) -> list[Array | None]:
            history = initial_state, same_sequence
            y = plain_convolution(x, weight, bias, *history, channels_last=channels_last, silu=silu)
            if d_final_state is None:
                return [y, None]
            return [y, _final_state(x, *history, state_length=weight.shape[1] - 1, channels_last=channels_last)]

        gradients = jax.vjp(outputs, *primals)[1](cotangents)
    dx, dweight, dbias, d_state = gradients
    return [dx.astype(x.dtype), dweight, dbias, *([] if d_state is None else [d_state.astype(x.dtype)])]


def one_step(x: Array, weight: Array, bias: Array | None, initial_state: Array) -> Array:
    """The convolution ``[B, C]`` at a single time, before the activation, from its input ``[B, C]`` and the state."""
    z = weight[None, :, -1] * x if bias is None else bias[None] + weight[None, :, -1] * x
    state_length = initial_state.shape[2]
    if state_length >= MAX_WIDTH:
        return z + jnp.sum(weight[None, :, :-1] * initial_state, axis=2)
    for step in range(state_length):
        z = z + weight[None, :, step] * initial_state[:, :, step]
    return z


def _gradients_of_one_step(
    x: Array,
    weight: Array,
    bias: Array,
    initial_state: Array,
    d_output: Array,
    d_final_state: Array | None,
    *,
    channels_last: bool,
    silu: bool,
) -> tuple[Array, ...]:
    """The gradients of the first four arrays for a signal of length 1, written out.

    XLA would shift and pad arrays for the general formula.
    """
    time = time_axis(channels_last)
    x, d_z = jnp.squeeze(x, time), jnp.squeeze(d_output, time)
    if silu:
        z = one_step(x, weight, bias, initial_state)
        sigmoid = jax.nn.sigmoid(z)
        d_z = d_z * (sigmoid * (1 + z * (1 - sigmoid)))
    dx, d_state = d_z * weight[None, :, -1], d_z[:, :, None] * weight[None, :, :-1]
    if d_final_state is not None:
        dx = dx + d_final_state[:, :, -1]
        d_state = d_state + jnp.pad(d_final_state[:, :, :-1], [(0, 0), (0, 0), (1, 0)])
    dweight = [jnp.sum(d_z[:, :, None] * initial_state, axis=0), jnp.sum(d_z * x, axis=0)[:, None]]
    return jnp.expand_dims(dx, time), jnp.concatenate(dweight, axis=-1), jnp.sum(d_z, axis=0), d_state


# ----------------------------------------------------------------------------------------------------------------------
# Ops: one per native kernel.


def dimensions_of(names: Sequence[str], channels_last: bool, **others: Dimensions) -> NamedDimensions:
    """The dimensions of operands or results. `others` are those of operands that only some functions have."""
    signal = ("example", "time", "channel") if channels_last else ("example", "channel", "time")
    weight, bias, state = ("channel", "tap"), ("channel",), ("example", "channel", "state")
    of_all = {
        **dict.fromkeys(("x", "d_output", "y", "dx"), signal),
        **dict.fromkeys(("weight", "dweight"), weight),
        **dict.fromkeys(("bias", "dbias"), bias),
        **dict.fromkeys(("state", "new_state", "initial_state", "d_initial_state", "d_final_state"), state),
        **dict.fromkeys(("states", "new_states", "d_states", "d_old_states"), ("slot", "channel", "state")),
        "same_sequence": ("example", "time"),
        **others,
    }
    return {name: of_all[name] for name in names}


def _shard_forward(
    kernel: ShardKernel, axes: ShardAxes, x: Array, weight: Array, *optional: Array | None, channels_last: bool
) -> Sequence[Array]:
    """If time is split, the last inputs of the previous shard are a shard's initial state (a halo exchange)."""
    bias, initial_state, same_sequence = optional
    if _needs_history(weight, axes):
        initial_state = _history(x, weight, initial_state, axes["time"], channels_last)
    return kernel(x, weight, bias, initial_state, same_sequence)


def _shard_backward(
    kernel: ShardKernel,
    axes: ShardAxes,
    x: Array,
    weight: Array,
    d_output: Array,
    *optional: Array | None,
    channels_last: bool,
) -> Sequence[Array]:
    """The gradients of the parameters are summed over all examples and times.

    If time is split, the gradient of a shard's initial state belongs to the last inputs of the previous shard. It is
    added after the kernel, so that the kernel waits for no other device.
    """
    bias, initial_state, same_sequence, d_final_state = optional
    time_axes = axes.get("time", ())
    if not _needs_history(weight, axes):
        dx, dweight, dbias, *d_states = kernel(x, weight, d_output, *optional)
    else:
        if d_final_state is not None:
            is_last = jax.lax.axis_index(time_axes) == jax.lax.axis_size(time_axes) - 1
            d_final_state = jnp.where(is_last, d_final_state, 0)
        history = _history(x, weight, initial_state, time_axes, channels_last)
        operands = x, weight, d_output, bias, history, same_sequence, d_final_state
        dx, dweight, dbias, d_history = kernel(*operands)
        to_previous = [(i + 1, i) for i in range(jax.lax.axis_size(time_axes) - 1)]
        from_next = jax.lax.ppermute(in_layout(d_history, channels_last), time_axes, to_previous)
        last = _last_inputs(dx, d_history.shape[-1], channels_last)
        # The barrier separates the sum from the update, which then runs in place; fused, XLA would copy the array.
        dx = last.set(jax.lax.optimization_barrier(last.get() + from_next))
        is_first = jax.lax.axis_index(time_axes) == 0
        d_states = []
        if initial_state is not None:
            d_states = [jax.lax.psum(jnp.where(is_first, d_history, 0), time_axes)]
    if sum_axes := (*axes.get("example", ()), *time_axes):
        dweight, dbias = jax.lax.psum((dweight, dbias), sum_axes)
    return dx, dweight, dbias, *d_states


def _needs_history(weight: Array, axes: ShardAxes) -> bool:
    return bool(axes.get("time")) and weight.shape[-1] > 1


def _last_inputs(x: Array, count: int, channels_last: bool) -> Any:
    """The last `count` inputs of a signal, as a ``.at`` reference."""
    return x.at[:, -count:] if channels_last else x.at[..., -count:]


def _history(
    x: Array, weight: Array, initial_state: Array | None, time_axes: tuple[str, ...], channels_last: bool
) -> Array:
    """The W - 1 inputs before a shard, as a state ``[B, C, W - 1]``: all that neighbours exchange."""
    last = _last_inputs(x, weight.shape[-1] - 1, channels_last).get()
    return _from_shard_before(_as_state(last, channels_last), initial_state, time_axes)


def _from_shard_before(values: Array, of_first: Array | None, time_axes: tuple[str, ...]) -> Array:
    """The values of the previous shard. The first shard gets `of_first`, or zeros for None."""
    received = jax.lax.ppermute(values, time_axes, [(i, i + 1) for i in range(jax.lax.axis_size(time_axes) - 1)])
    return received if of_first is None else jnp.where(jax.lax.axis_index(time_axes) == 0, of_first, received)


def _shard_same_sequence(kernel: ShardKernel, axes: ShardAxes, segment_ids: Array, *, width: int) -> Sequence[Array]:
    if not (time_axes := axes.get("time", ())):
        return kernel(segment_ids)
    before = _from_shard_before(segment_ids[:, 1 - width :], segment_ids[:, :1], time_axes)
    ids = jnp.concatenate([before, segment_ids], axis=1)
    return _reference_same_sequence(segment_ids, width=width, ids=ids)


def plan_parameters(x: Any, weight: Any, *_: Any, channels_last: bool, silu: bool, **presence: bool) -> dict[str, int]:
    return {
        "examples": x.shape[0],
        "channels": weight.shape[0],
        "length": x.shape[time_axis(channels_last)],
        "width": weight.shape[1],
        "channels_last": channels_last,
        "silu": silu,
        **{name: presence.get(name, False) for name in ("has_initial_state", "has_same_sequence", "has_d_final_state")},
        "element_bytes": np.dtype(x.dtype).itemsize,
    }


def limit_of_width(x: Any, weight: Any, *_: Any) -> str | None:
    return f"the filter has more than {MAX_WIDTH} taps" if weight.shape[1] > MAX_WIDTH else None


def _min_shard_sizes(*, sizes: Mapping[str, int], has_same_sequence: bool) -> dict[str, int]:
    """A shard must hold all W - 1 inputs that the next shard needs as its history. Ids for wide filters lack history,
    so their time is not split."""
    return {"time": sizes["time"] if has_same_sequence and sizes["tap"] > MAX_WIDTH else sizes["tap"] - 1}


def _operands(*names: str) -> Callable[..., NamedDimensions]:
    return lambda *, channels_last: dimensions_of(names, channels_last)


def optional_operands(*names: str) -> dict[str, str]:
    return {name: f"has_{name}" for name in names}


_OPTIONAL = ("bias", "initial_state", "same_sequence")
"""The optional operands of the convolution of a sequence and of its gradient."""

COMMON_FIELDS: Any = {
    "attributes": ("channels_last", "silu", "has_bias"),
    "dtypes": FLOATING_DTYPES,
    "guarantee": accumulated,
    "independent_dims": ("example", "channel"),
}
_SEQUENCE_FIELDS: Any = COMMON_FIELDS | {
    "attributes": (*COMMON_FIELDS["attributes"], "has_initial_state", "has_same_sequence"),
    "plan_parameters": plan_parameters,
    "limit": limit_of_width,
    "replicated_dims": ("tap", "state"),
    "min_shard_sizes": _min_shard_sizes,
}

# An op of its own, because XLA would all-gather the ids if time is split.
SAME_SEQUENCE = define_op(
    name="causal_conv1d_same_sequence",
    operands={"segment_ids": ("example", "time")},
    results={"same_sequence": ("example", "time")},
    result_dtypes=lambda *_: [np.uint8],
    reference=_reference_same_sequence,
    program=_reference_same_sequence,
    dtypes=INTEGER_DTYPES | {"int2", "uint2", "int4", "uint4"},
    guarantee=EXACT,
    min_shard_sizes=lambda *, width: {"time": width - 1},
    shard_program=_shard_same_sequence,
)

# Time of plain JAX / kernel: 0.9 between elementwise operations (H100, 13 loops); 0.75 to 0.85 up to 4 MB, 0.7 to 3.9
# from 5 to 21 MB (H200, 12 loops). Gradients: 0.3 for single steps (H100), with a pool 0.3 to 0.9 (H200, 30 loops),
# others of up to 4 MB 0.95 to 2.8 (H200, 6 loops). Two cores: gradients of up to 8 steps 0.4.
CAUSAL_CONV1D = define_op(
    name="causal_conv1d",
    operands=_operands("x", "weight", *_OPTIONAL),
    optional=optional_operands(*_OPTIONAL),
    results=lambda *, channels_last: dimensions_of(["y"], channels_last),
    reference=reference_convolution,
    xla_rules=(
        on_gpu("XLA fuses the convolution with its neighbours", fused),
        on_gpu("launch-bound", launch_bound),
    ),
    shard_program=_shard_forward,
    **_SEQUENCE_FIELDS,
)

ONE_STEP = at_most(time=1)
GRADIENT_OF_ONE_STEP = on_gpu("the gradient of a single step is elementwise", ONE_STEP)

# H200, channels first, time of plain JAX / kernel: 0.6 to 0.95 for 1 to 2.5 MB of `x` and a forward pass before it, 0.8
# to 1.15 without it (24 loops); 0.8 to 1.1 and 1.0 to 1.5 for 4 and 5 MB, more above. Channels last: 2 to 30.
CAUSAL_CONV1D_BACKWARD = define_op(
    name="causal_conv1d_backward",
    operands=_operands("x", "weight", "d_output", *_OPTIONAL, "d_final_state"),
    optional=optional_operands(*_OPTIONAL, "d_final_state"),
    results=lambda *, channels_last, has_initial_state: dimensions_of(
        ["dx", "dweight", "dbias", *["d_initial_state"] * has_initial_state], channels_last
    ),
    result_dtypes=lambda x, *_, has_initial_state: [
        x.dtype,
        *[accumulation_dtype(x.dtype)] * 2,
        *[x.dtype] * has_initial_state,
    ],
    reference=reference_backward,
    reduction_dims=("example", "time"),
    xla_rules=(
        GRADIENT_OF_ONE_STEP,
        on_gpu("launch-bound: XLA fuses the passes", param("channels_last", False), at_most(bytes=8 * MB)),
        on_cpu("rows are shorter than the vectors of the kernel", at_most(time=8)),
    ),
    shard_program=_shard_backward,
    **_SEQUENCE_FIELDS | {"attributes": (*_SEQUENCE_FIELDS["attributes"], "has_d_final_state")},
)


# ----------------------------------------------------------------------------------------------------------------------
# Derivative rules.


def gradients_of(
    params: Params, arrays: Mapping[str, Array | None], d_output: Array, d_final_state: Array | None
) -> dict[str, Array]:
    """The gradients of a convolution's arrays by name.

    Weight and bias gradients are in the accumulation dtype, and the bias gradient is always returned.
    """
    d_final_state = None if d_final_state is None or d_final_state.shape[2] == 0 else d_final_state
    arrays = {**arrays, "d_output": d_output, "d_final_state": d_final_state}
    gradients = CAUSAL_CONV1D_BACKWARD.of_arrays(arrays, **params.without("returns_state"))
    return dict(zip(("x", "weight", "bias", "initial_state"), gradients, strict=False))


def _forward(params: Params, **arrays: Any) -> tuple[Array | tuple[Array, Array], dict[str, Any]]:
    [y] = CAUSAL_CONV1D.of_arrays(arrays, **params.without("returns_state"))
    if not params["returns_state"]:
        return y, arrays
    states = arrays["x"], arrays["initial_state"], arrays["same_sequence"]
    state_length = arrays["weight"].shape[1] - 1
    state = _final_state(*states, state_length=state_length, channels_last=params["channels_last"])
    y, state = map_together((y, state), [array for array in arrays.values() if array is not None])
    return (y, state), arrays


def _backward(params: Params, arrays: dict[str, Any], cotangents: Any) -> dict[str, Array]:
    d_output, d_final_state = cotangents if params["returns_state"] else (cotangents, None)
    return gradients_of(params, arrays, d_output, d_final_state)


_convolution = KernelVjp("causal_conv1d", _forward, _backward)


# ----------------------------------------------------------------------------------------------------------------------
# Canonicalisation of arguments, shared by the whole family.


def state_shape(x: Array, weight: Array) -> tuple[int, int, int]:
    channels, width = weight.shape
    return x.shape[0], channels, width - 1


def canonicalize(
    name: str,
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None,
    activation: Activation,
    channels_last: bool,
    initial_state: ArrayLike | None,
    segment_ids: ArrayLike | None,
    given_x: str | None = None,
) -> tuple[Params, dict[str, Any]]:
    """Checks the arguments that all functions share. Returns the params, and the arrays of a convolution by name.

    `given_x`: the layout and shape of x before the caller added a dimension, for messages.
    """
    x, weight = floating_array(name, "x", x), as_array(name, "weight", weight)
    channels_last = flag(name, "channels_last", channels_last)
    layout = "[B, L, C] (channels_last=True)" if channels_last else "[B, C, L] (channels_last=False)"
    if x.ndim != 3:
        advice = "; x[None] is a batch of one" if x.ndim == 2 else ""
        raise ValueError(f"{name}: x must have shape {layout}, got {x.shape}{advice}")
    channel_axis, time_axis = (2, 1) if channels_last else (1, 2)
    examples, channels, length = (x.shape[axis] for axis in (0, channel_axis, time_axis))
    _check_parameter_dtype(name, "weight", weight, x)
    fits_x = f"to fit x of shape {given_x or f'{layout} = {x.shape}'}"
    if weight.ndim != 2 or weight.shape[0] != channels:
        advice = ""
        if weight.ndim == 3 and weight.shape[1] == 1:
            advice = "; weights [C, 1, W], as those of PyTorch, are weight[:, 0] here"
        elif weight.ndim > 0 and weight.shape[0] == length and not channels_last and given_x is None:
            advice = "; for x of shape [B, L, C] pass channels_last=True"
        elif weight.ndim == 2 and weight.shape[1] == channels:
            advice = "; weights [W, C] are weight.T here"
        raise ValueError(
            f"{name}: weight must have shape [C, W] = ({channels}, W) {fits_x}, got {weight.shape}{advice}"
        )
    width = weight.shape[1]
    if width == 0:
        raise ValueError(f"{name}: weight must have shape [C, W] with W >= 1, got {weight.shape}")
    if bias is not None:
        bias = as_array(name, "bias", bias)
        _check_parameter_dtype(name, "bias", bias, x)
        check_shape(name, "bias", bias, (channels,), "[C]", f" {fits_x}")
    check_choice(name, "activation", activation, None, "silu", "swish")
    if initial_state is not None:
        initial_state = _array_like_x(name, "initial_state", initial_state, x, state_shape(x, weight), "[B, C, W - 1]")
        initial_state = reshard_as(initial_state, x, (0, channel_axis, None)) if width > 1 else None
    same_sequence = None
    if segment_ids is not None:
        ids = integer_array(name, "segment_ids", segment_ids)
        check_shape(name, "segment_ids", ids, (examples, length), "[B, L]")
        ids = reshard_as(ids, x, (0, time_axis))
        if 1 < width <= MAX_WIDTH:
            [same_sequence] = SAME_SEQUENCE(ids, width=width)
        elif width > 1:
            same_sequence = ids  # a byte has too few bits for the taps; the call runs as plain JAX, which compares ids
    arrays = {
        "x": x,
        "weight": weight,
        "bias": bias,
        "initial_state": initial_state,
        "same_sequence": same_sequence,
    }
    return Params(channels_last=channels_last, silu=activation is not None), arrays


def _check_parameter_dtype(name: str, argument: str, parameter: Array, x: Array) -> None:
    if parameter.dtype not in (x.dtype, accumulation_dtype(x.dtype)):
        dtypes = " or ".join(dict.fromkeys((str(x.dtype), str(np.dtype(accumulation_dtype(x.dtype))))))
        raise TypeError(f"{name}: {argument} must have dtype {dtypes} where x has {x.dtype}, got {parameter.dtype}")


def with_dtype_of_x(name: str, argument: str, value: ArrayLike, x: Array) -> Array:
    array = as_array(name, argument, value)
    check_same_dtype(name, argument, array, "x", x)
    return array


def _array_like_x(
    name: str, argument: str, value: ArrayLike, x: Array, shape: tuple[int, ...], letters: str = ""
) -> Array:
    array = with_dtype_of_x(name, argument, value, x)
    check_shape(name, argument, array, shape, letters, " to fit x and weight")
    return array
