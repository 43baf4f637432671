"""Programs of other packages, unmodified: in plain JAX, redirected and, where a person would edit them, edited."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Program:
    """A step of another package."""

    step: Callable[..., Any]
    """A function that can be compiled, and whose result is an array or a tree of them."""
    arguments: tuple[Any, ...]
    rtol: float = 1e-4
    """By how much results may differ, as in the tests of the package."""
    atol: float = 1e-5
    """The same, relative to the largest number of an array."""
    edit: Callable[[], contextlib.AbstractContextManager[Any]] | None = None
    """A context in which the package calls our functions while the step is traced."""


MODULES = ("jraph", "fennol", "mlip", "jax_pme", "energnn", "tunix", "mjx")
"""The modules of this package, in the order of the table. Each has ``PROGRAMS``, functions of a size by name,
``SIZES``, of which the first is that of the tests, and ``SIZE_OF``, what a size is."""


def of_package(module: str) -> Any:
    """The module of a package, which must be installed."""
    return importlib.import_module(f"benchmarks.clients.of_{module}")


def programs_of(module: str) -> Mapping[str, Callable[[int], Program]]:
    return of_package(module).PROGRAMS


def small_program(module: str, name: str) -> Program:
    """The program in the size of the tests."""
    return programs_of(module)[name](of_package(module).SIZES[0])
