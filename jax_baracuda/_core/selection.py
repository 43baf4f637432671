"""Which implementation the caller asks for, by an argument or a context.

It becomes a param of the primitives, so that it is part of the trace. :mod:`.dispatch` makes the choice.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal, ParamSpec, TypeVar, cast, get_args

from jax_baracuda._core.docstrings import add_descriptions
from jax_baracuda._core.scopes import Scope, ScopedValue

P = ParamSpec("P")
R = TypeVar("R")

Implementation = Literal["kernel", "xla"]

KERNEL_IF_ANY: Final = "kernel if any"
"""The kernel wherever there is one, faster or not."""

Selection = Implementation | Literal["kernel if any"] | None
"""None: the rules of the op decide."""

_of_context: ScopedValue[Selection] = ScopedValue("implementation", None)
_of_call = threading.local()


def current_selection() -> Selection:
    """The implementation that the running call asks for."""
    selections = getattr(_of_call, "selections", None)
    return selections[-1] if selections else _of_context.value


def may_run_kernel() -> bool:
    """Whether the running call may use a kernel, which can add in the same order in every run."""
    return current_selection() != "xla"


@contextlib.contextmanager
def selecting(selection: Selection) -> Iterator[None]:
    """Ops bound in this context ask for `selection`, which overrides the user's context."""
    selections = _of_call.__dict__.setdefault("selections", [])
    selections.append(selection)
    try:
        yield
    finally:
        selections.pop()


_DESCRIPTION = """

Args:
  implementation: "kernel" (an error if there is none) or "xla" (plain JAX). None: what the context
    :func:`jax_baracuda.implementation` selects, by default whichever was measured to be faster.
"""


def selectable(function: Callable[P, R]) -> Callable[P, R]:
    """Lets the keyword argument `implementation` of a public function select the implementation of its ops.

    Its docstring need not describe the argument.
    """
    add_descriptions(function, _DESCRIPTION)

    @functools.wraps(function)
    def selectable_function(*args: P.args, **kwargs: P.kwargs) -> R:
        asked_for = kwargs.get("implementation")
        if asked_for is None:
            return function(*args, **kwargs)
        with selecting(_checked(function.__name__, asked_for)):
            return function(*args, **kwargs)

    return selectable_function


def _checked(function: str, asked_for: Any) -> Implementation:
    if not isinstance(asked_for, str) or asked_for not in get_args(Implementation):
        raise ValueError(f"{function}: implementation must be 'kernel', 'xla' or None, got {asked_for!r}")
    return cast(Implementation, asked_for)


def implementation(name: Implementation | None = None) -> contextlib.AbstractContextManager[Any]:
    """Context in which all functions of this package use one implementation.

    A function's argument ``implementation=`` overrides the context, and an inner context overrides an outer one. The
    context applies to the thread that enters it, and to functions that are called, that is, traced, inside. A gradient
    uses the implementation of the forward call. Contexts can be left in any order. ``jax.jit`` keeps one trace for each
    context.

    Args:
      name: "kernel": the kernels of this package, and an error if there is none for a call. "xla": plain JAX, which
        XLA can fuse with what surrounds it and give any layout. None: whichever is faster by the rules of the op.

    Returns:
      The context manager.

    Raises:
      ValueError: the name is unknown.
      RuntimeError: the context is left more often than it was entered in the thread.

    Example:
      >>> import jax, jax.numpy as jnp, jax_baracuda as jb
      >>> with jb.implementation("xla"):
      ...     program = jax.make_jaxpr(jb.rope)(jnp.ones((1, 2, 16, 8)))
      >>> print("implementation=xla" in str(program))
      True
    """
    return Scope(_of_context, None if name is None else _checked("implementation", name))
