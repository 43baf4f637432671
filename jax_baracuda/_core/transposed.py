"""A primitive for a linear map that is given by its transpose. Transposing the primitive runs the given function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.interpreters import ad

from jax_baracuda._core import jax_versions
from jax_baracuda._core.functions import jvp_of_nonzero

PullBack = Callable[..., Sequence[jax.Array]]
"""``(*residuals, *cotangents) -> cotangents of the tangents``, linear in the cotangents."""


def transposed(
    pull_back: PullBack, residuals: Sequence[jax.Array], tangents: Sequence[jax.Array], types: Sequence[Any]
) -> list[jax.Array]:
    """Applies the transpose of `pull_back`.

    Reverse mode runs `pull_back` as it is, with its kernels. Forward mode runs its transpose.

    Args:
      pull_back: must not close over arrays.
      residuals: any arrays.
      tangents: one for each cotangent that `pull_back` returns.
      types: the types of the results, and of the cotangents that `pull_back` takes.
    """

    def push_forward(*operands: jax.Array) -> Sequence[jax.Array]:
        own_residuals, own_tangents = operands[: len(residuals)], operands[len(residuals) :]
        return jax.linear_transpose(lambda *ct: list(pull_back(*own_residuals, *ct)), *types)(list(own_tangents))

    operands = [*residuals, *tangents]
    jaxpr = jax.make_jaxpr(push_forward)(*operands)
    return _transposed_p.bind(*operands, jaxpr=jaxpr, pull_back=pull_back, num_residuals=len(residuals))


def _batch_transposed(
    operands: Sequence[jax.Array],
    axes: Sequence[int | None],
    *,
    jaxpr: Any,
    pull_back: PullBack,
    num_residuals: int,
) -> tuple[list[jax.Array], list[int]]:
    """Maps all tangents and cotangents, so that the two stay each other's transpose. Residuals may stay shared."""
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    residuals = operands[:num_residuals]
    # With vmap, because it shards what it broadcasts like the batch.
    tangents = jax.vmap(lambda *own: own[num_residuals:], tuple(axes), axis_size=size)(*operands)

    def mapped(function: Callable[..., Any], num_linear: int) -> Callable[..., Any]:
        return jax.vmap(function, (*axes[:num_residuals], *[0] * num_linear), axis_size=size)

    batched = mapped(jax_versions.jaxpr_as_fun(jaxpr), len(tangents))
    results = _transposed_p.bind(
        *residuals,
        *tangents,
        jaxpr=jax.make_jaxpr(batched)(*residuals, *tangents),
        pull_back=mapped(pull_back, len(jaxpr.out_avals)),
        num_residuals=num_residuals,
    )
    return results, [0] * len(results)


def _jvp_of_transposed(
    primals: Sequence[jax.Array], tangents: Sequence[Any], *, num_residuals: int, **params: Any
) -> tuple[list[jax.Array], list[Any]]:
    """Applies the map to the tangents of its linear operands. JAX differentiates it with respect to the residuals."""
    bind = functools.partial(_transposed_p.bind, **params, num_residuals=num_residuals)
    results = bind(*primals)
    result_tangents = [jax_versions.zero_tangent(x) for x in results]
    if any(not isinstance(x, ad.Zero) for x in tangents[num_residuals:]):
        result_tangents = bind(*primals[:num_residuals], *map(ad.instantiate_zeros, tangents[num_residuals:]))
    if any(not isinstance(x, ad.Zero) for x in tangents[:num_residuals]):

        def of_residuals(*residuals: jax.Array) -> list[jax.Array]:
            return jax_versions.jaxpr_as_fun(params["jaxpr"])(*residuals, *primals[num_residuals:])

        _, by_residuals = jvp_of_nonzero(of_residuals, primals[:num_residuals], tangents[:num_residuals])
        result_tangents = list(map(ad.add_tangents, result_tangents, by_residuals))
    return results, result_tangents


def _transpose_of_transposed(
    cotangents: Sequence[Any], *operands: Any, pull_back: PullBack, num_residuals: int, **_: Any
) -> Any:
    pulled = pull_back(*operands[:num_residuals], *map(ad.instantiate_zeros, cotangents))
    of_tangents = [
        x if ad.is_undefined_primal(tangent) else None
        for x, tangent in zip(pulled, operands[num_residuals:], strict=True)
    ]
    return [None] * num_residuals + of_tangents


_transposed_p = jax_versions.program_primitive(
    "baracuda_transposed", batch=_batch_transposed, jvp=_jvp_of_transposed, transpose=_transpose_of_transposed
)
