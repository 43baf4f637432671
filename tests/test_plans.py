"""The native modules name a strategy for every call, and the calls here reach every strategy of every kernel."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_baracuda._core.call import OpCall
from jax_baracuda._core.native import NATIVE_MODULES
from jax_baracuda._core.op import OPS, Op
from jax_baracuda._examples import all_examples
from jax_baracuda._examples.example import Example, value_and_gradient
from jax_baracuda.ops.write_slice import Window

LOADED = [platform for platform, native in NATIVE_MODULES.items() if native.module is not None]

each_platform = pytest.mark.parametrize("platform", LOADED)


class Call(NamedTuple):
    """A call of an op. In the tables below, shapes have no batch."""

    op: Op
    operands: Sequence[jax.ShapeDtypeStruct]
    params: Mapping[str, Any]

    @property
    def name(self) -> str:
        return OpCall(self.op, self.operands, self.params).name

    @property
    def batch(self) -> str:
        """Whether there is a batch, and whether it shares operands."""
        sizes = {operand.shape[0] for operand in self.operands}
        return "batch 1" if sizes <= {1} else "shared operands" if 1 in sizes else "own operands"

    def strategy(self, platform: str) -> str | None:
        """The name of the strategy, or None if the platform has no kernel for the call."""
        call = OpCall(self.op, self.operands, self.params)
        return call.plan(platform).strategy if call.unsupported_reason(platform) is None else None

    def batched(self) -> Iterator[Call]:
        """The call with a batch of one, and with batches of two that share no operand, one, or all but one.

        If the op broadcasts only some operands, the other operands have the whole batch.
        """
        numbers = range(len(self.operands))
        names = list(OpCall(self.op, self.operands, self.params).resolve(self.op.operands))
        whole = {i for i in numbers if self.op.broadcasts and names[i] not in self.op.broadcasts}
        own = {(), tuple(numbers), *((i,) for i in numbers), *itertools.combinations(numbers, len(numbers) - 1)}
        for of_two in sorted({(*whole.difference(of_two), *of_two) if of_two else () for of_two in own}):
            sizes = [2 if i in of_two else 1 for i in numbers]
            operands = [
                jax.ShapeDtypeStruct((size, *x.shape), x.dtype) for size, x in zip(sizes, self.operands, strict=True)
            ]
            params = self.params if self.op.broadcasts else {**self.params, "num_batch_dims": 1}
            yield self._replace(operands=operands, params=params)


def call(op: str, operands: Sequence[tuple[Sequence[int], str]], **params: Any) -> Call:
    types = [jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype)) for shape, dtype in operands]
    return Call(OPS[op], types, {**OPS[op].targets[op], **params})


# ----------------------------------------------------------------------------------------------------------------------
# causal_conv1d.

# Examples, channels and length.
SIGNALS = [
    *[(2, 3, 40), (4, 64, 9), (3, 24, 100), (1, 8, 2000), (2, 1, 7), (2, 4, 1)],
    *[(0, 3, 5), (2, 0, 5), (2, 3, 0)],
]


def signal(examples: int, channels: int, length: int, channels_last: bool, dtype: str) -> tuple[Sequence[int], str]:
    return ((examples, length, channels) if channels_last else (examples, channels, length)), dtype


def convolutions() -> Iterator[Call]:
    choices = itertools.product(SIGNALS, ["bfloat16", "float32"], *[[False, True]] * 3)
    for sizes, dtype, channels_last, has_state, has_ids in choices:
        examples, channels, length = sizes
        x, weight = signal(*sizes, channels_last, dtype), ((channels, 4), dtype)
        state = [((examples, channels, 3), dtype)] if has_state else []
        same_sequence = [((examples, length), "uint8")] if has_ids else []
        params = {
            "channels_last": channels_last,
            "silu": True,
            "has_bias": False,
            "has_initial_state": has_state,
            "has_same_sequence": has_ids,
        }
        yield call("causal_conv1d", [x, weight, *state, *same_sequence], **params)
        yield call("causal_conv1d_backward", [x, weight, x, *state, *same_sequence], has_d_final_state=False, **params)


def updates() -> Iterator[Call]:
    choices = itertools.product([0, 2], [0, 1, 3, 32], [0, 1, 5, 17, 100], [3, 9], [False, True])
    for examples, channels, length, state_length, channels_last in choices:
        x = signal(examples, channels, length, channels_last, "float32")
        operands = [x, ((examples, channels, state_length), "float32"), ((channels, 4), "float32")]
        params = {"channels_last": channels_last, "silu": True, "has_bias": False}
        yield call("causal_conv1d_update", operands, **params)


# ----------------------------------------------------------------------------------------------------------------------
# rope.


def rotations() -> Iterator[Call]:
    # Few and many positions; rows that consist of vectors of 16 bytes, or do not.
    choices = itertools.product([0, 1, 3, 8192], [64, 6], *[[False, True]] * 2)
    for length, features, heads_first, interleaved in choices:
        x = ((4, 32, length, features) if heads_first else (4, length, 32, features)), "bfloat16"
        others = [((2, features // 2), "float32"), ((4, length), "int32")]
        params = {
            "heads_first": heads_first,
            "interleaved": interleaved,
            "rotary_dim": features,
            "scale": 1.0,
            "has_positions": True,
        }
        for op in ("rope", "rope_backward"):
            yield call(op, [x, *others], **params)
            yield call(op.replace("rope", "rope_qk"), [x, x, *others], **params)


# ----------------------------------------------------------------------------------------------------------------------
# where.

# Shapes of a, b and the condition.
SELECTIONS = [
    *[((5, n), (5, n), (5, n)) for n in (8, 7)],
    *[((1, 1), (5, n), (5, n)) for n in (8, 7)],
    *[((5, n), (1, 1), (5, n)) for n in (8, 7)],
    *[((5, n), (5, n), (1, n)) for n in (8, 7)],
    *[((5, n), (1, 1), (1, n)) for n in (8, 7)],
    *[((5, n), (1, n), (5, 1)) for n in (8, 7)],
    *[((5, n), (5, n), (5, 1)) for n in (8, 7, 3, 200)],
    ((2, 10_000), (2, 10_000), (1, 10_000)),
    ((3, 1, 5), (3, 4, 5), (3, 4, 5)),
    ((3, 4, 5), (3, 4, 5), (3, 1, 5)),
    ((0, 3), (0, 3), (1, 3)),
]

# Shapes of d_output, and the axes that are summed.
SUMS = [
    *[((6, n), (1,)) for n in (5, 8, 100, 3000, 40_000, 40_001)],
    *[((n,), (0,)) for n in (3, 4, 20_000, 20_001)],
    *[((rows, n), (0,)) for rows in (3, 5001) for n in (8, 7, 6)],
    *[((rows, n), (0,)) for rows in (3, 300) for n in (2048, 1029)],
    *[((6, rows, n), (1,)) for rows in (5, 40_001, 40_000) for n in (3, 4)],
    *[((6, rows, n), (1,)) for rows in (3, 300) for n in (2048, 1029)],
    ((6, 5, 0), (1,)),
]


def selections() -> Iterator[Call]:
    for a, b, cond in SELECTIONS:
        yield call("where", [(a, "float32"), (b, "float32"), (cond, "bool")])
        d_output = np.broadcast_shapes(a, b, cond)
        yield call("where_backward", [(d_output, "float32"), (cond, "bool")], a_axes=(), b_axes=())
    for shape, axes_from_the_start in SUMS:
        axes = tuple(axis - len(shape) for axis in axes_from_the_start)
        for a_axes, b_axes in ((axes, ()), ((), axes), (axes, axes)):
            yield call("where_backward", [(shape, "float32"), (shape, "bool")], a_axes=a_axes, b_axes=b_axes)


# ----------------------------------------------------------------------------------------------------------------------
# write_slice.

# Shapes of an array and of its window.
WINDOWS = [
    ((64, 64), (64, 64)),
    *[((64, n), (2, n)) for n in (64, 62)],
    ((16, 8, 64), (2, 3, 64)),
    ((16, 8, 4, 64), (2, 3, 2, 64)),
    ((64, 64), (2, 32)),
    ((64, 64), (0, 64)),
    ((64, 7), (2, 7)),
]


def windows() -> Iterator[Call]:
    for (dest, window), dtype in itertools.product(WINDOWS, ["float8_e5m2", "bfloat16", "float32", "int4"]):
        for num_arrays in (1, 2, 3):
            yield from moves([(dest, window, dtype)] * num_arrays)
    for dtype in ("float32", "int4"):
        yield from moves([((64, 64), (2, 64), "float32"), ((64, 7), (2, 7), dtype)])


def moves(arrays: Sequence[tuple[Sequence[int], Sequence[int], str]]) -> Iterator[Call]:
    """The write of windows, and its gradient, which writes zeros."""
    dests, sources, starts = [], [], []
    parts: list[Window] = []
    for i, (dest, window, dtype) in enumerate(arrays):
        dests.append((dest, dtype))
        sources.append((window, dtype))
        for axis, (dim, size) in enumerate(zip(dest, window, strict=True)):
            if dim != size:
                parts.append(Window(i, axis, len(starts), size, num_shards=1))
                starts.append(((), "int32"))
    ranks = tuple(len(dest) for dest, _ in dests)
    params = {"ranks": ranks, "windows": tuple(parts), "drop": False}
    yield call("write_slice", [*dests, *sources, *starts], **params)
    yield call("write_slice_backward", [*dests, *starts], **params)


TABLES = (convolutions, updates, rotations, selections, windows)

# ----------------------------------------------------------------------------------------------------------------------
# Plans of the calls.


@functools.cache
def met() -> dict[tuple[str, str, str], set[str]]:
    """The strategies of the calls in the tables, by platform, op and kind of batch."""
    strategies: dict[tuple[str, str, str], set[str]] = {}
    for in_table in itertools.chain.from_iterable(table() for table in TABLES):
        for one, platform in itertools.product(in_table.batched(), LOADED):
            strategy = one.strategy(platform)
            if strategy is not None:
                strategies.setdefault((platform, one.name, one.batch), set()).add(strategy)
    return strategies


UNREACHABLE = {
    # An operand that the batch shares is repeated.
    ("cpu", "where", "shared operands"): {"dense"},
    ("cpu", "where_backward", "shared operands"): {"dense"},
    # Rows are read by element only if the batch shares signals, and their size is not a multiple of 32 bytes.
    **{
        ("cuda", op, batch): {
            f"rows_by_element{ids}{states}" for ids in ("", "_with_segment_ids") for states in all_states
        }
        for op, all_states in (("causal_conv1d", ("",)), ("causal_conv1d_backward", ("", "_and_states")))
        for batch in ("batch 1", "own operands")
    },
}
"""The strategies that no call with such a batch has, by platform, op and batch."""


@each_platform
def test_every_op_has_strategies(platform: str) -> None:
    for op, names in NATIVE_MODULES[platform].strategies().items():
        assert names, op
        assert len(set(names)) == len(names), op


@each_platform
@pytest.mark.parametrize("batch", ["batch 1", "own operands", "shared operands"])
@pytest.mark.parametrize("op", sorted({in_table.name for table in TABLES for in_table in table()}))
def test_calls_reach_every_strategy(platform: str, op: str, batch: str) -> None:
    """Calls of the tables reach all strategies, except those that are listed as unreachable."""
    if op not in NATIVE_MODULES[platform].targets:
        pytest.fail(f"the {platform} module lacks {op}")
    strategies = set(NATIVE_MODULES[platform].strategies()[op])
    reached = met()[platform, op, batch]
    assert reached <= strategies
    assert strategies - reached == UNREACHABLE.get((platform, op, batch), set())


def calls_of_ops(jaxpr: Any) -> Iterator[Call]:
    ops = {op.primitive: op for op in OPS.values()}
    for equation in jaxpr.eqns:
        if equation.primitive in ops:
            yield Call(ops[equation.primitive], [x.aval for x in equation.invars], equation.params)
        for param in equation.params.values():
            for inner in param if isinstance(param, tuple | list) else [param]:
                if hasattr(inner := getattr(inner, "jaxpr", inner), "eqns"):
                    yield from calls_of_ops(inner)


@each_platform
@pytest.mark.parametrize("example", all_examples(), ids=lambda example: example.name)
def test_calls_of_public_functions_have_a_strategy(platform: str, example: Example) -> None:
    """Calls with their gradients, alone and mapped over a batch, have a strategy that the native module names."""
    operands = example.make_operands(np.random.default_rng(0), "float32", "check")
    call = example.call("check")
    names = example.differentiated("float32")

    def with_gradient(operands: Any) -> Any:
        return value_and_gradient(call, names)(operands, call(**operands))

    def mapped(operands: Any) -> Any:
        first = next(iter(operands))
        stacked = operands | {first: jnp.stack([operands[first]] * 2)}
        return jax.vmap(with_gradient, [{name: 0 if name == first else None for name in operands}])(stacked)

    strategies = NATIVE_MODULES[platform].strategies()
    count = 0
    for traced in (with_gradient, mapped):
        for one in calls_of_ops(jax.make_jaxpr(traced)(operands).jaxpr):
            if one.name in strategies and (strategy := one.strategy(platform)) is not None:
                assert strategy in strategies[one.name]
                count += 1
    assert count >= 2
