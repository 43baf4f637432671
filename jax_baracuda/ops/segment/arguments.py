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
from jax_baracuda.ops.segment.cells import in_order, put_back
from jax_baracuda.ops.segment.definitions import Params
from jax_baracuda.ops.segment.ids import Mode as Mode
from jax_baracuda.ops.segment.ids import check_numbered, checked_ids, clamps, flat_ids, static_size
from jax_baracuda.ops.segment.plan import SegmentPlan, check_plan

TieBreak = Literal["split", "first"]
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
    order: Array | None = None
    """[N], the rows sorted by segment, if there is a plan"""
    sorted_ids: Array | None = None
    """[N], the segment ids in that order"""

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

    def in_order(self, unless: frozenset[str] = frozenset()) -> SegmentCall:
        """Sorts the rows as the plan says. `unless`: dtypes whose kernels accept an order, so rows are not moved."""
        if self.order is None or self.data.dtype.name in unless:
            return self
        rows = in_order(self.rows(self.data), self.order)
        return dataclasses.replace(
            self, data=rows, segment_ids=self.sorted_ids, indices_are_sorted=True, order=None, sorted_ids=None
        )

    def in_own_order(self, rows: Array) -> Array:
        """Undoes the plan's order: one row per id, in the order of the call's arguments."""
        return shaped_as_ids(rows if self.order is None else put_back(rows, self.order), self.ids_shape)

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
          reduction: ``(params, *, data [N, ...], segment_ids [N]) -> [S, ...]``; with a plan, also ``order [N]`` and
            ``sorted_ids [N]``
          params: those of the reduction without buckets.
          reduce_buckets: reduces the leading axis of the buckets' results. None: buckets are ignored.
        """
        if self.bucket_size is not None and reduce_buckets is not None:
            return self._reduce_in_buckets(reduction, params, reduce_buckets)

        def call(data: Array, segment_ids: Array, **order: Array) -> Array:
            return reduction(params, data=self.rows(data), segment_ids=segment_ids, **order)

        return self._with_out_sharding(call)

    def _reduce_in_buckets(
        self, reduction: Callable[..., Array], params: Params, reduce_buckets: Callable[..., Array]
    ) -> Array:
        """Reduces each bucket to its own copy of the segments, then the copies."""
        ids, num_segments = self.segment_ids, self.num_segments
        num_buckets = -(-ids.shape[0] // self.bucket_size)
        bucket = jnp.repeat(jnp.arange(num_buckets, dtype=ids.dtype), self.bucket_size)[: ids.shape[0]]
        ids = jnp.where((ids >= 0) & (ids < num_segments), ids + bucket * num_segments, -1)
        params = dataclasses.replace(params, num_segments=num_buckets * num_segments, indices_are_sorted=False)
        output = reduction(params, data=self.rows(self.data), segment_ids=ids)
        return reduce_buckets(output.reshape(num_buckets, num_segments, *output.shape[1:]), axis=0).astype(output.dtype)

    def map_rows(self, function: Callable[..., Array], params: Params) -> Array:
        """Applies ``(params, *, data [N, ...], segment_ids [N]) -> [N, ...]`` to the rows."""

        def call(data: Array, segment_ids: Array) -> Array:
            return shaped_as_ids(function(params, data=self.rows(data), segment_ids=segment_ids), self.ids_shape)

        return self._with_out_sharding(call)

    def gradient(self, rules: KernelVjp, params: Params, d_output: Array) -> Array:
        """The cotangent of the data, given that of the cells ``[S, ...]``."""
        data, d_output, *ids = jax_versions.unify_varying(self.data, d_output, *self._ids().values())
        rows = self.rows(data)
        _, residuals = rules.forward(params, data=rows, **dict(zip(self._ids(), ids, strict=True)))
        d_rows = rules.backward(params, residuals, d_output)["data"]
        return self.cotangent_of_data(data, d_rows)

    def cotangent_of_data(self, data: Array, d_rows: Array) -> Array:
        """The cotangent of `data`, given that of its rows."""
        data, d_rows = jax_versions.unify_varying(data, d_rows)
        rows = jax.typeof(self.rows(data))
        [d_data] = jax.linear_transpose(self.rows, data)(reshard_like(d_rows, rows))
        return d_data

    def _ids(self) -> dict[str, Array]:
        """The arrays of ids and orders, by name."""
        arrays = {"segment_ids": self.segment_ids, "order": self.order, "sorted_ids": self.sorted_ids}
        return {name: array for name, array in arrays.items() if array is not None}

    def _with_out_sharding(self, call: Callable[..., Array]) -> Array:
        if self.out_sharding is not None:
            explicit_axes = self.out_sharding.mesh.explicit_axes
            call = jax.sharding.auto_axes(call, axes=explicit_axes, out_sharding=self.out_sharding)
        return call(self.data, **self._ids())


def reduce_numbers(
    name: str, call: SegmentCall, rules: KernelVjp, params: Params, reduce_buckets: Callable[..., Array]
) -> Array:
    """A sum or a product. Narrow integers are reduced as int32: arithmetic modulo 2^32 is right modulo 2^16 and 2^8."""
    if call.data.dtype == jnp.bool_:
        raise TypeError(f"{name}: data must have a numeric dtype, got bool")
    return call.with_wide_integers().reduce(rules, params, reduce_buckets).astype(call.data.dtype)


def shaped_as_ids(rows: Array, ids_shape: tuple[int, ...]) -> Array:
    return rows if len(ids_shape) == 1 else rows.reshape(*ids_shape, *rows.shape[1:])


def canonicalize(
    name: str,
    data: ArrayLike,
    segment_ids: ArrayLike | None,
    num_segments: int | None,
    indices_are_sorted: bool,
    mode: Mode,
    out_sharding: OutSharding,
    bucket_size: int | None = None,
    data_name: str = "data",
    plan: SegmentPlan | None = None,
) -> SegmentCall:
    """Checks the arguments that all segment reductions share. Exceptions have the types that ``jax.ops`` raises."""
    data = as_array(name, data_name, data)
    ids = ids_of_rows(name, segment_ids, plan, num_segments=num_segments, mode=mode)
    row_shape = data.shape[1:]
    if not broadcasts(data.shape, (*ids.shape, *row_shape)):
        raise ValueError(
            f"{name}: {data_name} must have one row per id, that is, a shape that broadcasts to segment_ids.shape + "
            f"{data_name}.shape[1:] = {(*ids.shape, *row_shape)}; got {data_name}.shape = {data.shape}, "
            f"segment_ids.shape = {ids.shape}"
        )
    num_segments = _canonical_num_segments(name, ids, num_segments) if plan is None else plan.num_segments
    clamps_ids = clamps(name, mode)
    if bucket_size is not None:
        if plan is not None:
            raise ValueError(f"{name}: bucket_size cannot be combined with a plan")
        _check_bucket_size(name, bucket_size, ids)
        if out_sharding is not None:
            raise NotImplementedError(f"{name}: out_sharding cannot be combined with bucket_size")
    sharding = jax_versions.canonicalize_sharding(out_sharding, name)
    if sharding is not None and sharding.spec.unreduced:
        raise NotImplementedError(f"{name}: out_sharding must not be unreduced, got {sharding.spec}")
    return SegmentCall(
        data=data,
        segment_ids=_follow_rows(flat_ids(ids, num_segments, clamps_ids), data),
        ids_shape=ids.shape,
        num_segments=num_segments,
        indices_are_sorted=bool(indices_are_sorted) and plan is None,
        bucket_size=bucket_size,
        out_sharding=sharding,
        order=None if plan is None else plan.edge_order,
        sorted_ids=None if plan is None else plan.segment_ids,
    )


def ids_of_rows(name: str, segment_ids: ArrayLike | None, plan: SegmentPlan | None, **of_plan: Any) -> Array:
    """The segment ids, from the argument or from the plan. `of_plan`: other arguments that a plan replaces."""
    if plan is not None:
        check_plan(name, plan, segment_ids=segment_ids, **of_plan)
        return plan.edge_segment_ids
    if segment_ids is None:
        raise TypeError(f"{name}: segment_ids must be given, or a plan")
    return checked_ids(name, segment_ids)


def canonicalize_backward(
    name: str,
    d_output: ArrayLike,
    data: ArrayLike,
    segment_ids: ArrayLike | None,
    indices_are_sorted: bool,
    mode: Mode,
    plan: SegmentPlan | None,
) -> tuple[Array, SegmentCall]:
    """Checks the arguments of a gradient that depends on the data."""
    d_output = cotangent_of_cells(name, d_output, plan)
    num_segments = d_output.shape[0] if plan is None else None
    call = canonicalize(name, data, segment_ids, num_segments, indices_are_sorted, mode, None, plan=plan)
    check_like(name, "d_output", d_output, "data", call.data, (d_output.shape[0], *call.data.shape[1:]))
    return d_output, call


def canonicalize_without_data(
    name: str, d_output: ArrayLike, segment_ids: ArrayLike | None, mode: Mode, plan: SegmentPlan | None
) -> tuple[Array, Array, tuple[int, ...]]:
    """Checks the arguments of a gradient that needs no data. Returns d_output, the flat ids and their former shape."""
    d_output = cotangent_of_cells(name, d_output, plan)
    if not jnp.issubdtype(d_output.dtype, jnp.inexact):
        raise TypeError(f"{name}: d_output must have a floating dtype, got {d_output.dtype}")
    ids = ids_of_rows(name, segment_ids, plan, mode=mode)
    return d_output, flat_ids(ids, d_output.shape[0], clamps(name, mode)), ids.shape


def cotangent_of_cells(name: str, d_output: ArrayLike, plan: SegmentPlan | None) -> Array:
    d_output = as_array(name, "d_output", d_output)
    if d_output.ndim == 0:
        raise ValueError(f"{name}: d_output must have shape [num_segments, ...], got a scalar")
    if isinstance(plan, SegmentPlan) and plan.num_segments != d_output.shape[0]:
        raise ValueError(f"{name}: the plan is for {plan.num_segments} segments, got d_output.shape = {d_output.shape}")
    return d_output


def check_like(name: str, argument: str, value: Array, like_name: str, like: Array, shape: tuple[int, ...]) -> None:
    """Checks that a cotangent has the floating dtype of `like` and the given shape."""
    if value.dtype != like.dtype or not jnp.issubdtype(value.dtype, jnp.inexact):
        raise TypeError(
            f"{name}: {argument} and {like_name} must have the same floating dtype, got {value.dtype} and {like.dtype}"
        )
    if value.shape != shape:
        raise ValueError(f"{name}: {argument} must have shape {shape} to fit {like_name}, got {value.shape}")


def broadcasts(shape: Sequence[int], target: Sequence[int]) -> bool:
    offset = len(target) - len(shape)
    return offset >= 0 and all(size in (1, target[offset + i]) for i, size in enumerate(shape))


def _canonical_num_segments(name: str, ids: Array, num_segments: int | None) -> int:
    if num_segments is None:
        if ids.size == 0:
            raise ValueError(f"{name}: num_segments is None, but segment_ids is empty and gives no number of segments")
        num_segments = jnp.max(ids) + 1 if isinstance(ids, jax.core.Tracer) else int(jnp.max(ids)) + 1
    num_segments = static_size(name, "num_segments", num_segments)
    check_numbered(name, "segments", num_segments)
    return num_segments


def _check_bucket_size(name: str, bucket_size: int, ids: Array) -> None:
    message = f"{name}: bucket_size must be a positive integer, got {bucket_size!r}"
    if not isinstance(bucket_size, int | np.integer) or bucket_size < 0:
        raise TypeError(message)
    if bucket_size == 0:
        raise ZeroDivisionError(message)
    if ids.ndim != 1:
        raise ValueError(f"{name}: bucket_size needs segment_ids of shape [N], got shape {ids.shape}")


def _follow_rows(ids: Array, data: Array) -> Array:
    """Under explicit sharding, shards the ids like the rows of `data`."""
    return reshard_as(ids, data, (0,)) if data.shape[:1] == ids.shape else ids
