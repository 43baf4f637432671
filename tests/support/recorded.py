"""Calls of every op, with arrays that kernels really get: the calls that programs of the examples make."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import pytest
from support import cases, handlers
from support.handlers import Call
from support.programs import integers_like

import jax_baracuda as jb
from jax_baracuda._core.call import OpCall
from jax_baracuda._core.dispatch import alternative_of
from jax_baracuda._core.op import OPS, Op
from jax_baracuda._core.rules import Site
from jax_baracuda._examples import all_examples
from jax_baracuda._examples.example import Example, value_and_gradient
from jax_baracuda._tools.calls import traced_calls

Program = Callable[[Mapping[str, Any]], Any]
"""A function of the operands of an example."""


IDS = ("ids", "segment_ids", "gather_ids")
"""The operands that a plan replaces."""
OPTIONS_WITH_PLAN = ("tie_break", "deterministic", "implementation")


@contextlib.contextmanager
def recording() -> Iterator[list[OpCall]]:
    """The calls of ops in this context, which runs each operation alone. Their operands are arrays."""
    calls: list[OpCall] = []

    def record(op: Op, run: Callable[..., Any], *operands: jax.Array, **params: Any) -> Any:
        calls.append(OpCall(op, operands, params))
        return run(*operands, **params)

    with pytest.MonkeyPatch.context() as patch, jax.disable_jit():
        for op in set(OPS.values()):
            patch.setattr(op.primitive, "impl", functools.partial(record, op, op.primitive.impl))
        yield calls


def takes_plan(example: Example) -> bool:
    return "plan" in inspect.signature(example.function).parameters


def plan_of(example: Example, operands: Mapping[str, Any]) -> jb.SegmentPlan:
    """The plan of the ids among the operands."""
    nodes, segments = (example.sizes["small"].get(name) for name in ("node", "segment"))
    if "ids" in operands:
        return jb.segment_plan(operands["ids"], nodes)
    gathered = (operands["gather_ids"], nodes) if "gather_ids" in operands else ()
    return jb.segment_plan(operands["segment_ids"], segments, *gathered)


def by_plan(example: Example, operands: Mapping[str, Any], plan: jb.SegmentPlan) -> Any:
    """The call of an example with a plan in place of the ids."""
    others = {name: x for name, x in operands.items() if name not in IDS}
    options = {name: value for name, value in example.options.items() if name in OPTIONS_WITH_PLAN}
    return example.function(**others, **options, plan=plan)


def programs_of(example: Example) -> list[Program]:
    """The example's value; its value and gradient; both by a plan, if the function takes one."""
    names = example.differentiated("float32")

    def with_gradient(call: Program) -> Program:
        def run(operands: Mapping[str, Any]) -> Any:
            cotangents = jax.tree.map(integers_like, jax.eval_shape(call, operands))
            return value_and_gradient(lambda **given: call(given), names)(operands, cotangents)

        return run

    calls: list[Program] = [lambda operands: example.call("small")(**operands)]
    if takes_plan(example):
        calls.append(lambda operands: by_plan(example, operands, plan_of(example, operands)))
    return [*calls, *map(with_gradient, calls if names else [])]


@functools.cache
def callers() -> dict[str, list[tuple[Example, int]]]:
    """For each target, the examples and the numbers of their programs that call it."""
    found: dict[str, list[tuple[Example, int]]] = {}
    for example in all_examples():
        if example.mapped is None:
            types = example.operand_types("float32", "small")
            for i, program in enumerate(programs_of(example)):
                for name in {call.name for call in traced_calls(program, types)}:
                    found.setdefault(name, []).append((example, i))
    return found


def calls_of(
    rng: np.random.Generator, target: str, dtype: str, batch: int, sizes: Callable[[Example], Mapping[str, int]]
) -> Iterator[OpCall]:
    """Calls of the target, by one example after the other, mapped over a batch. `sizes`: those of an example."""
    for caller, i in callers().get(target, []):
        example = dataclasses.replace(caller, sizes={"small": sizes(caller)})
        with cases.x64_for(dtype), np.errstate(invalid="ignore"):
            draws = [example.make_operands(rng, dtype, "small") for _ in range(batch)]
            operands = {name: np.stack([one[name] for one in draws]) for name in draws[0]}
            with contextlib.suppress(TypeError), recording() as calls:  # integers have no gradient
                jax.vmap(programs_of(example)[i])(operands)
        for call in calls:
            if call.name == target and call.dtype.name == dtype:
                yield call


GoodCall = tuple[Call, dict[str, np.ndarray]]
"""A valid call, and operands by name."""

BATCH = 6


@functools.cache
def direct_calls(target: str, dtype: str | None = None) -> list[GoodCall]:
    """Calls of the target on a batch of `BATCH`, with every kind of operands and flags that examples lead to.

    By default, in float32 and in bfloat16.
    """
    rng, found = np.random.default_rng(0), {}
    dtypes = sorted(OPS[target].dtypes_of(target))
    chosen = {x if x in dtypes else dtypes[0] for x in ("float32", "bfloat16")} if dtype is None else {dtype}
    for dtype in sorted(chosen):
        for call in calls_of(rng, target, dtype, BATCH, lambda example: example.sizes["small"]):
            if call.num_batch_dims != 1 and not call.op.broadcasts:
                continue
            if alternative_of(call, Site(cases.PLATFORM)) is not None:
                continue  # a separate op sorts the edges
            with cases.x64_for(dtype):
                good = handlers.recorded_call(call)
            flags = {name: value for name, value in good.attributes.items() if isinstance(value, bool)}
            operands = {x.name: np.asarray(value) for x, value in zip(good.operands, call.operands, strict=True)}
            found.setdefault((dtype, len(operands), repr(flags)), (good, operands))
    return list(found.values())
