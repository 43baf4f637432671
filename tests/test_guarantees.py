"""The promises of precision_guarantee, asserted for every op, element type, flag and claim."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from causal_conv1d import reference as convolutions
from causal_conv1d.reference import Problem as Convolution
from rope.reference import Rotation, make_features
from segment.gather_reference import Graph, sum_of_edges
from segment.reference import ARGMAX, ARGMIN, MAX, MEAN, MIN, PROD, REDUCTIONS, SOFTMAX, SUM, Reduction
from support import cases
from support.cases import Expected
from where import reference as selections
from write_slice import reference as windows

from jax_baracuda import precision_guarantee
from jax_baracuda._core.guarantees import Guarantee
from jax_baracuda._core.native import KERNEL_PLATFORMS
from jax_baracuda._core.op import OPS, OpCall

RUNS = 20
FLAGS = ("deterministic", "indices_are_sorted")
GATHERED_SUMS = {
    f"{name}{suffix}"
    for name in ("gather_segment_sum", "gather_segment_max_backward", "gather_segment_min_backward")
    for suffix in ("", "_of_graphs")
}
"""Kernels that always add in a fixed order. Plain JAX, which may be chosen instead, does not on GPUs."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of an op on a batch of two, and what it may return."""

    operands: tuple[np.ndarray, ...]
    expected: tuple[tuple[Expected, Expected], ...]
    """For each result, what to expect of both batch elements. Results at the end may be missing: they are hints."""
    params: dict[str, Any] = dataclasses.field(default_factory=dict)

    def check(self, results: Sequence[np.ndarray], where: str, slack: Callable[[Expected], Any] | None = None) -> None:
        for actual, elements in zip(results, self.expected, strict=False):
            for k, expected in enumerate(elements):
                if slack is not None and cases.is_floating(expected.dtype):
                    expected = dataclasses.replace(expected, error=expected.error + slack(expected))
                expected.check(actual[k], where)


def with_batch(name: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """The params of a call whose operands have a batch dimension."""
    params = {**OPS[name].targets[name], **params}
    return params if OPS[name].broadcasts else {**params, "num_batch_dims": 1}


def reference_winner(data: np.ndarray, ids: np.ndarray, segments: int) -> np.ndarray:
    """The winner of each cell as the kernels encode it: a row, -1 for no winner, or minus the number of tied rows."""
    share = cases.shares(data, ids, segments, "split")
    winner = np.full((segments, *data.shape[1:]), -1, np.int32)
    for cell in np.ndindex(winner.shape):
        rows = np.flatnonzero((ids == cell[0]) & (share[(slice(None), *cell[1:])] > 0))
        if len(rows):
            members = round(1 / share[(rows[0], *cell[1:])])
            winner[cell] = rows[0] if members == 1 else -members
    return winner


@dataclasses.dataclass(frozen=True)
class Problem:
    """Two batch elements that share their ids; enough work for several threads of a CPU."""

    data: np.ndarray
    ids: np.ndarray
    segments: int

    def of_each(self, function: Callable[..., Any], *arrays: np.ndarray) -> tuple[Any, Any]:
        return tuple(function(*(x[k] for x in (self.data, *arrays)), self.ids, self.segments) for k in range(2))


def make_problem(rng: np.random.Generator, dtype: str, is_sorted: bool, adds: bool) -> Problem:
    """Data with ties and special values or, for ops that add or multiply, data that each order rounds differently."""
    rows, features, segments = 3000, 48 if jnp.dtype(dtype).itemsize > 2 else 120, 30
    ids = cases.make_ids(rng, rows, segments, is_sorted=is_sorted)
    ids[ids == 5] = 4  # an empty segment
    if adds and "int" not in dtype:
        data = np.exp(rng.normal(size=(2, rows, features)) / 3) * rng.choice([-1, 1], (2, rows, features))
        return Problem(data.astype(jnp.dtype(dtype)), ids, segments)
    data = cases.make_data(rng, (2, rows, features), dtype)
    if cases.is_floating(data.dtype):
        data[:, ids == 3, ::4] = -np.inf  # ties with the identity of the maximum
    return Problem(data, ids, segments)


def exactly(arrays: Sequence[np.ndarray]) -> tuple[Expected, ...]:
    return tuple(Expected(x, x.dtype) for x in arrays)


def unrounded(
    name: str, expected: Sequence[tuple[Expected, Expected]], operands: Sequence[np.ndarray], params: Mapping[str, Any]
) -> tuple[tuple[Expected, Expected], ...]:
    """The results of a function in the dtypes of the op's results, which the function may round."""
    flags = dict.fromkeys(FLAGS, False)
    with cases.x64_for(*(x.dtype for x in operands)):
        types = OpCall(OPS[name], operands, with_batch(name, flags | params)).result_types()
    return tuple(
        tuple(dataclasses.replace(x, dtype=dtype) for x in both)
        for both, (_, dtype) in zip(expected, types, strict=True)
    )


def reduction_call(reduction: Reduction, adds: bool) -> Callable[..., Call]:
    def call(rng: np.random.Generator, dtype: str, is_sorted: bool) -> Call:
        problem = make_problem(rng, dtype, is_sorted, adds)
        expected = [problem.of_each(reduction.value)]
        if reduction is MEAN:
            expected.append(exactly([cases.counts(problem.ids, problem.segments).astype(np.int32)] * 2))
        params = {"num_segments": problem.segments} | ({"first_wins": False} if reduction in (MAX, MIN) else {})
        operands = (problem.data, problem.ids[None])
        return Call(operands, unrounded(reduction.name, expected, operands, params), params)

    return call


def with_winner_call(extremum: Reduction) -> Callable[..., Call]:
    def call(rng: np.random.Generator, dtype: str, is_sorted: bool) -> Call:
        problem = make_problem(rng, dtype, is_sorted, adds=False)
        flip = cases.order_reversed if extremum is MIN else np.asarray
        winners = problem.of_each(lambda data, ids, segments: reference_winner(flip(data), ids, segments))
        params = {"num_segments": problem.segments, "first_wins": False, "with_order": False}
        return Call((problem.data, problem.ids[None]), (problem.of_each(extremum.value), exactly(winners)), params)

    return call


def extremum_backward_call(extremum: Reduction) -> Callable[..., Call]:
    def call(rng: np.random.Generator, dtype: str, is_sorted: bool) -> Call:
        problem = make_problem(rng, dtype, is_sorted, adds=False)
        flip = cases.order_reversed if extremum is MIN else np.asarray
        extrema = np.stack([x.exact for x in problem.of_each(extremum.value)])
        winners = problem.of_each(lambda data, ids, segments: reference_winner(flip(data), ids, segments))
        d_output = cases.cotangent(rng, extrema.shape, dtype)
        gradient = [
            extremum.gradient(d, x, problem.ids, problem.segments, "split")
            for d, x in zip(d_output, problem.data, strict=True)
        ]
        order = rng.permutation(len(problem.ids)).astype(np.int32)
        operands = (d_output, np.stack(winners), problem.ids[None], order[None], problem.data, extrema)
        return Call(operands, (tuple(gradient),))

    return call


def gather_call(reduction: Reduction) -> Callable[..., Call]:
    def call(rng: np.random.Generator, dtype: str, is_sorted: bool) -> Call:
        problem = make_problem(rng, dtype, is_sorted, adds=True)
        d_output = cases.cotangent(rng, (2, problem.segments, *problem.data.shape[2:]), dtype)
        gradient = [
            reduction.gradient(d, x, problem.ids, problem.segments, deterministic=False)
            for d, x in zip(d_output, problem.data, strict=True)
        ]
        count = cases.counts(problem.ids, problem.segments).astype(np.int32)
        return Call((d_output, *((count[None],) if reduction is MEAN else ()), problem.ids[None]), (tuple(gradient),))

    return call


def order_call(rng: np.random.Generator, dtype: str, is_sorted: bool) -> Call:
    """A call with ids out of range."""
    segments = 30
    ids = rng.integers(-2, segments + 2, (2, 3000)).astype(dtype)
    in_range = np.where((ids >= 0) & (ids < segments), ids, segments)
    orders = [np.argsort(x, kind="stable").astype(dtype) for x in in_range]
    sorted_ids = [x[order] for x, order in zip(in_range, orders, strict=True)]
    expected = tuple(tuple(Expected(x, x.dtype) for x in of_result) for of_result in (orders, sorted_ids))
    return Call((ids,), expected, {"num_segments": segments})


def gathered_sum_call(rng: np.random.Generator, dtype: str, is_sorted: bool) -> Call:
    """A call with a weight for each head, and gather ids out of range."""
    problem = make_problem(rng, dtype, is_sorted, adds=True)
    nodes, heads = 700, 4
    data = problem.data[:, :nodes].reshape(2, nodes, heads, -1)
    gather_ids = rng.integers(-2, nodes + 2, len(problem.ids)).astype(np.int32)
    weights = rng.normal(size=(2, len(problem.ids), heads)).astype(data.dtype)
    exists = (gather_ids >= 0) & (gather_ids < nodes)
    rows = np.where(exists[:, None, None], data[:, gather_ids.clip(0, nodes - 1)].astype(np.float64), 0)
    terms = rows * weights[..., None].astype(np.float64)
    expected = [sum_of_edges(x, problem.ids, problem.segments, data.dtype) for x in terms]
    params = {"num_segments": problem.segments, "clips_gather_ids": False, "is_wide": False}
    flags = {"has_weights": True, "has_edge_order": False}
    return Call((data, gather_ids[None], problem.ids[None], weights), (tuple(expected),), params | flags)


def gathered_dot_call(rng: np.random.Generator, dtype: str, is_sorted: bool) -> Call:
    problem = make_problem(rng, dtype, is_sorted, adds=True)
    nodes, heads = 700, 4
    data = problem.data[:, :nodes].reshape(2, nodes, heads, -1)
    graphs = [
        Graph(x, rng.integers(-2, nodes + 2, len(problem.ids)).astype(np.int32), problem.ids, problem.segments, w)
        for x, w in zip(data, np.ones((2, len(problem.ids), heads), data.dtype), strict=True)
    ]
    d_output = rng.normal(size=(2, problem.segments, *data.shape[2:])).astype(data.dtype)
    gather_ids = np.stack([np.maximum(graph.gather_ids, 0) for graph in graphs])  # negative ids are not wrapped here
    graphs = [dataclasses.replace(x, gather_ids=ids) for x, ids in zip(graphs, gather_ids, strict=True)]
    expected = tuple(graph.gradient_of_weights(d) for graph, d in zip(graphs, d_output, strict=True))
    flags = {"is_wide": False, "has_edge_order": False}
    return Call((d_output, data, gather_ids, problem.ids[None]), (expected,), flags)


def gathered_extremum_call(extremum: Reduction, kind: str) -> Callable[..., Call]:
    """Makes calls of `kind` "", "with_winner" or "backward", with gather ids out of range."""

    def call(rng: np.random.Generator, dtype: str, is_sorted: bool) -> Call:
        problem = make_problem(rng, dtype, is_sorted, adds=False)
        nodes, edges = 700, len(problem.ids)
        data = problem.data[:, :nodes]
        gather_ids = rng.integers(-2, nodes + 2, edges).astype(np.int32)
        of_edges = dataclasses.replace(problem, data=data[:, gather_ids.clip(0, nodes - 1)])
        extrema = of_edges.of_each(extremum.value)
        flip = cases.order_reversed if extremum is MIN else np.asarray
        params = {"num_segments": problem.segments, "first_wins": False}
        if kind == "":
            return Call((data, gather_ids[None], problem.ids[None]), (extrema,), params)
        winners = of_edges.of_each(lambda data, ids, segments: reference_winner(flip(data), ids, segments))
        if kind == "with_winner":
            flags = {"has_edge_order": False}
            return Call((data, gather_ids[None], problem.ids[None]), (extrema, exactly(winners)), params | flags)
        output = np.stack([x.exact for x in extrema]).astype(data.dtype)
        d_winner = cases.cotangent(rng, output.shape, dtype)
        expected = []
        for k in range(2):
            share = cases.shares(flip(of_edges.data[k]), problem.ids, problem.segments, "split")
            terms = np.where(share > 0, cases.take_cells(d_winner[k].astype(np.float64), problem.ids), 0)
            expected.append(sum_of_edges(terms, gather_ids, nodes, data.dtype))
        operands = (d_winner, np.stack(winners), gather_ids[None], problem.ids[None], data, output)
        return Call(operands, (tuple(expected),), {"num_rows": nodes, "has_plan": False, "shares_ties": True})

    return call


def product_residual(data: np.ndarray, ids: np.ndarray, segments: int) -> tuple[np.ndarray, np.ndarray]:
    """The product of powers of two: its mantissa, and units of its exponent packed with counts of special values."""
    dtype = cases.accumulator(data.dtype)
    unit = 512 if dtype == np.float64 else 64
    mantissa = np.ones((segments, *data.shape[1:]))
    packed = np.zeros(mantissa.shape, np.int32)
    for segment in range(segments):
        values = data[ids == segment].astype(np.float64)
        mantissa[segment] = np.where(np.signbit(values).sum(axis=0) % 2, -1, 1)
        is_ordinary = np.isfinite(values) & (values != 0)
        exponents = np.log2(np.abs(np.where(is_ordinary, values, 1))).sum(axis=0)
        kinds = (values == 0, np.isinf(values), np.isnan(values))
        counts = sum(np.minimum(kind.sum(axis=0), 2) << (2 * i) for i, kind in enumerate(kinds))
        units = (exponents + unit / 2) // unit
        mantissa[segment] *= np.exp2(exponents - units * unit)
        packed[segment] = units.astype(np.int32) * 64 + counts
    return mantissa.astype(dtype), packed


def product_problem(rng: np.random.Generator, dtype: str, is_sorted: bool) -> Problem:
    """Powers of two and special values, whose products are exact."""
    shape = cases.Shape(3000, (40,), 300)
    ids = cases.make_ids(rng, shape.rows, shape.segments, is_sorted=is_sorted)
    data = np.stack([PROD.make_data(rng, shape, dtype) for _ in range(2)])
    return Problem(np.where(np.signbit(data) & np.isnan(data), np.nan, data).astype(data.dtype), ids, shape.segments)


def prod_with_residual_call(rng: np.random.Generator, dtype: str, is_sorted: bool) -> Call:
    problem = product_problem(rng, dtype, is_sorted)
    mantissa, packed = (exactly(x) for x in zip(*problem.of_each(product_residual), strict=True))
    expected = (problem.of_each(PROD.value), mantissa, packed)
    return Call((problem.data, problem.ids[None]), expected, {"num_segments": problem.segments})


def prod_backward_call(rng: np.random.Generator, dtype: str, is_sorted: bool) -> Call:
    problem = product_problem(rng, dtype, is_sorted)
    mantissa, packed = (np.stack(x) for x in zip(*problem.of_each(product_residual), strict=True))
    d_output = cases.cotangent(rng, mantissa.shape, dtype)
    gradient = [PROD.gradient(d, x, problem.ids, problem.segments) for d, x in zip(d_output, problem.data, strict=True)]
    return Call((d_output, mantissa, packed, problem.data, problem.ids[None]), (tuple(gradient),))


def sum_of_exponentials_call(rng: np.random.Generator, dtype: str, is_sorted: bool) -> Call:
    problem = make_problem(rng, dtype, is_sorted, adds=True)
    expected = problem.of_each(cases.reference_sum_of_exponentials)
    return Call((problem.data, problem.ids[None]), (expected,), {"num_segments": problem.segments})


def softmax_backward_call(rng: np.random.Generator, dtype: str, is_sorted: bool) -> Call:
    problem = make_problem(rng, dtype, is_sorted, adds=True)
    p, d = rng.normal(size=(2, *problem.data.shape)).astype(problem.data.dtype)
    expected = tuple(SOFTMAX.gradient(d[k], p[k], problem.ids, problem.segments, False) for k in range(2))
    return Call((p, d, problem.ids[None]), (expected,), {"num_segments": problem.segments})


def convolution_problems(rng: np.random.Generator, dtype: str, length: int) -> list[Convolution]:
    """Two problems that share their parameters."""
    both = [
        convolutions.make_problem(rng, (3, 21, length), 4, dtype, has_state=True, has_ids=True, activation="silu")
        for _ in range(2)
    ]
    parameters = {name: both[0].arrays[name] for name in ("weight", "bias")}
    return [dataclasses.replace(problem, arrays=problem.arrays | parameters) for problem in both]


def convolution_operands(problems: Sequence[Convolution]) -> dict[str, np.ndarray]:
    """The operands of the native targets, by name."""
    first = problems[0].arrays
    same_sequence = [convolutions.History.of(problem).same_sequence(problem.width) for problem in problems]
    return {
        "x": np.stack([problem.arrays["x"] for problem in problems]),
        "weight": first["weight"][None],
        "bias": first["bias"][None],
        "initial_state": np.stack([problem.arrays["initial_state"] for problem in problems]),
        "same_sequence": np.stack(same_sequence),
    }


def magnitudes(problem: Convolution) -> Convolution:
    """The problem whose sums are the sums of magnitudes."""
    arrays = {name: np.abs(array) for name, array in problem.arrays.items()}
    return dataclasses.replace(problem, arrays=arrays, activation=None)


CONVOLUTION_PARAMS = {"channels_last": False, "silu": True, "has_bias": True}
SEQUENCE_PARAMS = {"has_initial_state": True, "has_same_sequence": True}


def expected_output(problem: Convolution, dtype: str) -> Expected:
    """The output. In its error, the slope of silu is at most 1.1, and exponential and quotient are rounded, too."""
    y, _ = convolutions.reference(problem)
    magnitude, _ = convolutions.reference(magnitudes(problem))
    return Expected(y, dtype, 8 * cases.eps_of(dtype) * magnitude)


def convolution_call(rng: np.random.Generator, dtype: str, is_sorted: bool) -> Call:
    problems = convolution_problems(rng, dtype, length=301)
    expected = tuple(expected_output(problem, dtype) for problem in problems)
    return Call(tuple(convolution_operands(problems).values()), (expected,), CONVOLUTION_PARAMS | SEQUENCE_PARAMS)


def convolution_backward_call(rng: np.random.Generator, dtype: str, is_sorted: bool) -> Call:
    problems = convolution_problems(rng, dtype, length=301)
    operands = convolution_operands(problems)
    shapes = operands["x"].shape, operands["initial_state"].shape
    dy, d_state = (rng.normal(size=shape).astype(jnp.dtype(dtype)) for shape in shapes)

    def of_one(problem: Convolution, dy: np.ndarray, d_state: np.ndarray) -> tuple[Expected, ...]:
        exact = convolutions.reference_gradients(problem, dy, d_state)
        magnitude = convolutions.reference_gradients(magnitudes(problem), np.abs(dy), np.abs(d_state))
        # An error of the sum before silu changes the slope of silu, whatever the size of the gradient's terms.
        factor = 32 * cases.eps_of(dtype)
        results = {"x": dtype, "weight": cases.accumulator(dtype), "bias": cases.accumulator(dtype)}
        return tuple(
            Expected(exact[name], results.get(name, dtype), factor * magnitude[name])
            for name in (*results, "initial_state")
        )

    expected = [of_one(*one) for one in zip(problems, dy, d_state, strict=True)]
    x, weight, *optional = operands.values()
    params = CONVOLUTION_PARAMS | SEQUENCE_PARAMS | {"has_d_final_state": True}
    return Call((x, weight, dy, *optional, d_state), tuple(zip(*expected, strict=True)), params)


def convolution_update_call(rng: np.random.Generator, dtype: str, is_sorted: bool) -> Call:
    problems = [dataclasses.replace(p, segment_ids=None) for p in convolution_problems(rng, dtype, length=2)]
    operands = convolution_operands(problems)
    x, state = operands["x"], operands["initial_state"]
    new_state = np.concatenate([state, x], axis=3)[..., 2:]
    expected = tuple(expected_output(problem, dtype) for problem in problems)
    return Call(
        (x, state, operands["weight"], operands["bias"]),
        (expected, exactly(new_state)),
        CONVOLUTION_PARAMS,
    )


def rotation_call(*heads: int, direction: int) -> Callable[..., Call]:
    """Makes calls on arrays with these numbers of heads. Batch elements share frequencies, but not positions."""

    def call(rng: np.random.Generator, dtype: str, is_sorted: bool) -> Call:
        examples, length, size = 3, 201, 40
        features = [make_features(rng, (2, examples, h, length, size), dtype) for h in heads]
        positions = rng.integers(0, 2**20, (2, examples, length)).astype(np.int32)
        inv_freq = rng.uniform(0, 1, 16)
        exact = inv_freq.astype(cases.accumulator(dtype))
        rotations = [Rotation(p, rotary_dim=32, inv_freq=inv_freq, scale=0.5) for p in positions]
        expected = tuple(
            tuple(rotation.of(x[k], direction).expected() for k, rotation in enumerate(rotations)) for x in features
        )
        frequencies = np.stack([exact, (inv_freq - exact).astype(exact.dtype)])
        params = {
            "heads_first": True,
            "interleaved": True,
            "rotary_dim": 32,
            "scale": 0.5,
            "has_positions": True,
            "constant_angles": None,
        }
        return Call((*features, frequencies[None], positions), expected, params)

    return call


def where_call(rng: np.random.Generator, dtype: str, is_sorted: bool) -> Call:
    """A call on any bits, except that NaN are quiet: plain JAX does not keep all NaN."""
    a, b = (cases.make_data(rng, shape, dtype) for shape in ((2, 300, 64), (1, 300, 1)))
    cond = selections.make_condition(rng, (2, 1, 64), "uint8")
    return Call((a, b, cond), (exactly(selections.reference(cond, a, b)),))


def where_backward_call(rng: np.random.Generator, dtype: str, is_sorted: bool) -> Call:
    """A call whose db is a sum, if there is a kernel for sums of the dtype."""
    axes = (-2,) if dtype in cases.FLOATING else ()
    dy, cond = rng.normal(size=(2, 9000, 40)).astype(jnp.dtype(dtype)), selections.make_condition(rng, (2, 9000, 1))
    b_shape = (1, 40) if axes else (9000, 40)
    expected = [selections.reference_gradients(cond[k], dy[k], (9000, 40), b_shape) for k in range(2)]
    wide = [dataclasses.replace(db, dtype=cases.accumulator(dtype)) if axes else db for _, db in expected]
    of_a = tuple(da for da, _ in expected)
    return Call((dy, cond), (of_a, tuple(wide)), {"a_axes": (), "b_axes": axes})


def window_problem(rng: np.random.Generator, dtype: str) -> tuple[np.ndarray, list[int], np.ndarray, dict[str, Any]]:
    """Arrays, sizes, starts and params for two windows with different starts. They are too large for one CPU thread."""
    shape, sizes = (40, 301, 33), [40, 150, 21]
    params = {
        "ranks": (3,),
        "windows": (windows.window(0, 1, 0, sizes[1]), windows.window(0, 2, 1, sizes[2])),
        "drop": bool(rng.integers(2)),
    }
    starts = np.stack([np.zeros(2, np.int32), *(rng.integers(-90, 300, (2, 2)).astype(np.int32))])
    return windows.random_bits(rng, (2, *shape), dtype), sizes, starts, params


def write_slice_call(rng: np.random.Generator, dtype: str, is_sorted: bool) -> Call:
    dest, sizes, starts, params = window_problem(rng, dtype)
    source, mode = windows.random_bits(rng, (2, *sizes), dtype), "drop" if params["drop"] else "clip"
    written = windows.of_batch(lambda d, s, at: windows.reference_write(d, s, at, mode), dest, source, starts.T)
    return Call((dest, source, *starts[1:]), (exactly(written),), params)


def write_slice_backward_call(rng: np.random.Generator, dtype: str, is_sorted: bool) -> Call:
    cotangent, sizes, starts, params = window_problem(rng, dtype)
    mode = "drop" if params["drop"] else "clip"
    rest, taken = windows.of_batch(lambda d, at: windows.reference_take(d, sizes, at, mode), cotangent, starts.T)
    return Call((cotangent, *starts[1:]), (exactly(rest), exactly(taken)), params)


CALLS: dict[str, Callable[..., Call]] = {
    **{r.name: reduction_call(r, adds=r not in (MAX, MIN, ARGMAX, ARGMIN)) for r in REDUCTIONS},
    **{f"{r.name}_with_winner": with_winner_call(r) for r in (MAX, MIN)},
    **{f"{r.name}_backward": extremum_backward_call(r) for r in (MAX, MIN)},
    **{f"{r.name}_backward": gather_call(r) for r in (SUM, MEAN)},
    "segment_order": order_call,
    "gather_segment_sum": gathered_sum_call,
    "gather_segment_dot": gathered_dot_call,
    **{
        "_".join(filter(None, (f"gather_{r.name}", kind))): gathered_extremum_call(r, kind)
        for r in (MAX, MIN)
        for kind in ("", "with_winner", "backward")
    },
    "segment_prod_with_residual": prod_with_residual_call,
    "segment_prod_backward": prod_backward_call,
    "segment_sum_of_exponentials": sum_of_exponentials_call,
    "segment_softmax_backward": softmax_backward_call,
    "causal_conv1d": convolution_call,
    "causal_conv1d_backward": convolution_backward_call,
    "causal_conv1d_update": convolution_update_call,
    "rope": rotation_call(9, direction=1),
    "rope_backward": rotation_call(9, direction=-1),
    "rope_qk": rotation_call(8, 2, direction=1),
    "rope_qk_backward": rotation_call(8, 2, direction=-1),
    "where": where_call,
    "where_backward": where_backward_call,
    "write_slice": write_slice_call,
    "write_slice_backward": write_slice_backward_call,
}
"""``(rng, dtype, is_sorted)``"""

# Ops and dtypes whose references are tested. References of products compile slowly, so few of their dtypes are tested.
# float8_e8m0fnu cannot hold error bounds, which may be zero or negative.
REFERENCES = [
    (name, dtype)
    for name in sorted(OPS)
    for dtype in sorted(OPS[name].dtypes)
    if ("prod" not in name or dtype in ("bfloat16", "float32", "int32")) and dtype != "float8_e8m0fnu"
]

EVERY_OP_AND_DTYPE = [(name, dtype) for name in sorted(OPS) for dtype in sorted(OPS[name].dtypes)]


def test_every_op_is_tested() -> None:
    assert set(CALLS) == set(OPS)


def flags_of(name: str) -> list[dict[str, bool]]:
    """Every combination of the flags that the op takes."""
    taken = {*OPS[name].attributes, *(["deterministic"] if name in GATHERED_SUMS else [])}
    names = [flag for flag in FLAGS if flag in taken]
    return [dict(zip(names, values, strict=True)) for values in itertools.product((False, True), repeat=len(names))]


def check_claims(guarantee: Guarantee, dtype: str) -> None:
    """The claims about precision are those that the expected results were computed for."""
    assert guarantee.math_precision in ("exact", "rounded once", "accumulated"), "assert here what it keeps"
    accumulator = cases.accumulator(dtype).name if cases.is_floating(jnp.dtype(dtype)) else dtype
    assert guarantee.accumulator in ("none", accumulator)
    assert (guarantee.math_precision == "accumulated") <= (guarantee.accumulator == accumulator)


@pytest.mark.parametrize(("name", "dtype"), EVERY_OP_AND_DTYPE)
def test_guarantee(rng: np.random.Generator, name: str, dtype: str) -> None:
    """Each claim about an op holds on this platform, for each combination of flags. An unknown claim fails."""
    variants = [(flags, CALLS[name](rng, dtype, flags.get("indices_are_sorted", False))) for flags in flags_of(name)]

    def run_all(all_operands: Sequence[Sequence[jax.Array]]) -> list[list[jax.Array]]:
        calls = zip(variants, all_operands, strict=True)
        return [OPS[name](*operands, **with_batch(name, flags | call.params)) for (flags, call), operands in calls]

    run, all_operands = jax.jit(run_all), [call.operands for _, call in variants]

    def run_once(_: int) -> list[list[np.ndarray]]:
        with cases.x64_for(dtype):
            return jax.tree.map(np.asarray, run(all_operands))

    with cases.x64_for(dtype):
        text = run.lower(all_operands).as_text()
        assert text.count(f"@jax_baracuda.{name}(") == len(variants), "no kernel serves this call"
    alone = [run_once(0) for _ in range(RUNS)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        concurrently = list(pool.map(run_once, range(RUNS)))

    def all_bits(results: list[list[list[np.ndarray]]], k: int) -> set[bytes]:
        return {b"".join(x.tobytes() for x in result[k]) for result in results}

    for k, (flags, call) in enumerate(variants):
        guarantee = precision_guarantee(name, dtype, cases.PLATFORM, **flags)
        check_claims(guarantee, dtype)
        if guarantee.bit_stable_on_same_hardware:
            assert len(all_bits(alone, k)) == 1, f"{flags}"
        if guarantee.deterministic:
            assert all_bits(alone, k) == all_bits(concurrently, k), f"{flags}"
        if guarantee.math_precision != "accumulated":
            assert not any(np.any(x.error) for elements in call.expected for x in elements)
        for results in alone if not guarantee.deterministic else alone[:1]:
            call.check(results[k], f"{flags}")


@pytest.mark.parametrize("name", sorted(OPS))
def test_which_ops_claim_to_be_deterministic(name: str) -> None:
    """All ops claim it, except unsorted floating-point sums on GPUs. These claim it if it is requested."""
    sums = ("segment_sum", "segment_sum_of_exponentials", "segment_mean")
    adds = name in (*sums, "segment_softmax", "segment_softmax_backward", *GATHERED_SUMS)
    for dtype, platform, flags in itertools.product(sorted(OPS[name].dtypes), KERNEL_PLATFORMS, flags_of(name)):
        guarantee = precision_guarantee(name, dtype, platform, **flags)
        may_vary = adds and platform == "cuda" and cases.is_floating(jnp.dtype(dtype)) and not any(flags.values())
        assert guarantee.deterministic == guarantee.bit_stable_on_same_hardware == (not may_vary)


@pytest.mark.parametrize(("name", "dtype"), REFERENCES)
def test_plain_jax_reference(rng: np.random.Generator, name: str, dtype: str) -> None:
    """The op's reference in plain JAX has the kernel's values, winners included. Derivatives come from it."""
    call = CALLS[name](rng, dtype, False)
    params = with_batch(name, {flag: False for flag in FLAGS if flag in OPS[name].attributes} | call.params)
    with cases.x64_for(dtype):
        results = jax.jit(lambda *operands: OpCall(OPS[name], operands, params).reference(*operands))(*call.operands)

    def slack(expected: Expected) -> Any:
        # On GPUs, XLA divides with an error of one unit in the last place, and kernels round correctly. XLA treats
        # subnormal numbers as zeros, and zeros may have either sign.
        tiny = float(np.finfo(cases.accumulator(expected.dtype)).tiny)
        exact = "exact" == precision_guarantee(name, dtype, cases.PLATFORM).math_precision
        with np.errstate(invalid="ignore"):
            ulps = np.abs(np.nan_to_num(expected.exact.astype(np.float64), posinf=0, neginf=0))
        eps = float(jnp.finfo(expected.dtype).eps)
        # XLA need not contract the products of a rotation with its sums, and these products may cancel.
        wide_eps = float(np.finfo(cases.accumulator(expected.dtype)).eps)
        products = wide_eps * np.abs(np.asarray(call.operands[0], np.float64)).max() if name.startswith("rope") else 0
        return tiny + products + (0 if exact else 1) * eps * ulps

    call.check([np.asarray(x) for x in results], name, slack)


@pytest.mark.parametrize(("name", "dtype"), EVERY_OP_AND_DTYPE)
def test_guarantees_exist_for_every_platform(name: str, dtype: str) -> None:
    """Each op with a kernel for a dtype has a record for each platform, by name of the dtype and by the dtype."""
    for platform in KERNEL_PLATFORMS:
        guarantee = precision_guarantee(name, dtype, platform)
        assert guarantee == precision_guarantee(name, jnp.dtype(dtype), platform)
        assert {field.name for field in dataclasses.fields(guarantee)} == {
            "accumulator",
            "math_precision",
            "deterministic",
            "bit_stable_on_same_hardware",
        }


ERRORS = {
    "op": (("no_such_op", "float32", "cpu"), r"name must be one of \[.*'segment_max'.*got 'no_such_op'"),
    "platform": (("segment_max", "float32", "tpu"), r"platform must be one of .*'cpu', 'cuda'.*got 'tpu'"),
    "dtype": (("segment_max", "complex64", "cpu"), r"segment_max has kernels for dtype \[.*got 'complex64'"),
    "no dtype": (("segment_max", "no such dtype", "cpu"), r"segment_max has kernels for dtype \[.*got 'no such dtype'"),
    "dtype of another op": (("segment_max_backward", "int32", "cpu"), r"segment_max_backward has kernels for dtype"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    arguments, message = ERRORS[case]
    with pytest.raises(ValueError, match=f"precision_guarantee: {message}"):
        precision_guarantee(*arguments)
