"""The arguments of the segment functions: checks, canonical forms, and how reductions are applied to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from jax_baracuda._core import jax_versions
from jax_baracuda._core.arrays import (
    as_array,
    broadcasts,
    check_choice,
    check_shape,
    flag,
    in_range,
    integer_array,
    reshard_as,
    reshard_like,
)
from jax_baracuda._core.autodiff import KernelVjp
from jax_baracuda._core.functions import Params
from jax_baracuda._core.selection import may_run_kernel
from jax_baracuda.ops.segment.ids import Mode as Mode
from jax_baracuda.ops.segment.ids import canonical_edges, check_numbered, clamps, flat_ids, static_size
from jax_baracuda.ops.segment.plan import SegmentPlan, check_gathers, check_plan, check_size_of_plan, permuted

TieBreak = Literal["split", "first"]
Accumulator = Literal["float64"]
OutSharding = NamedSharding | PartitionSpec | None


@dataclasses.dataclass(frozen=True)
class Segments:
    """Which row belongs to which segment: the checked arguments of a call without its data."""

    name: str
    """The public function, for errors"""
    ids: Array
    """[N], int32 or int64; out of range means dropped"""
    ids_shape: tuple[int, ...]
    num_segments: int
    indices_are_sorted: bool
    plan: SegmentPlan | None

    def params(self, **options: Any) -> Params:
        """The static arguments. Checks `deterministic`."""
        if "deterministic" in options:
            options["deterministic"] = flag(self.name, "deterministic", options["deterministic"])
        return Params(num_segments=self.num_segments, indices_are_sorted=self.indices_are_sorted, **options)

    def rows(self, data: Array) -> Array:
        """Data that broadcasts to ``[*ids_shape, ...]`` as one row per id, ``[N, ...]``."""
        row_shape = data.shape[1:]
        if data.shape != (*self.ids_shape, *row_shape):
            data = jnp.broadcast_to(data, (*self.ids_shape, *row_shape))
        return data if len(self.ids_shape) == 1 else data.reshape(-1, *row_shape)

    def shaped_as_ids(self, rows: Array) -> Array:
        """Rows ``[N, ...]`` as ``[*ids_shape, ...]``."""
        return rows if len(self.ids_shape) == 1 else rows.reshape(*self.ids_shape, *rows.shape[1:])


@dataclasses.dataclass(frozen=True)
class SegmentCall(Segments):
    """The checked arguments of a segment reduction."""

    data: Array
    """Broadcasts to [*ids_shape, ...]"""
    bucket_size: int | None
    out_sharding: NamedSharding | None

    def with_data(self, data: Array) -> SegmentCall:
        return dataclasses.replace(self, data=data)

    def sorted_by_plan(self, unless: frozenset[str] = frozenset()) -> SegmentCall:
        """Sorts the rows as the plan says. `unless`: dtypes whose kernels accept an order, so rows are not moved."""
        if self.plan is None or self.data.dtype.name in unless:
            return self
        rows = permuted(self.rows(self.data), self.plan.edge_order)
        return dataclasses.replace(self, data=rows, ids=self.plan.segment_ids, indices_are_sorted=True, plan=None)

    def reduce(
        self, reduction: Callable[..., Array], params: Params, reduce_buckets: Callable[..., Array] | None = None
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

        def call(data: Array, **arrays: Array) -> Array:
            return reduction(params, data=self.rows(data), **arrays)

        if self.out_sharding is not None:
            explicit_axes = self.out_sharding.mesh.explicit_axes
            call = jax.sharding.auto_axes(call, axes=explicit_axes, out_sharding=self.out_sharding)
        return call(self.data, **self._ids())

    def _ids(self) -> dict[str, Array]:
        """The ids, and the order of a plan, by the names that reductions give them."""
        ids = {"segment_ids": self.ids}
        return ids if self.plan is None else ids | {"order": self.plan.edge_order, "sorted_ids": self.plan.segment_ids}

    def _reduce_in_buckets(
        self, reduction: Callable[..., Array], params: Params, reduce_buckets: Callable[..., Array]
    ) -> Array:
        """Reduces each bucket to its own copy of the segments, then the copies."""
        ids, num_segments = self.ids, self.num_segments
        num_buckets = -(-ids.shape[0] // self.bucket_size)
        bucket = jnp.repeat(jnp.arange(num_buckets, dtype=ids.dtype), self.bucket_size)[: ids.shape[0]]
        ids = jnp.where(in_range(ids, num_segments), ids + bucket * num_segments, -1)
        params = Params(params, num_segments=num_buckets * num_segments, indices_are_sorted=False)
        output = reduction(params, data=self.rows(self.data), segment_ids=ids)
        return reduce_buckets(output.reshape(num_buckets, num_segments, *output.shape[1:])).astype(output.dtype)

    def gradient(self, reduction: KernelVjp, params: Params, d_output: Array) -> Array:
        """The cotangent of the data, given that of the cells ``[S, ...]``. Much faster to trace than ``jax.vjp``."""
        data, d_output, *ids = jax_versions.unify_varying(self.data, d_output, *self._ids().values())
        _, residuals = reduction.forward(params, data=self.rows(data), **dict(zip(self._ids(), ids, strict=True)))
        return self.cotangent_of_data(reduction.backward(params, residuals, d_output)["data"])

    def cotangent_of_data(self, d_rows: Array) -> Array:
        """The cotangent of the data, given that of its rows."""
        data, d_rows = jax_versions.unify_varying(self.data, d_rows)
        rows = jax.typeof(self.rows(data))
        [d_data] = jax.linear_transpose(self.rows, data)(reshard_like(d_rows, rows))
        return d_data


def as_inexact(data: Array) -> Array:
    """Integers and bool as floating numbers, as in ``jax.numpy.mean``."""
    if jnp.issubdtype(data.dtype, jnp.inexact):
        return data
    return data.astype(jnp.float64 if data.dtype.itemsize == 8 else jnp.float32)


def with_wide_integers(data: Array) -> Array:
    """bool and integers of less than 32 bits as int32, whose arithmetic is right modulo 2^16 and 2^8."""
    is_narrow = not jnp.issubdtype(data.dtype, jnp.inexact) and data.dtype.itemsize < 4
    return data.astype(jnp.int32) if is_narrow else data


def canonical_accumulator(name: str, accumulator: Accumulator | None, dtype: Any) -> Accumulator | None:
    """Checks the accumulator of a sum of numbers of `dtype`; None where it is the usual one."""
    check_choice(name, "accumulator", accumulator, None, "float64")
    if accumulator is not None and jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(f"{name}: accumulator='float64' needs data of a real dtype, got {dtype}")
    is_wider = jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize < np.dtype(np.float64).itemsize
    return accumulator if is_wider else None


def reduce_numbers(
    call: SegmentCall, reduction: Callable[..., Array], params: Params, reduce_buckets: Callable[..., Array] | None
) -> Array:
    """A sum or a product."""
    if call.data.dtype == jnp.bool_:
        raise TypeError(f"{call.name}: data must have a numeric dtype, got bool")
    wide = call.with_data(with_wide_integers(call.data))
    return wide.reduce(reduction, params, reduce_buckets).astype(call.data.dtype)


# ----------------------------------------------------------------------------------------------------------------------
# Checks of rows and segments. Exceptions have the types that ``jax.ops`` raises.


def canonical_segments(
    name: str,
    segment_ids: ArrayLike | None,
    num_segments: int | None,
    indices_are_sorted: bool,
    mode: Mode,
    plan: SegmentPlan | None,
) -> Segments:
    """Checks which row belongs to which segment, by the ids or by the plan."""
    check_plan(name, plan, segment_ids=segment_ids, num_segments=num_segments, mode=mode)
    if plan is not None:
        ids = plan.edge_segment_ids
        return Segments(name, ids, ids.shape, plan.num_segments, indices_are_sorted=False, plan=plan)
    if segment_ids is None:
        raise TypeError(f"{name}: segment_ids must be given, or a plan")
    ids = integer_array(name, "segment_ids", segment_ids)
    num_segments = _canonical_num_segments(name, ids, num_segments)
    is_sorted = flag(name, "indices_are_sorted", indices_are_sorted)
    return Segments(name, flat_ids(ids, num_segments, clamps(name, mode)), ids.shape, num_segments, is_sorted, None)


def canonicalize(
    segments: Segments,
    data: ArrayLike,
    out_sharding: OutSharding = None,
    bucket_size: int | None = None,
    data_name: str = "data",
) -> SegmentCall:
    """Checks the data of a reduction, and how it is computed."""
    name, ids_shape = segments.name, segments.ids_shape
    data = as_array(name, data_name, data)
    row_shape = data.shape[1:]
    if not broadcasts(data.shape, (*ids_shape, *row_shape)):
        labels_axes = len(ids_shape) > 1 and data.shape[: len(ids_shape)] == ids_shape
        advice = "; flatten the ids and the axes that they label" if labels_axes else ""
        raise ValueError(
            f"{name}: {data_name} must have one row per id, that is, a shape that broadcasts to segment_ids.shape + "
            f"{data_name}.shape[1:] = {(*ids_shape, *row_shape)}; got {data_name}.shape = {data.shape}, "
            f"segment_ids.shape = {ids_shape}{advice}"
        )
    if bucket_size is not None:
        _check_bucket_size(segments, bucket_size, out_sharding)
    sharding = jax_versions.canonicalize_sharding(out_sharding, name)
    if sharding is not None and sharding.spec.unreduced:
        raise NotImplementedError(f"{name}: out_sharding must not be unreduced, got {sharding.spec}")
    ids = segments.ids
    if data.shape[:1] == ids.shape:
        ids = reshard_as(ids, data, (0,))
    return SegmentCall(**{**vars(segments), "ids": ids}, data=data, bucket_size=bucket_size, out_sharding=sharding)


def canonical_cotangent(
    name: str,
    d_output: ArrayLike,
    segment_ids: ArrayLike | None,
    indices_are_sorted: bool,
    mode: Mode,
    plan: SegmentPlan | None,
) -> tuple[Array, Segments]:
    """Checks the cotangent of cells ``[S, ...]``, from whose shape the number of segments follows."""
    d_output = as_array(name, "d_output", d_output)
    if d_output.ndim == 0:
        raise ValueError(f"{name}: d_output must have shape [num_segments, ...], got a scalar")
    if not jnp.issubdtype(d_output.dtype, jnp.inexact):
        raise TypeError(f"{name}: d_output must have a floating dtype, got {d_output.dtype}")
    num_segments = d_output.shape[0] if plan is None else None
    segments = canonical_segments(name, segment_ids, num_segments, indices_are_sorted, mode, plan)
    check_size_of_plan(name, segments.num_segments, "segments", "d_output", d_output)
    return d_output, segments


def canonicalize_primal(segments: Segments, data: ArrayLike, d_output: Array) -> SegmentCall:
    """Checks the data of a gradient."""
    call = canonicalize(segments, data)
    check_like(call.name, "d_output", d_output, "data", call.data, (call.num_segments, *call.data.shape[1:]))
    return call


def check_like(name: str, argument: str, value: Array, like_name: str, like: Array, shape: tuple[int, ...]) -> None:
    """Checks that a cotangent has the floating dtype of `like` and the given shape."""
    if value.dtype != like.dtype or not jnp.issubdtype(value.dtype, jnp.inexact):
        raise TypeError(
            f"{name}: {argument} and {like_name} must have the same floating dtype, got {value.dtype} and {like.dtype}"
        )
    check_shape(name, argument, value, shape, why=f" to fit {like_name}")


def _canonical_num_segments(name: str, ids: Array, num_segments: int | None) -> int:
    if num_segments is None:
        if ids.size == 0:
            raise ValueError(f"{name}: num_segments is None, but segment_ids is empty and gives no number of segments")
        if isinstance(ids, jax.core.Tracer):
            message = f"{name}: num_segments must be static: pass num_segments=, because segment_ids are traced here."
            jax_versions.concrete_or_error(jnp.max(ids) + 1, message)
        num_segments = int(jnp.max(ids)) + 1
    num_segments = static_size(name, "num_segments", num_segments)
    check_numbered(name, "segments", num_segments)
    return num_segments


def _check_bucket_size(segments: Segments, bucket_size: int, out_sharding: OutSharding) -> None:
    name = segments.name
    if segments.plan is not None:
        raise ValueError(f"{name}: bucket_size cannot be combined with a plan")
    message = f"{name}: bucket_size must be a positive integer, got {bucket_size!r}"
    if not isinstance(bucket_size, int | np.integer) or bucket_size < 0:
        raise TypeError(message)
    if bucket_size == 0:
        raise ZeroDivisionError(message)
    if len(segments.ids_shape) != 1:
        raise ValueError(f"{name}: bucket_size needs segment_ids of shape [N], got shape {segments.ids_shape}")
    if out_sharding is not None:
        raise NotImplementedError(f"{name}: out_sharding cannot be combined with bucket_size")


# ----------------------------------------------------------------------------------------------------------------------
# Edges.


@dataclasses.dataclass(frozen=True)
class EdgeCall:
    """The checked arguments of a function that gathers rows along edges."""

    name: str
    """The public function, for errors"""
    data: Array
    num_segments: int
    edges: dict[str, Array]
    """By the names of the fields of a plan: the ids of the edges in the order in which kernels read them. With a plan,
    also that order, and the edges of the gradient."""

    def params(self, indices_are_sorted: bool, deterministic: bool, **options: Any) -> Params:
        """The static arguments. `deterministic` holds for the gradient's sums, too, whose edges may be unsorted."""
        is_sorted = flag(self.name, "indices_are_sorted", indices_are_sorted) or "edge_order" in self.edges
        return Params(
            num_segments=self.num_segments,
            num_rows=self.data.shape[0],
            indices_are_sorted=is_sorted,
            deterministic=flag(self.name, "deterministic", deterministic) or (is_sorted and may_run_kernel()),
            **options,
        )


def canonicalize_edges(
    name: str,
    data: ArrayLike,
    gather_ids: ArrayLike | None,
    segment_ids: ArrayLike | None,
    num_segments: int | None,
    mode: Mode,
    plan: SegmentPlan | None,
    data_name: str = "data",
) -> EdgeCall:
    """Checks the rows and the edges."""
    data = as_array(name, data_name, data)
    if data.ndim == 0 or not jnp.issubdtype(data.dtype, jnp.floating):
        raise TypeError(f"{name}: {data_name} must be [N, ...] with a floating dtype, got {data.shape} of {data.dtype}")
    num_rows = data.shape[0]
    check_plan(name, plan, gather_ids=gather_ids, segment_ids=segment_ids, num_segments=num_segments, mode=mode)
    if plan is not None:
        check_gathers(name, plan)
        check_size_of_plan(name, plan.num_rows, "rows", data_name, data)
        num_segments = plan.num_segments
        of_gradient = ("transposed_gather_ids", "transposed_segment_ids", "transposed_order")
        edges = {field: getattr(plan, field) for field in ("gather_ids", "segment_ids", "edge_order", *of_gradient)}
    else:
        needed = {"gather_ids": gather_ids, "segment_ids": segment_ids, "num_segments": num_segments}
        if missing := [argument for argument, value in needed.items() if value is None]:
            raise TypeError(f"{name}: {' and '.join(missing)} must be given, or a plan")
        num_segments = static_size(name, "num_segments", num_segments)
        rows, segments = canonical_edges(name, gather_ids, segment_ids, num_rows, num_segments, mode)
        edges = {"gather_ids": rows, "segment_ids": segments}
    num_edges = edges["segment_ids"].shape[0]
    if num_rows == 0 and num_edges != 0:
        raise ValueError(f"{name}: {data_name} must have rows for {num_edges} edges to gather, got shape {data.shape}")
    return EdgeCall(name, data, num_segments, edges)


def canonicalize_edges_between(
    name: str,
    data_name: str,
    data: Array,
    segments_name: str,
    segments: Array,
    gather_ids: ArrayLike | None,
    segment_ids: ArrayLike | None,
    mode: Mode,
    plan: SegmentPlan | None,
) -> EdgeCall:
    """Checks the rows, the edges, and that an array `segments` has a row for each segment."""
    num_segments = segments.shape[0] if plan is None else None
    call = canonicalize_edges(name, data, gather_ids, segment_ids, num_segments, mode, plan, data_name)
    check_size_of_plan(name, call.num_segments, "segments", segments_name, segments)
    return call
