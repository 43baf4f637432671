"""The native handlers of write_slice check every argument: an invalid call gives an error, never a crash."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import handlers
from support.cases import assert_same_memory
from support.handlers import Call
from write_slice.reference import (
    BATCH,
    SHAPES,
    TARGETS,
    WINDOWS,
    bits_of,
    good_call,
    overlap_indices,
    random_bits,
    window,
)

from jax_baracuda._core.op import OPS
from jax_baracuda.ops.write_slice import Window

each_target = pytest.mark.parametrize("target", TARGETS)
each_batched = pytest.mark.parametrize("batched", [False, True], ids=["no batch", "batch"])

NAMES = r"(dest|source|result|start) \d|part|windows|got \d+"


def random_operands(rng: np.random.Generator, call: Call) -> dict[str, np.ndarray]:
    """Random bits, starts in and out of range, and the first part."""
    operands = {}
    for x in call.operands:
        if x.name.startswith("start"):
            operands[x.name] = rng.integers(max(-9, int(jnp.iinfo(x.dtype).min)), 12, x.shape).astype(x.dtype)
        else:
            operands[x.name] = np.zeros(x.shape, np.int32) if x.name == "part" else random_bits(rng, x.shape, x.dtype)
    return operands


def assert_refused(call: Call, what: str, names: str = NAMES) -> None:
    handlers.assert_refused(call, what, names)


# ----------------------------------------------------------------------------------------------------------------------
# Valid calls.


def test_numbers_of_parts_out_of_range(rng: np.random.Generator) -> None:
    """Numbers out of range count as the first or the last part."""
    windows = (Window(0, 0, 0, 9, 3),)
    call = good_call("write_slice", windows=windows, shapes=SHAPES[:1], dtypes=("float32",), start_dtypes=("int32",))
    operands = random_operands(rng, call)
    for wrong, right in ((-1, 0), (-(2**31), 0), (3, 2), (2**31 - 1, 2)):
        results = [call.results_of(operands | {"part": np.array([part], np.int32)}) for part in (wrong, right)]
        assert_same_memory(results[0]["result 0"], results[1]["result 0"])


@pytest.mark.parametrize("dtype", ["int4", "uint2", "int8", "bfloat16", "complex64"])
def test_large_windows(rng: np.random.Generator, dtype: str) -> None:
    """Windows for several threads, and for the GPU's large-window strategies, are right in long and short rows."""
    columns = 5_000_000 * 8 // bits_of(dtype) // 3
    for shape, sizes in (
        ((3, columns + 3), (3, columns)),
        ((20_003, 31), (15_001, 17)),
        ((9, 999, 64), (6, 777, 64)),
        ((5, 45_001, 32), (4, 40_000, 32)),
        ((70_003, 4, 32), (70_001, 3, 32)),
    ):
        windows = tuple(window(0, axis, axis, size) for axis, size in enumerate(sizes))
        starts = {f"start {axis}": np.array(1 + axis, np.int32) for axis in range(len(shape))}
        for target in TARGETS:
            if dtype not in OPS[target].dtypes_of(target):
                continue
            call = good_call(target, batched=False, shapes=(shape,), windows=windows, dtypes=(dtype,),
                             start_dtypes=("int32",) * len(shape))  # fmt: skip
            operands = random_operands(rng, call) | starts
            where = overlap_indices(shape, sizes, [1 + axis for axis in range(len(shape))], "clip").in_array
            results = call.results_of(operands)
            expected = operands["dest 0"].copy()
            expected[where] = operands["source 0"] if target == "write_slice" else 0
            assert_same_memory(results["result 0"], expected)
            if target == "write_slice_backward":
                assert_same_memory(results["source 0"], operands["dest 0"][where])


# ----------------------------------------------------------------------------------------------------------------------
# Invalid calls.


@pytest.mark.parametrize("rank", [0, 9])
@each_batched
@each_target
def test_bad_ranks_are_refused(target: str, batched: bool, rank: int) -> None:
    call = good_call(target, batched, shapes=((2,) * rank,), dtypes=("float32",), start_dtypes=(), windows=())
    assert_refused(call, f"rank {rank}", "dest 0")


BAD_WINDOWS: dict[str, tuple[tuple[int, ...], ...]] = {
    "out of order": (WINDOWS[1], WINDOWS[0], WINDOWS[2]),
    "arrays out of order": (WINDOWS[2], WINDOWS[0], WINDOWS[1]),
    "twice": (WINDOWS[0], *WINDOWS),
    "negative array": (WINDOWS[0]._replace(array=-1), *WINDOWS[1:]),
    "no such array": (*WINDOWS[:2], WINDOWS[2]._replace(array=2)),
    "negative axis": (WINDOWS[0]._replace(axis=-1), *WINDOWS[1:]),
    "no such axis": (WINDOWS[0], WINDOWS[1]._replace(axis=3), WINDOWS[2]),
    "axis far out": (WINDOWS[0], WINDOWS[1]._replace(axis=2**62), WINDOWS[2]),
    "negative start": (WINDOWS[0]._replace(start_operand=-1), *WINDOWS[1:]),
    "no such start": (WINDOWS[0]._replace(start_operand=2), *WINDOWS[1:]),
    "start far out": (WINDOWS[0]._replace(start_operand=2**63 - 1), *WINDOWS[1:]),
    "negative size": (WINDOWS[0]._replace(size=-1), *WINDOWS[1:]),
    "another size": (WINDOWS[0]._replace(size=3), *WINDOWS[1:]),
    "size beyond the axis": (WINDOWS[0]._replace(size=8), *WINDOWS[1:]),
    "size far out": (WINDOWS[0]._replace(size=2**63 - 1), *WINDOWS[1:]),
    "no shards": (WINDOWS[0]._replace(num_shards=0), *WINDOWS[1:]),
    "shards without parts": (WINDOWS[0]._replace(num_shards=2), *WINDOWS[1:]),
    "shards that overflow": (WINDOWS[0]._replace(num_shards=2**62), *WINDOWS[1:]),
    "one left out": WINDOWS[1:],
    "none": (),
    "one too many": (*WINDOWS, window(1, 0, 0, 6)._replace(axis=5)),
    "half of one": (*WINDOWS, (1, 2)),
}


@pytest.mark.parametrize("case", BAD_WINDOWS)
@each_target
def test_bad_windows_are_refused(target: str, case: str) -> None:
    good = good_call(target)
    numbers = np.array(jax.tree.leaves(BAD_WINDOWS[case]), np.int64)
    call = dataclasses.replace(good, attributes={**good.attributes, "windows": numbers})
    assert_refused(call, case)


@each_target
def test_other_parts_are_refused(target: str) -> None:
    good = good_call(target, windows=(Window(0, 0, 0, 9, 3), window(1, 1, 1, 5)))
    good.run()
    for i, array in enumerate(good.operands):
        if array.name != "part":
            continue
        for other in (
            dataclasses.replace(array, dtype="uint32"),
            dataclasses.replace(array, dtype="float32"),
            dataclasses.replace(array, shape=()),
            dataclasses.replace(array, shape=(BATCH,)),
            dataclasses.replace(array, shape=(1, 1)),
        ):
            operands = (*good.operands[:i], other, *good.operands[i + 1 :])
            assert_refused(dataclasses.replace(good, operands=operands), str(other), "part")
