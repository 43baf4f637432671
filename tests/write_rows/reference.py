"""An independent NumPy reference for writing rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from support import cases

from jax_baracuda._core.arrays import DTYPES_OF_WHOLE_BYTES

ALL_DTYPES = tuple(sorted(DTYPES_OF_WHOLE_BYTES))
ROW_DTYPES = ("float32", "float16", "bfloat16")
POOL_DTYPES = (*ROW_DTYPES, "float8_e4m3fn", "float8_e5m2", "int8")
"""The dtypes between which the kernel converts."""


def reference_write(
    dest: np.ndarray,
    rows: np.ndarray,
    slots: np.ndarray,
    axis: int = 0,
    layer: int | None = None,
    scale: np.ndarray | float | None = None,
) -> np.ndarray:
    """Writes row by row, in order."""
    result = dest.copy()
    if layer is not None and not 0 <= layer < len(dest):
        return result
    by_slot = np.moveaxis(result if layer is None else result[layer], axis, 0)
    rows = reference_converted(rows, dest.dtype, scale)
    for row, slot in zip(rows, slots.tolist(), strict=True):
        if 0 <= slot < len(by_slot):
            by_slot[slot] = row
    return result


def reference_converted(rows: np.ndarray, dtype: np.dtype, scale: np.ndarray | float | None = None) -> np.ndarray:
    if scale is not None:
        scale = np.asarray(scale, np.float32)
        rows = rows.astype(np.float32) / (scale.reshape(-1, *[1] * (rows.ndim - 2)) if scale.ndim else scale)
    if rows.dtype == dtype:
        return rows
    if dtype == np.int8:
        rows = np.clip(np.rint(np.nan_to_num(rows.astype(np.float64))), -128, 127)
    with np.errstate(invalid="ignore", over="ignore"):
        return rows.astype(dtype)


def reference_taken(
    cotangent: np.ndarray, slots: np.ndarray, axis: int = 0, layer: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The cotangent with zeros in the slots that are written, and that of the rows."""
    rest = cotangent.copy()
    by_slot = np.moveaxis(rest if layer is None else rest[layer], axis, 0)
    taken = np.zeros((len(slots), *by_slot.shape[1:]), cotangent.dtype)
    last = {slot: t for t, slot in enumerate(slots.tolist()) if 0 <= slot < len(by_slot)}
    for slot, t in last.items():
        taken[t] = by_slot[slot]
    for slot in last:
        by_slot[slot] = 0
    return rest, taken


def random_numbers(rng: np.random.Generator, shape: Sequence[int], dtype: Any, magnitude: float = 50) -> np.ndarray:
    """Numbers that meet every case of a conversion: ties, subnormal results, overflow, NaN."""
    exponents = rng.integers(-20, 12, shape)
    data = np.ldexp(rng.integers(-64, 65, shape).astype(np.float64) / 32, exponents)
    special = np.array([0.0, -0.0, 448, 464, 465, 480, 57344, 61440, 61439, 126.5, 127.5, -128.5, 0.5, 1.5, np.inf])
    special = np.concatenate([special, -special, [np.nan]])
    data = np.where(rng.random(shape) < 0.3, rng.normal(0, magnitude, shape), data)
    data = np.where(rng.random(shape) < 0.2, special[rng.integers(len(special), size=shape)], data)
    with np.errstate(over="ignore"):
        return data.astype(jnp.dtype(dtype))


def random_slots(rng: np.random.Generator, count: int, num_slots: int) -> np.ndarray:
    """Slots with duplicates. Some are out of range, and a few are the limits of int32."""
    slots = rng.integers(-3, num_slots + 3, count)
    limits = np.array([-(2**31), 2**31 - 1, -1, num_slots])
    return np.where(rng.random(count) < 0.1, limits[rng.integers(4, size=count)], slots).astype(np.int32)


def assert_same_numbers(actual: Any, expected: np.ndarray, what: str = "") -> None:
    """Equal bits, except those of NaN."""
    actual = np.asarray(actual)
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, what
    is_nan = np.isnan(expected.astype(np.float32)) if cases.is_floating(expected.dtype) else np.zeros(1, bool)
    got_nan = np.isnan(actual.astype(np.float32)) if cases.is_floating(expected.dtype) else np.zeros(1, bool)
    np.testing.assert_array_equal(got_nan, is_nan, what)
    bits = f"u{expected.dtype.itemsize}"
    got, want = (np.where(is_nan, 0, x.view(bits)) for x in (actual, expected))
    np.testing.assert_array_equal(got, want, what)
