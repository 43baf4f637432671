"""The next inputs of sequences, for decoding: with a state of their own, or in a slot of a pool of states.

The file reads top to bottom: the public function, references in plain JAX, ops (one per native kernel), derivative
rules, canonicalisation of arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jax_baracuda._core.arrays import (
    accumulation_dtype,
    as_array,
    check_shape,
    flag,
    in_range,
    index_array,
    reshard_as,
    reshard_like,
)
from jax_baracuda._core.autodiff import KernelVjp
from jax_baracuda._core.functions import Params, with_named
from jax_baracuda._core.op import NamedDimensions, Op
from jax_baracuda._core.primitives import define_op
from jax_baracuda._core.public import public_function
from jax_baracuda._core.rules import fused, launch_bound, on_cpu, on_gpu
from jax_baracuda._core.selection import Implementation, not_redirected
from jax_baracuda.ops.causal_conv1d import (
    CAUSAL_CONV1D_BACKWARD,
    COMMON_FIELDS,
    GRADIENT_OF_ONE_STEP,
    ONE_STEP,
    Activation,
    canonicalize,
    causal_conv1d,
    dimensions_of,
    gradients_of,
    in_layout,
    limit_of_width,
    one_step,
    optional_operands,
    plain_convolution,
    plan_parameters,
    reference_backward,
    reference_convolution,
    state_shape,
    time_axis,
    widened,
    with_dtype_of_x,
)
from jax_baracuda.ops.write_rows import is_last_of_slot


@public_function(causal_conv1d)
def causal_conv1d_update(
    x: ArrayLike,
    state: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    activation: Activation = None,
    channels_last: bool = False,
    state_slots: ArrayLike | None = None,
    num_accepted: ArrayLike | None = None,
    implementation: Implementation | None = None,
) -> tuple[Array, Array]:
    """:func:`causal_conv1d` of the next inputs of a sequence, for decoding. The state holds the previous inputs.

    Args:
      x: ``[B, C]``, one new input, or ``[B, C, T]``, several inputs (``[B, T, C]`` with `channels_last`); a real
        floating dtype. float16, bfloat16, float32 and float64 have kernels; other dtypes run as plain JAX.
      state: ``[B, C, K]`` with any K >= W - 1 and the dtype of `x`: the last K inputs, the newest last; zeros at the
        start of a sequence. Or, with `state_slots`, a pool of states ``[slots, C, K]``, as of
        :func:`causal_conv1d_ragged`: the first W - 1 entries of a row are the state, the newest input last.
      state_slots: integers, one for each sequence: its slot in the pool. A sequence with a negative slot, or one beyond
        the pool, begins with zeros and its state is not kept.
      num_accepted: ``[B]``, any integer dtype, for speculative decoding with `state_slots`: how many of the inputs of
        the previous call were accepted, and 1 in the first call after :func:`causal_conv1d_ragged`. Numbers are clipped
        to 1 ... K - W + 2. Needs K >= W - 2 + T. The previous state begins at entry ``num_accepted - 1`` of its row.
        The new row holds the last W - 2 inputs of that state, then all T inputs. Further entries keep their values.
        Calls without inputs (T = 0) leave the pool as it is, so the next call passes the same numbers. A filter of one
        tap (W = 1) has no state: the numbers have no effect, and nothing is written.

    Returns:
      ``(y, new_state)``. y has the shape and dtype of `x`. The new state has the shape and dtype of `state`; it is
      written in place if `state` is donated or carried by a loop.

      Without `state_slots`, the new state holds the last K inputs: the oldest drop out. With `state_slots`, it is the
      pool, in which only the rows of the slots change. Their first W - 1 entries are the last W - 1 inputs, unless
      `num_accepted` is given. Each sequence begins with the state before the call. Of several sequences with the same
      slot, the state of the last one is kept, in every run.

    Numerical guarantees: y as in :func:`causal_conv1d`; the new state is exact.

    Gradient: with respect to all four arrays, as in :func:`causal_conv1d_backward`. With a pool, gradients of inputs
    and parameters are sums of rounded parts.

    Example:
      >>> import jax.numpy as jnp, jax_baracuda as jb
      >>> weight, state = jnp.array([[-1.0, 1.0]]), jnp.zeros((1, 1, 1))
      >>> for number in (1.0, 4.0, 9.0):
      ...     y, state = jb.causal_conv1d_update(jnp.array([[number]]), state, weight)
      ...     print(y, state)
      [[1.]] [[[1.]]]
      [[3.]] [[[4.]]]
      [[5.]] [[[9.]]]
    """
    name = "causal_conv1d_update"
    x = as_array(name, "x", x)
    channels_last = flag(name, "channels_last", channels_last)
    letters = "[B, T, C] (channels_last=True)" if channels_last else "[B, C, T] (channels_last=False)"
    if x.ndim not in (2, 3):
        advice = "; x[None] is a batch of one" if x.ndim == 1 else ""
        raise ValueError(
            f"{name}: x must have shape [B, C] or {letters}, with or without state_slots, got {x.shape}{advice}"
        )
    time = time_axis(channels_last)
    is_single = x.ndim == 2
    given_x = f"[B, C] = {x.shape}" if is_single else None
    x = jnp.expand_dims(x, time) if is_single else x
    params, arrays = canonicalize(name, x, weight, bias, activation, channels_last, None, None, given_x)
    state = with_dtype_of_x(name, "state", state, arrays["x"])
    if state_slots is None:
        if num_accepted is not None:
            raise ValueError(f"{name}: num_accepted needs state_slots; for a state [B, C, K] pass jnp.arange(B)")
        y, new_state = _update(params, state=_checked_state(name, state, arrays), **arrays)
    else:
        y, new_state = _update_of_pool(name, params, arrays, state, state_slots, num_accepted)
    return jnp.squeeze(y, time) if is_single else y, new_state


def _checked_state(name: str, state: Array, arrays: Mapping[str, Any]) -> Array:
    examples, channels, state_length = state_shape(arrays["x"], arrays["weight"])
    if state.ndim != 3 or state.shape[:2] != (examples, channels) or state.shape[2] < state_length:
        advice = ""
        if state.ndim == 3 and state.shape[1] == channels and state.shape[0] != examples:
            advice = "; a pool of states needs state_slots"
        raise ValueError(
            f"{name}: state must have shape [B, C, K] = ({examples}, {channels}, K) with K >= W - 1 = "
            f"{state_length} to fit x and weight, got {state.shape}{advice}"
        )
    return state


def _update_of_pool(
    name: str, params: Params, arrays: dict[str, Any], pool: Array, state_slots: Any, num_accepted: Any
) -> tuple[Array, Array]:
    x, weight, channels_last = arrays["x"], arrays["weight"], params["channels_last"]
    num_inputs = x.shape[time_axis(channels_last)]
    if num_accepted is not None:
        num_accepted = index_array(name, "num_accepted", num_accepted)
        check_shape(name, "num_accepted", num_accepted, x.shape[:1], "[B]")
    pool = checked_pool(name, "state", pool, weight, _num_written(weight.shape[1], num_inputs, num_accepted))
    slots = index_array(name, "state_slots", state_slots)
    check_shape(name, "state_slots", slots, x.shape[:1], "[B]")
    pool = reshard_as(pool, x, (None, 2 if channels_last else 1, None))
    return _pool_update(params, states=pool, slots=slots, num_accepted=num_accepted, **arrays)


# ----------------------------------------------------------------------------------------------------------------------
# References in plain JAX.


def _reference_update(
    x: Array, state: Array, weight: Array, bias: Array | None, *, channels_last: bool, silu: bool
) -> tuple[Array, Array]:
    time = time_axis(channels_last)
    recent = state[..., state.shape[-1] - (weight.shape[-1] - 1) :]
    inputs, *others = widened(x, x, weight, bias, recent)
    if x.shape[time] == 1:
        z = jnp.expand_dims(one_step(jnp.squeeze(inputs, time), *others), time)
        y = z * jax.nn.sigmoid(z) if silu else z
    else:
        y = plain_convolution(inputs, *others, channels_last=channels_last, silu=silu)
    new_state = jnp.concatenate([state, in_layout(x, channels_last)], axis=-1)
    return y.astype(x.dtype), new_state[..., new_state.shape[-1] - state.shape[-1] :]


# The states of a pool that sequences read and write.


def states_of_slots(pool: Array, slots: Array, entries: Array) -> Array:
    """Entries ``[N, K]`` of the rows of slots, as ``[N, C, K]``; zeros for slots outside of the pool."""
    if pool.shape[0] == 0:
        return jnp.zeros((slots.shape[0], pool.shape[1], entries.shape[1]), pool.dtype)
    rows = jnp.clip(slots, 0, pool.shape[0] - 1)
    taken = pool.at[rows[:, None], :, entries].get(mode="promise_in_bounds")
    return jnp.where(in_range(slots, pool.shape[0])[:, None, None], jnp.swapaxes(taken, 1, 2), 0)


def written_slots(pool: Array, slots: Array, has_inputs: Array | None = None) -> Array:
    """The slots of the sequences that write their states: the last ones of their slots. The others have slot -1.

    `has_inputs` says which sequences are not empty. Default: all.
    """
    writes = in_range(slots, pool.shape[0])
    writes = writes if has_inputs is None else writes & has_inputs
    slots = jnp.where(writes, slots, -1)
    return jnp.where(is_last_of_slot(slots), slots, -1)


def with_states(pool: Array, writers: Array, states: Array) -> Array:
    """The pool with states ``[N, C, K]`` in the first K entries of the rows of their slots."""
    rows = jnp.where(writers >= 0, writers, pool.shape[0] + jnp.arange(writers.shape[0]))
    with not_redirected():
        return pool.at[rows, :, : states.shape[2]].set(states, mode="drop", unique_indices=True)


def with_added_states(pool: Array, slots: Array, entries: Array, states: Array) -> Array:
    """The pool with ``[N, C, K]`` added to these entries ``[N, K]`` of the rows of slots."""
    rows = jnp.where(in_range(slots, pool.shape[0]), slots, pool.shape[0])
    with not_redirected():
        return pool.at[rows[:, None], :, entries].add(jnp.swapaxes(states, 1, 2).astype(pool.dtype), mode="drop")


def _num_written(width: int, num_inputs: int, num_accepted: Array | None) -> int:
    """The number of entries of a row that an update of a pool writes."""
    return 0 if width == 1 else width - 1 if num_accepted is None else width - 2 + num_inputs


def _entries(pool: Array, width: int, num_sequences: int, num_accepted: Array | None) -> Array:
    """The entries ``[N, W - 1]`` of the rows that are the states before an update."""
    first = jnp.zeros(num_sequences, jnp.int32)
    if num_accepted is not None:
        first = jnp.clip(num_accepted, 1, pool.shape[2] - width + 2) - 1
    return first[:, None] + jnp.arange(width - 1)[None]


def _reference_pool_update(
    x: Array,
    states: Array,
    weight: Array,
    slots: Array,
    bias: Array | None,
    num_accepted: Array | None,
    *,
    channels_last: bool,
    silu: bool,
) -> tuple[Array, Array]:
    width, num_inputs = weight.shape[1], x.shape[time_axis(channels_last)]
    if 0 in x.shape:
        return jnp.zeros_like(x), states
    history = states_of_slots(states, slots, _entries(states, width, x.shape[0], num_accepted))
    [y] = reference_convolution(x, weight, bias, history, None, channels_last=channels_last, silu=silu)
    inputs = jnp.concatenate([history, in_layout(x, channels_last)], axis=2)
    num_written = _num_written(width, num_inputs, num_accepted)
    return y, with_states(states, written_slots(states, slots), inputs[..., inputs.shape[2] - num_written :])


def _pool_update_backward(
    convolution_backward: Callable[..., Sequence[Array]],
    x: Array,
    states: Array,
    weight: Array,
    slots: Array,
    *others: Any,
    channels_last: bool,
    silu: bool,
) -> list[Array]:
    """The gradients of x, states, weight and bias, with the gradient of a convolution of sequences with states."""
    d_output, d_states, bias, num_accepted = others
    width, num_inputs = weight.shape[1], x.shape[time_axis(channels_last)]
    entries = _entries(states, width, x.shape[0], num_accepted)
    writers = written_slots(states, slots)
    num_written = _num_written(width, num_inputs, num_accepted)
    first = jnp.broadcast_to(jnp.arange(num_written), (x.shape[0], num_written))
    d_written = states_of_slots(d_states, writers, first)
    history = states_of_slots(states, slots, entries) if width > 1 else None
    dx, dweight, dbias, *d_history = convolution_backward(
        x, weight, d_output, bias, history, None, None, channels_last=channels_last, silu=silu
    )
    d_inputs = jnp.pad(d_written, [(0, 0), (0, 0), (width - 1 + num_inputs - num_written, 0)])
    dx = dx + in_layout(d_inputs[..., width - 1 :], channels_last)
    d_states = with_states(d_states, writers, jnp.zeros_like(d_written))
    if width > 1:
        d_states = with_added_states(d_states, slots, entries, d_history[0] + d_inputs[..., : width - 1])
    return [dx, d_states, dweight, dbias]


# ----------------------------------------------------------------------------------------------------------------------
# Ops: one per native kernel. The gradients with pools call the kernel of the gradient of the convolution.


CAUSAL_CONV1D_UPDATE = define_op(
    name="causal_conv1d_update",
    operands=lambda *, channels_last: dimensions_of(("x", "state", "weight", "bias"), channels_last),
    optional=optional_operands("bias"),
    results=lambda *, channels_last: dimensions_of(["y", "new_state"], channels_last),
    reference=_reference_update,
    plan_parameters=lambda x, state, *others, **params: (
        plan_parameters(x, *others, **params) | {"state_length": state.shape[2]}
    ),
    limit=lambda x, state, *others: limit_of_width(x, *others),
    # Time of plain JAX / kernel: between elementwise operations 0.76 (H100, 7 loops); not in place, 0.2 to 3 MB, 0.8 to
    # 1.1, with their gradients 0.7 to 0.95 (H200, 18 loops).
    xla_rules=(
        on_gpu("XLA fuses a step with its neighbours", fused),
        on_gpu("launch-bound, and XLA computes the new state with the output", launch_bound),
    ),
    replicated_dims=("time", "tap", "state"),
    in_place={1: 1},
    **COMMON_FIELDS,
)


def _pool_operands(*more: str, channels_last: bool) -> NamedDimensions:
    names = ("x", "states", "weight", "slots", *more, "bias", "num_accepted")
    return dimensions_of(names, channels_last, slots=("example",), num_accepted=("example",))


POOL_FIELDS: Any = COMMON_FIELDS | {"independent_dims": ("channel",), "in_place": {1: 1}}


def pool_gradient_fields(backward: Callable[..., list[Array]], d_output_operand: int) -> dict[str, Any]:
    """The fields of a gradient with respect to x, states, weight and bias.

    Args:
      backward: ``(gradient of the convolution, x, states, weight, *operands, **params) -> gradients``, for tokens
        and channels.
      d_output_operand: the position of d_output, which d_states follows. The latter is updated in place.
    """

    def gradients(convolution_backward: Callable[..., Sequence[Array]], *operands: Any, **params: Any) -> list[Array]:
        x, _, weight = operands[:3]
        if 0 in x.shape:
            of_parameters = (
                jnp.zeros(shape, accumulation_dtype(x.dtype)) for shape in (weight.shape, weight.shape[:1])
            )
            return [jnp.zeros_like(x), operands[d_output_operand + 1], *of_parameters]
        return with_named(backward, params)(convolution_backward, *operands)

    def reference(*operands: Any, **params: Any) -> list[Array]:
        x, states, wide = *operands[:2], list(operands)
        for i in (0, 1, d_output_operand, d_output_operand + 1):
            [wide[i]] = widened(x, operands[i])
        dx, d_states, *of_parameters = gradients(reference_backward, *wide, **params)
        return [dx.astype(x.dtype), d_states.astype(states.dtype), *of_parameters]

    return {
        "result_dtypes": lambda x, *_: [x.dtype, x.dtype, *[accumulation_dtype(x.dtype)] * 2],
        "reference": reference,
        "program": functools.partial(gradients, CAUSAL_CONV1D_BACKWARD.kernel),
        "in_place": {d_output_operand + 1: 1},
    }


_POOL_UPDATE_FIELDS: Any = POOL_FIELDS | {
    "attributes": ("channels_last", "silu", "has_bias", "has_num_accepted"),
    "optional": optional_operands("bias", "num_accepted"),
    "limit": lambda x, states, weight, *others: limit_of_width(x, weight),
    "replicated_dims": ("example", "time", "slot", "state", "tap"),
}

CAUSAL_CONV1D_UPDATE_POOL = define_op(
    name="causal_conv1d_update_pool",
    operands=lambda *, channels_last: _pool_operands(channels_last=channels_last),
    results=lambda *, channels_last: dimensions_of(["y", "new_states"], channels_last),
    reference=_reference_pool_update,
    plan_parameters=lambda x, states, weight, *others, has_num_accepted, **params: (
        plan_parameters(x, weight, **params) | {"state_length": states.shape[2], "has_num_accepted": has_num_accepted}
    ),
    **_POOL_UPDATE_FIELDS,
)

CAUSAL_CONV1D_UPDATE_POOL_BACKWARD = define_op(
    name="causal_conv1d_update_pool_backward",
    operands=lambda *, channels_last: _pool_operands("d_output", "d_states", channels_last=channels_last),
    results=lambda *, channels_last: dimensions_of(["dx", "d_old_states", "dweight", "dbias"], channels_last),
    # Two busy cores, time of plain JAX / kernel: 0.2 to 0.5 in float32, 0.5 to 1.1 in bfloat16 (2 calls each).
    xla_rules=(GRADIENT_OF_ONE_STEP, on_cpu("rows are shorter than the vectors of the kernel", ONE_STEP)),
    **_POOL_UPDATE_FIELDS | pool_gradient_fields(_pool_update_backward, d_output_operand=4),
)

# ----------------------------------------------------------------------------------------------------------------------
# Derivative rules.


def _forward(op: Op, params: Params, **arrays: Any) -> tuple[tuple[Array, Array], dict[str, Any]]:
    y, new_states = op.of_arrays(arrays, **params)
    return (y, new_states), arrays


def _update_backward(params: Params, arrays: dict[str, Any], cotangents: tuple[Array, Array]) -> dict[str, Array]:
    """The last W - 1 inputs of the new state are the convolution's final state; the others are older inputs."""
    x, state, weight = arrays["x"], arrays["state"], arrays["weight"]
    d_output, d_new_state = cotangents
    # Replicated along time, because slices of a state need not divide evenly over the devices.
    state, d_new_state = reshard_as(state, state, (0, 1, None)), reshard_as(d_new_state, d_new_state, (0, 1, None))
    state_length = weight.shape[1] - 1
    num_older = state.shape[2] - state_length
    recent = {
        "x": x,
        "weight": weight,
        "bias": arrays["bias"],
        "initial_state": state[..., num_older:] if state_length > 0 else None,
    }
    gradients = gradients_of(params, recent, d_output, d_new_state[..., num_older:])
    dx = gradients["x"]
    d_state = gradients.get("initial_state", jnp.zeros((*state.shape[:2], 0), state.dtype))
    if num_older > 0:
        time = time_axis(params["channels_last"])
        # The cotangents of the new state's older inputs, at their places in the concatenation of state and new inputs.
        nothing = [(0, 0)] * 2
        d_inputs = jnp.pad(d_new_state[..., :num_older], [*nothing, (x.shape[time], state_length)])
        d_state = reshard_like(jnp.pad(d_state, [*nothing, (num_older, 0)]), jax.typeof(state))
        d_state += reshard_like(d_inputs[..., : state.shape[2]], jax.typeof(state))
        older = in_layout(d_inputs[..., state.shape[2] :], params["channels_last"])
        dx = reshard_like(dx, jax.typeof(x)) + reshard_like(older, jax.typeof(x))
    return {"x": dx, "state": d_state, "weight": gradients["weight"], "bias": gradients["bias"]}


_update = KernelVjp("causal_conv1d_update", functools.partial(_forward, CAUSAL_CONV1D_UPDATE), _update_backward)


def vjp_of_pools(name: str, op: Op, backward_op: Op) -> KernelVjp:
    """Binds an op ``(x, states, ...) -> (y, new states)`` to its gradient. The params are those of both ops."""

    def backward(params: Params, arrays: dict[str, Any], cotangents: tuple[Array, Array]) -> dict[str, Array]:
        d_output, d_states = cotangents
        gradients = backward_op.of_arrays({**arrays, "d_output": d_output, "d_states": d_states}, **params)
        return dict(zip(("x", "states", "weight", "bias"), gradients, strict=True))

    return KernelVjp(name, functools.partial(_forward, op), backward)


_pool_update = vjp_of_pools("causal_conv1d_update", CAUSAL_CONV1D_UPDATE_POOL, CAUSAL_CONV1D_UPDATE_POOL_BACKWARD)


# ----------------------------------------------------------------------------------------------------------------------
# Canonicalisation of the arguments of pools.


def checked_pool(name: str, argument: str, pool: Array, weight: Array, num_written: int) -> Array:
    """A pool of states whose rows have room for `num_written` inputs."""
    channels, width = weight.shape
    min_length = max(width - 1, num_written)
    if pool.ndim != 3 or pool.shape[1] != channels or pool.shape[2] < min_length:
        why = "W - 1" if min_length == width - 1 else "W - 2 + T"
        raise ValueError(
            f"{name}: {argument} must have shape [slots, C, K] = (slots, {channels}, K) with K >= {why} = {min_length} "
            f"to fit x and weight, got {pool.shape}"
        )
    return pool
