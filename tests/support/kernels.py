"""The kernels that programs call, and many calls in one program."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax


def kernels_in(text: str) -> list[str]:
    """The targets of jax_baracuda that a lowered or compiled program calls, in order."""
    return re.findall(r"custom_call(?: @|_target=\")jax_baracuda\.(\w+)[(\"]", text)


def lowered(function: Callable[..., Any], *operands: Any, platform: str | None = None) -> str:
    """The program of a function, traced anew, for a platform or the one that tests run on."""
    traced = jax.jit(lambda *x: function(*x)).trace(*operands)
    return traced.lower(lowering_platforms=None if platform is None else (platform,)).as_text()


def kernels_of(function: Callable[..., Any], *operands: Any, platform: str | None = None) -> list[str]:
    """The targets that the program of a function calls."""
    return kernels_in(lowered(function, *operands, platform=platform))


@dataclasses.dataclass
class Batch:
    """Many calls in one program, because compilation dominates the tests' time. Each call has a check of its result."""

    calls: list[Callable[..., Any]] = dataclasses.field(default_factory=list)
    operands: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)
    checks: list[Callable[..., None]] = dataclasses.field(default_factory=list)

    def add(self, call: Callable[..., Any], operands: Sequence[Any], check: Callable[..., None]) -> None:
        """``check(*results)`` or ``check(result)`` gets what ``call(*operands)`` returned."""
        self.calls.append(call)
        self.operands.append(tuple(operands))
        self.checks.append(check)

    def run(self) -> collections.Counter[str]:
        """Runs all calls in one program, checks their results, and returns how often each kernel is in it."""
        program = jax.jit(lambda all_operands: [f(*x) for f, x in zip(self.calls, all_operands, strict=True)])
        lowered = program.lower(self.operands)
        results = lowered.compile()(self.operands)
        for check, result in zip(self.checks, results, strict=True):
            check(*result) if isinstance(result, tuple) else check(result)
        return collections.Counter(kernels_in(lowered.as_text()))
