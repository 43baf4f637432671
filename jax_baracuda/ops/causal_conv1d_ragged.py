"""The causal convolution of ragged batches: flat tokens of sequences, whose states are in a pool of slots.

The file reads top to bottom: the public function, references in plain JAX, ops, derivative rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jax_baracuda._core.arrays import as_array, check_shape, in_range, index_array, reshard_as
from jax_baracuda._core.functions import Params
from jax_baracuda._core.op import NamedDimensions
from jax_baracuda._core.primitives import define_op
from jax_baracuda._core.public import public_function
from jax_baracuda._core.selection import Implementation, not_redirected
from jax_baracuda.ops.causal_conv1d import (
    MAX_WIDTH,
    Activation,
    canonicalize,
    causal_conv1d,
    dimensions_of,
    limit_of_width,
    optional_operands,
    plan_parameters,
    reference_convolution,
    with_dtype_of_x,
)
from jax_baracuda.ops.causal_conv1d_update import (
    POOL_FIELDS,
    checked_pool,
    pool_gradient_fields,
    states_of_slots,
    vjp_of_pools,
    with_added_states,
    with_states,
    written_slots,
)


@public_function(causal_conv1d)
def causal_conv1d_ragged(
    x: ArrayLike,
    states: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    cu_seqlens: ArrayLike,
    state_slots: ArrayLike,
    has_state: ArrayLike,
    activation: Activation = None,
    implementation: Implementation | None = None,
) -> tuple[Array, Array]:
    """:func:`causal_conv1d` of a ragged batch, for serving: flat tokens of N sequences, with states in a pool.

    Sequence n has the tokens ``cu_seqlens[n]`` to ``cu_seqlens[n + 1] - 1``. It begins with ``states[state_slots[n]]``,
    or with zeros, and the state from which it goes on is written to the same slot.

    Args:
      x: ``[T, C]``, the tokens of all sequences; a real floating dtype. float16, bfloat16, float32 and float64 have
        kernels; other dtypes run as plain JAX.
      states: ``[slots, C, K]`` with any K >= W - 1 and the dtype of `x`: a pool of states. The first W - 1 entries of a
        row are the state, the newest input last. Further entries keep their values; they are for `num_accepted` of
        :func:`causal_conv1d_update`.
      cu_seqlens: ``[N + 1]``, any integer dtype: the first token of each sequence, ascending, then the end of the last
        one. For fewer than N sequences, the last entries are equal: empty sequences leave the pool as it is. Tokens
        outside of all sequences are padding.
      state_slots: integers, one for each sequence: its slot in the pool. A sequence with a negative slot, or one beyond
        the pool, begins with zeros and its state is not kept.
      has_state: ``[N]``, bool: whether a sequence begins with the state in its slot. The others begin with zeros.

    Returns:
      ``(y, new_states)`` with the shapes and the dtype of `x` and `states`. y is zero for padding. If `states` is
      donated (or carried by a loop), it is updated in place, and only the rows of the slots are written. Each sequence
      begins with the state before the call. Of several sequences with the same slot, the state of the last one is kept,
      in every run.

    Numerical guarantees: y as in :func:`causal_conv1d`; the new states are exact. Entries of `cu_seqlens` below 0 and
    beyond T count as 0 and T. If it descends, results are unspecified, but nothing outside of the arrays is read or
    written.

    Gradient: with respect to `x`, `states`, `weight` and `bias`, as in :func:`causal_conv1d_backward`. dx of the first
    and last W - 1 tokens of a sequence with a state is a sum of rounded parts.

    Example:
      >>> import jax.numpy as jnp, jax_baracuda as jb
      >>> x = jnp.array([[1.0], [2.0], [5.0], [9.0]])  # two tokens of one sequence, one of another, and padding
      >>> states, weight = jnp.array([[[4.0]], [[7.0]]]), jnp.array([[-1.0, 1.0]])
      >>> y, states = jb.causal_conv1d_ragged(
      ...     x,
      ...     states,
      ...     weight,
      ...     cu_seqlens=jnp.array([0, 2, 3]),
      ...     state_slots=jnp.array([1, 0]),
      ...     has_state=jnp.array([False, True]),
      ... )
      >>> print(y[:, 0], states[:, 0, 0])
      [1. 1. 1. 0.] [5. 2.]
    """
    name = "causal_conv1d_ragged"
    x = as_array(name, "x", x)
    if x.ndim != 2:
        raise ValueError(f"{name}: x must have shape [T, C], the tokens of all sequences, got {x.shape}")
    given_x = f"[T, C] = {x.shape}"
    params, arrays = canonicalize(name, x[None], weight, bias, activation, True, None, None, given_x)
    states = with_dtype_of_x(name, "states", states, x)
    states = checked_pool(name, "states", states, arrays["weight"], num_written=0)
    states = reshard_as(states, x, (None, 1, None))
    slots = index_array(name, "state_slots", state_slots)
    if slots.ndim != 1:
        raise ValueError(f"{name}: state_slots must have shape [N], got {slots.shape}")
    fits_slots = f" for state_slots of shape [N] = {slots.shape}"
    starts = index_array(name, "cu_seqlens", cu_seqlens)
    check_shape(name, "cu_seqlens", starts, (slots.shape[0] + 1,), "[N + 1]", fits_slots)
    has_state = as_array(name, "has_state", has_state)
    if has_state.dtype != bool:
        raise TypeError(f"{name}: has_state must have dtype bool, got {has_state.dtype}; has_state != 0 has it")
    check_shape(name, "has_state", has_state, slots.shape, "[N]", fits_slots)
    y, new_states = _ragged(
        Params(silu=params["silu"]),
        states=states,
        starts=jnp.clip(starts, 0, x.shape[0]),
        slots=slots,
        has_state=has_state,
        **arrays,
    )
    return y[0], new_states


# ----------------------------------------------------------------------------------------------------------------------
# References in plain JAX. They compute all tokens as if no sequence had a state, then the first ones of those that do.


class _TokenRanges(NamedTuple):
    """Where sequences are among the tokens."""

    same_sequence: Array | None
    """``[1, T]``, as the convolution takes it."""
    is_token: Array
    """``[T]``: false for padding."""
    first_tokens: Array
    """``[N, W - 1]``: the first tokens of the sequences that begin with a state; T if there are fewer."""
    starts: Array
    ends: Array
    last_tokens: Array
    """``[N, W - 1]``: the last tokens of the sequences. Those before its start are entries of its state."""
    is_in_state: Array
    """``[N, W - 1]``: which of the last tokens these are."""
    read_slots: Array
    """``[N]``: the slots of the states with which sequences begin; -1 for zeros."""
    write_slots: Array
    """``[N]``: the slots to which sequences write; -1 for none."""


def _token_ranges(
    x: Array, states: Array, weight: Array, starts: Array, slots: Array, has_state: Array
) -> _TokenRanges:
    length, width = x.shape[1], weight.shape[1]
    num_sequences, state_length = slots.shape[0], width - 1
    time = jnp.arange(length)
    sequence = jnp.searchsorted(starts, time, side="right", method="scan_unrolled") - 1
    is_token = in_range(sequence, num_sequences)
    same_sequence = None
    if 1 < width <= MAX_WIDTH:
        position = time - starts[jnp.maximum(sequence, 0)]
        same_sequence = ((2 << jnp.minimum(position, state_length)) - 1).astype(jnp.uint8)[None]
    elif width > 1:
        same_sequence = sequence[None]
    begins, ends = starts[:-1], starts[1:]
    read_slots = jnp.where(has_state & (slots < states.shape[0]), slots, -1)
    first_tokens = begins[:, None] + jnp.arange(state_length)[None]
    first_tokens = jnp.where((read_slots[:, None] >= 0) & (first_tokens < ends[:, None]), first_tokens, length)
    last_tokens = ends[:, None] - state_length + jnp.arange(state_length)[None]
    is_in_state = last_tokens < begins[:, None]
    write_slots = written_slots(states, slots, ends > begins)
    return _TokenRanges(
        same_sequence, is_token, first_tokens, begins, ends, last_tokens, is_in_state, read_slots, write_slots
    )


def _tokens(x: Array, at: Array) -> Array:
    """Tokens ``[N, K, C]`` of ``[1, T, C]``; zeros beyond T."""
    taken = x[0].at[jnp.clip(at, 0, x.shape[1] - 1)].get(mode="promise_in_bounds")
    return jnp.where((at < x.shape[1])[..., None], taken, 0)


def _first_entries(count: int, state_length: int) -> Array:
    return jnp.broadcast_to(jnp.arange(state_length), (count, state_length))


def _reference_ragged(x: Array, states: Array, weight: Array, *others: Any, silu: bool) -> tuple[Array, Array]:
    *sequences, bias = others
    if 0 in x.shape:
        return jnp.zeros_like(x), states
    ranges = _token_ranges(x, states, weight, *sequences)
    num_sequences, state_length = ranges.first_tokens.shape
    [y] = reference_convolution(x, weight, bias, None, ranges.same_sequence, channels_last=True, silu=silu)
    if state_length > 0 and num_sequences > 0:
        history = states_of_slots(states, ranges.read_slots, _first_entries(num_sequences, state_length))
        first_tokens = _tokens(x, ranges.first_tokens)
        [y_first] = reference_convolution(first_tokens, weight, bias, history, None, channels_last=True, silu=silu)
        with not_redirected():
            y = y.at[0, ranges.first_tokens].set(y_first, mode="drop")
        in_state = jnp.clip(ranges.last_tokens - ranges.starts[:, None] + state_length, 0, state_length - 1)
        of_state = jnp.take_along_axis(history, in_state[:, None], axis=2)
        of_tokens = jnp.swapaxes(_tokens(x, ranges.last_tokens), 1, 2)
        new = jnp.where(ranges.is_in_state[:, None], of_state, of_tokens)
        states = with_states(states, ranges.write_slots, new)
    return jnp.where(ranges.is_token[None, :, None], y, 0), states


def _backward(
    convolution_backward: Callable[..., Sequence[Array]],
    x: Array,
    states: Array,
    weight: Array,
    *others: Any,
    silu: bool,
) -> list[Array]:
    """The gradients of x, states, weight and bias, with the gradient of a convolution of packed sequences."""
    *sequences, d_output, d_states, bias = others
    ranges = _token_ranges(x, states, weight, *sequences)
    (num_sequences, state_length), length = ranges.first_tokens.shape, x.shape[1]
    options = {"channels_last": True, "silu": silu}
    is_first_token = jnp.zeros(length, bool).at[ranges.first_tokens].set(True, mode="drop")
    d_other_tokens = jnp.where((ranges.is_token & ~is_first_token)[None, :, None], d_output, 0)
    dx, dweight, dbias = convolution_backward(
        x, weight, d_other_tokens, bias, None, ranges.same_sequence, None, **options
    )
    if state_length == 0 or num_sequences == 0:
        return [dx, d_states, dweight, dbias]
    first = _first_entries(num_sequences, state_length)
    history = states_of_slots(states, ranges.read_slots, first)
    of_first_tokens = convolution_backward(
        _tokens(x, ranges.first_tokens),
        weight,
        _tokens(d_output, ranges.first_tokens),
        bias,
        history,
        None,
        None,
        **options,
    )
    dx_first, dweight_first, dbias_first, d_history = of_first_tokens
    d_new = states_of_slots(d_states, ranges.write_slots, first)
    d_last_tokens = jnp.where(ranges.is_in_state[:, None], 0, d_new)
    with not_redirected():
        dx = dx.at[0, ranges.first_tokens].add(dx_first, mode="drop")
        last_tokens = jnp.where(ranges.is_in_state, length, ranges.last_tokens)
        dx = dx.at[0, last_tokens].add(jnp.swapaxes(d_last_tokens, 1, 2), mode="drop")
    # Entry k of the new state of a sequence of L tokens is entry k + L of the old one, if there is such an entry.
    count = (ranges.ends - ranges.starts)[:, None]
    of_new = jnp.clip(first - count, 0, state_length - 1)
    d_shifted = jnp.where((first >= count)[:, None], jnp.take_along_axis(d_new, of_new[:, None], axis=2), 0)
    d_states = with_states(d_states, ranges.write_slots, jnp.zeros_like(d_new))
    d_states = with_added_states(d_states, ranges.read_slots, first, d_history + d_shifted)
    return [dx, d_states, dweight + dweight_first, dbias + dbias_first]


# ----------------------------------------------------------------------------------------------------------------------
# Ops. The first has a native kernel. The second calls that of packed sequences.

_MAX_LENGTH = np.iinfo(np.int32).max


def _limit(x: Any, states: Any, weight: Any, *others: Any) -> str | None:
    return f"there are more than {_MAX_LENGTH} tokens" if x.shape[1] > _MAX_LENGTH else limit_of_width(x, weight)


def _dimensions(*names: str) -> NamedDimensions:
    """Those of the convolution of one example, which has all tokens."""
    of_sequences = {"slots": ("sequence",), "has_state": ("sequence",)}
    return dimensions_of(names, channels_last=True, starts=("start",), **of_sequences)


_OPERANDS = ("x", "states", "weight", "starts", "slots", "has_state")
_RAGGED_FIELDS: Any = POOL_FIELDS | {
    "attributes": ("silu", "has_bias"),
    "optional": optional_operands("bias"),
    "limit": _limit,
    "replicated_dims": ("example", "time", "slot", "state", "tap", "start", "sequence"),
}

CAUSAL_CONV1D_RAGGED = define_op(
    name="causal_conv1d_ragged",
    operands=_dimensions(*_OPERANDS, "bias"),
    results=_dimensions("y", "new_states"),
    reference=_reference_ragged,
    plan_parameters=lambda x, states, weight, *others, **params: plan_parameters(
        x, weight, channels_last=True, **params
    ),
    **_RAGGED_FIELDS,
)

CAUSAL_CONV1D_RAGGED_BACKWARD = define_op(
    name="causal_conv1d_ragged_backward",
    operands=_dimensions(*_OPERANDS, "d_output", "d_states", "bias"),
    results=_dimensions("dx", "d_old_states", "dweight", "dbias"),
    **_RAGGED_FIELDS | pool_gradient_fields(_backward, d_output_operand=len(_OPERANDS)),
)


# ----------------------------------------------------------------------------------------------------------------------
# Derivative rule.

_ragged = vjp_of_pools("causal_conv1d_ragged", CAUSAL_CONV1D_RAGGED, CAUSAL_CONV1D_RAGGED_BACKWARD)
