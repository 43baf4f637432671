"""Helpers for arguments, shared by the op families: arrays and numbers, accumulation dtypes, explicit sharding."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from jax_baracuda._core import jax_versions

FLOATING_DTYPES = frozenset({"float16", "bfloat16", "float32", "float64"})
"""The floating element types that have kernels in all op families."""

FLOAT8_DTYPES = frozenset(
    f"float8_{kind}" for kind in ("e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")
)
"""The 8-bit floating types that have a zero."""

INTEGER_DTYPES = frozenset(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))

DIFFERENTIABLE_DTYPES = FLOATING_DTYPES | FLOAT8_DTYPES | {"complex64", "complex128"}
"""The dtypes of cotangents that kernels copy."""

DTYPES_OF_WHOLE_BYTES = DIFFERENTIABLE_DTYPES | INTEGER_DTYPES | {"bool", "float8_e8m0fnu"}
"""The dtypes of elements that kernels copy as bytes. float8_e8m0fnu has no zero, and so no derivatives by kernels."""

_BITS_BELOW_BYTE = {"int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "float4_e2m1fn": 4}


def element_bits(dtype: Any) -> int:
    """The size of an element in bits. XLA packs several elements into a byte if they fit."""
    return _BITS_BELOW_BYTE.get(np.dtype(dtype).name, 8 * np.dtype(dtype).itemsize)


def accumulation_dtype(dtype: Any) -> Any:
    """The dtype in which numbers of `dtype` are accumulated."""
    is_narrow = jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize < 4
    return jnp.float32 if is_narrow else dtype


def as_bits(array: Array) -> Array:
    """8-bit floats as integers. XLA on CPUs moves 8-bit floats by converting them to a wider type and back."""
    return jax.lax.bitcast_convert_type(array, jnp.uint8) if _is_float8(array.dtype) else array


def of_bits(array: Array, dtype: Any) -> Array:
    """The inverse of :func:`as_bits`."""
    return jax.lax.bitcast_convert_type(array, dtype) if _is_float8(dtype) else array


def _is_float8(dtype: Any) -> bool:
    return np.dtype(dtype).itemsize == 1 and jnp.issubdtype(dtype, jnp.floating) and element_bits(dtype) == 8


def as_array(function: str, argument: str, value: ArrayLike) -> Array:
    """An argument of a public function as an array. Lists are refused, as in JAX."""
    is_array = hasattr(value, "__jax_array__") or hasattr(value, "__array__")
    if not is_array and not isinstance(value, int | float | complex | bool):
        advice = "; jnp.asarray makes one" if isinstance(value, list | tuple) else ""
        raise TypeError(f"{function}: {argument} must be an array, got {type(value).__name__}{advice}")
    try:
        array = jnp.asarray(value)
    except TypeError as error:
        if not isinstance(value, np.ndarray | np.generic):
            raise  # the object itself says why it cannot become an array
        # JAX names neither the argument nor the dtype.
        raise TypeError(
            f"{function}: {argument} must have a dtype that JAX accepts, in native byte order, got {value.dtype}"
        ) from error
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        raise TypeError(f"{function}: {argument} must have a numeric dtype, got {array.dtype}")
    return array


def integer_array(function: str, argument: str, value: ArrayLike) -> Array:
    array = as_array(function, argument, value)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{function}: {argument} must have an integer dtype, got {array.dtype}")
    return array


def floating_array(function: str, argument: str, value: ArrayLike) -> Array:
    array = as_array(function, argument, value)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{function}: {argument} must have a real floating dtype, got {array.dtype}")
    return array


def index_array(function: str, argument: str, value: ArrayLike) -> Array:
    """Indices as int32. Those beyond int32 become its least or greatest number, so they stay out of range."""
    info = np.iinfo(np.int32)
    # Without jax_enable_x64, JAX would keep the lowest 32 bits of wider integers of Python and NumPy.
    if isinstance(value, int) and not isinstance(value, bool):
        value = np.int32(min(max(value, info.min), info.max))
    elif isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "iu" and value.dtype.itemsize == 8:
        at_most = np.minimum(value, info.max)
        value = (at_most if value.dtype.kind == "u" else np.maximum(at_most, info.min)).astype(np.int32)
    array = integer_array(function, argument, value)
    if array.dtype.itemsize == 8 or array.dtype == jnp.uint32:
        array = jnp.minimum(array, info.max)
        array = array if jnp.issubdtype(array.dtype, jnp.unsignedinteger) else jnp.maximum(array, info.min)
    return array.astype(jnp.int32)


def divided(numbers: Array, divisors: Array) -> Array:
    """Quotients. The divisors broadcast to the numbers."""
    # XLA replaces division by a broadcast divisor with multiplication by its reciprocal, which rounds twice.
    return numbers / jnp.where(numbers == numbers, divisors, 1)


def in_range(indices: Array, size: int) -> Array:
    """Which indices are from 0 to ``size - 1``."""
    return (indices >= 0) & (indices < size)


def check_shape(
    function: str,
    argument: str,
    array: Array,
    shape: tuple[int, ...],
    letters: str = "",
    why: str = "",
    advice: str = "",
) -> None:
    """Raises ValueError unless an array has this shape.

    Args:
      letters: names of the dimensions, such as "[B, L]".
      why: follows the shape in the message.
      advice: what the caller may have meant; ends the message.
    """
    if array.shape != shape:
        expected = f"{letters} = {shape}" if letters else f"{shape}"
        raise ValueError(f"{function}: {argument} must have shape {expected}{why}, got {array.shape}{advice}")


def check_same_dtype(function: str, argument: str, array: Array, like_name: str, like: Array) -> None:
    """Raises TypeError unless an array has the dtype of another argument."""
    if array.dtype != like.dtype:
        raise TypeError(f"{function}: {argument} must have the dtype of {like_name}, {like.dtype}, got {array.dtype}")


def check_one_for_each(function: str, argument: str, values: Any, dests: Sequence[Any]) -> None:
    """Checks that `values` is a list or tuple with one entry for each of the argument `dests`."""
    if not isinstance(values, list | tuple):
        raise TypeError(
            f"{function}: {argument} must be a list or tuple with one entry for each of the {len(dests)} dests, "
            f"got {type(values).__name__}"
        )
    if len(values) != len(dests):
        raise ValueError(
            f"{function}: {argument} must have one entry for each of the {len(dests)} dests, got {len(values)}"
        )


def broadcasts(shape: Sequence[int], target: Sequence[int]) -> bool:
    """Whether an array of this shape broadcasts to the target."""
    offset = len(target) - len(shape)
    return offset >= 0 and all(size in (1, target[offset + i]) for i, size in enumerate(shape))


def real_number(function: str, argument: str, value: Any, *, positive: bool = False) -> float:
    """A finite real number, as a Python float."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Real):
        raise static_type_error(function, argument, "a real number", value)
    number = float(value)
    if not math.isfinite(number) or (positive and number <= 0):
        raise ValueError(f"{function}: {argument} must be finite{' and positive' if positive else ''}, got {value!r}")
    return number


def is_integer(value: Any) -> bool:
    """Whether a value is an integer of Python or NumPy, and no truth value."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def whole_number(function: str, argument: str, value: Any, *, minimum: int) -> int:
    """An integer that is `minimum` or more."""
    if not is_integer(value):
        raise static_type_error(function, argument, "an integer", value)
    if value < minimum:
        raise ValueError(f"{function}: {argument} must be {minimum} or more, got {value!r}")
    return int(value)


def check_choice(function: str, argument: str, value: Any, *choices: str | None) -> None:
    """Raises ValueError unless a value is one of these."""
    if not isinstance(value, str | None) or value not in choices:
        *others, last = map(repr, choices)
        raise ValueError(f"{function}: {argument} must be {', '.join(others)} or {last}, got {value!r}")


def flag(function: str, argument: str, value: Any) -> bool:
    """A truth value. Other objects are refused, because Python takes a string such as "no" for true."""
    if isinstance(value, bool | np.bool_) or (isinstance(value, numbers.Integral) and value in (0, 1)):
        return bool(value)
    raise static_type_error(function, argument, "True or False", value)


def static_type_error(function: str, argument: str, allowed: str, value: Any) -> TypeError:
    """The error for an unsuitable value of an argument that must be known when a program is traced."""
    advice = ""
    if isinstance(value, jax.core.Tracer):
        advice = "; it must be known when the program is traced: a Python value, or named in static_argnames of jax.jit"
    elif isinstance(value, jax.Array | np.ndarray):
        advice = "; it must be a Python value, not an array"
    return TypeError(f"{function}: {argument} must be {allowed}, got {_shown(value)}{advice}")


def _shown(value: Any) -> str:
    """A value for messages: arrays by dtype and shape."""
    if not isinstance(value, jax.Array | np.ndarray):
        return repr(value)
    kind = "a traced array" if isinstance(value, jax.core.Tracer) else "an array"
    return f"{kind} of dtype {value.dtype} and shape {value.shape}"


def reshard_as(array: Array, like: Array, axes: tuple[int | None, ...]) -> Array:
    """Under explicit sharding, shards each dimension of `array` like the given axis of `like`; None: replicated."""
    like_spec = jax_versions.explicit_spec(jax.typeof(like))
    if like_spec is None:
        return array
    return reshard_to(array, tuple(None if axis is None else like_spec[axis] for axis in axes))


def reshard_to(array: Array, spec: tuple[Any, ...]) -> Array:
    """Under explicit sharding, shards the dimensions of `array` over these mesh axes."""
    own_spec = jax_versions.explicit_spec(jax.typeof(array))
    return array if own_spec in (None, spec) else jax.sharding.reshard(array, PartitionSpec(*spec))


def replicate_dims(array: Array, dims: Sequence[int]) -> Array:
    """Under explicit sharding, replicates these dimensions if there are several, so that a reshape can merge them."""
    if len(dims) < 2:
        return array
    return reshard_as(array, array, tuple(None if axis in dims else axis for axis in range(array.ndim)))


def reshard_like(array: Array, aval: Any) -> Array:
    """Under explicit sharding, reshards an array like a type, such as a cotangent like its primal."""
    own_spec, spec = (jax_versions.explicit_spec(x) for x in (jax.typeof(array), aval))
    return array if spec in (None, own_spec) else jax.sharding.reshard(array, aval.sharding)


def in_automatic_mode(function: Callable[..., Any], like: Any, *specs: Sequence[Any]) -> Callable[..., Any]:
    """Under explicit sharding, makes all mesh axes automatic inside a function, and shards its results by `specs`.

    Args:
      function: returns a tuple of arrays, one for each spec.
      like: the type of an array on the mesh.
    """
    mesh = like.sharding.mesh
    shardings = tuple(NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs)
    return jax.sharding.auto_axes(function, axes=mesh.explicit_axes, out_sharding=shardings)
