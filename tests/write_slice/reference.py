"""Random windows, arrays of random bits, and an independent NumPy reference for writing and taking windows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from support import cases, handlers
from support.cases import INTEGERS, SUB_BYTE
from support.handlers import Array, Call

from jax_baracuda.ops.write_slice import DTYPES, Window

MODES = ("clip", "drop")

ALL_DTYPES = tuple(sorted(DTYPES))


def bits_of(dtype: Any) -> int:
    """The bits of an element, as XLA stores it."""
    name = jnp.dtype(dtype).name
    return (
        int(name.removeprefix("u").removeprefix("int").removeprefix("float")[0])
        if name in SUB_BYTE
        else (8 * jnp.dtype(dtype).itemsize)
    )


def random_bits(rng: np.random.Generator, shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Random values of the dtype, including every kind of NaN."""
    dtype = jnp.dtype(dtype)
    bits = bits_of(dtype)
    if bits >= 8:
        return cases.random_bits(rng, shape, dtype)
    values = rng.integers(0, 1 << bits, shape, dtype=np.uint8)
    if jnp.issubdtype(dtype, jnp.floating):
        return values.view(dtype)
    is_signed = int(jnp.iinfo(dtype).min) < 0
    return (values.astype(np.int8) - ((1 << bits) // 2 if is_signed else 0)).astype(dtype)


@dataclasses.dataclass(frozen=True)
class OverlapIndices:
    """The elements of a window inside the array: for each axis, their indices in the array and in the window."""

    in_array: tuple[np.ndarray, ...]
    in_window: tuple[np.ndarray, ...]


def overlap_indices(shape: Sequence[int], sizes: Sequence[int], starts: Sequence[int], mode: str) -> OverlapIndices:
    """Computes the indices one by one, in unbounded integers."""
    in_array, in_window = [], []
    for dim, size, start in zip(shape, sizes, map(int, starts), strict=True):
        if mode == "clip":
            start = min(max(start + dim if start < 0 else start, 0), dim - size)
        inside = [i for i in range(size) if 0 <= start + i < dim]
        in_window.append(np.array(inside, np.int64))
        in_array.append(np.array([start + i for i in inside], np.int64))
    return OverlapIndices(np.ix_(*in_array), np.ix_(*in_window))


def reference_write(dest: np.ndarray, source: np.ndarray, starts: Sequence[int], mode: str = "clip") -> np.ndarray:
    """`dest` with `source` in its window."""
    where, result = overlap_indices(dest.shape, source.shape, starts, mode), dest.copy()
    result[where.in_array] = source[where.in_window]
    return result


def reference_take(
    cotangent: np.ndarray, sizes: Sequence[int], starts: Sequence[int], mode: str = "clip"
) -> tuple[np.ndarray, np.ndarray]:
    """The cotangent with zeros in the window, and the window with zeros outside the array."""
    where, rest = overlap_indices(cotangent.shape, sizes, starts, mode), cotangent.copy()
    taken = np.zeros(tuple(sizes), cotangent.dtype)
    taken[where.in_window] = cotangent[where.in_array]
    rest[where.in_array] = 0
    return rest, taken


@dataclasses.dataclass(frozen=True)
class RandomWindow:
    """A window of an array."""

    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    """The dtypes of the starts."""

    def random_starts(self, rng: np.random.Generator) -> list[int]:
        """Random starts. About half are out of range, and some are the limits of their dtype."""
        starts = []
        for dim, size, dtype in zip(self.shape, self.sizes, self.dtypes, strict=True):
            info = jnp.iinfo(dtype)
            choices = [*range(-size - 2, dim + 3), *range(0, dim - size + 1), int(info.min), int(info.max)]
            starts.append(min(max(int(rng.choice(np.array(choices, object))), int(info.min)), int(info.max)))
        return starts

    def as_arrays(self, starts: Sequence[int]) -> list[np.ndarray]:
        return [np.asarray(start, dtype) for start, dtype in zip(starts, self.dtypes, strict=True)]


def random_window(
    rng: np.random.Generator, rank: int, max_elements: int = 3000, start_dtypes: Sequence[str] = INTEGERS
) -> RandomWindow:
    """A window of an array with axes of 1 to 40. The window covers each axis in whole, in part, or not at all."""
    shape: list[int] = []
    for _ in range(rank):
        room = max(1, max_elements // int(np.prod(shape, dtype=np.int64)))
        shape.append(int(rng.integers(1, min(room, rng.choice([3, 9, 40])) + 1)))
    shape = [int(dim) for dim in rng.permutation(shape)]
    sizes = [dim if rng.random() < 0.4 else int(rng.integers(rng.random() > 0.05, dim + 1)) for dim in shape]
    return RandomWindow(tuple(shape), tuple(sizes), tuple(map(str, rng.choice(list(start_dtypes), rank))))


def of_batch(function: Callable[..., Any], *arrays: np.ndarray) -> Any:
    """Applies a function to each element of a batch, and stacks the results."""
    results = [function(*elements) for elements in zip(*arrays, strict=True)]
    if isinstance(results[0], tuple):
        return tuple(np.stack(parts) for parts in zip(*results, strict=True))
    return np.stack(results)


def window(write: int, axis: int, start: int, size: int) -> Window:
    """The param of the ops for one axis of an array that is not split over devices."""
    return Window(write, axis, start, size, num_shards=1)


# ----------------------------------------------------------------------------------------------------------------------
# Direct calls of the native targets.

TARGETS = ("write_slice", "write_slice_backward")

BATCH = 3
SHAPES = ((7, 5, 4), (6, 9))
WINDOWS = (window(0, 0, 0, 2), window(0, 2, 1, 3), window(1, 1, 0, 5))
"""Two arrays. Windows cover part of axes 0 and 2 of the first, and of axis 1 of the second at the start of axis 0."""


def window_sizes(shapes: Sequence[Sequence[int]], windows: Sequence[Window]) -> list[tuple[int, ...]]:
    sizes = [list(shape) for shape in shapes]
    for w in windows:
        sizes[w.array][w.axis] = w.size
    return [tuple(size) for size in sizes]


def good_call(
    target: str,
    batched: bool = True,
    *,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    start_dtypes: Sequence[str] = ("int32", "uint8"),
    shared: Sequence[str] = (),
    shapes: Sequence[Sequence[int]] = SHAPES,
    windows: Sequence[Window] = WINDOWS,
    drop: bool = False,
    batch: int = BATCH,
) -> Call:
    """A valid call. The batch shares the operands in `shared`."""
    first = (batch,) if batched else ()

    def arrays(name: str, all_shapes: Sequence[Sequence[int]], all_dtypes: Sequence[str]) -> list[Array]:
        made = [
            Array(f"{name} {i}", (*first, *shape), dtype)
            for i, (shape, dtype) in enumerate(zip(all_shapes, all_dtypes, strict=True))
        ]
        return [x.shared() if x.name in shared else x for x in made]

    dests, sources = arrays("dest", shapes, dtypes), arrays("source", window_sizes(shapes, windows), dtypes)
    starts = arrays("start", [()] * len(start_dtypes), start_dtypes)
    parts = [Array("part", (1,) if batched else (), "int32") for w in windows if w.num_shards > 1]
    results = arrays("result", shapes, dtypes)
    params = {"ranks": tuple(map(len, shapes)), "windows": tuple(windows), "drop": drop, "num_batch_dims": int(batched)}
    if target == "write_slice":
        return handlers.good_call(target, [*dests, *sources, *starts, *parts], results, params)
    return handlers.good_call(target, [*dests, *starts, *parts], [*results, *sources], params)
