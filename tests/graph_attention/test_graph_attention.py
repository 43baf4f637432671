"""Attention over edges with logits from queries and keys: values and gradients against NumPy, and errors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from graph_attention.matrix import attention, of_additive_scores, of_dot_products
from segment.gather_reference import attention_in_segment
from support import cases

import jax_baracuda
from jax_baracuda import forward_mode, segment_plan
from jax_baracuda.ops.segment.edge_attention import MAX_HEAD_BYTES

KINDS = ("dot product", "additive")
each_kind = pytest.mark.parametrize("kind", KINDS)
NEGATIVE_SLOPE = 0.2

# ----------------------------------------------------------------------------------------------------------------------
# Arrays and the reference in NumPy.


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


@dataclasses.dataclass
class Case:
    """The arrays of a call."""

    kind: str
    arrays: dict[str, np.ndarray]
    gather_ids: np.ndarray
    segment_ids: np.ndarray

    @property
    def dtype(self) -> Any:
        return self.arrays["query"].dtype

    @property
    def num_segments(self) -> int:
        return len(self.arrays["query"])

    @property
    def num_rows(self) -> int:
        return len(self.arrays["key"])

    def call(self, form: str = "ids", **options: Any) -> Callable[..., jax.Array]:
        """``(arrays) -> result``"""
        function = public(self.kind)
        if form == "plan":
            plan = segment_plan(self.segment_ids, self.num_segments, self.gather_ids, self.num_rows)
            return lambda arrays: function(**arrays, plan=plan, **options)
        options |= {"sorted": {"indices_are_sorted": True}, "clip": {"mode": "clip"}}.get(form, {})
        ids = {"gather_ids": self.gather_ids, "segment_ids": self.segment_ids}
        return lambda arrays: function(**arrays, **ids, **options)


def public(kind: str) -> Callable[..., jax.Array]:
    return getattr(jax_baracuda, f"graph_{kind.replace(' ', '_')}_attention")


def make(rng: np.random.Generator, kind: str, sizes: Sizes, dtype: Any, bias: str = "head") -> Case:
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
    return Case(kind, arrays, gather_ids.astype(np.int32), segment_ids.astype(np.int32))


@dataclasses.dataclass
class Result:
    """An exact result, and what the errors of a kernel are relative to."""

    exact: np.ndarray
    of_arithmetic: np.ndarray
    """The sums of the magnitudes of the terms, to which rounding errors in the accumulator are relative."""
    of_output: np.ndarray
    """The effect of a relative error of 1 of the result, from whose rounded elements gradients are computed."""


def _zeros(shape: tuple[int, ...], dtype: Any) -> Result:
    return Result(*(np.zeros(shape, dtype) for _ in range(3)))


def reference(
    case: Case, d_output: np.ndarray, form: str, logits: np.ndarray | None = None
) -> tuple[Result, dict[str, Result]]:
    """The result and the gradients, in loops over segments.

    Args:
      logits: the exact logits ``[E, H]``, in place of those that follow from the arrays.
    """
    wide = cases.wider(case.dtype)
    arrays = {name: array.astype(wide) for name, array in case.arrays.items()}
    query, key, d_output = arrays["query"], arrays["key"], d_output.astype(wide)
    value = arrays.get("value", key)
    num_segments, num_rows = len(query), len(key)
    is_additive = case.kind == "additive"
    rows = np.where(case.gather_ids < 0, case.gather_ids + num_rows, case.gather_ids)
    has_gradient = (rows >= 0) & (rows < num_rows)
    rows = np.clip(rows, 0, max(num_rows - 1, 0))
    ids = cases.in_mode(case.segment_ids, num_segments, "clip" if form == "clip" else None)
    output = _zeros((num_segments, *value.shape[1:]), wide)
    gradients = {name: _zeros(array.shape, wide) for name, array in arrays.items()}

    def add(name: str, place: Any, terms: tuple[np.ndarray, ...]) -> None:
        for total, of_edges in zip(vars(gradients[name]).values(), terms, strict=True):
            np.add.at(total, place, of_edges)

    for segment in np.unique(ids[(ids >= 0) & (ids < num_segments)]):
        edges = np.flatnonzero(ids == segment)
        q, k, v, g = query[segment], key[rows[edges]], value[rows[edges]], d_output[segment]
        if is_additive:
            weights, x = arrays["score_weights"], q + k
            slope = np.where(x >= 0, 1, NEGATIVE_SLOPE).astype(wide)
            by_query = by_key = weights * slope
            of_edges = (weights * slope * x).sum(-1)
            size = (abs(weights) * (abs(q) + abs(k))).sum(-1)
        else:
            scale = 1 / np.sqrt(wide.type(max(query.shape[2], 1)))
            by_query, by_key = scale * k, scale * np.broadcast_to(q, k.shape)
            of_edges = scale * (q * k).sum(-1)
            size = scale * (abs(q) * abs(k)).sum(-1)
        if "bias" in arrays:
            bias = arrays["bias"][edges].reshape(len(edges), -1)
            of_edges, size = of_edges + bias, size + np.where(np.isfinite(bias), abs(bias), 0)
        if logits is not None:
            of_edges, size = logits[edges].astype(wide), np.zeros_like(size)
        of_segment, d_logits, to_value = attention_in_segment(of_edges, size, v, g)
        for total, terms in zip(vars(output).values(), of_segment, strict=True):
            total[segment] = terms
        add("query", segment, tuple((x[..., None] * y).sum(0) for x, y in _with_sizes(d_logits, by_query)))
        if "bias" in arrays:
            is_shared = arrays["bias"].ndim == 1
            add("bias", edges, tuple(x.sum(-1) if is_shared else x for x in d_logits))
        if is_additive:
            add("score_weights", ..., tuple((x[..., None] * y).sum(0) for x, y in _with_sizes(d_logits, slope * x)))
        to_key = tuple((d[..., None] * y)[has_gradient[edges]] for d, y in _with_sizes(d_logits, by_key))
        add("key", rows[edges][has_gradient[edges]], to_key)
        to_value = tuple(x[has_gradient[edges]] for x in to_value)
        add("key" if is_additive else "value", rows[edges][has_gradient[edges]], to_value)
    return output, gradients


def _with_sizes(of_logits: tuple[np.ndarray, ...], factor: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    return zip(of_logits, (factor, abs(factor), abs(factor)), strict=True)


def check(case: Case, actual: Any, gradients: dict[str, Any], expected: tuple[Result, dict[str, Result]]) -> None:
    """Every element is within the error of the arithmetic, and of rounded results where gradients use these."""
    terms = len(case.segment_ids) + case.arrays["query"].shape[2] + expected[0].exact.shape[2]
    arithmetic = (4 + 4 * math.sqrt(terms)) * cases.eps_of(case.dtype)
    rounding = float(jnp.finfo(case.dtype).eps)
    assert gradients.keys() == expected[1].keys()
    for name, array, of in (("output", actual, expected[0]), *((x, gradients[x], expected[1][x]) for x in gradients)):
        error = arithmetic * of.of_arithmetic + rounding * of.of_output
        if name == "bias" and np.ndim(array) == 1:  # the gradients of its heads are rounded and added up
            error = error + case.arrays["query"].shape[1] * rounding * of.of_arithmetic
        tiny = 4 * float(jnp.finfo(case.dtype).smallest_subnormal) * (np.dtype(case.dtype).itemsize == 2)
        cases.Expected(of.exact, case.dtype, error + tiny + float(jnp.finfo(jnp.float32).tiny)).check(array, name)


def with_gradients(call: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array, Any]]:
    """``(arrays, d_output) -> (result, gradients)``"""

    def run(arrays: Any, d_output: Any) -> tuple[jax.Array, Any]:
        output, vjp = jax.vjp(call, arrays)
        return output, *vjp(d_output)

    return jax.jit(run)


def d_output_of(rng: np.random.Generator, case: Case) -> np.ndarray:
    width = case.arrays.get("value", case.arrays["key"]).shape[2]
    return rng.normal(size=(*case.arrays["query"].shape[:2], width)).astype(case.dtype)


# ----------------------------------------------------------------------------------------------------------------------
# Values and gradients.

SIZES = (
    Sizes(1, 1, 1, 1, 1, 1),
    Sizes(6, 5, 40, 2, 4, 5),
    Sizes(41, 50, 900, 3, 5, 16),
    Sizes(300, 40, 700, 8, 16, 16),
    Sizes(7, 9, 160, 4, 64, 1),
    Sizes(3, 9, 200, 5, 128, 64),
    Sizes(4, 5, 60, 6, 200, 3),
    Sizes(9, 5, 60, 7, 3, 3),
    Sizes(4, 3, 0, 2, 4, 4),
    Sizes(0, 3, 9, 2, 4, 4),
    Sizes(3, 4, 9, 2, 0, 2),
)
"""Heads of one number up to more than a kernel takes; few and many edges of a segment; none of something."""
FORMS = ("ids", "sorted", "plan", "clip")


@each_kind
@cases.each_pair(dtype=cases.FLOATING, sizes=SIZES, form=FORMS)
def test_values_and_gradients(rng: np.random.Generator, kind: str, dtype: str, sizes: Sizes, form: str) -> None:
    """Values and all gradients are right, also with dropped edges, and equal from run to run."""
    if form == "clip" and sizes.segments == 0:
        form = "ids"  # there is no segment to clip to
    case = make(rng, kind, sizes, dtype, rng.choice(["", "edge", "head"]))
    if form == "sorted":
        case.segment_ids.sort()
    d_output = d_output_of(rng, case)
    with cases.x64_for(dtype):
        run = with_gradients(case.call(form))
        output, gradients = run(case.arrays, d_output)
        again = run(case.arrays, d_output)
    check(case, output, gradients, reference(case, d_output, form))
    head_bytes = max(x.shape[-1] * x.itemsize for name, x in case.arrays.items() if name in ("query", "key", "value"))
    if jax.default_backend() != "cpu" and head_bytes > MAX_HEAD_BYTES:
        return  # plain JAX serves these, which adds in varying order on GPUs
    for x, y in zip(jax.tree.leaves((output, gradients)), jax.tree.leaves(again), strict=True):
        cases.assert_same_bits(x, np.asarray(y))


@each_kind
@pytest.mark.parametrize("dtype", cases.FLOATING)
def test_padded_heads(rng: np.random.Generator, padded_heads: None, kind: str, dtype: str) -> None:
    """Values and gradients are right where programs pad heads, as on GPUs."""
    case = make(rng, kind, Sizes(41, 50, 900, 3, 5, 9), dtype)
    d_output = d_output_of(rng, case)
    with cases.x64_for(dtype):
        output, gradients = with_gradients(case.call())(case.arrays, d_output)
    check(case, output, gradients, reference(case, d_output, "ids"))


@pytest.mark.parametrize("option", [{"scale": -0.7}, {"negative_slope": -1.5}, {"negative_slope": 0.0}], ids=str)
def test_options(rng: np.random.Generator, option: dict[str, float]) -> None:
    """The scale and the slope are those of the call."""
    kind = "dot product" if "scale" in option else "additive"
    case = make(rng, kind, Sizes(6, 5, 40, 2, 4, 5), "float64", "")
    with jax.enable_x64(True):
        query, key, gather_ids, ids = case.arrays["query"], case.arrays["key"], case.gather_ids, case.segment_ids
        if kind == "additive":
            score = of_additive_scores(case.arrays["score_weights"], option["negative_slope"])
        else:
            score = of_dot_products(option["scale"])
        value = case.arrays.get("value", key)
        expected = attention(score, *map(jnp.asarray, (query, key, value, gather_ids, ids)))
        np.testing.assert_allclose(case.call(**option)(case.arrays), expected, rtol=1e-12, atol=1e-13)


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
SPECIAL_FORMS = ("ids", "plan", "xla")


def run_special(case: Case, form: str, d_output: np.ndarray) -> tuple[Any, Any]:
    options = {"implementation": "xla"} if form == "xla" else {}
    with cases.x64_for(case.dtype):
        return with_gradients(case.call(form, **options))(case.arrays, d_output)


@each_kind
@pytest.mark.parametrize("form", SPECIAL_FORMS)
@pytest.mark.parametrize("dtype", cases.FLOATING)
def test_masked_edges(rng: np.random.Generator, dtype: str, form: str, kind: str) -> None:
    """A bias of -inf leaves an edge out. A segment without other edges has a result and gradients of 0."""
    case = make(rng, kind, SPECIAL_SIZES, dtype)
    case.arrays["bias"][::7] = -np.inf
    case.arrays["bias"][case.segment_ids == 2, 1] = -np.inf
    d_output = d_output_of(rng, case)
    output, gradients = run_special(case, form, d_output)
    assert (np.asarray(output[2, 1]) == 0).all()
    assert (np.asarray(gradients["query"][2, 1]) == 0).all()
    assert (np.asarray(gradients["bias"])[np.isneginf(case.arrays["bias"].astype(np.float64))] == 0).all()
    check(case, output, gradients, reference(case, d_output, form))


@each_kind
@pytest.mark.parametrize("form", SPECIAL_FORMS)
@pytest.mark.parametrize("special", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", cases.FLOATING)
def test_logits_that_are_not_finite(rng: np.random.Generator, dtype: str, special: float, form: str, kind: str) -> None:
    """A logit of NaN or inf makes its segment and head NaN, and no other."""
    case = make(rng, kind, SPECIAL_SIZES, dtype)
    edge = np.flatnonzero(case.segment_ids == 3)[1]
    case.arrays["bias"][edge, 2] = special
    d_output = d_output_of(rng, case)
    output, gradients = run_special(case, form, d_output)
    expected = reference(case, d_output, form)
    is_nan = np.zeros(output.shape, bool)
    is_nan[3, 2] = True
    assert (np.isnan(np.asarray(output, np.float64)) == is_nan).all()
    check(case, output, gradients, expected)


@each_kind
@pytest.mark.parametrize("form", SPECIAL_FORMS)
@pytest.mark.parametrize("mask", [-1e9, 1e9])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equal_masks(rng: np.random.Generator, dtype: str, mask: float, form: str, kind: str) -> None:
    """Beside a large equal bias, logits of float32 are equal: probabilities are too, for values and gradients."""
    case = make(rng, kind, SPECIAL_SIZES, dtype)
    case.arrays["bias"][:] = mask
    d_output = d_output_of(rng, case)
    output, gradients = run_special(case, form, d_output)
    check(case, output, gradients, reference(case, d_output, form, logits=np.zeros_like(case.arrays["bias"])))


@each_kind
@pytest.mark.parametrize("form", SPECIAL_FORMS)
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_large_masks(rng: np.random.Generator, dtype: str, form: str, kind: str) -> None:
    """Masks of -1e4, which float16 holds, leave edges out. In a segment of such edges, they cancel."""
    case = make(rng, kind, SPECIAL_SIZES, dtype)
    case.arrays["bias"][:] = np.where(rng.random(60) < 0.3, -1e4, 0)[:, None]
    case.arrays["bias"][case.segment_ids == 1] = -1e4
    d_output = d_output_of(rng, case)
    output, gradients = run_special(case, form, d_output)
    check(case, output, gradients, reference(case, d_output, form))


@pytest.mark.parametrize("form", SPECIAL_FORMS)
def test_logits_near_the_end_of_the_range(rng: np.random.Generator, form: str) -> None:
    """Logits of 1e38 do not overflow: the edges with the largest one share the result."""
    case = make(rng, "dot product", Sizes(5, 6, 60, 3, 1, 8), "float32", "")
    case.arrays["query"] = np.full_like(case.arrays["query"], 1e19)
    case.arrays["key"] = (rng.choice([-1, 1], case.arrays["key"].shape) * 1e19).astype(np.float32)
    rows = np.where(case.gather_ids < 0, case.gather_ids + 6, case.gather_ids).clip(0, 5)
    signs = np.sign(case.arrays["key"][rows, :, 0])
    d_output = d_output_of(rng, case)
    output, gradients = run_special(case, form, d_output)
    expected, of_arrays = reference(case, d_output, form, logits=1e38 * signs)
    small = {name: of_arrays[name] for name in ("value",)}
    check(case, output, {"value": gradients["value"]}, (expected, small))


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
        ("TypeError: query must have a floating dtype, got int32", {"query": QUERY.astype(np.int32)}),
        (r"ValueError: query must have .* \[rows, heads, features\], got \(3, 4\)", {"query": QUERY[0]}),
        (r"ValueError: key must have .* \[rows, heads, features\], got \(3, 4\)", {"key": KEY[0]}),
        ("TypeError: key must have the dtype of query, got float16 and float32", {"key": KEY.astype(np.float16)}),
        (r"ValueError: key must be \[N, H, D\] .* \(6, 2, 4\) and .* \(2, 3, 4\)", {"key": KEY[:, :2]}),
        (
            r"ValueError: key must be \[N, H, D\] .* \(6, 3, 3\) and .* \(2, 3, 4\)",
            {"key": KEY[:, :, :3], "value": VALUE},
        ),
        ("TypeError: gather_ids must be given, or a plan", {"gather_ids": None}),
        ("TypeError: segment_ids must be given, or a plan", {"segment_ids": None}),
        ("ValueError: belong to the plan; pass none of them, got gather_ids", {"plan": segment_plan(**PLAN)}),
        (
            r"ValueError: the plan is for 3 segments, got query.shape = \(2, 3, 4\)",
            {"plan": segment_plan(**{**PLAN, "num_segments": 3}), "gather_ids": None, "segment_ids": None},
        ),
        (
            r"ValueError: the plan is for 7 rows, got key.shape = \(6, 3, 4\)",
            {"plan": segment_plan(**{**PLAN, "num_rows": 7}), "gather_ids": None, "segment_ids": None},
        ),
        ("TypeError: plan must be a SegmentPlan, got dict", {"plan": {}, "gather_ids": None, "segment_ids": None}),
        ("TypeError: .* bool", {"gather_ids": IDS.astype(bool)}),
        ("ValueError: .* must .*", {"gather_ids": IDS[:3]}),
        ("ValueError: mode must be .*", {"mode": "wrap"}),
        (
            r"ValueError: key must have rows for 5 edges to gather, got shape \(0, 3, 4\)",
            {"key": KEY[:0], "value": VALUE[:0]},
        ),
        ("TypeError: bias must have a floating dtype, got int32", {"bias": IDS}),
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
        ("TypeError: value must have a floating dtype, got int32", {"value": VALUE.astype(np.int32)}),
        ("TypeError: value must have the dtype of query, got float16 and float32", {"value": VALUE.astype(np.float16)}),
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
        ("TypeError: score_weights must have a floating dtype, got int32", {"score_weights": IDS}),
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
