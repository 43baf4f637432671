"""Direct calls of the native targets of all segment ops."""

from __future__ import annotations

import dataclasses

from support import handlers
from support.handlers import Array, Call

from jax_baracuda._core.op import OPS

BATCH, ROWS, SEGMENTS, FEATURES = 3, 4, 2, 3

ROW_SHAPE, CELL_SHAPE = (BATCH, ROWS, FEATURES), (BATCH, SEGMENTS, FEATURES)

DATA, IDS = Array("data", ROW_SHAPE), Array("segment_ids", (BATCH, ROWS), "int32")
OUTPUT, D_OUTPUT, D_DATA = Array("output", CELL_SHAPE), Array("d_output", CELL_SHAPE), Array("d_data", ROW_SHAPE)
WINNER, ORDER = Array("winner", CELL_SHAPE, "int32"), Array("order", (BATCH, ROWS), "int32")
COUNT = Array("count", (BATCH, SEGMENTS), "int32")
MANTISSA, PACKED = Array("mantissa", CELL_SHAPE), Array("packed", CELL_SHAPE, "int32")
PROBABILITIES, D_PROBABILITIES = Array("probabilities", ROW_SHAPE), Array("d_probabilities", ROW_SHAPE)

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
    "segment_sum_of_exponentials": ((DATA, IDS), (OUTPUT,)),
    "segment_sum_backward": ((D_OUTPUT, IDS), (D_DATA,)),
    "segment_mean": ((DATA, IDS), (OUTPUT, COUNT)),
    "segment_mean_backward": ((D_OUTPUT, COUNT, IDS), (D_DATA,)),
    "segment_prod": ((DATA, IDS), (OUTPUT,)),
    "segment_prod_with_residual": ((DATA, IDS), (OUTPUT, MANTISSA, PACKED)),
    "segment_prod_backward": ((D_OUTPUT, MANTISSA, PACKED, DATA, IDS), (D_DATA,)),
    "segment_order": ((IDS,), (ORDER, Array("sorted_ids", (BATCH, ROWS), "int32"))),
    "segment_softmax": ((Array("logits", ROW_SHAPE), IDS), (PROBABILITIES,)),
    "segment_softmax_backward": ((PROBABILITIES, D_PROBABILITIES, IDS), (Array("d_logits", ROW_SHAPE),)),
}


def good_call(target: str, shared: tuple[int, ...] = (), batch: int = BATCH) -> Call:
    """A call that fits, in which the operands at these positions are shared by the batch."""
    operands, results = (
        [dataclasses.replace(x, shape=(batch, *x.shape[1:])) for x in arrays] for arrays in TARGETS[target]
    )
    params = {"num_segments": SEGMENTS, "indices_are_sorted": False, "deterministic": False, "first_wins": False}
    taken = {"num_segments", *OPS[target].attributes}
    if target != "segment_order":
        taken.add("indices_are_sorted")
    return handlers.good_call(
        target,
        [x.shared() if i in shared else x for i, x in enumerate(operands)],
        results,
        {name: value for name, value in params.items() if name in taken},
    )
