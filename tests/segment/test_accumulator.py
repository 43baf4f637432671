"""Sums in float64 of rows of 16 and 32 bits: ``accumulator="float64"``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import cases

import jax_baracuda as jb

IN_FLOAT64: dict[str, Any] = {"accumulator": "float64"}
BELOW_FLOAT64 = ("float32", "float16", "bfloat16")
EPS_OF_FLOAT64 = float(np.finfo(np.float64).eps)


def cancelling_rows(rng: np.random.Generator, num_rows: int, features: int, dtype: str) -> np.ndarray:
    """Numbers of either sign and of magnitudes from 2^-7 to 2^7, most of which cancel."""
    magnitude = np.exp2(rng.uniform(-7, 7, (num_rows // 2, features)))
    half = np.asarray(magnitude * rng.choice([-1, 1], magnitude.shape)).astype(jnp.dtype(dtype))
    rest = np.asarray(rng.normal(size=(num_rows % 2 + 5, features))).astype(jnp.dtype(dtype))
    return np.concatenate([half, -half[rng.permutation(len(half))], rest])


def exact_sums(rows: np.ndarray, ids: np.ndarray, num_segments: int) -> tuple[np.ndarray, np.ndarray]:
    """The sums of the rows of each segment, and of their magnitudes, in long double."""
    wide = rows.astype(np.longdouble)
    return cases.segment_sum(wide, ids, num_segments), cases.segment_sum(np.abs(wide), ids, num_segments)


def assert_rounded_once(actual: Any, exact: np.ndarray, error: np.ndarray, dtype: str) -> None:
    """Half a unit in the last place of the dtype, after an error of the additions."""
    assert actual.dtype == jnp.dtype(dtype)
    half = 0.5 * float(jnp.finfo(dtype).eps) * np.maximum(np.abs(exact), float(jnp.finfo(dtype).tiny))
    difference = np.abs(np.asarray(actual).astype(np.float64) - exact)
    assert (difference <= half * (1 + 1e-6) + error).all(), (difference - half).max()


def sums_of(call: Callable[..., Any], rows: np.ndarray, ids: np.ndarray, num_segments: int, **options: Any) -> Any:
    return jax.jit(lambda rows, ids: call(rows, ids, num_segments, **options))(rows, ids)


@pytest.mark.parametrize("dtype", BELOW_FLOAT64)
@pytest.mark.parametrize(
    ("num_rows", "features", "num_segments"),
    [(1_000_000, 1, 1), (40_000, 3, 7), (30_001, 33, 900), (20_000, 16, 30_000), (3000, 700, 40)],
)
@pytest.mark.parametrize("order", ["random", "sorted", "plan"])
def test_sums_are_rounded_once(
    rng: np.random.Generator, dtype: str, num_rows: int, features: int, num_segments: int, order: str
) -> None:
    rows = cancelling_rows(rng, num_rows, features, dtype)
    ids = rng.integers(-1, num_segments + 1, len(rows)).astype(np.int32)
    ids = np.sort(ids) if order == "sorted" else ids
    exact, magnitude = exact_sums(rows, ids, num_segments)
    error = 4 * np.sqrt(len(rows) / num_segments + 1) * EPS_OF_FLOAT64 * magnitude
    count = np.bincount(ids[(ids >= 0) & (ids < num_segments)], minlength=num_segments).reshape(-1, 1)
    for call, expected in ((jb.segment_sum, exact), (jb.segment_mean, exact / np.maximum(count, 1))):
        if order == "plan":
            plan = jb.segment_plan(ids, num_segments)
            actual = jax.jit(lambda rows, plan, call=call: call(rows, plan=plan, **IN_FLOAT64))(rows, plan)
        else:
            actual = sums_of(call, rows, ids, num_segments, indices_are_sorted=order == "sorted", **IN_FLOAT64)
        assert_rounded_once(actual, expected, error, dtype)


def test_float32_does_not_suffice(rng: np.random.Generator) -> None:
    """The bound of the other tests tells sums in float32 from sums in float64."""
    rows = cancelling_rows(rng, 100_000, 4, "float32")
    ids = np.zeros(len(rows), np.int32)
    exact, magnitude = exact_sums(rows, ids, 1)
    with pytest.raises(AssertionError):
        actual = sums_of(jb.segment_sum, rows, ids, 1, implementation="kernel")
        assert_rounded_once(actual, exact, 4 * np.sqrt(len(rows)) * EPS_OF_FLOAT64 * magnitude, "float32")


@pytest.mark.parametrize("dtype", BELOW_FLOAT64)
def test_plain_jax_adds_in_float64(rng: np.random.Generator, dtype: str) -> None:
    rows = cancelling_rows(rng, 20_000, 3, dtype)
    ids = rng.integers(-1, 12, len(rows)).astype(np.int32)
    exact, magnitude = exact_sums(rows, ids, 11)
    actual = sums_of(jb.segment_sum, rows, ids, 11, implementation="xla", **IN_FLOAT64)
    rounded_to_float32 = 2.0**-24 * np.abs(exact) if dtype != "float32" else 0
    assert_rounded_once(actual, exact, 4 * np.sqrt(len(rows)) * EPS_OF_FLOAT64 * magnitude + rounded_to_float32, dtype)


@pytest.mark.parametrize("implementation", ["kernel", "xla"])
def test_infinities_and_nan(implementation: Any) -> None:
    rows = np.array([np.inf, 1, -np.inf, 2, np.inf, -np.inf, np.nan, 1, -0.0, -0.0], np.float32)
    ids = np.array([0, 0, 1, 1, 2, 2, 3, 3, 5, 5], np.int32)
    actual = sums_of(jb.segment_sum, rows, ids, 6, implementation=implementation, **IN_FLOAT64)
    np.testing.assert_array_equal(actual, np.array([np.inf, -np.inf, np.nan, np.nan, 0, 0], np.float32))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bits_are_not_rounded_twice(dtype: str) -> None:
    """A sum just above the middle between two numbers of 16 bits, from which it cannot be told in float32."""
    eps, tiny = float(jnp.finfo(dtype).eps), {"float16": 2.0**-24, "bfloat16": 2.0**-40}[dtype]
    rows = np.array([1, eps / 2, tiny]).astype(jnp.dtype(dtype))
    for sign in (1, -1):
        actual = jb.segment_sum(rows * sign, np.zeros(3, np.int32), 1, **IN_FLOAT64)
        assert float(actual[0]) == sign * (1 + eps)


@pytest.mark.parametrize("dtype", BELOW_FLOAT64)
@pytest.mark.parametrize("ids_shape", [(30_000,), (150, 200)])
@pytest.mark.parametrize("order", ["random", "sorted", "plan"])
def test_gradients_of_take_rows(rng: np.random.Generator, dtype: str, ids_shape: tuple[int, ...], order: str) -> None:
    num_rows, features = 11, 5
    cotangents = cancelling_rows(rng, int(np.prod(ids_shape)) - 5, features, dtype)
    ids = rng.integers(0, num_rows, len(cotangents)).astype(np.int32)
    ids = np.sort(ids) if order == "sorted" else ids
    exact, magnitude = exact_sums(cotangents, ids, num_rows)
    if order == "plan":
        taken: dict[str, Any] = {"plan": jb.segment_plan(ids, num_rows)}
        d_taken = cotangents
    else:
        taken = {"ids": ids.reshape(ids_shape), "indices_are_sorted": order == "sorted"}
        d_taken = cotangents.reshape(*ids_shape, features)
    table = jnp.zeros((num_rows, features), dtype)
    _, vjp = jax.vjp(lambda table: jb.take_rows(table, **taken, **IN_FLOAT64), table)
    assert_rounded_once(vjp(d_taken)[0], exact, 200 * EPS_OF_FLOAT64 * magnitude, dtype)


def test_derivatives_of_derivatives(rng: np.random.Generator) -> None:
    """The transpose of the gradient is a sum in float64, too."""
    rows = cancelling_rows(rng, 30_000, 2, "float32")
    ids = rng.integers(0, 3, len(rows)).astype(np.int32)
    exact, magnitude = exact_sums(rows, ids, 3)
    error = 500 * EPS_OF_FLOAT64 * magnitude
    cells = jnp.zeros((3, 2))

    def gradient(cells: jax.Array) -> jax.Array:
        return jax.vjp(lambda rows: jb.segment_sum(rows, ids, 3, **IN_FLOAT64), rows)[1](cells)[0]

    assert_rounded_once(jax.vjp(gradient, cells)[1](rows)[0], exact, error, "float32")
    tangent = jax.jvp(lambda x: jb.forward_mode.segment_sum(x, ids, 3, **IN_FLOAT64), (rows,), (rows,))[1]
    assert_rounded_once(tangent, exact, error, "float32")

    def gradient_of_mean(cells: jax.Array) -> jax.Array:
        return jax.vjp(lambda rows: jb.segment_mean(rows, ids, 3, **IN_FLOAT64), rows)[1](cells)[0]

    count = np.bincount(ids).reshape(-1, 1)
    expected = exact / count
    once_more = 2.0**-24 * np.abs(expected)  # the sum is rounded before it is divided
    assert_rounded_once(jax.vjp(gradient_of_mean, cells)[1](rows)[0], expected, error + once_more, "float32")


@pytest.mark.parametrize("mapped", ["rows", "ids", "both"])
def test_vmap(rng: np.random.Generator, mapped: str) -> None:
    rows = np.stack([cancelling_rows(rng, 5000, 3, "float32") for _ in range(3)])
    ids = rng.integers(0, 4, rows.shape[:2]).astype(np.int32)
    axes = (0 if mapped != "ids" else None, 0 if mapped != "rows" else None)
    operands = rows if axes[0] == 0 else rows[0], ids if axes[1] == 0 else ids[0]
    actual = jax.vmap(lambda rows, ids: jb.segment_sum(rows, ids, 4, **IN_FLOAT64), in_axes=axes)(*operands)
    for i in range(3):
        exact, magnitude = exact_sums(rows[i if axes[0] == 0 else 0], ids[i if axes[1] == 0 else 0], 4)
        assert_rounded_once(actual[i], exact, 200 * EPS_OF_FLOAT64 * magnitude, "float32")


@cases.on_two_devices
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_split_over_devices(rng: np.random.Generator, dtype: str) -> None:
    """Each device's sum is rounded to float32, and these sums are added in float32."""
    num_devices = 2
    mesh = jax.make_mesh((num_devices,), ("rows",), axis_types=(AxisType.Auto,), devices=jax.devices()[:num_devices])
    rows = cancelling_rows(rng, 40_000, 3, dtype)[:40_000]
    ids = rng.integers(0, 5, len(rows)).astype(np.int32)
    exact, magnitude = exact_sums(rows, ids, 5)
    of_devices = [
        exact_sums(*half, 5)[0] for half in zip(np.split(rows, num_devices), np.split(ids, num_devices), strict=True)
    ]
    in_float32 = 2.0**-23 * np.sum(np.abs(of_devices), axis=0)
    operands = [jax.device_put(x, NamedSharding(mesh, P("rows"))) for x in (rows, ids)]
    actual = sums_of(jb.segment_sum, *operands, 5, **IN_FLOAT64)
    assert_rounded_once(actual, exact, in_float32 + 500 * EPS_OF_FLOAT64 * magnitude, dtype)


@pytest.mark.parametrize("dtype", ["int32", "uint8"])
def test_integers_stay_exact(dtype: str) -> None:
    rows, ids = np.array([200, 100, 7], dtype), np.array([0, 0, 1], np.int32)
    actual = jb.segment_sum(rows, ids, 2, **IN_FLOAT64)
    np.testing.assert_array_equal(actual, jb.segment_sum(rows, ids, 2))


CALLS: dict[str, Callable[..., Any]] = {
    "segment_sum": lambda x, **options: jb.segment_sum(x, jnp.zeros(3, int), 1, **options),
    "segment_mean": lambda x, **options: jb.segment_mean(x, jnp.zeros(3, int), 1, **options),
    "take_rows": lambda x, **options: jb.take_rows(x, jnp.zeros(3, int), **options),
}


@pytest.mark.parametrize("name", CALLS)
def test_errors(name: str) -> None:
    for unknown in ("float32", 64, jnp.float64):
        with pytest.raises(ValueError, match=f"^{name}: accumulator must be None or 'float64', got "):
            CALLS[name](jnp.ones(3), accumulator=unknown)
    with pytest.raises(TypeError, match=f"^{name}: accumulator='float64' needs data of a real dtype, got complex64"):
        CALLS[name](jnp.ones(3, jnp.complex64), **IN_FLOAT64)
