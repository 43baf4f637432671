"""The functions that gather rows along edges: their arguments, and common parts of their ops."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jax_baracuda._core.arrays import as_array
from jax_baracuda._core.selection import may_run_kernel
from jax_baracuda.ops.segment.cells import gather_or_zeros, in_order, put_back
from jax_baracuda.ops.segment.definitions import limit_of_32_bits
from jax_baracuda.ops.segment.ids import Mode, canonical_edges, index_dtype, static_size
from jax_baracuda.ops.segment.plan import SegmentPlan, check_gathers, check_plan


def as_rows(name: str, data: ArrayLike) -> Array:
    """Data to gather rows from."""
    data = as_array(name, "data", data)
    if data.ndim == 0 or not jnp.issubdtype(data.dtype, jnp.floating):
        raise TypeError(f"{name}: data must be [N, ...] with a floating dtype, got {data.shape} of {data.dtype}")
    return data


@dataclasses.dataclass(frozen=True)
class Edges:
    """The edges of a call in the order in which kernels read them. With a plan, also the edges of its gradient."""

    num_segments: int
    gather_ids: Array
    segment_ids: Array
    edge_order: Array | None = None
    transposed_gather_ids: Array | None = None
    transposed_segment_ids: Array | None = None
    transposed_order: Array | None = None

    def arrays(self) -> dict[str, Array]:
        """The arrays that are not None, by name."""
        arrays = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)[1:]}
        return {name: array for name, array in arrays.items() if array is not None}

    def in_order(self) -> Edges:
        """The same edges, renumbered in the order of their plan."""
        num_edges = self.edge_order.shape[0]
        places = jnp.arange(num_edges, dtype=index_dtype(num_edges))
        transposed_order = in_order(put_back(places, self.edge_order), self.transposed_order)
        return dataclasses.replace(self, edge_order=None, transposed_order=transposed_order)

    def params(
        self,
        params_type: Callable[..., Any],
        data: Array,
        indices_are_sorted: bool,
        deterministic: bool,
        **options: Any,
    ) -> Any:
        """The static arguments, as :class:`GatherParams` or a subclass with more `options`."""
        in_order = bool(indices_are_sorted) or self.edge_order is not None
        return params_type(
            num_segments=self.num_segments,
            num_rows=data.shape[0],
            indices_are_sorted=in_order,
            deterministic=bool(deterministic) or (in_order and may_run_kernel()),
            **options,
        )


def canonicalize_edges(
    name: str,
    data: Array,
    gather_ids: ArrayLike | None,
    segment_ids: ArrayLike | None,
    num_segments: int | None,
    mode: Mode,
    plan: SegmentPlan | None,
) -> Edges:
    """Checks the edges. `data` has been checked by :func:`as_rows`."""
    edges = _edges_of(name, data, gather_ids, segment_ids, num_segments, mode, plan)
    if data.shape[0] == 0 and edges.segment_ids.shape[0] != 0:
        raise ValueError(
            f"{name}: data must have rows for {edges.segment_ids.shape[0]} edges to gather, got shape {data.shape}"
        )
    return edges


def _edges_of(
    name: str,
    data: Array,
    gather_ids: ArrayLike | None,
    segment_ids: ArrayLike | None,
    num_segments: int | None,
    mode: Mode,
    plan: SegmentPlan | None,
) -> Edges:
    if plan is None:
        if gather_ids is None or segment_ids is None or num_segments is None:
            raise TypeError(f"{name}: gather_ids, segment_ids and num_segments must be given, or a plan")
        num_segments = static_size(name, "num_segments", num_segments)
        return Edges(num_segments, *canonical_edges(name, gather_ids, segment_ids, data.shape[0], num_segments, mode))
    check_plan(name, plan, gather_ids=gather_ids, segment_ids=segment_ids, num_segments=num_segments, mode=mode)
    check_gathers(name, plan)
    if plan.num_rows != data.shape[0]:
        raise ValueError(f"{name}: the plan is for {plan.num_rows} rows, got data.shape = {data.shape}")
    return Edges(**{field.name: getattr(plan, field.name) for field in dataclasses.fields(Edges)})


@dataclasses.dataclass(frozen=True)
class GatherParams:
    """The static arguments of a call."""

    num_segments: int
    num_rows: int
    indices_are_sorted: bool
    deterministic: bool
    """Holds for the gradient's sums, too, whose edges may be unsorted."""


def gather_rows(data: Array, gather_ids: Array, clips_gather_ids: bool) -> Array:
    """The rows that ids name. Ids out of range give the nearest row or zeros, and no gradient goes through them."""
    if data.shape[0] == 0:
        return jnp.zeros((*gather_ids.shape, *data.shape[1:]), data.dtype)
    if clips_gather_ids:
        return data.at[gather_ids].get(mode="promise_in_bounds", wrap_negative_indices=False)
    return gather_or_zeros(data, gather_ids)


def as_gather_ids(segment_ids: Array, num_segments: int) -> Array:
    """The segments that edges gather from in the backward pass, -1 for dropped edges."""
    return jnp.where((segment_ids >= 0) & (segment_ids < num_segments), segment_ids, -1).astype(jnp.int32)


def replicated_dims_of_cells(*, has_edge_order: bool) -> tuple[str, ...]:
    """For ops whose results are cells: without an edge order, each device may compute its own segments."""
    return ("gathered", "segment", "edge") if has_edge_order else ("gathered",)


def replicated_dims(*, has_edge_order: bool) -> tuple[str, ...]:
    """For other ops. An edge order refers to all edges, so they are replicated with it."""
    return ("gathered", "segment", "edge") if has_edge_order else ("gathered", "segment")


def limit_of_edges(data: Any, gather_ids: Any, segment_ids: Any, *_: Any, num_segments: int) -> str | None:
    return limit_of_32_bits(segment_ids.shape[0], num_segments)
