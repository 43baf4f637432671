"""The native handler of write_rows: all conversions, all sizes, and an error for every invalid call."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from support import cases, handlers
from support.handlers import Array, Call, with_dtypes, with_other_shapes
from write_rows.reference import (
    ALL_DTYPES,
    BATCH,
    NO_SCALE,
    ONE_SCALE,
    PER_HEAD,
    POOL_DTYPES,
    ROW_DTYPES,
    assert_same_numbers,
    good_call,
    random_numbers,
    random_slots,
    reference_write,
)

each_batched = pytest.mark.parametrize("batched", [False, True], ids=["no batch", "batch"])
NAMES = r"(dest|rows|result|scale) \d|slots|layer|scales|got \d+"


def random_operands(rng: np.random.Generator, call: Call) -> dict[str, np.ndarray]:
    operands = {}
    attributes = call.attributes
    slot_axis = int(attributes["num_batch_dims"]) + int(attributes["has_layer"]) + int(attributes["axis"])
    num_slots = call.operands[0].shape[slot_axis]
    for x in call.operands:
        if x.name == "slots":
            operands[x.name] = random_slots(rng, int(np.prod(x.shape)), num_slots).reshape(x.shape)
        elif x.name == "layer":
            operands[x.name] = rng.integers(-1, 3, x.shape).astype(np.int32)
        elif x.name.startswith("scale"):
            operands[x.name] = rng.uniform(0.1, 3, x.shape).astype(np.float32)
        elif cases.is_floating(x.dtype):
            operands[x.name] = random_numbers(rng, x.shape, x.dtype)
        else:
            operands[x.name] = cases.random_bits(rng, x.shape, x.dtype)
    return operands


def check(call: Call, operands: dict[str, np.ndarray]) -> None:
    """Every result equals the reference, element by element of the batch."""
    is_batched, axis = call.attributes["num_batch_dims"] == 1, int(call.attributes["axis"])
    results = call.results_of(operands)
    for i, result in enumerate(call.results):
        own = {
            name: operands.get(f"{name} {i}", operands.get(name))
            for name in ("dest", "rows", "slots", "layer", "scale")
        }
        batch = result.shape[0] if is_batched else 1
        expected = []
        for b in range(batch):
            of_one: dict[str, Any] = {
                name: x if x is None or not is_batched else x[b if len(x) > 1 else 0] for name, x in own.items()
            }
            layer = None if of_one["layer"] is None else int(of_one["layer"])
            expected.append(
                reference_write(of_one["dest"], of_one["rows"], of_one["slots"], axis, layer, of_one["scale"])
            )
        if batch:
            assert_same_numbers(results[result.name], np.stack(expected) if is_batched else expected[0], result.name)


@each_batched
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("has_layer", [False, True], ids=["no layers", "layers"])
def test_places_of_slots(rng: np.random.Generator, batched: bool, has_layer: bool, axis: int) -> None:
    """Slots on any axis, with duplicates and out of range, with rows of words and of single numbers."""
    for shapes in (((4, 3), (4, 16)), ((2, 8), (2, 8)), ((8, 2), (8, 32))):
        for scales in ((NO_SCALE, PER_HEAD), (ONE_SCALE, NO_SCALE)):
            call = good_call(batched, axis=axis, has_layer=has_layer, shapes=shapes, scales=scales)
            operands = random_operands(rng, call)
            operands["slots"] = rng.integers(-2, 9, operands["slots"].shape).astype(np.int32)
            check(call, operands)


@pytest.mark.parametrize("pool", POOL_DTYPES)
@pytest.mark.parametrize("dtype", ROW_DTYPES)
def test_conversions(rng: np.random.Generator, dtype: str, pool: str) -> None:
    """Ties, subnormal numbers, overflow and NaN are rounded as by NumPy, in vectors and alone."""
    for features in (16, 24, 5):
        for scale in (NO_SCALE, ONE_SCALE, PER_HEAD):
            call = good_call(False, dtypes=(pool,), row_dtypes=(dtype,), shapes=((3, features),), scales=(scale,),
                             rows=40, slots=50, has_layer=False)  # fmt: skip
            operands = random_operands(rng, call)
            operands["slots"] = rng.permutation(50)[:40].astype(np.int32)
            check(call, operands)


def test_copied_dtypes(rng: np.random.Generator) -> None:
    """Bits of every dtype are copied, in words of every width."""
    for dtype in ALL_DTYPES:
        for features in (1, 2, 3, 4, 16):
            call = good_call(False, dtypes=(dtype,), row_dtypes=(dtype,), shapes=((2, features),), scales=(NO_SCALE,),
                             axis=features % 2, has_layer=False, rows=9)  # fmt: skip
            operands = {x.name: cases.random_bits(rng, x.shape, x.dtype) for x in call.operands}
            operands["slots"] = rng.integers(-1, 8, 9).astype(np.int32)
            result = call.results_of(operands)["result 0"]
            expected = reference_write(operands["dest 0"], operands["rows 0"], operands["slots"], features % 2)
            cases.assert_same_memory(result, expected, f"{dtype} {features}")


@pytest.mark.parametrize("rows", [1, 2, 31, 33, 255, 257, 2047, 2049, 5000])
@pytest.mark.parametrize("features", [1, 16, 4099])
def test_numbers_of_rows(rng: np.random.Generator, rows: int, features: int) -> None:
    """The last row of a slot wins, however many rows lie between, and with how many slots."""
    if rows * features > 10**6:
        features = 64
    for slots in (1, 3, 1500):
        call = good_call(False, dtypes=("int32", "int8"), row_dtypes=("int32", "int8"), shapes=((1, features), (2, 3)),
                         scales=(NO_SCALE, NO_SCALE), has_layer=False, rows=rows, slots=slots)  # fmt: skip
        operands = random_operands(rng, call)
        operands["slots"] = rng.integers(-1, slots, rows).astype(np.int32)
        check(call, operands)


def test_slots_with_one_hash(rng: np.random.Generator) -> None:
    """Slots that are multiples of a large power of two share a bucket of a hash table."""
    call = good_call(False, dtypes=("int8",), row_dtypes=("int8",), shapes=((1, 1),), scales=(NO_SCALE,),
                     has_layer=False, rows=700, slots=1 << 24)  # fmt: skip
    operands = random_operands(rng, call)
    operands["slots"] = (rng.integers(0, 16, 700) << 20).astype(np.int32)
    check(call, operands)


def test_unique_slots(rng: np.random.Generator) -> None:
    call = good_call(True, has_unique_slots=True, rows=6)
    operands = random_operands(rng, call)
    operands["slots"] = np.stack([rng.permutation(np.arange(-1, 8))[:6] for _ in range(BATCH)]).astype(np.int32)
    check(call, operands)


def test_more_pools_than_fit_in_a_launch(rng: np.random.Generator) -> None:
    num = 11
    call = good_call(dtypes=("float32",) * num, row_dtypes=("float32", "float16") * 5 + ("float32",),
                     shapes=tuple((2, n) for n in range(1, num + 1)), scales=(NO_SCALE,) * num)  # fmt: skip
    check(call, random_operands(rng, call))


def test_shared_operands(rng: np.random.Generator) -> None:
    for shared in ("rows 0", "rows 1", "slots", "layer", "scale 1"):
        call = good_call(shared=[shared])
        check(call, random_operands(rng, call))


@each_batched
def test_empty_arrays(rng: np.random.Generator, batched: bool) -> None:
    """Without rows, slots or features, pools pass through."""
    for changes in ({"rows": 0}, {"slots": 0}, {"shapes": ((0, 3), (4, 0))}, {"batch": 0} if batched else {"rows": 0}):
        call = good_call(batched, **changes)
        operands = random_operands(rng, good_call(batched)) | {
            x.name: np.zeros(x.shape, x.aval().dtype) for x in call.operands
        }
        check(call, operands)


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
        if array.name.startswith("rows"):
            return with_dtypes(array, ("int32", "float64", "complex64", "int4"))
        if array.name.startswith("dest"):
            return with_dtypes(array, ("int4", "int32"))
        return with_dtypes(array, ("float16", "int8", "uint32", "bool"))

    for dtype, array, call in good.with_other(others):
        refused(call, f"{array.name} {dtype}")


def test_shared_pools_are_refused() -> None:
    for name in ("dest 0", "dest 1", "result 1"):
        call = good_call()
        operands = tuple(x.shared() if x.name == name else x for x in call.operands)
        results = tuple(x.shared() if x.name == name else x for x in call.results)
        refused(dataclasses.replace(call, operands=operands, results=results), name)


def test_bad_attributes_are_refused() -> None:
    good = good_call()
    for changes in (
        {"axis": np.int64(-1)}, {"axis": np.int64(3)}, {"axis": np.int64(2**62)}, {"has_layer": False},
        {"scales": np.array([0], np.int64)}, {"scales": np.array([0, 3], np.int64)},
        {"scales": np.array([-1, 2], np.int64)}, {"scales": np.array([2, 2], np.int64)},
        {"scales": np.array([0, 1], np.int64)},
    ):  # fmt: skip
        refused(dataclasses.replace(good, attributes={**good.attributes, **changes}), str(changes))
    handlers.assert_other_attributes_refused(good)
