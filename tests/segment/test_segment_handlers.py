"""The native handlers of all segment ops check their calls: an invalid call gives an error, never a crash."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from support import cases, handlers
from support.handlers import Array, Call, with_dtypes
from support.recorded import BATCH, GoodCall, direct_calls

from jax_baracuda._core.native import KERNEL_PLATFORMS, NATIVE_MODULES
from jax_baracuda._core.op import OPS, OpCall

TARGETS = sorted(target for target in OPS if target.startswith("segment_"))


@pytest.mark.parametrize("target", TARGETS)
def test_bad_dtypes_are_refused(target: str) -> None:
    """An operand or result is refused if its dtype has no kernel or does not match the others."""
    good, _ = direct_calls(target)[0]
    names = [*(x.name for x in good.arrays()), "expected"]
    takes_any_data = all(x.dtype == "int32" for x in good.results)

    def with_other_dtypes(array: Array) -> dict[str, Array]:
        of_kernels = () if array.name == "data" and takes_any_data else ("float16", "int32", "float32")
        return with_dtypes(array, ("int16", "complex64", "int8", "bool", "uint8", *of_kernels))

    for dtype, array, call in good.with_other(with_other_dtypes):
        handlers.assert_refused(call, f"{array.name} {dtype}", *names)


@pytest.mark.parametrize("target", ["segment_softmax", "segment_softmax_backward"])
def test_negative_number_of_segments_is_refused(target: str) -> None:
    good, _ = direct_calls(target)[0]
    call = dataclasses.replace(good, attributes={**good.attributes, "num_segments": -1})
    assert f"{target}: num_segments" in handlers.refusal(call, "num_segments == -1")


@pytest.mark.parametrize("target", ["segment_max_with_winner", "segment_min_with_winner"])
def test_order_without_segments(target: str) -> None:
    """The order of rows is written also without segments, because the gradient follows it."""
    call, operands = direct_calls(target)[0]
    (output, winner, order), rows = call.results, operands["segment_ids"].shape[1]
    cells = [dataclasses.replace(x, shape=(BATCH, 0, *x.shape[2:])) for x in (output, winner)]
    call = dataclasses.replace(call, results=(*cells, dataclasses.replace(order, shape=(BATCH, rows))))
    order_of_rows = call.results_of(operands)["order"]
    np.testing.assert_array_equal(np.sort(order_of_rows, axis=1), np.tile(np.arange(rows), (BATCH, 1)))


def of_extremum_gradient(rng: np.random.Generator, target: str, dtype: str) -> GoodCall:
    """A call of an extremum's gradient in the order of its rows, and operands whose winners include ties."""
    call, operands = next(good for good in direct_calls(target) if good[0].operands[0].dtype == dtype)
    rows = operands["segment_ids"].shape[1]
    arrays = [dataclasses.replace(x, shape=(BATCH, rows)) if x.name == "order" else x for x in call.operands]
    order = np.tile(np.arange(rows, dtype=np.int32), (BATCH, 1))
    winner = rng.integers(-3, rows, operands["winner"].shape).astype(np.int32)
    return planned(call, arrays), {**operands, "order": order, "winner": winner}


def planned(call: Call, operands: Sequence[Array]) -> Call:
    """The call with other operands, and the scratch that they need."""
    return handlers.good_call(call.target, operands, call.results, call.attributes)


each_extremum_gradient = pytest.mark.parametrize("target", ["segment_max_backward", "segment_min_backward"])


@each_extremum_gradient
def test_tied_winners_without_data_get_nothing(rng: np.random.Generator, target: str) -> None:
    """Without data and output, a kernel cannot find the tied rows, so they get zeros."""
    call, operands = of_extremum_gradient(rng, target, "float32")
    call = planned(call, call.operands[:4])
    winner = np.take_along_axis(operands["winner"], operands["segment_ids"][..., None], axis=1)
    d_output = np.take_along_axis(operands["d_output"], operands["segment_ids"][..., None], axis=1)
    expected = np.where(winner == np.arange(winner.shape[1])[:, None], d_output, 0)
    np.testing.assert_array_equal(call.results_of(operands)["d_data"], expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("first", [[0, 0, 0, 0], [0, 2, 2, 3], [-1, 2**31 - 1, 1, 0], [3, 1, 2, 0]], ids=str)
@each_extremum_gradient
def test_orders_of_rows_change_no_gradient(rng: np.random.Generator, target: str, first: list[int], dtype: str) -> None:
    """The gradient of each row is right, also if the order is not a permutation."""
    call, operands = of_extremum_gradient(rng, target, dtype)
    expected = call.results_of(operands)["d_data"]
    operands["order"][1, :4] = first
    np.testing.assert_array_equal(call.results_of(operands)["d_data"], expected)


def planned_calls(target: str, rows: int) -> Iterator[tuple[list[jax.ShapeDtypeStruct], dict[str, Any]]]:
    """Operands and params of calls with this many rows, for all sizes and flags that a plan may depend on."""
    op, dtypes = OPS[target], ("float16", "float32")
    is_of_extremum = target in ("segment_max_backward", "segment_min_backward")
    segment_counts, feature_counts = (0, 1, 3, 40, 900, 5000, 100_000), (0, 1, 2, 3, 4, 8, 33, 64, 128, 1 << 20)
    for batch, segments, features in itertools.product((1, 3), segment_counts, feature_counts):
        sizes = {"row": rows, "segment": segments, "...": features}
        for dtype, flag, other_flag in itertools.product(dtypes, (False, True), (False, True)):
            names = list(op.operands.values())[: 4 if is_of_extremum and other_flag else None]  # without ties
            operands = [
                jax.ShapeDtypeStruct(
                    (batch, *(sizes[name] for name in dimensions)), dtype if "..." in dimensions else np.int32
                )
                for dimensions in names
            ]
            if is_of_extremum and flag:
                operands[3] = jax.ShapeDtypeStruct((batch, 1), np.int32)  # without an order
            options = {"indices_are_sorted": flag, "deterministic": other_flag}
            yield operands, {"num_segments": segments, "num_batch_dims": 1, **options}


@pytest.mark.parametrize("platform", KERNEL_PLATFORMS)
@pytest.mark.parametrize("target", TARGETS)
def test_every_strategy_is_planned(target: str, platform: str) -> None:
    """Each strategy that the native module names runs some call, and no call has any other strategy."""
    native = NATIVE_MODULES[platform]
    if native.module is None:
        cases.skip_for_lack_of(platform, f"{platform}: {native.problem}")
    plans = {
        OpCall(OPS[target], operands, OPS[target].targets[target] | params).plan(platform)
        for rows in (0, 1, 64, 3000, 40_000, 1 << 21, 1 << 25)
        for operands, params in planned_calls(target, rows)
    }
    strategies = native.strategies()[target]
    assert {plan.strategy for plan in plans} == set(strategies) and len(strategies) == len(set(strategies))
    assert all(plan.scratch_bytes >= 0 for plan in plans)
    assert platform != "cpu" or all(plan.scratch_bytes == 0 for plan in plans)
