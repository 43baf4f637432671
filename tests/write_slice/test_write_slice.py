"""write_slice and write_slices against NumPy and jax.lax.dynamic_update_slice: values, gradients, programs, errors."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases
from support.cases import INTEGERS, SUB_BYTE, assert_same_memory
from support.kernels import kernels_in
from support.programs import small_integers
from write_slice import reference as windows
from write_slice.reference import (
    ALL_DTYPES,
    MODES,
    of_batch,
    random_bits,
    random_window,
    reference_take,
    reference_write,
)

from jax_baracuda import forward_mode, write_slice, write_slices
from jax_baracuda.ops.write_slice import WRITE_SLICE

each_mode = pytest.mark.parametrize("mode", MODES)


def jitted(mode: str) -> Callable[..., Any]:
    return jax.jit(lambda dest, source, starts: write_slice(dest, source, starts, mode=mode))


# ----------------------------------------------------------------------------------------------------------------------
# Values.


@each_mode
@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_every_dtype_and_rank(rng: np.random.Generator, dtype: str, mode: str) -> None:
    """Right for windows of any size, even empty, at traced starts of every integer dtype, in and out of range."""
    with jax.enable_x64(True):
        for rank in (1, 2, 3, 4, 8):
            problem, run = random_window(rng, rank), jitted(mode)
            for _ in range(4):
                dest, source = random_bits(rng, problem.shape, dtype), random_bits(rng, problem.sizes, dtype)
                starts = problem.random_starts(rng)
                result = run(dest, source, problem.as_arrays(starts))
                where = f"{problem} at {starts}"
                assert_same_memory(result, reference_write(dest, source, starts, mode), where)
        text = run.lower(dest, source, problem.as_arrays(starts)).as_text()
        assert kernels_in(text) == ["write_slice"] * (source.size > 0)


@each_mode
@pytest.mark.parametrize("x64", [False, True], ids=["x32", "x64"])
def test_forms_of_start_indices(rng: np.random.Generator, x64: bool, mode: str) -> None:
    """Starts may be pairs, Python and NumPy integers and arrays, traced or not, mixed in a call, or one array."""
    dest, source = random_bits(rng, (7, 9, 5), "float32"), random_bits(rng, (2, 9, 3), "float32")
    expected = reference_write(dest, source, (3, 0, 1), mode)
    with jax.enable_x64(x64):
        for start_indices in (
            [(3, 5), (0, 9), (1, 4)],
            ([3, 5], np.int64(0), np.uint8(1)),
            [3, 0, 1],
            [np.array(3), jnp.asarray(0), jnp.uint8(1)],
            [jnp.int4(3), (0, 9), jnp.uint4(1)],
            np.array([3, 0, 1]),
            jnp.array([3, 0, 1], jnp.int16),
        ):
            assert_same_memory(write_slice(dest, source, start_indices, mode=mode), expected, str(start_indices))
        traced = jax.jit(lambda d, s, i, all_starts: [
            write_slice(d, s, (i, (0, 9), 1), mode=mode), write_slice(d, s, all_starts, mode=mode)
        ])  # fmt: skip
        for result in traced(dest, source, 3, np.array([3, 0, 1])):
            assert_same_memory(result, expected)


def test_python_integers_out_of_range(rng: np.random.Generator) -> None:
    """Python starts of any size are treated like traced starts."""
    dest, source = random_bits(rng, (9,), "int16"), random_bits(rng, (4,), "int16")
    for start in (-(10**30), -(2**63), -10, -9, -4, -1, 0, 5, 6, 8, 9, 2**31, 2**32, 2**64, 10**30):
        for mode in MODES:
            result = write_slice(dest, source, [start], mode=mode)
            assert_same_memory(result, reference_write(dest, source, [start], mode), f"{start} {mode}")


@pytest.mark.parametrize("dtype", ["int64", "uint64", "uint32"])
def test_starts_beyond_32_bits(rng: np.random.Generator, dtype: str) -> None:
    """Starts keep their upper bits, even if they would be in range without them."""
    dest, source = random_bits(rng, (9, 3), "uint8"), random_bits(rng, (4, 3), "uint8")
    with jax.enable_x64(dtype != "uint32"):
        info = np.iinfo(dtype)
        for start in (2**31 + 1, 2**32 - 1, 2**32 + 1, 2**63 - 1, 2**63 + 1, -(2**31) - 8, -(2**32) + 1, -(2**63)):
            if not info.min <= start <= info.max:
                continue
            for mode in MODES:
                result = jitted(mode)(dest, source, [np.array(start, dtype), np.array(0, dtype)])
                assert_same_memory(result, reference_write(dest, source, [start, 0], mode), f"{start} {mode}")


@each_mode
def test_edges(rng: np.random.Generator, mode: str) -> None:
    """Scalars, windows of the whole array, empty windows and empty arrays are right."""
    for shape, sizes in (((), ()), ((3,), (3,)), ((3, 4), (3, 4)), ((3, 4), (0, 4)), ((3, 0), (2, 0)), ((0,), (0,))):
        dest, source = random_bits(rng, shape, "float32"), random_bits(rng, sizes, "float32")
        for run in (write_slice, jax.jit(functools.partial(write_slice, mode=mode))):
            result = run(dest, source, [0] * len(shape))
            assert_same_memory(result, reference_write(dest, source, [0] * len(shape), mode), f"{shape} {sizes}")


@pytest.mark.parametrize("dtype", ["float32", "int4"])
def test_more_axes_than_the_kernel_takes(rng: np.random.Generator, dtype: str) -> None:
    shape, sizes, starts = (2, 1, 2, 1, 3, 1, 2, 1, 5), (1, 1, 2, 1, 2, 1, 1, 1, 3), [1, 0, 0, 0, -1, 0, 1, 0, 3]
    dest, source = random_bits(rng, shape, dtype), random_bits(rng, sizes, dtype)
    for mode in MODES:
        result = jitted(mode)(dest, source, starts)
        assert_same_memory(result, reference_write(dest, source, starts, mode))


def test_source_that_is_dest(rng: np.random.Generator) -> None:
    """A source may depend on the memory that is overwritten."""
    dest = random_bits(rng, (11, 5), "float32")
    result = jax.jit(lambda x: write_slice(x, x[2:8], (1, 0)), donate_argnums=0)(jnp.asarray(dest))
    assert_same_memory(result, reference_write(dest, dest[2:8], (1, 0)))
    result = jax.jit(lambda x: write_slice(x, x, (3, 0), mode="drop"), donate_argnums=0)(jnp.asarray(dest))
    assert_same_memory(result, reference_write(dest, dest, (3, 0), "drop"))


# ----------------------------------------------------------------------------------------------------------------------
# Batches.


def test_per_dim_batches_with_shared_and_mapped_starts(rng: np.random.Generator) -> None:
    """The batch may share one start while another one is mapped."""
    dests, sources = random_bits(rng, (4, 6, 9), "uint8"), random_bits(rng, (4, 2, 3), "uint8")
    rows, column = rng.integers(-2, 7, 4), 5
    run = jax.jit(jax.vmap(lambda d, s, i, j: write_slice(d, s, (i, j), mode="drop"), (0, 0, 0, None)))
    expected = of_batch(lambda d, s, i: reference_write(d, s, (i, column), "drop"), dests, sources, rows)
    assert_same_memory(run(dests, sources, rows, column), expected)


# ----------------------------------------------------------------------------------------------------------------------
# Several arrays.


def test_write_slices(rng: np.random.Generator) -> None:
    """Arrays of different shapes and dtypes, each with its own window, are written in one launch."""
    problems = [random_window(rng, rank, start_dtypes=("int32",)) for rank in (1, 2, 3, 2)]
    dtypes = ("float32", "int4", "bfloat16", "bool")
    dests = [random_bits(rng, p.shape, dtype) for p, dtype in zip(problems, dtypes, strict=True)]
    sources = [random_bits(rng, p.sizes, dtype) for p, dtype in zip(problems, dtypes, strict=True)]
    for mode in MODES:
        starts = [p.random_starts(rng) for p in problems]
        run = jax.jit(functools.partial(write_slices, mode=mode))
        results = run(dests, sources, start_indices_of_each=starts)
        assert isinstance(results, list)
        for result, dest, source, start in zip(results, dests, sources, starts, strict=True):
            assert_same_memory(result, reference_write(dest, source, start, mode))
        assert kernels_in(run.lower(dests, sources, start_indices_of_each=starts).as_text()) == ["write_slice"]


def test_one_byte_of_many_rows(rng: np.random.Generator) -> None:
    """Elements of less than a byte are right in rows that share a byte, also across the batch."""
    for shape, sizes in (((3,), (2,)), ((5, 3), (4, 1)), ((5, 3), (5, 2)), ((2, 3, 1), (2, 2, 1)), ((1,), (1,))):
        starts = rng.integers(-3, 6, (13, len(shape)))
        dests = {dtype: random_bits(rng, (13, *shape), dtype) for dtype in SUB_BYTE}
        sources = {dtype: random_bits(rng, (13, *sizes), dtype) for dtype in SUB_BYTE}
        for mode in MODES:
            write = jax.vmap(functools.partial(write_slice, mode=mode, implementation="kernel"))
            results = jax.jit(
                lambda dests, sources, f=write, i=starts: jax.tree.map(lambda d, s: f(d, s, i), dests, sources)
            )
            for dtype, result in results(dests, sources).items():
                expected = of_batch(
                    lambda *x, mode=mode: reference_write(*x, mode), dests[dtype], sources[dtype], starts
                )
                assert_same_memory(result, expected, f"{dtype} {shape} {sizes} {mode}")


@each_mode
@pytest.mark.parametrize("num_arrays", [1, 2, 3])
def test_whole_words(rng: np.random.Generator, num_arrays: int, mode: str) -> None:
    """Rows that begin and end at multiples of 16 bytes are right, and so are their gradients: with one to three axes of
    rows, with sources that the batch shares, and with starts of every dtype."""
    for num_axes, is_shared in itertools.product((1, 2, 3), (False, True)):
        shape, sizes = ((*of[-num_axes:], 3, 16) for of in ((5, 4, 6), (3, 2, 5)))
        start_dtypes = rng.choice(INTEGERS, num_axes).tolist()
        starts = [rng.integers(0 if of[0] == "u" else -9, 12, 3).astype(of) for of in start_dtypes]
        dests, cotangents = ([random_bits(rng, (3, *shape), "float32") for _ in range(num_arrays)] for _ in range(2))
        sources = [random_bits(rng, sizes if is_shared else (3, *sizes), "float32") for _ in range(num_arrays)]

        def of_one(dests: Any, sources: Any, starts: Any, cotangents: Any) -> Any:
            write = functools.partial(write_slices, start_indices=[*starts, 0, 0], mode=mode, implementation="kernel")
            results, vjp = jax.vjp(write, dests, sources)
            return results, *vjp(cotangents)

        with jax.enable_x64(True):
            mapped = jax.jit(jax.vmap(of_one, (0, None if is_shared else 0, 0, 0)))
            actual = mapped(dests, sources, starts, cotangents)
        at = np.stack([*(x.astype(object) for x in starts), *np.zeros((2, 3), object)], axis=1)
        for dest, source, dy, written, rest, taken in zip(dests, sources, cotangents, *actual, strict=True):
            source = np.broadcast_to(source, (3, *sizes))
            assert_same_memory(written, of_batch(lambda *x: reference_write(*x, mode), dest, source, at))
            expected = of_batch(lambda d, i, sizes=sizes: reference_take(d, sizes, i, mode), dy, at)
            for got, want in zip((rest, taken), expected, strict=True):
                assert_same_memory(got, want)


def test_start_indices_of_write_slices(rng: np.random.Generator) -> None:
    """Start indices are for all arrays, in every form that write_slice accepts, or for each array."""
    dests = [random_bits(rng, (6, 5), dtype) for dtype in ("float32", "int8")]
    sources = [random_bits(rng, (2, 5), dtype) for dtype in ("float32", "int8")]
    for start_indices in ([3, 0], [(3, 5), (0, 5)], (jnp.int32(3), 0), np.array([3, 0]), [(3, 5), 0]):
        for result, dest, source in zip(write_slices(dests, sources, start_indices), dests, sources, strict=True):
            assert_same_memory(result, reference_write(dest, source, (3, 0)))
    for start_indices in ([[3, jnp.int32(0)], [(1, 3), 0]], (np.array([3, 0]), [(1, 3), 0])):
        results = write_slices(dests, sources, start_indices_of_each=start_indices)
        assert_same_memory(results[0], reference_write(dests[0], sources[0], (3, 0)))
        assert_same_memory(results[1], reference_write(dests[1], sources[1], (1, 0)))
    assert write_slices([], [], [0, 0]) == []


def test_more_arrays_than_fit_in_a_launch(rng: np.random.Generator) -> None:
    """More arrays than fit in a launch are right, including a scalar, an empty window and a repeated array."""
    dests = [random_bits(rng, (13, 7), "bfloat16") for _ in range(14)]
    sources = [random_bits(rng, (rows, 7), "bfloat16") for rows in (1, 2, 3, 0, 5, 13, 1, 2, 3, 4, 5, 6, 7, 8)]
    dests, sources = [*dests, np.float32(1), dests[0]], [*sources, np.float32(2), sources[1]]
    start_indices = [*([start, 0] for start in range(14)), [], [9, 0]]
    for result, dest, source, start in zip(
        write_slices(dests, sources, start_indices_of_each=start_indices), dests, sources, start_indices, strict=True
    ):
        assert_same_memory(result, reference_write(np.asarray(dest), np.asarray(source), start))


# ----------------------------------------------------------------------------------------------------------------------
# Gradients.


@each_mode
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "complex64", "float8_e4m3fn"])
def test_gradient(rng: np.random.Generator, dtype: str, mode: str) -> None:
    """The cotangent's window goes to the source and the rest to dest, with the bits of NaN and infinity."""
    with cases.x64_for(dtype):
        for rank in (1, 2, 3, 5):
            problem = random_window(rng, rank, start_dtypes=("int32", "uint8", "int16"))
            for _ in range(2):
                dest, source = random_bits(rng, problem.shape, dtype), random_bits(rng, problem.sizes, dtype)
                dy, starts = random_bits(rng, problem.shape, dtype), problem.random_starts(rng)

                @jax.jit
                def gradient(dest: Any, source: Any, starts: Any, dy: Any) -> Any:
                    return jax.vjp(lambda d, s: write_slice(d, s, starts, mode=mode), dest, source)[1](dy)

                rest, taken = gradient(dest, source, problem.as_arrays(starts), dy)
                expected_rest, expected_taken = reference_take(dy, problem.sizes, starts, mode)
                assert_same_memory(rest, expected_rest, f"{problem} at {starts}")
                assert_same_memory(taken, expected_taken, f"{problem} at {starts}")


def plain(dest: Any, source: Any, start: int) -> Any:
    """Writes rows from `start` on in plain JAX, for derivatives of every order."""
    rows = jnp.arange(dest.shape[0])[:, None]
    is_inside = (rows >= start) & (rows < start + source.shape[0])
    return jnp.where(is_inside, source[jnp.clip(rows[:, 0] - start, 0, source.shape[0] - 1)], dest)


def test_integers_have_no_gradient(rng: np.random.Generator) -> None:
    """Integer arrays have float0 cotangents. Derivatives of floating arrays beside them are right, in either mode."""
    quantized, scales = random_bits(rng, (6, 8), "int8"), small_integers(rng, (6, 1), "float32")
    new, new_scale = random_bits(rng, (1, 8), "int8"), small_integers(rng, (1, 1), "float32")
    gradient = jax.grad(lambda x: write_slice(x, new, (2, 0)).astype(np.float32).sum(), allow_int=True)(quantized)
    assert gradient.dtype == jax.dtypes.float0

    def loss(write: Callable[..., Any], scales: Any, new_scale: Any) -> Any:
        values, all_scales = write([quantized, scales], [new, new_scale], (jnp.int32(2), 0))
        return (values * all_scales**2).sum()

    expected = jax.grad(lambda s, n: (reference_write(quantized, new, (2, 0)) * plain(s, n, 2) ** 2).sum(), (0, 1))
    for derivative in (jax.grad, jax.jacfwd):
        write = forward_mode.write_slices if derivative is jax.jacfwd else write_slices
        for got, want in zip(
            jax.jit(derivative(functools.partial(loss, write), (0, 1)))(scales, new_scale),
            expected(scales, new_scale),
            strict=True,
        ):
            np.testing.assert_array_equal(got, want)  # products of small integers are exact
    hessian = jax.hessian(functools.partial(loss, write_slices))(scales, new_scale)
    linear = jax.linearize(functools.partial(loss, forward_mode.write_slices, new_scale=new_scale), scales)[1]
    np.testing.assert_array_equal(linear(np.ones_like(scales)), expected(scales, new_scale)[0].sum())
    assert np.isfinite(hessian).all()


def views_of(h: Any) -> dict[str, tuple[Any, Any]]:
    """Arrays with the elements of `h`, and sources that read other places of `h`, through reshapes or not."""
    return {
        "itself": (h, h[:-1]),
        "leading axis": (h[None], h[None, :-1]),
        "leading axis of either": (h[None], h[:-1][None]),
        "trailing axis": (h[:, None], h[:-1][:, None]),
        "matrix": (h.reshape(2, -1), h[::-1].reshape(2, -1)[:, :-1]),
        "transposed": (h.reshape(1, -1).T, h[:-1].reshape(1, -1).T),
        "computed again": (h, jax.lax.optimization_barrier(h)[:-1]),
    }


@cases.where_barriers_are_kept
@each_mode
@pytest.mark.parametrize("view", views_of(jnp.zeros(6)))
def test_windows_computed_from_the_array_itself(rng: np.random.Generator, mode: str, view: str) -> None:
    """In plain JAX, a source may read other places of the array that it is written to."""
    x = rng.normal(size=(6,)).astype(np.float32)
    dest, source = views_of(x + 1)[view]
    starts = [dim - size for dim, size in zip(dest.shape, source.shape, strict=True)]
    expected = reference_write(np.asarray(dest), np.asarray(source), starts, mode)

    def write(x: Any) -> Any:
        dest, source = views_of(x + 1)[view]
        return write_slice(dest, source, [jnp.int32(i) for i in starts], mode=mode, implementation="xla")

    for wrap in (lambda y: y, lambda y: y[None]):
        for program in (lambda x, wrap=wrap: wrap(write(x)), lambda x, wrap=wrap: wrap(jax.jit(write)(x))):
            assert_same_memory(jax.jit(program)(x), np.asarray(wrap(expected)))


@pytest.mark.parametrize("view", ["itself", "transposed"])
def test_default_is_right_on_every_version(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, view: str
) -> None:
    """Some versions of XLA read such sources after overwriting them. There, plain JAX is not chosen."""
    cases.use_rules(monkeypatch)
    x = rng.normal(size=(6,)).astype(np.float32)
    starts = [dim - size for dim, size in zip(*(y.shape for y in views_of(x)[view]), strict=True)]

    @jax.jit
    def write(x: Any) -> Any:
        return write_slice(*views_of(x + 1)[view], [jnp.int32(i) for i in starts])[None]

    expected = np.concatenate([x[:1] + 1, x[:-1] + 1])
    assert_same_memory(write(x)[0].ravel(), expected)


@cases.where_barriers_are_kept
def test_windows_of_arguments_of_inner_functions(rng: np.random.Generator) -> None:
    """A source may read dest, even if the write is in an inner function that cannot know it."""
    x = rng.normal(size=(6,)).astype(np.float32)

    @jax.jit
    def inner(dest: Any, source: Any) -> Any:
        return write_slice(dest[None], source[None], (0, jnp.int32(1)), implementation="xla")

    exported = jax.export.export(inner)(*(jax.ShapeDtypeStruct((size,), np.float32) for size in (6, 5)))
    for function in (inner, exported.call):
        result = jax.jit(lambda x, function=function: function(x + 1, (x + 1)[:-1]))(x)
        assert_same_memory(result[0], np.concatenate([x[:1] + 1, x[:-1] + 1]))


@each_mode
@pytest.mark.parametrize("implementation", ["xla", "kernel"])
def test_gradient_of_windows_in_windows(rng: np.random.Generator, mode: str, implementation: Any) -> None:
    """Even at starts out of range, the gradient reads the place that was written."""
    shapes = (10,), (9,), (4,)

    @jax.jit
    def gradients(dy: Any, i: Any, j: Any) -> Any:
        def write(whole: Any, part: Any, source: Any) -> Any:
            part = write_slice(part, source, (j,), mode=mode, implementation=implementation)
            return write_slice(whole, part, (i,), mode=mode, implementation=implementation)

        return jax.vjp(write, *(jnp.zeros(shape) for shape in shapes))[1](dy)

    dy = rng.normal(size=shapes[0]).astype(np.float32)
    starts = [(9, 0), (3, 5), (-20, 7), *rng.integers(-14, 14, (40, 2)).tolist()]
    for i, j in starts:
        rest, d_part = reference_take(dy, shapes[1], [i], mode)
        rest_of_part, d_source = reference_take(d_part, shapes[2], [j], mode)
        for got, expected in zip(gradients(dy, i, j), (rest, rest_of_part, d_source), strict=True):
            assert_same_memory(got, expected, f"{i} {j}")


# ----------------------------------------------------------------------------------------------------------------------
# Programs: what they copy, and which kernels they call.


def copies_of(text: str, shape: str) -> list[str]:
    """The instructions of a compiled program that copy or create an array of this type."""
    makers = (" copy(", " copy-start(", " broadcast(", " transpose(", " concatenate(", " fusion(", " pad(")
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if f"= {shape}" in line and any(maker in line for maker in makers)]


CACHE, ROW = (4, 300, 8, 16), (4, 1, 8, 16)


def fill_by_fori_loop(write: Callable[..., Any], caches: Any, rows: Any) -> Any:
    return jax.lax.fori_loop(0, 300, lambda i, caches: write(caches, rows, i), caches)


def fill_by_scan(write: Callable[..., Any], caches: Any, rows: Any) -> Any:
    def step(caches: Any, i: Any) -> tuple[Any, Any]:
        caches = write(caches, rows, i)
        return caches, jax.tree.leaves(caches)[0][0, i, 0, 0]  # like attention, it reads what it wrote

    return jax.lax.scan(step, caches, jnp.arange(300))[0]


def append(cache: Any, row: Any, i: Any) -> Any:
    return write_slice(cache, row, (0, i, 0, 0))


def append_per_example(cache: Any, row: Any, i: Any) -> Any:
    positions = (i + jnp.arange(4)) % 300
    return jax.vmap(lambda cache, row, position: write_slice(cache, row, (position, 0, 0)))(cache, row, positions)


def append_both(caches: Any, rows: Any, i: Any) -> Any:
    return write_slices(caches, rows, (0, i, 0, 0))


@pytest.mark.parametrize("donated", [True, False], ids=["donated", "not donated"])
@pytest.mark.parametrize("loop", [fill_by_fori_loop, fill_by_scan])
@pytest.mark.parametrize("write", [append, append_per_example, append_both])
@pytest.mark.parametrize(("dtype", "hlo_type"), [("float32", "f32"), ("bfloat16", "bf16"), ("int4", "s4")])
def test_decode_loops_do_not_copy_the_cache(
    rng: np.random.Generator, write: Any, loop: Any, donated: bool, dtype: str, hlo_type: str
) -> None:
    """A donated cache is not copied. Any other cache is copied once, before the loop, and is unchanged."""
    num_caches = 2 if write is append_both else 1
    caches, rows = ([random_bits(rng, shape, dtype) for _ in range(num_caches)] for shape in (CACHE, ROW))
    operands: Any = (caches, rows) if write is append_both else (caches[0], rows[0])
    function = jax.jit(functools.partial(loop, write), donate_argnums=(0,) if donated else ())
    placed = jax.tree.map(jnp.array, operands)
    compiled = function.lower(*placed).compile()
    text = compiled.as_text()
    copies = copies_of(text, f"{hlo_type}[{','.join(map(str, CACHE))}]")
    assert len(copies) == (0 if donated else num_caches), copies
    assert kernels_in(text) == ["write_slice"]
    results = jax.tree.leaves(compiled(*placed))
    for before, row, cache, result in zip(caches, rows, jax.tree.leaves(placed[0]), results, strict=True):
        assert_same_memory(result, np.broadcast_to(row, before.shape).copy())
        assert cache.is_deleted() == donated
        if not donated:
            assert_same_memory(cache, before)


@pytest.mark.skipif(cases.PLATFORM != "cpu", reason="what XLA fuses on CPUs")
def test_loops_of_plain_jax(rng: np.random.Generator) -> None:
    """A loop of small writes has the instructions of ``jax.lax.dynamic_update_slice``. A step that reads a part of its
    result copies nothing, while ``jax.lax`` copies the whole array."""
    write = functools.partial(write_slice, implementation="xla")

    def fill(write: Callable[..., Any], x: Any) -> Any:
        return jax.lax.fori_loop(0, 300, lambda i, x: write(x, jnp.full((1,), 2.0) * i, (i,)), x)

    ours, theirs = (
        jax.jit(functools.partial(fill, own_write)).lower(jnp.zeros(300)).compile().as_text()
        for own_write in (write, jax.lax.dynamic_update_slice)
    )
    for name in (" while(", " call(", " fusion(", " copy("):
        assert ours.count(name) == theirs.count(name), name

    def step(cache: Any, row_at: Any) -> Any:
        i, row = row_at
        cache = write(cache, 2 * row, (0, i, 0, 0))
        return cache, jax.lax.dynamic_slice(cache, (0, i, 0, 0), ROW).sum()

    cache, rows = random_bits(rng, CACHE, "float32"), random_bits(rng, (30, *ROW), "float32")
    program = jax.jit(lambda c, rows: jax.lax.scan(step, c, (jnp.arange(30), rows)), donate_argnums=0)
    copies = copies_of(program.lower(cache, rows).compile().as_text(), f"f32[{','.join(map(str, CACHE))}]")
    assert not [line for line in copies if " copy(" in line]


def test_donated_steps_stay_in_place(rng: np.random.Generator) -> None:
    """With one step per call, the result is in the memory of the donated cache, and its other rows are unchanged."""
    step = jax.jit(append, donate_argnums=0)
    expected, row = random_bits(rng, CACHE, "bfloat16"), random_bits(rng, ROW, "bfloat16")
    cache = jnp.array(expected)  # a copy, because JAX cannot donate NumPy's memory
    address = cache.unsafe_buffer_pointer()
    for i in (7, 0, 299):
        cache = step(cache, row, i)
        expected = reference_write(expected, row, (0, i, 0, 0))
        assert cache.unsafe_buffer_pointer() == address
    assert_same_memory(cache, expected)


def test_python_starts_do_not_recompile(rng: np.random.Generator) -> None:
    """Eager appends at positions that are Python integers share one program."""
    dest, source = random_bits(rng, (40, 8), "float32"), random_bits(rng, (5, 8), "float32")
    write_slice(dest, source, (1, 0))
    with jax.log_compiles(False), jax.no_tracing():
        for start in range(2, 9):
            assert_same_memory(write_slice(dest, source, (start, 0)), reference_write(dest, source, (start, 0)))


# ----------------------------------------------------------------------------------------------------------------------
# Errors, all of them before anything runs.

X, U = np.zeros((4, 6), np.float32), np.zeros((2, 3), np.float32)

ERRORS: dict[str, tuple[Any, ...]] = {
    "list for dest": ("TypeError: dest must be an array, got list", ([1.0], U, [0])),
    "string for source": ("TypeError: source must be an array, got str", (X, "x", [0, 0])),
    "dtypes": ("TypeError: source must have the dtype of dest, float32, got int32", (X, U.astype(np.int32), [0, 0])),
    "ranks": (r"ValueError: source must have the rank of dest.*\(4, 6\).*got shape \(3,\)", (X, U[0], [0, 0])),
    "source too long": (r"ValueError: longer along no axis, got shape \(5, 3\)", (X, np.zeros((5, 3), "f4"), [0, 0])),
    "too few start indices": (
        r"ValueError: start_indices must have one entry for each axis of dest.*got 1 ",
        (X, U, [0]),
    ),
    "too many start indices": ("ValueError: one entry for each axis of dest.*got 3 ", (X, U, [0, 0, 0])),
    "one integer": ("TypeError: start_indices must be a sequence with one entry for each axis, got int", (X, U, 0)),
    "start indices as a matrix": (r"ValueError: one dimension, got shape \(2, 2\)", (X, U, np.zeros((2, 2), int))),
    "start indices as a mapping": ("TypeError: start_indices must be a sequence.*got dict", (X, U, {0: 0, 1: 0})),
    "negative pair": (
        r"ValueError: start_indices\[0\] must be a pair.*0 <= start.*<= 4.*got \(-1, 1\)",
        (X, U, [(-1, 1), 0]),
    ),
    "pair beyond the end": (r"ValueError: start_indices\[1\].*<= 6.*got \(4, 7\)", (X, U, [0, (4, 7)])),
    "pair of another size": (r"ValueError: start_indices\[1\].*end - start = 3.*got \(0, 2\)", (X, U, [0, (0, 2)])),
    "pair in the wrong order": (r"ValueError: start_indices\[0\].*got \(3, 1\)", (X, U, [(3, 1), 0])),
    "pair of floats": (r"TypeError: start_indices\[0\] must be a pair.*integers", (X, U, [(0.0, 2.0), 0])),
    "triple": (r"TypeError: start_indices\[0\] must be a pair", (X, U, [(0, 1, 2), 0])),
    "float": (r"TypeError: start_indices\[1\] must be an integer.*got float", (X, U, [0, 1.0])),
    "bool": (r"TypeError: start_indices\[1\] must be an integer.*got bool", (X, U, [0, True])),
    "None": (r"TypeError: start_indices\[0\] must be an integer.*got NoneType", (X, U, [None, 0])),
    "array of floats": (r"TypeError: start_indices\[0\] must be an integer.*float32", (X, U, [jnp.float32(1), 0])),
    "array of bool": (r"TypeError: start_indices\[0\] must be an integer.*bool", (X, U, [jnp.bool_(1), 0])),
    "vector as a start": (r"TypeError: start_indices\[0\] must be a scalar.*\(1,\)", (X, U, [jnp.zeros(1, int), 0])),
    "starts of each example": (
        r"TypeError: start_indices\[0\] must be a scalar.*\(4,\); for one start per example, map over "
        "the examples with jax.vmap",
        (X, U, [np.arange(4), 0]),
    ),
    "mode": ("ValueError: mode must be 'clip' or 'drop', got 'wrap'", (X, U, [0, 0]), {"mode": "wrap"}),
    "no mode": ("ValueError: mode must be 'clip' or 'drop', got None", (X, U, [0, 0]), {"mode": None}),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    error, arguments, *options = ERRORS[case]
    with cases.raises(error, "write_slice: .*"):
        write_slice(*arguments, **dict(*options))


def test_integers_beyond_32_bits_as_starts() -> None:
    """Starts need 64-bit integers only if uint32 cannot hold them."""
    dest, source = (jax.ShapeDtypeStruct((size,), np.int8) for size in (2**34, 2))

    def shape_with_start(start: int) -> tuple[int, ...]:
        return jax.eval_shape(lambda dest, source: write_slice(dest, source, (start,)), dest, source).shape

    assert shape_with_start(2**32 - 1) == dest.shape
    with pytest.raises(ValueError, match=f"write_slice: a start of {2**33} needs jax_enable_x64"):
        shape_with_start(2**33)
    with jax.enable_x64(True):
        assert shape_with_start(2**33) == dest.shape


def test_traced_pairs_are_refused() -> None:
    with pytest.raises(
        TypeError, match=r"start_indices\[0\] must be a pair \(start, end\) of Python integers or a start alone"
    ):
        jax.jit(lambda i: write_slice(X, U, [(i, i + 2), 0]))(1)


ERRORS_OF_LISTS: dict[str, tuple[str, Sequence[Any]]] = {
    "an array for dests": ("TypeError: dests must be a list or tuple of arrays, got ndarray", (X, [U], [0, 0])),
    "an array for sources": ("TypeError: sources must be a list or tuple.*got ndarray", ([X], U, [0, 0])),
    "numbers": ("ValueError: sources must have one entry for each of the 2 dests, got 1", ([X, X], [U], [0, 0])),
    "dtypes": (r"TypeError: sources\[1\] must have the dtype of dests\[1\]", ([X, X], [U, U.astype(int)], [0, 0])),
    "ranks": (r"ValueError: one entry for each axis of dests\[1\]", ([X, X[0]], [U, U[0]], [0, 0])),
    "number of start indices": (
        "ValueError: start_indices_of_each must have one entry for each of the 2 dests, got 1",
        ([X, X], [U, U], None, [[0, jnp.int32(0)]]),
    ),
    "start indices of one": (
        r"ValueError: start_indices_of_each\[1\]\[0\] must be a pair.*got \(3, 5\)",
        ([X, X], [U, U], None, [[0, 0], [(3, 5), 0]]),
    ),
    "no list": (
        "TypeError: start_indices_of_each must be a list or tuple.*got ndarray",
        ([X, X], [U, U], None, np.zeros((2, 2), int)),
    ),
    "those of each for those of all": (
        r"TypeError: start_indices\[0\] must be a pair",
        ([X, X], [U, U], [[jnp.int32(0), 0], [0, 0]]),
    ),
    "neither": ("TypeError: one of start_indices and start_indices_of_each.*got neither", ([X, X], [U, U])),
    "both": ("TypeError: one of start_indices.*got both", ([X, X], [U, U], [0, 0], [[0, 0], [0, 0]])),
}


@pytest.mark.parametrize("case", ERRORS_OF_LISTS)
def test_errors_of_write_slices(case: str) -> None:
    error, (dests, sources, *start_indices) = ERRORS_OF_LISTS[case]
    of_all, of_each = (*start_indices, None, None)[:2]
    with cases.raises(error, "write_slices: .*"):
        write_slices(dests, sources, of_all, start_indices_of_each=of_each)


def test_ops_accept_what_the_reference_accepts(rng: np.random.Generator) -> None:
    """Called directly, with an array that the batch shares, an op runs as plain JAX."""
    dest, source = random_bits(rng, (1, 5), "float32"), random_bits(rng, (3, 2), "float32")
    starts = np.array([0, 3, -1], np.int32)
    params = dict(ranks=(1,), windows=(windows.window(0, 0, 0, 2),), drop=False, num_batch_dims=1)
    [result] = jax.jit(lambda *x: WRITE_SLICE(*x, **params))(dest, source, starts)
    expected = of_batch(lambda s, i: reference_write(dest[0], s, [i]), source, starts)
    assert_same_memory(result, expected)
