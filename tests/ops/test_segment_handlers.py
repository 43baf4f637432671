"""The native handlers of all segment ops trust nothing: what does not fit gives an error, never a crash."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_baracuda._core.native import NATIVE_MODULES
from jax_baracuda._core.op import OPS

BATCH, ROWS, SEGMENTS, FEATURES = 3, 4, 2, 3


@dataclasses.dataclass(frozen=True)
class Array:
    """Name, sizes of the dimensions after the batch, and dtype of an operand or result of a target."""

    name: str
    sizes: tuple[int, ...]
    dtype: str = "float32"

    def shape(self, batch: int = BATCH) -> tuple[int, ...]:
        return (batch, *self.sizes)


ROW_SIZES, CELL_SIZES = (ROWS, FEATURES), (SEGMENTS, FEATURES)

DATA, IDS = Array("data", ROW_SIZES), Array("segment_ids", (ROWS,), "int32")
OUTPUT, D_OUTPUT, D_DATA = Array("output", CELL_SIZES), Array("d_output", CELL_SIZES), Array("d_data", ROW_SIZES)
WINNER, ORDER = Array("winner", CELL_SIZES, "int32"), Array("order", (ROWS,), "int32")
COUNT = Array("count", (SEGMENTS,), "int32")
MANTISSA, PACKED = Array("mantissa", CELL_SIZES), Array("packed", CELL_SIZES, "int32")
PROBABILITIES, D_PROBABILITIES = Array("probabilities", ROW_SIZES), Array("d_probabilities", ROW_SIZES)

TARGETS: dict[str, tuple[tuple[Array, ...], tuple[Array, ...]]] = {
    **{
        f"segment_{kind}{suffix}": signature
        for kind in ("max", "min")
        for suffix, signature in {
            "": ((DATA, IDS), (OUTPUT,)),
            "_with_winner": ((DATA, IDS), (OUTPUT, WINNER, ORDER)),
            "_backward": ((D_OUTPUT, WINNER, IDS, ORDER, DATA, OUTPUT), (D_DATA,)),
        }.items()
    },
    "segment_argmax": ((DATA, IDS), (WINNER,)),
    "segment_argmin": ((DATA, IDS), (WINNER,)),
    "segment_sum": ((DATA, IDS), (OUTPUT,)),
    "segment_sum_backward": ((D_OUTPUT, IDS), (D_DATA,)),
    "segment_mean": ((DATA, IDS), (OUTPUT, COUNT)),
    "segment_mean_backward": ((D_OUTPUT, COUNT, IDS), (D_DATA,)),
    "segment_prod": ((DATA, IDS), (OUTPUT,)),
    "segment_prod_with_residual": ((DATA, IDS), (OUTPUT, MANTISSA, PACKED)),
    "segment_prod_backward": ((D_OUTPUT, MANTISSA, PACKED, DATA, IDS), (D_DATA,)),
    "segment_softmax": ((Array("logits", ROW_SIZES), IDS), (PROBABILITIES,)),
    "segment_softmax_backward": ((PROBABILITIES, D_PROBABILITIES, IDS), (Array("d_logits", ROW_SIZES),)),
}


@dataclasses.dataclass(frozen=True)
class Call:
    """Shapes and dtypes of the arrays of one call of a target."""

    target: str
    operands: tuple[tuple[tuple[int, ...], str], ...]
    results: tuple[tuple[tuple[int, ...], str], ...]
    attributes: tuple[tuple[str, Any], ...]
    scratch_bytes: int
    """Of an additional last result; 0 for none."""

    def run(self) -> Any:
        scratch = (((self.scratch_bytes,), "uint8"),) if self.scratch_bytes else ()
        results = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in self.results + scratch]
        call = jax.ffi.ffi_call(f"jax_baracuda.{self.target}", results)
        attributes = dict(self.attributes)
        operands = [np.zeros(shape, jnp.dtype(dtype)) for shape, dtype in self.operands]
        return jax.block_until_ready(jax.jit(lambda *x: call(*x, **attributes))(*operands))


def good_call(target: str, shared: tuple[int, ...] = ()) -> Call:
    """A call that fits, in which the operands at these positions are shared by the batch."""
    operands = tuple((x.shape(1 if i in shared else BATCH), x.dtype) for i, x in enumerate(TARGETS[target][0]))
    results = tuple((x.shape(), x.dtype) for x in TARGETS[target][1])
    op, scratch_bytes = OPS[target], 0
    params = {"num_segments": SEGMENTS, "indices_are_sorted": False, "deterministic": False, "first_wins": False}
    if op.scratch is not None:
        avals = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in operands]
        flags = {name: params[name] for name in {"num_segments", "indices_are_sorted", *op.attributes}}
        sizes = {name: int(size) for name, size in op.scratch(*avals, **flags).items()}
        scratch_bytes = NATIVE_MODULES[cases.PLATFORM].scratch_bytes(target, sizes)
    return Call(target, operands, results, tuple((name, params[name]) for name in op.attributes), scratch_bytes)


def other_shapes(shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Shapes that a buffer of this shape must not have."""
    shapes = {
        "rank 0": (),
        "without batch": shape[1:],
        "of rank 1": shape[:1],
        "one dimension more": (*shape, 1),
        "other batch": (shape[0] + 1, *shape[1:]),
    }
    for i in range(1, len(shape)):
        shapes[f"dimension {i} longer"] = tuple(n + 1 if k == i else n for k, n in enumerate(shape))
        shapes[f"dimension {i} shorter"] = tuple(n - 1 if k == i else n for k, n in enumerate(shape))
    return shapes


def replaced(items: tuple[Any, ...], i: int, item: Any) -> tuple[Any, ...]:
    return (*items[:i], item, *items[i + 1 :])


def segments_are_fixed(target: str) -> bool:
    """Whether another array, too, says how many segments there are."""
    return sum(x.sizes[0] == SEGMENTS for arrays in TARGETS[target] for x in arrays) > 1


def bad_shapes(target: str) -> dict[str, Call]:
    """For each operand and each result, calls that fit but for its shape."""
    good, calls = good_call(target), {}
    for kind in ("operands", "results"):
        arrays = getattr(good, kind)
        for i, (shape, dtype) in enumerate(arrays):
            name = TARGETS[target][kind == "results"][i].name
            for how, other in other_shapes(shape).items():
                if shape[1:2] == (SEGMENTS,) and how.startswith("dimension 1") and not segments_are_fixed(target):
                    continue  # as good a number of segments as any
                calls[f"{name} {how}"] = dataclasses.replace(good, **{kind: replaced(arrays, i, (other, dtype))})
    return calls


def bad_dtypes(target: str) -> dict[str, Call]:
    """For each operand and each result, calls that fit but for its dtype."""
    good, calls = good_call(target), {}
    for kind in ("operands", "results"):
        arrays = getattr(good, kind)
        for i, (shape, dtype) in enumerate(arrays):
            name = TARGETS[target][kind == "results"][i].name
            has_result_of_data = not target.startswith("segment_arg")
            others = ["int16", "complex64", "int8", "bool", "uint8"]
            others += [
                x for x in ("float16", "int32", "float32") if x != dtype and (has_result_of_data or name != "data")
            ]
            for other in others:
                calls[f"{name} {other}"] = dataclasses.replace(good, **{kind: replaced(arrays, i, (shape, other))})
    return calls


def test_table_is_complete() -> None:
    """Each op is here, with as many operands and results as its definition names."""
    assert set(TARGETS) == set(OPS)
    for target, (operands, results) in TARGETS.items():
        assert len(operands) == len(OPS[target].operands)
        assert len(results) == len(OPS[target].results)


@pytest.mark.parametrize("target", TARGETS)
def test_what_fits_is_accepted(target: str) -> None:
    """The calls that the tests below spoil are good as they are, with any of their operands shared by the batch."""
    good_call(target).run()
    num_operands = len(TARGETS[target][0])
    for count in range(1, num_operands + 1):
        for shared in itertools.combinations(range(num_operands), count):
            names = {TARGETS[target][0][i].name for i in shared}
            if target.endswith(("max_backward", "min_backward")) and len(names & {"winner", "output"}) == 1:
                continue  # winners and maxima come from one kernel
            if {"mantissa", "packed"} & names and not {"mantissa", "packed"} <= names:
                continue  # likewise
            if count < 3 or count == num_operands:
                good_call(target, shared).run()


def assert_refused(target: str, what: str, call: Call) -> None:
    operand_and_result_names = "|".join(x.name for arrays in TARGETS[target] for x in arrays)
    try:
        call.run()
    except jax.errors.JaxRuntimeError as error:
        message = str(error)
    else:
        pytest.fail(f"{target} accepted a call with: {what}")
    assert re.search(rf"{target}: ({operand_and_result_names}|expected)\b", message), f"{what}: {message}"
    assert re.search(r"has (shape \[|XLA element type|\d+ rows)|expected", message), f"{what}: {message}"


@pytest.mark.parametrize("target", TARGETS)
def test_bad_shapes_are_refused(target: str) -> None:
    """Each operand and result with another rank, batch, number of rows, segments or features."""
    for what, call in bad_shapes(target).items():
        assert_refused(target, what, call)


@pytest.mark.parametrize("target", TARGETS)
def test_bad_dtypes_are_refused(target: str) -> None:
    """Each operand and result with a dtype that has no kernel, or that does not fit to the others."""
    for what, call in bad_dtypes(target).items():
        assert_refused(target, what, call)


@pytest.mark.parametrize("target", TARGETS)
def test_other_numbers_of_buffers_and_attributes_are_refused(target: str) -> None:
    """XLA itself refuses wrong numbers of operands and attributes, and attributes of another type."""
    good = good_call(target)
    extra = ((BATCH, ROWS), "int32")
    has_optional_operands = target.endswith(("max_backward", "min_backward"))
    calls = {
        "operand missing": dataclasses.replace(good, operands=good.operands[:-1]),
        "operand too many": dataclasses.replace(good, operands=(*good.operands, extra)),
        "only one operand": dataclasses.replace(good, operands=good.operands[:1]),
    }
    if good.attributes:  # without any, XLA does not look
        calls["attribute too many"] = dataclasses.replace(good, attributes=(*good.attributes, ("nonsense", True)))
    for i, (name, _) in enumerate(good.attributes):
        calls[f"{name} missing"] = dataclasses.replace(good, attributes=good.attributes[:i] + good.attributes[i + 1 :])
        calls[f"{name} of another type"] = dataclasses.replace(
            good, attributes=replaced(good.attributes, i, (name, 1.5))
        )
    for what, call in calls.items():
        message = "[Ww]rong number of|[Ww]rong attribute|PRED|bool|int64|S64"
        if has_optional_operands:
            message += "|expected both data and output"
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            call.run()
            pytest.fail(f"{target} accepted a call with: {what}")


@pytest.mark.parametrize("target", ["segment_softmax", "segment_softmax_backward"])
def test_negative_number_of_segments_is_refused(target: str) -> None:
    good = good_call(target)
    attributes = tuple((name, -1 if name == "num_segments" else value) for name, value in good.attributes)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"{target}: num_segments"):
        dataclasses.replace(good, attributes=attributes).run()
