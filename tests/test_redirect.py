"""Programs that call JAX's own functions, inside and outside of ``redirect``."""

from __future__ import annotations

import asyncio
import contextlib
import cProfile
import functools
import math
import os
import pstats
import re
import sys
import types
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jax.lax import dynamic_update_slice as imported_update  # isort: skip  (as clients do, before anything is redirected)
from jax.ops import segment_max as imported_segment_max  # isort: skip

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases
from support.kernels import kernels_in, kernels_of, lowered

import jax_baracuda
from jax_baracuda import _indexed, _redirect, redirect
from jax_baracuda._core import jax_versions, lowering
from jax_baracuda._core.native import NATIVE_MODULES
from jax_baracuda._core.rules import on_cpu, on_gpu, shares_sort
from jax_baracuda._tools.calls import equations_of
from jax_baracuda.ops.segment.extremum import SEGMENT_EXTREMUM
from jax_baracuda.ops.segment.plan import SHARED_SORT
from jax_baracuda.ops.segment.sum_ops import SEGMENT_SUM

pytestmark = pytest.mark.versions

NUM_SEGMENTS = 5
EVERYTHING = functools.partial(redirect, indexed_updates=True, slice_updates=True)
REDUCTIONS = ("segment_sum", "segment_prod", "segment_max", "segment_min")


@pytest.fixture(autouse=True)
def lowered_again() -> None:
    """Reports count what is lowered, so no test may find the programs of another one compiled."""
    jax.clear_caches()


def problem(rng: np.random.Generator, dtype: str = "float32") -> tuple[np.ndarray, np.ndarray]:
    """Rows and ids. Some ids are out of range."""
    return (3 * rng.normal(size=(12, 3))).astype(dtype), rng.integers(-1, NUM_SEGMENTS + 1, 12)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_values_and_both_modes(rng: np.random.Generator, name: str) -> None:
    """Values and derivatives in both modes agree with JAX in float64. For products, they agree with NumPy."""
    data, ids = problem(rng)
    tangent = rng.normal(size=data.shape).astype(np.float32)

    def loss(data: jax.Array) -> jax.Array:
        sums = getattr(jax.ops, name)(data, ids, NUM_SEGMENTS)
        return jnp.sum(jnp.where(jnp.isfinite(sums), sums, 0) ** 2)

    with redirect() as report:
        assert name in kernels_of(loss, data)
        assert report.redirected == {f"jax.ops.{name}": 1}
        value, pushed = jax.jvp(loss, (data,), (tangent,))
        pulled = jax.jit(jax.grad(loss))(data)
    assert report.redirected.keys() <= {f"jax.ops.{name}", f"gradient of jax.ops.{name}"}
    assert not report.kept
    if name == "segment_prod":  # no gradient in JAX
        plain = [[data[i] for i in np.flatnonzero(ids == s)] for s in range(NUM_SEGMENTS)]
        products = np.stack([np.prod(np.asarray(x, np.float64).reshape(-1, 3), axis=0) for x in plain])
        expected = np.zeros(data.shape)
        for i in np.flatnonzero((ids >= 0) & (ids < NUM_SEGMENTS)):
            expected[i] = 2 * products[ids[i]] ** 2 / data[i].astype(np.float64)
        np.testing.assert_allclose(value, np.sum(products**2), rtol=1e-5)
    else:
        with jax.enable_x64(True):
            assert kernels_of(loss, data.astype(np.float64)) == []
            expected = np.asarray(jax.grad(loss)(data.astype(np.float64)))
            np.testing.assert_allclose(value, loss(data.astype(np.float64)), rtol=1e-5)
    np.testing.assert_allclose(pulled, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    np.testing.assert_allclose(pushed, np.sum(expected * tangent), rtol=1e-4)


@pytest.mark.parametrize("implementation", ["kernel", "xla"])
def test_lines_of_the_program(rng: np.random.Generator, implementation: Any) -> None:
    """The report counts the lines that make calls. Frames of JAX and of this package are left out."""
    data, ids = problem(rng)

    def loss(data: jax.Array) -> jax.Array:
        total = jnp.sum(jax.ops.segment_max(data, ids, NUM_SEGMENTS) ** 2)
        for _ in range(2):
            total += jnp.sum(jax.ops.segment_sum(data, ids, NUM_SEGMENTS) ** 2)
        return total

    with redirect() as report, jax_baracuda.implementation(implementation):
        jax.jit(jax.grad(loss))(data)
    first = f"test_redirect.py:{loss.__code__.co_firstlineno + 1}"
    third = f"test_redirect.py:{loss.__code__.co_firstlineno + 3}"
    lines = {
        name: {os.path.basename(line): number for line, number in report.lines[name, *others].items()}
        for name, *others in report.calls
    }
    assert lines == {
        "jax.ops.segment_max": {first: 1},
        "gradient of jax.ops.segment_max": {first: 1},
        "jax.ops.segment_sum": {third: 2},
    }
    text = report.with_lines()
    assert f"{third} (2)" in text and f"{first}\n" in text
    assert [line for line in text.splitlines() if "test_redirect.py:" not in line] == str(report).splitlines()


def test_line_in_a_folder_whose_name_starts_like_the_package(rng: np.random.Generator) -> None:
    """Only the package's own files are left out."""
    data, ids = problem(rng)
    namespace = {"jax": jax, "ids": ids}
    package = Path(jax_baracuda.__file__).parent
    file = f"{package}_models/train.py"
    exec(compile("def total(data):\n    return jax.ops.segment_sum(data, ids, 5)", file, "exec"), namespace)
    with redirect() as report:
        jax.jit(namespace["total"])(data)
    [lines] = report.lines.values()
    assert list(lines) == [f"{package.name}_models/train.py:2"]


@pytest.mark.parametrize("arguments", [{"mode": "clip"}, {"bucket_size": 4}, {"num_segments": None}])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_arguments_of_jax_ops(rng: np.random.Generator, name: str, arguments: dict[str, object]) -> None:
    data, ids = problem(rng, "int32")
    call = functools.partial(getattr(jax.ops, name), data, ids, **{"num_segments": NUM_SEGMENTS, **arguments})
    expected = call()
    with redirect() as report:
        np.testing.assert_array_equal(call(), expected)
    assert report.redirected.keys() == {f"jax.ops.{name}"}  # buckets may be reduced by another call
    assert not report.kept


UFUNCS = {"add": np.add, "subtract": np.subtract, "multiply": np.multiply, "max": np.maximum, "min": np.minimum}
INDICES: dict[str, Callable[[np.random.Generator], tuple[Any, ...]]] = {
    "rows": lambda rng: (rng.integers(-4, 4, 12),),
    "matrix of rows": lambda rng: (rng.integers(-4, 4, (3, 4)),),
    "rows and columns": lambda rng: (rng.integers(-4, 4, 12), rng.integers(0, 5, 12)),
    "mesh": lambda rng: (rng.integers(-4, 4, 12), rng.integers(0, 5, 12), rng.integers(-6, 6, 12)),
    "grid": lambda rng: np.ix_(rng.integers(-4, 4, 3), rng.integers(-5, 5, 4)),
    "columns": lambda rng: (slice(None), rng.integers(-5, 5, 12)),
    "last axis": lambda rng: (..., rng.integers(-6, 6, 12)),
    "last axes": lambda rng: (slice(None), rng.integers(-5, 5, 12), rng.integers(-6, 6, 12)),
    "unsigned": lambda rng: (rng.integers(0, 4, 12).astype(np.uint8),),
    "narrow": lambda rng: (rng.integers(-4, 4, 12).astype(np.int8),),
}
"""Indices of an array of shape (4, 5, 6)."""


@pytest.mark.parametrize("index", INDICES)
def test_indexed_updates(rng: np.random.Generator, index: str) -> None:
    """Agree with NumPy in 64 bits, and wrap as JAX does. Indices are traced, as they are in programs."""
    at = INDICES[index](rng)
    dtypes = "float32", ("int32", "int8", "uint16")[list(INDICES).index(index) % 3]
    arrays = [rng.integers(-3, 4, (4, 5, 6)).astype(dtype) for dtype in dtypes]
    updates = [(3 * rng.normal(size=x[at].shape)).astype(x.dtype) for x in arrays]

    def update(arrays: list[jax.Array], updates: list[jax.Array], *ids: jax.Array) -> list[jax.Array]:
        given = iter(ids)
        own = tuple(next(given) if isinstance(i, np.ndarray) else i for i in at)
        return [getattr(x.at[own], name)(y) for name in UFUNCS for x, y in zip(arrays, updates, strict=True)]

    with redirect(indexed_updates=True) as report:
        results = iter(jax.jit(update)(arrays, updates, *(i for i in at if isinstance(i, np.ndarray))))
    assert report.redirected == {f"x.at[ids].{name}": 2 for name in UFUNCS}, report
    for ufunc in UFUNCS.values():
        for x, y in zip(arrays, updates, strict=True):
            wide = np.float64 if x.dtype == np.float32 else np.int64
            expected, actual = x.astype(wide), next(results)
            ufunc.at(expected, at, y.astype(wide))
            assert actual.dtype == x.dtype
            np.testing.assert_allclose(actual, expected.astype(x.dtype), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", [None, "drop", "clip", "promise_in_bounds"])
def test_indices_out_of_range(rng: np.random.Generator, mode: str | None) -> None:
    """Negative ids count from the end, and those out of range are dropped or clamped: each index by itself."""
    x = rng.normal(size=(4, 3, 2)).astype(np.float32)
    limit = (4, 3) if mode == "promise_in_bounds" else (7, 6)
    ids = [rng.integers(-size, size, 20) for size in limit]
    rows, cells, columns = (rng.normal(size=shape).astype(np.float32) for shape in ((20, 3, 2), (20, 2), (4, 20, 2)))

    def updated(x: jax.Array, i: jax.Array, j: jax.Array) -> list[jax.Array]:
        pairs = [(x.at[i], rows), (x.at[i, j], cells), (x.at[:, j], columns)]
        return [getattr(at, name)(y, mode=mode) for at, y in pairs for name in UFUNCS]

    with jax.enable_x64(True):
        expected = updated(jnp.asarray(x, jnp.float64), *ids)
    with redirect(indexed_updates=True) as report:
        actual = jax.jit(updated)(x, *ids)
    assert report.redirected == {f"x.at[ids].{name}": 3 for name in UFUNCS}
    with redirect() as report:
        jax.jit(lambda *arrays: updated(*arrays))(x, *ids)
    assert not report.calls
    for got, want in zip(actual, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


MAPPED: dict[str, Callable[..., jax.Array]] = {
    "both": jax.vmap(lambda x, ids, rows: jnp.asarray(x).at[ids].add(rows)),
    "ids shared": jax.vmap(lambda x, ids, rows: jnp.asarray(x).at[ids].add(rows), (0, None, 0)),
    "x shared": jax.vmap(lambda x, ids, rows: jnp.asarray(x).at[ids].add(rows), (None, 0, 0)),
    "rows shared": jax.vmap(lambda x, ids, rows: jnp.asarray(x).at[ids].add(rows), (0, 0, None)),
    "twice": jax.vmap(jax.vmap(lambda x, ids, rows: jnp.asarray(x).at[ids].add(rows))),
    "segments": jax.vmap(lambda x, ids, rows: x + jax.ops.segment_sum(rows, ids, x.shape[0])),
    "maxima": jax.vmap(lambda x, ids, rows: jnp.asarray(x).at[ids].max(rows)),
    "mapped behind": jax.vmap(lambda x, ids, rows: jnp.asarray(x).at[ids].add(rows), (0, 0, 0), 1),
}


@pytest.mark.parametrize("name", MAPPED)
def test_mapped_updates(rng: np.random.Generator, name: str) -> None:
    batch = (2, 3) if name == "twice" else (3,)
    x, rows = rng.normal(size=(*batch, 4, 2)).astype(np.float32), rng.normal(size=(*batch, 9, 2)).astype(np.float32)
    ids = rng.integers(0, 6, (*batch, 9))
    x = jnp.asarray(x[0] if name == "x shared" else x)
    rows = rows[0] if name == "rows shared" else rows
    ids = ids[0] if name == "ids shared" else ids

    def gradients(x: jax.Array, ids: jax.Array, rows: jax.Array) -> Any:
        return jax.grad(lambda x, rows: jnp.sum(MAPPED[name](x, ids, rows) ** 2), (0, 1))(x, rows)

    with jax.enable_x64(True):
        wide = np.asarray(x, np.float64), ids, rows.astype(np.float64)
        expected = MAPPED[name](*wide), gradients(*wide)
    with redirect(indexed_updates=True) as report:
        actual = jax.jit(MAPPED[name])(x, ids, rows), jax.jit(gradients)(x, ids, rows)
    assert report.redirected, report
    assert not report.kept, report
    for got, want in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", ["kernel", "xla"])
def test_indexed_writes(rng: np.random.Generator, implementation: str) -> None:
    """``x.at[ids].set`` runs write_rows, also compiled and differentiated. Ids differ, since JAX leaves open which of
    several updates is written."""
    x = rng.normal(size=(7, 3)).astype(np.float32)
    ids, rows = np.array([2, -1, 9, 5, -9, 0]), rng.normal(size=(6, 3)).astype(np.float32)

    def updated(x: jax.Array, rows: jax.Array, mode: str | None) -> jax.Array:
        distinct = ids if mode is None else np.array([2, -3, 9, -9])
        return jnp.asarray(x).at[distinct].set(rows[: len(distinct)], mode=mode)

    for mode in (None, "clip"):
        run = lambda x, rows, mode=mode: jnp.sum(updated(x, rows, mode) ** 3)  # noqa: E731
        expected = updated(x, rows, mode), jax.grad(run, (0, 1))(x, rows)
        with redirect(indexed_updates=True) as report, jax_baracuda.implementation(implementation):
            runs = ["write_rows"] if implementation == "kernel" else []
            assert kernels_of(lambda x, rows, mode=mode: updated(x, rows, mode), x, rows) == runs
            actual = jax.jit(updated, static_argnums=2)(x, rows, mode), jax.grad(run, (0, 1))(x, rows)
        ran = {(name, by) for name, by, _ in report.calls}
        assert ran >= {("x.at[ids].set", implementation)}
        assert {by for _, by in ran} == {implementation}
        for got, want in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(got, want)


TAKES: dict[str, Callable[[jax.Array, np.ndarray], jax.Array]] = {
    "index": lambda x, ids: x[ids],
    "take": lambda x, ids: jnp.take(x, ids, axis=0),
    "clip": lambda x, ids: jnp.take(x, ids, axis=0, mode="clip"),
    "matrix": lambda x, ids: x[ids.reshape(3, 4)],
    "vmap": lambda x, ids: jax.vmap(lambda row_ids: x[row_ids])(ids.reshape(3, 4)),
    "columns": lambda x, ids: x[:, ids],
    "last axis": lambda x, ids: x[..., ids],
    "cells": lambda x, ids: x[ids, ids[::-1] % 3],
    "mapped arrays": lambda x, ids: jax.vmap(lambda x: x[ids])(jnp.stack([x, 2 * x])),
    "mapped arrays and ids": lambda x, ids: jax.vmap(lambda x, ids: x[ids])(
        jnp.stack([x, 2 * x, x]), ids.reshape(3, 4)
    ),
    "mapped columns": lambda x, ids: jax.vmap(lambda x: x[ids], 1)(x),
}


@pytest.mark.parametrize("name", TAKES)
def test_gradients_of_gathers(rng: np.random.Generator, name: str) -> None:
    x = rng.normal(size=(5, 3)).astype(np.float32)
    ids = rng.integers(0, 8, 12) - 2

    def loss(x: jax.Array) -> jax.Array:
        taken = TAKES[name](x, ids)
        return jnp.sum(jnp.where(jnp.isfinite(taken), taken, 0) ** 3)

    gradient = jax.grad(loss)
    with jax.enable_x64(True):
        expected = gradient(x.astype(np.float64)), jax.jvp(gradient, (x.astype(np.float64),), (np.ones((5, 3)),))[1]
    with redirect(segments=False) as report:
        assert kernels_of(gradient, x) == ["segment_sum"]
        assert "stablehlo.scatter" not in lowered(gradient, x)
        actual = jax.jit(gradient)(x), jax.jvp(gradient, (x,), (np.ones_like(x),))[1]
    assert report.redirected.keys() == {"gradient of a gather"}
    assert not report.kept
    for got, want in zip(actual, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_gradients_of_indexed_updates(rng: np.random.Generator) -> None:
    """Are JAX's, also where the row and several updates share a maximum."""
    rows, ids = problem(rng)
    x = rng.normal(size=(NUM_SEGMENTS, 3)).astype(np.float32)
    rows[3], ids[3] = rows[5], ids[5]
    x[ids[5] % NUM_SEGMENTS, 0] = rows[5, 0]

    def loss(name: str, x: jax.Array, rows: jax.Array) -> jax.Array:
        return jnp.sum(getattr(jnp.asarray(x).at[ids], name)(rows) ** 2)

    for name in ("add", "max", "min"):
        gradient = jax.grad(functools.partial(loss, name), (0, 1))
        expected = gradient(x, rows)
        with redirect(indexed_updates=True) as report:
            actual = jax.jit(gradient)(x, rows)
        assert report.redirected[f"x.at[ids].{name}"] == 1
        for got, want in zip(actual, expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
        with redirect(indexed_updates=True), pytest.raises(NotImplementedError, match="unique_indices=True"):
            jax.grad(functools.partial(loss, "multiply"), 1)(x, rows)


SLICE_UPDATES: dict[str, Callable[..., jax.Array]] = {
    "slice": lambda x, update, start: jax.lax.dynamic_update_slice(x, update, (start, 1, start - 1)),
    "imported": lambda x, update, start: imported_update(x, update, jnp.stack([start, start, start])),
    "static": lambda x, update, start: imported_update(x, update, (-3, np.int64(1), 9)),
    "unsigned": lambda x, update, start: imported_update(x, update, [start.astype(jnp.uint32)] * 3),
    "in_dim": lambda x, update, start: jax.lax.dynamic_update_slice_in_dim(x, update, start, axis=1),
    "index": lambda x, update, start: jax.lax.dynamic_update_index_in_dim(x, update[:, 0], start, axis=1),
    "not from the end": lambda x, update, start: imported_update(
        x, update, (start, 1, start), allow_negative_indices=False
    ),
}


@pytest.mark.parametrize("name", SLICE_UPDATES)
def test_slice_updates(rng: np.random.Generator, name: str) -> None:
    """Values and derivatives in both modes equal JAX's, for starts in and out of range, alone and mapped."""
    x, update = (rng.normal(size=shape).astype(np.float32) for shape in ((4, 6, 4, 5), (4, 2, 3, 2)))
    starts = jnp.asarray(rng.integers([-9, -5, 0, 5], [-5, 0, 5, 9], dtype=np.int32))
    function = jax.vmap(SLICE_UPDATES[name])

    def results(x: jax.Array, update: jax.Array) -> list[jax.Array]:
        value, pull_back = jax.vjp(lambda x, update: function(x, update, starts), x, update)
        pushed = jax.jvp(lambda x, update: function(x, update, starts), (x, update), (2 * x, 3 * update))
        hessian = jax.jacfwd(jax.grad(lambda update: (function(x, update, starts) ** 3).sum()))(update)
        one = SLICE_UPDATES[name](x[0], update[0], starts[0])
        return [value, *pull_back(x), *pushed, hessian, one]

    expected = jax.jit(results)(x, update)
    with redirect(slice_updates=True) as report:
        actual = jax.jit(results)(x, update)
        assert kernels_of(lambda x, update: SLICE_UPDATES[name](x, update, starts[0]), x[0], update[0]) == [
            "write_slice"
        ]
    assert report.redirected["jax.lax.dynamic_update_slice"] > 0
    for got, want in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(got, want)
    with redirect(indexed_updates=True) as report:
        SLICE_UPDATES[name](jnp.asarray(x[0]), update[0], starts[0])
    assert not report.redirected


@pytest.mark.parametrize("dtype", ["bool", "int4", "bfloat16", "complex64", "float8_e4m3fn"])
def test_slice_updates_of_all_dtypes(rng: np.random.Generator, dtype: str) -> None:
    x, update = (jnp.asarray(rng.integers(0, 2, shape), dtype) for shape in ((5, 7), (2, 3)))
    expected = imported_update(x, update, (1, 3))
    with redirect(slice_updates=True) as report:
        actual = imported_update(x, update, (1, 3))
    assert report.redirected == {"jax.lax.dynamic_update_slice": 1}
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual, expected)


def test_slices_at_starts_of_all_dtypes() -> None:
    """Those of few bits are left to JAX, which adds the number of rows to negative ones in their dtype."""
    x, update = jnp.zeros((6, 3)), jnp.ones((2, 2))  # more rows than a dtype holds crash XLA of jax < 0.11
    for dtype in ("int4", "int8", "uint8", "int16", "int32", "uint32"):
        limits = jnp.iinfo(dtype)
        rows = [jnp.asarray(i, dtype) for i in (-1, 1, 5) if limits.min <= i <= limits.max]
        all_starts = [(row, jnp.asarray(1, dtype)) for row in rows]
        expected = [imported_update(x, update, starts) for starts in all_starts]
        with redirect(slice_updates=True) as report:
            for starts, want in zip(all_starts, expected, strict=True):
                np.testing.assert_array_equal(imported_update(x, update, starts), want)
        assert bool(report.redirected) == ("32" in dtype)


def test_slices_that_a_loop_carries(rng: np.random.Generator) -> None:
    """Updates of donated caches are in place. The loop's own updates, which stack its results, are left to JAX."""
    rows = rng.normal(size=(6, 3)).astype(np.float32)

    def fill(cache: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        def step(cache: jax.Array, at: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            position, row = at
            return jax.lax.dynamic_update_index_in_dim(cache, row, position, 0), row.sum()

        return jax.lax.scan(step, cache, (jnp.arange(6), rows))

    with redirect(slice_updates=True) as report:
        compiled = jax.jit(fill, donate_argnums=0)
        assert compiled.lower(jnp.zeros((8, 3)), rows).as_text().count("write_slice") == 1
        cache = jnp.zeros((8, 3))
        memory = cache.unsafe_buffer_pointer()
        filled, sums = compiled(cache, rows)
    assert report.redirected == {"jax.lax.dynamic_update_slice": 1}
    assert filled.unsafe_buffer_pointer() == memory
    np.testing.assert_array_equal(filled, np.concatenate([rows, np.zeros((2, 3))]))
    np.testing.assert_allclose(sums, rows.sum(1), rtol=1e-6)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="only CPUs copy such arrays")
@pytest.mark.parametrize("loop", ["scan", "while"])
def test_updates_of_large_arrays_of_loops_have_a_barrier(monkeypatch: pytest.MonkeyPatch, loop: str) -> None:
    """Where XLA might copy the array in each step. Others have none, nor have the updates that stack results. Where XLA
    fuses across barriers, kernels make the updates.
    """
    cases.use_rules(monkeypatch)

    def program(cache: jax.Array, row: jax.Array) -> Any:
        def step(cache: jax.Array, position: Any) -> tuple[jax.Array, jax.Array]:
            cache = imported_update(cache, row, (position, 0))
            return imported_update(cache, 2 * row, (position + 1, 0)), cache

        if loop == "scan":
            return jax.lax.scan(step, cache, jnp.arange(2))
        return jax.lax.while_loop(lambda at: at[1] < 2, lambda at: (step(*at)[0], at[1] + 1), (cache, 0))

    of_size = {}
    for width in (4, 512):
        operands = jnp.zeros((64, width)), jnp.ones((1, width))
        expected = program(*operands)
        with redirect(slice_updates=True) as report:
            of_size[width] = lowered(program, *operands).count(
                "optimization_barrier" if jax_versions.keeps_barriers() else "@jax_baracuda.write_slice"
            )
        [[(name, *_), count]] = report.calls.items()
        with redirect(slice_updates=True):
            jax.tree.map(np.testing.assert_array_equal, jax.jit(program)(*operands), expected)
        assert (name, count) == ("jax.lax.dynamic_update_slice", 2)
    assert of_size == {4: 0, 512: 2}


IDS = np.array([0, 1, 1, 5])
WINDOWS = jax.lax.GatherDimensionNumbers((1, 2), (), (0,))
STARTS = jnp.zeros((4, 1), jnp.int16)
SOME = jnp.asarray(IDS[:2])
LEFT_TO_JAX: dict[str, tuple[Callable[[jax.Array], object], str]] = {
    "dtype": (lambda x: jax.ops.segment_sum(x.astype(complex), IDS, 3), "there is no kernel for complex"),
    "dtype of an update": (lambda x: x.astype(complex).at[IDS].add(1.0), "there is no kernel for complex"),
    "parts of rows": (lambda x: x.at[SOME, :2].add(1.0), "its indices are slices, or name parts of rows"),
    "windows": (
        lambda x: jax.vjp(lambda x: jax.lax.gather(x, STARTS[:, :1], WINDOWS, (2, 3)), x)[1](jnp.ones((4, 2, 3))),
        "its indices are slices, or name parts of rows",
    ),
    "axes apart": (
        lambda x: jnp.ones((4, 2, 3)).at[SOME, :, SOME].add(1.0),
        "its indexed axes are not neighbours in order",
    ),
    "transposed": (
        lambda x: jax.vmap(lambda x: x.at[:, SOME].set(1.0), 1, 1)(jnp.ones((4, 2, 3))),
        "vmap maps it over several arrays",
    ),
    "dtype of a gather": (
        lambda x: jax.vjp(lambda x: x[IDS], x.astype(complex))[1](jnp.ones((4, 3), complex)),
        "there is no kernel for complex",
    ),
    "keys": (
        lambda x: imported_update(jax.random.split(jax.random.key(0), 4), jax.random.split(jax.random.key(0), 1), (2,)),
        "there is no kernel for key",
    ),
    "numbers": (lambda x: imported_update(jnp.asarray(0.0), 1.0, ()), "it writes the whole array or nothing"),
    "mapped slices": (
        lambda x: jax.vmap(lambda x, start: imported_update(x, x[:1], (start,)))(x, SOME.repeat(2)),
        "its indices are slices, or name parts of rows",
    ),
    "nine axes": (
        lambda x: imported_update(jnp.zeros([2] * 9), jnp.ones([1] * 9), [0] * 9),
        "an array has more than 8 axes",
    ),
}


@pytest.mark.parametrize("name", LEFT_TO_JAX)
def test_what_is_not_served_is_left_to_jax(name: str) -> None:
    """The report says why. Results, and errors, are JAX's."""
    call, reason = LEFT_TO_JAX[name]

    def outcome() -> str:
        with warnings.catch_warnings(action="ignore"), contextlib.suppress(OverflowError, IndexError):
            return str(call(jnp.ones((4, 3))))
        return "an error"

    expected = outcome()
    with EVERYTHING() as report:
        assert outcome() == expected
    assert not report.redirected
    [[_, kept]] = report.kept
    assert kept.startswith(reason)
    assert f": plain JAX, {reason}" in " ".join(str(report).split())


REFUSED: dict[str, Callable[[jax.Array], object]] = {
    "list of data": lambda x: jax.ops.segment_sum([1.0] * 4, IDS, 3),
    "list of ids": lambda x: jax.ops.segment_max(x, IDS.tolist(), 3),
    "object": lambda x: jax.ops.segment_max(np.array([None] * 4), IDS, 3),
    "floating ids": lambda x: jax.ops.segment_prod(x, IDS.astype(np.float32), 3),
    "boolean ids": lambda x: jax.ops.segment_min(x, IDS > 0, 3),
    "fewer ids": lambda x: jax.ops.segment_sum(x, IDS[:3], 3),
    "ids of another shape": lambda x: jax.ops.segment_sum(x, IDS.reshape(2, 2), 3),
    "negative number": lambda x: jax.ops.segment_sum(x, IDS, -1),
    "negative maximum": lambda x: jax.ops.segment_sum(x, np.full(4, -3)),
    "no number": lambda x: jax.ops.segment_sum(x, IDS, 3.5),
    "traced number": lambda x: jax.jit(lambda n: jax.ops.segment_sum(x, IDS, n))(3),
    "traced ids": lambda x: jax.jit(lambda ids: jax.ops.segment_sum(x, ids))(IDS),
    "known ids in a traced program": lambda x: jax.jit(lambda x: jax.ops.segment_sum(x, IDS))(x),
    "no ids": lambda x: jax.ops.segment_sum(x[:0], IDS[:0]),
    "mode": lambda x: jax.ops.segment_sum(x, IDS, 3, mode="wrap"),
    "bucket size": lambda x: jax.ops.segment_sum(x, IDS, 3, bucket_size=0),
    "part of a bucket": lambda x: jax.ops.segment_sum(x, IDS, 3, bucket_size=0.5),
    "updates of another shape": lambda x: x.at[IDS].add(jnp.ones((3, 3))),
    "updates of more axes": lambda x: x.at[IDS].add(jnp.ones((2, 4, 3))),
    "text as update": lambda x: x.at[IDS].multiply("a"),
    "mode of an update": lambda x: x.at[IDS].add(1.0, mode="wrap"),
    "index of a scalar": lambda x: x[0, 0].at[IDS].add(1.0),
    "window of another dtype": lambda x: imported_update(x, jnp.ones((1, 1), int), (0, 0)),
    "window of another rank": lambda x: imported_update(x, x[0], (0, 0)),
    "larger window": lambda x: imported_update(x, jnp.ones((5, 3)), (0, 0)),
    "list as window": lambda x: imported_update(x, [[1.0]], (0, 0)),
    "one start": lambda x: imported_update(x, x[:1], (0,)),
    "starts of two dtypes": lambda x: imported_update(x, x[:1], (jnp.int32(0), jnp.uint32(0))),
    "floating start": lambda x: imported_update(x, x[:1], (0.0, 0.0)),
    "matrix of starts": lambda x: imported_update(x, x[:1], np.zeros((2, 1), int)),
    "vector as start": lambda x: imported_update(x, x[:1], (np.zeros(1, int), 0)),
    "start before the first": lambda x: imported_update(x, x[:1], (-1, 0), allow_negative_indices=False),
    "start of no axis": lambda x: jax.lax.dynamic_update_slice_in_dim(x, x[:1], 0, axis=5),
}
"""Calls with an argument that at most one function of JAX accepts."""


@pytest.mark.parametrize("name", REFUSED)
def test_errors_of_arguments_are_those_of_jax(name: str) -> None:
    x = jnp.ones((4, 3))

    def outcome() -> tuple[object, str]:
        try:
            with warnings.catch_warnings(action="ignore"):
                return None, str(REFUSED[name](x))
        except Exception as error:
            return type(error), str(error).partition("\n")[0]  # the rest says where values were traced

    expected = outcome()
    with EVERYTHING() as report:
        assert outcome() == expected
    assert not report.redirected


@pytest.mark.parametrize("kind", [TypeError, ValueError, IndexError, NotImplementedError, AssertionError])
def test_errors_of_our_functions_are_raised(monkeypatch: pytest.MonkeyPatch, kind: type[Exception]) -> None:
    def wrong(*_: object, **__: object) -> jax.Array:
        raise kind("a mistake of ours")

    for name in (*REDUCTIONS[1:], "write_slice"):
        monkeypatch.setattr(jax_baracuda.forward_mode, name, wrong)
    monkeypatch.setattr(_indexed, "_call", wrong)
    x, ids = jnp.ones((4, 3)), jnp.asarray([0, 1])
    calls: list[Callable[[], object]] = [
        *(functools.partial(getattr(jax.ops, name), x[:2], ids, 3) for name in REDUCTIONS),
        lambda: x.at[ids].add(1.0),
        lambda: imported_update(x, x[:1], (0, 0)),
        lambda: jax.grad(lambda x: x[ids].sum())(x),
    ]
    for call in calls:
        call()
        with EVERYTHING() as report, pytest.raises(kind, match="a mistake of ours"):
            call()
        assert not report.kept


def test_traces_belong_to_their_context(rng: np.random.Generator) -> None:
    """A context redirects names imported before it, in programs traced before it. Its traces are not used outside."""
    data, ids = problem(rng)
    traces = []

    @jax.jit
    def inner(data: jax.Array) -> jax.Array:
        traces.append(data)
        return imported_update(imported_segment_max(data, ids, NUM_SEGMENTS), data[:2], (1, 0))

    outer = jax.jit(lambda data: 2 * inner(data))
    gradient = jax.jit(jax.grad(lambda data: jnp.sum(inner(data)[jnp.asarray([1, 2])])))

    def names() -> list[list[str]]:
        outer(data), gradient(data)
        return [kernels_of(outer, data), kernels_of(gradient, data)]

    assert names() == [[], []]
    for _ in range(2):
        with redirect(slice_updates=True):
            of_value, of_gradient = names()
        assert of_value == ["segment_max", "write_slice"]
        assert any(name.startswith("segment_max_backward") for name in of_gradient)
        assert "write_slice" in of_gradient
        assert names() == [[], []]
    num_traces = len(traces)
    with redirect(slice_updates=True):
        names()
    names()
    assert len(traces) == num_traces


def is_redirected() -> bool:
    data, ids = np.ones((2, 1), np.float32), np.zeros(2, np.int32)
    return kernels_of(lambda x: jax.ops.segment_sum(x, ids, 1), data) == ["segment_sum"]


def inside(context: contextlib.AbstractContextManager[object]) -> Iterator[bool]:
    with context:
        while True:
            yield is_redirected()


def test_leaving_too_often_is_an_error() -> None:
    context = redirect()
    message = "redirect: the context is left in a thread that is not in it"
    with pytest.raises(RuntimeError, match=message):
        context.__exit__(None, None, None)
    with context:
        with pytest.raises(RuntimeError, match=message):
            of_other_thread(lambda: bool(context.__exit__(None, None, None)))
        assert is_redirected()
    with pytest.raises(RuntimeError, match=message):
        context.__exit__(None, None, None)
    with context:
        assert is_redirected()
    assert not is_redirected()


def contents(place: tuple[object, ...], value: object) -> Iterator[tuple[tuple[object, ...], object]]:
    """An object of JAX, what a function runs, and what a table or a set holds."""
    yield place, value
    if isinstance(value, types.FunctionType):
        yield (*place, "code"), value.__code__
        yield (*place, "defaults"), value.__kwdefaults__
        yield (*place, "signature"), vars(value).get("__signature__")
    elif isinstance(value, dict):
        for key, x in value.copy().items():
            yield from contents((*place, key), x)
    elif isinstance(value, set):
        yield from (((*place, x), True) for x in value.copy())


def state_of_jax() -> dict[tuple[object, ...], object]:
    """What the modules of JAX hold, by module and name."""
    modules = {name: module for name, module in sys.modules.copy().items() if name.partition(".")[0] == "jax"}
    return dict(
        x
        for name, module in modules.items()
        for own, value in vars(module).copy().items()
        for x in contents((name, own), value)
    )


@functools.cache
def replaced_by(context: Callable[[], redirect]) -> tuple[tuple[object, ...], ...]:
    """The places in JAX that a context replaces."""
    with context():
        pass  # imports what it needs
    own = state_of_jax()
    with context():
        inside = state_of_jax()
    return tuple(place for place in {**own, **inside} if own.get(place) is not inside.get(place))


def places_in_jax() -> dict[tuple[object, ...], object]:
    """What JAX has at the places that ``redirect`` replaces."""
    places, state = replaced_by(EVERYTHING), state_of_jax()
    return {place: state.get(place) for place in places}


def replaced_since(own: dict[tuple[object, ...], object]) -> set[tuple[object, ...]]:
    return {place for place, value in places_in_jax().items() if value is not own[place]}


def test_jax_is_as_it_was_outside_of_contexts() -> None:
    own = places_in_jax()
    of_scatters = replaced_by(redirect)
    assert ("jax._src.ops.scatter", "_segment_update") in of_scatters
    context = EVERYTHING()
    assert places_in_jax() == own

    with context, redirect(segments=False), context:
        assert replaced_since(own) == own.keys()
    assert places_in_jax() == own

    with pytest.raises(KeyError), context:
        raise KeyError
    assert places_in_jax() == own

    assert context(is_redirected)()
    assert places_in_jax() == own

    generators = inside(EVERYTHING()), inside(redirect())
    assert all(map(next, generators))
    generators[0].close()
    assert next(generators[1])
    assert replaced_since(own) == set(of_scatters)
    generators[1].close()
    assert places_in_jax() == own

    context.install()
    redirect().install()
    try:
        assert is_redirected()
        with EVERYTHING():
            pass
        assert replaced_since(own) == set(of_scatters)
    finally:
        redirect.uninstall()
    redirect.uninstall()
    assert not is_redirected()
    assert places_in_jax() == own


def test_jax_is_as_it_was_after_tasks_and_threads(rng: np.random.Generator) -> None:
    """Tasks and threads inside a context always see their own calls redirected. Others never do."""
    own = places_in_jax()
    x = rng.normal(size=(4, 3)).astype(np.float32)

    def redirects() -> bool:
        return kernels_of(lambda x: imported_update(x, x[:2], (1, 0)), x) == ["write_slice"]

    async def task(turns: int) -> list[bool]:
        seen = []
        with redirect(slice_updates=True):
            for _ in range(turns):
                await asyncio.sleep(0)
                seen.append(redirects())
        return seen

    async def tasks() -> list[list[bool]]:
        return await asyncio.gather(*(task(turns) for turns in (1, 3, 2)))

    assert asyncio.run(tasks()) == [[True], [True] * 3, [True] * 2]
    assert places_in_jax() == own

    def in_and_out(inside: bool) -> list[bool]:
        context = redirect(slice_updates=True) if inside else contextlib.nullcontext()
        seen = []
        for _ in range(10):
            with context:
                seen.append(redirects())
        return seen

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(in_and_out, [True, False, True, False])) == [[True] * 10, [False] * 10] * 2
    assert places_in_jax() == own


def test_contexts_inside_of_traced_functions_are_errors() -> None:
    """There they would do nothing: programs are lowered after the function has returned."""

    def entered(x: jax.Array) -> jax.Array:
        with redirect():
            return x[jnp.asarray([0, 1])]

    own = places_in_jax()
    x = jnp.ones(3)
    advice = r"put it around the compiled function, as in redirect\(\)\(jax.jit\(f\)\)"
    functions = jax.jit(entered), jax.jit(jax.vmap(entered)), jax.grad(jax.checkpoint(lambda x: entered(x[0]).sum()))
    for function, operand in zip(functions, (x, jnp.ones((2, 3)), jnp.ones((2, 3))), strict=True):
        with pytest.raises(RuntimeError, match=advice):
            function(operand)
    with pytest.raises(RuntimeError, match="inside a function that JAX is tracing"):
        jax.jit(redirect()(lambda x: x))(x)
    assert jax.grad(lambda x: entered(x).sum())(x).shape == (3,)
    assert places_in_jax() == own


def test_decorator() -> None:
    context = redirect()
    assert context(is_redirected)()
    assert not is_redirected()
    assert context.report.redirected == {"jax.ops.segment_sum": 1}


def test_calls_count_in_every_context() -> None:
    with redirect() as outer, redirect() as inner:
        assert is_redirected()
    assert outer.redirected == inner.redirected == {"jax.ops.segment_sum": 1}


def _generator() -> Iterator[bool]:
    yield is_redirected()


async def _coroutine() -> bool:
    return is_redirected()


async def _async_generator() -> AsyncIterator[bool]:
    yield is_redirected()


class _Callable:
    async def __call__(self) -> bool:
        return is_redirected()


BODY_RUNS_LATER: dict[str, Callable[..., object]] = {
    "generator": _generator,
    "coroutine": _coroutine,
    "async generator": _async_generator,
    "partial": functools.partial(_async_generator),
    "callable": _Callable(),
}


@pytest.mark.parametrize("kind", BODY_RUNS_LATER)
def test_functions_whose_body_runs_later_are_refused(kind: str) -> None:
    with pytest.raises(TypeError, match="redirect: function must be no generator"):
        redirect()(BODY_RUNS_LATER[kind])


def of_other_thread(function: Callable[[], bool]) -> bool:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_a_whole_process() -> None:
    program = jax.jit(lambda x: jax.ops.segment_sum(x, np.zeros(2, np.int32), 1))
    program(np.ones(2, np.float32))
    context = redirect()
    report = context.install()
    try:
        assert is_redirected()
        assert of_other_thread(is_redirected)
        program(np.ones(2, np.float32))
        assert report.redirected == {"jax.ops.segment_sum": 3}
        with redirect(segments=False):
            assert not is_redirected()
    finally:
        context.uninstall()
    assert not is_redirected()


def test_calls_without_a_kernel_end(rng: np.random.Generator) -> None:
    """Without a kernel, a redirected call runs as plain JAX, which is not redirected again."""
    data, ids = problem(rng)
    with redirect(indexed_updates=True, slice_updates=True), jax_baracuda.implementation("xla"):
        actual = jax.jit(lambda x: jax.ops.segment_sum(x, ids, NUM_SEGMENTS))(data)
        jax.jit(jax.jacfwd(jax.grad(lambda x: (imported_update(x, x[:2], (3, 0)) ** 3).sum())))(data)
        jax.jit(jax.grad(lambda x: jax.ops.segment_max(x, ids, NUM_SEGMENTS)[1:3].sum()))(data)
    np.testing.assert_allclose(actual, jax.ops.segment_sum(data, ids, NUM_SEGMENTS), rtol=1e-5, atol=1e-5)


def test_a_missing_place_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is replaced then, also where the context was entered before."""
    from jax._src.ops import scatter

    with EVERYTHING():
        pass
    own = places_in_jax()
    message = r"redirect: scatters cannot be redirected in jax .*_segment_update"
    for enter in (EVERYTHING().__enter__, EVERYTHING().install):
        with monkeypatch.context() as patch:
            patch.delattr(scatter, "_segment_update")
            with pytest.raises(NotImplementedError, match=message):
                enter()
        assert places_in_jax() == own
        assert not is_redirected()


def test_what_others_replace_in_jax_is_kept(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """A function of JAX that is replaced between two contexts is called in the second, and is there after it."""
    from jax._src.ops import scatter

    data, ids = problem(rng)
    called = []
    with redirect():
        jax.ops.segment_sum(data, ids, NUM_SEGMENTS)

    def of_others(*args: Any, **kwargs: Any) -> Any:
        called.append(args[0])
        return own(*args, **kwargs)

    own = scatter._segment_update
    monkeypatch.setattr(scatter, "_segment_update", of_others)
    with redirect():
        jax.ops.segment_sum(data, ids, NUM_SEGMENTS)
    assert called == ["segment_sum"]
    assert scatter._segment_update is of_others


WIDE, NARROW = ((1 << 20, 64), "float32"), ((1 << 20, 4), "float32")


@pytest.mark.parametrize("platform", ["cuda", "cpu"])
@pytest.mark.parametrize(
    ("rows", "num_segments", "is_left"),
    [
        (WIDE, 100_000, True),
        (((1 << 20, 8, 16), "float32"), 100_000, True),
        (((1 << 20, 64), "bfloat16"), 100_000, False),  # JAX rounds after each term
        (WIDE, 2, False),
        (NARROW, 100_000, True),
        (((100_000, 4), "float32"), 100_000, True),
        (((1000, 4), "float32"), 1000, True),
    ],
    ids=["wide", "heads", "16 bits", "two segments", "narrow", "few", "small"],
)
def test_sums_that_xla_fuses_are_left_to_it(
    monkeypatch: pytest.MonkeyPatch, cuda_module: None, platform: str, rows: Any, num_segments: int, is_left: bool
) -> None:
    """On GPUs, sums are left to JAX if the op's rules for computed rows say so, unless a kernel is requested. On CPUs,
    these are short sums, and the update of few rows.
    """
    cases.use_rules(monkeypatch)
    data, ids = jax.ShapeDtypeStruct(*rows), jax.ShapeDtypeStruct(rows[0][:1], "int32")
    nodes = jax.ShapeDtypeStruct((num_segments, *data.shape[1:]), data.dtype)

    def program(data: Any, ids: Any, nodes: Any) -> Any:
        gradient = jax.grad(lambda x: jnp.sum(jnp.sin(x[ids])).astype(jnp.float32))(nodes)
        data = jnp.sin(data)
        return jax.ops.segment_sum(data, ids, num_segments), nodes.at[ids].add(data), gradient

    for asked_for in (None, "kernel"):
        jax.clear_caches()
        with redirect(indexed_updates=True) as report, jax_baracuda.implementation(asked_for):
            called = kernels_of(program, data, ids, nodes, platform=platform)
        num_left = 0
        if asked_for is None and is_left:
            is_short, few_rows_are_updated = rows[0][0] <= 1000, rows[0][0] <= num_segments
            num_left = 3 if platform == "cuda" or is_short else int(few_rows_are_updated)
        expected = (3 - num_left, num_left)
        assert (report.redirected.total(), report.kept.total()) == expected, report
        assert sum(kernel.endswith("segment_sum") for kernel in called) == expected[0]


@pytest.mark.parametrize(
    ("is_computed", "num_rows", "is_left"),
    [(True, 10_000, True), (True, 100_000, False), (False, 10_000, True), (False, 100_000, False)],
)
def test_short_sums_on_cpus_are_left_to_xla(
    monkeypatch: pytest.MonkeyPatch, is_computed: bool, num_rows: int, is_left: bool
) -> None:
    """Whether or not XLA computes the rows."""
    cases.use_rules(monkeypatch)
    types = jax.ShapeDtypeStruct((num_rows, 4), "float32"), jax.ShapeDtypeStruct((num_rows,), "int32")
    with redirect():
        called = kernels_of(
            lambda data, ids: jax.ops.segment_sum(jnp.sin(data) if is_computed else data, ids, 1000),
            *types,
            platform="cpu",
        )
    assert called == ([] if is_left else ["segment_sum"])


@cases.on_two_devices
@pytest.mark.skipif(cases.PLATFORM != "cpu", reason="on GPUs, other rules decide")
def test_what_serves_a_split_call_decides_once(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """The kernel takes narrow integers as 32 bits. Its op would leave these to XLA, as single numbers that XLA
    computes."""
    cases.use_rules(monkeypatch)
    split = jax.NamedSharding(jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,)), jax.P("x"))
    rows = rng.integers(-128, 128, (2, 300_000)).astype(np.int8)
    ids = rng.integers(0, 1000, rows.shape).astype(np.int32)
    expected = np.zeros((2, 1000), np.int8)
    np.add.at(expected, (np.arange(2)[:, None], ids), rows)
    with redirect() as report:
        step = jax.jit(jax.vmap(lambda rows, ids: jax.ops.segment_sum(rows, ids, 1000)), in_shardings=split)
        compiled = step.lower(rows, ids).compile()
    assert report.redirected.total() == 1, report
    assert "segment_sum" in kernels_in(compiled.as_text())
    np.testing.assert_array_equal(compiled(*jax.device_put((rows, ids), split)), expected)


@pytest.mark.parametrize("is_read_by_a_product", [True, False])
@pytest.mark.parametrize("is_softmax", [True, False])
def test_products_that_add_up_nothing_are_fused(
    monkeypatch: pytest.MonkeyPatch, cuda_module: None, is_softmax: bool, is_read_by_a_product: bool
) -> None:
    """For XLA they are multiplications. It would compute a softmax again for each feature, unless it is in memory."""
    cases.use_rules(monkeypatch)
    num_rows, num_segments = WIDE[0][0], 100_000
    types = [
        jax.ShapeDtypeStruct((num_rows,), "int32"),
        *(
            jax.ShapeDtypeStruct(shape, "float32")
            for shape in ((num_rows, 1), (num_segments, 1), (1, 64), (num_rows, 8))
        ),
    ]

    def program(ids: Any, logits: Any, maxima: Any, features: Any, rows: Any) -> Any:
        weights = jnp.exp(logits - maxima[ids]) if is_softmax else jnp.exp(logits)
        product = weights.T @ rows if is_read_by_a_product else None
        return product, jax.ops.segment_sum(weights @ features, ids, num_segments)

    with redirect():
        called = kernels_of(program, *types, platform="cuda")
    assert (called == []) == (is_read_by_a_product or not is_softmax)


@pytest.mark.parametrize(
    ("platform", "row_shape", "is_flat"),
    [("cuda", (2, 3), True), ("cuda", (3, 4), False), ("cpu", (2, 3), False)],
    ids=["cuda", "whole vectors", "cpu"],
)
def test_short_rows_that_are_left_to_xla_are_flat_on_gpus(
    cuda_module: None, platform: str, row_shape: tuple[int, ...], is_flat: bool
) -> None:
    """There, XLA adds vectors of the last axis."""
    nodes, rows = np.zeros((5, *row_shape), np.float32), np.ones((7, *row_shape), np.float32)
    ids = np.arange(7, dtype=np.int32) - 1

    def program(nodes: jax.Array, rows: jax.Array, ids: jax.Array) -> tuple[jax.Array, ...]:
        gradient = jax.grad(lambda x: (x[ids] * rows).sum())(nodes)
        return jax.ops.segment_sum(rows, ids, 5), nodes.at[ids, :].add(rows), gradient

    with redirect(indexed_updates=True), jax_baracuda.implementation("xla"):
        text = lowered(program, nodes, rows, ids, platform=platform)
    updates = re.findall(r"tensor<5\S+>, tensor<7x1xi32>, tensor<7x(\S+)xf32>\) ->", text)
    shape = (math.prod(row_shape),) if is_flat else row_shape
    assert updates == ["x".join(map(str, shape))] * 3


NEGATED: dict[str, Callable[..., jax.Array]] = {
    "sum": lambda nodes, rows, ids: jax.ops.segment_sum(-rows, ids, 5),
    "update": lambda nodes, rows, ids: nodes.at[ids].add(-rows),
    "subtraction": lambda nodes, rows, ids: nodes.at[ids].subtract(rows),
    "gradient": jax.grad(lambda nodes, rows, ids: (rows * (nodes[ids[0]] - nodes[ids])).sum()),
    "ours": lambda nodes, rows, ids: jax_baracuda.segment_sum(-rows, ids, 5),
    "our rounded sum": lambda nodes, rows, ids: jax_baracuda.segment_sum((-rows).astype(jnp.bfloat16), ids, 5),
    "our means": lambda nodes, rows, ids: jax_baracuda.segment_mean(-rows, ids, 5),
}
NOT_SLOW: dict[str, Callable[..., jax.Array]] = {
    "sum": lambda nodes, rows, ids: jax.ops.segment_sum(rows, ids, 5),
    "16 bits": lambda nodes, rows, ids: jax.ops.segment_sum(-rows.astype(jnp.bfloat16), ids, 5),
    "integers": lambda nodes, rows, ids: jax.ops.segment_sum(-rows.astype(jnp.int32), ids, 5),
    "unique": lambda nodes, rows, ids: nodes.at[ids[:1]].add(-rows[:1], unique_indices=True),
    "maximum": lambda nodes, rows, ids: jax_baracuda.segment_max(-rows, ids, 5),
    "gradient of a maximum": jax.grad(lambda nodes, rows, ids: -jax_baracuda.segment_max(nodes[ids], ids, 5).sum()),
}


@pytest.mark.parametrize("name", NEGATED)
@pytest.mark.parametrize("platform", ["cuda", "cpu"])
def test_negated_rows_that_are_left_to_xla_have_a_barrier_on_gpus(
    rng: np.random.Generator, cuda_module: None, platform: str, name: str
) -> None:
    """There, XLA would take as long as for a subtraction."""
    nodes, rows = rng.normal(size=(5, 3)).astype(np.float32), rng.normal(size=(7, 3)).astype(np.float32)
    operands = nodes, rows, rng.integers(0, 5, 7)
    with redirect(indexed_updates=True), jax_baracuda.implementation("xla"):
        text = lowered(NEGATED[name], *operands, platform=platform)
    assert text.count("optimization_barrier") == (platform == "cuda")


@pytest.mark.parametrize("name", NOT_SLOW)
def test_other_rows_have_no_barrier(rng: np.random.Generator, cuda_module: None, name: str) -> None:
    """XLA adds them as fast, or no faster behind one."""
    nodes, rows = rng.normal(size=(5, 3)).astype(np.float32), rng.normal(size=(7, 3)).astype(np.float32)
    with redirect(indexed_updates=True), jax_baracuda.implementation("xla"):
        assert "optimization_barrier" not in lowered(
            NOT_SLOW[name], nodes, rows, rng.integers(0, 5, 7), platform="cuda"
        )


@pytest.mark.parametrize("implementation", ["xla", None])
@pytest.mark.parametrize("dtype", ["float32", "int32", "uint32", "int8"])
@pytest.mark.parametrize("row_shape", [(), (3,), (2, 3)], ids=str)
def test_subtractions(
    rng: np.random.Generator, implementation: jax_baracuda.Implementation | None, dtype: str, row_shape: tuple[int, ...]
) -> None:
    """The same as NumPy's, by a kernel and by plain JAX, also of zeros, under vmap and with ids out of range."""
    x = rng.integers(0, 9, (2, 5, *row_shape)).astype(dtype)
    rows, ids = rng.integers(0, 9, (2, 12, *row_shape)).astype(dtype), rng.integers(0, 7, (2, 12))

    def program(x: jax.Array, rows: jax.Array, ids: jax.Array) -> tuple[jax.Array, ...]:
        first = x[0].at[ids[0]].subtract(rows[0]), jnp.zeros_like(x[0]).at[ids[0]].subtract(rows[0], mode="drop")
        return *first, jax.vmap(lambda x, i, y: x.at[i].subtract(y, mode="clip"))(x, ids, rows)

    with redirect(indexed_updates=True) as report, jax_baracuda.implementation(implementation):
        results = jax.jit(lambda *arrays: program(*arrays))(x, rows, ids)
    assert sum(report.calls.values()) == 3
    dropped, clipped = x.copy(), x.copy()
    zeros = np.zeros_like(x[0])
    is_in = ids[0] < 5
    for array in (dropped[0], zeros):
        np.subtract.at(array, ids[0][is_in], rows[0][is_in])
    for array, of_rows, of_ids in zip(clipped, rows, ids, strict=True):
        np.subtract.at(array, of_ids.clip(max=4), of_rows)
    for actual, expected in zip(results, (dropped[0], zeros, clipped), strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("backend", ["gpu", "cpu"])
def test_small_maxima_are_left_to_xla(monkeypatch: pytest.MonkeyPatch, cuda_module: None, backend: str) -> None:
    cases.use_rules(monkeypatch)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    small, large = backend == "gpu", False
    for num_rows, width, is_left in (
        (1 << 16, 8, small),  # 2 MB
        (1 << 17, 8, large),  # 5 MB
        (2000, 64, small),  # 0.8 MB
        (8000, 64, large),  # 2 MB
    ):
        data, ids = jax.ShapeDtypeStruct((num_rows, width), "float32"), jax.ShapeDtypeStruct((num_rows,), "int32")
        with redirect() as report:
            platform = {"gpu": "cuda"}.get(backend, backend)
            called = kernels_of(lambda x, i: jax.ops.segment_max(x, i, 1000), data, ids, platform=platform)
        assert (report.redirected.total(), report.kept.total()) == ((0, 1) if is_left else (1, 0)), report
        assert called == ([] if is_left else ["segment_max"])


def test_functions_applied_to_rows_are_left_to_jax() -> None:
    """JAX lowers ``x.at[ids].apply`` as a write of zeros with a function of the rows."""
    x, ids = np.arange(8, dtype=np.int8).reshape(4, 2), np.array([0, 2])
    with EVERYTHING(), jax_baracuda.implementation("kernel"):
        actual = jax.jit(lambda x: x.at[ids].apply(lambda row: 2 * row))(jnp.asarray(x))
    np.testing.assert_array_equal(actual, [[0, 2], [2, 3], [8, 10], [6, 7]])


def test_programs_for_several_platforms(rng: np.random.Generator) -> None:
    data, ids = problem(rng)
    checks = jax_baracuda.DISABLE_JAX_EXPORT_CHECKS
    for function in (lambda x: jax.ops.segment_sum(x, ids, NUM_SEGMENTS), lambda x: x.at[ids].add(1)):
        expected = jax.jit(function)(data)
        with EVERYTHING():
            exported = jax.export.export(jax.jit(function), platforms=("cpu", "cuda"), disabled_checks=checks)(data)
        np.testing.assert_allclose(exported.call(data), expected, rtol=1e-5, atol=1e-6)


def test_rows_without_updates_keep_the_sign_of_zero() -> None:
    ids = np.array([0, 2, 0])
    for x in (jnp.full(4, -0.0), jnp.array([1.0, -0.0, 2.0, -0.0])):
        with EVERYTHING(), jax_baracuda.implementation("kernel"):
            actual = jax.jit(lambda x: x.at[ids].add(jnp.array([1.0, 1.0, 1.0])))(x)
        np.testing.assert_array_equal(np.signbit(actual), [False, True, False, True])


def test_updates_of_keys_and_weakly_typed_arrays_are_those_of_jax() -> None:
    keys, weak = jax.random.split(jax.random.key(0), 6), jnp.broadcast_to(jnp.asarray(2.0), (6,))
    ids = np.array([1, 4])

    def run() -> list[jax.Array]:
        updates = weak.at[ids].set(np.ones(2, np.float32)), weak.at[ids].add(np.ones(2, np.float32))
        narrow = jnp.ones(6, jnp.bfloat16).at[ids].add(np.float32(1) / 3)
        sums = [x + jnp.ones(6, jnp.float16) for x in updates]
        return [jax.random.key_data(keys.at[ids].set(keys[:2])), *sums, narrow.astype(np.float32)]

    with warnings.catch_warnings(action="ignore"):
        expected = run()
        with redirect(indexed_updates=True) as report:
            results = run()
    for result, want in zip(results, expected, strict=True):
        assert result.dtype == want.dtype
        np.testing.assert_array_equal(result, want)
    assert ("x.at[ids].set", "there is no kernel for key<fry>") in report.kept


# ----------------------------------------------------------------------------------------------------------------------
# What redirection costs.


def many_gathers_and_scatters(nodes: jax.Array, senders: jax.Array, receivers: jax.Array, layers: int = 3) -> jax.Array:
    x = nodes
    for layer in range(layers):
        messages = jnp.sin(x[senders]) * (layer + 1)
        x = x.at[receivers].add(messages) + jax.ops.segment_sum(messages, receivers, x.shape[0])
        x = x + jax.ops.segment_max(messages, receivers, x.shape[0])[senders].sum(0)
        x = x.at[receivers].set(messages).at[senders, 0].max(1.0)
        if jax.default_backend() == "cpu":  # on GPUs, a barrier would stand before a subtraction
            x = x.at[senders].subtract(messages)
        x = jax.lax.dynamic_update_slice(x, messages[:2] + x[2, 1], (senders[0], 0))
        x = jax.lax.dynamic_update_index_in_dim(x, x[receivers[1]], 3, 0) * x.at[0, :2].set(1.0)
    return x.sum()


def many_mapped_gathers_and_scatters(nodes: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
    """The same in a batch whose graphs share ids or have their own, and with products, which have no gradients."""
    batch = jnp.stack([nodes, 2 * nodes])
    program = functools.partial(many_gathers_and_scatters, layers=1)
    shared = jax.vmap(program, (0, None, None))(batch, senders, receivers)
    own = jax.vmap(program)(batch, jnp.stack([senders, receivers]), jnp.stack([receivers, senders]))
    constant = jax.lax.stop_gradient(nodes)
    factors = constant.at[senders].multiply(2.0).at[:, receivers % 4].min(1.0)
    factors += jax.ops.segment_prod(constant[senders], receivers, 7) + jax.ops.segment_min(
        constant[senders], receivers, 7
    )
    return (shared * own).sum() + factors.sum() + jax.lax.scan(scanned_updates, batch, senders)[1].sum()


def scanned_updates(batch: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A step of a loop that carries an array, updates it and reads it."""
    batch = jax.lax.dynamic_update_slice(batch, batch[:, :1] + 1, (0, position, 0))
    return batch, batch[:, position].sum()


def of_lowered(text: str) -> str:
    """A lowered program with other names of functions. Older versions of JAX also count functions that they drop."""
    names: dict[str, str] = {}
    return re.sub(r"@(\w+)", lambda match: names.setdefault(match[1], f"@{len(names)}"), text)


def of_optimized(text: str) -> str:
    """Compiled HLO without the metadata, which name the lines of the program."""
    text = re.sub(r", metadata=\{[^}]*\}|, stack_frame_id=\d+", "", text)
    return text[text.index("\n%") if "\n%" in text else text.index("\nENTRY") :]


def test_where_plain_jax_is_picked_the_program_is_that_of_jax(rng: np.random.Generator) -> None:
    """All calls that are redirected, alone and in batches."""
    x = rng.normal(size=(7, 4)).astype(np.float32)
    edges = rng.integers(0, 7, (2, 20))
    names = set()
    for program in (many_gathers_and_scatters, many_mapped_gathers_and_scatters):
        step = jax.value_and_grad(program)
        with jax_baracuda.implementation("xla"):
            jax.clear_caches()
            plain = jax.jit(step).lower(x, *edges)
            jax.clear_caches()
            with EVERYTHING() as report:
                redirected = jax.jit(step).lower(x, *edges)
        names |= {name for name, _ in report.kept}
        assert not report.redirected
        assert of_lowered(redirected.as_text()) == of_lowered(plain.as_text())
        assert of_optimized(redirected.compile().as_text()) == of_optimized(plain.compile().as_text())
    left_out = set() if jax.default_backend() == "cpu" else {"x.at[ids].subtract"}
    assert names >= {*_redirect._KIND_OF_NAME, *_redirect._UPDATES.values()} - left_out


def test_single_numbers_are_left_to_plain_jax_on_cpus(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """The gradient of a cross-entropy, which XLA adds in place, and maxima of single numbers."""
    cases.use_rules(monkeypatch)
    logits = rng.normal(size=(128, 3000)).astype(np.float32)
    labels = rng.integers(0, 3000, 128)

    def step(logits: jax.Array, labels: jax.Array) -> Any:
        losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)
        return losses.sum(), jnp.zeros(50).at[labels % 50].max(losses[:, 0])

    program = jax.value_and_grad(step, has_aux=True)
    plain = lowered(program, logits, labels, platform="cpu")
    with EVERYTHING() as report:
        assert lowered(program, logits, labels, platform="cpu") == plain
        wide = kernels_of(jax.grad(lambda x, ids: (x[ids] ** 2).sum()), logits, labels % 128, platform="cpu")
        batch = jax.ShapeDtypeStruct((40_000, 9), np.float32), jax.ShapeDtypeStruct((40_000, 9), np.int32)
        small = kernels_of(jax.vmap(lambda x, ids: jax.ops.segment_sum(x, ids, 9)), *batch, platform="cpu")
    assert report.kept.keys() >= {
        ("gradient of a gather", "few numbers are added to a large array, which XLA may do in place"),
        ("x.at[ids].max", "a single feature leaves the kernel nothing to vectorise"),
    }
    assert wide == small == ["segment_sum"]


def test_nothing_is_traced_twice(rng: np.random.Generator) -> None:
    x = rng.normal(size=(7, 4)).astype(np.float32)
    edges = rng.integers(0, 7, (2, 20))
    counts = []
    for context in (contextlib.nullcontext(), redirect(indexed_updates=True)):
        traces: list[object] = []

        def program(*arrays: jax.Array, traces: list[object] = traces) -> jax.Array:
            traces.append(arrays)
            return many_gathers_and_scatters(*arrays)

        jax.clear_caches()
        with context:
            jax.jit(jax.grad(program))(x, *edges)
        counts.append(len(traces))
    assert counts == [1, 1]


def many_slice_updates(nodes: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
    for layer in range(100):
        nodes = jax.lax.dynamic_update_slice(nodes, nodes[:2] * layer, (senders[layer % 20], 0))
    return nodes.sum() + receivers.sum()


@pytest.mark.parametrize("program", [many_gathers_and_scatters, many_slice_updates])
def test_the_first_trace_takes_as_long(monkeypatch: pytest.MonkeyPatch, program: Callable[..., jax.Array]) -> None:
    """Counts the functions of Python that run, because times vary. The first trace of each context does not count."""
    cases.use_rules(monkeypatch, lambda op: (on_cpu("always"), on_gpu("always")))
    types = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in (((7, 4), "float32"), ((20,), "int32"))]
    step = jax.grad(functools.partial(program, layers=30) if program is many_gathers_and_scatters else program)
    counts = []
    for context in (contextlib.nullcontext, EVERYTHING) * 2:
        jax.clear_caches()
        with context(), cProfile.Profile() as profile:
            jax.jit(lambda *operands: step(*operands)).lower(*types, types[1])
        counts.append(pstats.Stats(profile).total_calls)
    assert counts[3] < 1.2 * counts[2]


def test_traced_programs_are_those_of_jax(rng: np.random.Generator) -> None:
    """Sums, updates and gradients of gathers are traced as without it. Only their lowering differs."""
    x, rows = rng.normal(size=(7, 4)).astype(np.float32), rng.normal(size=(20, 4)).astype(np.float32)
    ids = rng.integers(0, 7, 20)

    def step(x: jax.Array, rows: jax.Array) -> jax.Array:
        x = jax.lax.dynamic_update_slice(x, rows[:2], (ids[0], 0))
        return jnp.sum(x.at[ids].add(rows)[ids].max(0) * jax.ops.segment_sum(rows, ids, 7))

    def equations() -> list[str]:
        program = jax.make_jaxpr(jax.value_and_grad(step, (0, 1)))(x, rows)
        return [f"{e.primitive} {[x.aval for x in (*e.invars, *e.outvars)]}" for e in equations_of(program.jaxpr)]

    plain = equations()
    with EVERYTHING():
        assert equations() == plain


@pytest.mark.parametrize("weights", ["softmax", "softmax of jnp.where", "softmax by einsum", "sigmoid", "cutoff"])
def test_attention_stays_with_kernels(monkeypatch: pytest.MonkeyPatch, cuda_module: None, weights: str) -> None:
    """On GPUs, where a fusion would compute the softmax of an edge again for each feature of a head."""
    cases.use_rules(monkeypatch)
    nodes, edges, heads, features = 100_000, 1 << 20, 8, 16
    of_edges = {
        "softmax": lambda logits, maxima, ids: jnp.exp(logits - maxima[ids]),
        "softmax by einsum": lambda logits, maxima, ids: jnp.exp(logits - maxima[ids]),
        "softmax of jnp.where": lambda logits, maxima, ids: jnp.exp(logits - jnp.where(maxima > 0, maxima, 0)[ids]),
        "sigmoid": lambda logits, maxima, ids: jax.nn.sigmoid(logits - maxima[ids]),
        "cutoff": lambda logits, maxima, ids: jnp.exp(1 - 1 / (1 - maxima[ids] ** 2)),
    }[weights]

    def program(logits: Any, maxima: Any, values: Any, ids: Any) -> Any:
        own = jax.nn.relu(of_edges(logits, maxima, ids))
        rows = jnp.einsum("eh,ehd->ehd", own, values) if weights.endswith("einsum") else own[:, :, None] * values
        return jax.ops.segment_sum(rows, ids, nodes)

    shapes = ((edges, heads), (nodes, heads), (edges, heads, features))
    types = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    with redirect() as report:
        kernels_of(program, *types, jax.ShapeDtypeStruct((edges,), "int32"), platform="cuda")
    assert report.redirected.total() == weights.startswith("softmax"), report


# ----------------------------------------------------------------------------------------------------------------------
# Ids that are known to be sorted.


@pytest.mark.parametrize("kind", ["constant", "sorted", "promised", "unsorted", "descending", "negative"])
def test_sorted_ids_are_found(rng: np.random.Generator, kind: str) -> None:
    rows, ids = rng.normal(size=(20, 3)).astype(np.float32), np.sort(rng.integers(0, 7, 20))
    ids = {"unsorted": rng.permutation(ids[::-1]), "descending": ids[::-1], "negative": ids - 7}.get(kind, ids)

    def constant(rows: jax.Array) -> list[jax.Array]:
        extrema_and_products = [getattr(jax.ops, f"segment_{name}")(rows, ids, 7) for name in ("max", "min", "prod")]
        return [jax.ops.segment_sum(rows, ids, 7), jnp.zeros((7, 3)).at[ids].add(rows), *extrema_and_products]

    def argument(rows: jax.Array, ids: jax.Array) -> list[jax.Array]:
        own = jnp.sort(ids) if kind == "sorted" else ids
        return [jax.ops.segment_sum(rows, own, 7, indices_are_sorted=kind == "promised")]

    operands = (
        [rows] if kind not in ("sorted", "promised") else [rows, rng.permutation(ids) if kind == "sorted" else ids]
    )
    function = constant if len(operands) == 1 else argument
    expected = function(*operands)
    with redirect(indexed_updates=True):
        flags = re.findall(r"indices_are_sorted = (\w+)", lowered(function, *operands))
        actual = jax.jit(function)(*operands)
    assert flags == ["false" if kind in ("unsorted", "descending") else "true"] * len(expected)
    for got, want in zip(actual, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


# ----------------------------------------------------------------------------------------------------------------------
# Ids that several calls share.


def three_layers(name: str, nodes: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
    for _ in range(3):
        rows = getattr(jax.ops, name)(nodes[senders], receivers, nodes.shape[0])
        nodes = jnp.tanh(jnp.where(jnp.isfinite(rows), rows, 0))
    return jnp.sum(nodes.astype(jnp.float32) ** 2)


@pytest.mark.parametrize("name", ["segment_sum", "segment_max", "segment_min"])
def test_equal_ids_are_sorted_once(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, name: str) -> None:
    """Here CPU kernels stand for those of GPUs, which sort. XLA merges the orders of all layers and of the gradient. A
    program holds the orders of constant ids, and sorts nothing."""
    nodes = rng.normal(size=(40, 32)).astype(np.float32)
    ids = rng.integers(-45, 45, 200), rng.integers(-5, 45, 200)
    step = jax.value_and_grad(functools.partial(three_layers, name))
    expected = step(nodes, *ids)
    for op in (SEGMENT_SUM, SEGMENT_EXTREMUM):
        monkeypatch.setitem(op.alternatives, on_cpu("as on GPUs", shares_sort), op.alternatives[SHARED_SORT])
    monkeypatch.setattr(lowering, "_sorts_rows", lambda call, platform: True)
    of_constants = jax.value_and_grad(lambda nodes: three_layers(name, nodes, *ids))
    for program, operands, num_orders in ((step, (nodes, *ids), 2), (of_constants, (nodes,), 0)):
        with redirect(), jax_baracuda.implementation("kernel"):
            compiled = jax.jit(program).lower(*operands).compile()
        kernels = kernels_in(compiled.as_text())
        assert kernels.count("segment_order") == num_orders
        reductions = {kernel.removesuffix("_with_winner") for kernel in kernels}
        assert f"gather_{name}" in reductions and not reductions & {*REDUCTIONS}
        value, gradient = compiled(*operands)
        np.testing.assert_allclose(value, expected[0], rtol=1e-5)
        np.testing.assert_allclose(gradient, expected[1], rtol=1e-4, atol=1e-5)


TREATED: dict[str, tuple[np.ndarray, Callable[[Any], Any], bool]] = {
    "clipped": (np.array([-5, 2, 2, 9]), lambda ids: jnp.clip(ids, 0, 6), True),
    "clipped to one another": (np.array([6, 9, 7, 8]), lambda ids: jnp.clip(ids, 0, 6), True),
    "in an inner jit": (np.array([0, 3, 4, -1]), jax.jit(lambda ids: jnp.where(ids < 0, ids + 7, ids)), True),
    "not there": (np.array([0, 3, -1, 4]), jax.jit(lambda ids: jnp.where(ids < 0, ids + 7, ids)), False),
    "int8": (np.array([-1, 0, 5, 6], np.int8), lambda ids: ids, True),
    "uint8": (np.array([0, 5, 200, 255], np.uint8), lambda ids: ids, True),
    "uint32": (np.array([0, 5, 2**31 + 1, 2**32 - 1], np.uint32), lambda ids: ids, True),
    "uint32 as int32": (np.array([0, 5, 2**31 + 1], np.uint32), lambda ids: ids.astype(jnp.int32), False),
}
"""Constants, what the program makes of them, and whether that ascends."""


@pytest.mark.parametrize("case", TREATED)
def test_treated_constants_are_known(rng: np.random.Generator, case: str) -> None:
    ids, treat, ascends = TREATED[case]
    rows = rng.integers(-9, 9, (len(ids), 3)).astype(np.float32)

    def function(rows: jax.Array) -> jax.Array:
        return jax_baracuda.segment_sum(rows, treat(jnp.asarray(ids)), 7, implementation="kernel")

    assert re.findall(r"indices_are_sorted = (\w+)", lowered(function, rows)) == ["true" if ascends else "false"]
    np.testing.assert_array_equal(jax.jit(function)(rows), jax.ops.segment_sum(rows, treat(jnp.asarray(ids)), 7))


@pytest.mark.skipif(cases.PLATFORM != "cpu", reason="it prints by a CPU device, which JAX may not have beside a GPU")
def test_programs_with_ordered_effects(rng: np.random.Generator) -> None:
    """Functions take and return tokens beside ids."""

    @jax.jit
    def step(ids: jax.Array) -> jax.Array:
        jax.debug.print("{}", ids[0], ordered=True)
        return ids * 2

    def function(rows: jax.Array, ids: jax.Array) -> jax.Array:
        jax.debug.print("{}", ids[0], ordered=True)
        return jnp.zeros((9, 3)).at[step(ids) + 1].add(rows)

    rows, ids = rng.integers(-9, 9, (4, 3)).astype(np.float32), np.array([3, 0, 1, 3])
    with redirect(indexed_updates=True), jax_baracuda.implementation("kernel"):
        result = jax.jit(function)(rows, ids)
    np.testing.assert_array_equal(result, jax.ops.segment_sum(rows, 2 * ids + 1, 9))


def test_ids_that_jax_truncates_are_not_known_to_ascend() -> None:
    ids = np.array([0, 1, 2**32, 2**32 + 1])
    with warnings.catch_warnings(action="ignore"), redirect():
        text = lowered(lambda rows: jax.ops.segment_max(rows, ids, 3), jnp.ones((4, 40)))
    assert "indices_are_sorted = true" not in text


@pytest.mark.skipif(NATIVE_MODULES["cuda"].module is None, reason="plans of CUDA kernels are in their module")
@pytest.mark.parametrize("name", ["segment_sum", "segment_max"])
def test_kernels_that_sort_share_their_orders_on_gpus(name: str) -> None:
    """Inside the context only, also calls of our functions, where the kernel would sort: not of narrow or few rows."""
    types = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in (((10**5, 128), "bfloat16"), ((10**6,), "int32"))]
    few = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in (((10**5, 4), "bfloat16"), ((10**6,), "int32"))]

    def step(nodes: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
        return three_layers(name, nodes, senders, receivers)

    reduction = name.removeprefix("segment_")
    with redirect(), jax_baracuda.implementation("kernel"):
        of_many = kernels_of(step, *types, types[1], platform="cuda")
        assert of_many == ["segment_order", f"gather_segment_{reduction}"] * 3
        assert kernels_of(step, *few, few[1], platform="cuda") == [f"segment_{reduction}"] * 3
    own = functools.partial(getattr(jax_baracuda, name), num_segments=10**5)
    rows = jax.ShapeDtypeStruct((10**6, 128), np.float32)
    with jax_baracuda.implementation("kernel"):
        assert kernels_of(own, rows, types[1], platform="cuda") == [f"segment_{reduction}"]
        with redirect():
            assert kernels_of(own, rows, types[1], platform="cuda") == ["segment_order", f"gather_segment_{reduction}"]


@pytest.mark.parametrize("name", ["segment_max", "segment_min"])
def test_extrema_in_plain_jax(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """They compare floating numbers as JAX does. In our functions, plain JAX compares their bits."""
    cases.use_rules(monkeypatch)
    x, ids = jnp.arange(15.0), jnp.arange(15) % 4
    with redirect() as report:
        text = lowered(lambda x: getattr(jax.ops, name)(jnp.exp(x), ids, 5), x, platform="cpu")
    assert report.kept.total() == 1 and "bitcast_convert" not in text
    with redirect(), jax_baracuda.implementation("xla"):
        assert "bitcast_convert" in lowered(lambda x: getattr(jax_baracuda, name)(jnp.exp(x), ids, 5), x)


def loop_of(function: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    return lambda x: jax.lax.scan(lambda x, _: (function(x), None), x, None, length=2)[0]


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, loop_of], ids=["jit", "checkpoint", "scan"])
@pytest.mark.parametrize("name", ["segment_max", "segment_prod"])
def test_report_of_gradients_inside(name: str, wrap: Callable[..., Any]) -> None:
    """The gradient of a function that the program calls counts as a gradient."""
    x, ids = jnp.arange(1.0, 16.0).reshape(5, 3), jnp.asarray([0, 4, 4, 1, 2])
    reduce = wrap(lambda x: getattr(jax.ops, name)(x, ids, 5))
    with redirect() as report:
        jax.jit(jax.grad(lambda x: reduce(x).sum())).lower(x)
    calls = {call for call, *_ in report.calls}
    assert calls == {f"jax.ops.{name}", f"gradient of jax.ops.{name}"}


def test_report() -> None:
    """Lines of at most 80 characters say what ran, and why. A compiled program is not counted again."""
    x, ids = jnp.ones((5, 3)), jnp.asarray([0, 4])
    program = jax.jit(jax.grad(lambda x: x[ids].sum()))
    with redirect(indexed_updates=True) as report:
        assert str(report).startswith("no calls")
        program(x), program(x)
        x.at[ids, :2].add(1.0)
    assert report.redirected == {"gradient of a gather": 1}
    assert report.kept == {("x.at[ids].add", "its indices are slices, or name parts of rows"): 1}
    lines = str(report).splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert lines[0].startswith("1 x gradient of a gather: a kernel, ")
    assert lines[-1] == "1 x x.at[ids].add: plain JAX, its indices are slices, or name parts of rows"
