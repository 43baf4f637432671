"""Segments and gathered rows split over devices: results equal those of one device, with few exchanges."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from segment.reference import ARGMAX, ARGMIN, MAX, MEAN, MIN, PROD, SUM, Reduction, options_id
from support import cases
from support.cases import assert_same_values
from support.meshes import MESH_SHAPE, collectives, exchanges, make_mesh
from support.programs import small_floats

import jax_baracuda as jb
from jax_baracuda import forward_mode

pytestmark = cases.on_two_devices

ROWS, SEGMENTS, NODES, EDGES = 64, 24, 16, 64

PLACEMENTS = {
    "segments alone": (P(), P("x")),
    "segments alone, over both axes": (P(), P(("x", "y"))),
    "over other axes than rows": (P("x"), P("y")),
    "over the axes of rows": (P("x"), P("x")),
    "over both axes, as rows": (P(("x", "y")), P(("x", "y"))),
    "over some axes of rows": (P("x"), P(("x", "y"))),
    "and features": (P("x", "y"), P("x", "y")),
}
"""Specs of the rows and of the cells."""

each_placement = pytest.mark.parametrize("placement", PLACEMENTS)

NUM_EXCHANGES = {"segment_sum": 1, "segment_mean": 2, "segment_max": 1, "segment_min": 1, "segment_prod": 2}
NUM_EXCHANGES |= {"segment_argmax": 2, "segment_argmin": 2}
"""How many arrays of cells devices add up if rows are split."""


def splits(spec: P) -> bool:
    """Whether the spec splits anything. With only two devices, the second mesh axis has one."""
    return "x" in str(spec) or ("y" in str(spec) and MESH_SHAPE[1] > 1)


def exchanged(function: Callable[..., Any], *operands: Any) -> dict[str, int]:
    return {name: count for name, count in collectives(function, *operands).items() if count}


@pytest.mark.parametrize("options", [{}, {"indices_are_sorted": True}], ids=options_id)
@pytest.mark.parametrize("reduction", [SUM, MEAN, MAX, MIN, PROD, ARGMAX, ARGMIN], ids=str)
@each_placement
def test_reductions(rng: np.random.Generator, placement: str, reduction: Reduction, options: dict[str, bool]) -> None:
    of_rows, of_cells = PLACEMENTS[placement]
    mesh = make_mesh()
    data, ids = small_floats(rng, ROWS, 6), rng.integers(-2, SEGMENTS + 3, ROWS).astype(np.int32)
    ids[:2] = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    if options:
        ids.sort()

    def reduce(data: jax.Array, ids: jax.Array) -> jax.Array:
        cells = reduction(data, ids, SEGMENTS, **options)
        return jax.lax.with_sharding_constraint(cells, NamedSharding(mesh, of_cells))

    placed = [jax.device_put(x, NamedSharding(mesh, P(*of_rows[: x.ndim]))) for x in (data, ids)]
    cells = jax.jit(reduce)(*placed)
    assert cells.sharding.is_equivalent_to(NamedSharding(mesh, of_cells), cells.ndim)
    assert_same_values(cells, reduction(data, ids, SEGMENTS, **options))
    counts, num_arrays = exchanged(reduce, *placed), NUM_EXCHANGES[reduction.name]
    if not splits(of_rows):
        assert not counts
    elif of_rows[0] != of_cells[0] or reduction in (ARGMAX, ARGMIN):
        cells = 4 * SEGMENTS * (6 // mesh.shape["y"] if of_rows[1:] else 6)
        assert sum(x.traffic for x in exchanges(reduce, *placed)) <= 2 * num_arrays * cells
    else:
        assert counts == {"reduce-scatter" if reduction in (SUM, MEAN) else "all-to-all": num_arrays}


def test_segments_that_do_not_divide(rng: np.random.Generator) -> None:
    mesh = make_mesh()
    data, ids = small_floats(rng, ROWS, 6), rng.integers(0, SEGMENTS, ROWS)

    def loss(data: jax.Array) -> jax.Array:
        cells = jb.segment_sum(data, ids, SEGMENTS - 1)
        return (jax.lax.with_sharding_constraint(cells, NamedSharding(mesh, P("x"))) ** 2).sum()

    actual = jax.jit(jax.value_and_grad(loss))(jax.device_put(data, NamedSharding(mesh, P("x"))))
    cells = np.zeros((SEGMENTS, 6))
    np.add.at(cells, ids, data)
    expected = (cells[:-1] ** 2).sum(), np.where(ids[:, None] < SEGMENTS - 1, 2 * cells[ids], 0)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


GATHERS = {
    "sum": jb.gather_segment_sum,
    "weighted sum": lambda data, *ids: jb.gather_segment_sum(data, *ids, weights=WEIGHTS),
    "mean": jb.gather_segment_mean,
    "max": jb.gather_segment_max,
    "min": functools.partial(jb.gather_segment_min, tie_break="first"),
}
WEIGHTS = np.resize(np.array([1, -2, 0, 3], np.float32), EDGES)

GRAPHS = {
    "nodes": (P("x"), P(), P("x")),
    "edges and nodes": (P("x"), P("x"), P("x")),
    "edges and other nodes": (P("y"), P("x"), P("y")),
    "edges, and nodes of the result": (P(), P("x"), P("x", "y")),
}
"""Specs of the rows that edges gather, of the edges, and of the cells."""


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("function", GATHERS)
def test_message_passing(rng: np.random.Generator, function: str, graph: str) -> None:
    """Both passes gather all rows. Sums over split edges are reduced and scattered to the devices of the nodes."""
    of_rows, of_edges, of_cells = GRAPHS[graph]
    mesh = make_mesh()
    data, cotangent = small_floats(rng, NODES, 6), small_floats(rng, SEGMENTS, 6)
    ids = rng.integers(0, NODES, EDGES).astype(np.int32), rng.integers(-1, SEGMENTS + 1, EDGES).astype(np.int32)

    def split(x: Any, spec: P) -> Any:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    def value(data: jax.Array, *ids: jax.Array) -> jax.Array:
        return split(GATHERS[function](data, *ids, SEGMENTS), of_cells)

    def both(data: jax.Array, cotangent: jax.Array, *ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        cells, pullback = jax.vjp(lambda data: value(data, *ids), data)
        return cells, split(pullback(cotangent)[0], of_rows)

    def place(x: np.ndarray, spec: P) -> jax.Array:
        return jax.device_put(x, NamedSharding(mesh, spec))

    placed_ids = [place(x, of_edges) for x in ids]
    operands = (place(data, of_rows), place(cotangent, of_cells), *placed_ids)
    cells, gradient = jax.jit(both)(*operands)
    expected, pullback = jax.vjp(lambda data: GATHERS[function](data, *ids, SEGMENTS), data)
    np.testing.assert_array_equal(cells, expected)
    # Quotients by segment sizes are rounded before they are added. The order of additions depends on the devices.
    rounding = 0 if "sum" in function or "tie" in function else 8 * np.finfo(np.float32).eps
    np.testing.assert_allclose(gradient, pullback(cotangent)[0], rtol=0, atol=rounding * np.abs(cotangent).sum())
    counts = exchanged(value, operands[0], *placed_ids)
    assert counts.pop("all-gather", 0) == splits(of_rows)
    if of_edges == P():
        assert not counts
    elif of_edges[0] == of_cells[0] and "sum" in function:
        assert counts == {"reduce-scatter": 1}
    else:
        assert sum(counts.values()) <= 2


@pytest.mark.parametrize("dtype", ["uint8", "int32", "uint32"])
@pytest.mark.parametrize("of_ids", [P(), P("x"), P("y")], ids=str)
def test_split_table_of_embeddings(rng: np.random.Generator, of_ids: P, dtype: str) -> None:
    """Each device adds up the gradient of its own rows of the table."""
    mesh = make_mesh()
    table, ids = small_floats(rng, SEGMENTS, 6), rng.integers(0, SEGMENTS + 4, (8, 4)).astype(dtype)
    cotangent = small_floats(rng, 8, 4, 6)

    def gradient(table: jax.Array, ids: jax.Array, cotangent: jax.Array) -> jax.Array:
        [d_table] = jax.vjp(lambda table: forward_mode.take_rows(table, ids), table)[1](cotangent)
        return jax.lax.with_sharding_constraint(d_table, NamedSharding(mesh, P("x")))

    placed = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in ((table, P("x")), (ids, of_ids), (cotangent, of_ids))
    ]
    expected = jax.vjp(lambda table: table[ids], jnp.asarray(table))[1](cotangent)[0]
    np.testing.assert_array_equal(jax.jit(gradient)(*placed), expected)
    exchange = {"reduce-scatter": 1} if of_ids == P("x") else {"all-reduce": 1}
    assert exchanged(gradient, *placed) == (exchange if splits(of_ids) else {})


@pytest.mark.parametrize(
    "name", [f"{of}_{kind}" for of in ("segment", "gather_segment") for kind in ("sum", "mean", "max", "min")]
)
def test_features_with_a_plan(rng: np.random.Generator, name: str) -> None:
    """With a plan, edges are replicated. Splitting features needs no collective, in both passes."""
    mesh, function = make_mesh(), getattr(jb, name)
    data, cotangent = (
        small_floats(rng, NODES if "gather" in name else EDGES, 8),
        120 * small_floats(rng, SEGMENTS, 8),
    )
    plan = jb.segment_plan(rng.integers(-1, SEGMENTS + 1, EDGES), SEGMENTS, rng.integers(0, NODES, EDGES), NODES)

    def run(data: jax.Array, cotangent: jax.Array, plan: jb.SegmentPlan) -> Any:
        cells, pullback = jax.vjp(lambda data: function(data, plan=plan), data)
        return cells, *pullback(cotangent)

    features = NamedSharding(mesh, P(None, "x"))
    placed = *jax.device_put((data, cotangent), features), jax.device_put(plan, NamedSharding(mesh, P()))
    assert not exchanged(run, *placed)
    for got, want in zip(jax.jit(run)(*placed), jax.jit(run)(data, cotangent, plan), strict=True):
        assert got.sharding.is_equivalent_to(features, 2)
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("check_vma", [True, False])
def test_plan_of_each_shard(rng: np.random.Generator, check_vma: bool) -> None:
    """Each shard makes a plan of its edges. Padding fills up the last shard with edges to no segment."""
    mesh, num_edges = make_mesh(), EDGES - 3
    data = small_floats(rng, NODES, 6)
    gather_ids, segment_ids = rng.integers(0, NODES, num_edges), rng.integers(-1, SEGMENTS + 1, num_edges)
    padded = np.pad(gather_ids, (0, 3)), np.pad(segment_ids, (0, 3), constant_values=SEGMENTS)
    in_parts = functools.partial(jax.shard_map, mesh=mesh, check_vma=check_vma)

    def plan_of_shard(gather_ids: jax.Array, segment_ids: jax.Array) -> jb.SegmentPlan:
        return jb.segment_plan(segment_ids, SEGMENTS, gather_ids, NODES)

    def sum_of_shards(data: jax.Array, plan: jb.SegmentPlan) -> jax.Array:
        return jax.lax.psum(jb.gather_segment_sum(data, plan=plan), ("x", "y"))

    edges = P(("x", "y"))
    plans = jax.jit(in_parts(plan_of_shard, in_specs=edges, out_specs=edges))(*padded)
    layer = in_parts(sum_of_shards, in_specs=(P(), edges), out_specs=P())
    actual = jax.jit(jax.value_and_grad(lambda data: (layer(data, plans) ** 2).sum()))(data)
    expected = jax.value_and_grad(
        lambda data: (jb.gather_segment_sum(data, gather_ids, segment_ids, SEGMENTS) ** 2).sum()
    )(data)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
