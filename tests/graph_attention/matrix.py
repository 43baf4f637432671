"""Declarations of attention over edges with logits from queries and keys, and their reference."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from segment.matrix import (
    COMMON,
    NO_CLIP_TO_NOTHING,
    PLAN_HAS_MODE,
    finite_logits,
    ids_of,
    logits,
    plain_max,
    row_numbers_of,
)
from support.matrix.calls import (
    ABSENT,
    FLOATING,
    Constraint,
    Operand,
    Options,
    Problem,
    Sizes,
    declare,
    finite_numbers,
    passed,
    segment_sum,
    take_cells,
    wide_ids,
)

import jax_baracuda

NEGATIVE_SLOPE = 0.2

# ----------------------------------------------------------------------------------------------------------------------
# The reference, in float64. Queries are [S, H, D], keys [N, H, D], values [N, H, Dv], biases [E, H].


def leaky_relu(x: Any, negative_slope: float) -> Any:
    return jnp.where(x >= 0, x, negative_slope * x)


def of_dot_products(scale: float) -> Callable[..., Any]:
    """``(queries, keys)`` of edges ``-> logits``"""
    return lambda queries, keys: scale * (queries * keys).sum(-1)


def of_additive_scores(weights: Any, negative_slope: float) -> Callable[..., Any]:
    """``(queries, keys)`` of edges ``-> logits``"""
    return lambda queries, keys: (weights[None] * leaky_relu(queries + keys, negative_slope)).sum(-1)


def logits_of_edges(score: Callable[..., Any], query: Any, key: Any, gather_ids: Any, ids: Any, bias: Any) -> Any:
    """The logits of all edges, -inf for edges that take no part."""
    takes_part = take_cells(jnp.ones((query.shape[0], 1), bool), ids, False)
    keys = jnp.where(takes_part[..., None], key[wide_ids(gather_ids)], 0)
    of_edges = score(take_cells(query, ids), keys)
    if bias is not None:
        of_edges = of_edges + jnp.where(takes_part, bias, 0)
    return jnp.where(takes_part, of_edges, -jnp.inf)


def probabilities(of_edges: Any, ids: Any, num_segments: int) -> Any:
    """The softmax in each segment; zeros in a segment whose logits are all -inf."""
    maxima = plain_max(jax.lax.stop_gradient(of_edges), ids, num_segments)
    maxima = jnp.where(maxima == -jnp.inf, 0, maxima)
    exponentials = jnp.exp(of_edges - take_cells(maxima, ids))
    totals = segment_sum(exponentials, ids, num_segments)
    return exponentials / take_cells(jnp.where(totals == 0, 1, totals), ids, 1)


def weighted_sum(weights: Any, value: Any, gather_ids: Any, ids: Any, num_segments: int) -> Any:
    takes_part = take_cells(jnp.ones((num_segments, 1, 1), bool), ids, False)
    values = jnp.where(takes_part, value[wide_ids(gather_ids)], 0)
    return segment_sum(jnp.where(takes_part, weights[..., None], 0) * values, ids, num_segments)


def attention(
    score: Callable[..., Any], query: Any, key: Any, value: Any, gather_ids: Any, ids: Any, bias: Any = None
) -> Any:
    of_edges = logits_of_edges(score, query, key, gather_ids, ids, bias)
    return weighted_sum(probabilities(of_edges, ids, query.shape[0]), value, gather_ids, ids, query.shape[0])


# ----------------------------------------------------------------------------------------------------------------------
# The majorant: the same with magnitudes, and with probabilities that include the effect of rounded logits.


@jax.custom_jvp
def magnitude(x: Any) -> Any:
    """The absolute value of finite numbers, with a derivative of 1. Logits beyond 1e60 may have any error."""
    return jnp.where(jnp.isfinite(x), jnp.minimum(jnp.abs(x), 1e60), 0)


magnitude.defjvp(lambda primals, tangents: (magnitude(*primals), *tangents))


def majorant_of_dot_products(scale: float) -> Callable[..., Any]:
    return lambda queries, keys: abs(scale) * (magnitude(queries) * magnitude(keys)).sum(-1)


def majorant_of_additive_scores(weights: Any, negative_slope: float) -> Callable[..., Any]:
    steepest = max(1.0, abs(negative_slope))
    return lambda queries, keys: steepest * (magnitude(weights)[None] * (magnitude(queries) + magnitude(keys))).sum(-1)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def majorant_probabilities(of_edges: Any, magnitudes: Any, ids: Any, num_segments: int) -> Any:
    """The probabilities, times the factor by which the errors of the logits increase their relative errors."""
    takes_part = take_cells(jnp.ones((num_segments, 1), bool), ids, False)
    of_logits = jnp.where(takes_part, magnitudes, 0)
    largest = take_cells(plain_max(of_logits, ids, num_segments), ids)
    return probabilities(of_edges, ids, num_segments) * (1 + of_logits + largest)


@majorant_probabilities.defjvp
def _majorant_probabilities_jvp(num_segments: int, primals: Any, tangents: Any) -> tuple[Any, Any]:
    of_edges, magnitudes, ids = primals
    p = majorant_probabilities(of_edges, magnitudes, ids, num_segments)
    mean = take_cells(segment_sum(p * tangents[1], ids, num_segments), ids)
    return p, p * (tangents[1] + mean)


def majorant_attention(
    score: Callable[..., Any],
    majorant_of_score: Callable[..., Any],
    query: Any,
    key: Any,
    value: Any,
    gather_ids: Any,
    ids: Any,
    bias: Any = None,
) -> Any:
    exact = logits_of_edges(score, query, key, gather_ids, ids, bias)
    of_bias = None if bias is None else magnitude(bias)
    of_edges = logits_of_edges(majorant_of_score, query, key, gather_ids, ids, of_bias)
    # Only the magnitudes have derivatives.
    p = majorant_probabilities(jax.lax.stop_gradient(exact), of_edges, ids, query.shape[0])
    return weighted_sum(p, magnitude(value), gather_ids, ids, query.shape[0])


# ----------------------------------------------------------------------------------------------------------------------
# Declarations.

SIZES: dict[str, Sizes] = {
    "small": {"row": 16, "segment": 6, "node": 4, "feature": 2, "feature1": 4, "width": 4},
    "odd": {"row": 13, "segment": 5, "node": 3, "feature": 3, "feature1": 5, "width": 3},
    "one": {"row": 1, "segment": 1, "node": 1, "feature": 1, "feature1": 1, "width": 1},
    "vectors": {"row": 24, "segment": 3, "node": 7, "feature": 1, "feature1": 8, "width": 20},
    "too wide": {"row": 12, "segment": 4, "node": 5, "feature": 2, "feature1": 300, "width": 1},
    "no edges": {"row": 0, "segment": 4, "node": 3, "feature": 2, "feature1": 3, "width": 3},
    "no segments": {"row": 5, "segment": 0, "node": 2, "feature": 2, "feature1": 4, "width": 4},
    "no features": {"row": 6, "segment": 3, "node": 2, "feature": 2, "feature1": 0, "width": 2},
    "no heads": {"row": 6, "segment": 3, "node": 2, "feature": 0, "feature1": 4, "width": 4},
}
LARGE_SIZES: dict[str, Sizes] = {
    "many edges": {"row": 40_000, "segment": 6000, "node": 5000, "feature": 4, "feature1": 16, "width": 16},
    "few segments": {"row": 9000, "segment": 2, "node": 2, "feature": 2, "feature1": 33, "width": 33},
    "mostly empty": {"row": 3001, "segment": 9000, "node": 700, "feature": 8, "feature1": 8, "width": 8},
    "wide heads": {"row": 2000, "segment": 300, "node": 300, "feature": 3, "feature1": 64, "width": 64},
}

CONSTRAINTS = (
    NO_CLIP_TO_NOTHING,
    PLAN_HAS_MODE,
    Constraint(
        "8-bit ids do not reach the segments",
        lambda ids_dtype, size: ids_dtype == "uint8" and size in LARGE_SIZES,
    ),
    Constraint(
        "only biases are special",
        lambda values, bias: values == "special" and bias is ABSENT,
    ),
    Constraint(
        "XLA may simplify the derivative of a result without elements to 0, where a logit is NaN",
        lambda values, size: values == "special" and size == "no features",
    ),
)


def _call_by_edges(
    options: Options, function: Callable[..., Any], query: Any, key: Any, gather_ids: Any, segment_ids: Any, **more: Any
) -> Any:
    """Calls `function` with ids, or with a plan made from them."""
    more |= passed(options, *(name for name in ("scale", "negative_slope") if name in options))
    if options["plan"]:
        plan = jax_baracuda.segment_plan(segment_ids, query.shape[0], gather_ids, key.shape[0])
        return function(query, key, plan=plan, **more)
    more |= passed(options, "indices_are_sorted", "mode")
    return function(query, key, gather_ids=gather_ids, segment_ids=segment_ids, **more)


def _problem(is_additive: bool, dtype: str, options: Options, sizes: Sizes) -> Problem:
    num_segments, num_rows = sizes["segment"], sizes["node"]
    # The dimension of values is that of keys where their sizes are the same.
    width = "feature1" if is_additive or sizes["feature1"] == sizes["width"] else "width"
    own = Operand("score_weights", ("feature", "feature1"), finite_logits, has_sign=True)
    value = Operand("value", ("node", "feature", width), finite_numbers)
    dims_of_bias = {ABSENT: None, "edge": ("row",), "edge and head": ("row", "feature")}[options["bias"]]
    draw_bias = logits if options["values"] == "special" else finite_logits
    biases = () if dims_of_bias is None else (Operand("bias", dims_of_bias, draw_bias, has_sign=True),)
    scale = options.get("scale", ABSENT)
    scale = 1 / math.sqrt(max(sizes["feature1"], 1)) if scale is ABSENT else scale
    slope = options.get("negative_slope", ABSENT)
    slope = NEGATIVE_SLOPE if slope is ABSENT else slope

    def reference_of(is_majorant: bool) -> Callable[..., Any]:
        def call(query: Any, key: Any, gather_ids: Any, segment_ids: Any, bias: Any = None, **others: Any) -> Any:
            [other] = others.values()
            bias = bias[:, None] if options["bias"] == "edge" else bias
            ids = wide_ids(segment_ids)
            ids = jnp.clip(ids, 0, num_segments - 1) if options["mode"] == "clip" else ids
            dot_products, additive = of_dot_products, of_additive_scores
            scores = [additive(other, slope) if is_additive else dot_products(scale)]
            if is_majorant:
                dot_products, additive = majorant_of_dot_products, majorant_of_additive_scores
                scores.append(additive(other, slope) if is_additive else dot_products(scale))
            function = majorant_attention if is_majorant else attention
            return function(*scores, query, key, key if is_additive else other, gather_ids, ids, bias)

        return call

    is_sorted = bool(options["indices_are_sorted"])
    return Problem(
        operands=(
            Operand("query", ("segment", "feature", "feature1"), finite_logits, has_sign=True),
            Operand("key", ("node", "feature", "feature1"), finite_logits, has_sign=True),
            own if is_additive else value,
            Operand("gather_ids", ("row",), row_numbers_of(num_rows), dtype=options["gather_dtype"]),
            Operand("segment_ids", ("row",), ids_of(num_segments, is_sorted), dtype=options["ids_dtype"]),
            *biases,
        ),
        apply=functools.partial(_call_by_edges, options),
        reference=reference_of(False),
        majorant=reference_of(True),
        results=(("segment", "feature", width),),
        terms=max(sizes["row"] + sizes["feature1"] + sizes["width"], 1),
        # The gradients of heads, each rounded, are added up for a bias that all of them share.
        gradient_roundings=sizes["feature"] if options["bias"] == "edge" else 0,
        rounded_dims=("row", "feature") if options["bias"] == "edge" else ("row",),
        free=("feature",),
        draw_cotangents=finite_numbers,
    )


for _name, _own_options in (
    ("graph_dot_product_attention", {"scale": (ABSENT, -0.3)}),
    ("graph_additive_attention", {"negative_slope": (ABSENT, 0.0, -1.5)}),
):
    declare(
        name=_name,
        dtypes=FLOATING,
        sizes=SIZES,
        large_sizes=LARGE_SIZES,
        options={
            "bias": (ABSENT, "edge", "edge and head"),
            "values": ("finite", "special"),
            **_own_options,
            "indices_are_sorted": (ABSENT, True),
            "mode": (ABSENT, "clip", "drop"),
            "plan": (ABSENT, True),
            "ids_dtype": COMMON["ids_dtype"],
            "gather_dtype": COMMON["ids_dtype"],
        },
        strategy_options=({}, {"plan": True}, {"bias": "edge and head"}),
        problem=functools.partial(_problem, _name == "graph_additive_attention"),
        constraints=CONSTRAINTS,
    )
