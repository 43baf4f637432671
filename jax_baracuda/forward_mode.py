"""The functions of jax_baracuda, for both modes of differentiation.

JAX cannot apply forward mode to a function whose reverse mode is a kernel (``jax.custom_vjp``). Here are the same
functions, bound with ``jax.custom_jvp``: ``jax.jvp``, ``jax.jacfwd``, ``jax.linearize`` and ``jax.hessian`` apply to
them, and so do ``jax.grad``, ``jax.vjp`` and ``jax.jacrev``, which run the same backward kernels as for the functions
of :mod:`jax_baracuda`. Values come from the same kernels; tangents are the transpose of the gradient, by kernels too,
but for convolutions, where they are plain JAX, and the terms of products. Of a maximum, the winners tell which tangents
to take; sums over ties are a kernel, but of gathered rows, which XLA adds up as it gathers them. Under ``vmap``, rows
that a batch of graphs shares get a gradient for each graph, which JAX then adds up: where only gradients are taken, the
functions of :mod:`jax_baracuda` may take less memory. ``jax.linear_transpose`` applies to the functions here that are
linear, such as sums, means, rotations, writes and selections. The ``..._backward`` functions serve both modes as they
are.

Every other public function of an op has a twin here, made when it is first asked for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax_baracuda
from jax_baracuda._core.autodiff import in_both_modes

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
    twin: Callable[..., Any] = in_both_modes(getattr(jax_baracuda, name), __name__)
    # Kept: pickle, and caches of compiled programs, want one function of a name.
    return globals().setdefault(name, twin)


def __dir__() -> list[str]:
    return _names()
