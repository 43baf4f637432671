"""Native handlers under random malformed calls: each call gives an error that names its op, or is valid.

Variables:
  JAX_BARACUDA_MALFORMED_CALLS=<int>: how many calls of each target (default: 200).

Each call is written to a file as Python code before it runs. If the process dies, the last line of the file is the
culprit, and `replay` runs it.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases, handlers
from support.handlers import Array, Call
from support.recorded import BATCH, direct_calls
from write_slice import reference as windows

from jax_baracuda._core.call import OpCall
from jax_baracuda._core.functions import resolved
from jax_baracuda._core.native import NATIVE_MODULES
from jax_baracuda._core.op import OPS

NUM_CALLS = int(os.environ.get("JAX_BARACUDA_MALFORMED_CALLS", "200"))

DTYPES = (
    *cases.KERNEL_DTYPES,
    *("int2", "uint2", "int4", "uint4", "float4_e2m1fn", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128"),
)

HUGE = (2**31 - 1, 2**31, 2**32 + 1, 2**40, 2**62, 2**63 - 1)
"""Extents of arrays without elements. Their products overflow."""

EXTREMES = (-(2**63), -(2**62), -(2**31), -2, -1, 0, 1, 2, 3, 2**31 - 1, 2**31, 2**32, 2**33 + 2, 2**62, 2**63 - 1)


def good_calls(target: str) -> list[Call]:
    """Valid calls of the target, with other batch dimensions, too."""
    calls = [call for call, _ in direct_calls(target)]
    if OPS[target].broadcasts:
        return calls
    return [*calls, *(handlers.with_batch_dims(call, sizes) for call in calls[:2] for sizes in ((1, BATCH, 1), (2, 3)))]


# ----------------------------------------------------------------------------------------------------------------------
# Mutations.

Mutation = Callable[[np.random.Generator, Call], Call]


def choice(rng: np.random.Generator, values: Any) -> Any:
    return values[rng.integers(len(values))]


def with_array(rng: np.random.Generator, call: Call, change: Callable[[Array], Array]) -> Call:
    """The call with one of its operands or results changed."""
    kind = choice(rng, [kind for kind in ("operands", "results") if getattr(call, kind)] or ["operands"])
    arrays = list(getattr(call, kind))
    if not arrays:
        return call
    i = rng.integers(len(arrays))
    arrays[i] = change(arrays[i])
    return dataclasses.replace(call, **{kind: tuple(arrays)})


def other_rank(rng: np.random.Generator, call: Call) -> Call:
    def change(x: Array) -> Array:
        rank = len(x.shape)
        shapes = [(), x.shape[1:], x.shape[:-1], x.shape[:1], (*x.shape, 1), (1, *x.shape), (*x.shape, 2), (1,) * 9]
        return dataclasses.replace(x, shape=choice(rng, [shape for shape in shapes if len(shape) != rank]))

    return with_array(rng, call, change)


def other_extent(rng: np.random.Generator, call: Call) -> Call:
    def change(x: Array) -> Array:
        if not x.shape:
            return x
        axis = rng.integers(len(x.shape))
        size = choice(rng, [0, 1, x.shape[axis] - 1, x.shape[axis] + 1, 2 * x.shape[axis], 33])
        return dataclasses.replace(x, shape=(*x.shape[:axis], max(0, size), *x.shape[axis + 1 :]))

    return with_array(rng, call, change)


def other_extent_everywhere(rng: np.random.Generator, call: Call) -> Call:
    """Replaces one size wherever it occurs, in any dimension of any array."""
    old = choice(rng, sorted({size for x in call.arrays() for size in x.shape}) or [0])
    new = choice(rng, [0, 1, 2, old + 1, 17])

    def changed(arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(
            dataclasses.replace(x, shape=tuple(new if size == old else size for size in x.shape)) for x in arrays
        )

    return dataclasses.replace(call, operands=changed(call.operands), results=changed(call.results))


def huge_without_elements(rng: np.random.Generator, call: Call) -> Call:
    """Makes the first extent 0 in all arrays, and one other size huge. Only the first extent keeps products small."""
    old = choice(rng, sorted({size for x in call.arrays() for size in x.shape[1:]}) or [0])
    new = choice(rng, HUGE)

    def changed(x: Array) -> Array:
        shape = (0, *(new if size == old else size for size in x.shape[1:]))
        return dataclasses.replace(x, shape=shape if x.shape else ())

    arrays = ((kind, tuple(changed(x) for x in getattr(call, kind))) for kind in ("operands", "results"))
    return dataclasses.replace(call, **dict(arrays))


def other_dtype(rng: np.random.Generator, call: Call) -> Call:
    return with_array(rng, call, lambda x: dataclasses.replace(x, dtype=choice(rng, DTYPES)))


def with_dtype_everywhere(call: Call, old: str, new: str) -> Call:
    def changed(arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(dataclasses.replace(x, dtype=new if x.dtype == old else x.dtype) for x in arrays)

    return dataclasses.replace(call, operands=changed(call.operands), results=changed(call.results))


def other_dtype_everywhere(rng: np.random.Generator, call: Call) -> Call:
    old = choice(rng, sorted({x.dtype for x in call.arrays()}) or ["int8"])
    return with_dtype_everywhere(call, old, choice(rng, DTYPES))


def other_number_of_arrays(rng: np.random.Generator, call: Call) -> Call:
    kind = choice(rng, ("operands", "results"))
    arrays = list(getattr(call, kind))
    for _ in range(rng.integers(1, 3)):
        if arrays and rng.random() < 0.5:
            del arrays[rng.integers(len(arrays))]
        else:
            extra = choice(rng, call.arrays() or (Array("extra", (3, 2)),))
            arrays.insert(rng.integers(len(arrays) + 1), extra)
    if kind == "results" and cases.PLATFORM == "cuda" and not arrays:
        return call  # XLA removes a call that has no result
    return dataclasses.replace(call, **{kind: tuple(arrays)})


def swapped_arrays(rng: np.random.Generator, call: Call) -> Call:
    kind = choice(rng, ("operands", "results"))
    arrays = tuple(getattr(call, kind)[i] for i in rng.permutation(len(getattr(call, kind))))
    return dataclasses.replace(call, **{kind: arrays})


def other_attribute(rng: np.random.Generator, call: Call) -> Call:
    attributes = dict(call.attributes)
    if not attributes or rng.random() < 0.1:
        return dataclasses.replace(call, attributes=attributes | {choice(rng, ("nonsense", "batch")): True})
    name = choice(rng, sorted(attributes))
    value = attributes.pop(name)
    if rng.random() < 0.1:
        return dataclasses.replace(call, attributes=attributes)
    return dataclasses.replace(call, attributes=attributes | {name: other_value(rng, value)})


def other_value(rng: np.random.Generator, value: Any) -> Any:
    """Another value, mostly of the same type, otherwise of any type."""
    if rng.random() < 0.2:
        extreme = choice(rng, EXTREMES)
        anything = (True, 1.5, np.float32(2), np.int64(extreme), np.int32(7), "", "text", np.zeros(0, np.int64))
        return choice(rng, anything)
    if np.ndim(value) > 0:
        numbers = np.array(value, np.int64)
        if len(numbers) == 0 or rng.random() < 0.3:
            return np.resize(numbers, rng.integers(0, len(numbers) + 7)).astype(np.int64)
        numbers[rng.integers(len(numbers))] = choice(rng, EXTREMES)
        return numbers
    if isinstance(value, bool):
        return not value
    if isinstance(value, (float, np.floating)):
        return np.float64(choice(rng, (0.0, -0.0, np.nan, np.inf, -np.inf, 1e308, 5e-324)))
    return np.int64(choice(rng, EXTREMES))


def other_scratch(rng: np.random.Generator, call: Call) -> Call:
    sizes = {0, 1, 7, call.scratch_bytes - 1, call.scratch_bytes // 2} - {-1, call.scratch_bytes}
    return dataclasses.replace(call, scratch_bytes=int(choice(rng, sorted(sizes))))


MUTATIONS: tuple[Mutation, ...] = (
    other_rank,
    other_extent,
    other_extent_everywhere,
    huge_without_elements,
    other_dtype,
    other_dtype_everywhere,
    other_number_of_arrays,
    swapped_arrays,
    other_attribute,
    other_scratch,
)


def mutated(rng: np.random.Generator, good: Call) -> Call:
    """The call with one mutation or, less often, several."""
    call = good
    for _ in range(choice(rng, (1, 1, 1, 1, 2, 2, 3))):
        call = choice(rng, MUTATIONS)(rng, call)
    arrays = ((kind, tuple(map(small_or_empty, getattr(call, kind)))) for kind in ("operands", "results"))
    return dataclasses.replace(call, **dict(arrays))


def small_or_empty(x: Array) -> Array:
    """Limits extents to what memory and XLA's shapes can hold. Several mutations may have made them huge.

    If a 0 follows huge extents, XLA counts through these for minutes.
    """
    shape = [min(size, 2**63 - 1) for size in x.shape]
    if math.prod(shape) < 2**20 and (max(shape, default=0) < 2**31 - 1 or shape[0] == 0):
        return dataclasses.replace(x, shape=tuple(shape))
    return dataclasses.replace(x, shape=tuple(min(size, 3) for size in shape))


# ----------------------------------------------------------------------------------------------------------------------
# Calls that may be accepted.


def why_not(call: Call) -> str | None:
    """Why the call's dimensions or dtypes violate the definition of its op; None if they do not.

    Filter widths, windows and broadcasting are not checked.
    """
    op, attributes = OPS[call.target], dict(call.attributes)
    num_batch_dims = int(attributes.pop("num_batch_dims", 1))
    if call.target.startswith("write_") or call.target == "rope_write":
        num_arrays = len(call.results) // (2 if call.target.endswith("_backward") else 1)
        num_arrays -= call.target == "rope_write"  # the queries
        for dest, result in zip(call.operands, call.results[:num_arrays], strict=False):
            if (dest.shape, dest.dtype) != (result.shape, result.dtype):
                return f"{dest} is not {result}"
        if len({x.shape[:num_batch_dims] for x in call.results}) > 1:
            return "results have several batches"
        return None
    attributes |= op.targets[call.target]
    # A flag of optional operands that is no attribute follows from the number of operands.
    attributes = dict.fromkeys(op.optional.values(), True) | attributes
    of_attributes = OpCall(op, (), attributes)
    names = [list(dims.values()) for dims in (of_attributes.operand_dims, of_attributes.resolve(op.results))]
    if len(call.operands) > len(names[0]) or len(call.results) != len(names[1]):
        return "wrong number of arrays"
    sizes: dict[str, Any] = {}
    for arrays, all_dims, is_operand in ((call.operands, names[0], True), (call.results, names[1], False)):
        for x, dims in zip(arrays, all_dims, strict=False):
            own, batch, shape = dims, x.shape[:num_batch_dims], x.shape[num_batch_dims:]
            fixed = own[:-1] if own[-1:] == ("...",) else own
            if len(batch) < num_batch_dims or len(shape) < len(fixed) or (fixed == own and len(shape) != len(fixed)):
                return f"{x} has the wrong rank for {dims}, {num_batch_dims} of the batch"
            of_dims: dict[str, Any] = {"batch": batch, **dict(zip(fixed, shape, strict=False))}
            if fixed != own and not call.target.startswith("where"):
                of_dims["..."] = shape[len(fixed) :]
            for name, size in of_dims.items():
                if name == "batch" and set(size) == {1} and (is_operand or call.target.startswith("where")):
                    continue  # shared, repeated or summed
                if is_operand and size == 1 and call.target.startswith("rope") and name == "example":
                    continue  # positions
                if sizes.setdefault(name, size) != size:
                    return f"{x} has a {name} of {size}, others of {sizes[name]}"
    dtype = call.operands[0].dtype
    is_selection = (
        call.target.startswith("where") and dtype not in windows.SUB_BYTE
    )  # any dtype that consists of whole bytes
    return None if is_selection or dtype in op.dtypes_of(call.target) else f"{dtype} has no kernel"


def code_of(call: Call) -> str:
    """An expression that makes the call: `replay` runs it."""
    return re.sub(r"\barray\(", "np.array(", repr(call).replace("array([], dtype=int64)", "np.zeros(0, int)"))


def replay(code: str) -> None:
    """Runs a call of the log, in a debugger or under a sanitizer."""
    names = {"Call": Call, "Array": Array, "np": np, "nan": np.nan, "inf": np.inf}
    run(np.random.default_rng(0), eval(code, names))


def operand(rng: np.random.Generator, x: Array) -> np.ndarray:
    """Random bits, except for operands that a kernel made: handlers trust these."""
    if x.name in ("winner", "count", "mantissa", "packed"):
        return np.zeros(x.shape, jnp.dtype(x.dtype))
    return windows.random_bits(rng, x.shape, x.dtype)


def run(rng: np.random.Generator, call: Call) -> str | None:
    """The error of the call, or None."""
    empty = [0 in x.shape for x in call.operands]  # other extents may be too large for NumPy
    operands = [operand(rng, x) for x, is_empty in zip(call.operands, empty, strict=True) if not is_empty]
    before = [x.tobytes() for x in operands]

    def with_empty(*operands: jax.Array) -> Any:
        others = iter(operands)
        types = zip(call.operands, empty, strict=True)
        return call.bind(*(jnp.zeros(x.shape, x.dtype) if is_empty else next(others) for x, is_empty in types))

    with call.types():
        try:
            jax.block_until_ready(jax.jit(with_empty)(*operands))
        except jax.errors.JaxRuntimeError as error:
            return str(error)
    assert [x.tobytes() for x in operands] == before, "an operand was written to"
    return None


def changed_in_one_respect(good: Call) -> Iterator[tuple[str, Call]]:
    """Calls with one array of another shape, one array more or less, other scratch or another flag."""

    def other_shapes(x: Array) -> dict[str, Array]:
        return handlers.with_other_shapes(x) if x.shape else {}

    yield from ((f"{x.name} {how}", call) for how, x, call in good.with_other(other_shapes))
    for kind in ("operands", "results"):
        arrays = getattr(good, kind)
        # On GPUs, XLA removes a call that has no result.
        minimum = int(kind == "results" and cases.PLATFORM == "cuda")
        for count in range(minimum, len(arrays)):
            yield f"{count} {kind}", dataclasses.replace(good, **{kind: arrays[:count]})
        yield f"one of {kind} too many", dataclasses.replace(good, **{kind: (*arrays, Array("extra", (3, 2)))})
    # CPU kernels refuse any scratch; CUDA kernels take more than they need.
    sizes = {0, 1, good.scratch_bytes - 1} if good.scratch_bytes else {int(cases.PLATFORM == "cpu")}
    for scratch_bytes in sizes - {good.scratch_bytes}:
        yield f"{scratch_bytes} bytes of scratch", dataclasses.replace(good, scratch_bytes=scratch_bytes)
    for name, value in good.attributes.items():
        if isinstance(value, bool) and name.startswith(("has_", *LAYOUT_FLAGS)):
            yield f"{name} {not value}", dataclasses.replace(good, attributes={**good.attributes, name: not value})
    if "num_batch_dims" in good.attributes:
        for number in (good.attributes["num_batch_dims"] - 1, good.attributes["num_batch_dims"] + 1):
            attributes = {**good.attributes, "num_batch_dims": np.int64(number)}
            yield f"{number} batch dimensions", dataclasses.replace(good, attributes=attributes)


LAYOUT_FLAGS = ("channels_last", "heads_first")
NO_ARGUMENTS = ("got", "expected", "scratch")
"""Beginnings of messages about the number of buffers, which name no argument."""
OTHER_NAMES = (
    "output",
    "x",
    "y",
    "q",
    "k",
    "q_out",
    "k_out",
    r"(dest|source|rows|result|start|scale) \d",
    "part",
    "windows",
)
"""Names in messages of arrays that the definitions of ops name otherwise."""

BY_XLA = re.compile("Unsupported array element type for ")
"""XLA's own error, for calls that never reach the handler."""


each_target = pytest.mark.parametrize("target", sorted(NATIVE_MODULES[cases.PLATFORM].targets))


@each_target
def test_calls_changed_in_one_respect(rng: np.random.Generator, target: str) -> None:
    """Errors name the target and one of its arguments. Calls that are accepted fit the definition of the op."""
    goods, refused = [call for call, _ in direct_calls(target)], 0
    arrays = {x.name for good in goods for x in good.arrays()}
    attributes = goods[0].attributes
    names = "|".join([*arrays, *attributes, *(x.removeprefix("has_") for x in attributes), *OTHER_NAMES, *NO_ARGUMENTS])
    takes_more = target.startswith("write_slice")  # an extra operand may count as an unused start
    for good in {id(call): call for call in (goods[0], goods[-1])}.values():
        batch_dims = {"num_batch_dims"} - ({"num_batch_dims"} if OPS[target].broadcasts else set())
        attributes_of_op = resolved(OPS[target].attributes, OPS[target].targets[target])
        assert set(good.attributes) == {*attributes_of_op, *batch_dims}
        for what, call in changed_in_one_respect(good):
            message = run(rng, call)
            if message is None:
                reason = what if "scratch" in what or ("too many" in what and not takes_more) else why_not(call)
                assert reason is None, f"accepted {what} where {reason}: {code_of(call)}"
            else:
                refused += 1
                named = re.search(rf"{target}: ({names})", message) or BY_XLA.search(message)
                assert named, f"{what}: {message}"
        handlers.assert_other_attributes_refused(good)
    assert refused > 10


OTHER_DTYPES = (
    *("float32", "bfloat16", "float64", "int8", "uint8", "int32", "uint32", "int64", "bool", "complex64", "int4"),
    "float8_e4m3fn",
)
ALSO_TAKEN: dict[str, Collection[str]] = {
    r".*: (transposed_)?segment_ids|rope.*: positions": ("int64",),
    r"causal_conv1d.*: (weight|bias)": ("float32",),
    r"write_rows: rows_\d": ("float32", "bfloat16"),
    r"write_slice.*: start_\d": cases.INTEGERS,
    r"where.*: cond": ("uint8",),
    r"where_backward: (d_output|da|db)": ("float32", "bfloat16"),  # sums of 16 bits have float32 results
}
"""By target and array: the dtypes that may stand in place of a valid one, beside unchanged arrays of up to 32 bits."""


def takes(call: Call, array: Array, dtype: str) -> bool:
    """Whether a valid call remains valid if this array has that dtype."""
    op, name = OPS[call.target], f"{call.target}: {array.name}"
    if call.operands[0].dtype != "float64" and any(
        re.fullmatch(pattern, name) and dtype in dtypes for pattern, dtypes in ALSO_TAKEN.items()
    ):
        return True
    if array is not call.operands[0] or op.result_dtypes is None or call.target.startswith(("write_", "rope_write")):
        return False
    # Results such as row numbers may not depend on the dtype of the data.
    changed = OpCall(
        op,
        [dataclasses.replace(array, dtype=dtype).aval(), *(x.aval() for x in call.operands[1:])],
        {**op.targets[call.target], **call.attributes},
    )
    results = changed.of_operands(op.result_dtypes)(*changed.operands)
    is_same = [*map(jnp.dtype, results)] == [jnp.dtype(x.dtype) for x in call.results]
    return is_same and dtype in changed.resolve(op.dtypes)


@each_target
def test_other_dtypes_are_refused(target: str) -> None:
    """One array has a dtype that does not fit the others, or all have one that has no kernel."""
    of_kernels, seen = OPS[target].dtypes_of(target), set()
    copies = target.startswith(("where", "write_slice_backward"))  # these take all dtypes of whole bytes
    goods = [call for call, _ in direct_calls(target)]
    for good in sorted(goods, key=lambda call: (len(call.arrays()), call.operands[0].dtype == "float32"), reverse=True):
        own, names = good.operands[0].dtype, {x.name for x in good.arrays()}
        if names <= seen:
            continue
        others = [(good, *x) for x in good.with_other(lambda x: handlers.with_dtypes(x, OTHER_DTYPES))]
        if "float64" in of_kernels:
            wide = max((call for call, _ in direct_calls(target, "float64")), key=lambda call: len(call.arrays()))
            others += [(wide, *x) for x in wide.with_other(lambda x: handlers.with_dtypes(x, ("float32",)))]
        for valid, dtype, array, bad in others:
            if array.name not in seen and not takes(valid, array, dtype):
                what = f"{array.name} of {dtype}: {code_of(bad)}"
                handlers.assert_refused(bad, what, *names, *OTHER_NAMES, "expected")
        for dtype in {*windows.SUB_BYTE, *(() if copies else OTHER_DTYPES)} - of_kernels:
            bad = with_dtype_everywhere(good, own, dtype)
            handlers.assert_refused(bad, f"everything of {dtype}", *names, *OTHER_NAMES, "expected")
        seen |= names


@each_target
def test_malformed_calls(rng: np.random.Generator, target: str, tmp_path: Path) -> None:
    goods, refused = good_calls(target), 0
    for good in goods:
        assert run(rng, good) is None and why_not(good) is None, good
    with (tmp_path / "calls.py").open("w") as log:
        for _ in range(NUM_CALLS):
            call = mutated(rng, choice(rng, goods))
            code = code_of(call)
            log.write(f"replay({code!r})\n")
            log.flush()
            message = run(rng, call)
            if message is None:
                assert (reason := why_not(call)) is None, f"accepted a call where {reason}: {code}"
            else:
                refused += 1
                assert f"{target}: " in message or BY_XLA.search(message), f"{message}: {code}"
    assert refused > NUM_CALLS / 4, "the mutations are too mild"


each_batched_target = pytest.mark.parametrize(
    "target", [x for x in sorted(NATIVE_MODULES[cases.PLATFORM].targets) if not OPS[x].broadcasts]
)

MADE_TOGETHER = ({"winner", "output"}, {"mantissa", "packed"})
"""Operands that one kernel makes, so that the batch shares all of them or none."""


def assert_close(actual: np.ndarray, expected: np.ndarray, where: str) -> None:
    """Sums may be added up in another order. All else is the same."""
    if not cases.is_floating(expected.dtype):
        cases.assert_same_memory(actual, expected, where)
        return
    wide = expected.astype(np.float64)
    rounding = float(jnp.finfo(expected.dtype).eps) * np.abs(wide)
    error = 16 * cases.eps_of(expected.dtype) * np.abs(wide[np.isfinite(wide)]).max(initial=0)
    cases.Expected(wide, expected.dtype, error + (rounding if expected.dtype.itemsize < 4 else 0)).check(actual, where)


@each_batched_target
def test_batches(target: str) -> None:
    """An operand that the batch shares gives the results of a copy for each element, and so do several batch dimensions
    that make up the batch."""
    for good, operands in direct_calls(target)[:: max(len(direct_calls(target)) - 1, 1)]:
        written = [good.operands[i].name for i in good.written]
        shared_by_all = {x.name for x in good.operands if x.shape[0] == 1}
        names = [x.name for x in good.operands if x.name not in {*written, *shared_by_all}]
        for name in (None, *names):
            together = shared_by_all | next((group for group in MADE_TOGETHER if name in group), {name})
            for sizes in handlers.BATCH_DIMS if name is None else ((2, 3),):
                batch = math.prod(sizes)
                given = {key: x[:1] if key in together else x[:batch] for key, x in operands.items()}
                copies = {key: np.repeat(x, batch, 0) if len(x) != batch else x for key, x in given.items()}
                expected = handlers.with_batch(good, batch).results_of(copies)
                shared = handlers.with_batch(good, batch, together)
                for call in (shared, handlers.with_batch_dims(shared, sizes)):
                    results = call.results_of({x.name: given[x.name].reshape(x.shape) for x in call.operands})
                    for x, (key, result) in zip(shared.results, results.items(), strict=True):
                        assert_close(result.reshape(x.shape), expected[key], f"{key}, shared: {name}, of {call}")


@each_batched_target
def test_bad_batch_dims_are_refused(target: str) -> None:
    """Invalid numbers of batch dimensions, and arrays with missing or wrong batch dimensions."""
    good, _ = direct_calls(target)[0]
    for number in (-1, -(2**63), 1 + max(len(x.shape) for x in good.arrays()), 2**31, 2**32 + 1, 2**63 - 1):
        bad = dataclasses.replace(good, attributes={**good.attributes, "num_batch_dims": np.int64(number)})
        message = handlers.refusal(bad, f"num_batch_dims {number}")
        assert re.search(rf"{target}: .*\bnum_batch_dims\b", message), message

    def with_bad_batches(array: Array) -> dict[str, Array]:
        batches = {"half shared": (1, 3), "shared by the inner": (2, 1), "of other sizes": (3, 2), "without": ()}
        return {
            how: dataclasses.replace(array, shape=(*batch, *array.shape[2:]))
            for how, batch in batches.items()
            if array.shape[:2] == (2, 3)
        }

    names = [*(x.name for x in good.arrays()), *OTHER_NAMES]
    for how, array, bad in handlers.with_batch_dims(good, (2, 3)).with_other(with_bad_batches):
        handlers.assert_refused(bad, f"{array.name} {how}", *names)
