"""The arguments of the segment functions: checks, canonical forms, and how reductions are applied to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from jax_baracuda._core import jax_versions
from jax_baracuda._core.arrays import as_array, reshard_as, reshard_like
from jax_baracuda._core.autodiff import KernelVjp
from jax_baracuda.ops.segment.definitions import Params

TieBreak = Literal["split", "first"]
Mode = jax.lax.GatherScatterMode | str | None
OutSharding = NamedSharding | PartitionSpec | None


@dataclasses.dataclass(frozen=True)
class SegmentCall:
    """Checked arguments of a segment reduction."""

    data: Array
    """Broadcasts to [*ids_shape, ...]"""
    segment_ids: Array
    """[N], int32 or int64; out of range means dropped"""
    ids_shape: tuple[int, ...]
    num_segments: int
    indices_are_sorted: bool
    bucket_size: int | None
    out_sharding: NamedSharding | None

    def params(self, params_type: Callable[..., Any], **options: Any) -> Any:
        return params_type(num_segments=self.num_segments, indices_are_sorted=self.indices_are_sorted, **options)

    def with_data(self, data: Array) -> SegmentCall:
        return dataclasses.replace(self, data=data)

    def with_inexact_data(self) -> SegmentCall:
        """Integers and bool as floating numbers, as in ``jax.numpy.mean``."""
        dtype = self.data.dtype
        if jnp.issubdtype(dtype, jnp.inexact):
            return self
        return self.with_data(self.data.astype(jnp.float64 if dtype.itemsize == 8 else jnp.float32))

    def with_wide_integers(self) -> SegmentCall:
        """bool and integers of less than 32 bits as int32."""
        dtype = self.data.dtype
        is_narrow = not jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize < 4
        return self.with_data(self.data.astype(jnp.int32)) if is_narrow else self

    def rows(self, data: Array) -> Array:
        """`data` as one row per id, ``[N, ...]``."""
        row_shape = data.shape[1:]
        if data.shape != (*self.ids_shape, *row_shape):
            data = jnp.broadcast_to(data, (*self.ids_shape, *row_shape))
        return data if len(self.ids_shape) == 1 else data.reshape(-1, *row_shape)

    def reduce(
        self,
        reduction: Callable[..., Array],
        params: Params,
        reduce_buckets: Callable[..., Array] | None = None,
    ) -> Array:
        """Applies a segment reduction to the rows.

        Args:
          reduction: ``(params, *, data [N, ...], segment_ids [N]) -> [S, ...]``
          params: of the reduction without buckets.
          reduce_buckets: reduces the leading axis of the buckets' results; None: without buckets.
        """
        use_buckets = self.bucket_size is not None and reduce_buckets is not None
        if use_buckets:
            num_buckets = -(-self.segment_ids.shape[0] // self.bucket_size)
            params = dataclasses.replace(params, num_segments=num_buckets * self.num_segments, indices_are_sorted=False)

        def call(data: Array, ids: Array) -> Array:
            if use_buckets:
                bucket = jnp.arange(ids.shape[0], dtype=ids.dtype) // self.bucket_size
                is_member = (ids >= 0) & (ids < self.num_segments)
                ids = jnp.where(is_member, ids + bucket * self.num_segments, -1)
            output = reduction(params, data=self.rows(data), segment_ids=ids)
            if use_buckets:
                output = output.reshape(num_buckets, self.num_segments, *output.shape[1:])
                output = reduce_buckets(output, axis=0).astype(output.dtype)
            return output

        return self._with_out_sharding(call)

    def map_rows(self, function: Callable[..., Array], params: Params) -> Array:
        """Applies ``(params, *, data [N, ...], segment_ids [N]) -> [N, ...]`` to the rows."""

        def call(data: Array, ids: Array) -> Array:
            return shaped_as_ids(function(params, data=self.rows(data), segment_ids=ids), self.ids_shape)

        return self._with_out_sharding(call)

    def gradient(self, rules: KernelVjp, params: Params, d_output: Array) -> Array:
        """The cotangent of the data, given that of the cells ``[S, ...]``."""
        data, ids, d_output = jax_versions.unify_varying(self.data, self.segment_ids, d_output)
        rows = self.rows(data)
        _, residuals = rules.forward(params, data=rows, segment_ids=ids)
        d_rows = rules.backward(params, residuals, d_output)["data"]
        [d_data] = jax.linear_transpose(self.rows, data)(reshard_like(d_rows, jax.typeof(rows)))
        return d_data

    def _with_out_sharding(self, call: Callable[[Array, Array], Array]) -> Array:
        if self.out_sharding is not None:
            explicit_axes = self.out_sharding.mesh.explicit_axes
            call = jax.sharding.auto_axes(call, axes=explicit_axes, out_sharding=self.out_sharding)
        return call(self.data, self.segment_ids)


def reduce_numbers(
    name: str, call: SegmentCall, rules: KernelVjp, params: Params, reduce_buckets: Callable[..., Array]
) -> Array:
    """A sum or a product. Arithmetic modulo 2^32 is also right modulo 2^16 and 2^8."""
    if call.data.dtype == jnp.bool_:
        raise TypeError(f"{name}: data must have a numeric dtype, got bool")
    return call.with_wide_integers().reduce(rules, params, reduce_buckets).astype(call.data.dtype)


def shaped_as_ids(rows: Array, ids_shape: tuple[int, ...]) -> Array:
    return rows if len(ids_shape) == 1 else rows.reshape(*ids_shape, *rows.shape[1:])


def canonicalize(
    name: str,
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None,
    indices_are_sorted: bool,
    mode: Mode,
    out_sharding: OutSharding,
    bucket_size: int | None = None,
    data_name: str = "data",
) -> SegmentCall:
    """Checks the arguments that all segment reductions share; raises what ``jax.ops`` raises, in clearer words."""
    data = as_array(name, data_name, data)
    ids = checked_ids(name, segment_ids)
    row_shape = data.shape[1:]
    if not _broadcasts(data.shape, (*ids.shape, *row_shape)):
        raise ValueError(
            f"{name}: {data_name} must have one row per id, that is, a shape that broadcasts to segment_ids.shape + "
            f"{data_name}.shape[1:] = {(*ids.shape, *row_shape)}; got {data_name}.shape = {data.shape}, "
            f"segment_ids.shape = {ids.shape}"
        )
    num_segments = _canonical_num_segments(name, ids, num_segments)
    clamps = _clamps(name, mode)
    if bucket_size is not None:
        _check_bucket_size(name, bucket_size, ids)
        if out_sharding is not None:
            raise NotImplementedError(f"{name}: out_sharding cannot be combined with bucket_size")
    sharding = jax_versions.canonicalize_sharding(out_sharding, name)
    if sharding is not None and sharding.spec.unreduced:
        raise NotImplementedError(f"{name}: out_sharding must not be unreduced, got {sharding.spec}")
    return SegmentCall(
        data=data,
        segment_ids=_follow_rows(_flat_ids(ids, num_segments, clamps), data),
        ids_shape=ids.shape,
        num_segments=num_segments,
        indices_are_sorted=bool(indices_are_sorted),
        bucket_size=bucket_size,
        out_sharding=sharding,
    )


def canonicalize_backward(
    name: str,
    d_output: ArrayLike,
    data: ArrayLike,
    segment_ids: ArrayLike,
    indices_are_sorted: bool,
    mode: Mode,
) -> tuple[Array, SegmentCall]:
    """Checks the arguments of a gradient that depends on the data."""
    d_output = cotangent_of_cells(name, d_output)
    call = canonicalize(name, data, segment_ids, d_output.shape[0], indices_are_sorted, mode, None)
    check_like(name, "d_output", d_output, "data", call.data, (d_output.shape[0], *call.data.shape[1:]))
    return d_output, call


def canonicalize_without_data(
    name: str, d_output: ArrayLike, segment_ids: ArrayLike, mode: Mode
) -> tuple[Array, Array, tuple[int, ...]]:
    """Checks the arguments of a gradient that needs no data; also gives the shape of the ids, which are flattened."""
    d_output = cotangent_of_cells(name, d_output)
    if not jnp.issubdtype(d_output.dtype, jnp.inexact):
        raise TypeError(f"{name}: d_output must have a floating dtype, got {d_output.dtype}")
    ids = checked_ids(name, segment_ids)
    return d_output, _flat_ids(ids, d_output.shape[0], _clamps(name, mode)), ids.shape


def cotangent_of_cells(name: str, d_output: ArrayLike) -> Array:
    d_output = as_array(name, "d_output", d_output)
    if d_output.ndim == 0:
        raise ValueError(f"{name}: d_output must have shape [num_segments, ...], got a scalar")
    return d_output


def check_like(name: str, argument: str, value: Array, like_name: str, like: Array, shape: tuple[int, ...]) -> None:
    """Checks that a cotangent has the floating dtype of `like`, and the shape that fits to it."""
    if value.dtype != like.dtype or not jnp.issubdtype(value.dtype, jnp.inexact):
        raise TypeError(
            f"{name}: {argument} and {like_name} must have the same floating dtype, got {value.dtype} and {like.dtype}"
        )
    if value.shape != shape:
        raise ValueError(f"{name}: {argument} must have shape {shape} to fit {like_name}, got {value.shape}")


def _broadcasts(shape: Sequence[int], target: Sequence[int]) -> bool:
    offset = len(target) - len(shape)
    return offset >= 0 and all(size in (1, target[offset + i]) for i, size in enumerate(shape))


def checked_ids(name: str, ids: ArrayLike, argument: str = "segment_ids") -> Array:
    ids = as_array(name, argument, ids)
    if ids.dtype == jnp.bool_:
        raise IndexError(f"{name}: {argument} must have an integer dtype, got bool")
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"{name}: {argument} must have an integer dtype, got {ids.dtype}")
    return ids


def _clamps(name: str, mode: Mode) -> bool:
    """Whether ids out of range are clamped rather than dropped."""
    try:
        return jax.lax.GatherScatterMode.from_any(mode) == jax.lax.GatherScatterMode.CLIP
    except ValueError:
        if mode == "one_hot":  # a mode that older versions of JAX do not know
            return False
    raise ValueError(
        f"{name}: mode must be None, 'fill', 'drop', 'clip', 'promise_in_bounds', 'one_hot' or a "
        f"jax.lax.GatherScatterMode, got {mode!r}"
    )


def canonical_edges(
    name: str,
    gather_ids: ArrayLike,
    segment_ids: ArrayLike,
    num_rows: int,
    num_segments: int,
    mode: Mode = None,
) -> tuple[Array, Array]:
    """The ids of edges, ``[E]``: gather ids as int32 that count from the front, and flat segment ids."""
    rows, segments = checked_ids(name, gather_ids, "gather_ids"), checked_ids(name, segment_ids)
    if segments.ndim != 1 or rows.shape != segments.shape:
        raise ValueError(
            f"{name}: gather_ids and segment_ids must have one shape [E], got {rows.shape} and {segments.shape}"
        )
    if num_rows > jnp.iinfo(jnp.int32).max:
        raise ValueError(f"{name}: at most 2^31 - 1 rows can be gathered from, got {num_rows}")
    if num_segments > jnp.iinfo(jnp.int32).max:
        raise ValueError(f"{name}: num_segments must be at most 2^31 - 1, got {num_segments}")
    # Ids of every dtype, as jax.numpy wraps them; what does not fit in 32 bits is out of range on its side.
    rows = wrapped_ids(rows, num_rows)
    if rows.dtype.itemsize == 8 and jnp.issubdtype(rows.dtype, jnp.signedinteger):
        rows = jnp.clip(rows, -1, num_rows)
    elif rows.dtype.itemsize >= 4 and jnp.issubdtype(rows.dtype, jnp.unsignedinteger):
        rows = jnp.minimum(rows, rows.dtype.type(min(num_rows, int(jnp.iinfo(rows.dtype).max))))
    return rows.astype(jnp.int32), _flat_ids(segments, num_segments, _clamps(name, mode))


def index_dtype(num_rows: int) -> Any:
    """The dtype of numbers of rows."""
    return jnp.int64 if num_rows > jnp.iinfo(jnp.int32).max else jnp.int32


def wrapped_ids(ids: Array, num_rows: int) -> Array:
    """Ids of rows, negative ones counted from the end once, as in ``jax.numpy``; in a dtype that this fits in."""
    if not jnp.issubdtype(ids.dtype, jnp.signedinteger):
        return ids
    if num_rows > jnp.iinfo(ids.dtype).max:
        ids = ids.astype(index_dtype(num_rows))
    return jnp.where(ids < 0, ids + ids.dtype.type(num_rows), ids)


def static_size(name: str, argument: str, size: int) -> int:
    """A number of rows or segments."""
    if not hasattr(size, "__index__"):
        raise TypeError(f"{name}: {argument} must be an integer, got {size!r}")
    size = jax_versions.concrete_or_error(size, f"{name}: {argument} must be static.")
    if size < 0:
        raise ValueError(f"{name}: {argument} must be non-negative, got {size}")
    return size


def _canonical_num_segments(name: str, ids: Array, num_segments: int | None) -> int:
    if num_segments is None:
        if ids.size == 0:
            raise ValueError(f"{name}: num_segments is None, but segment_ids is empty and gives no number of segments")
        num_segments = jnp.max(ids) + 1 if isinstance(ids, jax.core.Tracer) else int(jnp.max(ids)) + 1
    return static_size(name, "num_segments", num_segments)


def _check_bucket_size(name: str, bucket_size: int, ids: Array) -> None:
    message = f"{name}: bucket_size must be a positive integer, got {bucket_size!r}"
    if not isinstance(bucket_size, int | np.integer) or bucket_size < 0:
        raise TypeError(message)
    if bucket_size == 0:
        raise ZeroDivisionError(message)
    if ids.ndim != 1:
        raise ValueError(f"{name}: bucket_size needs segment_ids of shape [N], got shape {ids.shape}")


def _flat_ids(ids: Array, num_segments: int, clamps: bool) -> Array:
    """Ids as int32 or int64 ``[N]``. What does not fit stays out of range, and ascending ids stay ascending."""
    if clamps and num_segments > 0:
        ids = jnp.clip(ids, 0, min(num_segments - 1, int(jnp.iinfo(ids.dtype).max)))
    ids = ids.reshape(-1) if ids.ndim != 1 else ids
    signed = jnp.int64 if ids.dtype.itemsize == 8 else jnp.int32
    most = jnp.iinfo(signed).max
    if jnp.iinfo(ids.dtype).max > most and num_segments <= most:
        ids = jnp.minimum(ids, ids.dtype.type(most))  # to wrap would make them negative, in front of all others
    return ids if ids.dtype == signed else ids.astype(signed)


def _follow_rows(ids: Array, data: Array) -> Array:
    """Under explicit sharding, splits the ids over devices as the rows of `data` are."""
    return reshard_as(ids, data, (0,)) if data.shape[:1] == ids.shape else ids
