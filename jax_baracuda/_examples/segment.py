"""Example calls of the segment reductions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jax_baracuda as jb
from jax_baracuda._examples.example import (
    EXACT,
    ROUNDED_ONCE,
    Draw,
    Example,
    Operand,
    SizeOf,
    Sizes,
    Tolerance,
    repeated,
)

# ----------------------------------------------------------------------------------------------------------------------
# Plain JAX, as fast as possible: it relies on ids in range.


def gather(data: Array, ids: Array, indices_are_sorted: bool = False) -> Array:
    """The rows that ids name."""
    return data.at[ids].get(indices_are_sorted=indices_are_sorted, mode="promise_in_bounds")


def mean(data: Array, segment_ids: Array, num_segments: int, **options: Any) -> Array:
    total, count = (
        jax.ops.segment_sum(x, segment_ids, num_segments, **options) for x in (data, jnp.ones_like(segment_ids))
    )
    return total / jnp.maximum(count, 1).astype(data.dtype).reshape(-1, *[1] * (data.ndim - 1))


def var(data: Array, segment_ids: Array, num_segments: int, **options: Any) -> Array:
    differences = data - gather(mean(data, segment_ids, num_segments, **options), segment_ids, **options)
    return mean(differences**2, segment_ids, num_segments, **options)


def std(data: Array, segment_ids: Array, num_segments: int, **options: Any) -> Array:
    variance = var(data, segment_ids, num_segments, **options)
    has_slope = variance > 0  # without it, a segment of one row would have a gradient of NaN
    return jnp.where(has_slope, jnp.sqrt(jnp.where(has_slope, variance, 1)), 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def prod(data: Array, segment_ids: Array, num_segments: int, indices_are_sorted: bool = False) -> Array:
    """JAX has no gradient of ``segment_prod``. This is the usual hand-written one: it requires data without zeros."""
    return jax.ops.segment_prod(data, segment_ids, num_segments, indices_are_sorted=indices_are_sorted)


def _prod_forward(data: Array, segment_ids: Array, num_segments: int, indices_are_sorted: bool) -> Any:
    output = prod(data, segment_ids, num_segments, indices_are_sorted)
    return output, (data, segment_ids, output)


def _prod_backward(num_segments: int, indices_are_sorted: bool, residuals: Any, cotangent: Array) -> Any:
    data, segment_ids, output = residuals
    return gather(cotangent * output, segment_ids, indices_are_sorted) / data, None


prod.defvjp(_prod_forward, _prod_backward)


def in_float64(function: Callable[..., Array]) -> Callable[..., Array]:
    """The function of float64 data, and its result in the dtype of the data."""

    def call(data: Array, accumulator: str, **arguments: Any) -> Array:
        with jax.enable_x64(True):  # elsewhere, float64 may not exist
            return function(data.astype(accumulator), **arguments).astype(data.dtype)

    return call


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def gather_summed_in_float64(data: Array, ids: Array, accumulator: str) -> Array:
    """The rows that ids name. JAX transposes a gather of float64 only where float64 exists."""
    return gather(data, ids)


def _gather_forward(data: Array, ids: Array, accumulator: str) -> Any:
    return gather(data, ids), (data, ids)


def _gather_backward(accumulator: str, residuals: Any, cotangent: Array) -> Any:
    data, ids = residuals
    sums = in_float64(jax.ops.segment_sum)
    return sums(cotangent, segment_ids=ids, num_segments=data.shape[0], accumulator=accumulator), None


gather_summed_in_float64.defvjp(_gather_forward, _gather_backward)


def argmax(data: Array, segment_ids: Array, num_segments: int, **options: Any) -> Array:
    maxima = jax.ops.segment_max(data, segment_ids, num_segments, **options)
    row = jnp.arange(data.shape[0], dtype=jnp.int32).reshape(-1, *[1] * (data.ndim - 1))
    row = jnp.where(data == gather(maxima, segment_ids, **options), row, data.shape[0])
    return jnp.minimum(jax.ops.segment_min(row, segment_ids, num_segments, **options), data.shape[0])


def argmin(data: Array, segment_ids: Array, num_segments: int, **options: Any) -> Array:
    return argmax(-data, segment_ids, num_segments, **options)


def softmax(logits: Array, segment_ids: Array, num_segments: int, **options: Any) -> Array:
    maxima = jax.ops.segment_max(jax.lax.stop_gradient(logits), segment_ids, num_segments, **options)
    exponentials = jnp.exp(logits - gather(maxima, segment_ids, **options))
    total = jax.ops.segment_sum(exponentials, segment_ids, num_segments, **options)
    return exponentials / gather(total, segment_ids, **options)


def first_max(data: Array, segment_ids: Array, num_segments: int, **_: Any) -> Array:
    """The maximum, taken from its first row. This row gets the whole gradient."""
    winner = argmax(jax.lax.stop_gradient(data), segment_ids, num_segments)
    with_none = jnp.concatenate([data, jnp.full((1, *data.shape[1:]), -jnp.inf, data.dtype)])
    return jnp.take_along_axis(with_none, winner, axis=0)


def gathered(reduction: Callable[..., Array]) -> Callable[..., Array]:
    """A function that gathers rows and reduces them."""

    def reduce(data: Array, gather_ids: Array, *segments: Any, weights: Array | None = None, **options: Any) -> Array:
        rows = gather(data, gather_ids)
        if weights is not None:
            rows = rows * weights.reshape(*weights.shape, *[1] * (rows.ndim - weights.ndim))
        return reduction(rows, *segments, **options)

    return reduce


gathered_sum = gathered(jax.ops.segment_sum)


def gathered_dot(
    data: Array, segment_data: Array, gather_ids: Array, segment_ids: Array, indices_are_sorted: bool = False
) -> Array:
    return (gather(data, gather_ids) * gather(segment_data, segment_ids, indices_are_sorted)).sum(-1)


def attention(logits: Array, data: Array, gather_ids: Array, segment_ids: Array, num_segments: int) -> Array:
    weights = softmax(logits, segment_ids, num_segments)
    return gathered_sum(data, gather_ids, segment_ids, num_segments, weights=weights)


def gradient_of(reduction: Callable[..., Array]) -> Callable[..., Array]:
    """``(d_output, data, segment_ids, **options) -> d_data``"""

    def gradient(d_output: Array, data: Array, segment_ids: Array, **options: Any) -> Array:
        _, vjp = jax.vjp(lambda data: reduction(data, segment_ids, d_output.shape[0], **options), data)
        return vjp(d_output)[0]

    return gradient


def sum_backward(d_output: Array, segment_ids: Array) -> Array:
    return gather(d_output, segment_ids)


def mean_backward(d_output: Array, segment_ids: Array) -> Array:
    count = jax.ops.segment_sum(jnp.ones_like(segment_ids), segment_ids, d_output.shape[0])
    return gather(d_output / jnp.maximum(count, 1).astype(d_output.dtype)[:, None], segment_ids)


def softmax_backward(d_output: Array, probabilities: Array, segment_ids: Array, num_segments: int) -> Array:
    total = jax.ops.segment_sum(probabilities * d_output, segment_ids, num_segments)
    return probabilities * (d_output - gather(total, segment_ids))


# ----------------------------------------------------------------------------------------------------------------------
# Operands


def with_ties(rng: np.random.Generator, shape: tuple[int, ...], sizes: Sizes) -> np.ndarray:
    """Rounded numbers, so that rows tie and share the gradient of a maximum."""
    return repeated(lambda count: np.round(rng.standard_normal(count), 1), shape)


def factors(rng: np.random.Generator, shape: tuple[int, ...], sizes: Sizes) -> np.ndarray:
    """Numbers around 1 and -1, so that products stay in range."""
    return repeated(lambda count: rng.choice([-1, 1], count) * np.exp2(rng.normal(0, 0.25, count)), shape)


def probabilities(rng: np.random.Generator, shape: tuple[int, ...], sizes: Sizes) -> np.ndarray:
    """Numbers between 0 and 1; they need not sum to 1."""
    return repeated(rng.random, shape)


def ids_below(dim: str, *, is_sorted: bool = False) -> Draw:
    """Draws numbers of rows of a dimension."""

    def draw(rng: np.random.Generator, shape: tuple[int, ...], sizes: Sizes) -> np.ndarray:
        ids = rng.integers(0, sizes[dim], shape)
        return np.sort(ids, axis=-1) if is_sorted else ids

    return draw


# ----------------------------------------------------------------------------------------------------------------------
# The table

CHECKED = {
    "small": {"row": 50, "feature": 9, "segment": 7},
    "check": {"row": 20_000, "feature": 33, "segment": 3_000},
}
# The gradient of a standard deviation divides by it. In some segments of two or three rows, these are almost equal.
OF_MANY_ROWS = {**CHECKED, "check": {**CHECKED["check"], "segment": 300}}
TIMED = {
    "cpu": {"row": 292_000, "feature": 64, "segment": 42_000},
    "cuda": {"row": 1_166_243, "feature": 128, "segment": 169_343},
}

# Sums differ in their order. Quotients of products are rounded. The gradient of a softmax follows from rounded results.
SUMMED: Tolerance = ROUNDED_ONCE | {"float32": (4e-6, 4e-6)}
ROUNDED_FROM_FLOAT64: Tolerance = ROUNDED_ONCE | {"float32": (2e-7, 2e-7)}
DIVIDED: Tolerance = ROUNDED_ONCE | {"float32": (4e-6, 2e-5)}
FROM_RESULTS: Tolerance = {"float32": (4e-6, 1e-5), "bfloat16": (4e-3, 6e-2), "float16": (5e-4, 8e-3)}
TAKEN: Tolerance = {dtype: (0, of_gradient) for dtype, (_, of_gradient) in SUMMED.items()}
GATHERED_SELECTED: Tolerance = {"float32": (0, 4e-6), "bfloat16": (0, 3e-2), "float16": (0, 4e-3)}
SELECTED: Tolerance = {"float32": (0, 4e-6), "bfloat16": (0, 4e-3), "float16": (0, 5e-4)}

ROWS, CELLS = ("row", "feature"), ("segment", "feature")
IDS, SORTED_IDS = (Operand(("row",), ids_below("segment", is_sorted=x), "int32") for x in (False, True))
NODE_IDS, SORTED_NODE_IDS = (Operand(("row",), ids_below("node", is_sorted=x), "int32") for x in (False, True))


def reductions(
    function: Callable[..., Array],
    plain_jax: Callable[..., Array],
    tolerance: Tolerance,
    data: Operand,
    *,
    data_name: str = "data",
    sorted_timed: Mapping[str, Sizes] = {},
    checked: Mapping[str, Sizes] = CHECKED,
) -> Iterator[Example]:
    """Examples of a reduction, for ids in random order and for sorted ids."""
    for variant, segment_ids, options, sizes in (
        ("", IDS, {}, TIMED),
        ("sorted ids", SORTED_IDS, {"indices_are_sorted": True}, sorted_timed),
    ):
        operands = {data_name: data, "segment_ids": segment_ids}
        static = {"num_segments": SizeOf("segment"), **options}
        yield Example(function, plain_jax, operands, {**checked, **sizes}, variant, static, tolerance=tolerance)


IN_FLOAT64 = {"accumulator": "float64"}


def sum_in_float64(function: Callable[..., Array], plain_jax: Callable[..., Array]) -> Example:
    operands, static = {"data": NUMBERS, "segment_ids": IDS}, {"num_segments": SizeOf("segment"), **IN_FLOAT64}
    return Example(
        function, in_float64(plain_jax), operands, CHECKED, "in float64", static, tolerance=ROUNDED_FROM_FLOAT64
    )


GATHERED_CHECKED = {use: {**sizes, "node": sizes["row"] // 6, "feature1": 4} for use, sizes in CHECKED.items()}
GATHERED_TIMED = {use: {**sizes, "node": sizes["segment"]} for use, sizes in TIMED.items()}
# Plain JAX also rounds the products, and the gradient of a weight is a sum of products.
WEIGHTED: Tolerance = {"float32": (4e-6, 2e-5), "bfloat16": (3e-2, 6e-2), "float16": (4e-3, 8e-3)}
# The gradient of a logit is a difference of two products, one of them with rounded results. Plain JAX in 16 bits errs
# three times as much.
ATTENDED: Tolerance = WEIGHTED | {"bfloat16": (3e-2, 1.2e-1), "float16": (4e-3, 1.6e-2)}

TIED, NUMBERS, COTANGENTS = Operand(ROWS, with_ties), Operand(ROWS), Operand(CELLS)
WINNERS = dataclasses.replace(TIED, differentiable=False)
FACTORS = Operand(ROWS, factors)


def gradient(
    function: Callable[..., Array],
    plain_jax: Callable[..., Array],
    operands: Mapping[str, Operand],
    tolerance: Tolerance,
    variant: str = "",
    **options: Any,
) -> Example:
    """An example of a gradient by the rows. The first of a function is timed."""
    operands = {"d_output": COTANGENTS, **operands}
    operands.setdefault("segment_ids", IDS)
    sizes = CHECKED if variant else {**CHECKED, **TIMED}
    return Example(function, plain_jax, operands, sizes, variant, options, tolerance=tolerance)


def gathering(
    function: Callable[..., Array],
    plain_jax: Callable[..., Array],
    operands: Mapping[str, Operand],
    tolerance: Tolerance,
    variant: str = "",
    timed: Mapping[str, Sizes] = GATHERED_TIMED,
    **options: Any,
) -> Example:
    """An example of a function that gathers along edges. The first of a function is timed."""
    operands = {"data": NODES, "gather_ids": NODE_IDS, "segment_ids": IDS, **operands}
    sizes = GATHERED_CHECKED if variant else {**GATHERED_CHECKED, **timed}
    options |= {"num_segments": SizeOf("segment")}
    return Example(function, plain_jax, operands, sizes, variant, options, tolerance=tolerance)


NODES, NODES_WITH_TIES = Operand(("node", "feature")), Operand(("node", "feature"), with_ties)
NODES_WITH_HEADS, CELLS_WITH_HEADS = (Operand((dim, "feature", "feature1")) for dim in ("node", "segment"))
OF_EDGES, OF_HEADS = Operand(("row",)), Operand(("row", "feature"))

EXAMPLES = [
    *reductions(jb.segment_max, jax.ops.segment_max, SELECTED, TIED, sorted_timed=TIMED),
    Example(
        jb.segment_max,
        first_max,
        {"data": TIED, "segment_ids": SORTED_IDS},
        CHECKED,
        "first of ties",
        {"num_segments": SizeOf("segment"), "indices_are_sorted": True, "tie_break": "first"},
        tolerance=EXACT,
    ),
    *reductions(jb.segment_min, jax.ops.segment_min, SELECTED, TIED),
    *reductions(jb.segment_sum, jax.ops.segment_sum, SUMMED, NUMBERS, sorted_timed=TIMED),
    sum_in_float64(jb.segment_sum, jax.ops.segment_sum),
    *reductions(jb.segment_mean, mean, SUMMED, NUMBERS),
    sum_in_float64(jb.segment_mean, mean),
    *reductions(jb.segment_var, var, SUMMED, NUMBERS),
    *reductions(jb.segment_std, std, SUMMED, NUMBERS, checked=OF_MANY_ROWS),
    *reductions(jb.segment_prod, prod, DIVIDED, FACTORS),
    *reductions(jb.segment_softmax, softmax, FROM_RESULTS, NUMBERS, data_name="logits", sorted_timed=TIMED),
    *reductions(jb.segment_argmax, argmax, EXACT, WINNERS),
    *reductions(jb.segment_argmin, argmin, EXACT, WINNERS),
    gradient(jb.segment_max_backward, gradient_of(jax.ops.segment_max), {"data": TIED}, SUMMED),
    gradient(jb.segment_min_backward, gradient_of(jax.ops.segment_min), {"data": TIED}, SUMMED),
    gradient(jb.segment_prod_backward, gradient_of(prod), {"data": FACTORS}, DIVIDED),
    gradient(
        jb.segment_max_backward,
        gradient_of(jax.ops.segment_max),
        {"data": TIED, "segment_ids": SORTED_IDS},
        SUMMED,
        "sorted ids",
        indices_are_sorted=True,
    ),
    gradient(jb.unsorted_segment_max_backward, gradient_of(first_max), {"data": TIED}, EXACT),
    gradient(jb.segment_sum_backward, sum_backward, {}, SUMMED),
    gradient(jb.segment_mean_backward, mean_backward, {}, SUMMED),
    gathering(jb.gather_segment_sum, gathered_sum, {}, SUMMED),
    gathering(
        jb.gather_segment_sum, gathered_sum, {"segment_ids": SORTED_IDS}, SUMMED, "sorted ids", indices_are_sorted=True
    ),
    gathering(jb.gather_segment_sum, gathered_sum, {"weights": OF_EDGES}, WEIGHTED, "weights"),
    gathering(jb.gather_segment_sum, gathered_sum, {"data": NODES_WITH_HEADS, "weights": OF_HEADS}, WEIGHTED, "heads"),
    gathering(jb.gather_segment_mean, gathered(mean), {}, FROM_RESULTS),
    gathering(jb.gather_segment_mean, gathered(mean), {"weights": OF_EDGES}, FROM_RESULTS, "weights"),
    gathering(jb.gather_segment_max, gathered(jax.ops.segment_max), {"data": NODES_WITH_TIES}, GATHERED_SELECTED),
    gathering(jb.gather_segment_min, gathered(jax.ops.segment_min), {"data": NODES_WITH_TIES}, GATHERED_SELECTED),
    *(
        Example(
            jb.gather_segment_dot,
            gathered_dot,
            {"data": data, "segment_data": segment_data, "gather_ids": NODE_IDS, "segment_ids": segment_ids},
            sizes,
            variant,
            options,
            tolerance=WEIGHTED,
        )
        for variant, data, segment_data, segment_ids, options, sizes in (
            ("", NODES, COTANGENTS, IDS, {}, GATHERED_CHECKED | GATHERED_TIMED),
            ("heads", NODES_WITH_HEADS, CELLS_WITH_HEADS, IDS, {}, GATHERED_CHECKED),
            ("sorted ids", NODES, COTANGENTS, SORTED_IDS, {"indices_are_sorted": True}, GATHERED_CHECKED),
        )
    ),
    gathering(
        jb.segment_attention,
        attention,
        {"logits": OF_HEADS, "data": NODES_WITH_HEADS},
        ATTENDED,
        timed={use: {**sizes, "feature": 8, "feature1": 16} for use, sizes in GATHERED_TIMED.items()},
    ),
    *(
        Example(jb.take_rows, plain_jax, {"data": NODES, "ids": ids}, sizes, variant, options, tolerance=tolerance)
        for variant, plain_jax, ids, options, sizes, tolerance in (
            ("", gather, NODE_IDS, {}, GATHERED_CHECKED | GATHERED_TIMED, TAKEN),
            ("sorted ids", gather, SORTED_NODE_IDS, {"indices_are_sorted": True}, GATHERED_CHECKED, TAKEN),
            ("in float64", gather_summed_in_float64, NODE_IDS, IN_FLOAT64, GATHERED_CHECKED, ROUNDED_FROM_FLOAT64),
        )
    ),
    gradient(
        jb.segment_softmax_backward,
        softmax_backward,
        {"d_output": NUMBERS, "probabilities": Operand(ROWS, probabilities)},
        FROM_RESULTS,
        num_segments=SizeOf("segment"),
    ),
]
