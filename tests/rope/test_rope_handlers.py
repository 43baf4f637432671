"""The native handlers of rotations check their attributes: an invalid call gives an error, never a crash."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from support.handlers import Call, assert_refused
from support.recorded import direct_calls

from jax_baracuda._core.op import OPS

each_target = pytest.mark.parametrize("target", sorted(target for target in OPS if target.startswith("rope")))


def good_call(target: str) -> tuple[Call, int, int]:
    """A valid call with positions, its rotary_dim and the number of features."""
    calls = (call for call, _ in direct_calls(target))
    call = next(call for call in calls if "positions" in {x.name for x in call.operands})
    features = next(x for x in call.operands if x.name in ("x", "q")).shape[-1]
    return call, call.attributes["rotary_dim"], features


def with_attributes(call: Call, **changes: Any) -> Call:
    return dataclasses.replace(call, attributes={**call.attributes, **changes})


@each_target
def test_bad_rotary_dims_are_refused(target: str) -> None:
    """A rotary_dim is refused if it is odd, not positive, larger than the features, or does not fit the frequencies."""
    good, own, features = good_call(target)
    for rotary_dim in (-(2**63), -2, 0, 1, 3, features + 2, 2**32 + own, 2**62):
        bad = with_attributes(good, rotary_dim=np.int64(rotary_dim))
        assert_refused(bad, f"rotary_dim {rotary_dim}", "rotary_dim")
    for rotary_dim in {*range(2, features + 2, 2)} - {own}:
        bad = with_attributes(good, rotary_dim=np.int64(rotary_dim))
        assert_refused(bad, f"rotary_dim {rotary_dim}", "frequencies")


@each_target
def test_bad_sections_and_offsets_are_refused(target: str) -> None:
    """Sections must be few, not negative, and sum to the number of pairs. Rotated features lie within the features."""
    good, rotary_dim, features = good_call(target)
    pairs = rotary_dim // 2
    for offset in (-1, features - rotary_dim + 1, 2**62, 2**63 - rotary_dim):
        assert_refused(with_attributes(good, rotary_offset=np.int64(offset)), f"offset {offset}", "rotary_offset")
    for sections in ([1, pairs], [-1, pairs + 1], [1] * pairs + [0] * (5 - pairs), [2**62, 2**62]):
        bad = with_attributes(good, sections=np.array(sections, np.int64))
        assert_refused(bad, f"sections {sections}", "sections")
    bad = with_attributes(good, sections=np.array([1, pairs - 1], np.int64))
    assert_refused(bad, "positions without rows for sections", "positions")
