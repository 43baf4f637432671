"""The native handlers of causal_conv1d check every argument: an invalid call gives an error, never a crash."""

from __future__ import annotations

import dataclasses

import pytest
from causal_conv1d.reference import LAYOUTS, SIZES, TARGETS, Sizes, good_call, named_arrays
from support.handlers import assert_refused

each_target = pytest.mark.parametrize("target", TARGETS)
each_layout = pytest.mark.parametrize("channels_last", LAYOUTS, ids=["channels first", "channels last"])


@each_layout
@each_target
def test_bad_widths_are_refused(target: str, channels_last: bool) -> None:
    """A filter of 0 or 9 taps is refused, even if all other arrays fit it."""
    for width in (0, 9):
        good = good_call(target, channels_last, optional=("bias", "same_sequence"), sizes=Sizes(state_length=9))
        arrays = named_arrays(Sizes(width=width, state_length=9), channels_last, "float32")
        operands, results = (tuple(arrays[x.name] for x in kind) for kind in (good.operands, good.results))
        assert_refused(dataclasses.replace(good, operands=operands, results=results), f"width {width}", "weight")


@pytest.mark.parametrize(
    ("target", "name"),
    [(target, name) for target in TARGETS for name in TARGETS[target].optional_operands if name.endswith("_state")],
)
def test_empty_states_are_refused(target: str, name: str) -> None:
    """Callers must omit the empty states of a filter of one tap."""
    assert_refused(good_call(target, optional=[name], sizes=Sizes(width=1)), "an empty state", name)


@each_layout
def test_short_states_are_refused(channels_last: bool) -> None:
    """The state of an update must hold at least the W - 1 inputs that the filter reads."""
    for length in range(SIZES.width - 1):
        call = good_call("causal_conv1d_update", channels_last, sizes=Sizes(state_length=length))
        assert_refused(call, f"state of length {length}", "state")
    good_call("causal_conv1d_update", channels_last, sizes=Sizes(state_length=SIZES.width - 1)).run()
