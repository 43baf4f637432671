"""Example calls of attention over edges with logits from queries and keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax import Array

import jax_baracuda as jb
from jax_baracuda._examples.example import Example, Operand, Tolerance
from jax_baracuda._examples.segment import (
    GATHERED_CHECKED,
    GATHERED_TIMED,
    IDS,
    NODE_IDS,
    OF_HEADS,
    SORTED_IDS,
    gather,
    gathered_sum,
    softmax,
)

# ----------------------------------------------------------------------------------------------------------------------
# Plain JAX. It relies on ids in range.


def dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    gather_ids: Array,
    segment_ids: Array,
    bias: Array | None = None,
    **options: Any,
) -> Array:
    queries, keys = gather(query, segment_ids, **options), gather(key, gather_ids)
    logits = (queries * keys).sum(-1) / math.sqrt(query.shape[2])
    return _attention(logits, bias, value, gather_ids, segment_ids, query.shape[0], **options)


def additive_attention(
    query: Array,
    key: Array,
    score_weights: Array,
    gather_ids: Array,
    segment_ids: Array,
    bias: Array | None = None,
    **options: Any,
) -> Array:
    queries, keys = gather(query, segment_ids, **options), gather(key, gather_ids)
    logits = (score_weights[None] * jax.nn.leaky_relu(queries + keys, 0.2)).sum(-1)
    return _attention(logits, bias, key, gather_ids, segment_ids, query.shape[0], **options)


def _attention(
    logits: Array,
    bias: Array | None,
    data: Array,
    gather_ids: Array,
    segment_ids: Array,
    num_segments: int,
    **options: Any,
) -> Array:
    if bias is not None:
        logits += bias
    probabilities = softmax(logits, segment_ids, num_segments, **options)
    return gathered_sum(data, gather_ids, segment_ids, num_segments, weights=probabilities, **options)


# ----------------------------------------------------------------------------------------------------------------------
# The table

# Values are rounded once. The gradients of logits subtract a mean that is computed from these rounded values. Their sum
# over a segment is 0, which the gradient of additive attention multiplies by one of two slopes: little is left of it.
DOT_PRODUCT: Tolerance = {"float32": (4e-6, 2e-5), "bfloat16": (4e-3, 2e-1), "float16": (5e-4, 3e-2)}
ADDITIVE: Tolerance = {"float32": (4e-6, 6e-5), "bfloat16": (4e-3, 6e-1), "float16": (5e-4, 8e-2)}
TIMED = {use: {**sizes, "feature": 8, "feature1": 16} for use, sizes in GATHERED_TIMED.items()}
QUERIES, ROWS = Operand(("segment", "feature", "feature1")), Operand(("node", "feature", "feature1"))


def examples(
    function: Callable[..., Array],
    plain_jax: Callable[..., Array],
    operands: Mapping[str, Operand],
    tolerance: Tolerance,
) -> Iterator[Example]:
    """The calls of one function; the first is timed."""
    operands = {"query": QUERIES, "key": ROWS, **operands, "gather_ids": NODE_IDS, "segment_ids": IDS}
    sorted_ids = {"indices_are_sorted": True}
    for variant, others, options, timed in (
        ("", {}, {}, TIMED),
        ("bias", {"bias": OF_HEADS}, {}, {}),
        ("sorted ids", {"segment_ids": SORTED_IDS}, sorted_ids, {}),
    ):
        sizes = {**GATHERED_CHECKED, **timed}
        yield Example(function, plain_jax, {**operands, **others}, sizes, variant, options, tolerance=tolerance)


WEIGHTS = Operand(("feature", "feature1"))
EXAMPLES = [
    *examples(jb.graph_dot_product_attention, dot_product_attention, {"value": ROWS}, DOT_PRODUCT),
    *examples(jb.graph_additive_attention, additive_attention, {"score_weights": WEIGHTS}, ADDITIVE),
]
