"""The functions of ``jax_baracuda.forward_mode`` under all transforms, against plain JAX in float64."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import programs

import jax_baracuda
from jax_baracuda import forward_mode
from jax_baracuda._core.autodiff import KernelVjp
from jax_baracuda._examples import all_examples
from jax_baracuda._examples.example import Example
from jax_baracuda._tools.calls import equations_of, traced_calls

pytestmark = pytest.mark.versions

DIFFERENTIABLE = [x for x in all_examples() if x.differentiated("float32")]
FIRST = list({x.function.__name__: x for x in reversed(DIFFERENTIABLE)}.values())
MAPPED = [x for x in DIFFERENTIABLE if x.mapped is not None]
each_example = pytest.mark.parametrize("example", [*FIRST, *MAPPED], ids=lambda x: x.name)
each_function = pytest.mark.parametrize("example", FIRST, ids=lambda x: x.name)

Arrays = Mapping[str, Any]


def twin_of(example: Example) -> Callable[..., Any]:
    return getattr(forward_mode, example.function.__name__)


def bound(example: Example, function: Callable[..., Any], operands: Arrays) -> Callable[[Arrays], list[jax.Array]]:
    """``{name: differentiated operand} -> results``"""
    call = example._bound(function, "small")

    def of_chosen(chosen: Arrays) -> list[jax.Array]:
        results = jax.tree.leaves(call(**{**operands, **chosen}))
        return [x for x in results if jnp.issubdtype(x.dtype, jnp.inexact)]

    return of_chosen


def problem_of(example: Example, rng: np.random.Generator) -> tuple[Arrays, Arrays, Arrays]:
    """All operands, the differentiated ones, and their tangents."""
    operands = jax.tree.map(jnp.asarray, example.make_operands(rng, "float32", "small"))
    chosen = {name: operands[name] for name in example.differentiated("float32")}
    return operands, chosen, {name: rng.normal(size=x.shape).astype(x.dtype) for name, x in chosen.items()}


def in_float64(tree: Any) -> Any:
    wide = {"f": np.float64, "i": np.int64}
    return jax.tree.map(lambda x: np.asarray(x, wide.get(x.dtype.kind)), tree)


def pushed(function: Callable[[Arrays], Any], chosen: Arrays, tangents: Arrays) -> Any:
    """The tangent, as the transpose of the gradient: the function may have only a reverse mode."""
    results, vjp = jax.vjp(function, chosen)
    return jax.linear_transpose(lambda cotangents: vjp(cotangents)[0], results)(tangents)[0]


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        y = np.asarray(y)
        np.testing.assert_allclose(
            np.asarray(x),
            y,
            rtol=tolerance,
            atol=tolerance * np.abs(y, where=np.isfinite(y), out=np.zeros_like(y)).max(initial=1),
        )


@each_example
def test_tangent(rng: np.random.Generator, example: Example) -> None:
    """``jvp``, ``linearize`` and batched tangents agree with float64. The twin's gradient is that of the function."""
    operands, chosen, tangents = problem_of(example, rng)
    function, twin = (bound(example, x, operands) for x in (example.function, twin_of(example)))
    cotangents = [rng.normal(size=x.shape).astype(x.dtype) for x in jax.eval_shape(twin, chosen)]

    def gradient(of: Callable[..., Any], chosen: Arrays) -> Arrays:
        return jax.vjp(of, chosen)[1](cotangents)[0]

    @jax.jit
    def transformed(chosen: Arrays, tangents: Arrays) -> Any:
        push = functools.partial(jax.jvp, twin, (chosen,))
        batch = jax.tree.map(lambda x: jnp.stack([x, -2 * x]), tangents)
        return (
            push((tangents,)),
            jax.linearize(twin, chosen)[1](tangents),
            jax.vmap(lambda x: push((x,))[1])(batch),
            gradient(twin, chosen),
            gradient(function, chosen),
        )

    (value, tangent), linearized, batched, of_twin, of_function = transformed(chosen, tangents)
    with jax.enable_x64(True):
        plain = bound(example, example.plain_jax, in_float64(operands))
        expected = pushed(plain, in_float64(chosen), in_float64(tangents))
    assert_close(tangent, expected)
    assert_close(linearized, expected)
    assert_close(batched, [np.stack([x, -2 * np.asarray(x)]) for x in expected])
    assert_close(value, function(chosen))
    jax.tree.map(np.testing.assert_array_equal, of_twin, of_function)  # to the bit
    of_calls = (traced_calls(functools.partial(gradient, of), chosen) for of in (twin, function))
    kernels_of_twin, kernels_of_function = (collections.Counter(call.name for call in calls) for calls in of_calls)
    assert kernels_of_twin == kernels_of_function


@each_function
def test_derivatives_of_higher_order(rng: np.random.Generator, example: Example) -> None:
    """Second and third derivatives agree with plain JAX, in each order of modes."""
    operands, chosen, tangents = jax.tree.map(np.asarray, problem_of(example, rng))
    others = {name: rng.normal(size=x.shape) for name, x in chosen.items()}

    def loss(function: Callable[..., Any], chosen: Arrays) -> jax.Array:
        results = bound(example, function, in_float64(operands))(chosen)
        return sum(jnp.sum(jnp.where(jnp.isfinite(x), x, 0) ** 3) for x in results)

    def product(x: Arrays, y: Arrays) -> Any:
        return sum(jnp.vdot(x[name], y[name]) for name in x)

    with jax.enable_x64(True):
        x, u, v = in_float64(chosen), others, in_float64(tangents)

        def reverse(loss: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
            """Products of the second and third derivatives."""
            second = jax.grad(lambda x: product(jax.grad(loss)(x), v))
            return second, jax.grad(lambda x: product(second(x), u))

        of_plain = [jax.jit(f)(x) for f in reverse(functools.partial(loss, example.plain_jax))]
        ours, twin = (functools.partial(loss, f) for f in (example.function, twin_of(example)))
        second, third = reverse(ours)
        checkpointed, _ = reverse(jax.checkpoint(ours))

        @jax.jit
        def products(x: Arrays) -> tuple[list[Any], list[Any]]:
            push = functools.partial(jax.jvp, primals=(x,), tangents=(v,))
            return [
                second(x),
                checkpointed(x),
                push(jax.grad(ours))[1],
                push(jax.grad(twin))[1],
                jax.grad(lambda x: jax.jvp(twin, (x,), (v,))[1])(x),
            ], [third(x), jax.jvp(second, (x,), (u,))[1]]

        for of_order, expected in zip(products(x), of_plain, strict=True):
            for actual in of_order:
                assert_close(actual, expected, 1e-9)


DATA = np.asarray([[1.0, 2.0], [3.0, -1.0], [0.5, 4.0], [2.0, 2.5]], np.float32)
IDS = np.asarray([2, 0, 2, 0], np.int32)


def cube(of: Callable[..., jax.Array], data: jax.Array) -> jax.Array:
    return jnp.sum(of(data, IDS, 3, mode="drop")[jnp.asarray([0, 2])] ** 3)


def is_linear(function: Callable[[Arrays], Any], x: Arrays, y: Arrays) -> bool:
    of_sum = function({name: x[name] + y[name] for name in x})
    parts = zip(function(x), function(y), of_sum, strict=True)
    return all(np.allclose(a + b, together, 1e-9, 1e-9) for a, b, together in parts)


@pytest.mark.parametrize("example", [x for x in all_examples() if x.mapped is None], ids=lambda x: x.name)
def test_linear_transpose(rng: np.random.Generator, example: Example) -> None:
    """Transposes of linear twins and linear gradients agree with the gradient of plain JAX: by all operands if the
    function is jointly linear in them, else by each in which it is linear."""
    operands = jax.tree.map(jnp.asarray, example.make_operands(rng, "float32", "small"))
    names = programs.differentiable_operands(example)
    function = getattr(forward_mode, example.function.__name__, example.function)
    transposed_of = []
    for some in (names, *([name] for name in names if len(names) > 1)):
        if not some or transposed_of[:1] == [names]:
            continue
        chosen = {name: operands[name] for name in some}
        with jax.enable_x64(True):
            plain = bound(example, example.plain_jax, jax.tree.map(jnp.asarray, in_float64(operands)))
            x = jax.tree.map(jnp.asarray, in_float64(chosen))
            y = {name: jnp.asarray(rng.normal(size=z.shape)) for name, z in chosen.items()}
            if not is_linear(plain, x, y):
                continue
            types = jax.eval_shape(plain, x)
            cotangents = [rng.normal(size=z.shape).astype(np.float32) for z in types]
            expected = jax.vjp(plain, x)[1](in_float64(cotangents))
        for transform in (lambda f: f, jax.jit, jax.checkpoint):
            of_chosen = transform(bound(example, function, operands))
            assert_close(jax.linear_transpose(of_chosen, chosen)(cotangents), expected)
        transposed_of.append(some)
    calls = traced_calls(lambda given: example.call("small")(**given), operands)
    assert transposed_of or len(calls) != 1 or not calls[0].op.transposes, "its op is linear"


def test_linear_transpose_of_several_results(rng: np.random.Generator) -> None:
    """The transpose is right for a convolution and its final state, which depends only on some operands."""
    x, state, weight = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 3, 9), (2, 3, 3), (3, 4)))
    both = functools.partial(
        forward_mode.causal_conv1d, weight=weight, initial_state=state * 0, return_final_state=True
    )
    in_weight = functools.partial(forward_mode.causal_conv1d, x, initial_state=state, return_final_state=True)
    for function, array in ((both, x), (lambda weight: in_weight(weight)[0], weight)):
        results, pull_back = jax.vjp(function, array)
        assert_close(jax.linear_transpose(function, array)(results), pull_back(results))
        batched = jax.vmap(function)
        batch = jnp.stack([array, array])
        results, pull_back = jax.vjp(batched, batch)
        assert_close(jax.linear_transpose(batched, batch)(results), pull_back(results))


def test_linear_transpose_of_gathered_sums() -> None:
    """Gathered sums have their own primitive with a transpose. JAX cannot transpose ``jax.custom_vjp``."""
    gather = functools.partial(jax_baracuda.gather_segment_sum, gather_ids=IDS, segment_ids=IDS, num_segments=3)
    for transform, data in ((jax.jit, DATA), (jax.vmap, np.stack([DATA, 2 * DATA]))):
        function = transform(gather)
        results, pull_back = jax.vjp(function, data)
        assert_close(jax.linear_transpose(function, data)(results), pull_back(results))
    with pytest.raises(NotImplementedError, match="Transpose rule .* for 'custom_vjp_call' not implemented"):
        jax.linear_transpose(lambda x: jax_baracuda.segment_sum(x, IDS, 3), DATA)(DATA[:3])


def test_a_program_is_traced_once() -> None:
    """Derivatives do not trace a program again: tangents are closures of its trace, and JAX keeps both."""
    traces = []

    @jax.jit
    def program(data: jax.Array) -> jax.Array:
        traces.append(data)
        return cube(forward_mode.segment_max, data)

    for _ in range(3):
        jax.jvp(program, (DATA,), (DATA,))
        jax.grad(program)(DATA)
    assert len(traces) == 1
    for _ in range(3):
        jax.linearize(program, DATA)
    assert len(traces) == 1


def test_both_modes_of_gradients(rng: np.random.Generator) -> None:
    """Forward mode applies to a gradient whose backward rule calls other functions of this package."""

    def forward(params: None, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return 2 * jnp.sum(x), x

    def backward(params: None, x: jax.Array, d_output: jax.Array) -> dict[str, jax.Array]:
        return {"x": d_output * inner(None, x=x)}

    def vjp_of(primal: Callable[..., jax.Array], slope: float) -> KernelVjp:
        return KernelVjp(
            "function",
            lambda params, x: (primal(x), x),
            lambda params, x, d_output: {"x": slope * d_output},
        )

    inner = vjp_of(lambda x: 3 * x, 3)
    outer = KernelVjp("outer", forward, backward)
    x, tangent = rng.normal(size=(2, 4)).astype(np.float32)
    gradient = jax.grad(lambda x: outer(None, x=x))
    assert_close(jax.jvp(gradient, (x,), (tangent,)), (3 * x, 3 * tangent))


def test_public_gradients_have_no_twin() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'segment_max_backward'"):
        _ = forward_mode.segment_max_backward


def test_integers_have_no_tangent() -> None:
    """The tangent of integer data is float0."""
    data = np.arange(8).reshape(4, 2)
    tangent = jax.jvp(
        lambda x: forward_mode.segment_max(x, IDS, 3), (data,), (np.zeros(data.shape, jax.dtypes.float0),)
    )[1]
    assert tangent.dtype == jax.dtypes.float0


@each_function
def test_words_of_the_error(rng: np.random.Generator, example: Example) -> None:
    """The error of a function without forward mode names its twin, also after calls of the twin."""
    operands, chosen, tangents = problem_of(example, rng)
    name = example.function.__name__
    function, twin = (bound(example, x, operands) for x in (example.function, twin_of(example)))
    twin(chosen)
    program = str(jax.make_jaxpr(function)(chosen))
    of_twin = rf".*use jax_baracuda\.forward_mode\.{name}"
    for call, hint in ((function, of_twin), (jax.jit(function), "")):  # under jit, the error is JAX's own
        if any(x in program for x in ("custom_vjp_call", "baracuda_batched_vjp")):
            with pytest.raises(TypeError, match=f"can't apply forward-mode{hint}"):
                jax.jvp(call, (chosen,), (tangents,))
        else:  # its primitive has both modes
            assert_close(jax.jvp(call, (chosen,), (tangents,)), jax.jvp(twin, (chosen,), (tangents,)))


def test_tangents_are_parts_of_the_program() -> None:
    """A program with tangents contains the primitive that has kernels as its transpose. Lowering inlines it."""
    program = functools.partial(jax.jvp, functools.partial(cube, forward_mode.segment_max))
    names = {x.primitive.name for x in equations_of(jax.make_jaxpr(lambda x: program((x,), (x,)))(DATA))}
    assert "baracuda_transposed" in names
