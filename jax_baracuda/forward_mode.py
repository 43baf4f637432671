"""The functions of jax_baracuda, for forward-mode differentiation.

JAX cannot apply forward mode to a function whose reverse mode is a kernel (``jax.custom_vjp``). Here are the same
functions, bound straight to the primitives: use them under ``jax.jvp``, ``jax.jacfwd`` and ``jax.linearize``. Their
value comes from the same kernels, and so does the tangent where the function is linear (sums, means, rotations,
selections, written windows); other tangents come from plain JAX. For ``jax.grad``, ``jax.vjp``, ``jax.jacrev`` and
``jax.hessian`` use the functions of :mod:`jax_baracuda`, whose backward pass is a kernel too. The ``..._backward``
functions serve both modes as they are.

Every other public function of an op has a twin here, made when it is first asked for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax_baracuda
from jax_baracuda._core.autodiff import in_forward_mode

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
    twin: Callable[..., Any] = in_forward_mode(getattr(jax_baracuda, name))
    # Kept: pickle, and caches of compiled programs, want one function of a name.
    return globals().setdefault(name, twin)


def __dir__() -> list[str]:
    return _names()
