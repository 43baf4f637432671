"""Small programs of every op family with its gradients, whose results are the same bits however often they run.

Data are small integers where sums may be added in any order, so that these are exact.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases

import jax_baracuda as jb
from jax_baracuda._core.op import Op

ORDERED = (jb.segment_max, jb.segment_min)
SUMS = (jb.segment_sum, jb.segment_mean)
POSITIONS = (jb.segment_argmax, jb.segment_argmin)

TINY = cases.Shape(50, (9,), 7)


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of arrays, and arrays for it."""

    name: str
    function: Callable[..., Any]
    operands: tuple[np.ndarray, ...]

    def results(self) -> list[np.ndarray]:
        """Of one call, by the kernels."""
        with cases.x64_for(*(x.dtype for x in self.operands)):
            return [np.asarray(x) for x in jax.tree.leaves(jax.jit(self.function)(*self.operands))]

    def expected(self) -> list[np.ndarray]:
        """Of one call, in plain JAX."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Op, "missing_kernel", lambda *_: "plain JAX is asked for")
            # A function that JAX has not traced yet.
            return dataclasses.replace(self, function=lambda *operands: self.function(*operands)).results()


def with_gradient(function: Callable[..., Any], *, of: tuple[int, ...] = (0,)) -> Callable[..., Any]:
    """The results, and the cotangents of the operands at these positions, for cotangents that are small integers."""

    def value_and_gradient(*operands: Any) -> Any:
        def partial(*differentiated: Any) -> Any:
            arguments = list(operands)
            for i, x in zip(of, differentiated, strict=True):
                arguments[i] = x
            return function(*arguments)

        results, vjp = jax.vjp(partial, *(operands[i] for i in of))
        cotangents = jax.tree.map(
            lambda y: (jax.lax.iota(jnp.int32, y.size) % 5 - 2).reshape(y.shape).astype(y.dtype), results
        )
        return results, vjp(cotangents)

    return value_and_gradient


def small_integers(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return rng.integers(-3, 4, shape).astype(jnp.dtype(dtype))


def segment_programs(rng: np.random.Generator, shape: cases.Shape, dtype: str) -> list[Program]:
    """All segment reductions of rows in random order, and of sorted ones."""
    data = small_integers(rng, (shape.rows, *shape.row_shape), dtype)
    ids = rng.integers(-1, shape.segments + 1, shape.rows).astype(np.int32)
    programs = []
    for is_sorted in (False, True):
        for function in (*ORDERED, *SUMS, jb.segment_prod, jb.segment_softmax, *POSITIONS):
            options: dict[str, Any] = {"num_segments": shape.segments, "indices_are_sorted": is_sorted}
            if function is jb.segment_softmax:
                options["deterministic"] = True
            if function is jb.segment_max and is_sorted:
                options["tie_break"] = "first"
            call = functools.partial(function, **options)
            rows = np.sign(data) if function is jb.segment_prod else data
            programs.append(
                Program(
                    f"segment {function.__name__} {shape} {dtype}{' sorted' if is_sorted else ''}",
                    call if function in POSITIONS else with_gradient(call),
                    (rows, np.sort(ids) if is_sorted else ids),
                )
            )
    return programs


def convolution_programs(rng: np.random.Generator, size: tuple[int, int, int], dtype: str) -> list[Program]:
    """Of [examples, channels, length]: with no option, with all of them, and step by step."""
    examples, channels, length = size
    programs = []
    for channels_last in (False, True):
        name = f"causal_conv1d {size} {dtype}{' channels last' if channels_last else ''}"
        signal = small_integers(rng, (examples, length, channels) if channels_last else size, dtype)
        weight, bias = small_integers(rng, (channels, 4), dtype), small_integers(rng, (channels,), dtype)
        state = small_integers(rng, (examples, channels, 3), dtype)
        ids = np.sort(rng.integers(0, 4, (examples, length)), axis=1).astype(np.int32)
        bare = functools.partial(jb.causal_conv1d, channels_last=channels_last)

        def with_all(x: Any, w: Any, b: Any, s: Any, i: Any, call: Callable[..., Any] = bare) -> Any:
            return call(x, w, b, initial_state=s, segment_ids=i, activation="silu", return_final_state=True)

        update = functools.partial(jb.causal_conv1d_update, channels_last=channels_last)
        programs += [
            Program(name, with_gradient(bare, of=(0, 1)), (signal, weight)),
            Program(
                f"{name} all options", with_gradient(with_all, of=(0, 1, 2, 3)), (signal, weight, bias, state, ids)
            ),
            Program(f"{name} update", update, (signal, state, weight, bias)),
        ]
    return programs


def rotation_programs(rng: np.random.Generator, size: tuple[int, int, int, int], dtype: str) -> list[Program]:
    """Of [examples, heads, length, features]."""
    examples, heads, length, features = size
    programs = []
    for interleaved in (True, False):
        for layout in ("BHSD", "BSHD"):
            shape = size if layout == "BHSD" else (examples, length, heads, features)
            options = {"interleaved": interleaved, "layout": layout}
            q, k = small_integers(rng, shape, dtype), small_integers(rng, shape, dtype)
            positions = rng.integers(0, 1000, (examples, length)).astype(np.int32)
            name = f"{size} {dtype} {layout}{' interleaved' if interleaved else ''}"
            programs += [
                Program(f"rope {name}", with_gradient(functools.partial(jb.rope, **options)), (q, positions)),
                Program(
                    f"rope_qk {name}",
                    with_gradient(
                        functools.partial(jb.rope_qk, rotary_dim=max(2, features // 4 * 2), **options), of=(0, 1)
                    ),
                    (q, k, positions),
                ),
            ]
    return programs


def selection_programs(rng: np.random.Generator, rows: int, columns: int, dtype: str) -> list[Program]:
    """Of operands that are whole, or broadcast along one or both axes."""
    full = small_integers(rng, (rows, columns), dtype)
    shapes = {"whole": (rows, columns), "row": (columns,), "column": (rows, 1), "number": ()}
    return [
        Program(
            f"where {rows}x{columns} {dtype} {name}",
            with_gradient(jb.where, of=(1, 2)),
            (
                rng.random((rows, 1) if name == "row" else (rows, columns)) < 0.5,
                full,
                small_integers(rng, shape, dtype),
            ),
        )
        for name, shape in shapes.items()
    ]


def window_programs(
    rng: np.random.Generator, shape: tuple[int, int], window: tuple[int, int], dtype: str
) -> list[Program]:
    """A window written anywhere, partly outside too."""
    dest, source = small_integers(rng, shape, dtype), small_integers(rng, window, dtype)
    starts = np.array([shape[0] - 2, rng.integers(0, shape[1])], np.int32)
    programs = []
    for mode in ("clip", "drop"):

        def write(dest: Any, source: Any, starts: Any, mode: Any = mode) -> Any:
            return jb.write_slice(dest, source, (starts[0], starts[1]), mode=mode)

        programs.append(
            Program(
                f"write_slice {shape} {window} {dtype} {mode}",
                with_gradient(write, of=(0, 1)) if cases.is_floating(dtype) else write,
                (dest, source, starts),
            )
        )

    def write_two(a: Any, b: Any, source: Any, starts: Any) -> Any:
        return jb.write_slices([a, b], [source, source], (starts[0], starts[1]))

    return [*programs, Program(f"write_slices {shape} {window} {dtype}", write_two, (dest, dest, source, starts))]


def tiny_programs(rng: np.random.Generator) -> list[Program]:
    """One size of everything, where a call costs about as much as its launch."""
    return [
        *segment_programs(rng, TINY, "float32"),
        *convolution_programs(rng, (2, 5, 11), "float32"),
        *rotation_programs(rng, (2, 3, 5, 8), "float32"),
        *selection_programs(rng, 6, 37, "float32"),
        *window_programs(rng, (9, 13), (4, 5), "float32"),
    ]
