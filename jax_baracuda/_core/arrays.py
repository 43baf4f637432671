"""What op families share about arrays: the dtype of accumulation, and arguments as arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike


def compute_dtype(dtype: Any) -> Any:
    """The dtype in which numbers of `dtype` are accumulated."""
    is_narrow = jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize < 4
    return jnp.float32 if is_narrow else dtype


def as_array(function: str, argument: str, value: ArrayLike) -> Array:
    """An argument of a public function as an array; lists are refused, as JAX does."""
    is_array = hasattr(value, "__jax_array__") or hasattr(value, "__array__")
    if not is_array and not isinstance(value, int | float | complex | bool):
        raise TypeError(f"{function}: {argument} must be an array, got {type(value).__name__}")
    array = jnp.asarray(value)
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        raise TypeError(f"{function}: {argument} must have a numeric dtype, got {array.dtype}")
    return array
