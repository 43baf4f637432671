"""The order of rows or edges by segment, and plans: orders that are computed once for many calls."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jax_baracuda._core import jax_versions
from jax_baracuda._core.arrays import FLOATING_DTYPES, INTEGER_DTYPES, in_range, integer_array
from jax_baracuda._core.guarantees import EXACT
from jax_baracuda._core.op import Op
from jax_baracuda._core.primitives import define_op
from jax_baracuda._core.rules import Rule, at_least, on_gpu, shares_sort
from jax_baracuda.ops.segment.definitions import IDS, ROWS, SEGMENT_FIELDS
from jax_baracuda.ops.segment.ids import (
    canonical_edges,
    check_num_segments,
    check_numbered,
    flat_ids,
    index_dtype,
    static_size,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class SegmentPlan:
    """The edges of a graph, sorted by receiver and sorted by sender; see :func:`segment_plan`.

    A pytree of int32 arrays (orders of 2^31 edges or more: int64): pass it to compiled programs as an ordinary
    argument, never as a static one. A plan without gather ids has only `edge_order`, `segment_ids` and
    `edge_segment_ids`; its other arrays are None. Plans are compared by identity; :meth:`validate` compares their
    arrays.
    """

    edge_order: Array
    """``[E]``, the edges sorted by segment (stably), dropped edges last."""
    gather_ids: Array | None
    """``[E]``, the row that each edge of `edge_order` gathers; -1 or `num_rows` where the id is out of range."""
    segment_ids: Array
    """``[E]``, the segment of each edge of `edge_order`, ascending; `num_segments` for a dropped edge."""
    edge_segment_ids: Array
    """``[E]``, the segment of each edge in the original order; -1 or `num_segments` for a dropped edge."""
    transposed_order: Array | None
    """``[E]``, the edges sorted by the row that they gather."""
    transposed_gather_ids: Array | None
    """``[E]``, the segment of each edge of `transposed_order`; -1 or `num_segments` for a dropped edge."""
    transposed_segment_ids: Array | None
    """``[E]``, the row of each edge of `transposed_order`, ascending; `num_rows` where the id is out of range."""
    edge_gather_ids: Array | None
    """``[E]``, the row that each edge gathers, in the original order; -1 or `num_rows` where the id is out of range."""
    num_segments: int = dataclasses.field(metadata={"static": True})
    num_rows: int | None = dataclasses.field(metadata={"static": True})

    def __hash__(self) -> int:
        """Refused: JAX hashes static arguments, and a static plan's arrays would become constants of the program."""
        raise TypeError(
            "SegmentPlan: a plan cannot be hashed, so it can be no static argument and no key; pass it to compiled "
            "programs as an ordinary argument, without static_argnums, static_argnames or nondiff_argnums"
        )

    def __repr__(self) -> str:
        fields = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return f"SegmentPlan({', '.join(f'{name}={_summary(value)}' for name, value in fields)})"

    @property
    def transposed(self) -> SegmentPlan:
        """The plan of the same edges with senders and receivers exchanged."""
        check_gathers("SegmentPlan.transposed", self)
        return SegmentPlan(
            edge_order=self.transposed_order,
            gather_ids=self.transposed_gather_ids,
            segment_ids=self.transposed_segment_ids,
            edge_segment_ids=self.edge_gather_ids,
            transposed_order=self.edge_order,
            transposed_gather_ids=self.gather_ids,
            transposed_segment_ids=self.segment_ids,
            edge_gather_ids=self.edge_segment_ids,
            num_segments=self.num_rows,
            num_rows=self.num_segments,
        )

    @jax_versions.hiding_frames
    def validate(self, segment_ids: ArrayLike | None = None, gather_ids: ArrayLike | None = None) -> None:
        """Checks that the arrays of the plan match each other and these ids. For debugging; runs on the host.

        Functions trust their plan. They read and write within bounds whatever it holds, but if :func:`segment_plan` has
        not made it, or made it for other edges, results may hold anything.

        Args:
          segment_ids: ``[E]``, the expected segments of the edges. Default: the plan's own.
          gather_ids: ``[E]``, the expected rows of the edges. Default: the plan's own.

        Raises:
          ValueError: names the first element that differs from the plan of these ids.
          jax.errors.TracerArrayConversionError: an array is traced.
        """
        name = "SegmentPlan.validate"
        if gather_ids is not None:
            check_gathers(name, self)
        segments, rows = self.edge_segment_ids, self.edge_gather_ids
        if segment_ids is not None:
            segments = _canonical_segments(name, segment_ids, self.num_segments)
        if gather_ids is not None:
            rows, _ = canonical_edges(name, gather_ids, segments, self.num_rows, self.num_segments)
        expected = _plan_of_ids(segments, self.num_segments, rows, self.num_rows)
        for field in ("edge_segment_ids", "edge_gather_ids", *(field.name for field in dataclasses.fields(self))):
            values = (getattr(plan, field) for plan in (self, expected))
            own, right = (np.asarray(x) if isinstance(x, jax.Array) else x for x in values)
            if not np.array_equal(own, right):
                problem = "its arrays do not match" if segment_ids is None is gather_ids else "the plan is of other ids"
                if np.shape(own) == np.shape(right) and np.ndim(own) == 1:
                    first = int(np.argmax(own != right))
                    field, own, right = f"{field}[{first}]", own[first], right[first]
                raise ValueError(f"{name}: {problem}: {field} is {own}, expected {right}")


@jax_versions.hiding_frames
def segment_plan(
    segment_ids: ArrayLike,
    num_segments: int,
    gather_ids: ArrayLike | None = None,
    num_rows: int | None = None,
) -> SegmentPlan:
    """Sorts a graph's edges once, so that calls given the plan need not.

    Edge e goes from row ``gather_ids[e]`` to segment ``segment_ids[e]``, as in :func:`gather_segment_sum`. Without
    `gather_ids`, edge e is row e itself, as in :func:`segment_sum`.

    Arrays with a row for each edge (weights, logits, products, probabilities) keep the order of the ids, as arguments
    and as results: calls with a plan reach their rows through `edge_order`, or move them, as :func:`segment_softmax`
    does. To avoid this, sort the ids and these arrays once, by ``jnp.argsort(segment_ids)``, and pass the sorted ids
    with ``indices_are_sorted=True``. A plan of them then serves the other direction, as in
    ``take_rows(data, plan=plan.transposed)``.

    Args:
      segment_ids: ``[E]``, any integer dtype, in any order. Edges whose id is negative or at least `num_segments` are
        dropped.
      num_segments: number of segments S, static under ``jit``.
      gather_ids: ``[E]``, any integer dtype, in any order. Negative ids count from the end; ids out of range name the
        nearest row, and no gradient goes through them, as in ``data[gather_ids]``. None: a plan for functions that do
        not gather.
      num_rows: number of rows N of the gathered data, static under ``jit``.

    Returns:
      A :class:`SegmentPlan`. Its orders are stable sorts of the ids. Its property `transposed` is the plan of the same
      edges in the other direction.

    Raises:
      TypeError, ValueError: an argument does not fit.

    Gradient: there is none; ids have no tangents.

    Example:
      >>> import jax.numpy as jnp, jax_baracuda as jb
      >>> plan = jb.segment_plan(jnp.array([1, 0, 1]), 2, jnp.array([2, 0, 1]), 3)
      >>> print(plan.edge_order, plan.segment_ids, plan.gather_ids)
      [1 0 2] [0 1 1] [0 2 1]
    """
    name = "segment_plan"
    num_segments = static_size(name, "num_segments", num_segments)
    if (gather_ids is None) != (num_rows is None):
        raise TypeError(f"{name}: gather_ids and num_rows belong together; pass both or neither")
    if gather_ids is None:
        return _plan_of_ids(_canonical_segments(name, segment_ids, num_segments), num_segments, None, None)
    num_rows = static_size(name, "num_rows", num_rows)
    rows, segments = canonical_edges(name, gather_ids, segment_ids, num_rows, num_segments)
    return _plan_of_ids(segments, num_segments, rows, num_rows)


def _canonical_segments(name: str, segment_ids: ArrayLike, num_segments: int) -> Array:
    ids = integer_array(name, "segment_ids", segment_ids)
    if ids.ndim != 1:
        raise ValueError(f"{name}: segment_ids must have shape [E], got {ids.shape}")
    check_num_segments(name, num_segments)
    return flat_ids(ids, num_segments, clamps_ids=False)


def _plan_of_ids(segments: Array, num_segments: int, rows: Array | None, num_rows: int | None) -> SegmentPlan:
    check_numbered("segment_plan", "edges", segments.shape[0])
    segments = in_32_bits(segments, num_segments)
    order, sorted_segments = SEGMENT_ORDER(segments, num_segments=num_segments)
    transposed_order = sorted_rows = None
    if rows is not None:
        rows = in_32_bits(rows, num_rows)
        transposed_order, sorted_rows = SEGMENT_ORDER(rows, num_segments=num_rows)
    return SegmentPlan(
        edge_order=order,
        gather_ids=None if rows is None else permuted(rows, order),
        segment_ids=sorted_segments,
        edge_segment_ids=segments,
        transposed_order=transposed_order,
        transposed_gather_ids=None if transposed_order is None else permuted(segments, transposed_order),
        transposed_segment_ids=sorted_rows,
        edge_gather_ids=rows,
        num_segments=num_segments,
        num_rows=num_rows,
    )


def _is_array(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape")


def _summary(value: Any) -> str:
    """Dtype and shape of an array, without its elements, which may be millions."""
    if not _is_array(value):
        return repr(value)
    return f"{value.dtype}[{','.join(map(str, value.shape))}]"


def check_plan(name: str, plan: Any, **belonging: Any) -> None:
    """Checks that `plan` is a single plan or None, and that no argument that it replaces is given."""
    if misplaced := [argument for argument, value in belonging.items() if isinstance(value, SegmentPlan)]:
        raise TypeError(f"{name}: {misplaced[0]} must not be a SegmentPlan; pass it by name, as plan=")
    if plan is None:
        return
    if not isinstance(plan, SegmentPlan):
        raise TypeError(f"{name}: plan must be a SegmentPlan, got {type(plan).__name__}; segment_plan makes one of ids")
    ids = plan.segment_ids
    if not _is_array(ids):
        raise TypeError(
            f"{name}: the arrays of plan must be arrays, got {type(ids).__name__}; segment_plan makes one of ids"
        )
    if len(ids.shape) != 1:
        raise ValueError(
            f"{name}: the arrays of plan must have shape [E], got {ids.shape}; jax.vmap maps over many plans"
        )
    if ids.dtype != jnp.int32:
        raise TypeError(f"{name}: the arrays of plan must be int32, got {ids.dtype}; leave the plan out of casts")
    if given := [argument for argument, value in belonging.items() if value is not None]:
        raise ValueError(
            f"{name}: {', '.join(belonging)} belong to the plan; pass none of them, got {', '.join(given)}"
        )


def check_gathers(name: str, plan: SegmentPlan) -> None:
    """Checks that a plan has gather ids."""
    if plan.num_rows is None:
        raise ValueError(f"{name}: the plan has no gather_ids; pass gather_ids and num_rows to segment_plan")


def check_size_of_plan(name: str, size: int, what: str, argument: str, array: Array) -> None:
    """Checks that an array has as many rows as the plan has segments, or rows to gather."""
    if size != array.shape[0]:
        raise ValueError(f"{name}: the plan is for {size} {what}, got {argument}.shape = {array.shape}")


# ----------------------------------------------------------------------------------------------------------------------
# The order, as a separate op: XLA merges equal calls of it within a program.


def in_32_bits(ids: Array, size: int) -> Array:
    """Ids as int32; out-of-range ids become -1 or `size`."""
    return jnp.clip(ids, -1, size).astype(jnp.int32)


def sorted_by_segment(segment_ids: Array, num_segments: int) -> tuple[Array, Array]:
    """The order of the rows and the sorted segment ids. Rows without a segment come last, with the id `num_segments`.

    Always runs the kernel, so it is for use within an op's program.
    """
    order, sorted_ids = SEGMENT_ORDER.kernel(in_32_bits(segment_ids, num_segments), num_segments=num_segments)
    return order, sorted_ids


SHARED_SORT = on_gpu("XLA shares the sort between calls", shares_sort, at_least(row_bytes=65))
"""Where a separate op sorts the ids, and the rows are gathered in that order. The op itself sorts narrower rows."""


def with_shared_sort(op_of_edges: Callable[[], Op], **more: Any) -> dict[Rule, Callable[..., Sequence[Array]]]:
    """The alternative of an op of rows: it sorts the ids by a separate op, then calls the op of gathered rows.

    `more`: params of the op of gathered rows.
    """

    def program(data: Array, ids: Array, **params: Any) -> Sequence[Array]:
        order, sorted_ids = sorted_by_segment(ids, params["num_segments"])
        numbers = [order] if params.get("has_winner") else []
        return op_of_edges().kernel(data, order, sorted_ids, *numbers, **params | more | {"indices_are_sorted": True})

    return {SHARED_SORT: program}


def _reference(segment_ids: Array, *, num_segments: int) -> tuple[Array, Array]:
    is_member = in_range(segment_ids, num_segments)
    ids = jnp.where(is_member, segment_ids, num_segments)
    order = jnp.argsort(ids, stable=True).astype(index_dtype(ids.shape[0]))
    return order, ids[order]


def _order_of_constants(segment_ids: np.ndarray, *, num_segments: int) -> tuple[np.ndarray, np.ndarray]:
    return _order_of_bytes(np.ascontiguousarray(segment_ids, np.int32).tobytes(), num_segments)


@functools.lru_cache(maxsize=2)  # the two ends of a graph's edges, which all layers share
def _order_of_bytes(segment_ids: bytes, num_segments: int) -> tuple[np.ndarray, np.ndarray]:
    ids = np.frombuffer(segment_ids, np.int32)
    ids = np.where((ids >= 0) & (ids < num_segments), ids, num_segments).astype(np.int32)
    order = np.argsort(ids, stable=True).astype(index_dtype(ids.shape[0]))
    return order, ids[order]


SEGMENT_ORDER = define_op(
    name="segment_order",
    operands={"segment_ids": IDS},
    results={"order": IDS, "sorted_ids": IDS},
    result_dtypes=lambda ids: [index_dtype(ids.shape[0]), np.int32],
    reference=_reference,
    dtypes=frozenset({"int32"}),
    guarantee=EXACT,
    attributes=("num_segments",),
    of_constants=_order_of_constants,
    replicated_dims=IDS,
    **SEGMENT_FIELDS,
)
"""``(segment_ids [N] of int32) -> (order [N], sorted_ids [N])``, a stable sort."""


# ----------------------------------------------------------------------------------------------------------------------
# Rows in the order of a plan.


def permuted(rows: Array, order: Array) -> Array:
    """The rows in this order."""
    return ROW_PERMUTATION(rows, order, is_inverse=False)[0]


def unpermuted(rows: Array, order: Array) -> Array:
    """The inverse of :func:`permuted`."""
    return ROW_PERMUTATION(rows, order, is_inverse=True)[0]


def _permuted_rows(rows: Array, order: Array, *, is_inverse: bool) -> tuple[Array]:
    if is_inverse:
        return (jnp.zeros_like(rows).at[order].set(rows, mode="drop", unique_indices=True),)
    return (rows.at[order].get(mode="clip", unique_indices=True),)


# The transpose is the inverse, where JAX's own transpose of a gather would be a scatter-add.
ROW_PERMUTATION = define_op(
    name="row_permutation",
    operands={"rows": ROWS, "order": IDS},
    results={"permuted": ROWS},
    reference=_permuted_rows,
    program=_permuted_rows,
    dtypes=FLOATING_DTYPES | INTEGER_DTYPES | {"bool", "complex64", "complex128"},
    guarantee=EXACT,
    replicated_dims=IDS,
    transposes={
        ("rows",): lambda _, d_permuted, order, *, is_inverse: ROW_PERMUTATION(
            *d_permuted, order, is_inverse=not is_inverse
        ),
    },
)
