"""The decorator of the public functions of ops."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from jax_baracuda._core import jax_versions
from jax_baracuda._core.arrays import check_choice
from jax_baracuda._core.docstrings import add_descriptions, extend_section
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
        for model in models:
            add_descriptions(function, inspect.getdoc(model))
        if has_twin and "forward_mode" not in (function.__doc__ or ""):
            extend_section(function, "Gradient", _TWIN)
        add_descriptions(function, _IMPLEMENTATION)

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
