"""``segment_max``, ``segment_min`` and ``segment_prod`` of ``jax.ops``, computed by this package's functions.

Their gradients are kernels of their own, so they are served as functions, not as scatters.

Whether a call is served is checked before our functions run: wrong arguments raise JAX's own errors, and an error in
our functions is not mistaken for an unserved call.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_baracuda import forward_mode
from jax_baracuda._core import jax_versions
from jax_baracuda._core.arrays import FLOATING_DTYPES, INTEGER_DTYPES, broadcasts
from jax_baracuda._core.call import OpCall
from jax_baracuda._core.dispatch import decide
from jax_baracuda._core.known_values import MAX_KNOWN_INTEGERS, ascend
from jax_baracuda._core.op import OPS
from jax_baracuda._core.rules import Site
from jax_baracuda._core.selection import current_selection
from jax_baracuda._indexed import Unserved, require
from jax_baracuda.ops.segment.definitions import ORDERED_DTYPES

DTYPES_OF_FUNCTIONS = {
    "segment_prod": FLOATING_DTYPES | INTEGER_DTYPES,
    "segment_max": ORDERED_DTYPES,
    "segment_min": ORDERED_DTYPES,
}
"""The functions that are served here, and their dtypes."""


def segment_update(
    name: str,
    data: Any,
    segment_ids: Any,
    scatter_op: Any,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    bucket_size: int | None = None,
    reducer: Any = None,
    mode: Any = None,
    out_sharding: Any = None,
) -> Array:
    """The result of the function of this name. The signature is that of the internal function of ``jax.ops``.

    Raises:
      Unserved: the call is left to JAX.
    """
    data, ids = _as_arrays(data, segment_ids)
    require(jnp.issubdtype(ids.dtype, jnp.integer), f"ids of dtype {ids.dtype}")
    require(data.dtype.name in DTYPES_OF_FUNCTIONS[name], f"there is no kernel for {data.dtype.name}")
    rows_shape = (*ids.shape, *data.shape[1:])
    _require_static(*data.shape, *rows_shape)
    require(broadcasts(data.shape, rows_shape), f"arrays of shape {data.shape} do not fit ids, which need {rows_shape}")
    try:
        jax.lax.GatherScatterMode.from_any(mode)
    except ValueError as error:
        raise Unserved(str(error)) from error
    if bucket_size is not None:
        is_size = isinstance(bucket_size, int | np.integer) and bucket_size > 0
        require(is_size and ids.ndim == 1 and out_sharding is None, f"bucket_size={bucket_size!r} of these arguments")
    require(out_sharding is None or not out_sharding.spec.unreduced, "an unreduced out_sharding is asked for")
    if num_segments is None:
        require(ids.size > 0, "num_segments is missing, and there are no ids")
        largest = jnp.max(ids)
        require(not isinstance(largest, jax.core.Tracer), "num_segments is missing, and ids are traced")
        num_segments = int(largest) + 1
    _require_static(num_segments)
    require(num_segments >= 0, f"num_segments={num_segments}")
    is_sorted = bool(indices_are_sorted) or _are_known_to_ascend(segment_ids, ids)
    _require_kernel(name, data, ids, num_segments, is_sorted)
    options = {"bucket_size": bucket_size, "mode": mode, "out_sharding": out_sharding}
    return getattr(forward_mode, name)(data, ids, num_segments, is_sorted, unique_indices, **options)


def _as_arrays(*values: Any) -> list[Array]:
    """The arguments of a function that takes arrays and numbers, but no lists."""
    for value in values:
        is_array = isinstance(value, jax.Array | np.ndarray | np.generic | int | float | complex)
        require(is_array or hasattr(value, "__jax_array__"), f"an argument is no array, but {type(value).__name__}")
    try:
        return [jnp.asarray(value) for value in values]
    except (TypeError, ValueError, OverflowError) as error:
        raise Unserved(f"an argument is no array: {error}") from error


def _require_static(*sizes: Any) -> None:
    require(jax_versions.is_static_shape(sizes), "sizes are symbolic or unknown")


def _are_known_to_ascend(segment_ids: Any, ids: Any) -> bool:
    """Whether `segment_ids` is a NumPy array that ascends. `ids`: the same ids in the dtype that JAX gives them."""
    is_known = isinstance(segment_ids, np.ndarray) and segment_ids.ndim == 1 and segment_ids.size <= MAX_KNOWN_INTEGERS
    return is_known and ascend(segment_ids.astype(ids.dtype))


def _require_kernel(name: str, data: Any, ids: Any, num_segments: int, is_sorted: bool) -> None:
    """Leaves to JAX what the rules of the op leave to plain JAX on the default device, also in a gradient.

    JAX then traces its own function, whose gradient is not that of the op in plain JAX.
    """
    op, selection = OPS[name], current_selection()
    if selection == "kernel":
        return  # what there is no kernel for is an error
    with_winner = f"{name}_with_winner"
    has_gradient = with_winner in op.targets and data.dtype.name in op.dtypes_of(with_winner)
    target = with_winner if has_gradient else name
    num_rows = math.prod(ids.shape)
    types = (
        jax.ShapeDtypeStruct((num_rows, *data.shape[1:]), data.dtype),
        jax.ShapeDtypeStruct((num_rows,), jnp.int32),
    )
    params = {"num_segments": num_segments, "indices_are_sorted": is_sorted, "implementation": selection}
    platform = jax.default_backend()
    decision = decide(
        OpCall(op, types, {**params, **op.targets[target]}), Site({"gpu": "cuda"}.get(platform, platform))
    )
    require(decision.implementation == "kernel", decision.reason)
