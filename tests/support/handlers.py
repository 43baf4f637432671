"""Direct calls of native handlers: valid calls, calls that differ from a valid one in one respect, and their errors."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases

from jax_baracuda._core.call import OpCall
from jax_baracuda._core.native import target_name
from jax_baracuda._core.op import OPS


@dataclasses.dataclass(frozen=True)
class Array:
    """An operand or a result of a call."""

    name: str
    shape: tuple[int, ...]
    """The first dimension is the batch, unless the call has another `num_batch_dims`."""
    dtype: str = "float32"

    def aval(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, jnp.dtype(self.dtype))

    def shared(self) -> Array:
        """The array with batch size 1: shared by the whole batch."""
        return dataclasses.replace(self, shape=(1, *self.shape[1:]))


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a target."""

    target: str
    operands: tuple[Array, ...]
    results: tuple[Array, ...]
    attributes: Mapping[str, Any]
    scratch_bytes: int = 0
    """Size of the scratch buffer, an additional last result; 0 for none."""
    written: tuple[int, ...] = ()
    """The positions of operands that are written in place."""

    def arrays(self) -> tuple[Array, ...]:
        return (*self.operands, *self.results)

    def run(self) -> None:
        """Runs the call on zeros."""
        with self.types():
            jax.block_until_ready(jax.jit(self.bind)(*(np.zeros(x.shape, jnp.dtype(x.dtype)) for x in self.operands)))

    def results_of(self, operands: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The results by name. Results and scratch are written to memory that was filled with NaN."""
        with self.types():
            poison = [
                jnp.full(x.shape, jnp.nan if cases.is_floating(x.dtype) else 0xFF, x.dtype) for x in self._avals()
            ]
            call = jax.jit(lambda _, *x: self.bind(*x), donate_argnums=0, keep_unused=True)
            results = jax.block_until_ready(call(poison, *(operands[x.name] for x in self.operands)))
        assert all(x.is_deleted() for x in poison), "results lie in other memory than what was poisoned"
        return {x.name: np.asarray(result) for x, result in zip(self.results, results, strict=False)}

    def types(self) -> Any:
        return cases.x64_for(*(x.dtype for x in self.arrays()))

    def _avals(self) -> list[jax.ShapeDtypeStruct]:
        scratch = [Array("scratch", (self.scratch_bytes,), "uint8")] if self.scratch_bytes else []
        return [x.aval() for x in (*self.results, *scratch)]

    def bind(self, *operands: Any) -> Sequence[jax.Array]:
        # Without a side effect, XLA would remove a call without results.
        call = jax.ffi.ffi_call(target_name(self.target), self._avals(), has_side_effect=True)
        return call(*operands, **self.attributes)

    def with_other(self, changes: Callable[[Array], Mapping[str, Array]]) -> Iterator[tuple[str, Array, Call]]:
        """Calls with one array changed: how it differs, the right array, and the call."""
        for kind in ("operands", "results"):
            arrays = getattr(self, kind)
            for i, array in enumerate(arrays):
                for how, other in changes(array).items():
                    yield how, array, dataclasses.replace(self, **{kind: (*arrays[:i], other, *arrays[i + 1 :])})

    def with_other_attributes(self) -> Iterator[tuple[str, Call, str]]:
        """Calls with an extra attribute, and with each missing, renamed or of another type; with the errors."""
        known = f"only {', '.join(sorted(self.attributes))}" if self.attributes else "none"
        extra = self._with_attributes({**self.attributes, "nonsense": True})
        yield "attribute too many", extra, f"got attribute nonsense, expected {known}"
        for name, value in self.attributes.items():
            others = {key: value for key, value in self.attributes.items() if key != name}
            missing = f"{name} is missing, expected an attribute that is {type_of(value)}"
            yield f"{name} missing", self._with_attributes(others), missing
            yield f"{name} renamed", self._with_attributes(others | {"nonsense": value}), missing
            for other in OF_ALL_TYPES:
                if type_of(other) != type_of(value):
                    wrong = f"{name} is {type_of(other)}, expected {type_of(value)}"
                    yield f"{name} {other!r}", self._with_attributes(others | {name: other}), wrong

    def _with_attributes(self, attributes: Mapping[str, Any]) -> Call:
        return dataclasses.replace(self, attributes=attributes)


OF_ALL_TYPES = (
    *(True, np.int64(1), np.int32(1), 1.5, "text"),
    *(np.ones(2, np.float32), np.ones(2, np.int32), np.ones(2, np.int64)),
)
"""Attributes of all types that a handler takes, and of others."""


def type_of(attribute: Any) -> str:
    """The type of an attribute in messages of handlers."""
    if isinstance(attribute, str):
        return "a string"
    if np.ndim(attribute) > 0:
        return f"an array of type {XLA_TYPES[attribute.dtype.name]}"
    return f"a scalar of type {XLA_TYPES[np.asarray(attribute).dtype.name]}"


XLA_TYPES = {"bool": "PRED", "int32": "S32", "int64": "S64", "float32": "F32", "float64": "F64"}


def good_call(target: str, operands: Sequence[Array], results: Sequence[Array], params: Mapping[str, Any]) -> Call:
    """A valid call, with the scratch that the op needs and the params that the handler accepts.

    The first dimension of arrays is a batch, unless `params` set another `num_batch_dims`.
    """
    op = OPS[target]
    params = {**op.targets[target], **(params if op.broadcasts else {"num_batch_dims": 1, **params})}
    call = OpCall(op, [x.aval() for x in operands], params)
    return Call(target, tuple(operands), tuple(results), call.attributes(), call.plan(cases.PLATFORM).scratch_bytes)


BATCH_DIMS = ((), (6,), (2, 3), (3, 1, 2))
"""Sizes of batch dimensions to test, including no batch dimensions."""


def with_batch(call: Call, size: int, shared: Collection[str | None] = ()) -> Call:
    """The call with a batch of another size, which shares these operands."""

    def changed(x: Array) -> Array:
        return dataclasses.replace(x, shape=(1 if x.name in shared else size, *x.shape[1:]))

    operands = tuple(map(changed, call.operands))
    results = tuple(dataclasses.replace(x, shape=(size, *x.shape[1:])) for x in call.results)
    return dataclasses.replace(call, operands=operands, results=results)


def with_batch_dims(call: Call, sizes: tuple[int, ...]) -> Call:
    """Replaces the call's one batch dimension by dimensions of these sizes; shared arrays get sizes of 1."""
    batch = math.prod(sizes)

    def changed(x: Array) -> Array:
        assert x.shape[0] in (1, batch), x
        return dataclasses.replace(x, shape=((*sizes,) if x.shape[0] == batch else (1,) * len(sizes)) + x.shape[1:])

    return dataclasses.replace(
        call,
        operands=tuple(map(changed, call.operands)),
        results=tuple(map(changed, call.results)),
        attributes={**call.attributes, "num_batch_dims": np.int64(len(sizes))},
    )


def recorded_call(call: OpCall) -> Call:
    """The direct call of a handler that the call of an op becomes."""
    types = [
        Array(name, shape, np.dtype(dtype).name)
        for name, (shape, dtype) in zip(call.resolve(call.op.results), call.result_types(), strict=True)
    ]
    operands = [Array(name, x.shape, x.dtype.name) for name, x in zip(call.operand_dims, call.operands, strict=False)]
    scratch_bytes = call.plan(cases.PLATFORM).scratch_bytes
    written = tuple(call.resolve(call.op.in_place))
    return Call(call.name, tuple(operands), tuple(types), call.attributes(), scratch_bytes, written)


def with_other_shapes(array: Array) -> dict[str, Array]:
    """The array with a wrong rank, batch or size."""
    shape = array.shape
    shapes = {
        "of rank 0": (),
        "without batch": shape[1:],
        "of rank 1": shape[:1],
        "of one dimension more": (*shape, 1),
        "with longer batch": (shape[0] + 1, *shape[1:]),
        "with shorter batch": (shape[0] - 1, *shape[1:]),
        "shared by the batch": (1, *shape[1:]),
    }
    for i in range(1, len(shape)):
        for how, size in (("longer", shape[i] + 1), ("shorter", shape[i] - 1)):
            shapes[f"dimension {i} {how}"] = (*shape[:i], size, *shape[i + 1 :])
    return {how: dataclasses.replace(array, shape=other) for how, other in shapes.items() if other != shape}


def with_dtypes(array: Array, dtypes: Collection[str]) -> dict[str, Array]:
    return {dtype: dataclasses.replace(array, dtype=dtype) for dtype in dtypes if dtype != array.dtype}


def refusal(call: Call, what: str) -> str:
    """The message of the call's error; fails if the call succeeds."""
    try:
        call.run()
    except jax.errors.JaxRuntimeError as error:
        return str(error)
    pytest.fail(f"{call.target} accepted a call with: {what}")


def assert_refused(call: Call, what: str, *names: str) -> None:
    """The handler's error names the target and one of these arguments, and what is wrong or what was expected.

    Without names, any of the call's arguments.
    """
    message = refusal(call, what)
    any_name = "|".join(names or [x.name for x in call.arrays()])
    assert re.search(rf"{call.target}: ({any_name})\b", message), f"{what}: {message}"
    says = r"has shape \[|has element type|has \d+ (rows|bytes)|expected|is missing|is empty where"
    assert re.search(says, message), f"{what}: {message}"


def assert_other_attributes_refused(good: Call) -> None:
    """The handler's error names the attribute, what came and what is allowed."""
    for what, call, expected in good.with_other_attributes():
        message = refusal(call, what)
        assert f"{good.target}: {expected}" in message, f"{what}: {message}"
