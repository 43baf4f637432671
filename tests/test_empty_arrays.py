"""Empty arrays with other dimensions so large that no integer can hold their product."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import meshes

import jax_baracuda as jb
from jax_baracuda import forward_mode
from jax_baracuda._core.selection import Implementation
from jax_baracuda._examples import all_examples
from jax_baracuda._examples.example import Example

HUGE = 2**40
SIZES = dict.fromkeys(("row", "segment", "node", "example", "part"), 0)
SIZES |= dict.fromkeys(("feature", "feature1", "channel", "time"), HUGE)
SIZES |= dict.fromkeys(("head", "q_head", "k_head", "query"), 2**61)


def of_huge_sizes(example: Example) -> Example:
    """The example with no rows, nodes and segments, or no examples. Arrays that are not empty stay small."""
    operands = [operand.dims for operand in example.operands.values()]
    sizes = SIZES | ({"head": 0} if "query" in example.dims else {})  # XLA wants the 0 in front
    small = {name for dims in operands if not any(sizes.get(name) == 0 for name in dims) for name in dims}
    small |= {"feature"} if example.function.__name__.startswith("rope") else set()  # it has as many angles
    small |= {"feature1"} if example.function.__name__.startswith("graph_") else set()  # a thread has a part of a head
    small |= {"time"} if "entry" in example.dims else set()  # a row of a pool holds as many inputs
    sizes = {name: size for name, size in sizes.items() if size == 0 or name not in small}
    return dataclasses.replace(example, sizes={"small": {**example.sizes["small"], **sizes}})


def value_and_derivatives(example: Example) -> Callable[[Mapping[str, Any]], Any]:
    call, names = example.call("small"), example.differentiated("float32")
    twin = dataclasses.replace(example, function=getattr(forward_mode, example.function.__name__, example.function))

    def run(operands: Mapping[str, Any]) -> Any:
        if not names:
            return call(**operands), (), ()
        chosen = {name: operands[name] for name in names}
        value, pull_back = jax.vjp(lambda x: call(**{**operands, **x}), chosen)
        pushed = jax.jvp(lambda x: twin.call("small")(**{**operands, **x}), (chosen,), (chosen,))[1]
        return value, pull_back(value)[0], pushed

    return run


@pytest.mark.parametrize("implementation", ["kernel", "xla"])
@pytest.mark.parametrize("example", [x for x in all_examples() if x.mapped is None], ids=lambda x: x.name)
def test_shapes(example: Example, implementation: Implementation) -> None:
    """Value, gradient and tangent are empty, or sums of nothing."""
    example = of_huge_sizes(example)
    operands = {name: jnp.zeros(x.shape, x.dtype) for name, x in example.operand_types("float32", "small").items()}
    program = value_and_derivatives(example)
    with jb.implementation(implementation):
        value, gradient, tangent = jax.jit(program)(operands)
    types = jax.eval_shape(lambda operands: example.plain_call("small")(**operands), operands)
    assert [x.shape for x in jax.tree.leaves(value)] == [x.shape for x in jax.tree.leaves(types)]
    for name, x in dict(gradient).items():
        assert x.shape == operands[name].shape
    for x in jax.tree.leaves((value, gradient, tangent)):
        if x.size > 0:
            np.testing.assert_array_equal(x, 0)


def test_softmax_of_huge_cells() -> None:
    """Four segments without rows have more cells than any memory."""
    data, ids = jnp.zeros((0, HUGE, HUGE)), jnp.zeros(0, jnp.int32)
    assert jax.jit(lambda x: jb.segment_softmax(x, ids, 4, implementation="kernel"))(data).shape == data.shape


def test_messages_of_no_edges() -> None:
    """Sums over no edges and their gradients are zeros, also without rows or segments, in both implementations."""
    none = jnp.zeros(0, jnp.int32)
    for implementation in ("kernel", "xla"):
        for num_rows, num_segments in ((0, 3), (3, 0), (0, 0)):
            data = jnp.ones((num_rows, 2))
            output, pull_back = jax.vjp(
                lambda x, m=num_segments, by=implementation: jb.gather_segment_sum(x, none, none, m, implementation=by),
                data,
            )
            np.testing.assert_array_equal(output, np.zeros((num_segments, 2)))
            np.testing.assert_array_equal(pull_back(jnp.ones_like(output))[0], np.zeros((num_rows, 2)))


@pytest.mark.parametrize("implementation", [None, "kernel", "xla"])
def test_in_shard_map(implementation: Implementation | None) -> None:
    """Sums of no rows are zeros, also if features are split."""
    mesh = meshes.make_mesh()
    data, ids = jnp.zeros((0, 4)), jnp.zeros(0, jnp.int32)

    def result_by(implementation: Implementation | None) -> jax.Array:
        split = {"in_specs": (P(None, "x"), P()), "out_specs": P(None, "x")}
        reduce = functools.partial(jb.segment_sum, num_segments=3, implementation=implementation)
        return jax.jit(jax.shard_map(reduce, mesh=mesh, **split))(data, ids)

    try:
        result_by("xla")
    except jax.errors.JaxRuntimeError as error:
        if "expected at least one operand" not in str(error):
            raise
        pytest.skip("this version of XLA compiles no such program of plain JAX either")
    np.testing.assert_array_equal(result_by(implementation), np.zeros((3, 4)))
