"""write_rows against NumPy and JAX's scatter: values, conversions, gradients, programs in place, errors."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases
from support.cases import assert_same_memory
from support.kernels import kernels_of
from support.programs import copies_of, small_integers
from write_rows.reference import (
    ALL_DTYPES,
    POOL_DTYPES,
    ROW_DTYPES,
    assert_same_numbers,
    random_numbers,
    random_slots,
    reference_converted,
    reference_taken,
    reference_write,
)

from jax_baracuda import forward_mode, write_rows

each_implementation = pytest.mark.parametrize("implementation", ["kernel", "xla"])


def pools_of(rng: np.random.Generator, dtype: str, axis: int, layers: int | None, slots: int = 9) -> np.ndarray:
    shape = [3, 8]
    shape.insert(axis, slots)
    return cases.random_bits(rng, (*([] if layers is None else [layers]), *shape), jnp.dtype(dtype))


# ----------------------------------------------------------------------------------------------------------------------
# Values.


PLACES = ((0, None), (1, None), (2, None), (0, 1), (1, 0), (0, -1), (1, 2))
"""Axes of slots, and layers of two."""


@each_implementation
@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_every_dtype_and_place(rng: np.random.Generator, dtype: str, implementation: str) -> None:
    """Bits are copied. The last row of a slot wins. Slots and layers out of range are skipped."""
    with jax.enable_x64(True):
        for i in rng.choice(len(PLACES), 3, replace=False):
            axis, layer = PLACES[i]
            dest = pools_of(rng, dtype, axis, None if layer is None else 2)
            rows, slots = cases.random_bits(rng, (14, 3, 8), jnp.dtype(dtype)), random_slots(rng, 14, 9)

            @jax.jit
            def write(dest: Any, rows: Any, slots: Any, layer: Any, axis: int = axis) -> Any:
                return write_rows(dest, rows, slots, axis=axis, layer=layer, implementation=implementation)

            result = write(dest, rows, slots, layer)
            assert_same_memory(result, reference_write(dest, rows, slots, axis, layer), f"{axis} {layer}")


def test_dtypes_of_slots(rng: np.random.Generator) -> None:
    """Slots that int32 does not hold are out of range, even if they would be in range without their upper bits."""
    for dtype in ("int8", "uint8", "int16", "uint32", "int64", "uint64"):
        info = np.iinfo(dtype)
        some = [0, 3, 3, 8, 9, -1, 2**31, 2**31 + 1, 2**32 + 2, 2**63 + 1, -(2**32) + 1, info.max, info.min]
        with jax.enable_x64(True):
            slots = np.array([x for x in some if info.min <= x <= info.max], object).astype(dtype)
            dest, rows = random_numbers(rng, (9, 2), "float32"), random_numbers(rng, (len(slots), 2), "float32")
            written = jax.jit(write_rows)(dest, rows, slots)
            assert_same_numbers(written, reference_write(dest, rows, slots.astype(object)), dtype)
            layer = np.array(info.max, dtype)
            layers = jax.jit(write_rows)(np.stack([dest, dest]), rows[:1], np.zeros(1, np.int32), layer=layer)
            assert_same_numbers(layers, np.stack([dest, dest]), dtype)


SCALES = (None, 0.37, np.array([0.1, 3, 1.7], np.float32))


@pytest.mark.parametrize("pool", POOL_DTYPES)
@pytest.mark.parametrize("dtype", ROW_DTYPES)
def test_conversions(rng: np.random.Generator, dtype: str, pool: str) -> None:
    """The kernel scales rows in float32. It rounds ties, subnormal numbers, overflow and NaN as NumPy does, in vectors
    and alone."""
    calls = []
    for features, scale in itertools.product((16, 24, 5), SCALES):
        rows, slots = random_numbers(rng, (40, 3, features), dtype), rng.permutation(50)[:40].astype(np.int32)
        calls.append((random_numbers(rng, (50, 3, features), pool), rows, slots, scale))
    results = jax.jit(lambda calls: [write_rows(d, r, s, scale=c) for d, r, s, c in calls])(calls)
    for result, (dest, rows, slots, scale) in zip(results, calls, strict=True):
        assert_same_numbers(result, reference_write(dest, rows, slots, scale=scale), f"{rows.shape} {scale}")


@pytest.mark.parametrize("pool", [*POOL_DTYPES, "uint8", "int16", "int32"])
@pytest.mark.parametrize("dtype", ["float64", "int32", "float32"])
def test_conversions_by_xla(rng: np.random.Generator, dtype: str, pool: str) -> None:
    """XLA converts other dtypes before the kernel. It may round twice, and multiply by the reciprocal of a scale."""
    with cases.x64_for(dtype):
        rows = rng.integers(0, 40, (30, 3, 8)).astype(dtype)
        slots, dest = rng.permutation(40)[:30].astype(np.int32), np.zeros((40, 3, 8), jnp.dtype(pool))
        for scale in SCALES:
            result = jax.jit(lambda d, r, s, c: write_rows(d, r, s, scale=c, implementation="xla"))(
                dest, rows, slots, scale
            )
            divisor = 1 if scale is None else np.asarray(scale, np.float32).reshape(-1, 1) if np.ndim(scale) else scale
            exact = rows / divisor
            exact = np.clip(exact, None, float(jnp.iinfo(pool).max)) if "int" in pool else exact
            expected = reference_write(dest.astype(np.float64), exact, slots)
            tolerance = {"float8_e4m3fn": 0.07, "float8_e5m2": 0.14, "bfloat16": 0.01}.get(pool, 1e-3)
            atol = 0.51 if "int" in pool else 0
            np.testing.assert_allclose(np.asarray(result, np.float64), expected, rtol=tolerance, atol=atol)


@pytest.mark.parametrize("pool", ["int8", "uint8", "int16", "uint32"])
@pytest.mark.parametrize("dtype", ["int32", "float32", "bfloat16", "float16"])
def test_numbers_beyond_the_range_of_integers(dtype: str, pool: str) -> None:
    """They become the nearest integer in range, with a scale and without."""
    numbers = np.array([70_000, -70_000, 300, -300, 40_000, 7], np.float32).astype(jnp.dtype(dtype))
    limits = np.iinfo(pool)
    with np.errstate(invalid="ignore"):
        expected = np.clip(numbers.astype(np.float64), limits.min, limits.max).astype(np.int64)
    for scale in (None, 1.0):
        result = jax.jit(write_rows)(np.zeros(6, pool), numbers, np.arange(6), scale=scale)
        np.testing.assert_array_equal(np.asarray(result, np.int64), expected, str(scale))


def test_a_scale_divides_in_plain_jax(rng: np.random.Generator) -> None:
    """Plain JAX divides, too, so that one row has the same bits alone and among others."""
    dest, rows = np.zeros((64, 64), np.float32), rng.normal(size=(64, 64)).astype(np.float32)
    run = jax.jit(lambda scale: write_rows(dest, rows, np.arange(64), scale=scale, implementation="xla"))
    # XLA divides on GPUs with an error of up to 2 units in the last place.
    np.testing.assert_array_max_ulp(run(np.float32(3)), rows / np.float32(3), 0 if cases.PLATFORM == "cpu" else 2)


def test_indices_that_int32_does_not_hold() -> None:
    """They are out of range, and name no other slot or layer."""
    dest, rows = np.zeros((5, 1, 2), np.float32), np.ones((3, 1, 2), np.float32)
    far = 2**32
    written = write_rows(dest, rows, np.array([0, far + 1, -far + 3]))
    np.testing.assert_array_equal(np.asarray(written)[:, 0, 0], [1, 0, 0, 0, 0])
    assert not np.any(write_rows(dest, rows, np.array([2**63, far + 1, 2**64 - 1], np.uint64)))
    for layer in (far, -far, np.int64(far)):
        assert not np.any(write_rows(dest[None], rows, np.arange(3), layer=layer))


def test_several_pools(rng: np.random.Generator) -> None:
    """Pools of several dtypes and shapes, each with a scale of its own, in the structure given."""
    keys, values = random_numbers(rng, (9, 3, 8), "float8_e4m3fn"), random_numbers(rng, (9, 2), "bfloat16")
    new_keys, new_values = random_numbers(rng, (5, 3, 8), "bfloat16"), random_numbers(rng, (5, 2), "bfloat16")
    slots = np.array([4, 4, -1, 0, 9], np.int32)
    run = jax.jit(lambda d, r, s: write_rows(d, r, slots, scale=s))
    results = run((keys, values), (new_keys, new_values), (np.float32(0.7), None))
    assert isinstance(results, tuple)
    assert_same_numbers(results[0], reference_write(keys, new_keys, slots, scale=0.7))
    assert_same_numbers(results[1], reference_write(values, new_values, slots))
    assert kernels_of(run, (keys, values), (new_keys, new_values), (0.7, None)) == ["write_rows"]
    assert isinstance(write_rows([keys], [new_keys], slots), list)
    assert write_rows([], [], slots) == []


def test_last_row_wins_in_every_run(rng: np.random.Generator) -> None:
    """With few slots and many, and with rows that are fewer and longer than a block of threads takes, and more."""
    sizes = [*((rows, slots, 16) for rows in (1, 2, 31, 33, 255, 257, 2047, 2049, 5000) for slots in (1, 3, 1500))]
    for rows, slots, features in (*sizes, (2000, 500, 3), (5000, 7, 1), (257, 3, 4099), (40, 3, 9000)):
        data, at = rng.normal(size=(rows, features)).astype(np.float32), rng.integers(-1, slots, rows)
        dest = np.zeros((slots, features), np.float32)
        expected = reference_write(dest, data, at)
        run = jax.jit(functools.partial(write_rows, implementation="kernel"))
        for _ in range(3 if rows == 5000 else 1):
            assert_same_memory(run(dest, data, at), expected, f"{rows} rows, {slots} slots, {features} features")


def test_slots_with_one_hash(rng: np.random.Generator) -> None:
    """Slots that are multiples of a large power of two share a bucket of a hash table."""
    dest, rows = np.zeros((1 << 24, 1), np.int8), cases.random_bits(rng, (700, 1), np.int8)
    slots = (rng.integers(0, 16, 700) << 20).astype(np.int32)
    result = write_rows(dest, rows, slots, implementation="kernel")
    assert_same_memory(result, reference_write(dest, rows, slots))


def test_words_of_every_width(rng: np.random.Generator) -> None:
    """Rows of 1 to 64 bytes are copied in words of every width, one array or more than fit in a launch."""
    slots = random_slots(rng, 9, 8)
    dests = [cases.random_bits(rng, (8, n), dtype) for n in (1, 2, 3, 4, 7, 8, 16) for dtype in (np.int8, np.float32)]
    rows = [cases.random_bits(rng, (9, *dest.shape[1:]), dest.dtype) for dest in dests]
    for result, dest, own in zip(write_rows(dests, rows, slots, implementation="kernel"), dests, rows, strict=True):
        assert_same_memory(result, reference_write(dest, own, slots))


@pytest.mark.parametrize("shapes", [((7, 3), (0, 3)), ((0, 3), (5, 3)), ((7, 0), (5, 0))], ids=str)
def test_empty_arrays(shapes: tuple[tuple[int, int], tuple[int, int]]) -> None:
    """Without rows, slots or features, a pool passes through, alone and in a batch."""
    dest, rows = (np.ones(shape, np.float32) for shape in shapes)
    slots = np.arange(len(rows), dtype=np.int32)
    assert_same_memory(write_rows(dest, rows, slots, implementation="kernel"), dest)
    batched = jax.vmap(functools.partial(write_rows, implementation="kernel"), (0, None, None))
    assert_same_memory(batched(dest[None], rows, slots), dest[None])


def test_vmap(rng: np.random.Generator) -> None:
    """One launch for any mapped operands; mapped slots or rows and a shared pool, too."""
    dest, rows = random_numbers(rng, (4, 9, 3), "float32"), random_numbers(rng, (4, 6, 3), "float32")
    slots = np.stack([random_slots(rng, 6, 9) for _ in range(4)])
    for mapped in ((0, 0, 0), (0, None, 0), (0, 0, None), (None, 0, None), (None, None, 0)):
        operands = [x if axis == 0 else x[0] for x, axis in zip((dest, rows, slots), mapped, strict=True)]
        run = jax.jit(jax.vmap(write_rows, mapped))
        each = [[x[i] if axis == 0 else x for x, axis in zip(operands, mapped, strict=True)] for i in range(4)]
        assert_same_numbers(run(*operands), np.stack([reference_write(*x) for x in each]), str(mapped))
        by_kernel = jax.vmap(lambda *x: write_rows(*x, implementation="kernel"), mapped)
        assert kernels_of(by_kernel, *operands) == ["write_rows"]


@pytest.mark.parametrize("has_layer", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_vmap_of_conversions(rng: np.random.Generator, axis: int, has_layer: bool) -> None:
    """Layers, and scales of a tensor or of its heads, with any operands but the pool shared by the batch."""
    batch, heads = 3, 2
    dest = np.stack([small_integers(rng, (9, heads, 8) if axis == 0 else (heads, 9, 8), "int8") for _ in range(batch)])
    dest = np.stack([dest, dest], 1) if has_layer else dest
    rows = random_numbers(rng, (batch, 40, heads, 8), "float32")
    slots = np.stack([random_slots(rng, 40, 9) for _ in range(batch)])
    layers = np.array([1, -1, 0], np.int32) if has_layer else None
    for shape in ((batch,), (batch, heads)):
        scales = rng.uniform(0.3, 3, shape).astype(np.float32)
        for shared in itertools.product([False, True], repeat=4):
            arrays = [x[0] if x is not None and is_shared else x
                      for x, is_shared in zip((rows, slots, layers, scales), shared, strict=True)]  # fmt: skip
            mapped = [None if x is None or is_shared else 0 for x, is_shared in zip(arrays, shared, strict=True)]

            def write(dest: Any, rows: Any, slots: Any, layer: Any, scale: Any) -> Any:
                options = {"axis": axis, "layer": layer, "scale": scale}
                return write_rows(dest, rows, slots, **options, implementation="kernel")

            results = jax.jit(jax.vmap(write, (0, *mapped)))(dest, *arrays)
            for i, result in enumerate(results):
                own = [x if of_batch is None else x[i] for x, of_batch in zip(arrays, mapped, strict=True)]
                assert_same_memory(result, reference_write(dest[i], *own[:2], axis, *own[2:]))


# ----------------------------------------------------------------------------------------------------------------------
# Gradients.


@each_implementation
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "complex64", "float8_e4m3fn"])
def test_gradient(rng: np.random.Generator, dtype: str, implementation: str) -> None:
    """Pools get the cotangent with zeros in written slots, and rows that of their slot, unless another row won."""
    with cases.x64_for(dtype):
        for axis, layer in ((0, None), (1, None), (0, 1), (1, 0)):
            dest = pools_of(rng, dtype, axis, None if layer is None else 2)
            rows, slots = cases.random_bits(rng, (12, 3, 8), jnp.dtype(dtype)), random_slots(rng, 12, 9)
            cotangent = pools_of(rng, dtype, axis, None if layer is None else 2)

            def write(dest: Any, rows: Any, axis: int = axis, layer: Any = layer, slots: Any = slots) -> Any:
                return write_rows(dest, rows, slots, axis=axis, layer=layer, implementation=implementation)

            d_dest, d_rows = jax.jit(lambda d, r, ct: jax.vjp(write, d, r)[1](ct))(dest, rows, cotangent)
            rest, taken = reference_taken(cotangent, slots, axis, layer)
            assert_same_memory(d_dest, rest)
            assert_same_memory(d_rows, taken)


def plain(dest: Any, rows: Any, slots: np.ndarray) -> Any:
    """In plain JAX, for derivatives of every order."""
    last = {slot: t for t, slot in enumerate(slots.tolist()) if 0 <= slot < dest.shape[0]}
    return dest.at[np.array(list(last))].set(rows[np.array(list(last.values()))])


def test_every_order_and_mode(rng: np.random.Generator) -> None:
    dest, rows = small_integers(rng, (5, 2), "float32"), small_integers(rng, (6, 2), "float32")
    slots = np.array([1, 3, 1, -1, 5, 0])

    def loss(write: Callable[..., Any], dest: Any, rows: Any) -> Any:
        return (write(dest, rows, slots) ** 3 * np.arange(1, 11).reshape(5, 2)).sum()

    for derivative, write in ((jax.grad, write_rows), (jax.jacfwd, forward_mode.write_rows), (jax.hessian, write_rows)):
        got, want = (
            derivative(lambda d, r, f=function: loss(f, d, r), (0, 1))(dest, rows) for function in (write, plain)
        )
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(x, y)  # products of small integers are exact


def test_gradient_of_scaled_rows(rng: np.random.Generator) -> None:
    """Rows get the cotangent of the pool's dtype, divided by the scale. The scale gets none, and integer pools none."""
    dest, rows = np.zeros((4, 2), jnp.bfloat16), np.ones((3, 2), np.float32)
    slots, cotangent = np.array([2, 2, 0]), rng.integers(-8, 9, (4, 2)).astype(jnp.bfloat16)

    def write(rows: Any, scale: Any) -> Any:
        return write_rows(dest, rows, slots, scale=scale)

    d_rows, d_scale = jax.vjp(write, rows, np.float32(0.5))[1](cotangent)
    np.testing.assert_array_equal(d_rows, [[0, 0], cotangent[2] * 2.0, cotangent[0] * 2.0])
    assert d_scale == 0

    def both(rows: Any) -> Any:
        quantized, kept = forward_mode.write_rows(
            [np.zeros((4, 2), np.int8), dest.astype(np.float32)], [rows, rows], slots, scale=[0.5, None]
        )
        return (quantized * kept).sum()

    expected = np.array([[0, 0], [2, 2], [2, 2]], np.float32)
    np.testing.assert_array_equal(jax.grad(both)(rows), expected)
    np.testing.assert_array_equal(jax.jacfwd(both)(rows), expected)


# ----------------------------------------------------------------------------------------------------------------------
# Programs in place.

LAYOUTS = {"slots first": (0, False), "heads first": (1, False), "layers": (0, True), "layers, heads first": (1, True)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_donated_pools_are_not_copied(rng: np.random.Generator, layout: str, dtype: str) -> None:
    axis, has_layer = LAYOUTS[layout]
    dest = pools_of(rng, dtype, axis, 2 if has_layer else None)
    rows, slots = cases.random_bits(rng, (4, 3, 8), jnp.dtype(dtype)), np.array([5, 1, -1, 5])

    def write(pools: Any, rows: Any, slots: Any, layer: Any) -> Any:
        layer = layer if has_layer else None
        return write_rows(pools, [rows, rows], slots, axis=axis, layer=layer, implementation="kernel")

    step = jax.jit(write, donate_argnums=0)
    pools = [jnp.array(dest), jnp.array(dest)]
    compiled = step.lower(pools, rows, slots, 1).compile()
    assert not copies_of(dest, compiled.as_text())
    addresses = {pool.unsafe_buffer_pointer() for pool in pools}
    results = step(pools, rows, slots, 1)
    assert {result.unsafe_buffer_pointer() for result in results} == addresses
    for result in results:
        assert_same_memory(result, reference_write(dest, rows, slots, axis, 1 if has_layer else None))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_carried_pools_are_not_copied(rng: np.random.Generator, layout: str) -> None:
    """A loop of a decoder writes its pools in place, by the default choice."""
    axis, has_layer = LAYOUTS[layout]
    dest = pools_of(rng, "float32", axis, 2 if has_layer else None, slots=40)
    rows = rng.normal(size=(6, 4, 3, 8)).astype(np.float32)
    slots = rng.integers(-1, 40, (6, 4))

    def fill(pools: Any, rows: Any, slots: Any) -> Any:
        def step(pools: Any, of_step: Any) -> Any:
            new, at, i = of_step
            layer = i % 2 if has_layer else None
            return write_rows(pools, (new, 2 * new), at, axis=axis, layer=layer, implementation="kernel"), None

        return jax.lax.scan(step, pools, (rows, slots, jnp.arange(6)))[0]

    compiled = jax.jit(fill, donate_argnums=0).lower((dest, dest), rows, slots).compile()
    assert not copies_of(dest, compiled.as_text())
    expected = [dest, dest]
    for i in range(6):
        layer = i % 2 if has_layer else None
        expected = [
            reference_write(x, new, slots[i], axis, layer)
            for x, new in zip(expected, (rows[i], 2 * rows[i]), strict=True)
        ]
    for got, want in zip(jax.jit(fill)((dest, dest), rows, slots), expected, strict=True):
        assert_same_memory(got, want)


def test_pool_that_is_not_donated_is_unchanged(rng: np.random.Generator) -> None:
    dest, rows = jnp.zeros((5, 2)), jnp.ones((2, 2))
    result = write_rows(dest, rows, jnp.array([1, 3]), implementation="kernel")
    assert float(dest.sum()) == 0 and float(result.sum()) == 4


def test_rows_of_the_pool_itself(rng: np.random.Generator) -> None:
    """Rows may be read from the memory that is overwritten."""
    dest = rng.normal(size=(8, 3)).astype(np.float32)
    for implementation in ("kernel", "xla"):
        run = jax.jit(
            lambda x, of=implementation: write_rows(x, x[::-1], jnp.arange(8), implementation=of), donate_argnums=0
        )
        assert_same_memory(run(jnp.asarray(dest)), dest[::-1].copy())


# ----------------------------------------------------------------------------------------------------------------------
# Errors.


def test_errors() -> None:
    dest, rows, slots = np.zeros((2, 5, 3), np.float32), np.zeros((4, 5, 3), np.float32), np.zeros(4, np.int32)
    for match, error, function in (
        ("slots must have an integer dtype, got float32", TypeError, lambda: write_rows(dest, rows, rows[:, 0, 0])),
        (r"slots must have shape \[T\], one for each row, got \(1, 4\)", ValueError,
         lambda: write_rows(dest, rows, slots[None])),
        ("axis must be an integer, got 'x'", TypeError, lambda: write_rows(dest, rows, slots, axis="x")),
        (r"axis must be 0 or more, and less than 3", ValueError, lambda: write_rows(dest, rows, slots, axis=3)),
        (r"axis must be 0 or more, and less than 2.*without layers, got -1", ValueError,
         lambda: write_rows(dest, rows, slots, axis=-1, layer=0)),
        (r"rows must have shape \(4, 5, 3\) for 4 slots", ValueError, lambda: write_rows(dest, rows[:3], slots)),
        (r"rows\[1\] must have shape", ValueError, lambda: write_rows([dest, dest], [rows, rows[:3]], slots)),
        ("layer must have an integer dtype, got float32", TypeError,
         lambda: write_rows(dest, rows, slots, layer=np.float32(1))),
        (r"layer must be a scalar, got shape \(4,\)", TypeError,
         lambda: write_rows(dest, rows, slots, layer=slots)),
        (r"dests\[1\] must have the layers and slots of dests\[0\]", ValueError,
         lambda: write_rows([dest, dest[:1]], [rows, rows], slots)),
        ("rows must be a list or tuple with one entry for each of the 1 dests, got ndarray", TypeError,
         lambda: write_rows([dest], rows, slots)),
        ("scale must have one entry for each of the 1 dests, got 2", ValueError,
         lambda: write_rows([dest], [rows], slots, scale=[None, None])),
        (r"scale must be a scalar or have shape \(5,\)", ValueError,
         lambda: write_rows(dest, rows, slots, scale=np.ones(3))),
        ("scale must have a real dtype, got bool", TypeError, lambda: write_rows(dest, rows, slots, scale=True)),
        ("rows must be real to be scaled or written to float32, got complex64", TypeError,
         lambda: write_rows(dest, rows.astype(np.complex64), slots)),
        ("dests must be an array, got str", TypeError, lambda: write_rows("x", rows, slots)),
    ):  # fmt: skip
        with pytest.raises(error, match=f"^write_rows: {match}"):
            function()


def test_reference_of_conversions_is_that_of_ml_dtypes() -> None:
    """The reference of these tests rounds once."""
    x = np.array([1 + 2**-4 + 2**-20, 464, 464.1], np.float32)
    converted = reference_converted(x, jnp.dtype("float8_e4m3fn")).astype(np.float32)
    np.testing.assert_array_equal(converted, [1.125, 448, np.nan])
