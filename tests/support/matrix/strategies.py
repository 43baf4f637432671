"""Finds the kernel strategies that the matrix reaches. Asks the native modules, and runs nothing."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from support.matrix.calls import is_inexact, is_of_family, load_all
from support.matrix.generator import FORWARD, Case, cover, space_of
from support.matrix.run import Plan

from jax_baracuda._core.native import NATIVE_MODULES, NativeModule
from jax_baracuda._tools.calls import traced_calls

Asked = tuple[str, str, dict[str, int], str]
"""The platform, the target, the parameters and the strategy of a call."""


@contextlib.contextmanager
def recorded() -> Iterator[list[Asked]]:
    """Records each call that a native module is asked about, and the strategy that it chooses."""
    asked: list[Asked] = []
    plan = NativeModule.plan

    def record(self: NativeModule, target: str, parameters: dict[str, int]) -> Any:
        answer = plan(self, target, parameters)
        assert answer.strategy in self.strategies()[target], f"{target}: {answer.strategy}"
        asked.append((self.platform, target, dict(parameters), answer.strategy))
        return answer

    with mock.patch.object(NativeModule, "plan", record):
        yield asked


BATCH_SIZE = 2
"""A larger batch has too many rows for some strategies."""


def ask(case: Case, platforms: Sequence[str]) -> None:
    """Asks the platforms' modules how they run each kernel of a case's program. The program is only traced."""
    plan = Plan(case, batch_size=BATCH_SIZE)
    function = plan.call.forward_mode if case.transformation in FORWARD else plan.call.function
    with jax.enable_x64(plan.is_x64):
        types = [jax.ShapeDtypeStruct(tuple(map(plan.size_of, x.dims)), jnp.dtype(x.dtype)) for x in plan.arrays]
        program = plan.program(functools.partial(plan.problem.apply, function), is_reference=False)
        for call in traced_calls(program, *types):
            for platform in platforms:
                if call.op.plan_parameters is not None and call.unsupported_reason(platform) is None:
                    call.plan(platform)


def cases(op: str) -> Iterator[Case]:
    """The covering array; and every size class with each option, batch and element size, for value and gradient.

    Leaves out derivatives of gradients: they run only kernels of other ops, and tracing them is slow. Leaves out nested
    batches, because kernels see them as one.
    """
    transformations = ("jit",) if op.endswith("_backward") else ("jit", "vjp")
    yield from (case for case in cover(op, several_devices=False) if case.transformation in transformations)
    space = space_of(op, several_devices=False, with_large=True)
    call = load_all()[op]
    transformations = [name for name in transformations if name in space.factors["transformation"]]
    seeds = itertools.count()
    alone = [] if call.strategy_options else [(name, value) for name in call.options for value in call.options[name]]
    alone += [("dtype", dtype) for dtype in {_bytes_of(dtype): dtype for dtype in reversed(call.dtypes)}.values()]
    batches = [name for name in space.factors["batch"] if name != "nested"]
    chosen = [{"batch": batch, **values} for values in call.strategy_options or [{}] for batch in batches]
    chosen += [{"batch": batch, name: value} for name, value in alone if name not in DATA for batch in ("none", "all")]
    for size, transformation, values in itertools.product(space.factors["size"], transformations, chosen):
        found = space.bare(**{"size": size, "transformation": transformation, **values})
        if found is not None:
            yield space.case(found, seed=next(seeds))


def _bytes_of(dtype: str) -> tuple[bool, float]:
    """A key that is equal for dtypes with the same kernels."""
    return is_inexact(dtype), 0.5 if dtype == "int4" else jnp.dtype(dtype).itemsize


DATA = ("ids_dtype", "values", "parameter_dtype", "cond_dtype")
"""Options that affect only the data: no strategy depends on them."""


def covering(family: str, platforms: Sequence[str]) -> tuple[list[Case], list[str]]:
    """A small set of cases that reach every strategy of a family's kernels, alone and in batches of `BATCH_SIZE`; and
    what no case reaches."""
    candidates = [case for op in load_all() if is_of_family(op, family) for case in cases(op)]
    np.random.default_rng(0).shuffle(candidates)  # early cases then differ most
    chosen: list[Case] = []
    seen: dict[tuple[Any, ...], Asked] = {}
    targets_of: dict[tuple[str, str], set[str]] = {}

    def all_missing() -> list[tuple[str, str, str]]:
        return [(name, *problem) for name in platforms for problem in missing(name, family, seen.values())]

    problems = all_missing()
    with recorded() as asked:

        def asks_in_vain(case: Case) -> bool:
            """Whether every kernel that such cases have called so far is covered."""
            targets = targets_of.get((case.op, case.transformation), set())
            return bool(targets) and targets.isdisjoint(target for _, target, _ in problems)

        def take(case: Case) -> None:
            asked.clear()
            ask(case, platforms)
            targets_of.setdefault((case.op, case.transformation), set()).update(target for _, target, _, _ in asked)
            found = {_kind(*call): call for call in asked}
            if not found.keys() <= seen.keys():
                seen.update(found)
                chosen.append(case)
                problems[:] = all_missing()

        deferred = []
        for case in candidates:
            if problems:
                (deferred.append if asks_in_vain(case) else take)(case)
        for case in deferred:
            if problems:
                take(case)
    return chosen, [f"{name}: {target}: {problem}" for name, target, problem in problems]


def _kind(platform: str, target: str, parameters: Mapping[str, int], strategy: str) -> tuple[Any, ...]:
    """The properties of a call that `missing` checks."""
    has = tuple(bool(parameters.get(flag)) for flag in PRESENCE)
    if parameters.get("batch", 2) == 1:
        return platform, target, strategy, has, "alone"
    return platform, target, strategy, has, *(bool(parameters[flag]) for flag in _sharing(tuple(parameters)))


@functools.cache
def _sharing(names: tuple[str, ...]) -> list[str]:
    """The flags of shared operands on which a plan may depend."""
    return [name for name in names if any(fnmatch.fnmatchcase(name, flag) for flag in SHARING)]


SHARING = [
    *("data_is_shared", "logits_is_shared", "probabilities_is_shared", "segment_ids_is_shared"),
    *("x_is_shared", "d_output_is_shared"),
    *("source_*_is_shared", "start_*_is_shared"),
]


PRESENCE = ("has_initial_state", "has_same_sequence", "has_d_final_state")
"""The flags of optional operands. Each strategy must be reached with and without an operand that the target takes."""


NOT_AT_ALL = "not reached"
NOT_ALONE = "not reached with a batch of one element"
NOT_IN_BATCHES = "not reached with a batch of several elements"

UNREACHABLE = (
    # Public functions write no empty window.
    ("write_slice*", "nothing", "*"),
    # It needs rows without elements, and has a test of its own.
    ("write_rows", "nothing", "*"),
    # Only batches of misaligned elements need access by element. In convolutions, the batch must also share x.
    ("causal_conv1d*", "rows_by_element*", NOT_ALONE),
    ("causal_conv1d*", "rows_by_element*", "* x_is_shared = 0"),
    ("segment_*_backward", "flat_elements", NOT_ALONE),
    # It needs many more segments than rows, and has a test of its own.
    ("segment_order", "merge_sort", "*"),
    # It needs a large batch. Tests of many small problems, and of many small graphs, reach it.
    ("*segment_*", "batch_of_few_rows", "*"),
    # The filter keeps the state of one table only.
    ("segment_m*", "filtered_atomics", NOT_IN_BATCHES),
)
"""What public functions cannot reach: patterns of a target, a strategy and a problem."""


def missing(platform: str, family: str, asked: Iterable[Asked]) -> list[tuple[str, str]]:
    """The targets, each with a strategy that no call reached: with a batch of one element or of several, or with an
    operand that the batch does not share."""
    calls: dict[tuple[str, str], list[dict[str, int]]] = {}
    for of_platform, target, parameters, strategy in asked:
        if of_platform == platform:
            calls.setdefault((target, strategy), []).append(parameters)
    flags = {
        (target, flag) for (target, _), of_all in calls.items() for x in of_all for flag in PRESENCE if x.get(flag)
    }
    return [
        (target, f"{strategy} is {problem}")
        for target, names in NATIVE_MODULES[platform].strategies().items()
        if is_of_family(target, family)
        for strategy in names
        for problem in _problems(calls.get((target, strategy), []), [x for x in PRESENCE if (target, x) in flags])
        if not _is_unreachable(target, strategy, problem)
    ]


@functools.cache
def _is_unreachable(*what: str) -> bool:
    return any(all(map(fnmatch.fnmatchcase, what, known)) for known in UNREACHABLE)


def _problems(calls: Sequence[dict[str, int]], flags: Sequence[str]) -> Iterator[str]:
    if not calls:
        yield NOT_AT_ALL
        return
    if "batch" in calls[0]:
        if not any(parameters["batch"] == 1 for parameters in calls):
            yield NOT_ALONE
        if not any(parameters["batch"] > 1 for parameters in calls):
            yield NOT_IN_BATCHES
    for flag in {flag for names in set(map(tuple, calls)) for flag in _sharing(names)}:
        given = {bool(parameters[flag]) for parameters in calls if flag in parameters and parameters["batch"] != 1}
        if given == {True}:
            yield f"not reached with {flag} = 0"
    for flag in flags:
        for value in {False, True} - {bool(parameters[flag]) for parameters in calls}:
            yield f"not reached with {flag} = {int(value)}"
