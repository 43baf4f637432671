"""Attention over edges, with given logits or logits from queries and keys: values, gradients and errors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from graph_attention.reference import EdgeAttention, check, public, reference
from support import cases

import jax_baracuda
from jax_baracuda import forward_mode, segment_attention, segment_plan
from jax_baracuda.ops.segment.edge_attention import MAX_HEAD_BYTES

KINDS = ("dot product", "additive")
"""With logits from queries and keys."""
each_kind = pytest.mark.parametrize("kind", KINDS)


@dataclasses.dataclass(frozen=True)
class Sizes:
    segments: int
    rows: int
    edges: int
    heads: int
    features: int
    width: int
    """The features of values, for dot products."""

    def __str__(self) -> str:
        return "-".join(map(str, dataclasses.astuple(self)))


def make(rng: np.random.Generator, kind: str, sizes: Sizes, dtype: Any, bias: str = "head") -> EdgeAttention:
    """Random arrays. Row 0 is a hub of every second edge. Some ids are out of range."""
    heads, edges = sizes.heads, sizes.edges
    shapes = {"query": (sizes.segments, heads, sizes.features), "key": (sizes.rows, heads, sizes.features)}
    if kind == "additive":
        shapes["score_weights"] = heads, sizes.features
    else:
        shapes["value"] = sizes.rows, heads, sizes.width
    if bias:
        shapes["bias"] = (edges, heads) if bias == "head" else (edges,)
    arrays = {name: rng.normal(size=shape).astype(jnp.dtype(dtype)) for name, shape in shapes.items()}
    gather_ids = rng.integers(-sizes.rows - 2, sizes.rows + 2, edges)
    gather_ids = np.where(rng.random(edges) < 0.5, 0, gather_ids)
    segment_ids = rng.integers(-1, sizes.segments + 1, edges)
    return EdgeAttention(kind, arrays, gather_ids.astype(np.int32), segment_ids.astype(np.int32), sizes.segments)


def make_logits(rng: np.random.Generator, sizes: Any, dtype: str, logits_dtype: str | None = None) -> EdgeAttention:
    """Random logits and data, with ids out of range."""
    nodes, edges, segments, heads, features = sizes
    logits = (3 * rng.normal(size=(edges, *heads))).astype(jnp.dtype(logits_dtype or dtype))
    data = rng.normal(size=(nodes, *heads, *features)).astype(jnp.dtype(dtype))
    gather_ids, ids = rng.integers(-nodes - 2, nodes + 2, edges), rng.integers(-1, segments + 1, edges)
    return EdgeAttention("given logits", {"logits": logits, "data": data}, gather_ids, ids, segments)


# ----------------------------------------------------------------------------------------------------------------------
# Values and gradients.

SIZES = (
    Sizes(1, 1, 1, 1, 1, 1),
    Sizes(6, 5, 40, 2, 4, 5),
    Sizes(41, 50, 900, 3, 5, 16),
    Sizes(300, 40, 700, 8, 16, 16),
    Sizes(12, 30, 900, 2, 16, 16),
    Sizes(7, 9, 160, 4, 64, 1),
    Sizes(3, 9, 200, 5, 128, 64),
    Sizes(4, 5, 60, 6, 200, 3),
    Sizes(9, 5, 60, 7, 3, 3),
    Sizes(4, 3, 0, 2, 4, 4),
    Sizes(0, 3, 9, 2, 4, 4),
    Sizes(3, 4, 9, 2, 0, 2),
)
"""Heads of one number up to more than a kernel takes; few and many edges of a segment; none of something."""
# (nodes, edges, segments, heads, features)
SIZES_WITH_LOGITS = (
    (1, 1, 1, (), ()),
    (5, 0, 4, (2,), (3,)),
    (50, 900, 41, (), (7,)),
    (50, 900, 41, (4,), (8,)),
    (30, 900, 12, (2,), (16,)),
    (30, 4000, 6, (2, 3), (5,)),
    (2000, 9000, 12_000, (8,), (16,)),
    (40, 800, 30, (65,), ()),
    (40, 300, 30, (), (2, 150)),
    (30, 300, 20, (3,), (130,)),
    (6, 50, 0, (2,), (4,)),
    (9, 40, 5, (0,), (4,)),
    (9, 40, 5, (2,), (0,)),
)
CALLS = [
    *((kind, sizes) for kind in KINDS for sizes in SIZES),
    *(("given logits", sizes) for sizes in SIZES_WITH_LOGITS),
]
FORMS = ("ids", "sorted", "plan", "clip", "xla")


@cases.each_pair(call=CALLS, form=FORMS, dtype=cases.FLOATING)
def test_values_and_gradients(rng: np.random.Generator, call: tuple[str, Any], dtype: str, form: str) -> None:
    """Values and all gradients are right, also with dropped edges. Two runs of a kernel give the same bits."""
    kind, sizes = call
    if kind == "given logits":
        attention = make_logits(rng, sizes, dtype)
    else:
        attention = make(rng, kind, sizes, dtype, rng.choice(["", "edge", "head"]))
    if form == "clip" and attention.num_segments == 0:
        form = "ids"  # there is no segment to clip to
    if form == "sorted":
        attention.segment_ids.sort()
    d_output = attention.d_output(rng)
    results = attention.check(form, d_output)
    arrays = (x for name, x in attention.arrays.items() if name in ("query", "key", "value"))
    is_wide = max((x.shape[-1] * x.itemsize for x in arrays), default=0) > MAX_HEAD_BYTES
    if form == "xla" or (cases.PLATFORM != "cpu" and is_wide):
        return  # plain JAX adds in varying order on GPUs
    for x, y in zip(jax.tree.leaves(results), jax.tree.leaves(attention.run(form, d_output)), strict=True):
        cases.assert_same_bits(x, np.asarray(y))


@pytest.mark.parametrize("form", ["ids", "plan"])
@pytest.mark.parametrize("kind", [*KINDS, "given logits"])
def test_hub_of_a_million_edges(rng: np.random.Generator, kind: str, form: str) -> None:
    """Values and gradients of a segment with a million edges, whose softmax is merged from many parts."""
    edges, dtype = 1_000_003, rng.choice(cases.FLOATING)
    if kind == "given logits":
        attention = make_logits(rng, (50, edges, 4, (2,), (3,)), dtype)
    else:
        attention = make(rng, kind, Sizes(4, 50, edges, 2, 4, 3), dtype)
    attention.segment_ids[rng.random(edges) < 0.999] = 1
    attention.check(form, attention.d_output(rng))


@pytest.mark.parametrize("form", ["ids", "plan"])
@pytest.mark.parametrize("dtype", cases.FLOATING)
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        *((kind, Sizes(41, 50, 900, 3, 5, 9)) for kind in KINDS),
        *(("given logits", x) for x in SIZES_WITH_LOGITS if x[3:] not in (((8,), (16,)), ((4,), (8,)))),
    ],
    ids=str,
)
def test_padded_heads(
    rng: np.random.Generator, padded_heads: None, kind: str, sizes: Any, dtype: str, form: str
) -> None:
    """Values and gradients are right where programs pad narrow heads and split wide ones, as on GPUs."""
    attention = make_logits(rng, sizes, dtype) if kind == "given logits" else make(rng, kind, sizes, dtype)
    attention.check(form, attention.d_output(rng))


def test_equals_dense_attention(rng: np.random.Generator) -> None:
    """The result is that of jax.nn.dot_product_attention with a mask that holds the edges."""
    is_edge = rng.random((12, 15)) < 0.4
    is_edge[:, 0] = True  # without any edge, jax.nn divides by 0
    receivers, senders = np.nonzero(is_edge)
    query, key, value = (rng.normal(size=(n, 3, 8)).astype(np.float32) for n in (12, 15, 15))
    bias = rng.normal(size=(3, 12, 15)).astype(np.float32)
    with jax.default_matmul_precision("highest"):  # GPUs would round products to TF32
        dense = jax.nn.dot_product_attention(query[None], key[None], value[None], bias[None], is_edge[None, None])
    of_edges = bias[:, receivers, senders].T
    output = jax_baracuda.graph_dot_product_attention(query, key, value, senders, receivers, bias=of_edges)
    np.testing.assert_allclose(output, dense[0], rtol=2e-5, atol=2e-6)


# ----------------------------------------------------------------------------------------------------------------------
# Special logits.


SPECIAL_SIZES = Sizes(5, 6, 60, 3, 8, 8)
each_special_form = pytest.mark.parametrize("form", ["ids", "plan", "xla"])
each_way_to_mask = pytest.mark.parametrize("kind", [*KINDS, "given logits"])


def make_special(rng: np.random.Generator, kind: str, dtype: Any) -> EdgeAttention:
    if kind == "given logits":
        return make_logits(rng, (6, 60, 5, (3,), (8,)), dtype)
    return make(rng, kind, SPECIAL_SIZES, dtype)


@each_way_to_mask
@each_special_form
@pytest.mark.parametrize("dtype", cases.FLOATING)
def test_masked_edges(rng: np.random.Generator, dtype: str, form: str, kind: str) -> None:
    """A bias or a logit of -inf leaves an edge out. A segment without other edges has a result and gradients of 0."""
    attention = make_special(rng, kind, dtype)
    attention.masks[::7] = -np.inf
    attention.masks[attention.segment_ids == 2, 1] = -np.inf
    output, gradients = attention.check(form, attention.d_output(rng))
    assert (np.asarray(output[2, 1]) == 0).all()
    if "query" in gradients:
        assert (np.asarray(gradients["query"][2, 1]) == 0).all()
    of_masks = gradients["logits" if attention.takes_logits else "bias"]
    assert (np.asarray(of_masks)[np.isneginf(attention.masks.astype(np.float64))] == 0).all()


@each_way_to_mask
@each_special_form
@pytest.mark.parametrize("special", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", cases.FLOATING)
def test_logits_that_are_not_finite(rng: np.random.Generator, dtype: str, special: float, form: str, kind: str) -> None:
    """A logit of NaN or inf makes its segment and head NaN, and no other."""
    attention = make_special(rng, kind, dtype)
    attention.masks[np.flatnonzero(attention.segment_ids == 3)[1], 2] = special
    output, _ = attention.check(form, attention.d_output(rng))
    is_nan = np.zeros(output.shape, bool)
    is_nan[3, 2] = True
    assert (np.isnan(np.asarray(output, np.float64)) == is_nan).all()


@each_kind
@each_special_form
@pytest.mark.parametrize("mask", [-1e9, 1e9])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equal_masks(rng: np.random.Generator, dtype: str, mask: float, form: str, kind: str) -> None:
    """Beside a large equal bias, logits of float32 are equal: probabilities are too, for values and gradients."""
    attention = make(rng, kind, SPECIAL_SIZES, dtype)
    attention.masks[:] = mask
    attention.check(form, attention.d_output(rng), logits=np.zeros_like(attention.masks))


@each_kind
@each_special_form
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_large_masks(rng: np.random.Generator, dtype: str, form: str, kind: str) -> None:
    """Masks of -1e4, which float16 holds, leave edges out. In a segment of such edges, they cancel."""
    attention = make(rng, kind, SPECIAL_SIZES, dtype)
    attention.masks[:] = np.where(rng.random(60) < 0.3, -1e4, 0)[:, None]
    attention.masks[attention.segment_ids == 1] = -1e4
    attention.check(form, attention.d_output(rng))


@each_special_form
def test_logits_near_the_end_of_the_range(rng: np.random.Generator, form: str) -> None:
    """Logits of 1e38 do not overflow: the edges with the largest one share the result."""
    attention = make(rng, "dot product", Sizes(5, 6, 60, 3, 1, 8), "float32", "")
    attention.arrays["query"] = np.full_like(attention.arrays["query"], 1e19)
    attention.arrays["key"] = (rng.choice([-1, 1], attention.arrays["key"].shape) * 1e19).astype(np.float32)
    rows = np.where(attention.gather_ids < 0, attention.gather_ids + 6, attention.gather_ids).clip(0, 5)
    signs = np.sign(attention.arrays["key"][rows, :, 0])
    d_output = attention.d_output(rng)
    output, gradients = attention.run(form, d_output)
    expected, of_arrays = reference(attention, d_output, form, logits=1e38 * signs)
    check(attention, output, {"value": gradients["value"]}, (expected, {"value": of_arrays["value"]}))


@each_special_form
@pytest.mark.parametrize(
    ("logits_dtype", "dtype"), [("float32", "float16"), ("float32", "bfloat16"), ("float16", "float32")]
)
def test_dtypes_of_logits(rng: np.random.Generator, logits_dtype: str, dtype: str, form: str) -> None:
    """Logits keep their precision beside data of less, and masks of -1e9 stay finite beside float16."""
    attention = make_logits(rng, (50, 900, 41, (4,), (8,)), dtype, logits_dtype)
    if logits_dtype == "float32":
        attention.masks[::5] -= 1e9
    attention.check(form, attention.d_output(rng))


def test_equal_logits(rng: np.random.Generator) -> None:
    """A segment whose float32 logits are all -1e9 has the mean of its float16 rows."""
    data = rng.normal(size=(4, 2, 8)).astype(np.float16)
    output = segment_attention(np.full((4, 2), -1e9, np.float32), data, np.arange(4), np.zeros(4, np.int32), 1)
    np.testing.assert_allclose(output[0], data.astype(np.float64).mean(0), rtol=1e-3, atol=1e-3)


@each_special_form
def test_rows_out_of_range(rng: np.random.Generator, form: str) -> None:
    """Edges whose gather ids are out of range read the nearest row, and only their logits have gradients."""
    attention = make_logits(rng, (3, 500, 4, (2,), (4,)), "float32")
    attention.gather_ids = rng.choice([-100, 100], 500)
    _, gradients = attention.check(form, attention.d_output(rng))
    assert np.any(np.asarray(gradients["logits"]) != 0) and not np.any(gradients["data"])


@pytest.mark.parametrize("dropped", [-1, 3])
def test_dropped_edges_beside_empty_segments(rng: np.random.Generator, dropped: int) -> None:
    """Second derivatives stay finite if the segment that is nearest to the id of a dropped edge has no edges."""
    query, key = (rng.normal(size=(n, 2, 4)).astype(np.float32) for n in (3, 4))
    gather_ids, segment_ids = np.array([0, 1, 2]), np.array([dropped, 1, 1])

    def slope(weights: jax.Array) -> jax.Array:
        def loss(weights: jax.Array) -> jax.Array:
            return (forward_mode.graph_additive_attention(query, key, weights, gather_ids, segment_ids) ** 2).sum()

        return jax.jvp(loss, (weights,), (jnp.ones_like(weights),))[1]

    gradient = jax.grad(slope)(jnp.asarray(rng.normal(size=(2, 4)), jnp.float32))
    assert np.isfinite(gradient).all() and np.any(gradient != 0)


# ----------------------------------------------------------------------------------------------------------------------
# Errors.

IDS = np.zeros(5, np.int32)
QUERY, KEY, VALUE, WEIGHTS = (np.ones(shape, np.float32) for shape in ((2, 3, 4), (6, 3, 4), (6, 3, 7), (3, 4)))
PLAN: dict[str, Any] = {"segment_ids": IDS, "num_segments": 2, "gather_ids": IDS, "num_rows": 6}


@each_kind
@pytest.mark.parametrize(
    ("error", "changed"),
    [
        ("TypeError: query must be an array, got list", {"query": [1.0]}),
        ("TypeError: query must have a real floating dtype, got int32", {"query": QUERY.astype(np.int32)}),
        (r"ValueError: query must have .* \[rows, heads, features\], got \(3, 4\)", {"query": QUERY[0]}),
        (r"ValueError: key must have .* \[rows, heads, features\], got \(3, 4\)", {"key": KEY[0]}),
        ("TypeError: key must have the dtype of query, float32, got float16", {"key": KEY.astype(np.float16)}),
        (r"ValueError: key must be \[N, H, D\] .* \(6, 2, 4\) and .* \(2, 3, 4\)", {"key": KEY[:, :2]}),
        (
            r"ValueError: key must be \[N, H, D\] .* \(6, 3, 3\) and .* \(2, 3, 4\)",
            {"key": KEY[:, :, :3], "value": VALUE},
        ),
        ("TypeError: segment_ids must be given, or a plan", {"segment_ids": None}),
        (
            r"ValueError: the plan is for 3 segments, got query.shape = \(2, 3, 4\)",
            {"plan": segment_plan(**{**PLAN, "num_segments": 3}), "gather_ids": None, "segment_ids": None},
        ),
        (
            r"ValueError: the plan is for 7 rows, got key.shape = \(6, 3, 4\)",
            {"plan": segment_plan(**{**PLAN, "num_rows": 7}), "gather_ids": None, "segment_ids": None},
        ),
        ("TypeError: .* bool", {"gather_ids": IDS.astype(bool)}),
        ("ValueError: .* must .*", {"gather_ids": IDS[:3]}),
        ("ValueError: mode must be .*", {"mode": "wrap"}),
        (
            r"ValueError: key must have rows for 5 edges to gather, got shape \(0, 3, 4\)",
            {"key": KEY[:0], "value": VALUE[:0]},
        ),
        ("TypeError: bias must have a real floating dtype, got int32", {"bias": IDS}),
        (r"ValueError: bias must be \[E\] or \[E, H\], .* \(5,\) or \(5, 3\), got \(4,\)", {"bias": WEIGHTS[0]}),
        (r"ValueError: bias must be \[E\] or \[E, H\], .* got \(5, 1\)", {"bias": np.ones((5, 1))}),
    ],
)
def test_errors(kind: str, error: str, changed: dict[str, Any]) -> None:
    """Each error names the argument, what came and what is allowed."""
    arguments = {"query": QUERY, "key": KEY, "gather_ids": IDS, "segment_ids": IDS}
    arguments |= {"score_weights": WEIGHTS} if kind == "additive" else {"value": VALUE}
    changed = {name: x for name, x in changed.items() if name in arguments or name not in ("value", "score_weights")}
    with cases.raises(error, f"{public(kind).__name__}: .*"):
        public(kind)(**{**arguments, **changed})


@pytest.mark.parametrize(
    ("error", "changed"),
    [
        ("TypeError: value must have a real floating dtype, got int32", {"value": VALUE.astype(np.int32)}),
        ("TypeError: value must have the dtype of query, float32, got float16", {"value": VALUE.astype(np.float16)}),
        (r"ValueError: value must have .* \[rows, heads, features\], got \(3, 7\)", {"value": VALUE[0]}),
        (r"ValueError: value must be \[N, H, Dv\] .* \(5, 3, 7\) and key.shape = \(6, 3, 4\)", {"value": VALUE[:5]}),
        ("TypeError: scale must be .*", {"scale": "1"}),
        (r"ValueError: scale must be finite in float32, got 1e\+39", {"scale": 1e39}),
    ],
)
def test_errors_of_dot_products(error: str, changed: dict[str, Any]) -> None:
    arguments = {"query": QUERY, "key": KEY, "value": VALUE, "gather_ids": IDS, "segment_ids": IDS}
    with cases.raises(error, "graph_dot_product_attention: .*"):
        jax_baracuda.graph_dot_product_attention(**{**arguments, **changed})


@pytest.mark.parametrize(
    ("error", "changed"),
    [
        ("TypeError: score_weights must have a real floating dtype, got int32", {"score_weights": IDS}),
        (r"ValueError: score_weights must be \[H, D\] .* \(4,\) and query.shape = .*", {"score_weights": WEIGHTS[0]}),
        ("TypeError: negative_slope must be .*", {"negative_slope": None}),
        (r"ValueError: negative_slope must be finite in float32, got -1e\+39", {"negative_slope": -1e39}),
    ],
)
def test_errors_of_additive_attention(error: str, changed: dict[str, Any]) -> None:
    arguments = {"query": QUERY, "key": KEY, "score_weights": WEIGHTS, "gather_ids": IDS, "segment_ids": IDS}
    with cases.raises(error, "graph_additive_attention: .*"):
        jax_baracuda.graph_additive_attention(**{**arguments, **changed})


def test_scale_of_a_symbolic_number_of_features() -> None:
    """A program for any number of features must say how it scales products."""
    [width] = jax.export.symbolic_shape("width")
    query, key = (jax.ShapeDtypeStruct((n, 3, width), np.float32) for n in (2, 6))

    def export(**options: Any) -> Any:
        function = jax_baracuda.graph_dot_product_attention
        call = jax.jit(lambda query, key: function(query, key, key, IDS, IDS, **options))
        return jax.export.export(call)(query, key)

    with cases.raises("ValueError: scale must be given for a symbolic number of features", ".*"):
        export()
    export(scale=0.5)


@each_kind
def test_error_of_a_missing_kernel(kind: str) -> None:
    """The error names the public function."""
    query, key, weights = (np.ones(shape, np.float32) for shape in ((2, 3, 200), (6, 3, 200), (3, 200)))
    third = weights if kind == "additive" else key
    with cases.raises("ValueError: implementation='kernel' is asked for, .* 512 bytes", f"{public(kind).__name__}: "):
        jax.jit(lambda: public(kind)(query, key, third, IDS, IDS, implementation="kernel"))()


DATA, LOGITS = np.ones((4, 2, 3), np.float32), np.ones((5, 2), np.float32)


@pytest.mark.parametrize(
    ("error", "call"),
    [
        ("TypeError: logits must be an array, got list", lambda: segment_attention([1.0], DATA, IDS, IDS, 2)),
        ("TypeError: logits must be .* floating", lambda: segment_attention(IDS, DATA, IDS, IDS, 2)),
        ("TypeError: data must be .* floating", lambda: segment_attention(LOGITS, IDS, IDS, IDS, 2)),
        (r"ValueError: logits must be \[E\]", lambda: segment_attention(LOGITS[:3], DATA, IDS, IDS, 2)),
        (r"ValueError: logits must be \[E\]", lambda: segment_attention(np.ones((5, 3)), DATA, IDS, IDS, 2)),
        ("TypeError: num_segments must be given, or a plan", lambda: segment_attention(LOGITS, DATA, IDS, IDS)),
    ],
)
def test_errors_of_given_logits(error: str, call: Callable[[], Any]) -> None:
    with cases.raises(error, "segment_attention: .*"):
        call()
