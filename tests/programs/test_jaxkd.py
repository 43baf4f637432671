"""jaxkd: a tree of points, whose levels are split at medians, and its nearest neighbours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jaxkd
import numpy as np

POINTS, QUERIES, NEIGHBOURS = 2_000, 100, 5


def test_nearest_neighbours(rng: np.random.Generator, compare_redirected: Callable[..., Any]) -> None:
    """Neighbours and distances are those of all pairs. Segment maxima and minima choose the axes of splits."""
    points, queries = (jnp.asarray(rng.normal(size=(n, 3)), jnp.float32) for n in (POINTS, QUERIES))

    def neighbours(points: jax.Array, queries: jax.Array) -> Any:
        return jaxkd.build_and_query(points, queries, k=NEIGHBOURS)

    calls = ("jax.ops.segment_max", "jax.ops.segment_min")
    ids, distances = compare_redirected("jaxkd, neighbours", neighbours, points, queries, calls=calls)
    of_pairs = np.linalg.norm(np.asarray(queries)[:, None] - np.asarray(points), axis=-1)
    nearest = np.argsort(of_pairs, axis=1)[:, :NEIGHBOURS]
    np.testing.assert_array_equal(ids, nearest)
    np.testing.assert_allclose(distances, np.take_along_axis(of_pairs, nearest, axis=1), rtol=1e-5)
