"""The rules of an op for JAX's transformations: batching, JVP, transpose and the removal of unused results."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jax_baracuda._core import jax_versions
from jax_baracuda._core.arrays import reshard_like
from jax_baracuda._core.batch import map_over_batch, with_mapped_dim
from jax_baracuda._core.call import OpCall
from jax_baracuda._core.derivatives import derivative_op
from jax_baracuda._core.functions import resolved
from jax_baracuda._core.selection import selecting

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn, Primitive

    from jax_baracuda._core.op import Op


def batch(call: OpCall, primitive: Primitive, axes: Sequence[int | None]) -> tuple[list[jax.Array], list[int]]:
    """The batching rule: puts the mapped axis in front.

    Unmapped operands stay shared, except those written in place and, if the op broadcasts, those that do not broadcast.
    """
    op, params = call.op, call.all_params
    operands, size = with_mapped_dim(call.operands, axes)
    to_broadcast = call.resolve(op.in_place)
    if op.broadcasts:
        names = call.operand_dims
        to_broadcast = [i for i, name in zip(range(len(operands)), names, strict=False) if name not in op.broadcasts]
    for i in to_broadcast:
        operands[i] = jnp.broadcast_to(operands[i], (size, *operands[i].shape[1:]))
    if not op.broadcasts:
        params = {**params, "num_batch_dims": call.num_batch_dims + 1}
    results = primitive.bind(*operands, **params)
    return results, [0] * len(results)


def jvp(call: OpCall, primitive: Primitive, tangents: Sequence[Any]) -> tuple[list[jax.Array], list[Any]]:
    """The JVP rule. The primal is from the kernel. The tangent is from the op itself, `tangent` or the reference.

    The tangent is linear in the tangents of the operands, so JAX can transpose it.
    """
    op, primals = call.op, call.operands
    results = primitive.bind(*primals, **call.all_params)
    nonzero_tangents = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]
    factors = list(call.transposes)
    if factors and set(nonzero_tangents).issubset(itertools.chain(*factors)):

        def term(factor: Sequence[int]) -> Sequence[jax.Array]:
            operands = list(primals)
            for i in factor:
                # Integer operands stay as they are: they have no tangents, nor have the results that they become.
                if jnp.issubdtype(primals[i].dtype, jnp.inexact):
                    operands[i] = ad.instantiate_zeros(tangents[i])
            return primitive.bind(*operands, **call.all_params)

        varying = [factor for factor in factors if not set(factor).isdisjoint(nonzero_tangents)]
        terms = [term(factor) for factor in varying or factors[:1]]
        result_tangents = [functools.reduce(operator.add, of_result) for of_result in zip(*terms, strict=True)]
    elif (tangent_of := op.tangent) is not None and nonzero_tangents == [0]:

        def tangent(first: jax.Array, *arrays: jax.Array) -> Sequence[jax.Array]:
            operands = tuple(op.by_name(arrays[: len(primals)], call.params).values())
            return call.bound(tangent_of)(first, operands, arrays[len(primals) :])

        result_tangents = _map_over_batch(call, tangent, tangents[0], *primals, *results)
    else:
        inexact = tuple(i for i, x in enumerate(results) if jnp.issubdtype(x.dtype, jnp.inexact))
        tangents_of = derivative_op("tangent", op, len(primals), tuple(nonzero_tangents), inexact).primitive
        given = jax_versions.unify_varying(*primals, *(tangents[i] for i in nonzero_tangents))
        pushed = dict(zip(inexact, tangents_of.bind(*given, **call.all_params), strict=True))
        result_tangents = [reshard_like(pushed[i], jax.typeof(x)) if i in pushed else x for i, x in enumerate(results)]
    return results, [
        tangent if jnp.issubdtype(result.dtype, jnp.inexact) else jax_versions.zero_tangent(result)
        for result, tangent in zip(results, result_tangents, strict=True)
    ]


def transpose(call: OpCall, cotangents: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
    """The transpose rule, with respect to the undefined primals. The op is linear in them."""
    linear = [i for i, x in enumerate(operands) if ad.is_undefined_primal(x)]
    cotangents = [ad.instantiate_zeros(ct) for ct in cotangents]
    results: list[Any] = [None] * len(operands)
    factor = next((factor for factor in call.transposes if set(linear).issubset(factor)), None)
    if factor is not None:

        def transpose(*arrays: jax.Array) -> Sequence[jax.Array]:
            own_types = [call.own_operands[i] for i in factor]
            transpose_of = call.bound(call.transposes[factor])
            return transpose_of(own_types, arrays[: len(cotangents)], *arrays[len(cotangents) :])

        names = list(call.operand_dims)
        of_factor = {names[i] for i in factor}
        others = (x for name, x in call.op.by_name(operands, call.params).items() if name not in of_factor)
        transposed = _map_over_batch(call, transpose, *cotangents, *others)
        for i in linear:
            x = transposed[factor.index(i)]
            results[i] = ad.Zero(call.operands[i]) if x is None else _sum_over_shared_batch(x, call.operands[i])
        return results
    inexact = tuple(i for i, x in enumerate(cotangents) if jnp.issubdtype(x.dtype, jnp.inexact))
    cotangents_of = derivative_op("cotangent", call.op, len(operands), tuple(linear), inexact).primitive
    # The op is linear in the undefined primals, so its derivative is the same at zeros.
    primals = (ad.instantiate_zeros(ad.Zero(x.aval)) if i in linear else x for i, x in enumerate(operands))
    given = jax_versions.unify_varying(*primals, *(cotangents[i] for i in inexact))
    for i, x in zip(linear, cotangents_of.bind(*given, **call.all_params), strict=True):
        results[i] = _sum_over_shared_batch(x, call.operands[i])
    return results


def drop_unused_results(op: Op, are_used: Sequence[bool], equation: JaxprEqn) -> tuple[list[bool], JaxprEqn | None]:
    """The rule that removes unused results: the whole call if all are unused, else the unused optional ones."""
    uses_operands = [any(are_used)] * len(equation.invars)
    if not any(are_used):
        return uses_operands, None
    names = resolved(op.results, equation.params)
    is_left = [is_used or name not in op.optional_results for name, is_used in zip(names, are_used, strict=True)]
    flags = {op.optional_results[name]: False for name, left in zip(names, is_left, strict=True) if not left}
    outvars = list(itertools.compress(equation.outvars, is_left))
    return uses_operands, equation.replace(outvars=outvars, params={**equation.params, **flags})


def _map_over_batch(call: OpCall, function: Callable[..., Any], *arrays: jax.Array | None) -> Any:
    with selecting(call.selection):
        return map_over_batch(function, call.num_batch_dims, *arrays)


def _sum_over_shared_batch(cotangent: jax.Array, primal: Any) -> jax.Array:
    """Sums a cotangent over the batch dimensions that share its operand, and gives it the operand's sharding."""
    sizes = zip(cotangent.shape, primal.shape, strict=True)
    shared = tuple(axis for axis, (size, own_size) in enumerate(sizes) if size != own_size)
    return reshard_like(jnp.sum(cotangent, shared, keepdims=True) if shared else cotangent, primal)
