"""Rotary position embedding (Su et al., 2021): rotates pairs of features by angles proportional to the position.

Each angle is computed on the fly from the position and the pair's frequency, with more bits than the result has, so a
position of a million is as exact as position one. Kernels use no tables. Plain JAX, which XLA fuses with its
neighbours, reads sines and cosines from constants if positions and frequencies are known. The transpose of a rotation
is the inverse rotation, so the gradient is the same kernel, and only the positions are kept for it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jax_baracuda._core import jax_versions
from jax_baracuda._core.arrays import (
    FLOATING_DTYPES,
    accumulation_dtype,
    as_array,
    check_choice,
    check_same_dtype,
    flag,
    floating_array,
    integer_array,
    real_number,
    reshard_to,
    static_type_error,
    whole_number,
)
from jax_baracuda._core.autodiff import vjp_of_linear
from jax_baracuda._core.functions import Params
from jax_baracuda._core.guarantees import accumulated
from jax_baracuda._core.op import NamedDimensions
from jax_baracuda._core.primitives import define_op
from jax_baracuda._core.public import public_function
from jax_baracuda._core.rules import (
    KB,
    MB,
    Traits,
    at_least,
    at_most,
    fused,
    in_cache,
    launch_bound,
    on_cpu,
    on_gpu,
    param,
)
from jax_baracuda._core.selection import Implementation
from jax_baracuda._core.sharding import ShardAxes, ShardKernel
from jax_baracuda.ops.rope_frequencies import DEFAULT_BASE, rope_frequencies

HeadLayout = Literal["BHSD", "BSHD"]


@public_function()
def rope(
    x: ArrayLike,
    positions: ArrayLike | None = None,
    *,
    base: float = DEFAULT_BASE,
    interleaved: bool = True,
    layout: HeadLayout | None = None,
    rotary_dim: int | None = None,
    rotary_offset: int = 0,
    sections: Sequence[int] | None = None,
    sections_interleaved: bool = False,
    inv_freq: ArrayLike | None = None,
    scale: float = 1.0,
    implementation: Implementation | None = None,
) -> Array:
    """Rotary position embedding (Su et al., 2021).

    ``y[2i] = scale * (x[2i] * cos(t) - x[2i+1] * sin(t))``, ``y[2i+1] = scale * (x[2i+1] * cos(t) + x[2i] * sin(t))``
    with ``t = position * inv_freq[i]``, for every head at every position of every example.

    Args:
      x: ``[B, H, S, D]``, or ``[B, S, H, D]`` with layout "BSHD"; a real floating dtype. float16, bfloat16, float32 and
        float64 have kernels; other dtypes run as plain JAX.
      positions: integers of any dtype, also negative, but no floats: ``[S]``, or ``[B, S]`` for separate positions per
        example (``[1, S]`` is ``[S]``). Default: 0 to S - 1, so decoding one token must pass its position; under
        ``jax.shard_map``, S is the length of the device's part of the sequence. uint64, and uint32 while 64-bit types
        are off, run as plain JAX. NumPy arrays of 64 bits must hold numbers of 32 bits while 64-bit types are off. With
        `sections`, one row for each: ``[sections, S]`` or ``[sections, B, S]``.
      base: finite and positive, 10,000 by default; the frequencies are ``base^(-2i/rotary_dim)``.
      interleaved: True: pairs are adjacent, ``(2i, 2i + 1)``. False: they are half of the rotated features apart,
        ``(i, i + rotary_dim/2)``, as in GPT-NeoX, and in Llama's weights as Hugging Face publishes them. The shapes
        are the same: the wrong choice gives wrong numbers, and no error.
      layout: "BHSD" or "BSHD", the order of batch, heads, sequence and features. Default: "BHSD"; required if there are
        as many heads as positions, because the shapes would not reveal a mistake.
      rotary_dim: the number of features to rotate; even. They are neighbours, and the others pass through unchanged.
        Default: all from `rotary_offset` on, whose number then must be even.
      rotary_offset: the first rotated feature. 0 by default; D - rotary_dim if the rotated features stand last in the
        head, as in DeepSeek's MLA.
      sections: for tokens with several positions, as in M-RoPE (Qwen2-VL: temporal, height, width): the number of pairs
        that each row of `positions` rotates, such as ``(16, 24, 24)``, which sum to ``rotary_dim/2``. Default: one
        position per token. More than 4 sections run as plain JAX.
      sections_interleaved: False: pairs of a section are neighbours, as in Qwen2-VL. True: sections take turns, as in
        Qwen3-VL: pair i belongs to section ``j = i % len(sections)`` if ``i < len(sections) * sections[j]``, else to
        section 0.
      inv_freq: ``[rotary_dim/2]``, float64 or integers: frequencies that replace those of `base`, such as the result of
        :func:`rope_frequencies`. A constant: no gradient flows to it. NumPy arrays keep all bits of float64, even with
        64-bit types off. Or ``[2, rotary_dim/2]``, floating, whose two rows are added. Traced arrays can then be
        float32: ``high = inv_freq.astype("float32")`` and ``low = inv_freq - high``.
      scale: a finite number that multiplies sine and cosine.

    Returns:
      The rotated features, with the shape and dtype of `x`.

    Raises:
      TypeError: an argument is not an array or number, has an unsuitable dtype, or is a traced value where a
        Python value is needed.
      ValueError: shapes do not fit; `layout` is unknown, or required and missing; `rotary_dim` is odd or out of range;
        `rotary_offset` is out of range; `sections` do not sum to ``rotary_dim/2``, or lack positions; `base` or
        `scale` is not finite, or `base` is not positive; NumPy `positions` need 64-bit types of JAX.

    In place: if `jax.jit` donates an array that is passed to this function unchanged, the result is written to its
    memory.

    Numerical guarantees: for positions from -2^20 to 2^20, sine and cosine are those of the exact angle, whatever the
    dtype; beyond, the error of the angle grows with the position. float32 results are within 2 units in the last place
    of the pair's length. 16-bit results are computed in float32 and rounded once, which gives the rounded exact result
    for at least 99% of numbers. float64 multiplies position and frequency in float64. Features that are not rotated are
    exact, and NaN and infinities stay in their pair. Bit-equal from run to run.

    Gradient: :func:`rope_backward`, a kernel as well. No features are kept for the backward pass.

    Example:
      >>> import jax.numpy as jnp, jax_baracuda as jb
      >>> x = jnp.ones((2, 4, 16, 8))  # [B, H, S, D]
      >>> y = jb.rope(x)
      >>> print(y.shape, y[0, 0, 0])  # nothing turns at position 0
      (2, 4, 16, 8) [1. 1. 1. 1. 1. 1. 1. 1.]
      >>> print(jnp.allclose(jb.rope(x, jnp.arange(16)), y))
      True
    """
    options = Rotation(base, interleaved, rotary_dim, rotary_offset, sections, sections_interleaved, inv_freq, scale)
    params, operands = _canonicalize("rope", {"x": x}, positions, layout, options)
    [y] = _rope(params, *operands)
    return y


@public_function(rope, has_twin=False)
def rope_backward(
    d_output: ArrayLike,
    positions: ArrayLike | None = None,
    *,
    base: float = DEFAULT_BASE,
    interleaved: bool = True,
    layout: HeadLayout | None = None,
    rotary_dim: int | None = None,
    rotary_offset: int = 0,
    sections: Sequence[int] | None = None,
    sections_interleaved: bool = False,
    inv_freq: ArrayLike | None = None,
    scale: float = 1.0,
    implementation: Implementation | None = None,
) -> Array:
    """Gradient of :func:`rope`: the rotation by the negative angles.

    Args:
      d_output: the cotangent of the rotated features, with the shape and dtype of `x`.

    Returns:
      The cotangent of `x`, with the shape and dtype of `d_output`.

    Gradient: :func:`rope`. Derivatives of any order and in either mode exist.

    Example:
      >>> import jax, jax.numpy as jnp, jax_baracuda as jb
      >>> x = d_output = jnp.ones((1, 2, 16, 8))
      >>> y, vjp = jax.vjp(jb.rope, x)
      >>> print(jnp.array_equal(vjp(d_output)[0], jb.rope_backward(d_output)))
      True
    """
    options = Rotation(base, interleaved, rotary_dim, rotary_offset, sections, sections_interleaved, inv_freq, scale)
    params, operands = _canonicalize("rope_backward", {"d_output": d_output}, positions, layout, options)
    [dx] = ROPE(*operands, **params | {"inverse": True})
    return dx


@public_function(rope)
def rope_qk(
    q: ArrayLike,
    k: ArrayLike,
    positions: ArrayLike | None = None,
    *,
    base: float = DEFAULT_BASE,
    interleaved: bool = True,
    layout: HeadLayout | None = None,
    rotary_dim: int | None = None,
    rotary_offset: int = 0,
    sections: Sequence[int] | None = None,
    sections_interleaved: bool = False,
    inv_freq: ArrayLike | None = None,
    scale: float = 1.0,
    implementation: Implementation | None = None,
) -> tuple[Array, Array]:
    """:func:`rope` of queries and keys in one launch, which computes each sine and cosine once for both.

    Args:
      q: as `x` of :func:`rope`.
      k: as `q`, with the same dtype, B, S and D; the number of heads may differ.

    Returns:
      ``(q, k)``, rotated, with the shapes and the dtype of `q` and `k`.

    Gradient: :func:`rope_qk_backward`, a kernel as well. No features are kept for the backward pass.

    Example:
      >>> import jax.numpy as jnp, jax_baracuda as jb
      >>> q, k = jnp.ones((2, 8, 16, 4)), jnp.ones((2, 2, 16, 4))  # [B, H, S, D], more queries than keys
      >>> q_rotated, k_rotated = jb.rope_qk(q, k, interleaved=False)
      >>> print(q_rotated.shape, k_rotated.shape, jnp.array_equal(k_rotated, jb.rope(k, interleaved=False)))
      (2, 8, 16, 4) (2, 2, 16, 4) True
    """
    options = Rotation(base, interleaved, rotary_dim, rotary_offset, sections, sections_interleaved, inv_freq, scale)
    params, operands = _canonicalize("rope_qk", {"q": q, "k": k}, positions, layout, options)
    q, k = _rope(params, *operands)
    return q, k


@public_function(rope, has_twin=False)
def rope_qk_backward(
    d_q_output: ArrayLike,
    d_k_output: ArrayLike,
    positions: ArrayLike | None = None,
    *,
    base: float = DEFAULT_BASE,
    interleaved: bool = True,
    layout: HeadLayout | None = None,
    rotary_dim: int | None = None,
    rotary_offset: int = 0,
    sections: Sequence[int] | None = None,
    sections_interleaved: bool = False,
    inv_freq: ArrayLike | None = None,
    scale: float = 1.0,
    implementation: Implementation | None = None,
) -> tuple[Array, Array]:
    """Gradient of :func:`rope_qk`: the rotation by the negative angles.

    Args:
      d_q_output: the cotangent of the rotated queries, with the shape and dtype of `q`.
      d_k_output: the cotangent of the rotated keys, with the shape and dtype of `k`.

    Returns:
      The cotangents of `q` and `k`, with the shapes and the dtype of `d_q_output` and `d_k_output`.

    Gradient: :func:`rope_qk`. Derivatives of any order and in either mode exist.

    Example:
      >>> import jax, jax.numpy as jnp, jax_baracuda as jb
      >>> q, k = jnp.ones((1, 4, 16, 8)), jnp.ones((1, 2, 16, 8))
      >>> results, vjp = jax.vjp(jb.rope_qk, q, k)
      >>> dq, dk = vjp(results)
      >>> print([jnp.array_equal(x, y).item() for x, y in zip((dq, dk), jb.rope_qk_backward(*results))])
      [True, True]
    """
    cotangents = {"d_q_output": d_q_output, "d_k_output": d_k_output}
    options = Rotation(base, interleaved, rotary_dim, rotary_offset, sections, sections_interleaved, inv_freq, scale)
    params, operands = _canonicalize("rope_qk_backward", cotangents, positions, layout, options)
    dq, dk = ROPE(*operands, **params | {"inverse": True})
    return dq, dk


# ----------------------------------------------------------------------------------------------------------------------
# Reference in plain JAX. Features are [B, H, S, D] or [B, S, H, D]; positions [B, S], or [A, B, S] with A sections;
# frequencies [2, P] for P pairs: the rounded frequency and its rounding error.


def _sequence_axis(heads_first: bool) -> int:
    return -2 if heads_first else -3


def _twelve_bit_parts(value: float, count: int) -> np.ndarray:
    """Splits a float64 into numbers of 12 bits that sum to it, largest first."""
    parts = []
    for _ in range(count):
        mantissa, exponent = math.frexp(value)
        parts.append(math.ldexp(math.trunc(mantissa * 2**12), exponent - 12))
        value -= parts[-1]
    return np.array(parts, np.float32)


TURN = 2.0**32
"""Angles are int32 with this many units per full turn, so integer overflow wraps around exactly like angles."""


def _units_per_position(frequencies: Array) -> tuple[Array, Array]:
    """Each pair's angle per position in units of 1/TURN, ``[P]``: whole units modulo a turn, and the fraction."""
    high, low = frequencies
    first_bits = jax.lax.bitcast_convert_type(
        jax.lax.bitcast_convert_type(high, jnp.int32) & ~np.int32(2**12 - 1), jnp.float32
    )
    # Products of 12 bits by 12 bits are exact in float32, and so are their remainders modulo a turn. They are added one
    # by one, because XLA would compile a reduction to a separate kernel.
    factors = _twelve_bit_parts(TURN / (2 * math.pi), 5)
    products = [part * factor for part in (first_bits, high - first_bits, low) for factor in factors]
    products = [product - jnp.round(product / TURN) * TURN for product in products]
    units = sum(jnp.round(product).astype(jnp.int32) for product in products)
    rest = sum(product - jnp.round(product) for product in products)
    carry = jnp.round(rest)
    return units + carry.astype(jnp.int32), rest - carry


def _cos_and_sin_of_units(angle: Array) -> tuple[Array, Array]:
    """Cosine and sine of an angle in units of 1/TURN, to float32 accuracy."""
    quarters = (angle + 2**29) >> 30
    remainder = angle - (quarters << 30)
    # The remainder in radians, as a sum of two numbers: the first product and the differences of sums are exact.
    unit = 2 * math.pi / TURN
    first_bits = _twelve_bit_parts(unit, 1)[0]
    coarse = (remainder + 2**16) & ~(2**17 - 1)
    high = coarse.astype(jnp.float32) * first_bits
    low = coarse.astype(jnp.float32) * np.float32(unit - first_bits)
    low += (remainder - coarse).astype(jnp.float32) * np.float32(unit)
    radians = high + low
    rest = low - (radians - high)
    cos, sin = jnp.cos(radians), jnp.sin(radians)
    cos, sin = cos - rest * sin, sin + rest * cos
    is_odd = (quarters & 1) == 1
    cos, sin = jnp.where(is_odd, -sin, cos), jnp.where(is_odd, cos, sin)
    sign = jnp.where((quarters & 2) == 2, -1, 1).astype(jnp.float32)
    return sign * cos, sign * sin


def _section_of_pair(sections: tuple[int, ...], are_interleaved: bool) -> np.ndarray:
    pairs = np.arange(sum(sections))
    if not are_interleaved:
        return np.repeat(np.arange(len(sections)), sections)
    in_turn = pairs % len(sections)
    return np.where(pairs < len(sections) * np.array(sections)[in_turn], in_turn, 0)


def _positions_of_pairs(positions: Array, sections: tuple[int, ...], are_interleaved: bool) -> Array:
    """The position that rotates each pair, ``[B, S, P]``; ``[B, S, 1]`` without sections."""
    if not sections:
        return positions[..., None]
    section = _section_of_pair(sections, are_interleaved)
    of_pairs = jnp.broadcast_to(positions[0, ..., None], (*positions.shape[1:], len(section)))
    for i in range(1, len(sections)):
        of_pairs = jnp.where(section == i, positions[i, ..., None], of_pairs)
    return of_pairs


def _cos_and_sin_of_product(positions: Array, frequencies: Array) -> tuple[Array, Array]:
    """Cosine and sine of position times frequency, ``[B, S, P]``. Positions are those of pairs."""
    if frequencies.dtype == jnp.float64 or positions.dtype.itemsize == 8:
        angle = positions.astype(jnp.float64) * jnp.sum(frequencies.astype(jnp.float64), axis=0)[None, None]
        return jnp.cos(angle).astype(frequencies.dtype), jnp.sin(angle).astype(frequencies.dtype)
    units, rest = (x[None, None] for x in _units_per_position(frequencies))
    angle = positions.astype(jnp.int32) * units + jnp.round(positions.astype(jnp.float32) * rest).astype(jnp.int32)
    return _cos_and_sin_of_units(angle)


MAX_CONSTANT_BYTES = 1 << 23
"""The maximum size of sines and cosines as constants of a program."""


@dataclasses.dataclass(frozen=True)
class ConstantAngles:
    """The angles of positions 0, 1, ... with frequencies that are known at trace time.

    Plain JAX reads their sines and cosines from constants of the program, at almost no cost.
    """

    frequencies: bytes
    """float64 numbers."""

    def __repr__(self) -> str:  # appears in printed jaxprs and in the cache keys of programs
        return f"ConstantAngles({hashlib.sha256(self.frequencies).hexdigest()})"


@functools.lru_cache(maxsize=16)
def _constant_table(
    angles: ConstantAngles, length: int, dtype: np.dtype[Any], scale: float, interleaved: bool
) -> Callable[[], tuple[Array, Array]]:
    """A function that returns the tables of positions 0, 1, ...: see :func:`_table`.

    The function is jitted, so JAX lowers it, and its constants, once per program, however many rotations call it. The
    barrier keeps XLA from constant folding at compile time, and from copying the constants into each kernel.
    """
    with np.errstate(invalid="ignore"):  # frequencies that are not finite give NaN
        products = np.outer(np.arange(length), np.frombuffer(angles.frequencies))[None]
        cos, sin = (
            x.astype(dtype) for x in _table(np, scale * np.cos(products), scale * np.sin(products), interleaved)
        )

    @jax.jit
    def rope_table() -> tuple[Array, Array]:
        return jax.lax.optimization_barrier((jnp.asarray(cos), jnp.asarray(sin)))

    return rope_table


def _table(numpy: ModuleType, cos: Any, sin: Any, interleaved: bool) -> tuple[Any, Any]:
    """The factors of features and of their partners, from cosine and sine ``[B, S, P]``.

    Interleaved pairs get one factor per feature, ``[B, S, 2 P]``, because XLA is slow at strided features.
    """
    if not interleaved:
        return cos, sin
    shape = (*cos.shape[:-1], 2 * cos.shape[-1])
    of_features = (numpy.stack(of_pair, axis=-1).reshape(shape) for of_pair in ((cos, cos), (-sin, sin)))
    return tuple(of_features)


def _rotate(
    x: Array,
    cos: Array,
    sin: Array,
    *,
    inverse: bool,
    heads_first: bool,
    interleaved: bool,
    rotary_dim: int,
    rotary_offset: int,
) -> Array:
    """The features with their pairs rotated by the angles of a table, or by the negative angles if `inverse`."""
    head_axis = _sequence_axis(not heads_first)  # the other one
    cos, sin = jnp.expand_dims(cos, head_axis), (-1 if inverse else 1) * jnp.expand_dims(sin, head_axis)
    end = rotary_offset + rotary_dim
    before, rotated, after = x[..., :rotary_offset], x[..., rotary_offset:end].astype(cos.dtype), x[..., end:]
    if interleaved:
        partners = jnp.flip(rotated.reshape(*x.shape[:-1], rotary_dim // 2, 2), axis=-1).reshape(rotated.shape)
        results = [rotated * cos + partners * sin]
    else:
        first, second = jnp.split(rotated, 2, axis=-1)
        results = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([before, *(result.astype(x.dtype) for result in results), after], axis=-1)


def reference_rotation(
    *operands: Array,
    heads_first: bool,
    interleaved: bool,
    scale: float,
    constant_angles: ConstantAngles | None,
    inverse: bool,
    rotary_dim: int,
    rotary_offset: int,
    sections: tuple[int, ...],
    sections_interleaved: bool,
) -> list[Array]:
    *features, frequencies, positions = operands
    length = features[0].shape[_sequence_axis(heads_first)]
    if constant_angles is not None:
        cos, sin = _constant_table(constant_angles, length, np.dtype(frequencies.dtype), scale, interleaved)()
    else:
        positions = jnp.arange(length, dtype=jnp.int32)[None] if positions is None else positions
        of_pairs = _positions_of_pairs(positions, sections, sections_interleaved)
        cos, sin = _cos_and_sin_of_product(of_pairs, frequencies)
        cos, sin = _table(jnp, scale * cos, scale * sin, interleaved)
    rotate = functools.partial(
        _rotate,
        inverse=inverse,
        heads_first=heads_first,
        interleaved=interleaved,
        rotary_dim=rotary_dim,
        rotary_offset=rotary_offset,
    )
    return [rotate(x, cos, sin) for x in features]


# ----------------------------------------------------------------------------------------------------------------------
# The op. It has a native target for each direction, for one array and for two.


def _features(*, num_arrays: int, heads_first: bool) -> NamedDimensions:
    """The arrays to rotate."""
    heads = {"x": "head"} if num_arrays == 1 else {"q": "q_head", "k": "k_head"}
    return {
        array: ("example", *((head, "sequence") if heads_first else ("sequence", head)), "feature")
        for array, head in heads.items()
    }


def _plan_parameters(
    *operands: Any, num_arrays: int, heads_first: bool, interleaved: bool, rotary_dim: int, rotary_offset: int
) -> dict[str, int]:
    features = operands[:num_arrays]
    examples, _, _, size = features[0].shape
    return {
        "examples": examples,
        "length": features[0].shape[_sequence_axis(heads_first)],
        "heads": sum(x.shape[1 if heads_first else 2] for x in features),
        "features": size,
        "rotary_dim": rotary_dim,
        "rotary_offset": rotary_offset,
        "heads_first": heads_first,
        "interleaved": interleaved,
        "element_bytes": np.dtype(features[0].dtype).itemsize,
    }


MAX_SECTIONS = 4
"""The maximum number of sections that kernels take."""


def positions_limit(*operands: Any, sections: tuple[int, ...]) -> str | None:
    positions = operands[-1]
    if len(sections) > MAX_SECTIONS:
        return f"kernels take at most {MAX_SECTIONS} sections, not {len(sections)}"
    if positions is None or positions.dtype.name in ("int32", "int64"):
        return None
    return f"kernels take positions of int32 and int64, not of {positions.dtype.name}"


def _shard_rotation(
    kernel: ShardKernel, axes: ShardAxes, *operands: Array | None, heads_first: bool
) -> Sequence[Array]:
    """If the sequence is split, the positions of a shard continue those of the previous shard."""
    sequence_axes = axes.get("sequence", ())
    *others, positions = operands
    if positions is not None or not sequence_axes:
        return kernel(*operands)
    length = operands[0].shape[_sequence_axis(heads_first)]
    start = (jax.lax.axis_index(sequence_axes) * length).astype(jnp.int32)
    return kernel(*others, (start + jnp.arange(length, dtype=jnp.int32))[None], constant_angles=None)


def _has_known_angles(traits: Traits) -> bool:
    return traits.params["constant_angles"] is not None


def _has_halves_or_32_bits(traits: Traits) -> bool:
    return not traits.params["interleaved"] or traits.measures["element_bits"] == 32


def _transpose(
    _: Any, cotangents: Sequence[Array], *others: Array | None, inverse: bool, **params: Any
) -> Sequence[Array]:
    return ROPE(*cotangents, *others, inverse=not inverse, **params)


ATTRIBUTES_OF_ROTATION = ("interleaved", "rotary_dim", "rotary_offset", "sections", "sections_interleaved", "scale")

# H100, time of plain JAX / kernel: 0.8 between elementwise operations (52 loops); halves, and float32, by known angles
# 0.9 (300 loops of 1 to 540 MB); a whole decoding step 0.98. Two cores: float32 halves by known angles 0.7; small
# arrays that XLA fuses 0.7.
ROPE = define_op(
    name="rope",
    targets={
        "rope": {"num_arrays": 1, "inverse": False},
        "rope_backward": {"num_arrays": 1, "inverse": True},
        "rope_qk": {"num_arrays": 2, "inverse": False},
        "rope_qk_backward": {"num_arrays": 2, "inverse": True},
    },
    operands=lambda *, num_arrays, heads_first, sections: {
        **_features(num_arrays=num_arrays, heads_first=heads_first),
        "frequencies": ("part", "pair"),
        "positions": (*(("section",) if len(sections) > 0 else ()), "example", "sequence"),
    },
    optional={"positions": "has_positions"},
    results=_features,
    reference=reference_rotation,
    dtypes=FLOATING_DTYPES,
    guarantee=accumulated,
    attributes=("heads_first", "has_positions", *ATTRIBUTES_OF_ROTATION),
    plan_parameters=_plan_parameters,
    limit=positions_limit,
    replicated_dims=("part", "pair", "section", "feature"),
    independent_dims=("example", "head", "q_head", "k_head"),
    shard_program=_shard_rotation,
    xla_rules=(
        on_gpu("XLA fuses a rotation with its neighbours", fused, at_most(element_bits=32)),
        on_gpu(
            "one new position: XLA fuses the rotation with the products around it", at_most(sequence=1), launch_bound
        ),
        on_gpu(
            "XLA reads known angles from a table, and moves no 16-bit numbers between lanes",
            _has_known_angles,
            _has_halves_or_32_bits,
            in_cache,
        ),
        on_cpu("XLA fuses a small rotation with its neighbours", fused, at_most(bytes=256 * KB)),
        on_cpu(
            "XLA vectorises halves by known angles",
            _has_known_angles,
            param("interleaved", False),
            at_least(pair=32, element_bits=32),
            at_most(bytes=4 * MB),
        ),
    ),
    in_place_if_donated=lambda *, num_arrays: {i: i for i in range(num_arrays)},
    transposes=lambda *, num_arrays, heads_first: {
        tuple(_features(num_arrays=num_arrays, heads_first=heads_first)): _transpose
    },
)

_rope = vjp_of_linear("rope", ROPE)


# ----------------------------------------------------------------------------------------------------------------------
# Canonicalisation of arguments, shared by the whole family.


class Rotation(NamedTuple):
    """How to rotate: the keyword arguments of all rotations."""

    base: float
    interleaved: bool
    rotary_dim: int | None
    rotary_offset: int
    sections: Sequence[int] | None
    sections_interleaved: bool
    inv_freq: ArrayLike | None
    scale: float

    def checked(
        self, name: str, argument: str, size: int, dtype: np.dtype[Any]
    ) -> tuple[dict[str, Any], Array, np.ndarray | None]:
        """The params of the op, the frequencies in `dtype`, and in float64 if they are constants.

        Args:
          argument: the name of an array with the rotated features.
          size: its number of features.
        """
        rotary_offset = whole_number(name, "rotary_offset", self.rotary_offset, minimum=0)
        rotary_dim = _checked_rotary_dim(name, argument, size, rotary_offset, self.rotary_dim)
        base = real_number(name, "base", self.base, positive=True)
        frequencies, constants = _frequencies(name, self.inv_freq, base, rotary_dim, dtype)
        params = {
            "interleaved": flag(name, "interleaved", self.interleaved),
            "rotary_dim": rotary_dim,
            "rotary_offset": rotary_offset,
            "sections": _checked_sections(name, self.sections, rotary_dim),
            "sections_interleaved": flag(name, "sections_interleaved", self.sections_interleaved),
            "scale": real_number(name, "scale", self.scale),
        }
        return params, frequencies, constants


def _checked_sections(name: str, sections: Sequence[int] | None, rotary_dim: int) -> tuple[int, ...]:
    """The numbers of pairs; empty without sections."""
    if sections is None:
        return ()
    if not isinstance(sections, list | tuple | np.ndarray):
        raise static_type_error(name, "sections", "a tuple of integers, such as (16, 24, 24)", sections)
    sections = tuple(whole_number(name, f"sections[{i}]", x, minimum=0) for i, x in enumerate(sections))
    if not sections or sum(sections) != rotary_dim // 2:
        raise ValueError(
            f"{name}: sections must sum to rotary_dim / 2 = {rotary_dim // 2}, the number of pairs, got {sections}"
        )
    return sections


def _canonicalize(
    name: str,
    rotated: Mapping[str, ArrayLike],
    positions: ArrayLike | None,
    layout: HeadLayout | None,
    options: Rotation,
) -> tuple[Params, list[Array | None]]:
    """The params and the operands of the op.

    Args:
      rotated: one or two arrays, by the argument names of the public function.
    """
    check_choice(name, "layout", layout, None, "BHSD", "BSHD")
    heads_first = layout != "BSHD"
    arrays = {argument: floating_array(name, argument, value) for argument, value in rotated.items()}
    for argument, x in arrays.items():
        if x.ndim != 4:
            shape = "[B, H, S, D]" if heads_first else "[B, S, H, D]"
            advice = f"; {argument}[None] is a batch of one" if x.ndim == 3 else ""
            raise ValueError(
                f"{name}: {argument} must have shape {shape} ({_layout_argument(heads_first)}), got {x.shape}{advice}"
            )
    if layout is None and all(x.shape[1] == x.shape[2] != 1 for x in arrays.values()):
        shapes = " and ".join(f"{argument} of shape {x.shape}" for argument, x in arrays.items())
        raise ValueError(
            f"{name}: layout must be given where there are as many heads as positions, 'BHSD' or 'BSHD'; got {shapes}"
        )
    sequence_axis = 2 if heads_first else 1
    first_name, first = next(iter(arrays.items()))
    for argument, x in arrays.items():
        check_same_dtype(name, argument, x, first_name, first)
        if any(x.shape[axis] != first.shape[axis] for axis in (0, sequence_axis, 3)):
            fits_other_layout = layout is None and all(x.shape[axis] == first.shape[axis] for axis in (0, 1, 3))
            raise ValueError(
                f"{name}: {argument} must have the shape of {first_name}, {first.shape}, except for the number of "
                f"heads in dimension {3 - sequence_axis} ({_layout_argument(heads_first)}); got {x.shape}"
                f"{_ADVICE_ON_LAYOUT if fits_other_layout else ''}"
            )
    examples, length, size = (first.shape[axis] for axis in (0, sequence_axis, 3))
    dtype = np.dtype(accumulation_dtype(first.dtype))
    rotation, frequencies, constants = options.checked(name, first_name, size, dtype)
    constant_angles = None if positions is not None else _constant_angles(constants, length, dtype)
    if positions is not None:
        other_length = first.shape[1] if layout is None else None
        sections = rotation["sections"]
        positions = _checked_positions(name, positions, examples, length, sections, heads_first, other_length)
    elif options.sections is not None:
        raise ValueError(f"{name}: positions must be given with sections, one row for each")
    params = Params(
        num_arrays=len(arrays), inverse=False, heads_first=heads_first, constant_angles=constant_angles, **rotation
    )
    return params, [*arrays.values(), frequencies, positions]


ADVICE_ON_SECTIONS = "; positions of three axes (M-RoPE) need sections"
_ADVICE_ON_LAYOUT = '; for arrays [B, S, H, D] pass layout="BSHD"'


def _layout_argument(heads_first: bool) -> str:
    return f"layout={'BHSD' if heads_first else 'BSHD'!r}"


def _checked_rotary_dim(name: str, argument: str, size: int, rotary_offset: int, rotary_dim: int | None) -> int:
    from_offset = f" from rotary_offset = {rotary_offset} on" if rotary_offset else ""
    rest = size - rotary_offset
    if rotary_offset > 0 and rest <= 0:
        raise ValueError(
            f"{name}: rotary_offset must be less than the number of features D of {argument}, {size}, got "
            f"{rotary_offset}"
        )
    if rotary_dim is None:
        if rest % 2 or rest <= 0:
            raise ValueError(
                f"{name}: {argument} must have an even and positive number of features D{from_offset} unless "
                f"rotary_dim is given, got D = {size}"
            )
        return rest
    rotary_dim = whole_number(name, "rotary_dim", rotary_dim, minimum=2)
    if rotary_dim % 2 or rotary_dim > rest:
        raise ValueError(
            f"{name}: rotary_dim must be even and at most the number of features D of {argument}{from_offset}, "
            f"{max(rest, 0)}, got {rotary_dim}"
        )
    return rotary_dim


def _frequencies(
    name: str, inv_freq: ArrayLike | None, base: float, rotary_dim: int, dtype: np.dtype[Any]
) -> tuple[Array, np.ndarray | None]:
    """The inverse frequencies rounded to the dtype, and their rounding errors: ``[2, rotary_dim / 2]``.

    If they are constants, also in float64, ``[rotary_dim / 2]``; else None.
    """
    num_pairs = rotary_dim // 2
    if inv_freq is None:
        inv_freq, _ = rope_frequencies(rotary_dim, base)
    elif not isinstance(inv_freq, np.ndarray):
        inv_freq = jax.lax.stop_gradient(as_array(name, "inv_freq", inv_freq))
    is_floating = jnp.issubdtype(inv_freq.dtype, jnp.floating)
    if not (is_floating or jnp.issubdtype(inv_freq.dtype, jnp.integer)):
        raise TypeError(f"{name}: inv_freq must have a real dtype, got {inv_freq.dtype}")
    if inv_freq.shape not in ((num_pairs,), (2, num_pairs)):
        raise ValueError(
            f"{name}: inv_freq must have shape [rotary_dim / 2] = ({num_pairs},), one frequency for each pair of the "
            f"rotary_dim = {rotary_dim} rotated features, or (2, {num_pairs}); got {inv_freq.shape}"
        )
    if inv_freq.ndim == 1 and is_floating and inv_freq.dtype.itemsize < 8:
        raise TypeError(
            f"{name}: inv_freq of shape ({num_pairs},) must have dtype float64, got {inv_freq.dtype}, whose angles are "
            "off by 0.02 at position 10^6. Pass the NumPy array of rope_frequencies as it is: as a constant, not as an "
            f"argument of jax.jit, it keeps its 64 bits. Or pass the sum of two rows, shape (2, {num_pairs}): "
            "numpy.stack([high, inv_freq - high]) with high = inv_freq.astype('float32'), and zeros in the second row "
            "for frequencies that are meant as they are"
        )
    if isinstance(inv_freq, np.ndarray):
        inv_freq = inv_freq.astype(np.float64)
        inv_freq = inv_freq if inv_freq.ndim == 1 else inv_freq.sum(axis=0)
        with np.errstate(over="ignore", invalid="ignore"):  # frequencies that are not finite give NaN
            rounded = inv_freq.astype(dtype)
            # An explicit transfer: jax.transfer_guard may forbid implicit ones.
            return jax.device_put(np.stack([rounded, (inv_freq - rounded).astype(dtype)])), inv_freq
    if inv_freq.ndim == 2:
        inv_freq = reshard_to(inv_freq, (None, None))
        return _two_parts(inv_freq[0], inv_freq[1], dtype), None
    return _two_parts(inv_freq, jnp.zeros_like(inv_freq), dtype), None


def _constant_angles(frequencies: np.ndarray | None, length: Any, dtype: np.dtype[Any]) -> ConstantAngles | None:
    """The angles of positions 0, 1, ... if they are known and their table is small enough, else None."""
    if frequencies is None or not jax_versions.is_static_shape((length,)):
        return None
    is_small = 2 * length * frequencies.size * dtype.itemsize <= MAX_CONSTANT_BYTES
    return ConstantAngles(frequencies.tobytes()) if is_small else None


def _two_parts(high: Array, low: Array, dtype: np.dtype[Any]) -> Array:
    """``high + low`` rounded to the dtype, and the rounding error."""
    if not jnp.issubdtype(high.dtype, jnp.floating) or high.dtype.itemsize < dtype.itemsize:
        high, low = high.astype(dtype), low.astype(dtype)
    # Not by converting back and forth, which XLA simplifies to the identity on GPUs.
    format = jnp.finfo(dtype)
    rounded = jax.lax.reduce_precision(high, format.nexp, format.nmant)
    return jnp.stack([rounded.astype(dtype), (high - rounded + low).astype(dtype)])


def _checked_positions(
    name: str,
    positions: ArrayLike,
    examples: int,
    length: int,
    sections: tuple[int, ...],
    heads_first: bool,
    other_length: int | None,
) -> Array:
    """The positions ``[B, S]``, or ``[1, S]`` if all examples share them; with sections ``[A, B, S]``.

    Args:
      other_length: S in the other layout, which the caller may have meant; None if the caller named the layout.
    """
    positions = integer_positions(name, positions)
    leading, letter = ((len(sections),), "sections, ") if sections else ((), "")
    shared, own = (*leading, length), (*leading, examples, length)
    if positions.shape not in (shared, own, (*leading, 1, length)):
        advice = ""
        if positions.ndim > 0 and positions.shape[-1] == other_length:
            advice = _ADVICE_ON_LAYOUT
        elif not sections and positions.ndim > 1 and positions.shape[0] == 3:
            advice = ADVICE_ON_SECTIONS
        raise ValueError(
            f"{name}: positions must have shape [{letter}S] = {shared} or [{letter}B, S] = {own} "
            f"({_layout_argument(heads_first)}), got {positions.shape}{advice}"
        )
    return jnp.expand_dims(positions, -2) if positions.shape == shared else positions


def integer_positions(name: str, positions: ArrayLike) -> Array:
    """Positions of int32 or int64, or of uint32 or uint64 if no available signed dtype holds all values."""
    if isinstance(positions, np.ndarray) and np.issubdtype(positions.dtype, np.integer) and positions.size > 0:
        fitting = np.iinfo(jax.dtypes.canonicalize_dtype(positions.dtype))
        if positions.min() < fitting.min or positions.max() > fitting.max:
            raise ValueError(
                f"{name}: positions must fit {fitting.dtype} unless 64-bit types are enabled (jax_enable_x64), got "
                f"{positions.min()} to {positions.max()}"
            )
    positions = integer_array(name, "positions", positions)
    if positions.dtype.itemsize < 4:
        positions = positions.astype(jnp.int32)
    elif positions.dtype == jnp.uint32 and jax.config.jax_enable_x64:
        positions = positions.astype(jnp.int64)
    return positions
