"""The native handler of rope_write refuses dtypes and attributes that fit no valid call."""

from __future__ import annotations

import dataclasses

import numpy as np
from support import handlers
from support.handlers import Array, Call, with_dtypes

BATCH, LAYERS, SLOTS, ROWS, ROTARY_DIM = 3, 2, 7, 5, 8
HEADS, FEATURES, VALUES = 4, 12, (6, 10)
NAMES = r"(dest|rows|result|scale) \d|slots|layer|scales|got \d+|q|q_out|frequencies|positions|axis"


def good_call() -> Call:
    """A valid call with two sections, and a scale for each head of values."""
    # Sizes differ, so that no dimension passes for another.
    caches = [(BATCH, LAYERS, SLOTS, *shape) for shape in ((2, FEATURES), VALUES)]
    operands = [
        *(Array(f"dest {i}", shape) for i, shape in enumerate(caches)),
        Array("rows 0", (BATCH, ROWS, 2, FEATURES)),
        Array("rows 1", (BATCH, ROWS, *VALUES)),
        Array("slots", (BATCH, ROWS), "int32"),
        Array("layer", (BATCH,), "int32"),
        Array("scale 1", (BATCH, VALUES[0])),
        Array("q", (BATCH, ROWS, HEADS, FEATURES)),
        Array("frequencies", (BATCH, 2, ROTARY_DIM // 2)),
        Array("positions", (BATCH, 2, ROWS), "int32"),
    ]
    results = [Array(f"result {i}", shape) for i, shape in enumerate(caches)]
    results.append(Array("q_out", (BATCH, ROWS, HEADS, FEATURES)))
    params = {
        **{"ranks": (3, 3), "axis": 0, "has_layer": True, "has_unique_slots": False, "scales": (0, 2)},
        **{"interleaved": True, "rotary_dim": ROTARY_DIM, "rotary_offset": 2, "scale": np.float64(0.75)},
        **{"sections": (1, 3), "sections_interleaved": False},
    }
    return handlers.good_call("rope_write", operands, results, params)


def refused(call: Call, what: str) -> None:
    handlers.assert_refused(call, what, NAMES)


def test_other_dtypes_are_refused() -> None:
    good = good_call()

    def others(array: Array) -> dict[str, Array]:
        if array.name.startswith(("rows", "q")):
            return with_dtypes(array, ("int32", "float64", "bfloat16", "complex64"))
        if array.name.startswith(("dest", "result")):
            return with_dtypes(array, ("int4", "int32", "float64"))
        return with_dtypes(array, ("float16", "int8", "uint32", "bool"))

    for dtype, array, call in good.with_other(others):
        refused(call, f"{array.name} {dtype}")


def test_bad_attributes_are_refused() -> None:
    good = good_call()
    for changes in (
        {"axis": np.int64(-1)}, {"axis": np.int64(2)}, {"axis": np.int64(2**62)}, {"has_layer": False},
        {"scales": np.array([0], np.int64)}, {"scales": np.array([0, 3], np.int64)},
        {"scales": np.array([2, 2], np.int64)},
    ):  # fmt: skip
        refused(dataclasses.replace(good, attributes={**good.attributes, **changes}), str(changes))
    for changes in (
        {"rotary_dim": np.int64(3)}, {"rotary_dim": np.int64(-8)}, {"rotary_dim": np.int64(14)},
        {"rotary_offset": np.int64(-1)}, {"rotary_offset": np.int64(5)}, {"rotary_offset": np.int64(2**62)},
        {"sections": np.array([1, 2], np.int64)}, {"sections": np.array([-1, 5], np.int64)},
        {"sections": np.array([1, 1, 1, 1, 0], np.int64)}, {"sections": np.array([2**62, 2**62], np.int64)},
    ):  # fmt: skip
        [name] = changes
        call = dataclasses.replace(good, attributes={**good.attributes, **changes})
        handlers.assert_refused(call, str(changes), name)
