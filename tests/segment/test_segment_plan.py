"""Plans for functions that do not gather: values, gradients, transformations, errors and checks of plans."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from segment.reference import DIFFERENTIABLE, REDUCTIONS, Reduction
from support import cases, recorded
from support.kernels import kernels_in
from support.programs import small_floats

import jax_baracuda
from jax_baracuda import SegmentPlan, segment_plan
from jax_baracuda._examples import all_examples, examples_of

ROWS, SEGMENTS = 400, 30

each_reduction = pytest.mark.parametrize("reduction", REDUCTIONS, ids=str)
each_differentiable = pytest.mark.parametrize("reduction", DIFFERENTIABLE, ids=str)


@each_differentiable
@pytest.mark.parametrize("num_features", [3, 128])
def test_nothing_sorts_any_more(rng: np.random.Generator, reduction: Reduction, num_features: int) -> None:
    """With a plan, the value's kernels are told that ids are sorted, and XLA sorts nothing."""
    data = small_floats(rng, ROWS, num_features)
    plan = segment_plan(cases.make_ids(rng, ROWS, SEGMENTS, is_sorted=False), SEGMENTS)

    @jax.jit
    def run(data: jax.Array, plan: SegmentPlan) -> Any:
        return jax.value_and_grad(lambda data: (reduction(data, plan=plan) ** 2).sum())(data)

    lowered = run.lower(data, plan)
    assert "stablehlo.sort" not in lowered.as_text()
    calls = re.findall(r"custom_call @jax_baracuda\.(\w+)\(.*?(indices_are_sorted = \w+|->)", lowered.as_text())
    assert {promise for name, promise in calls if not name.endswith("_backward")} == {"indices_are_sorted = true"}
    assert len(kernels_in(lowered.as_text())) == len(calls) >= len(reduction.kernels)


@each_reduction
def test_plan_of_edges_serves_rows(rng: np.random.Generator, reduction: Reduction) -> None:
    """Reductions of rows ignore the gather ids of a plan. Its transpose reduces the rows by these ids."""
    ids, gather_ids = rng.integers(-2, SEGMENTS + 2, ROWS), rng.integers(0, 20, ROWS)
    data = small_floats(rng, ROWS, 4)
    plan = segment_plan(ids, SEGMENTS, gather_ids, 20)
    np.testing.assert_array_equal(reduction(data, plan=plan), reduction(data, plan=segment_plan(ids, SEGMENTS)))
    expected = reduction.value(np.asarray(data), gather_ids, 20)
    expected.check(reduction(data, plan=plan.transposed))


def of_data_and_plan(name: str) -> Callable[..., jax.Array]:
    """``(data, plan) -> result``, with weights where the function takes some. The plan has 10 segments."""
    function = getattr(jax_baracuda, name)
    if name == "gather_segment_dot":
        return lambda data, plan: function(data, data[:10], plan=plan)
    if name == "graph_dot_product_attention":
        return lambda data, plan: function(data[:10, None], *[data[:, None]] * 2, plan=plan)
    if name == "graph_additive_attention":
        return lambda data, plan: function(data[:10, None], data[:, None], data[:1], plan=plan)
    if name == "segment_attention":
        return lambda data, plan: function(jnp.arange(ROWS, dtype=jnp.float32), data, plan=plan)
    if name.startswith("gather") and name.endswith(("sum", "mean")):
        return lambda data, plan: function(data, weights=jnp.arange(ROWS, dtype=jnp.float32), plan=plan)
    return lambda data, plan: function(data, plan=plan)


TAKE_PLAN = sorted({example.function.__name__ for example in all_examples() if recorded.takes_plan(example)})


@pytest.mark.parametrize("is_mapped", [False, True], ids=["one", "batch"])
@pytest.mark.parametrize("name", [name for name in TAKE_PLAN if not name.endswith("_backward")])
def test_any_plan_is_safe(rng: np.random.Generator, name: str, is_mapped: bool) -> None:
    """A plan of arbitrary integers gives some result, and no access out of bounds; later calls are right."""
    function = of_data_and_plan(name)
    gathers = name.startswith(("gather", "graph")) or name in ("segment_attention", "take_rows")
    data, ids = small_floats(rng, 20 if gathers else ROWS, 3), rng.integers(0, 10, ROWS)

    def run(data: jax.Array, plan: SegmentPlan) -> Any:
        value, vjp = jax.vjp(lambda data: function(data, plan), data)
        return value, vjp(jnp.zeros(value.shape, jax.dtypes.float0) if value.dtype == jnp.int32 else value)

    batch = (3,) if is_mapped else ()
    program = jax.jit(jax.vmap(run, (None, 0)) if is_mapped else run)
    good = segment_plan(ids, 20 if name == "take_rows" else 10, ids, 20)
    expected = function(data, good)
    for _ in range(3):
        arrays = [rng.integers(-(2**31), 2**31, (*batch, ROWS)).astype(np.int32) for _ in range(8)]
        bad = SegmentPlan(*map(jnp.asarray, arrays), num_segments=good.num_segments, num_rows=20)
        value, _ = jax.block_until_ready(program(data, bad))
        assert value.shape == (*batch, *expected.shape)
        if not is_mapped:
            with pytest.raises(ValueError, match="SegmentPlan.validate: "):
                bad.validate()
    np.testing.assert_array_equal(function(data, good), expected)


# ----------------------------------------------------------------------------------------------------------------------
# The debug check, and errors.


def test_validate(rng: np.random.Generator) -> None:
    """`validate` refuses a plan of other ids and a changed plan, and accepts a right one."""
    ids, gather_ids = rng.integers(-3, SEGMENTS + 3, ROWS), rng.integers(-30, 30, ROWS)
    plan, of_edges = segment_plan(ids, SEGMENTS), segment_plan(ids, SEGMENTS, gather_ids, 20)
    plan.validate()
    plan.validate(ids)
    of_edges.validate()
    of_edges.validate(ids, gather_ids)
    of_edges.transposed.validate()
    other = np.where(np.arange(ROWS) == 7, (ids + 1) % SEGMENTS, ids)
    for check in (lambda: plan.validate(other), lambda: of_edges.validate(other, gather_ids)):
        with pytest.raises(ValueError, match="SegmentPlan.validate: the plan is of other ids: edge_segment_ids"):
            check()
    with pytest.raises(ValueError, match=r"edge_gather_ids\[7\] is"):
        of_edges.validate(ids, np.where(np.arange(ROWS) == 7, (gather_ids + 1) % 20, gather_ids))
    leaves, structure = jax.tree.flatten(of_edges)
    for i, leaf in enumerate(leaves):
        changed = jax.tree.unflatten(structure, [*leaves[:i], leaf[::-1], *leaves[i + 1 :]])
        with pytest.raises(ValueError, match="SegmentPlan.validate: "):
            changed.validate()
    with pytest.raises(jax.errors.TracerArrayConversionError):
        jax.jit(lambda plan: plan.validate())(plan)


DATA, PLAN = jnp.ones((6, 2)), segment_plan(jnp.arange(6) % 3, 3)


def test_plans_are_compared_by_identity() -> None:
    copy = jax.tree.map(jnp.copy, PLAN)
    assert PLAN == PLAN
    assert PLAN != copy
    assert copy in [PLAN, copy]


@pytest.mark.parametrize("argument", [{"static_argnums": 1}, {"static_argnames": "plan"}], ids=str)
def test_a_plan_is_no_static_argument(argument: dict[str, Any]) -> None:
    """The error says how to pass a plan, and prints no elements."""

    def program(data: jax.Array, plan: SegmentPlan) -> jax.Array:
        return jax_baracuda.segment_sum(data, plan=plan)

    for call in (lambda: jax.jit(program, **argument)(DATA, plan=PLAN), lambda: hash(PLAN)):
        with pytest.raises((TypeError, ValueError), match="pass it to compiled programs as an ordinary arg") as error:
            call()
        assert "[0" not in str(error.value)
    assert jax.jit(program)(DATA, PLAN).shape == (3, 2)


def test_plans_are_printed_by_shapes() -> None:
    assert repr(PLAN) == (
        "SegmentPlan(edge_order=int32[6], gather_ids=None, segment_ids=int32[6], edge_segment_ids=int32[6], "
        "transposed_order=None, transposed_gather_ids=None, transposed_segment_ids=None, edge_gather_ids=None, "
        "num_segments=3, num_rows=None)"
    )
    axes = jax.tree.map(lambda _: 0, PLAN)
    assert "edge_order=0, " in repr(axes)


@pytest.mark.parametrize("name", TAKE_PLAN)
def test_errors_of_arguments(rng: np.random.Generator, name: str) -> None:
    """Anything else in place of a plan is refused, and so are ids, a number of segments or a mode beside a plan."""
    function, example = getattr(jax_baracuda, name), examples_of(name)[0]
    operands = example.make_operands(rng, "float32", "small")
    ids = {key: x for key, x in operands.items() if key in recorded.IDS}
    plan = recorded.plan_of(example, operands)
    beside = ids | {"num_segments": 3, "mode": "clip"}
    taken = inspect.signature(function).parameters
    for arguments, error in (
        ({"plan": {}}, "TypeError: plan must be a SegmentPlan, got dict; segment_plan makes one"),
        ({}, "TypeError: .* must be given, or a plan"),
        *(
            ({"plan": plan, key: value}, f"ValueError: .*belong.* to the plan.*{key}")
            for key, value in beside.items()
            if key in taken
        ),
    ):
        with cases.raises(error, f"{name}: "):
            function(**{key: x for key, x in operands.items() if key not in ids}, **arguments)


@pytest.mark.parametrize(
    ("error", "call"),
    [
        (
            r"ValueError: got data.shape = \(7, 2\), segment_ids.shape = \(6,\)",
            lambda jb: jb.segment_sum(jnp.ones((7, 2)), plan=PLAN),
        ),
        ("ValueError: bucket_size cannot be combined", lambda jb: jb.segment_max(DATA, bucket_size=2, plan=PLAN)),
        (
            "ValueError: the plan is for 3 segments, got d_output.shape = ",
            lambda jb: jb.segment_max_backward(jnp.ones((4, 2)), DATA, plan=PLAN),
        ),
        ("ValueError: the plan is for 3 segments", lambda jb: jb.segment_sum_backward(jnp.ones((4, 2)), plan=PLAN)),
        ("ValueError: the plan has no gather_ids; pass", lambda jb: jb.gather_segment_sum(DATA, plan=PLAN)),
        ("ValueError: the plan has no gather_ids", lambda jb: jb.gather_segment_max(DATA, plan=PLAN)),
        ("ValueError: the plan has no gather_ids", lambda jb: jb.segment_attention(jnp.ones(6), DATA, plan=PLAN)),
        ("ValueError: SegmentPlan.transposed: the plan has no gather_ids", lambda jb: PLAN.transposed),
        (
            "ValueError: SegmentPlan.validate: the plan has no gather_ids",
            lambda jb: PLAN.validate(gather_ids=jnp.zeros(6, int)),
        ),
        (
            "TypeError: gather_ids and num_rows belong together",
            lambda jb: jb.segment_plan(jnp.zeros(6, int), 3, jnp.zeros(6, int)),
        ),
        (
            "TypeError: gather_ids and num_rows belong together",
            lambda jb: jb.segment_plan(jnp.zeros(6, int), 3, num_rows=3),
        ),
        (
            r"ValueError: segment_ids must have shape \[E\], got \(2, 3\)",
            lambda jb: jb.segment_plan(jnp.zeros((2, 3), int), 3),
        ),
        (
            "TypeError: segment_ids must have an integer dtype, got bool",
            lambda jb: jb.segment_plan(jnp.zeros(6, bool), 3),
        ),
        ("ValueError: num_segments must be at most", lambda jb: jb.segment_plan(jnp.zeros(6, int), 2**31)),
    ],
)
def test_errors(error: str, call: Callable[[Any], Any]) -> None:
    with cases.raises(error):
        call(jax_baracuda)
