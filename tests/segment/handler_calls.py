"""Direct calls of the native targets of all segment ops, built from the ops' definitions."""

from __future__ import annotations

import dataclasses

from support import handlers
from support.handlers import Array, Call

from jax_baracuda._core.op import OPS, OpCall

BATCH, ROWS, SEGMENTS, FEATURES = 3, 4, 2, 3

ROW_SHAPE = (BATCH, ROWS, FEATURES)

PARAMS = {
    "num_segments": SEGMENTS,
    "indices_are_sorted": False,
    "deterministic": False,
    "first_wins": False,
    "with_order": True,
}

INTEGERS = ("segment_ids", "winner", "order", "count", "packed")
"""Operands of 32-bit integers."""


def arrays_of(target: str, dtype: str = "float32") -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """The operands and results of a target, for data of this dtype."""
    sizes = {"row": ROWS, "segment": SEGMENTS, "...": FEATURES}
    op, params = OPS[target], PARAMS | {"num_batch_dims": 1}
    dimensions = OpCall(op, (), PARAMS).resolve(op.operands)
    operands = tuple(
        Array(name, (BATCH, *(sizes[dim] for dim in dims)), "int32" if name in INTEGERS else dtype)
        for name, dims in dimensions.items()
    )
    call = OpCall(op, [x.aval() for x in operands], {**op.targets[target], **params})
    results = zip(call.resolve(op.results), call.result_types(), strict=True)
    return operands, tuple(Array(name, shape, str(dtype)) for name, (shape, dtype) in results)


TARGETS = {target: arrays_of(target) for target in OPS if target.startswith("segment_")}


def good_call(target: str, shared: tuple[int, ...] = (), batch: int = BATCH) -> Call:
    """A valid call. The batch shares the operands at the positions `shared`."""
    operands, results = (
        [dataclasses.replace(x, shape=(batch, *x.shape[1:])) for x in arrays] for arrays in TARGETS[target]
    )
    taken = {"num_segments", *OPS[target].attributes}
    if target != "segment_order":
        taken.add("indices_are_sorted")
    return handlers.good_call(
        target,
        [x.shared() if i in shared else x for i, x in enumerate(operands)],
        results,
        {name: value for name, value in PARAMS.items() if name in taken},
    )
