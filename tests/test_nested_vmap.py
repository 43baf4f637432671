"""``vmap`` of ``vmap``: the two batches stay two dimensions, so a batch that is split over devices stays split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import programs
from support.meshes import exchanges_in

from jax_baracuda._examples.example import Example, value_and_gradient

OUTER, INNER = 3, len(jax.devices())


def first_derivative(example: Example) -> Callable[[Any], Any]:
    """The results and the gradient of a sum of squares."""
    call = example.call("small")
    run = value_and_gradient(call, example.differentiated("float32"))
    return lambda operands: run(operands, call(**operands))


def second_derivative(example: Example) -> Callable[[Any], Any]:
    names, first = example.differentiated("float32"), first_derivative(example)

    def loss(chosen: Any, operands: Any) -> jax.Array:
        return sum(jnp.sum(x**2) for x in jax.tree.leaves(first({**operands, **chosen})[1]))

    return lambda operands: jax.grad(loss)({name: operands[name] for name in names}, operands)


PROGRAMS = {example.name: (first_derivative(example), example) for example in programs.FIRST_EXAMPLES.values()} | {
    f"second derivative of {example.name}": (second_derivative(example), example)
    for example in programs.FIRST_EXAMPLES.values()
    if example.function.__name__ in ("segment_max", "segment_prod", "segment_softmax")
}


@pytest.mark.skipif(INNER == 1, reason="there is only one device")
@pytest.mark.parametrize("others_are_shared", [False, True], ids=["nothing shared", "others shared"])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_split_inner_batch(rng: np.random.Generator, axis_type: AxisType, name: str, others_are_shared: bool) -> None:
    """Values are right and split like the operands, without a collective."""
    if jax.__version_info__ < (0, 9) and axis_type == AxisType.Explicit and name.startswith("second"):
        pytest.skip("JAX 0.8 loses the sharding of cotangents that are mapped through jax.sharding.auto_axes")
    program, example = PROGRAMS[name]
    one = programs.exact_operands(rng, example)
    if others_are_shared and len(one) == 1:
        pytest.skip("there is no other operand")
    first = next(iter(one))
    axes = {name: 0 if name == first or not others_are_shared else None for name in one}
    arrays = {
        name: x if axes[name] is None else np.stack([np.roll(x, i, -1) if x.ndim else x for i in range(OUTER * INNER)])
        for name, x in one.items()
    }
    arrays = {
        name: x if axes[name] is None else x.reshape(OUTER, INNER, *one[name].shape) for name, x in arrays.items()
    }
    mesh = jax.make_mesh((INNER,), ("batch",), axis_types=(axis_type,))
    with jax.set_mesh(mesh):
        operands = {
            name: jax.device_put(x, NamedSharding(mesh, P() if axes[name] is None else P(None, "batch")))
            for name, x in arrays.items()
        }
        compiled = jax.jit(jax.vmap(jax.vmap(program, (axes,)), (axes,))).lower(operands).compile()
        results = jax.tree.leaves(compiled(operands))
        for result in results:
            assert result.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "batch")), result.ndim)
        results = [np.asarray(result) for result in results]
    assert not exchanges_in(compiled.as_text())
    of_one = jax.jit(program)
    for index in np.ndindex(OUTER, INNER):
        each = {name: x if axes[name] is None else x[index] for name, x in arrays.items()}
        for got, want in zip(results, jax.tree.leaves(of_one(each)), strict=True):
            programs.assert_same(example, got[index], want)
