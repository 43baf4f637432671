"""Binds forward kernels to backward kernels."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp

from jax_baracuda._core import jax_versions

P = ParamSpec("P")
R = TypeVar("R")

_mode = threading.local()


class Differentiable:
    """A function of arrays whose reverse-mode derivative is a kernel.

    Called as ``f(params, *arrays)`` with hashable static `params`. In forward mode (see :func:`in_forward_mode`), and
    where no array has a tangent space, the primitives are called directly, without ``jax.custom_vjp``.
    """

    def __init__(
        self,
        primal: Callable[..., Any],
        forward: Callable[..., tuple[Any, Any]],
        backward: Callable[..., tuple[jax.Array | None, ...]],
    ):
        """
        Args:
          primal: ``(params, *arrays) -> result``
          forward: ``(params, *arrays) -> (result, residuals)``
          backward: ``(params, residuals, cotangent) -> cotangents``, None for an array without a tangent space.
        """
        self._primal = primal
        self.forward = forward
        self.backward = backward
        self._reverse_mode = jax.custom_vjp(primal, nondiff_argnums=(0,))
        self._reverse_mode.defvjp(forward, backward)

    def __call__(self, params: Hashable, *arrays: jax.Array) -> Any:
        # custom_vjp wants the cotangents to vary over the same manual axes as the primals, so the cast comes first.
        arrays = jax_versions.unify_varying(*arrays)
        has_tangents = any(jnp.issubdtype(x.dtype, jnp.inexact) for x in arrays)
        if getattr(_mode, "forward", False) or not has_tangents:
            return self._primal(params, *arrays)
        return self._reverse_mode(params, *arrays)


@contextlib.contextmanager
def _forward_mode() -> Iterator[None]:
    previous = getattr(_mode, "forward", False)
    _mode.forward = True
    try:
        yield
    finally:
        _mode.forward = previous


def in_forward_mode(function: Callable[P, R]) -> Callable[P, R]:
    """The public function `function`, bound straight to the primitives, so that ``jax.jvp`` applies to it."""

    @functools.wraps(function)
    def forward_mode_function(*args: P.args, **kwargs: P.kwargs) -> R:
        with _forward_mode():
            return function(*args, **kwargs)

    return forward_mode_function
