"""Binds forward kernels to backward kernels."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_baracuda._core import jax_versions
from jax_baracuda._core.arrays import reshard_like
from jax_baracuda._core.selection import Selection, current_selection, selecting

P = ParamSpec("P")
R = TypeVar("R")

_mode = threading.local()


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Types:
    """The types of the arrays of a call, None for those that are not differentiated: a static residual."""

    structure: Any
    of_leaves: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class _Call:
    """What is static in a call. Its derivatives use the implementation that it asks for, wherever they are traced."""

    params: Hashable
    selection: Selection


class KernelVjp:
    """A function of arrays whose reverse-mode derivative is a kernel.

    Called as ``f(params, **arrays)`` with hashable static `params`; an array that a call omits is None. In forward mode
    (see :func:`in_forward_mode`), and where no array has a tangent space, the primitives are called directly, without
    ``jax.custom_vjp``.
    """

    def __init__(
        self,
        name: str,
        primal: Callable[..., Any],
        forward: Callable[..., tuple[Any, Any]],
        backward: Callable[..., Mapping[str, Any]],
        *,
        symbolic_zeros: bool = False,
    ):
        """
        Args:
          name: what JAX's errors call the function.
          primal: ``(params, **arrays) -> result``
          forward: ``(params, **arrays) -> (result, residuals)``
          backward: ``(params, residuals, cotangent) -> {name: cotangent}``, without arrays that have no tangent space.
            The cotangents are cast and resharded to the types of their arrays.
          symbolic_zeros: whether `backward` takes one argument more, ``{name: type}`` of the arrays that are
            differentiated: the cotangents of others may be left out.
        """
        self._primal = primal
        self.forward = forward
        self.backward = backward
        self._symbolic_zeros = symbolic_zeros

        def reverse_mode(call: _Call, arrays: Mapping[str, Any]) -> Any:
            with selecting(call.selection):
                return primal(call.params, **arrays)

        reverse_mode.__name__ = name
        self._reverse_mode = jax.custom_vjp(reverse_mode, nondiff_argnums=(0,))
        self._reverse_mode.defvjp(self._forward_with_types, self._backward_with_types, symbolic_zeros=symbolic_zeros)

    def __call__(self, params: Hashable, **arrays: Any) -> Any:
        # custom_vjp wants the cotangents to vary over the same manual axes as the primals, so the cast comes first.
        leaves, structure = jax.tree.flatten(arrays)
        leaves = list(jax_versions.unify_varying(*leaves))
        arrays = jax.tree.unflatten(structure, leaves)
        has_tangents = any(jnp.issubdtype(x.dtype, jnp.inexact) for x in leaves)
        if is_in_forward_mode() or not has_tangents:
            return self._primal(params, **arrays)
        return self._reverse_mode(_Call(params, current_selection()), arrays)

    def _forward_with_types(self, call: _Call, primals: Mapping[str, Any]) -> tuple[Any, tuple[_Types, Any]]:
        leaves, structure = jax.tree.flatten(primals)
        is_differentiated = [not self._symbolic_zeros or x.perturbed for x in leaves]
        arrays = [x.value if self._symbolic_zeros else x for x in leaves]
        types = tuple(jax.typeof(x) if use else None for x, use in zip(arrays, is_differentiated, strict=True))
        with selecting(call.selection):
            result, residuals = self.forward(call.params, **jax.tree.unflatten(structure, arrays))
        return result, (_Types(structure, types), residuals)

    def _backward_with_types(
        self, call: _Call, residuals: tuple[_Types, Any], cotangent: Any
    ) -> tuple[Mapping[str, Any]]:
        types = jax.tree.unflatten(residuals[0].structure, residuals[0].of_leaves)
        if self._symbolic_zeros:
            if all(isinstance(x, jax.custom_derivatives.SymbolicZero) for x in jax.tree.leaves(cotangent)):
                return (dict.fromkeys(types),)
            cotangent = jax.tree.map(_instantiated, cotangent)
        of_types = (types,) if self._symbolic_zeros else ()
        with selecting(call.selection):
            cotangents = self.backward(call.params, residuals[1], cotangent, *of_types)
        return ({name: _like(cotangents.get(name), type_) for name, type_ in types.items()},)


def _like(cotangents: Any, types: Any) -> Any:
    """Cotangents in the types of their primals; both may be lists."""
    if cotangents is None or types is None:
        return None
    if isinstance(types, list):
        return [_like(cotangent, type_) for cotangent, type_ in zip(cotangents, types, strict=True)]
    return reshard_like(cotangents.astype(types.dtype), types)


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


def is_in_forward_mode() -> bool:
    """Whether functions with rules are bound straight to the primitives."""
    return getattr(_mode, "forward", False)


@contextlib.contextmanager
def without_custom_vjp() -> Iterator[None]:
    """In this context, functions with rules are bound straight to the primitives."""
    previous = is_in_forward_mode()
    _mode.forward = True
    try:
        yield
    finally:
        _mode.forward = previous


def in_forward_mode(function: Callable[P, R]) -> Callable[P, R]:
    """The public function `function`, bound straight to the primitives, so that ``jax.jvp`` applies to it."""

    @functools.wraps(function)
    def forward_mode_function(*args: P.args, **kwargs: P.kwargs) -> R:
        with without_custom_vjp():
            return function(*args, **kwargs)

    forward_mode_function.__module__ = "jax_baracuda.forward_mode"  # where pickle looks for it
    return forward_mode_function
