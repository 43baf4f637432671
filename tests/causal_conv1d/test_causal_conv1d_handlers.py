"""The native handlers of causal_conv1d check every argument: an invalid call gives an error, never a crash."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import pytest
from causal_conv1d.reference import LAYOUTS
from support.handlers import Array, Call, assert_refused, recorded_call

from jax_baracuda._core.call import OpCall
from jax_baracuda._core.op import OPS

TARGETS = ("causal_conv1d", "causal_conv1d_backward", "causal_conv1d_update")
SIZES = {"batch": 3, "example": 2, "channel": 6, "time": 7, "tap": 5}
"""All of them different, so that no dimension passes for another."""
STATE_LENGTH = 9
"""The length of the updated state."""

each_target = pytest.mark.parametrize("target", TARGETS)
each_layout = pytest.mark.parametrize("channels_last", LAYOUTS, ids=["channels first", "channels last"])


def good_call(
    target: str,
    channels_last: bool = False,
    optional: Collection[str] = ("bias",),
    tap: int = SIZES["tap"],
    **sizes: int,
) -> Call:
    """A valid call, with these optional operands."""
    op, state = OPS[target], STATE_LENGTH if target.endswith("update") else tap - 1
    sizes = {**SIZES, "state": state, "tap": tap, **sizes}
    flags = {flag: name in optional for name, flag in op.optional.items()}
    params = {**flags, "channels_last": channels_last, "silu": True, "num_batch_dims": 1}
    operands = [
        Array(name, tuple(sizes[dim] for dim in ("batch", *dims)), "uint8" if name == "same_sequence" else "float32")
        for name, dims in op.operand_dims(params).items()
    ]
    return recorded_call(OpCall(op, [x.aval() for x in operands], params))


@each_layout
@each_target
def test_bad_widths_are_refused(target: str, channels_last: bool) -> None:
    """A filter of 0 or 9 taps is refused, even if all other arrays fit it."""
    good = good_call(target, channels_last, ("bias", "same_sequence"))
    good.run()
    for width in (0, 9):

        def with_width(x: Array, width: int = width) -> Array:
            return dataclasses.replace(x, shape=tuple(width if size == SIZES["tap"] else size for size in x.shape))

        operands, results = (tuple(map(with_width, kind)) for kind in (good.operands, good.results))
        assert_refused(dataclasses.replace(good, operands=operands, results=results), f"width {width}", "weight")


@pytest.mark.parametrize(
    ("target", "name"),
    [(target, name) for target in TARGETS for name in OPS[target].optional if name.endswith("_state")],
)
def test_empty_states_are_refused(target: str, name: str) -> None:
    """Callers must omit the empty states of a filter of one tap."""
    assert_refused(good_call(target, optional=[name], tap=1), "an empty state", name)


@each_layout
def test_short_states_are_refused(channels_last: bool) -> None:
    """The state of an update must hold at least the W - 1 inputs that the filter reads."""
    for length in range(SIZES["tap"]):
        call = good_call("causal_conv1d_update", channels_last, state=length)
        if length < SIZES["tap"] - 1:
            assert_refused(call, f"state of length {length}", "state")
        else:
            call.run()
