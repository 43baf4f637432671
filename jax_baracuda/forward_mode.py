"""The functions of jax_baracuda, for both modes of differentiation.

JAX cannot apply forward mode to a function whose reverse mode is a kernel (``jax.custom_vjp``). This module has twins
of these functions, bound with ``jax.custom_jvp``. They support ``jax.jvp``, ``jax.jacfwd``, ``jax.linearize`` and
``jax.hessian``, and also ``jax.grad``, ``jax.vjp`` and ``jax.jacrev``, by the same backward kernels as the functions of
:mod:`jax_baracuda`.

Values come from the same kernels. Tangents are the transpose of the gradient, also by kernels, with exceptions in plain
JAX: convolutions, the terms of products, and attention over edges. For a maximum, the winners say which tangents to
take. Sums over ties are a kernel, except for gathered rows, which XLA adds up as it gathers them.

Under ``vmap``, rows that a batch of graphs shares get a gradient per graph, and JAX adds these up. If only gradients
are needed, the functions of :mod:`jax_baracuda` may therefore take less memory. ``jax.linear_transpose`` applies to the
linear functions here, such as sums, means, rotations, writes and selections.

The ``..._backward`` functions support both modes themselves. Every other public function of an op has a twin here, made
on first access.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax_baracuda
from jax_baracuda._core.autodiff import both_modes

if TYPE_CHECKING:  # type checkers and editors see the signatures and docstrings of the functions themselves
    from jax_baracuda import *  # noqa: F403


def _names() -> list[str]:
    return sorted(
        name
        for name, value in vars(jax_baracuda).items()
        if inspect.isfunction(value)
        and value.__module__.startswith("jax_baracuda.ops.")
        and not name.startswith("_")
        and not name.endswith("_backward")
    )


def __getattr__(name: str) -> Any:
    names = _names()
    if name == "__all__":
        return names
    if name not in names:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    function: Callable[..., Any] = getattr(jax_baracuda, name)

    @functools.wraps(function)
    def twin(*args: Any, **kwargs: Any) -> Any:
        with both_modes():
            return function(*args, **kwargs)

    twin.__module__ = __name__  # where pickle looks for it
    # Stored, because pickle and the caches of compiled programs need the same function object each time.
    return globals().setdefault(name, twin)


def __dir__() -> list[str]:
    return _names()
