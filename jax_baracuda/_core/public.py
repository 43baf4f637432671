"""The decorator of the public functions of ops.

Docstrings of related functions say only what differs from their models, and ``help`` shows all of it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

from jax_baracuda._core import jax_versions
from jax_baracuda._core.arrays import check_choice
from jax_baracuda._core.selection import IMPLEMENTATIONS, selecting

P = ParamSpec("P")
R = TypeVar("R")

_IMPLEMENTATION = """

Args:
  implementation: "kernel" (an error if there is none) or "xla" (plain JAX). None: what the context
    :func:`jax_baracuda.implementation` selects, by default whichever was measured to be faster.
"""

_TWIN = """\
Derivatives of any order exist. ``jax.jvp`` and ``jax.jacfwd`` of this function need its twin of the same name in
:mod:`jax_baracuda.forward_mode`."""


def public_function(*models: Callable[..., Any], has_twin: bool = True) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function public: it completes the docstring, and its errors show no frames of the package.

    The keyword argument `implementation` of the function selects the implementation of its ops. Its docstring need not
    describe the argument.

    Args:
      models: functions whose docstrings have what its own lacks: descriptions of its arguments, and sections. If
        several models have one, that of the first is taken.
      has_twin: whether forward mode needs the twin in ``forward_mode``. The docstring then names the twin, and so does
        the error where the function is called with tangents. If the function was traced into a program before, JAX
        raises its own error when the program runs.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        name = function.__name__
        if function.__doc__ is not None:  # Python may run without docstrings
            function.__doc__ = _completed(function, models, has_twin)

        @jax_versions.hiding_frames
        @functools.wraps(function)
        def of_users(*args: P.args, **kwargs: P.kwargs) -> R:
            asked_for: Any = kwargs.get("implementation")
            check_choice(name, "implementation", asked_for, *IMPLEMENTATIONS, None)
            try:
                with contextlib.nullcontext() if asked_for is None else selecting(asked_for):
                    return function(*args, **kwargs)
            except TypeError as error:
                if not has_twin or "forward-mode" not in str(error) or "custom_vjp" not in str(error):
                    raise
                raise TypeError(
                    f"{name}: JAX can't apply forward-mode autodiff (jvp, jacfwd, linearize) to a custom_vjp function; "
                    f"use jax_baracuda.forward_mode.{name}, to which both modes apply"
                ) from error

        return of_users

    return decorate


def _completed(function: Callable[..., Any], models: Sequence[Callable[..., Any]], has_twin: bool) -> str:
    """The docstring, with the sections and the descriptions of arguments that it lacks."""
    sections = _sections(inspect.cleandoc(function.__doc__ or ""))
    for model in models:
        sections = _with_lacking(function, sections, _sections(inspect.getdoc(model) or ""))
    if has_twin and "Gradient" in sections and not any("forward_mode" in text for text in sections.values()):
        sections["Gradient"] += f"\n{_TWIN}"
    return "\n\n".join(_with_lacking(function, sections, _sections(_IMPLEMENTATION)).values())


def _sections(docstring: str) -> dict[str, str]:
    """The sections by title. The title of the text before the first section is empty."""
    first, *sections = re.split(r"\n\n(?=[A-Z][a-z ]*:\s)", docstring.rstrip())
    return {"": first} | {section.partition(":")[0]: section for section in sections}


def _with_lacking(function: Callable[..., Any], own: dict[str, str], others: dict[str, str]) -> dict[str, str]:
    """The sections of a function, with those and with descriptions of its arguments that only others have."""
    descriptions = _arguments(others.get("Args", "")) | _arguments(own.get("Args", ""))
    described = (descriptions[name] for name in inspect.signature(function).parameters if name in descriptions)
    return others | own | {"Args": "\n".join(["Args:", *described])}


def _arguments(section: str) -> dict[str, str]:
    """The descriptions in a section "Args", by the name of the argument."""
    return {entry.partition(":")[0].strip(): entry.rstrip() for entry in re.split(r"\n(?=  \w)", section)[1:]}
