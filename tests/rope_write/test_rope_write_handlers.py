"""The native handler of rope_write: batches, and an error for every invalid call."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from support import cases, handlers
from support.handlers import Array, Call, with_dtypes, with_other_shapes
from write_rows.reference import PER_HEAD, random_slots

import jax_baracuda as jb

BATCH, LAYERS, SLOTS, ROWS, ROTARY_DIM = 3, 2, 7, 5, 8
HEADS, FEATURES, VALUES = 4, 12, (6, 10)
NAMES = r"(dest|rows|result|scale) \d|slots|layer|scales|got \d+|q|q_out|frequencies|positions|axis"


def good_call(dtype: str = "float32", cache_dtype: str = "float32", scales: tuple[int, int] = (0, PER_HEAD)) -> Call:
    """A valid call with two sections, unless there is no kernel for the dtype."""
    # Sizes differ, so that no dimension passes for another.
    wide = cases.accumulator(dtype).name if dtype in cases.FLOATING else "float32"
    shapes = {"dest 0": (2, FEATURES), "dest 1": VALUES}
    caches = [(BATCH, LAYERS, SLOTS, *shape) for shape in shapes.values()]
    operands = [
        *(Array(name, shape, cache_dtype) for name, shape in zip(shapes, caches, strict=True)),
        Array("rows 0", (BATCH, ROWS, 2, FEATURES), dtype),
        Array("rows 1", (BATCH, ROWS, *VALUES), dtype),
        Array("slots", (BATCH, ROWS), "int32"),
        Array("layer", (BATCH,), "int32"),
        *(
            Array(f"scale {i}", (BATCH, shape[0]), "float32")
            for i, (shape, kind) in enumerate(zip(shapes.values(), scales, strict=True))
            if kind == PER_HEAD
        ),
        Array("q", (BATCH, ROWS, HEADS, FEATURES), dtype),
        Array("frequencies", (BATCH, 2, ROTARY_DIM // 2), wide),
        Array("positions", (BATCH, 2, ROWS), "int32"),
    ]
    results = [Array(f"result {i}", shape, cache_dtype) for i, shape in enumerate(caches)]
    results.append(Array("q_out", (BATCH, ROWS, HEADS, FEATURES), dtype))
    params = {
        "ranks": (3, 3),
        "axis": 0,
        "has_layer": True,
        "has_unique_slots": False,
        "scales": scales,
        "interleaved": True,
        "rotary_dim": ROTARY_DIM,
        "rotary_offset": 2,
        "sections": (1, 3),
        "sections_interleaved": False,
        "scale": np.float64(0.75),
    }
    return handlers.good_call("rope_write", operands, results, params)


def random_operands(rng: np.random.Generator, call: Call) -> dict[str, np.ndarray]:
    drawn: dict[str, np.ndarray] = {}
    for x in call.operands:
        if x.name == "slots":
            drawn[x.name] = random_slots(rng, int(np.prod(x.shape)), SLOTS).reshape(x.shape)
        elif x.name == "layer":
            drawn[x.name] = rng.integers(-1, 3, x.shape).astype(np.int32)
        elif x.name == "positions":
            drawn[x.name] = rng.integers(0, 1000, x.shape).astype(np.int32)
        else:
            drawn[x.name] = rng.uniform(0.1, 2, x.shape).astype(x.aval().dtype)
    return drawn


@pytest.mark.parametrize(
    "shared", [(), ("rows 0", "q"), ("slots", "layer"), ("positions", "frequencies"), ("scale 1",)]
)
def test_shared_operands(rng: np.random.Generator, shared: tuple[str, ...]) -> None:
    """A batch may share every operand that is not written. Each element is a call of its own."""
    good = good_call("bfloat16", "float8_e4m3fn")
    call = dataclasses.replace(good, operands=tuple(x.shared() if x.name in shared else x for x in good.operands))
    operands = random_operands(rng, call)
    results = call.results_of(operands)
    for i in range(BATCH):
        own: dict[str, Any] = {name: x[i if len(x) > 1 else 0] for name, x in operands.items()}
        q, *caches = jb.rope_write(
            *(own[name] for name in ("q", "rows 0", "rows 1", "dest 0", "dest 1", "positions", "slots")),
            layer=own["layer"],
            v_scale=own["scale 1"],
            rotary_dim=ROTARY_DIM,
            rotary_offset=2,
            sections=(1, 3),
            inv_freq=own["frequencies"],
            scale=0.75,
        )
        for name, expected in {"q_out": q, "result 0": caches[0], "result 1": caches[1]}.items():
            cases.assert_same_bits(results[name][i], np.asarray(expected), name)


# ----------------------------------------------------------------------------------------------------------------------
# Invalid calls.


def refused(call: Call, what: str) -> None:
    handlers.assert_refused(call, what, NAMES)


def test_other_shapes_are_refused() -> None:
    good = good_call()

    def others(array: Array) -> dict[str, Array]:
        return {
            how: x for how, x in with_other_shapes(array).items() if array.name != "dest 0" or "dimension" not in how
        }

    for how, array, call in good.with_other(others):
        refused(call, f"{array.name} {how}")


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
    handlers.assert_other_attributes_refused(good)
