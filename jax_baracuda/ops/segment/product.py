"""Product of segments. The residual is its mantissa and exponent, so the gradient can divide any one row out."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jax_baracuda._core.arrays import FLOATING_DTYPES, accumulation_dtype
from jax_baracuda._core.autodiff import KernelVjp
from jax_baracuda._core.functions import Params
from jax_baracuda._core.primitives import define_op
from jax_baracuda._core.public import public_function
from jax_baracuda._core.rules import fused, in_cache, on_gpu
from jax_baracuda._core.selection import Implementation, may_run_kernel
from jax_baracuda._core.sharding import ShardAxes, ShardKernel
from jax_baracuda.ops.segment.arguments import (
    Mode,
    OutSharding,
    canonical_cotangent,
    canonical_segments,
    canonicalize,
    canonicalize_primal,
    reduce_numbers,
)
from jax_baracuda.ops.segment.cells import gather_segments, reduce_in_pairs, xla_prod
from jax_baracuda.ops.segment.definitions import (
    CELLS,
    IDS,
    ROWS,
    WIDE_DTYPES,
    gradient_op,
    merge_over_shards,
    product_guarantee,
    reduction_op,
)
from jax_baracuda.ops.segment.extended_product import (
    ExtendedProduct,
    product_of_both,
    product_of_one,
    product_of_others,
    product_value,
)
from jax_baracuda.ops.segment.ids import check_numbered
from jax_baracuda.ops.segment.plan import SegmentPlan, unpermuted
from jax_baracuda.ops.segment.sum import segment_sum, segment_sum_backward
from jax_baracuda.ops.segment.sum_ops import SEGMENT_SUM


@public_function(segment_sum)
def segment_prod(
    data: ArrayLike,
    segment_ids: ArrayLike | None = None,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    bucket_size: int | None = None,
    mode: Mode = None,
    out_sharding: OutSharding = None,
    *,
    plan: SegmentPlan | None = None,
    implementation: Implementation | None = None,
) -> Array:
    """Product of the rows of each segment: ``out[s, ...] = prod { data[n, ...] : segment_ids[n] == s }``.

    A drop-in replacement of :func:`jax.ops.segment_prod`, with a gradient also where ids repeat.

    Args:
      data: ``[N, ...]``, any numeric dtype of JAX. Integers, float16, bfloat16, float32 and float64 have kernels
        (integers of less than 32 bits are multiplied as int32 and wrap the same); other dtypes run as plain JAX. More
        generally, any shape that broadcasts to ``segment_ids.shape + data.shape[1:]``.
      bucket_size: as in :func:`jax.ops.segment_prod`, rows are multiplied in buckets of this size, then the buckets.

    Returns:
      ``[S, ...]`` with the dtype of `data`. Empty segments hold 1.

    Numerical guarantees: floating numbers are multiplied in float32 (float64 for float64) with a separate exponent, so
    no partial product overflows or underflows: the product is finite if the exact one is. (In plain JAX, and where
    devices share a segment, that exponent reaches to 2^31, or 2^34 for float64: 14 million rows of the most extreme
    magnitude.) It is rounded once to the dtype. NaN propagates, and so does zero times infinity. Integers are exact and
    wrap. Bit-equal from run to run and independent of scheduling.

    Gradient: ``d_data[n] = d_out[segment_ids[n]] * product of the segment's other rows``, correct also for rows that
    are zero, infinite or of extreme magnitude; 0 for dropped rows.
    In second derivatives, partial products may overflow or underflow.

    Example:
      >>> import jax, jax.numpy as jnp, jax_baracuda as jb
      >>> data, segment_ids = jnp.array([2.0, 0.0, 3.0]), jnp.array([0, 0, 0])
      >>> print(jb.segment_prod(data, segment_ids, num_segments=1))
      [0.]
      >>> print(jax.grad(lambda data: jb.segment_prod(data, segment_ids, num_segments=1)[0])(data))
      [0. 6. 0.]
    """
    name = "segment_prod"
    segments = canonical_segments(name, segment_ids, num_segments, indices_are_sorted, mode, plan)
    call = canonicalize(segments, data, out_sharding, bucket_size).sorted_by_plan()
    if jnp.issubdtype(call.data.dtype, jnp.inexact):
        check_numbered(name, "rows", call.ids.shape[0])
    params = call.params()
    return reduce_numbers(call, _segment_prod, params, functools.partial(_over_buckets, params))


def _over_buckets(params: Params, cells: Array) -> Array:
    """The product over buckets ``[buckets, segments, ...]``. The derivative of :func:`jax.numpy.prod` cannot be mapped
    in explicit mode, and needs shapes without symbols."""
    num_buckets, num_segments = cells.shape[:2]
    ids = jnp.repeat(jnp.arange(num_segments, dtype=jnp.int32), num_buckets)
    rows = jnp.moveaxis(cells, 0, 1).reshape(num_segments * num_buckets, *cells.shape[2:])
    return _segment_prod(Params(params, indices_are_sorted=True), data=rows, segment_ids=ids)


@public_function(segment_sum_backward, segment_sum, has_twin=False)
def segment_prod_backward(
    d_output: ArrayLike,
    data: ArrayLike,
    segment_ids: ArrayLike | None = None,
    *,
    indices_are_sorted: bool = False,
    mode: Mode = None,
    plan: SegmentPlan | None = None,
    implementation: Implementation | None = None,
) -> Array:
    """Gradient of :func:`segment_prod`: ``d_data[n, ...] = d_output[s, ...] * product of the other rows of s``.

    Here s is the id of row n.

    Args:
      d_output: ``[S, ...]``, the cotangent of the segment products; a floating dtype, the same as `data`.
      data: ``[N, ...]``, the rows that were multiplied.

    Returns:
      ``[N, ...]``, the cotangent of `data`. Dropped rows get 0.

    Numerical guarantees: no partial product of the other rows overflows or underflows; zeros, infinities and NaN among
    the rows are counted, so a row's own value never spoils its gradient. Bit-equal from run to run.

    Gradient: linear in `d_output`; with respect to `data` it is the product of all but two rows, whose partial products
    may overflow or underflow. Derivatives of any order and in either mode exist.

    Example:
      >>> import jax.numpy as jnp, jax_baracuda as jb
      >>> data, segment_ids = jnp.array([2.0, 4.0, 0.0, 3.0]), jnp.array([0, 0, 1, 1])
      >>> print(jb.segment_prod_backward(jnp.array([1.0, 10.0]), data, segment_ids))
      [ 4.  2. 30.  0.]
    """
    name = "segment_prod_backward"
    d_output, segments = canonical_cotangent(name, d_output, segment_ids, indices_are_sorted, mode, plan)
    call = canonicalize_primal(segments, data, d_output)
    check_numbered(name, "rows", call.ids.shape[0])
    ordered = call.sorted_by_plan()
    d_data = ordered.gradient(_segment_prod, ordered.params(), d_output)
    return d_data if plan is None else call.cotangent_of_data(unpermuted(d_data, plan.edge_order))


# ----------------------------------------------------------------------------------------------------------------------
# Reference in plain JAX. Products are built pairwise, so that JAX can differentiate them to any order.


def _product_in_pairs(data: Array, ids: Array, num_segments: int) -> Array:
    """The product in plain arithmetic, which JAX differentiates to any order. Partial products may overflow."""
    wide = data.astype(accumulation_dtype(data.dtype))
    return reduce_in_pairs(jnp.multiply, 1, wide, ids, num_segments).astype(data.dtype)


def has_exponent(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def _reference(data: Array, ids: Array, *, num_segments: int, has_residual: bool) -> tuple[Array, ...]:
    residual: Sequence[Array]
    if has_exponent(data.dtype):
        rows = product_of_one(data.astype(accumulation_dtype(data.dtype)))
        residual = reduce_in_pairs(product_of_both, ExtendedProduct(1, 0), rows, ids, num_segments)
        output = product_value(residual).astype(data.dtype)
    elif jnp.issubdtype(data.dtype, jnp.inexact):
        output = _product_in_pairs(data, ids, num_segments)
        residual = jnp.zeros_like(output), jnp.zeros(output.shape, jnp.int32)  # not used for complex numbers
    else:
        output, residual = xla_prod(data, ids, num_segments), ()
    return (output, *residual) if has_residual else (output,)


def _product_gradient_in_pairs(d_output: Array, data: Array, ids: Array) -> Array:
    """The gradient in plain arithmetic, which JAX differentiates to any order."""
    _, vjp = jax.vjp(lambda data: _product_in_pairs(data, ids, d_output.shape[0]), data)
    return vjp(d_output)[0]


@jax.custom_jvp
def _times_others(rows: Array, mantissa: Array, packed: Array, data: Array, ids: Array) -> Array:
    """Each row times the product of the other rows of `data` in its segment, rounded once; 0 for dropped rows."""
    (mantissa, is_member), (packed, _) = (gather_segments(x, ids) for x in (mantissa, packed))
    others = product_of_others(ExtendedProduct(mantissa, packed), data.astype(mantissa.dtype))
    return jnp.where(is_member, product_value(product_of_both(product_of_one(rows), others)), 0)


@_times_others.defjvp
def _times_others_jvp(primals: Sequence[Array], tangents: Sequence[Array]) -> tuple[Array, Array]:
    rows, mantissa, _, data, ids = primals

    def in_plain_arithmetic(rows: Array, data: Array) -> Array:
        return rows * _product_gradient_in_pairs(jnp.ones_like(mantissa), data.astype(mantissa.dtype), ids)

    # Under vmap, primals may hold NumPy constants: custom_jvp rejects them, jit accepts them.
    product = jax.jit(_times_others)(*primals)
    return product, jax.jvp(in_plain_arithmetic, (rows, data), (tangents[0], tangents[3]))[1]


def _reference_terms(rows: Array, mantissa: Array, packed: Array, data: Array, ids: Array) -> tuple[Array]:
    if has_exponent(data.dtype):
        return (_times_others(rows, mantissa, packed, data, ids),)
    return (rows * _product_gradient_in_pairs(jnp.ones_like(mantissa), data, ids),)


def _reference_backward(d_output: Array, mantissa: Array, packed: Array, data: Array, ids: Array) -> tuple[Array]:
    if has_exponent(data.dtype):
        cotangents, _ = gather_segments(d_output.astype(mantissa.dtype), ids)
        return (_times_others(cotangents, mantissa, packed, data, ids).astype(data.dtype),)
    return (_product_gradient_in_pairs(d_output, data, ids),)


def _transpose_backward(
    d_outputs: Sequence[Any],
    d_data: Sequence[Array],
    mantissa: Array,
    packed: Array,
    data: Array,
    ids: Array,
    *,
    indices_are_sorted: bool = False,
) -> list[Array]:
    """Sums each row's tangent times the product of the other rows: also the tangent of the product."""
    [d_output], [d_rows] = d_outputs, d_data
    [terms] = SEGMENT_PROD_TERMS(d_rows.astype(mantissa.dtype), mantissa, packed, data, ids)
    flags = {"indices_are_sorted": indices_are_sorted, "deterministic": may_run_kernel()}
    [total] = SEGMENT_SUM(terms, ids, num_segments=d_output.shape[0], **flags)
    return [total.astype(d_output.dtype)]


def _tangent(d_data: Array, operands: Sequence[Array], results: Sequence[Array], **params: Any) -> list[Array]:
    """The residual gets zero tangents: no derivative rule differentiates it."""
    data, ids = operands
    own_results = results if params["has_residual"] else SEGMENT_PROD(*operands, **params | {"has_residual": True})
    output, *residual = own_results
    is_sorted = params["indices_are_sorted"]
    tangents = _transpose_backward([output], [d_data], *residual, data, ids, indices_are_sorted=is_sorted)
    return [*tangents, *map(jnp.zeros_like, results[1:])]


# ----------------------------------------------------------------------------------------------------------------------
# Programs of one shard, for segments whose rows are split over devices. Devices exchange cells only.


def _shard_program(
    kernel: ShardKernel, axes: ShardAxes, data: Array, ids: Array, *, has_residual: bool
) -> Sequence[Array]:
    row_axes, segment_axes = axes.get("row", ()), axes.get("segment", ())
    if not row_axes:
        return kernel(data, ids)
    if not has_exponent(data.dtype):

        def merge(outputs: Array, *residual: Array) -> Sequence[Array]:
            return [jnp.prod(outputs, axis=0, dtype=data.dtype), *(x[0] for x in residual)]

        return merge_over_shards(merge, kernel(data, ids), row_axes, segment_axes)

    def value(residual: Sequence[Array]) -> Array:
        return product_value(ExtendedProduct(*residual)).astype(data.dtype)

    def merge_residuals(*of_shards: Array) -> Sequence[Array]:
        total = functools.reduce(product_of_both, map(ExtendedProduct, *of_shards))
        return total if has_residual else [value(total)]

    # The total product may be in range even if one shard's product is not.
    _, *local = kernel(data, ids, has_residual=True)
    results = merge_over_shards(merge_residuals, local, row_axes, segment_axes)
    return (value(results), *results) if has_residual else results


def _shard_terms(
    kernel: ShardKernel, axes: ShardAxes, factors: Array, mantissa: Array, packed: Array, data: Array, ids: Array
) -> Sequence[Array]:
    """Complex numbers have no residual, so each device multiplies by the products of the other devices' rows."""
    [terms] = kernel(factors, mantissa, packed, data, ids)
    row_axes = axes.get("row", ())
    if not row_axes or has_exponent(data.dtype):
        return (terms,)
    products = jax.lax.all_gather(_product_in_pairs(data, ids, mantissa.shape[0]), row_axes)
    others = jnp.prod(products.at[jax.lax.axis_index(row_axes)].set(1), axis=0)
    return (terms * gather_segments(others, ids)[0],)


# ----------------------------------------------------------------------------------------------------------------------
# Ops: one per native kernel.

SEGMENT_PROD = reduction_op(
    "segment_prod",
    targets={"segment_prod": {"has_residual": False}, "segment_prod_with_residual": {"has_residual": True}},
    results=lambda *, has_residual: {"output": CELLS, **({"mantissa": CELLS, "packed": CELLS} if has_residual else {})},
    result_dtypes=lambda data, segment_ids, *, has_residual: [
        data.dtype,
        *([accumulation_dtype(data.dtype), np.int32] if has_residual else []),
    ],
    reference=_reference,
    dtypes=lambda *, has_residual: FLOATING_DTYPES if has_residual else WIDE_DTYPES,
    guarantee=product_guarantee,
    shard_program=_shard_program,
    tangent=_tangent,
)

# H100, time of plain JAX / kernel: 0.8 between elementwise operations (21 loops), 0.2 to 0.9 alone up to 32 MB (11 of
# 12 loops); between 32 and 64 MB not measured.
SEGMENT_PROD_BACKWARD = gradient_op(
    "segment_prod_backward",
    operands={"d_output": CELLS, "mantissa": CELLS, "packed": CELLS, "data": ROWS, "segment_ids": IDS},
    reference=_reference_backward,
    xla_rules=(
        on_gpu("XLA fuses the gathers with their neighbours", fused),
        on_gpu("gathers from the L2 cache", in_cache),
    ),
    guarantee=product_guarantee,
    shard_program=_shard_terms,
    transposes={("d_output",): _transpose_backward},
)

SEGMENT_PROD_TERMS = define_op(
    name="segment_prod_terms",
    operands={"rows": ROWS, "mantissa": CELLS, "packed": CELLS, "data": ROWS, "segment_ids": IDS},
    results={"terms": ROWS},
    reference=_reference_terms,
    program=_reference_terms,  # plain JAX on each device: elementwise except for the gathers of cells
    dtypes=FLOATING_DTYPES,
    guarantee=product_guarantee,
    replicated_dims=("segment",),
    shard_program=_shard_terms,
    transposes={("rows",): lambda _, d_terms, *others: SEGMENT_PROD_TERMS(*d_terms, *others)},
)
"""Each row times the product of the other rows of `data` in its segment, rounded once. The product of the others may be
out of range where its product with a tangent is in range."""


# ----------------------------------------------------------------------------------------------------------------------
# Derivative rules.


def _forward(params: Params, *, data: Array, segment_ids: Array) -> tuple[Array, tuple[Array, ...]]:
    output, mantissa, packed = SEGMENT_PROD(data, segment_ids, **params, has_residual=True)
    # The gradient depends on the data directly and through the residual; its derivative by `data` covers both.
    return output, (jax.lax.stop_gradient(mantissa), packed, data, segment_ids)


def _backward(params: Params, residuals: tuple[Array, ...], d_output: Array) -> dict[str, Array]:
    [d_data] = SEGMENT_PROD_BACKWARD(d_output, *residuals, indices_are_sorted=params["indices_are_sorted"])
    return {"data": d_data}


_segment_prod = KernelVjp(
    "segment_prod",
    _forward,
    _backward,
    primal=lambda params, *, data, segment_ids: SEGMENT_PROD(data, segment_ids, **params, has_residual=False)[0],
)
