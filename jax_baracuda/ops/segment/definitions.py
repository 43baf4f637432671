"""Common parts of the segment ops' definitions: dimensions, dtypes, static arguments, plans and guarantees."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_baracuda._core.arrays import FLOATING_DTYPES, INTEGER_DTYPES
from jax_baracuda._core.guarantees import EXACT, Guarantee, accumulated
from jax_baracuda._core.op import NamedDimensions, Op
from jax_baracuda.ops.segment.shards import ShardProgram, of_split_segments

ORDERED_DTYPES = FLOATING_DTYPES | INTEGER_DTYPES | {"bool"}
WIDE_DTYPES = FLOATING_DTYPES | {"int32", "uint32", "int64", "uint64"}

ROWS = ("row", "...")
IDS = ("row",)
CELLS = ("segment", "...")
COUNTS = ("segment",)

ROUNDED_ONCE = dataclasses.replace(EXACT, math_precision="rounded once")


@dataclasses.dataclass(frozen=True)
class Params:
    """The static arguments of a segment reduction, named like the params of the ops."""

    num_segments: int
    indices_are_sorted: bool


@dataclasses.dataclass(frozen=True)
class SumParams(Params):
    deterministic: bool


def product_guarantee(dtype: str, platform: str) -> Guarantee:
    if jnp.issubdtype(dtype, jnp.floating):
        return accumulated(dtype, platform)
    return dataclasses.replace(EXACT, accumulator=dtype)


def sum_guarantee(dtype: str, platform: str, *, deterministic: bool, indices_are_sorted: bool) -> Guarantee:
    """Like products, except that GPUs add unsorted floating rows by atomics, in an order that varies."""
    guarantee = product_guarantee(dtype, platform)
    is_stable = platform == "cpu" or deterministic or indices_are_sorted or guarantee.math_precision == "exact"
    return dataclasses.replace(guarantee, deterministic=is_stable, bit_stable_on_same_hardware=is_stable)


def plan_parameters(
    values: Any,
    segment_ids: Any,
    *,
    num_segments: int,
    indices_are_sorted: bool = False,
    deterministic: bool = False,
    has_order: bool = False,
    shares_ties: bool = False,
    **_: Any,
) -> dict[str, int]:
    """The parameters from which the native modules plan a call. `values` gives the element type and the features."""
    return {
        "rows": segment_ids.shape[0],
        "segments": num_segments,
        "features": math.prod(values.shape[1:]),
        "element_bytes": np.dtype(values.dtype).itemsize,
        "is_floating": jnp.issubdtype(values.dtype, jnp.floating),
        "indices_are_sorted": indices_are_sorted,
        "deterministic": deterministic,
        "has_order": has_order,
        "shares_ties": shares_ties,
    }


def limit_of_32_bits(num_rows: int, num_segments: int) -> str | None:
    """The reason why a size is unsupported, or None: kernels number winners in int32 and segments in uint32."""
    if num_rows >= np.iinfo(np.int32).max:
        return "it has 2^31 - 1 rows or more"
    return "it has 2^32 - 1 segments or more" if num_segments >= np.iinfo(np.uint32).max else None


def reduction_op(
    name: str,
    *,
    results: NamedDimensions | Callable[..., NamedDimensions],
    shard_program: ShardProgram,
    attributes: tuple[str, ...] = (),
    **fields: Any,
) -> Op:
    """An op of (data, segment_ids) whose results are cells. `shard_program`: for rows split over devices."""
    row_dims = ("row",)
    defaults = {
        "sizes": lambda *, num_segments: {"segment": num_segments},
        "plan_parameters": plan_parameters,
        "reduction_dims": row_dims,
        "shard_program": of_split_segments(shard_program, results=results, row_dims=row_dims, ids_operand=1),
        "limit": lambda data, segment_ids, *, num_segments: limit_of_32_bits(segment_ids.shape[0], num_segments),
    }
    return Op(
        name=name,
        operands={"data": ROWS, "segment_ids": IDS},
        results=results,
        attributes=("indices_are_sorted", *attributes),
        **(defaults | fields),
    )


def gradient_op(name: str, *, operands: NamedDimensions, **fields: Any) -> Op:
    """An op of d_output, segment_ids and others whose result is the cotangent of the data."""
    position = list(operands).index("segment_ids")

    def own_plan_parameters(d_output: Any, *others: Any) -> dict[str, int]:
        return plan_parameters(d_output, (d_output, *others)[position], num_segments=d_output.shape[0])

    defaults = {
        "plan_parameters": own_plan_parameters,
        "replicated_dims": ("segment",),
        "limit": lambda *arrays: limit_of_32_bits(arrays[position].shape[0], arrays[0].shape[0]),
    }
    return Op(name=name, operands=operands, results={"d_data": ROWS}, dtypes=FLOATING_DTYPES, **(defaults | fields))


def first_result(op: Op) -> Callable[..., Array]:
    """The primal function of a :class:`KernelVjp`: the first result of the op."""

    def primal(params: Params, *, data: Array, segment_ids: Array) -> Array:
        return op(data, segment_ids, **vars(params))[0]

    return primal
