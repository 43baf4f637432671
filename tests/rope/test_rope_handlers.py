"""The native handlers of rope check every argument: an invalid call gives an error, never a crash."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from rope.reference import LAYOUTS, SIZES, TARGETS, Rotation, Sizes, good_call, make_features
from support import cases
from support.cases import FLOATING
from support.handlers import Call, assert_refused, with_dtypes

WITHOUT_KERNEL = ("int8", "uint8", "int32", "bool", "complex64")


each_target = pytest.mark.parametrize("target", TARGETS)
each_layout = pytest.mark.parametrize("layout", LAYOUTS)
each_batch = pytest.mark.parametrize("batch", [5, None], ids=["batched", "not batched"])
each_pairing = pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "half-split"])


def random_operands(rng: np.random.Generator, call: Call) -> dict[str, np.ndarray]:
    operands = {}
    for x in call.operands:
        if x.name == "positions":
            operands[x.name] = rng.integers(-(2**20), 2**20, x.shape).astype(x.dtype)
        elif x.name == "frequencies":
            frequencies = rng.uniform(0, 1, x.shape)
            # The second row holds the bits that the first row lacks.
            frequencies[..., 1, :] *= 0 if x.dtype == "float64" else 2.0**-26
            operands[x.name] = frequencies.astype(x.dtype)
        else:
            operands[x.name] = make_features(rng, x.shape, x.dtype)
    return operands


def check(call: Call, operands: dict[str, np.ndarray]) -> None:
    """Asserts that the results of the call are right."""
    attributes, results = call.attributes, call.results_of(operands)
    is_batched = attributes["num_batch_dims"] == 1
    rotated, names = TARGETS[call.target]
    for name, result_name in zip(rotated, names, strict=True):
        result = results[result_name] if is_batched else results[result_name][None]
        given = {key: x if is_batched else x[None] for key, x in operands.items()}
        for i, of_one in enumerate(result):
            x, frequencies, *positions = (
                given[key][i % len(given[key])] for key in (name, "frequencies", "positions") if key in given
            )
            rotation = Rotation(
                positions[0] if positions else None,
                interleaved=attributes["interleaved"],
                layout="BHSD" if attributes["heads_first"] else "BSHD",
                rotary_dim=int(attributes["rotary_dim"]),
                inv_freq=frequencies.astype(np.longdouble).sum(axis=0),
                scale=float(attributes["scale"]),
            )
            rotation.of(x, -1 if call.target.endswith("backward") else 1).check(of_one, f"{call} [{i}]")


# ----------------------------------------------------------------------------------------------------------------------
# Valid calls.


@each_batch
@each_layout
@each_pairing
@each_target
def test_valid_calls_are_right(
    rng: np.random.Generator, target: str, interleaved: bool, layout: str, batch: int | None
) -> None:
    """Every result is written in full, without positions and with positions of each dtype."""
    sizes = dataclasses.replace(SIZES, batch=batch)
    for dtype, positions_dtype in itertools.product(FLOATING, ("int32", "int64", None)):
        call = good_call(
            target,
            layout,
            interleaved=interleaved,
            has_positions=positions_dtype is not None,
            sizes=sizes,
            dtype=dtype,
            positions_dtype=positions_dtype or "int32",
        )
        check(call, random_operands(rng, call))


@each_layout
@each_pairing
@pytest.mark.parametrize("target", ["rope", "rope_qk_backward"])
def test_many_rows(rng: np.random.Generator, target: str, interleaved: bool, layout: str) -> None:
    """The GPU's strategy for many rows is right: in vectors and in single pairs, with every kind of positions."""
    length = 3011 if cases.PLATFORM == "cuda" else 301
    for i, dtype in enumerate(FLOATING):
        features, rotary_dim = ((16, 8), (14, 10))[i % 2]
        sizes = Sizes(2, examples=3, heads=(8, 2), length=length, features=features, rotary_dim=rotary_dim)
        call = good_call(
            target,
            layout,
            interleaved=interleaved,
            has_positions=i > 0,
            shared=((), ("positions of examples",), ("frequencies", "positions"))[i % 3],
            sizes=sizes,
            dtype=dtype,
            positions_dtype=("int32", "int64")[i % 2],
        )
        check(call, random_operands(rng, call))


@each_layout
@each_target
def test_empty_arrays(rng: np.random.Generator, target: str, layout: str) -> None:
    """Empty arrays are accepted. If only one of two arrays is empty, the other one is rotated."""
    for empty in (
        *({name: 0} for name in ("batch", "examples", "length")),
        *({"heads": heads} for heads in ((0, 2), (6, 0), (0, 0))),
    ):
        for shared in ((), ("frequencies", "positions"), ("positions of examples",)):
            call = good_call(target, layout, sizes=dataclasses.replace(SIZES, **empty), shared=shared)
            check(call, random_operands(rng, call))


# ----------------------------------------------------------------------------------------------------------------------
# Invalid calls.


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@each_target
def test_bad_dtypes_are_refused(target: str, dtype: str) -> None:
    """Each operand and result is refused with a dtype that does not fit the others, or that has no kernel."""
    good = good_call(target, dtype=dtype)
    for other, array, call in good.with_other(lambda array: with_dtypes(array, (*FLOATING, "int8", "uint32"))):
        names = () if array == good.results[0] else (array.name,)
        assert_refused(call, f"{array.name} {other} for {array.dtype}", *names)


@each_target
@pytest.mark.parametrize("dtype", WITHOUT_KERNEL)
def test_dtypes_without_kernels_are_refused(target: str, dtype: str) -> None:
    assert_refused(good_call(target, dtype=dtype), f"everything {dtype}", TARGETS[target][1][0])


@each_target
@pytest.mark.parametrize("rotary_dim", [-(2**63), -2, 0, 1, 3, 14, 2**32 + 8, 2**62])
def test_bad_rotary_dims_are_refused(target: str, rotary_dim: int) -> None:
    """A rotary_dim is refused if it is odd, not positive, or larger than the number of features."""
    good = good_call(target)
    call = dataclasses.replace(good, attributes={**good.attributes, "rotary_dim": np.int64(rotary_dim)})
    assert_refused(call, f"rotary_dim {rotary_dim}", "rotary_dim")


@each_target
def test_other_rotary_dims_are_refused(target: str) -> None:
    """A rotary_dim is refused if it does not fit the frequencies."""
    good = good_call(target)
    for rotary_dim in (2, 6, 10, 12):
        call = dataclasses.replace(good, attributes={**good.attributes, "rotary_dim": np.int64(rotary_dim)})
        assert_refused(call, f"rotary_dim {rotary_dim}", "frequencies")
