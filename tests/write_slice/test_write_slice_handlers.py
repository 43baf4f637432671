"""The native handlers of write_slice check every argument: an invalid call gives an error, never a crash."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import handlers
from support.cases import assert_same_memory
from support.handlers import Array, Call, with_dtypes
from write_slice.reference import (
    ALL_DTYPES,
    BATCH,
    SHAPES,
    START_DTYPES,
    SUB_BYTE,
    TARGETS,
    WINDOWS,
    bits_of,
    good_call,
    of_batch,
    overlap_indices,
    random_bits,
    reference_take,
    reference_write,
    window,
    window_sizes,
)

from jax_baracuda._core.op import OPS
from jax_baracuda.ops.write_slice import Window

each_target = pytest.mark.parametrize("target", TARGETS)
each_batched = pytest.mark.parametrize("batched", [False, True], ids=["no batch", "batch"])

NAMES = r"(dest|source|result|start) \d|part|windows|got \d+"


def random_operands(rng: np.random.Generator, call: Call, low: int = -9, high: int = 12) -> dict[str, np.ndarray]:
    """Random operands, with starts in and out of range."""
    operands = {}
    for x in call.operands:
        if x.name.startswith("start"):
            info = jnp.iinfo(x.dtype)
            operands[x.name] = rng.integers(max(low, int(info.min)), high, x.shape).astype(x.dtype)
        elif x.name == "part":
            operands[x.name] = np.zeros(x.shape, np.int32)
        else:
            operands[x.name] = random_bits(rng, x.shape, x.dtype)
    return operands


def expected_results(
    call: Call, operands: dict[str, np.ndarray], windows: Sequence[Window] = WINDOWS
) -> dict[str, np.ndarray]:
    """The expected results, without batch dimension if the call has none."""
    mode = "drop" if call.attributes["drop"] else "clip"
    num_arrays = sum(x.name.startswith("result") for x in call.results)
    is_batched = call.attributes["num_batch_dims"] == 1

    def elements(name: str) -> np.ndarray:
        x = operands[name] if is_batched else operands[name][None]
        return np.broadcast_to(x, (batch, *x.shape[1:]))

    batch = call.results[0].shape[0] if is_batched else 1
    results = {}
    for i in range(num_arrays):
        dest = elements(f"dest {i}")
        starts = np.zeros((batch, dest.ndim - 1), object)
        for w in windows:
            if w.array == i:
                starts[:, w.axis] = elements(f"start {w.start_operand}")
        if call.target == "write_slice":
            write = of_batch(lambda d, s, at: reference_write(d, s, at, mode), dest, elements(f"source {i}"), starts)
            results[f"result {i}"] = write
            continue
        sizes = window_sizes([dest.shape[1:]], [w._replace(array=0) for w in windows if w.array == i])[0]
        rest, taken = of_batch(lambda d, at, sizes=sizes: reference_take(d, sizes, at, mode), dest, starts)
        results |= {f"result {i}": rest, f"source {i}": taken}
    return results if is_batched else {name: x[0] for name, x in results.items()}


def check(call: Call, operands: dict[str, np.ndarray], windows: Sequence[Window] = WINDOWS) -> None:
    expected = expected_results(call, operands, windows)
    for name, result in call.results_of(operands).items():
        assert_same_memory(result, expected[name], name)


def assert_refused(call: Call, what: str, names: str = NAMES) -> None:
    handlers.assert_refused(call, what, names)


# ----------------------------------------------------------------------------------------------------------------------
# Valid calls.


@each_batched
@each_target
def test_valid_calls_succeed(rng: np.random.Generator, target: str, batched: bool) -> None:
    """The calls that the tests below make invalid are valid themselves. Results are in other memory than dest."""
    for drop in (False, True):
        for _ in range(4):
            call = good_call(target, batched, drop=drop)
            check(call, random_operands(rng, call))


@each_target
def test_arrays_written_whole(rng: np.random.Generator, target: str) -> None:
    for dtype in ("float32", *(() if target == "write_slice_backward" else SUB_BYTE)):
        call = good_call(target, dtypes=(dtype, dtype), windows=(), start_dtypes=())
        check(call, random_operands(rng, call), ())


@pytest.mark.parametrize("value", [-(2**63), -(2**62), -(2**31), -1, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1])
@each_target
def test_starts_far_out_of_range(rng: np.random.Generator, target: str, value: int) -> None:
    """Starts far out of range do not touch memory outside the array, where other results are."""
    dtype = "int64" if value < 2**63 else "uint64"
    for drop in (False, True):
        call = good_call(target, start_dtypes=(dtype, dtype), drop=drop)
        operands = random_operands(rng, call)
        for name in ("start 0", "start 1"):
            operands[name] = np.where(rng.random(BATCH) < 0.5, np.array(value, dtype), operands[name].astype(dtype))
        with jax.enable_x64(True):
            check(call, operands)


@each_batched
@each_target
def test_parts_of_split_arrays(rng: np.random.Generator, target: str, batched: bool) -> None:
    """A shard, one of three, gets its part of the whole array's result, even if the window is larger than the shard."""
    num_parts, size = 3, 9
    windows = (Window(0, 0, 0, size, num_parts), window(1, 1, 1, 5))
    for drop in (False, True):
        for part in range(num_parts):
            call = good_call(target, batched, windows=windows, drop=drop)
            operands = random_operands(rng, call, -3, 24)
            operands["part"] = np.full_like(operands["part"], part)
            whole = good_call(target, batched, windows=(window(0, 0, 0, size), windows[1]), drop=drop,
                              shapes=((num_parts * 7, 5, 4), (6, 9)))  # fmt: skip
            of_whole = random_operands(rng, whole)
            axis = 1 if batched else 0
            mine = (slice(None),) * axis + (slice(7 * part, 7 * part + 7),)
            of_whole |= {name: x for name, x in operands.items() if name != "part" and name != "dest 0"}
            of_whole["dest 0"][mine] = operands["dest 0"]
            if target == "write_slice_backward":  # other devices have the other parts of the window
                others = np.ones(of_whole["dest 0"].shape, bool)
                others[mine] = False
                of_whole["dest 0"][others] = 0
            expected = expected_results(whole, of_whole, (window(0, 0, 0, size), windows[1]))
            expected["result 0"] = expected["result 0"][mine]
            for name, result in call.results_of(operands).items():
                assert_same_memory(result, expected[name], f"{name} of part {part}")


def test_numbers_of_parts_out_of_range(rng: np.random.Generator) -> None:
    """Numbers out of range count as the first or the last part."""
    windows = (Window(0, 0, 0, 9, 3),)
    call = good_call("write_slice", windows=windows, shapes=SHAPES[:1], dtypes=("float32",), start_dtypes=("int32",))
    operands = random_operands(rng, call, 0, 12)
    for wrong, right in ((-1, 0), (-(2**31), 0), (3, 2), (2**31 - 1, 2)):
        results = [call.results_of(operands | {"part": np.array([part], np.int32)}) for part in (wrong, right)]
        assert_same_memory(results[0]["result 0"], results[1]["result 0"])


def test_one_byte_of_many_rows(rng: np.random.Generator) -> None:
    """Elements of less than a byte are right in rows that share a byte, also across the batch."""
    for dtype in SUB_BYTE:
        for shape, sizes in (((3,), (2,)), ((5, 3), (4, 1)), ((5, 3), (5, 2)), ((2, 3, 1), (2, 2, 1)), ((1,), (1,))):
            windows = tuple(window(0, axis, axis, size) for axis, size in enumerate(sizes))
            for drop in (False, True):
                call = good_call("write_slice", shapes=(shape,), windows=windows, dtypes=(dtype,), drop=drop, batch=13,
                                 start_dtypes=("int32",) * len(shape))  # fmt: skip
                check(call, random_operands(rng, call, -3, 6), windows)


@pytest.mark.parametrize("num_arrays", [1, 2, 3])
@pytest.mark.parametrize("drop", [False, True], ids=["clip", "drop"])
@each_batched
@each_target
def test_whole_words(rng: np.random.Generator, target: str, batched: bool, drop: bool, num_arrays: int) -> None:
    """Rows that begin and end at multiples of 16 bytes are right: with one to four axes of rows, with sources that the
    batch shares, and with starts of every dtype."""
    for num_axes in (1, 2, 3):
        shape = (5, 4, 6)[-num_axes:] + (3, 16)
        windows = tuple(
            window(i, axis, axis, size) for i in range(num_arrays) for axis, size in enumerate((3, 2, 5)[-num_axes:])
        )
        for shared in ((), ("source 0",)) if target == "write_slice" and batched else ((),):
            start_dtypes = rng.choice(START_DTYPES, num_axes).tolist()
            call = good_call(target, batched, shapes=(shape,) * num_arrays, windows=windows, drop=drop, shared=shared,
                             dtypes=("float32",) * num_arrays, start_dtypes=start_dtypes)  # fmt: skip
            check(call, random_operands(rng, call), windows)


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


@each_target
def test_shared_arrays_are_refused(target: str) -> None:
    """The batch cannot share an array that is written."""
    shared = ["dest 0", "result 0", *(["source 0"] if target == "write_slice_backward" else [])]
    for name in shared:
        assert_refused(good_call(target, shared=[name]), f"{name} shared")


@pytest.mark.parametrize("rank", [0, 9])
@each_batched
@each_target
def test_bad_ranks_are_refused(target: str, batched: bool, rank: int) -> None:
    call = good_call(target, batched, shapes=((2,) * rank,), dtypes=("float32",), start_dtypes=(), windows=())
    assert_refused(call, f"rank {rank}", "dest 0")


@each_target
def test_bad_dtypes_are_refused(target: str) -> None:
    """Arrays are refused with another dtype than dest, and starts with a dtype that is not an integer."""
    good = good_call(target)
    others = ("float32", "bfloat16", "int32", "bool", "complex64", "int4")

    def with_bad_dtypes(array: Array) -> dict[str, Array]:
        if array.name.startswith("start"):
            return with_dtypes(array, ("float32", "bool", "bfloat16", "int4", "complex64"))
        return with_dtypes(array, others)

    for dtype, array, call in good.with_other(with_bad_dtypes):
        assert_refused(call, f"{array.name} {dtype}")


def test_gradients_of_packed_elements_are_refused() -> None:
    for dtype in SUB_BYTE:
        assert dtype in ALL_DTYPES
        assert_refused(good_call("write_slice_backward", dtypes=(dtype, dtype)), dtype, "dest 0")


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
    windows = (Window(0, 0, 0, 9, 3), window(1, 1, 1, 5))
    good = good_call(target, windows=windows)
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
