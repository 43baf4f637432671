"""The parts of an op's declaration, and all declarations."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import itertools
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from support.cases import is_floating

import jax_baracuda
from jax_baracuda._examples import examples_of

Dims = tuple[str, ...]
"""Names of dimensions. A name that starts with "1" is a dimension of size 1, which is broadcast."""
Draw = Callable[[np.random.Generator, tuple[int, ...], np.dtype], np.ndarray]
Options = Mapping[str, Any]
Sizes = Mapping[str, Any]
"""The sizes of the named dimensions."""

FAMILIES = tuple(sorted(path.parent.name for path in Path(__file__).parents[2].glob("*/matrix.py")))
"""The families of ops: folders of tests, each with a file of declarations, ``matrix.py``."""


def is_of_family(name: str, family: str) -> bool:
    """Whether a function or a native target is of a family: of those whose words its name has, the longest."""
    matching = (x for x in FAMILIES if re.search(x.replace("_", ".*"), name))
    return family == max(matching, key=len, default=None)


ABSENT = None
"""The value of an option whose argument is not passed."""


@dataclasses.dataclass(frozen=True)
class Operand:
    """An array of a call."""

    name: str
    dims: Dims
    draw: Draw
    dtype: str | None = None
    """None: the dtype of the case."""
    differentiable: bool = True
    """Whether it is differentiable if its dtype is floating."""
    has_sign: bool = False
    """Whether the majorant keeps its sign, because the selection depends on it."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """A call of an op with everything chosen except the arrays. Functions get these by the names of the operands."""

    operands: tuple[Operand, ...]
    apply: Callable[..., Any]
    """``(function, **arrays)``: the call of the function. See :func:`by_name`."""
    reference: Callable[..., Any]
    """``(**arrays)``: the same in plain JAX; it gets floating arrays as float64."""
    results: tuple[Dims, ...]
    majorant: Callable[..., Any] | None = None
    """``(**arrays)``: the sums of magnitudes to which rounding errors are relative. Its derivatives serve the op's
    derivatives in the same way. Default: the reference, applied to absolute values."""
    exact_value: bool = False
    """Whether results equal the reference bit by bit."""
    exact_gradient: bool = False
    """Whether first derivatives do, too, unless JAX adds them up afterwards."""
    terms: int = 1
    """The number of terms of the longest sum."""
    roundings: int = 0
    """How often the op rounds to the dtype before it rounds its result."""
    gradient_roundings: int = 0
    """How often JAX rounds to the dtype while it adds up the gradients of a broadcast operand."""
    rounded_dims: tuple[str, ...] = ()
    """If devices split these dimensions, some results are sums of two rounded numbers."""
    free: tuple[str, ...] = ()
    """Dimensions of all results along which indices are independent: ``shard_map`` may split them."""
    carry: tuple[int, int] | None = None
    """For loops: the positions of an operand and of the result with its shape."""
    result_dtypes: tuple[str | None, ...] | None = None
    """The dtype of each result; None: the dtype of the case."""
    draw_cotangents: Draw = dataclasses.field(default_factory=lambda: numbers)
    """Draws cotangents and tangents."""


@dataclasses.dataclass(frozen=True)
class Constraint:
    """A combination that does not exist, and why."""

    reason: str
    forbids: Callable[..., bool]
    """``(*values of the factors)``. Its arguments are named like the factors, unless these are given."""
    named: tuple[str, ...] = ()

    @functools.cached_property
    def factors(self) -> tuple[str, ...]:
        return self.named or tuple(inspect.signature(self.forbids).parameters)


@dataclasses.dataclass(frozen=True)
class Call:
    """The declaration of one public op."""

    name: str
    dtypes: tuple[str, ...]
    sizes: Mapping[str, Sizes]
    """Size classes that run anywhere."""
    problem: Callable[[str, Options, Sizes], Problem]
    """``(dtype, options, sizes)``"""
    options: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    """The values of each optional argument; the bare call has the first."""
    large_sizes: Mapping[str, Sizes] = dataclasses.field(default_factory=dict)
    """Size classes that are fast enough only on a GPU."""
    strategy_options: tuple[Options, ...] = ()
    """Combinations of values that lead to strategies of their own."""
    constraints: tuple[Constraint, ...] = ()
    has_carry: bool = False

    @property
    def function(self) -> Callable[..., Any]:
        return getattr(jax_baracuda, self.name)

    @property
    def forward_mode(self) -> Callable[..., Any]:
        """The function that supports forward mode."""
        return getattr(jax_baracuda.forward_mode, self.name, self.function)

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """The names of all operands, from the examples of the function."""
        return operand_names(self.name)

    @functools.cached_property
    def differentiable(self) -> bool:
        """Whether any operand is differentiable."""
        operands = (operand for example in examples_of(self.name) for operand in example.operands.values())
        return any(operand.differentiable and operand.dtype is None for operand in operands)


@functools.cache
def operand_names(function_name: str) -> tuple[str, ...]:
    """The names of the operands in all examples of a public function."""
    return tuple(dict.fromkeys(name for example in examples_of(function_name) for name in example.operands))


CALLS: dict[str, Call] = {}


def declare(name: str, **fields: Any) -> None:
    """Declares an op by the fields of :class:`Call`."""
    assert name not in CALLS, name
    CALLS[name] = Call(name, **fields)


def load_all() -> dict[str, Call]:
    """All declarations."""
    for family in FAMILIES:
        importlib.import_module(f"{family}.matrix")

    return CALLS


# ----------------------------------------------------------------------------------------------------------------------
# Shared by the declarations.

FLOATING = ("float32", "bfloat16", "float16", "float64")


def is_inexact(dtype: Any) -> bool:
    return jnp.issubdtype(jnp.dtype(dtype), jnp.inexact)


def passed(options: Options, *names: str) -> dict[str, Any]:
    """The keyword arguments of a call."""
    return {name: options[name] for name in names if options[name] is not ABSENT}


def by_name(options: Options, *names: str) -> Callable[..., Any]:
    """``(function, **arrays)``: the call of a function whose arguments have the names of the operands and options."""
    return lambda function, **arrays: function(**arrays, **passed(options, *names))


def numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Finite numbers; some arrays also have special numbers."""
    data = finite_numbers(rng, shape, dtype)
    if is_floating(dtype) and rng.random() < 0.15:
        return _some_replaced(rng, data, _kept_by_arithmetic(special_numbers(dtype)), 0.1)
    return data


def finite_numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Floating numbers of magnitude 0.25 to 1. Some arrays also have a few zeros (in float16 also subnormal numbers),
    and some arrays have huge or tiny magnitudes. Integers of the full range."""
    if dtype == np.bool_:
        return rng.random(shape) < 0.5
    if jnp.issubdtype(dtype, jnp.complexfloating):
        real, imag = (finite_numbers(rng, shape, np.dtype(np.float32)) for _ in range(2))
        return (real + 1j * imag).astype(dtype)
    if not is_floating(dtype):
        info = jnp.iinfo(dtype)
        return rng.integers(
            int(info.min), int(info.max), shape, np.int64 if int(info.min) < 0 else np.uint64, True
        ).astype(dtype)
    data = rng.choice([-1.0, 1.0], shape) * rng.uniform(0.25, 1.0, shape)
    kind = rng.random()
    if kind < 0.15:
        few = _kept_by_arithmetic(special_numbers(dtype, with_nan=False))
        return _some_replaced(rng, data.astype(dtype), few, 0.1)
    if kind < 0.35:
        # Second derivatives have products of six such numbers, which stay in the range of the accumulator. First
        # derivatives within them are rounded to the dtype, which matters in float16.
        largest = {"float64": 150, "float32": 18, "bfloat16": 18}.get(dtype.name, 4)
        return np.ldexp(data, rng.integers(-largest, largest + 1)).astype(dtype)
    return data.astype(dtype)


def ties(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Few distinct values, including zeros of both signs."""
    if not is_floating(dtype):
        few = rng.integers(0, 4, shape)
        return np.where(rng.random(shape) < 0.8, few.astype(dtype), numbers(rng, shape, dtype))
    return (rng.integers(-2, 3, shape) * rng.choice([-1.0, 1.0], shape)).astype(dtype)


def special(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Ties, mixed with NaN of both signs, infinities, subnormal numbers, and the ends of the dtype's range; in some
    arrays mixed only with zeros and subnormal numbers of both signs."""
    data = ties(rng, shape, dtype)
    if is_floating(dtype):
        return _some_replaced(rng, data, special_numbers(dtype, with_nan=rng.random() < 0.6), 0.4)
    if dtype == np.bool_:
        return data
    info = jnp.iinfo(dtype)
    return _some_replaced(rng, data, np.array([info.min, info.max], dtype), 0.2)


def special_numbers(dtype: np.dtype, with_nan: bool = True) -> np.ndarray:
    """Zeros and subnormal numbers of both signs; `with_nan` adds the ends of the range, infinities and NaN."""
    info = jnp.finfo(dtype)
    least, tiny, most = (float(x) for x in (info.smallest_subnormal, info.tiny, info.max))
    magnitudes = [0.0, least, tiny - least, *([tiny, most, np.inf, np.nan] if with_nan else ())]
    return np.array([math.copysign(x, sign) for x in magnitudes for sign in (1, -1)]).astype(dtype)


def _kept_by_arithmetic(values: np.ndarray) -> np.ndarray:
    """The values that XLA's arithmetic keeps. It treats subnormal numbers of float32 and float64 as zeros, also in
    references, and products with huge numbers show it. So it does with quotients of the smallest normal number.
    Subnormal numbers of float16 are normal numbers of float32, but quotients of the smallest ones round to zero. Sums
    with the largest number may overflow on the way."""
    info, magnitudes = jnp.finfo(values.dtype), np.abs(values)
    is_kept = magnitudes != info.max
    lost = info.tiny if values.dtype != np.float16 else 64 * info.smallest_subnormal
    is_kept &= (magnitudes == 0) | ~(magnitudes <= lost)
    return values[is_kept]


def _some_replaced(rng: np.random.Generator, data: np.ndarray, values: np.ndarray, probability: float) -> np.ndarray:
    return np.where(rng.random(data.shape) < probability, values[rng.integers(len(values), size=data.shape)], data)


def integers(minimum: int, maximum: int) -> Draw:
    """Integers between two bounds, both included, limited to the range of the dtype."""

    def draw(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        info = np.iinfo(dtype)
        low, high = max(minimum, int(info.min)), min(maximum, int(info.max))
        return rng.integers(low, high, shape, endpoint=True).astype(dtype)

    return draw


def integers_and_limits(*ranges: range) -> Draw:
    """Integers of these ranges, and the limits of the dtype."""

    def draw(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
        choices = [x for x in (*itertools.chain(*ranges), low, high) if low <= x <= high]
        picked = np.asarray(np.array(choices, object)[rng.integers(0, len(choices), shape)], object)
        return picked.astype(np.int64 if low < 0 else np.uint64).astype(dtype)

    return draw


def ascending(draw: Draw) -> Draw:
    """The same numbers in ascending order."""
    return lambda rng, shape, dtype: np.sort(draw(rng, shape, dtype), axis=None).reshape(shape)


def segment_sum(data: Any, ids: Any, num_segments: int) -> Any:
    """``jax.ops.segment_sum``, but drops every id out of range."""
    return jax.ops.segment_sum(data, with_dropped(ids, num_segments), num_segments + 1)[:num_segments]


def with_dropped(ids: Any, num_segments: int) -> Any:
    """Ids of one segment more, which has the dropped rows and is the last."""
    ids = wide_ids(ids)
    return jnp.where((ids >= 0) & (ids < num_segments), ids, num_segments)


def is_member(ids: Any, num_segments: int, rows: Any) -> Any:
    """Which rows have a segment, in the rank of the rows."""
    ids = wide_ids(ids)
    return ((ids >= 0) & (ids < num_segments)).reshape(-1, *[1] * (rows.ndim - 1))


def wide_ids(ids: Any) -> Any:
    """Ids as int64, which holds every number of segments; larger ids become negative."""
    return ids.astype(jnp.int64)


def take_cells(cells: Any, ids: Any, fill: Any = 0) -> Any:
    """Gathers the segment of each row, or `fill` for dropped rows."""
    num_segments, ids = cells.shape[0], wide_ids(ids)
    if num_segments == 0:
        return jnp.full((*ids.shape, *cells.shape[1:]), fill, cells.dtype)
    return jnp.where(is_member(ids, num_segments, cells), jnp.take(cells, ids, axis=0, mode="clip"), fill)


def as_tuple(results: Any) -> tuple[Any, ...]:
    return tuple(jax.tree.leaves(results))
