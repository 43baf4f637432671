"""The native handlers of write_rows and rope_write check their attributes and scales."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from support.handlers import Array, Call, assert_refused, with_dtypes, with_other_shapes
from support.recorded import direct_calls

NAMES = r"(dest|rows|result|scale) \d|slots|layer|scales|got \d+|q|q_out|frequencies|positions|axis"

each_target = pytest.mark.parametrize("target", ["write_rows", "rope_write"])


def good_call(target: str) -> Call:
    """A valid call with a layer, and a scale for each head of the last rows."""
    good = next(call for call, _ in direct_calls(target) if call.attributes["has_layer"])
    last = max(i for i, x in enumerate(good.operands) if x.name.startswith("rows"))
    scale = Array("scale", (good.operands[0].shape[0], good.operands[last].shape[2]))
    after = 1 + [x.name for x in good.operands].index("layer")
    kinds = np.zeros(len(good.attributes["scales"]), np.int64)
    kinds[-1] = 2
    operands = (*good.operands[:after], scale, *good.operands[after:])
    return dataclasses.replace(good, operands=operands, attributes={**good.attributes, "scales": kinds})


@each_target
def test_other_scales_are_refused(target: str) -> None:
    def others(array: Array) -> dict[str, Array]:
        if array.name != "scale":
            return {}
        shapes = {how: x for how, x in with_other_shapes(array).items() if x.shape[:1] != (1,)}  # a batch may share it
        return with_dtypes(array, ("float16", "float64", "int8", "uint32", "bool")) | shapes

    good = good_call(target)
    good.run()
    for how, _, call in good.with_other(others):
        assert_refused(call, f"scale {how}", NAMES)


@each_target
def test_bad_attributes_are_refused(target: str) -> None:
    good = good_call(target)
    num_scales = len(good.attributes["scales"])
    all_scales = [
        [0] * (num_scales + 1),
        [0] * (num_scales - 1),
        *([0] * (num_scales - 1) + [of] for of in (0, 1, 3, -1)),
    ]
    for changes in (
        *({"axis": np.int64(axis)} for axis in (-1, 3, 2**62)),
        *({"scales": np.array(scales, np.int64)} for scales in all_scales),
        {"has_layer": False},
    ):
        call = dataclasses.replace(good, attributes={**good.attributes, **changes})
        assert_refused(call, str(changes), NAMES)
