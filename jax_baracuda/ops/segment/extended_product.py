"""Products of floating numbers as mantissa and wide exponent, in plain JAX, by bit operations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


class ExtendedProduct(NamedTuple):
    """A product of floating numbers whose partial products neither overflow nor underflow.

    Its value is ``mantissa * 2**(units * unit)``. The exponent counts units of 64 (float64: 512), so 26 bits reach to
    2^31 (float64: 2^34). The mantissa carries the sign, and its magnitude is in ``[2**(-unit/2), 2**(unit/2))``, so the
    product of two mantissas is a normal number. Zeros, infinities and NaN are counted apart, up to 2 of each.
    """

    mantissa: Array
    packed: Array
    """units * 64 + 16 * NaNs + 4 * infinities + zeros"""


_ZEROS, _INFINITIES, _NANS = 0, 2, 4
"""The bit positions of the counts in `packed`."""
_UNITS = 6

_MAX_UNITS = 2**25 - 64
"""Beyond this, the product is zero or infinite, and one member more or less does not change that."""


def _unit_bits(dtype: Any) -> int:
    return 6 if jnp.finfo(dtype).bits == 32 else 9


def _count_of(packed: Array, kind: int) -> Array:
    return (packed >> kind) & 3


def _pack(units: Array, counts: Mapping[int, Array]) -> Array:
    packed = jnp.clip(units, -_MAX_UNITS, _MAX_UNITS) << _UNITS
    for kind, count in counts.items():
        packed += jnp.minimum(count, 2) << kind
    return packed


def product_of_one(x: Array) -> ExtendedProduct:
    """Splits numbers by their bits, so that subnormal numbers are not flushed to zero."""
    info, _, unsigned = _format_of(x.dtype)
    mantissa, exponent, counts = _split(x)
    units = (exponent + (1 << (_unit_bits(x.dtype) - 1))) >> _unit_bits(x.dtype)
    rest = (exponent - (units << _unit_bits(x.dtype))).astype(unsigned) << info.nmant
    bits = jax.lax.bitcast_convert_type(mantissa, unsigned) + rest
    return ExtendedProduct(jax.lax.bitcast_convert_type(bits, x.dtype), _pack(units, counts))


def _split(x: Array) -> tuple[Array, Array, dict[int, Array]]:
    """The mantissa with magnitude in [1, 2), the exponent, and the counts of zeros, infinities and NaN."""
    info, bias, unsigned = _format_of(x.dtype)
    bits = jax.lax.bitcast_convert_type(x, unsigned)
    sign_bit, fraction_mask, one = (
        unsigned.type(value) for value in (1 << (info.bits - 1), (1 << info.nmant) - 1, bias << info.nmant)
    )
    magnitude = bits & (sign_bit - 1)
    field = (magnitude >> info.nmant).astype(jnp.int32)
    is_zero, is_finite = magnitude == 0, field <= 2 * bias
    is_infinite = ~is_finite & (magnitude & fraction_mask == 0)
    is_ordinary = is_finite & ~is_zero
    # Normalize subnormal numbers: shift their leading bit to its position in a normal number.
    shift = jnp.where(field == 0, jax.lax.clz(magnitude).astype(jnp.int32) - (info.bits - 1 - info.nmant), 0)
    fraction = jnp.where(is_ordinary, (magnitude << shift.astype(unsigned)) & fraction_mask, unsigned.type(0))
    mantissa = (bits & sign_bit) | one | fraction
    exponent = jnp.where(is_ordinary, jnp.maximum(field, 1) - shift - bias, 0)
    kinds = {_ZEROS: is_zero, _INFINITIES: is_infinite, _NANS: ~is_finite & ~is_infinite}
    counts = {kind: of_kind.astype(jnp.int32) for kind, of_kind in kinds.items()}
    return jax.lax.bitcast_convert_type(mantissa, x.dtype), exponent, counts


def product_of_both(a: ExtendedProduct, b: ExtendedProduct) -> ExtendedProduct:
    mantissa = a.mantissa * b.mantissa
    limit = 2.0 ** (1 << (_unit_bits(mantissa.dtype) - 1))
    is_large, is_small = jnp.abs(mantissa) >= limit, jnp.abs(mantissa) < 1 / limit
    mantissa = jnp.where(is_large, mantissa / limit**2, jnp.where(is_small, mantissa * limit**2, mantissa))
    units = (a.packed >> _UNITS) + (b.packed >> _UNITS) + is_large.astype(jnp.int32) - is_small.astype(jnp.int32)
    counts = {kind: _count_of(a.packed, kind) + _count_of(b.packed, kind) for kind in (_ZEROS, _INFINITIES, _NANS)}
    return ExtendedProduct(mantissa, _pack(units, counts))


def product_of_others(product: ExtendedProduct, member: Array) -> ExtendedProduct:
    """The product of all members but one."""
    one = product_of_one(member)
    units = (product.packed >> _UNITS) - (one.packed >> _UNITS)

    def count(kind: int) -> Array:
        # A count of two means two or more: after removing one, at least one is left, and one acts like several.
        count = _count_of(product.packed, kind)
        return jnp.where((_count_of(one.packed, kind) == 1) & (count == 1), 0, count)

    packed = _pack(units, {kind: count(kind) for kind in (_ZEROS, _INFINITIES, _NANS)})
    return ExtendedProduct(product.mantissa / one.mantissa, packed)


def product_value(product: ExtendedProduct) -> Array:
    mantissa, packed = product
    has_zero, has_infinity, has_nan = (_count_of(packed, kind) > 0 for kind in (_ZEROS, _INFINITIES, _NANS))
    # 64 units already overflow or underflow every dtype.
    value = _scaled(mantissa, jnp.clip(packed >> _UNITS, -64, 64) << _unit_bits(mantissa.dtype))
    value = jnp.where(has_infinity, jnp.copysign(jnp.inf, mantissa).astype(value.dtype), value)
    value = jnp.where(has_zero, jnp.copysign(0, mantissa).astype(value.dtype), value)
    return jnp.where(has_nan | (has_zero & has_infinity), jnp.nan, value)


def _scaled(mantissa: Array, exponent: Array) -> Array:
    """``mantissa * 2**exponent``, rounded once, by bits, so that subnormal results are not flushed to zero."""
    info, bias, unsigned = _format_of(mantissa.dtype)
    mantissa, of_mantissa, _ = _split(mantissa)
    exponent += of_mantissa
    bits = jax.lax.bitcast_convert_type(mantissa, unsigned)
    leading_bit, sign_bit = unsigned.type(1 << info.nmant), unsigned.type(1 << (info.bits - 1))
    significand = (bits & (leading_bit - unsigned.type(1))) | leading_bit
    # A subnormal number has fewer bits: round to nearest by the bits that are cut off, ties to even.
    cut = jnp.clip(1 - bias - exponent, 0, info.nmant + 2).astype(unsigned)
    kept = significand >> cut
    rest, half = significand - (kept << cut), (unsigned.type(1) << cut) >> 1
    rounds_up = ((rest > half) | ((rest == half) & (kept % 2 == 1))) & (cut > 0)
    kept += rounds_up.astype(unsigned)
    # A kept leading bit adds 1 to the exponent field.
    field = jnp.clip(exponent + bias - 1, 0, 2 * bias).astype(unsigned)
    magnitude = jnp.where(exponent > bias, unsigned.type((2 * bias + 1) << info.nmant), (field << info.nmant) + kept)
    return jax.lax.bitcast_convert_type((bits & sign_bit) | magnitude, mantissa.dtype)


def _format_of(dtype: Any) -> tuple[Any, int, np.dtype]:
    """The format of a floating dtype: its ``finfo``, its exponent bias, and the unsigned dtype of its bits."""
    info = jnp.finfo(dtype)
    return info, info.maxexp - 1, np.dtype(f"uint{info.bits}")
