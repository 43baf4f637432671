"""segment_attention: values and gradients against float64 NumPy, and errors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from segment.gather_reference import attention_in_segment
from support import cases

from jax_baracuda import segment_attention, segment_plan

# (nodes, edges, segments, heads, row_shape)
SIZES = (
    (1, 1, 1, (), ()),
    (5, 0, 4, (2,), (3,)),
    (50, 900, 41, (), (7,)),
    (50, 900, 41, (4,), (8,)),
    (30, 4000, 6, (2, 3), (5,)),
    (2000, 9000, 12_000, (8,), (16,)),
    (40, 800, 30, (65,), ()),
    (40, 300, 30, (), (2, 150)),
    (30, 300, 20, (3,), (130,)),
    (6, 50, 0, (2,), (4,)),
    (9, 40, 5, (0,), (4,)),
    (9, 40, 5, (2,), (0,)),
)
"""Heads of one feature up to more than a kernel takes; few and many edges of a segment; none of something."""


@dataclasses.dataclass
class Case:
    """The arrays of a call."""

    logits: np.ndarray
    data: np.ndarray
    gather_ids: np.ndarray
    ids: np.ndarray
    num_segments: int

    def call(self, form: str = "ids", **options: Any) -> Callable[..., jax.Array]:
        """``(logits, data) -> result``"""
        if form == "plan":
            plan = segment_plan(self.ids, self.num_segments, self.gather_ids, len(self.data))
            return lambda logits, data: segment_attention(logits, data, plan=plan, **options)
        options |= {"sorted": {"indices_are_sorted": True}, "xla": {"implementation": "xla"}}.get(form, {})
        edges = self.gather_ids, self.ids, self.num_segments
        return lambda logits, data: segment_attention(logits, data, *edges, **options)

    def values_and_gradients(self, form: str, d_output: np.ndarray) -> tuple[Any, ...]:
        def run(logits: Any, data: Any, d_output: Any) -> Any:
            output, vjp = jax.vjp(self.call(form), logits, data)
            return output, *vjp(d_output)

        with cases.x64_for("float64" if "float64" in (self.logits.dtype, self.data.dtype) else "float32"):
            return jax.jit(run)(self.logits, self.data, d_output)

    def expected(self, d_output: np.ndarray) -> tuple[cases.Expected, ...]:
        """The result and the gradients in a loop over segments, with the errors of the kernels' arithmetic."""
        dtype = self.data.dtype
        wide, heads = cases.wider(dtype), self.logits.shape[1:]
        logits, data, d_output = (x.astype(wide) for x in (self.logits, self.data, d_output))
        by_heads = (-1, *heads, math.prod(data.shape[1 + len(heads) :]))
        data, d_output = data.reshape(len(data), *by_heads[1:]), d_output.reshape(len(d_output), *by_heads[1:])
        rows = np.where(self.gather_ids < 0, self.gather_ids + len(data), self.gather_ids)
        has_gradient = (rows >= 0) & (rows < len(data))
        rows = np.clip(rows, 0, len(data) - 1)
        output, d_data, d_logits = (np.zeros((3, *shape), wide) for shape in (d_output.shape, data.shape, logits.shape))
        for segment in np.unique(self.ids[(self.ids >= 0) & (self.ids < self.num_segments)]):
            edges = np.flatnonzero(self.ids == segment)
            of_edges, chosen = logits[edges], has_gradient[edges]
            sizes = np.where(np.isfinite(of_edges), abs(of_edges), 0)
            results = attention_in_segment(of_edges, sizes, data[rows[edges]], d_output[segment])
            output[:, segment], d_logits[:, edges] = results[:2]
            for total, terms in zip(d_data, results[2], strict=True):
                np.add.at(total, rows[edges][chosen], terms[chosen])
        terms = len(self.ids) + math.prod(self.data.shape[1:])
        arithmetic, rounding = (4 + 4 * math.sqrt(terms)) * cases.eps_of(dtype), float(jnp.finfo(dtype).eps)
        tiny = 4 * float(jnp.finfo(dtype).smallest_subnormal) * (dtype.itemsize == 2) + float(np.finfo(np.float32).tiny)
        results = []
        for (exact, of_sums, of_output), shape, own_dtype in (
            (output, (self.num_segments, *self.data.shape[1:]), dtype),
            (d_logits, self.logits.shape, self.logits.dtype),
            (d_data, self.data.shape, dtype),
        ):
            error = arithmetic * of_sums + rounding * of_output + tiny
            # Logits may have another dtype than the arithmetic, to which their gradient is rounded.
            error = error + abs(exact) * float(jnp.finfo(own_dtype).eps)
            results.append(cases.Expected(exact.reshape(shape), own_dtype, error.reshape(shape)))
        return tuple(results)

    def check(self, form: str, d_output: np.ndarray) -> tuple[Any, ...]:
        results = self.values_and_gradients(form, d_output)
        for name, actual, expected in zip(
            ("output", "d_logits", "d_data"), results, self.expected(d_output), strict=True
        ):
            expected.check(actual, name)
        return results


def make(rng: np.random.Generator, sizes: Any, dtype: str, logits_dtype: str | None = None) -> tuple[Case, np.ndarray]:
    """Random arrays, with ids out of range, and a cotangent."""
    nodes, edges, segments, heads, features = sizes
    logits = (3 * rng.normal(size=(edges, *heads))).astype(jnp.dtype(logits_dtype or dtype))
    data = rng.normal(size=(nodes, *heads, *features)).astype(jnp.dtype(dtype))
    gather_ids, ids = rng.integers(-nodes - 2, nodes + 2, edges), rng.integers(-1, segments + 1, edges)
    d_output = rng.normal(size=(segments, *data.shape[1:])).astype(data.dtype)
    return Case(logits, data, gather_ids, ids, segments), d_output


@cases.each_pair(dtype=cases.FLOATING, sizes=SIZES, form=("ids", "sorted", "plan", "xla"))
def test_values_and_gradients(rng: np.random.Generator, dtype: str, sizes: Any, form: str) -> None:
    """Values and gradients are right, also with ids out of range. Two runs of a kernel give the same bits."""
    case, d_output = make(rng, sizes, dtype)
    if form == "sorted":
        case.ids.sort()
    results = case.check(form, d_output)
    if form != "xla":
        again = case.values_and_gradients(form, d_output)
        for x, y in zip(results, again, strict=True):
            cases.assert_same_bits(x, np.asarray(y))


@pytest.mark.parametrize("form", ["ids", "plan"])
@pytest.mark.parametrize("dtype", cases.FLOATING)
@pytest.mark.parametrize("sizes", [x for x in SIZES if x[3:] not in (((8,), (16,)), ((4,), (8,)))], ids=str)
def test_fitting_heads(rng: np.random.Generator, padded_heads: None, sizes: Any, dtype: str, form: str) -> None:
    """Values and gradients are right where programs pad narrow heads and split wide ones, as on GPUs."""
    case, d_output = make(rng, sizes, dtype)
    case.check(form, d_output)


@pytest.mark.parametrize("form", ["ids", "plan", "xla"])
@pytest.mark.parametrize(
    ("logits_dtype", "dtype"), [("float32", "float16"), ("float32", "bfloat16"), ("float16", "float32")]
)
def test_dtypes_of_logits(rng: np.random.Generator, logits_dtype: str, dtype: str, form: str) -> None:
    """Logits keep their precision beside data of less, and masks of -1e9 stay finite beside float16."""
    case, d_output = make(rng, (50, 900, 41, (4,), (8,)), dtype, logits_dtype)
    if logits_dtype == "float32":
        case.logits[::5] -= 1e9
    case.check(form, d_output)


def test_equal_masks(rng: np.random.Generator) -> None:
    """A segment whose float32 logits are all -1e9 has the mean of its float16 rows."""
    data = rng.normal(size=(4, 2, 8)).astype(np.float16)
    output = segment_attention(np.full((4, 2), -1e9, np.float32), data, np.arange(4), np.zeros(4, np.int32), 1)
    np.testing.assert_allclose(output[0], data.astype(np.float64).mean(0), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("form", ["ids", "plan", "xla"])
@pytest.mark.parametrize("dtype", cases.FLOATING)
def test_masked_edges(rng: np.random.Generator, dtype: str, form: str) -> None:
    """A logit of -inf leaves an edge out. A segment without other edges has a result and gradients of 0."""
    case, d_output = make(rng, (6, 60, 5, (3,), (8,)), dtype)
    case.logits[::7] = -np.inf
    case.logits[case.ids == 2, 1] = -np.inf
    output, d_logits, _ = case.check(form, d_output)
    assert (np.asarray(output[2, 1]) == 0).all()
    assert (np.asarray(d_logits)[np.isneginf(case.logits.astype(np.float64))] == 0).all()


@pytest.mark.parametrize("form", ["ids", "plan", "xla"])
@pytest.mark.parametrize("special", [np.nan, np.inf])
def test_logits_that_are_not_finite(rng: np.random.Generator, special: float, form: str) -> None:
    """A logit of NaN or inf makes its segment and head NaN, and no other."""
    case, d_output = make(rng, (6, 60, 5, (3,), (8,)), "float32")
    case.logits[np.flatnonzero(case.ids == 3)[1], 2] = special
    output, *_ = case.check(form, d_output)
    is_nan = np.zeros(output.shape, bool)
    is_nan[3, 2] = True
    assert (np.isnan(np.asarray(output)) == is_nan).all()


@pytest.mark.parametrize("form", ["ids", "plan", "xla"])
def test_rows_out_of_range(rng: np.random.Generator, form: str) -> None:
    """Edges whose gather ids are out of range read the nearest row, and only their logits have gradients."""
    case, d_output = make(rng, (3, 500, 4, (2,), (4,)), "float32")
    case.gather_ids = rng.choice([-100, 100], 500)
    _, d_logits, d_data = case.check(form, d_output)
    assert np.any(np.asarray(d_logits) != 0) and not np.any(d_data)


DATA, LOGITS, IDS = np.ones((4, 2, 3), np.float32), np.ones((5, 2), np.float32), np.zeros(5, np.int32)


@pytest.mark.parametrize(
    ("error", "call"),
    [
        ("TypeError: logits must be an array, got list", lambda: segment_attention([1.0], DATA, IDS, IDS, 2)),
        ("TypeError: logits must be .* floating", lambda: segment_attention(IDS, DATA, IDS, IDS, 2)),
        ("TypeError: data must be .* floating", lambda: segment_attention(LOGITS, IDS, IDS, IDS, 2)),
        (r"ValueError: logits must be \[E\]", lambda: segment_attention(LOGITS[:3], DATA, IDS, IDS, 2)),
        (r"ValueError: logits must be \[E\]", lambda: segment_attention(np.ones((5, 3)), DATA, IDS, IDS, 2)),
        ("TypeError: num_segments must be given, or a plan", lambda: segment_attention(LOGITS, DATA, IDS, IDS)),
        ("TypeError: plan must be a SegmentPlan, got dict", lambda: segment_attention(LOGITS, DATA, plan={})),
        (
            "ValueError: belong to the plan; pass none of them, got gather_ids",
            lambda: segment_attention(LOGITS, DATA, IDS, plan=segment_plan(IDS, 2, IDS, 4)),
        ),
    ],
)
def test_errors(error: str, call: Callable[[], Any]) -> None:
    with cases.raises(error, "segment_attention: .*"):
        call()
