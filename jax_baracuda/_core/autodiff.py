"""Binds forward kernels to backward kernels."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_baracuda._core import jax_versions
from jax_baracuda._core.arrays import split_like

P = ParamSpec("P")
R = TypeVar("R")

_mode = threading.local()


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Types:
    """The types of the arrays of a call, None for those that are not differentiated: a static residual."""

    of_arrays: tuple[Any, ...]


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
        *,
        skips_constants: bool = False,
    ):
        """
        Args:
          primal: ``(params, *arrays) -> result``
          forward: ``(params, *arrays) -> (result, residuals)``
          backward: ``(params, residuals, cotangent) -> cotangents``, None for an array without a tangent space. They
            are cast and resharded to the types of their arrays.
          skips_constants: whether `backward` takes one argument more, the types of the arrays, with None in place of
            those that are not differentiated. Their cotangents may be None, too.
        """
        self._primal = primal
        self.forward = forward
        self.backward = backward
        self._skips_constants = skips_constants
        self._reverse_mode = jax.custom_vjp(primal, nondiff_argnums=(0,))
        self._reverse_mode.defvjp(self._forward_with_types, self._backward_with_types, symbolic_zeros=skips_constants)

    def _forward_with_types(self, params: Hashable, *primals: Any) -> tuple[Any, tuple[_Types, Any]]:
        arrays = tuple(x.value for x in primals) if self._skips_constants else primals
        is_differentiated = [x.perturbed for x in primals] if self._skips_constants else [True] * len(arrays)
        types = tuple(jax.typeof(x) if use else None for x, use in zip(arrays, is_differentiated, strict=True))
        result, residuals = self.forward(params, *arrays)
        return result, (_Types(types), residuals)

    def _backward_with_types(
        self, params: Hashable, residuals: tuple[_Types, Any], cotangent: Any
    ) -> tuple[jax.Array | None, ...]:
        types, residuals = residuals[0].of_arrays, residuals[1]
        if self._skips_constants:
            if all(isinstance(x, jax.custom_derivatives.SymbolicZero) for x in jax.tree.leaves(cotangent)):
                return (None,) * len(types)
            cotangent = jax.tree.map(_instantiated, cotangent)
            cotangents = self.backward(params, residuals, cotangent, types)
        else:
            cotangents = self.backward(params, residuals, cotangent)
        return tuple(
            ct if ct is None or primal is None else split_like(ct.astype(primal.dtype), primal)
            for ct, primal in zip(cotangents, types, strict=True)
        )

    def __call__(self, params: Hashable, *arrays: jax.Array) -> Any:
        # custom_vjp wants the cotangents to vary over the same manual axes as the primals, so the cast comes first.
        arrays = jax_versions.unify_varying(*arrays)
        has_tangents = any(jnp.issubdtype(x.dtype, jnp.inexact) for x in arrays)
        if getattr(_mode, "forward", False) or not has_tangents:
            return self._primal(params, *arrays)
        return self._reverse_mode(params, *arrays)


def _instantiated(cotangent: Any) -> jax.Array:
    is_zero = isinstance(cotangent, jax.custom_derivatives.SymbolicZero)
    return jnp.zeros(cotangent.shape, cotangent.dtype) if is_zero else cotangent


def map_together(results: Sequence[jax.Array], arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """The results, every one of them mapped by ``vmap`` where any of the results and arrays is.

    For functions of which not all results depend on all arrays: where ``vmap`` maps some results of a
    ``jax.custom_vjp`` function only, JAX counts the cotangents of the others once for every element of the batch.
    """
    return tuple(_map_together.bind(*results, *arrays, num_results=len(results)))


_map_together = Primitive("baracuda_map_together")
_map_together.multiple_results = True


@_map_together.def_impl
def _impl(*values: jax.Array, num_results: int) -> list[jax.Array]:
    return list(values[:num_results])


@_map_together.def_abstract_eval
def _abstract_eval(*avals: Any, num_results: int) -> list[Any]:
    return list(avals[:num_results])


def _batch(
    values: Sequence[jax.Array], axes: Sequence[int | None], *, num_results: int
) -> tuple[list[jax.Array], list[int]]:
    size = next(x.shape[axis] for x, axis in zip(values, axes, strict=True) if axis is not None)
    mapped = [
        jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(values, axes, strict=True)
    ]
    return _map_together.bind(*mapped, num_results=num_results), [0] * num_results


def _jvp(
    primals: Sequence[jax.Array], tangents: Sequence[Any], *, num_results: int
) -> tuple[list[jax.Array], list[Any]]:
    return _map_together.bind(*primals, num_results=num_results), list(tangents[:num_results])


batching.primitive_batchers[_map_together] = _batch
ad.primitive_jvps[_map_together] = _jvp
mlir.register_lowering(_map_together, lambda ctx, *values, num_results: values[:num_results])


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

    forward_mode_function.__module__ = "jax_baracuda.forward_mode"  # where pickle looks for it
    return forward_mode_function
