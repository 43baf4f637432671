"""The rules of an op for JAX's transformations: abstract evaluation, batching, JVP and transpose."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jax_baracuda._core import jax_versions
from jax_baracuda._core.arrays import in_automatic_mode, reshard_like
from jax_baracuda._core.batch import map_over_batch, mapped_dims
from jax_baracuda._core.call import OpCall
from jax_baracuda._core.definition import OpDefinition
from jax_baracuda._core.selection import selecting

if TYPE_CHECKING:
    from jax.extend.core import Primitive


def abstract_eval(op: OpDefinition, *operands: Any, donated: tuple[int, ...] = (), **params: Any) -> list[Any]:
    call = OpCall(op, operands, params)
    types = call.result_types()
    specs = [jax_versions.explicit_spec(aval) for aval in operands]
    if all(spec is None for spec in specs):
        return [jax_versions.result_aval(operands[0], shape, dtype, None) for shape, dtype in types]
    like = next(aval for aval, spec in zip(operands, specs, strict=True) if spec is not None)  # has the mesh
    results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in types]
    shapes = call.named_shapes(results)
    assignment = shapes.assign([*specs, *(None for _ in results)], call.resolve(op.replicated_dims))
    return [
        jax_versions.result_aval(like, shape, dtype, shapes.spec(names, shape, assignment))
        for (shape, dtype), names in zip(types, shapes.results, strict=True)
    ]


def batch(
    op: OpDefinition, primitive: Primitive, operands: Sequence[jax.Array], axes: Sequence[int | None], **params: Any
) -> tuple[list[jax.Array], list[int]]:
    """The batching rule: puts the mapped axis in front.

    Unmapped operands stay shared, except those written in place and, if the op broadcasts, those that do not broadcast.
    """
    call = OpCall(op, operands, params)
    mapped_size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    operands = [x[None] if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(operands, axes, strict=True)]
    whole = call.resolve(op.in_place)
    if op.broadcasts:
        names = call.resolve(op.operands)
        whole = [i for i, name in zip(range(len(operands)), names, strict=False) if name not in op.broadcasts]
    for i in whole:
        operands[i] = jnp.broadcast_to(operands[i], (mapped_size, *operands[i].shape[1:]))
    if not op.broadcasts:
        params = params | {"num_batch_dims": call.num_batch_dims + 1}
    results = primitive.bind(*operands, **params)
    return results, [0] * len(results)


def reference_of_call(op: OpDefinition, *operands: jax.Array, **params: Any) -> list[jax.Array]:
    """Calls the reference. Under explicit sharding, mesh axes are automatic inside, and only results get a sharding."""
    # When JAX differentiates a jitted function, its constants are NumPy arrays, which take no tracer as an index.
    operands = tuple(map(jnp.asarray, operands))
    call = OpCall(op, operands, params)
    mapped = mapped_dims(operands, call.num_batch_dims)
    own_reference = call.bound(op.reference)

    def reference(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(map_over_batch(own_reference, mapped, *operands))

    avals = [jax.typeof(x) for x in operands]
    if any(jax_versions.explicit_spec(aval) is not None for aval in avals):
        results = abstract_eval(op, *avals, **params)
        reference = in_automatic_mode(reference, results[0], *(result.sharding.spec for result in results))
    with selecting(call.selection):
        return list(reference(*operands))


def _varying_reference(op: OpDefinition, *operands: jax.Array, **params: Any) -> list[jax.Array]:
    """The reference. All results vary over the operands' manual axes, as the op's do, even if they use no operand."""
    results = reference_of_call(op, *operands, **params)
    return list(jax_versions.unify_varying(*operands, *results)[len(operands) :])


def with_fixed(function: Callable[..., Any], operands: Sequence[Any], free: Sequence[int]) -> Callable[..., Any]:
    """A function of the operands at the positions `free`, with the others fixed."""

    def of_free(*free_operands: jax.Array) -> Any:
        all_operands = list(operands)
        for i, x in zip(free, free_operands, strict=True):
            all_operands[i] = x
        return function(*all_operands)

    return of_free


def jvp_of_nonzero(function: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    """``jax.jvp`` with respect to the primals whose tangents are not symbolic zeros."""
    nonzero = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]
    results: tuple[Any, Any] = jax.jvp(
        with_fixed(function, primals, nonzero), [primals[i] for i in nonzero], [tangents[i] for i in nonzero]
    )
    return results


def jvp(
    op: OpDefinition, primitive: Primitive, primals: Sequence[jax.Array], tangents: Sequence[Any], **params: Any
) -> tuple[list[jax.Array], list[Any]]:
    """The JVP rule. The primal is from the kernel. The tangent is from the op itself, `tangent` or the reference.

    The tangent is linear in the tangents of the operands, so JAX can transpose it.
    """
    results = primitive.bind(*primals, **params)
    nonzero_tangents = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]
    call = OpCall(op, primals, params)
    if op.transpose is not None and all(i in call.linear for i in nonzero_tangents):
        operands = list(primals)
        for i in call.linear:
            # An integer operand is its own placeholder: the result of an integer operand has no tangent.
            if jnp.issubdtype(primals[i].dtype, jnp.inexact):
                operands[i] = ad.instantiate_zeros(tangents[i])
        result_tangents = primitive.bind(*operands, **params)
    elif (tangent_of := op.tangent) is not None and nonzero_tangents == [0]:
        arrays = (tangents[0], *primals, *results)

        def tangent(first: jax.Array, *arrays: jax.Array) -> Sequence[jax.Array]:
            return call.bound(tangent_of)(first, arrays[: len(primals)], arrays[len(primals) :])

        with selecting(call.selection):
            result_tangents = map_over_batch(tangent, mapped_dims(arrays, call.num_batch_dims), *arrays)
    else:
        reference = functools.partial(_varying_reference, op, **params)
        _, result_tangents = jvp_of_nonzero(reference, primals, tangents)
    return results, [
        tangent if jnp.issubdtype(result.dtype, jnp.inexact) else jax_versions.zero_tangent(result)
        for result, tangent in zip(results, result_tangents, strict=True)
    ]


def transpose(op: OpDefinition, cotangents: Sequence[Any], *operands: Any, **params: Any) -> list[Any]:
    """The transpose rule, with respect to the undefined primals. The op is linear in them."""
    linear = [i for i, x in enumerate(operands) if ad.is_undefined_primal(x)]
    cotangents = [ad.instantiate_zeros(ct) for ct in cotangents]
    results: list[Any] = [None] * len(operands)
    avals = [x.aval if ad.is_undefined_primal(x) else jax.typeof(x) for x in operands]
    call = OpCall(op, avals, params)
    if (transpose_of := op.transpose) is not None and all(i in call.linear for i in linear):

        def transpose(*arrays: jax.Array) -> Sequence[jax.Array]:
            own_avals = [call.own_operands[i] for i in call.linear]
            return call.bound(transpose_of)(own_avals, arrays[: len(cotangents)], *arrays[len(cotangents) :])

        arrays = (*cotangents, *(x for i, x in enumerate(operands) if i not in call.linear))
        with selecting(call.selection):
            transposed = map_over_batch(transpose, mapped_dims(arrays, call.num_batch_dims), *arrays)
        for i in linear:
            results[i] = _sum_over_shared_batch(transposed[call.linear.index(i)], avals[i])
        return results
    reference = with_fixed(functools.partial(_varying_reference, op, **params), operands, linear)
    transpose = jax.linear_transpose(reference, *(avals[i] for i in linear))
    for i, x in zip(linear, transpose(cotangents), strict=True):
        results[i] = reshard_like(x, avals[i])
    return results


def _sum_over_shared_batch(cotangent: jax.Array, primal: Any) -> jax.Array:
    """Sums a cotangent over the batch dimensions that share its operand, and gives it the operand's sharding."""
    sizes = zip(cotangent.shape, primal.shape, strict=True)
    shared = tuple(axis for axis, (size, own_size) in enumerate(sizes) if size != own_size)
    return reshard_like(jnp.sum(cotangent, shared, keepdims=True) if shared else cotangent, primal)
