"""Which strategies of the kernels the matrix reaches, asked of the native modules without running anything."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from jax_baracuda._core.native import NATIVE_MODULES, NativeModule
from jax_baracuda._core.op import OPS
from matrix.calls import load_all
from matrix.generator import Case, cover, space_of
from matrix.run import Plan

Asked = tuple[str, dict[str, int], str]
"""The target, the parameters and the strategy of a call."""


@contextlib.contextmanager
def recorded(platform: str) -> Iterator[list[Asked]]:
    """Every answer of the platform's module to the question how it runs a call."""
    asked: list[Asked] = []
    plan = NativeModule.plan

    def record(self: NativeModule, target: str, parameters: dict[str, int]) -> Any:
        answer = plan(self, target, parameters)
        if self.platform == platform:
            asked.append((target, dict(parameters), answer.strategy))
        return answer

    with mock.patch.object(NativeModule, "plan", record):
        yield asked


def ask(case: Case, platform: str) -> None:
    """Asks the module of a platform how it runs each kernel of a case's program, which is traced only."""
    plan = Plan(case)
    forward = case.transformation in ("jvp", "linearize")
    function = plan.call.forward_mode if forward else plan.call.function
    with jax.enable_x64(plan.is_x64):
        types = [jax.ShapeDtypeStruct(tuple(map(plan.size_of, x.dims)), jnp.dtype(x.dtype)) for x in plan.arrays]
        program = plan.program(functools.partial(plan.problem.apply, function), is_reference=False)
        for name, operands, params in _kernels(jax.make_jaxpr(program)(*types).jaxpr):
            op = OPS[name]
            if op.plan_parameters is not None and op.missing_kernel(platform, operands, params) is None:
                op.plan(platform, operands, params)


def _kernels(jaxpr: Any) -> Iterator[tuple[str, list[Any], dict[str, Any]]]:
    for equation in jaxpr.eqns:
        name = equation.primitive.name.removeprefix("baracuda_")
        if name != equation.primitive.name and name in OPS:
            yield name, [x.aval for x in equation.invars], equation.params
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                yield from _kernels(getattr(inner, "jaxpr", inner))


def _is_jaxpr(x: Any) -> bool:
    return hasattr(x, "eqns") or hasattr(getattr(x, "jaxpr", None), "eqns")


TRANSFORMATIONS = ("jit", "vjp")


def cases(op: str) -> Iterator[Case]:
    """The covering array, and every size class with each option, batch and dtype beside it, value and gradient."""
    yield from (case for case in cover(op, several_devices=False) if case.transformation != "eager")
    space = space_of(op, several_devices=False, with_large=True)
    call = load_all()[op]
    transformations = [name for name in TRANSFORMATIONS if name in space.factors["transformation"]]
    seeds = itertools.count()
    for size, transformation in itertools.product(space.factors["size"], transformations):
        chosen = [{"batch": batch} for batch in space.factors["batch"]]
        alone = (
            [] if call.strategy_options else [(name, value) for name in call.options for value in call.options[name]]
        )
        alone += [("dtype", dtype) for dtype in call.dtypes]
        for options in (*call.strategy_options, *({name: value} for name, value in alone if name not in DATA)):
            chosen += [{"batch": batch, **options} for batch in ("none", "all")]
        for values in chosen:
            found = space.bare(**{"size": size, "transformation": transformation, **values})
            if found is not None:
                yield space.case(found, seed=next(seeds))


DATA = ("ids_dtype", "values", "parameter_dtype", "cond_dtype")
"""Options that are about the data: no strategy depends on them."""


def reached(platform: str, family: str) -> list[Asked]:
    """What the programs of a family of ops ask."""
    with recorded(platform) as asked:
        for op in [name for name in load_all() if name.startswith(family)]:
            for case in cases(op):
                ask(case, platform)
    return asked


BY_NO_PUBLIC_FUNCTION = {
    ("write_slice", "nothing"),
    ("write_slice_backward", "nothing"),
    ("write_slice", "mixed"),
    ("causal_conv1d_backward", "nothing"),
}
"""Strategies that public functions reach with no batch, or not with every batch: they write no empty window, and mapped
windows of 4-bit elements beside others are those of whole bytes. test_plans.py asks for them."""


def missing(platform: str, family: str, asked: list[Asked]) -> list[str]:
    """The strategies that no call reached, with a batch of one element and of more, with operands shared and own."""
    problems = []
    for target, names in NATIVE_MODULES[platform].strategies().items():
        if not target.startswith(family):
            continue
        for strategy in names:
            calls = [parameters for name, parameters, found in asked if (name, found) == (target, strategy)]
            if (target, strategy) in BY_NO_PUBLIC_FUNCTION:
                continue
            if not calls:
                problems.append(f"{target}: {strategy} is not reached")
                continue
            if "batch" in calls[0]:
                for what, holds in (("one element", lambda n: n == 1), ("several elements", lambda n: n > 1)):
                    if not any(holds(parameters["batch"]) for parameters in calls):
                        problems.append(f"{target}: {strategy} is not reached with a batch of {what}")
            for flag in [name for name in calls[0] if name.endswith(("_is_shared", "_are_shared"))]:
                if {bool(parameters[flag]) for parameters in calls if parameters.get("batch", 2) > 1} == {True}:
                    problems.append(f"{target}: {strategy} is not reached with {flag} = 0")
    return problems
