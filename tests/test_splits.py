"""The cost of splitting a dimension: compiled programs agree with each cell of the tables in docs/many_devices.md.

Each function is called under ``jit`` with shardings for its arguments. Only one dimension is split. A cell says what
devices exchange; units are multiplied by the sizes of their dimensions.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support.meshes import Exchange, exchanges_in

from jax_baracuda._examples import all_examples
from jax_baracuda._examples.example import Example, value_and_gradient

NUM_DEVICES = 8
pytestmark = pytest.mark.skipif(
    len(jax.devices()) < NUM_DEVICES, reason=f"there are less than {NUM_DEVICES} devices to split things over"
)

SIZES = {"row": 128, "token": 128, "node": 56, "segment": 16, "feature": 24, "feature1": 64}
SIZES |= {"example": 16, "channel": 32, "time": 64, "tap": 4, "state": 3, "new": 40, "head": 32}
SIZES |= {"q_head": 32, "k_head": 56, "sequence": 40, "query": 56, "key": 72, "batch": 8, "slot": 512, "layer": 16}
"""Sizes differ within an example, so that a size identifies a dimension of a result."""

TOO_SHORT = {"tap", "state", "entry", "section"}
"""Dimensions that are too short to split: a few taps of a filter and inputs of a state, the positions of a token."""

NEVER_SPLIT = {"ends"}
"""Operands that stay whole: the N + 1 boundaries of a ragged batch are made from them and do not divide evenly."""


def dims_of_heading(heading: str, example: Example) -> set[str]:
    """The dimensions of an example that a column is about."""
    has_heads = "feature1" in example.dims
    names = {
        "rows": {"row", "token"},
        "edges": {"row"},
        "ids": {"row"},
        "nodes": {"node"},
        "segments": {"segment"},
        "examples": {"example"},
        "channels": {"channel"},
        "time": {"time"},
        "slots": {"slot"},
        "layers": {"layer"},
        "sequence": {"sequence"},
        "source": {"new"},
        "head": {"head"},
        "query": {"query"},
        "key": {"key"},
        "heads": {"feature"} if has_heads else {"head", "q_head", "k_head"},
        "features": {"feature1"} if has_heads else {"feature"},
        "vmap": {"batch"},
    }
    if example.function.__name__ == "write_slices":
        names["features"] = {"feature", "head"}
    return names[heading]


Key = tuple[str, str, bool]
"""The key of a table row: a function, the variant of its example, and whether the row includes the gradient."""


def rows_of_tables() -> Iterator[tuple[Key, str, str]]:
    """Each cell of the tables: its row, its column, and its text."""
    text = (Path(__file__).parents[1] / "docs" / "many_devices.md").read_text()
    headings: list[str] = []
    for line in text.splitlines():
        if not line.startswith("|"):
            headings = []
            continue
        first, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        if first == "function":
            headings = cells
        elif headings and not first.startswith("-"):
            with_gradient = first.endswith(", gradient")
            functions, _, variant = first.removesuffix(", gradient").partition(" with ")
            for function in re.findall(r"`(\w+)`", functions):
                for heading, cell in zip(headings, cells, strict=True):
                    yield (function, variant, with_gradient), heading, cell


CELLS: dict[Key, dict[str, str]] = {}
for key, heading, cell in rows_of_tables():
    CELLS.setdefault(key, {})[heading] = cell

EXAMPLES = {(example.function.__name__, example.variant): example for example in all_examples()}


def of_test_sizes(example: Example, **changes: Any) -> Example:
    sizes = {"split": {**example.sizes["small"], **SIZES}}
    return dataclasses.replace(example, sizes=sizes, **changes)


@dataclasses.dataclass(frozen=True)
class Split:
    """A program, and its only split dimension."""

    key: Key
    dim: str
    cell: str

    def __str__(self) -> str:
        function, variant, with_gradient = self.key
        return ", ".join(filter(None, [function, variant, "gradient" * with_gradient, self.dim]))


def all_splits() -> Iterator[Split]:
    for key, cells in CELLS.items():
        for heading, cell in cells.items():
            example = EXAMPLES[key[:2]]
            dims = dims_of_heading(heading, example)
            if heading == "vmap" and example.mapped is None:
                yield Split(key, "batch", cell)
            for dim in sorted(dims & example.dims):
                yield Split(key, dim, cell)


SPLITS = list(all_splits())
WITH_GRADIENTS = [key for key in CELLS if not key[1] and (key[2] or key[0].endswith("_backward"))]
"""Each function with its gradient."""


def test_every_function_is_in_the_tables() -> None:
    """The tables list every function, with its gradient if it has one."""
    missing = []
    for function in {name for name, _ in EXAMPLES}:
        variants = [variant for name, variant, _ in CELLS if name == function]
        missing += [] if variants else [function]
        for variant in variants:
            has_gradient = bool(EXAMPLES[function, variant].differentiated("float32"))
            missing += [
                (function, variant, with_gradient)
                for with_gradient in ([False, True] if has_gradient else [False])
                if (function, variant, with_gradient) not in CELLS
            ]
    assert not missing


@pytest.mark.parametrize("key", CELLS, ids=str)
def test_every_dimension_has_a_cell(key: Key) -> None:
    example = EXAMPLES[key[:2]]
    dims = {dim for dim in example.dims if not dim.startswith("1")} - TOO_SHORT
    dims |= {"batch"} if example.mapped is None else set()
    assert {split.dim for split in SPLITS if split.key == key} == dims
    for heading, cell in CELLS[key].items():
        has_dim = any(split.key == key and split.dim in dims_of_heading(heading, example) for split in SPLITS)
        assert (cell != "") == has_dim, f"{heading}: {cell!r}"


@functools.cache
def mesh_of(**axes: int) -> Mesh:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), (AxisType.Auto,) * len(axes))


def split_dim(mesh: Mesh, dims: tuple[str | int, ...], dim: str | int | None) -> NamedSharding:
    return NamedSharding(mesh, P(*("x" if name == dim else None for name in dims)))


Program = tuple[Example, Callable[..., Any], dict[str, np.ndarray], Any]


def program_of(example: Example, with_gradient: bool) -> Program:
    """An example, its function of operands and cotangents, and the arguments of this function."""
    rng = np.random.default_rng(0)
    operands, call = example.make_operands(rng, "float32", "split"), example.call("split")
    results = jax.eval_shape(lambda operands: call(**operands), operands)
    cotangents = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), results)
    names = example.differentiated("float32") if with_gradient else ()
    return example, value_and_gradient(call, names), operands, cotangents


@functools.cache
def program(key: Key, is_mapped: bool) -> Program:
    return program_of(of_test_sizes(EXAMPLES[key[:2]], **({"mapped": "batch"} if is_mapped else {})), key[2])


@functools.cache
def expected_results(key: Key, is_mapped: bool) -> Any:
    _, function, operands, cotangents = program(key, is_mapped)
    return jax.jit(function)(operands, cotangents)


def units(example: Example) -> dict[str, tuple[str, ...]]:
    """The dimensions of the arrays that cells name."""
    front = () if example.mapped is None else (example.mapped,)
    of_operands = {name: (*front, *operand.dims) for name, operand in example.operands.items()}
    features = tuple(dim for dim in ("feature", "feature1") if dim in example.dims)
    return {
        "cells": ("segment", *features),
        "counts": ("segment",),
        "logit cells": ("segment", "feature"),
        "rows": ("row", *features),
        "products": ("row", *features[:-1]),
        "row": ("key",),
        "number": (),
    } | of_operands


def bytes_of(text: str, example: Example) -> float:
    """The bytes of a sum like "2 cells + counts", with elements of 32 bits."""
    total = 0.0
    for term in text.split(" + "):
        factor, unit = re.fullmatch(r"([\d.]+)? ?(.+)", term).groups()
        shape = [1 if dim.startswith("1") else example.sizes["split"][dim] for dim in units(example)[unit]]
        total += float(factor or 1) * 4 * math.prod(shape)
    return total


def compiled(function: Callable[..., Any], split: Split, mesh: Mesh, is_mapped: bool = False) -> Any:
    """The compiled function of operands and cotangents. Every array that has the dimension is split."""
    example, _, operands, cotangents = program(split.key, is_mapped)
    front = () if example.mapped is None else (example.mapped,)
    of_operands = {
        name: split_dim(mesh, (*front, *x.dims), None if name in NEVER_SPLIT else split.dim)
        for name, x in example.operands.items()
    }
    size = example.sizes["split"][split.dim]
    of_cotangents, of_results = (
        jax.tree.map(lambda x: split_dim(mesh, x.shape, size), arrays)
        for arrays in (cotangents, jax.eval_shape(function, operands, cotangents))
    )
    jitted = jax.jit(function, in_shardings=(of_operands, of_cotangents), out_shardings=of_results)
    return jitted.lower(operands, cotangents).compile()


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_split_of_one_dimension(split: Split) -> None:
    is_mapped = split.dim == "batch" and EXAMPLES[split.key[:2]].mapped is None
    _, function, operands, cotangents = program(split.key, is_mapped)
    run = compiled(function, split, mesh_of(x=NUM_DEVICES), is_mapped)
    check_exchanges(run, split, is_mapped)
    check_results(run(operands, cotangents), split, is_mapped)


@pytest.mark.parametrize("split", [x for x in SPLITS if x.key in WITH_GRADIENTS and x.cell != "free"], ids=str)
def test_split_over_an_automatic_axis(split: Split) -> None:
    """Inside a shard_map over another axis, devices exchange the same along an automatic axis."""
    _, function, operands, cotangents = program(split.key, False)
    mesh = mesh_of(manual=2, x=NUM_DEVICES // 2)
    options = {"in_specs": P(), "out_specs": P(), "axis_names": {"manual"}, "check_vma": False}
    run = compiled(jax.shard_map(function, mesh=mesh, **options), split, mesh)
    check_exchanges(run, split, False)
    check_results(run(operands, cotangents), split, False)


@pytest.mark.parametrize("key", WITH_GRADIENTS, ids=str)
def test_sizes_that_do_not_divide(key: Key) -> None:
    """Results are right if both axes of a mesh split the two longest dimensions unevenly."""
    odd = {dim: size + 3 for dim, size in SIZES.items() if dim not in TOO_SHORT} | {"feature": 26}
    example = EXAMPLES[key[:2]]
    example = dataclasses.replace(example, sizes={"split": {**example.sizes["small"], **odd}})
    longest = sorted(example.dims & odd.keys(), key=lambda dim: odd[dim])[:-3:-1]
    axes = {odd[dim]: axis for dim, axis in zip(longest, ("x", "y"), strict=False)}
    _, function, operands, cotangents = program_of(example, key[2])
    mesh = mesh_of(x=4, y=2)

    def constrained(arrays: Any) -> Any:
        def constrain(x: Any) -> Any:
            spec = P(*(axes.get(size) for size in np.shape(x)))
            return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

        return jax.tree.map(constrain, arrays)

    def split(operands: Any, cotangents: Any) -> Any:
        return constrained(function(constrained(operands), constrained(cotangents)))

    compare(jax.jit(split)(operands, cotangents), jax.jit(function)(operands, cotangents), example)


@pytest.mark.parametrize("key", WITH_GRADIENTS, ids=str)
def test_spmd_axis_name(key: Key) -> None:
    """A ``vmap`` with ``spmd_axis_name`` splits its batch, without a collective."""
    _, function, operands, cotangents = program(key, is_mapped=False)
    mesh, num = mesh_of(x=NUM_DEVICES), NUM_DEVICES
    operands, cotangents = jax.tree.map(
        lambda x: np.stack([np.roll(x, i, -1) if x.ndim else x for i in range(num)]), (operands, cotangents)
    )
    mapped = jax.vmap(function, spmd_axis_name="x")
    with jax.set_mesh(mesh):
        run = jax.jit(mapped, in_shardings=NamedSharding(mesh, P("x"))).lower(operands, cotangents).compile()
        results = run(operands, cotangents)
    assert not exchanges_in(run.as_text())
    for result in jax.tree.leaves(results):
        assert result.sharding.spec[:1] == P("x")[:1]
    expected = [jax.jit(function)(*jax.tree.map(lambda x, i=i: x[i], (operands, cotangents))) for i in (0, num - 1)]
    for i, want in zip((0, num - 1), expected, strict=True):
        compare(jax.tree.map(lambda x, i=i: x[i], results), want, EXAMPLES[key[:2]])


def check_exchanges(run: Any, split: Split, is_mapped: bool) -> None:
    example, *_ = program(split.key, is_mapped)
    phrases = dict(re.fullmatch(r"(\w+)(?:: (.*))?", phrase).groups() for phrase in split.cell.split(", "))
    by_kind: dict[str, list[Exchange]] = {}
    for exchange in exchanges_in(run.as_text()):
        is_gather = exchange.collective == "all-gather" and "gathered" in phrases
        kind = "halo" if exchange.collective == "collective-permute" else "gathered" if is_gather else "reduction"
        by_kind.setdefault(kind, []).append(exchange)
    assert by_kind.keys() == phrases.keys() - {"free"}, by_kind
    for kind, exchanged in by_kind.items():
        if kind == "halo":
            assert max(x.size for x in exchanged) <= halo(example), exchanged
        else:
            traffic = bytes_of(phrases[kind], example) * (2 if kind == "reduction" else 1)
            assert sum(x.traffic for x in exchanged) == traffic, exchanged


def check_results(results: Any, split: Split, is_mapped: bool) -> None:
    compare(results, expected_results(split.key, is_mapped), EXAMPLES[split.key[:2]])


def compare(results: Any, expected: Any, example: Example) -> None:
    """Compares values and gradients with those of one device."""
    for got_all, want_all, tolerance in zip(results, expected, example.tolerance["float32"], strict=True):
        for got, want in zip(jax.tree.leaves(got_all), jax.tree.leaves(want_all), strict=True):
            scale = np.sqrt(np.mean(np.square(want[np.isfinite(want)])))
            np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * scale)


def halo(example: Example) -> int:
    """The number of inputs before its first one that a shard needs."""
    x, sizes = example.operands["x"].dims, example.sizes["split"]
    return math.prod(sizes[dim] for dim in x) // sizes["time"] * (sizes["tap"] - 1)


OF_VALUE_ALONE = {("segment_sum", "row"), ("gather_segment_sum", "node"), ("gather_segment_mean", "node")}
OF_VALUE_ALONE |= {("take_rows", "node"), ("write_slice", "new"), ("write_slices", "new")}
"""Functions and dimensions for which the value needs exchanges, and the gradient needs none."""

EXCHANGES_MORE = {"segment_prod", "segment_attention"}
EXCHANGES_MORE |= {"graph_dot_product_attention", "graph_additive_attention"}
"""Functions that exchange more than plain JAX. Products also exchange exponents; plain JAX divides by factors, even by
zero. The gradient of attention over edges needs its result."""


GRADIENTS = [split for split in SPLITS if split.key[1:] == ("", True)]


@pytest.mark.parametrize(
    "split", [x for x in GRADIENTS if x.dim == "row" or (x.key[0], x.dim) in OF_VALUE_ALONE], ids=str
)
def test_gradient_alone(split: Split) -> None:
    """A program that needs only the gradient exchanges nothing for the value, and no more than plain JAX."""
    example, *_ = program(split.key, False)
    names = example.differentiated("float32")

    def traffic(call: Callable[..., Any]) -> int:
        both = value_and_gradient(call, names)
        gradient = compiled(lambda *arrays: both(*arrays)[1], split, mesh_of(x=NUM_DEVICES))
        return sum(exchange.traffic for exchange in exchanges_in(gradient.as_text()))

    ours = traffic(example.call("split"))
    if (split.key[0], split.dim) in OF_VALUE_ALONE:
        assert ours == 0
    elif split.key[0] not in EXCHANGES_MORE:
        assert 0 < ours <= traffic(example.plain_call("split"))
