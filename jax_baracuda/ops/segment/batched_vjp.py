"""Derivative rules that see the batch of ``vmap``, for batches of graphs that gather from the same rows.

``jax.custom_vjp`` hides the batch from its rules: an array that the whole batch shares gets one cotangent per element,
and JAX adds them up. Here ``vmap`` adds dimensions to the arrays before the rules are bound, as it does for an op.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.interpreters import ad

from jax_baracuda._core import jax_versions
from jax_baracuda._core.autodiff import KernelVjp, is_in_both_modes
from jax_baracuda._core.batch import map_over_batch, map_over_dims, mapped_dims, with_mapped_dim
from jax_baracuda._core.functions import jvp_of_nonzero, placed, with_fixed
from jax_baracuda._core.selection import Selection, current_selection, selecting


@dataclasses.dataclass(frozen=True)
class _Batch:
    """The static arguments of a call and, for each batch dimension, the names of the arrays that it maps."""

    params: Hashable
    mapped_names: tuple[frozenset[str], ...] = ()

    def map(self, function: Callable[..., Any], arrays: Mapping[str, Array]) -> Any:
        """Maps ``function(params, **arrays)`` over the batch dimensions."""
        names = tuple(arrays)
        mapped = [[name in mapped for name in names] for mapped in self.mapped_names]

        def of_positions(*values: Array) -> Any:
            return function(self.params, **dict(zip(names, values, strict=True)))

        return map_over_dims(of_positions, mapped, *arrays.values())


class BatchedVjp:
    """Like :class:`KernelVjp`, but computes a single gradient of the array `data` if the batch shares it.

    Called as ``f(params, **arrays)`` with hashable static `params`; the result is one array.
    """

    def __init__(
        self,
        name: str,
        forward: Callable[..., tuple[Array, Mapping[str, Array]]],
        backward: Callable[..., Mapping[str, Array]],
        *,
        primal: Callable[..., Array] | None = None,
        keeps_data: Callable[[Any, Sequence[str]], bool],
    ):
        """
        Args:
          name: the function's name in JAX's errors.
          forward: ``(params, **arrays) -> (result, residuals)``. Arrays of the call become residuals anyway.
          backward: ``(params, num_joined, residuals, cotangent) -> {name: cotangent}``. The first `num_joined`
            dimensions of the cotangent are batch dimensions that do not map `data`. All other residuals and
            cotangents have these dimensions, too. In a residual, a dimension that does not map it has size 1.
          primal: as in :class:`KernelVjp`.
          keeps_data: ``(params, names of the arrays) -> bool``: whether `data` is a residual. All other arrays are.
        """
        self.name = name
        self._primal = primal or (lambda params, **arrays: forward(params, **arrays)[0])
        self._forward = forward
        self._backward = backward
        self._keeps_data = keeps_data
        self.kernel_vjp = KernelVjp(name, self._batched_forward, self._batched_backward, primal=self.batched_primal)

    def __repr__(self) -> str:  # part of every printed jaxpr
        return f"BatchedVjp({self.name})"

    def __call__(self, params: Hashable, **arrays: Array) -> Array:
        if is_in_both_modes() or not any(isinstance(x, jax.core.Tracer) for x in arrays.values()):
            return self.kernel_vjp(_Batch(params), **arrays)
        call = _BatchedCall(self, tuple(arrays), params, current_selection())
        return call.bind(*jax_versions.unify_varying(*arrays.values()))[0]

    def batched_primal(self, batch: _Batch, **arrays: Array) -> Array:
        return batch.map(self._primal, arrays)

    def _batched_forward(self, batch: _Batch, **arrays: Array) -> tuple[Array, dict[str, Array]]:
        result, residuals = batch.map(self._forward, arrays)
        if not self._keeps_data(batch.params, tuple(arrays)):
            arrays.pop("data")
        return result, {**arrays, **residuals}

    def _batched_backward(self, batch: _Batch, residuals: Mapping[str, Array], cotangent: Array) -> dict[str, Array]:
        num_batch_dims = len(batch.mapped_names)
        joined = [i for i, names in enumerate(batch.mapped_names) if "data" not in names]
        mapped = [i for i in range(num_batch_dims) if i not in joined]
        names = tuple(residuals)

        def backward(cotangent: Array, *arrays: Array) -> Mapping[str, Array]:
            residuals = dict(zip(names, arrays, strict=True))
            if "data" in residuals:
                residuals["data"] = jax.lax.squeeze(residuals["data"], range(len(joined)))
            return self._backward(batch.params, len(joined), residuals, cotangent)

        arrays = [_moved(x, [*mapped, *joined]) for x in (cotangent, *residuals.values())]
        cotangents = map_over_batch(backward, len(mapped), *arrays)
        results = {}
        for name, array in cotangents.items():
            if name == "data":
                results[name] = jnp.expand_dims(array, joined)
            else:
                unmapped = [i for i, mapped_names in enumerate(batch.mapped_names) if name not in mapped_names]
                array = _moved(array, [[*mapped, *joined].index(i) for i in range(num_batch_dims)])
                results[name] = array.sum(unmapped, keepdims=True) if unmapped else array
        return results


def _moved(array: Array, batch_dims: Sequence[int]) -> Array:
    """The array with its batch dimensions in this order."""
    if list(batch_dims) == sorted(batch_dims):
        return array
    return jnp.transpose(array, (*batch_dims, *range(len(batch_dims), array.ndim)))


# ----------------------------------------------------------------------------------------------------------------------
# The primitive: it lowers to its jaxpr, its batching rule adds a dimension, and its JVP differentiates the rules.


@dataclasses.dataclass(frozen=True)
class _BatchedCall:
    vjp: BatchedVjp
    names: tuple[str, ...]
    params: Hashable
    selection: Selection
    num_batch_dims: int = 0

    def bind(self, *arrays: Array) -> list[Array]:
        jaxpr = jax.make_jaxpr(self.running(self.vjp.batched_primal))(*map(jax.typeof, arrays))
        return _call_p.bind(*arrays, call=self, jaxpr=jaxpr)

    def running(self, function: Callable[..., Array]) -> Callable[..., Array]:
        """``function(batch, **arrays)`` as a function of the arrays of the call."""

        def run(*arrays: Array) -> Array:
            mapped = mapped_dims(arrays, self.num_batch_dims)
            mapped_names = (frozenset(itertools.compress(self.names, is_mapped)) for is_mapped in mapped)
            with selecting(self.selection):
                return function(_Batch(self.params, tuple(mapped_names)), **dict(zip(self.names, arrays, strict=True)))

        return run


def _batch_call(
    arrays: Sequence[Array], axes: Sequence[int | None], *, call: _BatchedCall, jaxpr: Any
) -> tuple[list[Array], list[int]]:
    arrays, _ = with_mapped_dim(arrays, axes)
    return dataclasses.replace(call, num_batch_dims=call.num_batch_dims + 1).bind(*arrays), [0]


def _jvp_of_call(
    primals: Sequence[Array], tangents: Sequence[Any], *, call: _BatchedCall, jaxpr: Any
) -> tuple[list[Array], list[Array]]:
    result, tangent = jvp_of_nonzero(call.running(call.vjp.kernel_vjp), primals, tangents)
    return [result], [tangent]


def _transpose_of_call(cotangents: Sequence[Any], *arrays: Any, call: _BatchedCall, jaxpr: Any) -> list[Any]:
    """For a call that is linear in some arrays: transposes the ops in its jaxpr."""
    linear = [i for i, x in enumerate(arrays) if ad.is_undefined_primal(x)]
    function = with_fixed(jax_versions.jaxpr_as_fun(jaxpr), arrays, linear)
    transpose = jax.linear_transpose(function, *(arrays[i].aval for i in linear))
    return placed(transpose([ad.instantiate_zeros(x) for x in cotangents]), linear, len(arrays))


_call_p = jax_versions.program_primitive(
    "baracuda_batched_vjp", batch=_batch_call, jvp=_jvp_of_call, transpose=_transpose_of_call
)
