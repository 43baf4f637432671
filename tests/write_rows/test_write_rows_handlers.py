"""The native handlers of write_rows and rope_write refuse shapes, dtypes and attributes that fit no valid call."""

from __future__ import annotations

import dataclasses

import numpy as np
from support import handlers
from support.handlers import Array, Call, with_dtypes, with_other_shapes
from support.recorded import direct_calls

NAMES = r"(dest|rows|result|scale) \d|slots|layer|scales|got \d+|q|q_out|frequencies|positions|axis"


def good_call(target: str = "write_rows") -> Call:
    """A valid call with a layer."""
    return next(call for call, _ in direct_calls(target) if call.attributes["has_layer"])


def refused(call: Call, what: str) -> None:
    handlers.assert_refused(call, what, NAMES)


def test_other_shapes_are_refused() -> None:
    def others(array: Array) -> dict[str, Array]:
        shapes = with_other_shapes(array)
        return {how: x for how, x in shapes.items() if array.name != "dest_0" or "dimension" not in how}

    for target in ("write_rows", "rope_write"):
        for how, array, call in good_call(target).with_other(others):
            refused(call, f"{array.name} {how}")


def test_other_dtypes_are_refused() -> None:
    def others(array: Array) -> dict[str, Array]:
        if array.name.startswith("rows"):
            return with_dtypes(array, ("int32", "float64", "complex64", "int4"))
        if array.name.startswith("dest"):
            return with_dtypes(array, ("int4", "int32"))
        return with_dtypes(array, ("float16", "int8", "uint32", "bool"))

    for dtype, array, call in good_call().with_other(others):
        refused(call, f"{array.name} {dtype}")


def test_shared_pools_are_refused() -> None:
    good = good_call()
    for name in ("dest_0", "result_0"):
        operands, results = (
            tuple(x.shared() if x.name == name else x for x in arrays) for arrays in (good.operands, good.results)
        )
        refused(dataclasses.replace(good, operands=operands, results=results), name)


def test_bad_attributes_are_refused() -> None:
    good = good_call()
    for changes in (
        {"axis": np.int64(-1)}, {"axis": np.int64(3)}, {"axis": np.int64(2**62)}, {"has_layer": False},
        {"scales": np.array([0, 0], np.int64)}, {"scales": np.array([3], np.int64)},
        {"scales": np.array([-1], np.int64)}, {"scales": np.array([1], np.int64)}, {"scales": np.array([2], np.int64)},
    ):  # fmt: skip
        refused(dataclasses.replace(good, attributes={**good.attributes, **changes}), str(changes))
