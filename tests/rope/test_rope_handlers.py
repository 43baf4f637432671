"""The native handlers of rope check every argument: an invalid call gives an error, never a crash."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from support import cases, handlers
from support.cases import FLOATING
from support.handlers import Array, Call, assert_refused, with_dtypes

TARGETS = {
    "rope": (("x",), ("y",)),
    "rope_backward": (("x",), ("y",)),
    "rope_qk": (("q", "k"), ("q_out", "k_out")),
    "rope_qk_backward": (("q", "k"), ("q_out", "k_out")),
}
"""The rotated operands and the results of each target."""
ROTARY_DIM = 8

each_target = pytest.mark.parametrize("target", TARGETS)


def good_call(target: str, dtype: str = "float32", rotary_dim: int = ROTARY_DIM) -> Call:
    """A valid call, unless there is no kernel for the dtype, or the `rotary_dim` does not fit the frequencies."""
    # Sizes differ, so that no dimension passes for another.
    shapes = (5, 3, 6, 7, 12), (5, 3, 2, 7, 12)
    rotated, results = ([Array(*x, dtype) for x in zip(names, shapes, strict=False)] for names in TARGETS[target])
    of_angles = cases.accumulator(dtype).name if dtype in FLOATING else "float32"
    angles = Array("frequencies", (5, 2, ROTARY_DIM // 2), of_angles), Array("positions", (5, 3, 7), "int32")
    params = {
        "heads_first": True,
        "interleaved": True,
        "rotary_dim": ROTARY_DIM,
        "rotary_offset": 0,
        "sections": (),
        "sections_interleaved": False,
        "scale": np.float64(1.25),
        "has_positions": True,
    }
    call = handlers.good_call(target, [*rotated, *angles], results, params)
    return dataclasses.replace(call, attributes={**call.attributes, "rotary_dim": np.int64(rotary_dim)})


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@each_target
def test_bad_dtypes_are_refused(target: str, dtype: str) -> None:
    """Each operand and result is refused with a dtype that does not fit the others, or that has no kernel."""
    good = good_call(target, dtype)
    good.run()
    for other, array, call in good.with_other(lambda array: with_dtypes(array, (*FLOATING, "int8", "uint32"))):
        names = () if array == good.results[0] else (array.name,)
        assert_refused(call, f"{array.name} {other} for {array.dtype}", *names)
    for other in ("int8", "uint8", "int32", "bool", "complex64"):
        assert_refused(good_call(target, other), f"everything {other}", TARGETS[target][1][0])


@each_target
def test_bad_rotary_dims_are_refused(target: str) -> None:
    """A rotary_dim is refused if it is odd, not positive, larger than the features, or does not fit the frequencies."""
    for rotary_dim in (-(2**63), -2, 0, 1, 3, 14, 2**32 + 8, 2**62):
        assert_refused(good_call(target, rotary_dim=rotary_dim), f"rotary_dim {rotary_dim}", "rotary_dim")
    for rotary_dim in (2, 6, 10, 12):
        assert_refused(good_call(target, rotary_dim=rotary_dim), f"rotary_dim {rotary_dim}", "frequencies")


@each_target
def test_bad_sections_and_offsets_are_refused(target: str) -> None:
    """Sections must be few, not negative, and sum to the number of pairs. Rotated features lie within the features."""
    good = good_call(target)
    for changes in (
        {"rotary_offset": np.int64(-1)}, {"rotary_offset": np.int64(5)}, {"rotary_offset": np.int64(2**63 - 8)},
        {"sections": np.array([1, 2], np.int64)}, {"sections": np.array([-1, 5], np.int64)},
        {"sections": np.array([1, 1, 1, 1, 0], np.int64)}, {"sections": np.array([2**62, 2**62], np.int64)},
    ):  # fmt: skip
        [name] = changes
        call = dataclasses.replace(good, attributes={**good.attributes, **changes})
        assert_refused(call, str(changes), name)
    # Positions have no rows for sections.
    call = dataclasses.replace(good, attributes={**good.attributes, "sections": np.array([1, 3], np.int64)})
    assert_refused(call, "positions without sections", "positions")
