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
from jax_baracuda._examples.example import EXACT, ROUNDED_ONCE, Example, Operand, SizeOf, Sizes, Tolerance, repeated

# ----------------------------------------------------------------------------------------------------------------------
# Plain JAX, as fast as possible: it relies on ids in range.


def gather(d_output: Array, segment_ids: Array, indices_are_sorted: bool = False) -> Array:
    """Gathers the segment of each row: the gradient of a sum."""
    return d_output.at[segment_ids].get(indices_are_sorted=indices_are_sorted, mode="promise_in_bounds")


def mean(data: Array, segment_ids: Array, num_segments: int, indices_are_sorted: bool = False) -> Array:
    add = functools.partial(
        jax.ops.segment_sum,
        segment_ids=segment_ids,
        num_segments=num_segments,
        indices_are_sorted=indices_are_sorted,
    )
    count = jnp.maximum(add(jnp.ones_like(segment_ids)), 1).astype(data.dtype)
    return add(data) / count.reshape(-1, *[1] * (data.ndim - 1))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _prod(data: Array, segment_ids: Array, num_segments: int, indices_are_sorted: bool) -> Array:
    return jax.ops.segment_prod(data, segment_ids, num_segments, indices_are_sorted=indices_are_sorted)


def _prod_forward(data: Array, segment_ids: Array, num_segments: int, indices_are_sorted: bool) -> Any:
    output = _prod(data, segment_ids, num_segments, indices_are_sorted)
    return output, (data, segment_ids, output)


def _prod_backward(num_segments: int, indices_are_sorted: bool, residuals: Any, cotangent: Array) -> Any:
    data, segment_ids, output = residuals
    return gather(cotangent * output, segment_ids, indices_are_sorted) / data, None


_prod.defvjp(_prod_forward, _prod_backward)


def prod(data: Array, segment_ids: Array, num_segments: int, indices_are_sorted: bool = False) -> Array:
    """JAX has no gradient of ``segment_prod``. This is the usual hand-written one: it requires data without zeros."""
    return _prod(data, segment_ids, num_segments, indices_are_sorted)


def argmax(data: Array, segment_ids: Array, num_segments: int, indices_are_sorted: bool = False) -> Array:
    maxima = jax.ops.segment_max(data, segment_ids, num_segments, indices_are_sorted=indices_are_sorted)
    row = jnp.arange(data.shape[0], dtype=jnp.int32).reshape(-1, *[1] * (data.ndim - 1))
    row = jnp.where(data == gather(maxima, segment_ids, indices_are_sorted), row, data.shape[0])
    winner = jax.ops.segment_min(row, segment_ids, num_segments, indices_are_sorted=indices_are_sorted)
    return jnp.minimum(winner, data.shape[0])


def argmin(data: Array, segment_ids: Array, num_segments: int, indices_are_sorted: bool = False) -> Array:
    return argmax(-data, segment_ids, num_segments, indices_are_sorted)


def softmax(logits: Array, segment_ids: Array, num_segments: int, indices_are_sorted: bool = False) -> Array:
    maxima = jax.ops.segment_max(
        jax.lax.stop_gradient(logits), segment_ids, num_segments, indices_are_sorted=indices_are_sorted
    )
    exponentials = jnp.exp(logits - gather(maxima, segment_ids, indices_are_sorted))
    total = jax.ops.segment_sum(exponentials, segment_ids, num_segments, indices_are_sorted=indices_are_sorted)
    return exponentials / gather(total, segment_ids, indices_are_sorted)


def first_max(data: Array, segment_ids: Array, num_segments: int, **_: Any) -> Array:
    """The maximum, taken from its first row. This row gets the whole gradient."""
    winner = argmax(jax.lax.stop_gradient(data), segment_ids, num_segments)
    with_none = jnp.concatenate([data, jnp.full((1, *data.shape[1:]), -jnp.inf, data.dtype)])
    return jnp.take_along_axis(with_none, winner, axis=0)


def gathered(reduction: Callable[..., Array]) -> Callable[..., Array]:
    """A function that gathers rows and reduces them."""

    def reduce(
        data: Array,
        gather_ids: Array,
        segment_ids: Array,
        num_segments: int,
        weights: Array | None = None,
        indices_are_sorted: bool = False,
    ) -> Array:
        rows = data.at[gather_ids].get(mode="promise_in_bounds")
        if weights is not None:
            rows = rows * weights.reshape(*weights.shape, *[1] * (rows.ndim - weights.ndim))
        return reduction(rows, segment_ids, num_segments, indices_are_sorted=indices_are_sorted)

    return reduce


gathered_sum = gathered(jax.ops.segment_sum)


def attention(logits: Array, data: Array, gather_ids: Array, segment_ids: Array, num_segments: int) -> Array:
    weights = softmax(logits, segment_ids, num_segments)
    return gathered_sum(data, gather_ids, segment_ids, num_segments, weights)


def rows_of(data: Array, ids: Array, indices_are_sorted: bool = False) -> Array:
    return data.at[ids].get(indices_are_sorted=indices_are_sorted, mode="promise_in_bounds")


def gradient_of(reduction: Callable[..., Array]) -> Callable[..., Array]:
    """``(d_output, data, segment_ids, **options) -> d_data``"""

    def gradient(d_output: Array, data: Array, segment_ids: Array, **options: Any) -> Array:
        _, vjp = jax.vjp(lambda data: reduction(data, segment_ids, d_output.shape[0], **options), data)
        return vjp(d_output)[0]

    return gradient


def mean_backward(d_output: Array, segment_ids: Array) -> Array:
    count = jax.ops.segment_sum(jnp.ones_like(segment_ids), segment_ids, d_output.shape[0])
    return gather(d_output / jnp.maximum(count, 1).astype(d_output.dtype)[:, None], segment_ids)


def softmax_backward(d_output: Array, probabilities: Array, segment_ids: Array, num_segments: int) -> Array:
    total = jax.ops.segment_sum(probabilities * d_output, segment_ids, num_segments)
    return probabilities * (d_output - gather(total, segment_ids))


PLAIN_JAX: dict[str, Callable[..., Array]] = {
    "segment_max": jax.ops.segment_max,
    "segment_min": jax.ops.segment_min,
    "segment_sum": jax.ops.segment_sum,
    "segment_mean": mean,
    "segment_prod": prod,
    "segment_softmax": softmax,
    "segment_argmax": argmax,
    "segment_argmin": argmin,
}

# ----------------------------------------------------------------------------------------------------------------------
# Operands


def with_ties(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype, sizes: Sizes) -> np.ndarray:
    """Rounded numbers, so that rows tie and share the gradient of a maximum."""
    return repeated(lambda count: np.round(rng.standard_normal(count), 1), shape, dtype)


def factors(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype, sizes: Sizes) -> np.ndarray:
    """Numbers around 1 and -1, so that products stay in range."""
    return repeated(lambda count: rng.choice([-1, 1], count) * np.exp2(rng.normal(0, 0.25, count)), shape, dtype)


def probabilities(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype, sizes: Sizes) -> np.ndarray:
    """Numbers between 0 and 1; they need not sum to 1."""
    return repeated(rng.random, shape, dtype)


def random_ids(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype, sizes: Sizes) -> np.ndarray:
    return rng.integers(0, sizes["segment"], shape).astype(dtype)


def node_ids(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype, sizes: Sizes) -> np.ndarray:
    return rng.integers(0, sizes["node"], shape).astype(dtype)


def sorted_node_ids(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype, sizes: Sizes) -> np.ndarray:
    return np.sort(node_ids(rng, shape, dtype, sizes), axis=-1)


def sorted_ids(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype, sizes: Sizes) -> np.ndarray:
    return np.sort(random_ids(rng, shape, dtype, sizes), axis=-1)


# ----------------------------------------------------------------------------------------------------------------------
# The table

CHECKED = {
    "small": {"row": 50, "feature": 9, "segment": 7},
    "check": {"row": 20_000, "feature": 33, "segment": 3_000},
}
TIMED = {
    "cpu": {"row": 292_000, "feature": 64, "segment": 42_000},
    "cuda": {"row": 1_166_243, "feature": 128, "segment": 169_343},
}

# Sums differ in their order. Quotients of products are rounded. The gradient of a softmax follows from rounded results.
SUMMED: Tolerance = ROUNDED_ONCE | {"float32": (4e-6, 4e-6)}
DIVIDED: Tolerance = ROUNDED_ONCE | {"float32": (4e-6, 2e-5)}
FROM_RESULTS: Tolerance = {"float32": (4e-6, 1e-5), "bfloat16": (4e-3, 6e-2), "float16": (5e-4, 8e-3)}
TAKEN: Tolerance = {dtype: (0, of_gradient) for dtype, (_, of_gradient) in SUMMED.items()}
GATHERED_SELECTED: Tolerance = {"float32": (0, 4e-6), "bfloat16": (0, 3e-2), "float16": (0, 4e-3)}
ATTENDED: Tolerance = {"float32": (4e-6, 2e-5), "bfloat16": (3e-2, 6e-2), "float16": (4e-3, 8e-3)}
SELECTED: Tolerance = {"float32": (0, 4e-6), "bfloat16": (0, 4e-3), "float16": (0, 5e-4)}

ROWS, CELLS = ("row", "feature"), ("segment", "feature")
IDS, SORTED_IDS = (Operand(("row",), draw, "int32") for draw in (random_ids, sorted_ids))


def reductions(
    function: Callable[..., Array],
    tolerance: Tolerance,
    data: Operand,
    *,
    data_name: str = "data",
    plain_jax: Callable[..., Array] | None = None,
    sorted_timed: Mapping[str, Sizes] = {},
) -> Iterator[Example]:
    """Examples of a reduction, for ids in random order and for sorted ids. `plain_jax`: if it is not in the table."""
    for variant, segment_ids, options, sizes in (
        ("", IDS, {}, TIMED),
        ("sorted ids", SORTED_IDS, {"indices_are_sorted": True}, sorted_timed),
    ):
        yield Example(
            function,
            plain_jax or PLAIN_JAX[function.__name__],
            {data_name: data, "segment_ids": segment_ids},
            {**CHECKED, **sizes},
            variant,
            {"num_segments": SizeOf("segment"), **options},
            tolerance=tolerance,
        )


GATHERED_CHECKED = {use: {**sizes, "node": sizes["row"] // 6, "feature1": 4} for use, sizes in CHECKED.items()}
GATHERED_TIMED = {use: {**sizes, "node": sizes["segment"]} for use, sizes in TIMED.items()}
# Plain JAX also rounds the products, and the gradient of a weight is a sum of products.
WEIGHTED: Tolerance = {"float32": (4e-6, 2e-5), "bfloat16": (3e-2, 6e-2), "float16": (4e-3, 8e-3)}

TIED, NUMBERS, COTANGENTS = Operand(ROWS, with_ties), Operand(ROWS), Operand(CELLS)

EXAMPLES = [
    *reductions(jb.segment_max, SELECTED, TIED, sorted_timed=TIMED),
    Example(
        jb.segment_max,
        first_max,
        {"data": TIED, "segment_ids": SORTED_IDS},
        CHECKED,
        "first of ties",
        {"num_segments": SizeOf("segment"), "indices_are_sorted": True, "tie_break": "first"},
        tolerance=EXACT,
    ),
    *reductions(jb.segment_min, SELECTED, TIED),
    *reductions(jb.segment_sum, SUMMED, NUMBERS, sorted_timed=TIMED),
    *reductions(jb.segment_mean, SUMMED, NUMBERS),
    *reductions(jb.segment_prod, DIVIDED, Operand(ROWS, factors)),
    *reductions(jb.segment_softmax, FROM_RESULTS, NUMBERS, data_name="logits", sorted_timed=TIMED),
    *reductions(jb.segment_argmax, EXACT, dataclasses.replace(TIED, differentiable=False)),
    *reductions(jb.segment_argmin, EXACT, dataclasses.replace(TIED, differentiable=False)),
    *(
        Example(
            function,
            gradient_of(PLAIN_JAX[function.__name__.removesuffix("_backward")]),
            {"d_output": COTANGENTS, "data": data, "segment_ids": IDS},
            {**CHECKED, **TIMED},
            tolerance=tolerance,
        )
        for function, data, tolerance in (
            (jb.segment_max_backward, TIED, SUMMED),
            (jb.segment_min_backward, TIED, SUMMED),
            (jb.segment_prod_backward, Operand(ROWS, factors), DIVIDED),
        )
    ),
    Example(
        jb.segment_max_backward,
        gradient_of(jax.ops.segment_max),
        {"d_output": COTANGENTS, "data": TIED, "segment_ids": SORTED_IDS},
        CHECKED,
        "sorted ids",
        {"indices_are_sorted": True},
        tolerance=SUMMED,
    ),
    Example(
        jb.unsorted_segment_max_backward,
        gradient_of(first_max),
        {"d_output": COTANGENTS, "data": TIED, "segment_ids": IDS},
        {**CHECKED, **TIMED},
        tolerance=EXACT,
    ),
    *(
        Example(
            function,
            plain_jax,
            {"d_output": COTANGENTS, "segment_ids": IDS},
            {**CHECKED, **TIMED},
            tolerance=SUMMED,
        )
        for function, plain_jax in (
            (jb.segment_sum_backward, gather),
            (jb.segment_mean_backward, mean_backward),
        )
    ),
    *(
        Example(
            jb.gather_segment_sum,
            gathered_sum,
            {
                "data": Operand(("node", *features)),
                "gather_ids": Operand(("row",), node_ids, "int32"),
                "segment_ids": ids,
                **weights,
            },
            sizes,
            variant,
            {"num_segments": SizeOf("segment"), **options},
            tolerance=WEIGHTED if weights else SUMMED,
        )
        for variant, features, ids, weights, options, sizes in (
            ("", ("feature",), IDS, {}, {}, GATHERED_CHECKED | GATHERED_TIMED),
            ("sorted ids", ("feature",), SORTED_IDS, {}, {"indices_are_sorted": True}, GATHERED_CHECKED),
            ("weights", ("feature",), IDS, {"weights": Operand(("row",))}, {}, GATHERED_CHECKED),
            ("heads", ("feature", "feature1"), IDS, {"weights": Operand(("row", "feature"))}, {}, GATHERED_CHECKED),
        )
    ),
    *(
        Example(
            function,
            gathered(reduction),
            {
                "data": Operand(("node", "feature"), draw),
                "gather_ids": Operand(("row",), node_ids, "int32"),
                "segment_ids": IDS,
                **weights,
            },
            GATHERED_CHECKED | (GATHERED_TIMED if not variant else {}),
            variant,
            {"num_segments": SizeOf("segment")},
            tolerance=tolerance,
        )
        for function, reduction, variant, draw, weights, tolerance in (
            (jb.gather_segment_mean, mean, "", NUMBERS.draw, {}, FROM_RESULTS),
            (jb.gather_segment_mean, mean, "weights", NUMBERS.draw, {"weights": Operand(("row",))}, FROM_RESULTS),
            (jb.gather_segment_max, jax.ops.segment_max, "", TIED.draw, {}, GATHERED_SELECTED),
            (jb.gather_segment_min, jax.ops.segment_min, "", TIED.draw, {}, GATHERED_SELECTED),
        )
    ),
    Example(
        jb.segment_attention,
        attention,
        {
            "logits": Operand(("row", "feature")),
            "data": Operand(("node", "feature", "feature1")),
            "gather_ids": Operand(("row",), node_ids, "int32"),
            "segment_ids": IDS,
        },
        GATHERED_CHECKED | {use: {**sizes, "feature": 8, "feature1": 16} for use, sizes in GATHERED_TIMED.items()},
        options={"num_segments": SizeOf("segment")},
        tolerance=ATTENDED,
    ),
    *(
        Example(
            jb.take_rows,
            rows_of,
            {"data": Operand(("node", "feature")), "ids": Operand(("row",), draw, "int32")},
            sizes,
            variant,
            options,
            tolerance=TAKEN,
        )
        for variant, draw, options, sizes in (
            ("", node_ids, {}, GATHERED_CHECKED | GATHERED_TIMED),
            ("sorted ids", sorted_node_ids, {"indices_are_sorted": True}, GATHERED_CHECKED),
        )
    ),
    Example(
        jb.segment_softmax_backward,
        softmax_backward,
        {"d_output": NUMBERS, "probabilities": Operand(ROWS, probabilities), "segment_ids": IDS},
        {**CHECKED, **TIMED},
        options={"num_segments": SizeOf("segment")},
        tolerance=FROM_RESULTS,
    ),
]
