"""Plans for functions that do not gather: values, gradients, transformations, errors and checks of plans."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from segment.reference import DIFFERENTIABLE, REDUCTIONS, Batch, Reduction, kernels_in, value_and_pullback
from support import cases
from support.cases import SHAPES, Shape

import jax_baracuda
from jax_baracuda import SegmentPlan, forward_mode, segment_plan

ROWS, SEGMENTS = 400, 30

each_reduction = pytest.mark.parametrize("reduction", REDUCTIONS, ids=str)
each_differentiable = pytest.mark.parametrize("reduction", DIFFERENTIABLE, ids=str)


def small_integers(rng: np.random.Generator, *shape: int) -> jax.Array:
    """Data with ties."""
    return jnp.asarray(rng.integers(-3, 4, shape), jnp.float32)


@pytest.mark.parametrize(
    ("reduction", "dtype"), [pytest.param(r, dtype, id=f"{r}-{dtype}") for r in REDUCTIONS for dtype in r.dtypes]
)
def test_value_and_gradients(rng: np.random.Generator, reduction: Reduction, dtype: str) -> None:
    """Values and both gradients, also the public one, agree with the NumPy reference for every dtype and size."""
    batch = Batch()
    for shape in SHAPES:
        ids = cases.make_ids(rng, shape.rows, shape.segments, is_sorted=False)
        _add(batch, rng, reduction, dtype, shape, ids)
    with cases.x64_for(dtype):
        batch.run()


def _add(
    batch: Batch, rng: np.random.Generator, reduction: Reduction, dtype: str, shape: Shape, ids: np.ndarray
) -> None:
    data = reduction.make_data(rng, shape, dtype)
    options = reduction.options[-1]
    expected = reduction.value(data, ids, shape.segments)

    def value(data: Any, ids: Any) -> jax.Array:
        return reduction(data, plan=segment_plan(ids, shape.segments), **options)

    batch.add(value, (data, ids), lambda output: expected.check(output, str(shape)))
    if reduction.gradient is None or not cases.is_floating(data.dtype):
        return
    cotangent = cases.cotangent(rng, reduction.result_shape(shape), dtype)

    def both_gradients(data: Any, ids: Any, cotangent: Any) -> tuple[jax.Array, ...]:
        plan = segment_plan(ids, shape.segments)
        output, d_data = value_and_pullback(lambda x: reduction(x, plan=plan, **options), jnp.asarray(data), cotangent)
        residual = output if reduction.result_has_rows else data
        backward = getattr(jax_baracuda, f"{reduction.name}_backward", None)
        if backward is None:
            return output, d_data
        takes_data = reduction.name not in ("segment_sum", "segment_mean")
        tie_break = {name: value for name, value in options.items() if name == "tie_break"}
        arrays = (cotangent, residual) if takes_data else (cotangent,)
        return output, d_data, backward(*arrays, plan=plan, **tie_break)

    def check(output: jax.Array, *gradients: jax.Array) -> None:
        reference = reduction.gradient(cotangent, reduction.residual(data, output), ids, shape.segments, **options)
        for gradient in gradients:
            reference.check(gradient, f"{shape} gradient")

    batch.add(both_gradients, (data, ids, cotangent), check)


@each_differentiable
@pytest.mark.parametrize("num_features", [3, 128])
def test_nothing_sorts_any_more(rng: np.random.Generator, reduction: Reduction, num_features: int) -> None:
    """With a plan, the value's kernels are told that ids are sorted, and XLA sorts nothing."""
    data = small_integers(rng, ROWS, num_features)
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
    data = small_integers(rng, ROWS, 4)
    plan = segment_plan(ids, SEGMENTS, gather_ids, 20)
    np.testing.assert_array_equal(reduction(data, plan=plan), reduction(data, plan=segment_plan(ids, SEGMENTS)))
    expected = reduction.value(np.asarray(data), gather_ids, 20)
    expected.check(reduction(data, plan=plan.transposed))


@each_differentiable
def test_transformations(rng: np.random.Generator, reduction: Reduction) -> None:
    """A plan passes through jit, vmap over data, plans or both, scan, checkpoint and forward mode."""
    all_ids = rng.integers(-2, SEGMENTS + 2, (3, ROWS))
    data = small_integers(rng, 3, ROWS, 4) + 4
    plans = [jax.jit(segment_plan, static_argnums=1)(ids, SEGMENTS) for ids in all_ids]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *plans)

    def gradient(data: jax.Array, plan: SegmentPlan) -> Any:
        value, vjp = jax.vjp(jax.checkpoint(lambda data: reduction(data, plan=plan)), data)
        return value, vjp(jnp.cos(value))

    single = [jax.jit(gradient)(data[i], plans[i]) for i in range(3)]
    shared = [jax.jit(gradient)(data[i], plans[0]) for i in range(3)]
    own = [jax.jit(gradient)(data[0], plan) for plan in plans]
    # Sums with another number of features may be split differently. Terms are integers, so only two ops round.
    close = {"rtol": 1e-6} if reduction.name in ("segment_softmax", "segment_prod") else {"rtol": 0}
    for axes, arguments, expected in (
        ((0, 0), (data, stacked), single),
        ((0, None), (data, plans[0]), shared),
        ((None, 0), (data[0], stacked), own),
    ):
        mapped = jax.jit(jax.vmap(gradient, in_axes=axes))(*arguments)
        for i in range(3):
            jax.tree.map(lambda x, y, i=i: np.testing.assert_allclose(x[i], y, **close), mapped, expected[i])
    _, scanned = jax.lax.scan(lambda plan, data: (plan, gradient(data, plan)), plans[0], data)
    for i in range(3):
        jax.tree.map(lambda x, y, i=i: np.testing.assert_allclose(x[i], y, **close), scanned, shared[i])
    twin = getattr(forward_mode, reduction.name)
    tangent = small_integers(rng, ROWS, 4)
    got = jax.jvp(lambda data: twin(data, plan=plans[0]), (data[0],), (tangent,))[1]
    want = jax.jvp(lambda data: twin(data, all_ids[0], SEGMENTS), (data[0],), (tangent,))[1]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@cases.on_two_devices
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["automatic", "explicit"])
@each_differentiable
def test_sharding_of_features(rng: np.random.Generator, reduction: Reduction, axis_type: AxisType) -> None:
    """Splitting features needs no collective, in both passes."""
    mesh = jax.make_mesh((2,), ("x",), (axis_type,), devices=jax.devices()[:2])
    ids, data = rng.integers(-2, SEGMENTS + 2, ROWS), small_integers(rng, ROWS, 8) + 4
    plan = segment_plan(ids, SEGMENTS)

    @jax.jit
    def run(data: jax.Array, plan: SegmentPlan) -> Any:
        value, vjp = jax.vjp(lambda data: reduction(data, plan=plan), data)
        return value, vjp(value)

    expected = run(data, plan)
    with jax.set_mesh(mesh):
        split = jax.device_put(data, NamedSharding(mesh, P(None, "x")))
        whole = jax.device_put(plan, NamedSharding(mesh, P()))
        results = run(split, whole)
        program = run.lower(split, whole).compile().as_text()
    assert not re.findall(r"all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter", program)
    for result, want in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        assert result.sharding.spec[-1] == "x"
        np.testing.assert_allclose(result, want, rtol=1e-6)


@each_reduction
def test_any_plan_is_safe(rng: np.random.Generator, reduction: Reduction) -> None:
    """A plan of arbitrary integers gives some result, and no access out of bounds."""
    data, ids = small_integers(rng, ROWS, 3), rng.integers(0, SEGMENTS, ROWS)
    good = segment_plan(ids, SEGMENTS)
    expected = reduction(data, plan=good)

    @jax.jit
    def run(data: jax.Array, plan: SegmentPlan) -> Any:
        value, vjp = jax.vjp(lambda data: reduction(data, plan=plan), data)
        return value, vjp(jnp.zeros(value.shape, jax.dtypes.float0) if value.dtype == jnp.int32 else value)

    for _ in range(5):
        orders = [rng.integers(-(2**31), 2**31, ROWS).astype(np.int32) for _ in range(3)]
        bad = SegmentPlan(orders[0], None, orders[1], orders[2], None, None, None, None, SEGMENTS, None)
        value, _ = jax.block_until_ready(run(data, bad))
        assert value.shape == expected.shape
        with pytest.raises(ValueError, match="SegmentPlan.validate: "):
            bad.validate()
    np.testing.assert_array_equal(reduction(data, plan=good), expected)


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
        with pytest.raises(ValueError, match="SegmentPlan.validate: edge_segment_ids is not that of these ids"):
            check()
    with pytest.raises(ValueError, match="edge_gather_ids is not"):
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


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, "segment_ids, num_segments, mode belong to the plan", {"segment_ids": jnp.zeros(6, int)}),
        (ValueError, "belong to the plan; pass none of them, got num_segments", {"num_segments": 3}),
        (ValueError, "got mode", {"mode": "clip"}),
        (TypeError, "plan must be a SegmentPlan, got dict", {"plan": {}}),
        (TypeError, "segment_ids must be given, or a plan", {"plan": None}),
    ],
)
@each_reduction
def test_errors_of_arguments(reduction: Reduction, error: type[Exception], message: str, call: dict[str, Any]) -> None:
    with pytest.raises(error, match=f"^{reduction.name}: .*{re.escape(message)}"):
        reduction(DATA, **{"plan": PLAN, **call})


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (
            ValueError,
            r"got data.shape = \(7, 2\), segment_ids.shape = \(6,\)",
            lambda jb: jb.segment_sum(jnp.ones((7, 2)), plan=PLAN),
        ),
        (ValueError, "bucket_size cannot be combined", lambda jb: jb.segment_max(DATA, bucket_size=2, plan=PLAN)),
        (
            ValueError,
            "the plan is for 3 segments, got d_output.shape = ",
            lambda jb: jb.segment_max_backward(jnp.ones((4, 2)), DATA, plan=PLAN),
        ),
        (ValueError, "the plan is for 3 segments", lambda jb: jb.segment_sum_backward(jnp.ones((4, 2)), plan=PLAN)),
        (ValueError, "the plan has no gather_ids; pass", lambda jb: jb.gather_segment_sum(DATA, plan=PLAN)),
        (ValueError, "the plan has no gather_ids", lambda jb: jb.gather_segment_max(DATA, plan=PLAN)),
        (ValueError, "the plan has no gather_ids", lambda jb: jb.segment_attention(jnp.ones(6), DATA, plan=PLAN)),
        (ValueError, "SegmentPlan.transposed: the plan has no gather_ids", lambda jb: PLAN.transposed),
        (
            ValueError,
            "SegmentPlan.validate: the plan has no gather_ids",
            lambda jb: PLAN.validate(gather_ids=jnp.zeros(6, int)),
        ),
        (
            TypeError,
            "gather_ids and num_rows belong together",
            lambda jb: jb.segment_plan(jnp.zeros(6, int), 3, jnp.zeros(6, int)),
        ),
        (
            TypeError,
            "gather_ids and num_rows belong together",
            lambda jb: jb.segment_plan(jnp.zeros(6, int), 3, num_rows=3),
        ),
        (
            ValueError,
            r"segment_ids must have shape \[E\], got \(2, 3\)",
            lambda jb: jb.segment_plan(jnp.zeros((2, 3), int), 3),
        ),
        (
            IndexError,
            "segment_ids must have an integer dtype, got bool",
            lambda jb: jb.segment_plan(jnp.zeros(6, bool), 3),
        ),
        (ValueError, "num_segments must be at most", lambda jb: jb.segment_plan(jnp.zeros(6, int), 2**31)),
    ],
)
def test_errors(error: type[Exception], message: str, call: Callable[[Any], Any]) -> None:
    with pytest.raises(error, match=message):
        call(jax_baracuda)
