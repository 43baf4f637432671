"""Rotary position embedding over shapes of language models: both pairings and layouts, queries with keys, decoding."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_baracuda
from benchmarks.harness import (
    BRIEF,
    Case,
    Contender,
    Effort,
    JaxContender,
    TorchContender,
    TorchGraphContender,
    UnsupportedError,
    torch,
    torch_is_usable,
    with_gradient,
)
from benchmarks.record import FORWARD, OURS, WITH_GRADIENT, XLA
from jax_baracuda._examples.rope import rotate_adjacent, rotate_halves

try:
    from fla.modules.rotary import rotary_embedding as fla_rotary_embedding
except ImportError:
    fla_rotary_embedding = None
try:
    from liger_kernel.ops.rope import LigerRopeFunction
except ImportError:
    LigerRopeFunction = None

INTERLEAVED, HALF_SPLIT = "rope", "rope half-split"
"""Tables and plots show the pairings as separate ops."""
QK_INTERLEAVED, QK_HALF_SPLIT = "rope_qk", "rope_qk half-split"
THOROUGH = Effort(samples=4, seconds_per_sample=0.05, seconds_per_contender=0.2)
BASE = 10000.0
LAST_OFFSET = 1000
"""If examples have their own positions, each starts at a random offset below this."""
LAYERS = 10
"""Layers of a decoding model. All rotate at the same position, so they can share sines and cosines."""
DECODING_STEPS = 10
"""Steps in one call, because a single rotation is shorter than its launch from Python."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """One size of data; pairings, layouts, dtypes and kinds of positions are cases, forward and with gradient."""

    examples: int
    heads: tuple[int, ...]
    """The heads of each array that is rotated in one call: x, or q and k."""
    length: int
    size: int
    layouts: tuple[str, ...] = ("BHSD", "BSHD")
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    positions: tuple[str, ...] = ("",)
    """Empty: 0, 1, ... "positions of examples": each example has its own."""
    is_exhaustive: bool = False
    """Whether much slower formulations take part, too."""
    effort: Effort = BRIEF
    layers: int = 1
    """Chained rotations in one program, to amortise the call from Python."""

    @property
    def size_text(self) -> str:
        text = f"{self.examples} × {' + '.join(map(str, self.heads))} × {self.length} × {self.size}"
        return text if self.layers == 1 else f"{self.layers} layers of {text}"

    def quick(self) -> Problem:
        """A small version, to see that everything runs."""
        return dataclasses.replace(self, length=max(8, self.length // 256))

    def shape(self, heads: int, layout: str) -> tuple[int, ...]:
        inner = (heads, self.length) if layout == "BHSD" else (self.length, heads)
        return (self.examples, *inner, self.size)


@dataclasses.dataclass(frozen=True)
class Decoding:
    """Steps of one new position per example, through all layers of a model."""

    examples: int
    heads: int
    size: int
    dtype: str = "bfloat16"

    def quick(self) -> Decoding:
        return dataclasses.replace(self, examples=self.examples // 8)


HEADS_FIRST = ("BHSD",)
GPU_PROBLEMS = (
    Problem(4, (32,), 8192, 128, effort=THOROUGH),
    Problem(4, (32,), 8192, 128, dtypes=("bfloat16",), positions=("positions of examples",)),
    Problem(1, (64,), 8192, 128, dtypes=("bfloat16",), layouts=HEADS_FIRST),
    Problem(1, (128,), 8192, 128, dtypes=("bfloat16",), layouts=HEADS_FIRST),
    Problem(1, (32,), 131072, 128, dtypes=("bfloat16",), layouts=HEADS_FIRST),
    Problem(4, (32,), 8192, 64, dtypes=("bfloat16",), layouts=HEADS_FIRST),
    Problem(4, (32,), 8192, 256, dtypes=("bfloat16",), layouts=HEADS_FIRST),
    Problem(3, (5,), 4099, 96, layouts=HEADS_FIRST),
    Problem(1, (32, 8), 8192, 128, effort=THOROUGH),
    Problem(1, (32, 1), 8192, 128, dtypes=("bfloat16",), layouts=HEADS_FIRST),
    Problem(1, (32, 8), 8192, 128, layers=10),
)
CPU_PROBLEMS = (
    Problem(1, (32,), 2048, 128, is_exhaustive=True, effort=Effort()),
    Problem(1, (32, 8), 2048, 128, effort=Effort()),
)
GPU_DECODINGS = (Decoding(128, 32, 128), Decoding(128, 32, 128, dtype="float32"), Decoding(8, 8, 128))
CPU_DECODINGS = (Decoding(16, 32, 128, dtype="float32"), Decoding(16, 32, 128))


def cases(backend: str, quick: bool = False) -> Iterator[Case]:
    """All cases for a kind of device."""
    on_gpu = backend == "gpu"
    for problem in GPU_PROBLEMS if on_gpu else CPU_PROBLEMS:
        problem = problem.quick() if quick else problem
        ops = (INTERLEAVED, HALF_SPLIT) if len(problem.heads) == 1 else (QK_INTERLEAVED, QK_HALF_SPLIT)
        for dtype, positions, layout, op in itertools.product(problem.dtypes, problem.positions, problem.layouts, ops):
            for what in (FORWARD, WITH_GRADIENT):
                yield Case(
                    op=op,
                    size=problem.size_text,
                    variant=", ".join(filter(None, (layout, positions, dtype))),
                    what=what,
                    floor_bytes=floor_bytes(problem, dtype, positions, what),
                    make_contenders=functools.partial(contenders, op, problem, dtype, layout, positions, what),
                    tolerance=tolerance(dtype),
                    effort=problem.effort,
                )
    for decoding in GPU_DECODINGS if on_gpu else CPU_DECODINGS:
        decoding = decoding.quick() if quick else decoding
        for op in (INTERLEAVED, HALF_SPLIT):
            yield Case(
                op=op,
                size=f"{decoding.examples} × {decoding.heads} × 1 × {decoding.size}",
                variant=f"decoding, {decoding.dtype}",
                what=FORWARD,
                floor_bytes=decoding_floor_bytes(decoding),
                make_contenders=functools.partial(decoding_contenders, op, decoding),
                tolerance=DECODING_TOLERANCE,
                effort=BRIEF,
            )


def tolerance(dtype: str) -> float:
    """The :attr:`Case.tolerance` for peers that compute the same thing. Rotations by the angles of another position, or
    of other pairs, differ by much more."""
    return 0.005 if dtype == "bfloat16" else 1e-4


ROUNDED_ANGLES = 0.02
"""The tolerance for formulations that round angles (up to 131072), or sines and cosines, more than their results."""
DECODING_TOLERANCE = 0.05
"""Rounding errors, from angles and from bfloat16, add up over the layers and steps."""


def floor_bytes(problem: Problem, dtype: str, positions: str, what: str) -> int:
    """Bytes of every operand and result, once each, in the forward and in the backward pass."""
    elements = problem.examples * sum(problem.heads) * problem.length * problem.size
    of_positions = problem.examples * problem.length * np.dtype(np.int32).itemsize if positions else 0
    one_pass = 2 * elements * jnp.dtype(dtype).itemsize + of_positions
    return one_pass * (2 if what == WITH_GRADIENT else 1)


def decoding_floor_bytes(decoding: Decoding) -> int:
    elements = decoding.examples * decoding.heads * decoding.size
    return 2 * elements * jnp.dtype(decoding.dtype).itemsize + decoding.examples * np.dtype(np.int32).itemsize


# ----------------------------------------------------------------------------------------------------------------------
# Operands, made on the device. The most recent ones are cached for the next case.


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(seed: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
    features: tuple[jax.Array, ...]
    cotangents: tuple[jax.Array, ...]
    offsets: jax.Array | None
    """``[B]``: the first position of each example, if examples have their own positions."""
    positions: jax.Array | None
    """``[B, S]``, if examples have their own positions."""
    cos: jax.Array
    """The table ``[positions, D / 2]`` in float32."""
    sin: jax.Array


@functools.lru_cache(maxsize=1)
def make_operands(problem: Problem, dtype: str, layout: str, positions: str) -> Operands:
    features, cotangents = (
        tuple(_normal(first + i, problem.shape(heads, layout), dtype) for i, heads in enumerate(problem.heads))
        for first in (1, 3)
    )
    offsets = jax.random.randint(jax.random.key(5), (problem.examples,), 0, LAST_OFFSET) if positions else None
    cos, sin = _tables(problem.length + (LAST_OFFSET if positions else 0), problem.size)
    return jax.block_until_ready(
        Operands(
            features,
            cotangents,
            offsets,
            None if offsets is None else offsets[:, None] + jnp.arange(problem.length, dtype=jnp.int32),
            cos,
            sin,
        )
    )


def _tables(length: int, size: int) -> tuple[jax.Array, jax.Array]:
    angles = np.outer(np.arange(length), _frequencies(size))
    return jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)


def _frequencies(size: int) -> np.ndarray:
    return BASE ** (-np.arange(0, size, 2) / size)


# ----------------------------------------------------------------------------------------------------------------------
# Contenders. JAX contenders are functions of the features, the positions and the tables of cosines and sines.


def contenders(op: str, problem: Problem, dtype: str, layout: str, positions: str, what: str) -> Iterator[Contender]:
    """This package, and every formulation of every peer that is installed."""
    given = make_operands(problem, dtype, layout, positions)
    interleaved = op in (INTERLEAVED, QK_INTERLEAVED)

    def ours(features: tuple[jax.Array, ...], positions: jax.Array | None, cos: Any, sin: Any) -> tuple[jax.Array, ...]:
        options = {"interleaved": interleaved, "layout": layout, "base": BASE}
        if len(features) == 1:
            return (jax_baracuda.rope(*features, positions, **options),)
        return jax_baracuda.rope_qk(*features, positions, **options)

    formulations = [
        (XLA, name, functools.partial(_rotate_all, rotate, angles, layout), tolerance)
        for name, rotate, angles, tolerance in xla_formulations(problem, dtype, interleaved)
    ]
    for library, formulation, function, tolerance in ((OURS, "", ours, 0.0), *formulations):
        function = _in_layers(function, problem.layers)
        operands = (given.features, given.positions, given.cos, given.sin)
        if what == WITH_GRADIENT:
            function, operands = with_gradient(function), (*operands, given.cotangents)
        repetitions = problem.layers
        yield JaxContender(library, formulation, function, *operands, repetitions=repetitions, tolerance=tolerance)
    if torch_is_usable() and problem.layers == 1:
        yield from torch_contenders(problem, given, interleaved, layout, what)


def _in_layers(function: Callable[..., tuple[Any, ...]], layers: int) -> Callable[..., tuple[Any, ...]]:
    """Applies `function` to the features in a chain, `layers` times."""

    def run(features: tuple[jax.Array, ...], *others: Any) -> tuple[jax.Array, ...]:
        for _ in range(layers):
            # Each layer writes its result to memory, as in a model with other operations in between.
            features = lax.optimization_barrier(function(features, *others))
        return features

    return run


Rotate = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""``(features, cosines, sines) -> rotated features``; the latter are ``[..., D / 2]`` and broadcast to the pairs."""
Angles = Callable[..., tuple[jax.Array, jax.Array]]
"""``(positions or None, length, cosines, sines) -> (cosines, sines)``: from tables to ``[S or B, S, D / 2]``."""


def xla_formulations(problem: Problem, dtype: str, interleaved: bool) -> Iterator[tuple[str, Rotate, Angles, float]]:
    """Ways to write the op with JAX's own functions, with their tolerances; the fastest is the one to beat."""
    rotations = INTERLEAVED_ROTATIONS if interleaved else HALF_SPLIT_ROTATIONS
    if not problem.is_exhaustive and jax.default_backend() == "gpu":
        rotations = dict(itertools.islice(rotations.items(), 2))
    for name, rotate in rotations.items():
        yield f"{name}, tables", rotate, _from_tables, 0.0
        yield f"{name}, angles on the fly", rotate, _on_the_fly, ROUNDED_ANGLES
    if problem.is_exhaustive and dtype != "float32":
        name, rotate = next(iter(rotations.items()))
        yield f"{name}, tables, in {dtype}", rotate, functools.partial(_from_tables, dtype=dtype), ROUNDED_ANGLES


def _rotate_all(
    rotate: Rotate,
    angles: Angles,
    layout: str,
    features: Sequence[jax.Array],
    positions: jax.Array | None,
    cos: jax.Array,
    sin: jax.Array,
) -> tuple[jax.Array, ...]:
    head_axis, sequence_axis = (1, 2) if layout == "BHSD" else (2, 1)
    cos, sin = angles(positions, features[0].shape[sequence_axis], cos, sin)
    cos, sin = (jnp.expand_dims(x[None] if x.ndim == 2 else x, head_axis) for x in (cos, sin))
    return tuple(rotate(x.astype(cos.dtype), cos, sin).astype(x.dtype) for x in features)


def _from_tables(
    positions: jax.Array | None, length: int, cos: jax.Array, sin: jax.Array, dtype: str = "float32"
) -> tuple[jax.Array, jax.Array]:
    cos, sin = cos.astype(dtype), sin.astype(dtype)
    return (cos[:length], sin[:length]) if positions is None else (cos[positions], sin[positions])


def _on_the_fly(
    positions: jax.Array | None, length: int, cos: jax.Array, sin: jax.Array
) -> tuple[jax.Array, jax.Array]:
    positions = jnp.arange(length) if positions is None else positions
    angles = positions[..., None].astype(jnp.float32) * _frequencies(2 * cos.shape[-1]).astype(np.float32)
    return jnp.cos(angles), jnp.sin(angles)


def _swapped_halves(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """As in Hugging Face's models."""
    first, second = jnp.split(x, 2, axis=-1)
    swapped = jnp.concatenate([-second, first], axis=-1)
    return x * jnp.concatenate([cos, cos], axis=-1) + swapped * jnp.concatenate([sin, sin], axis=-1)


def _rolled_halves(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    return x * jnp.concatenate([cos, cos], axis=-1) + jnp.roll(x, x.shape[-1] // 2, -1) * jnp.concatenate(
        [-sin, sin], axis=-1
    )


def _pairs(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    first, second = pairs[..., 0], pairs[..., 1]
    return jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1).reshape(x.shape)


def _swapped_neighbours(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Features times repeated cosines, and their neighbours times repeated sines."""
    is_first = np.arange(x.shape[-1]) % 2 == 0
    swapped = jnp.where(is_first, -jnp.roll(x, -1, -1), jnp.roll(x, 1, -1))
    return x * jnp.repeat(cos, 2, axis=-1) + swapped * jnp.repeat(sin, 2, axis=-1)


def _complex_numbers(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """As in Meta's models."""
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    turned = lax.complex(pairs[..., 0], pairs[..., 1]) * lax.complex(*(t.astype(jnp.float32) for t in (cos, sin)))
    return jnp.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)


# The first two are the most common.
HALF_SPLIT_ROTATIONS: dict[str, Rotate] = {
    "halves": rotate_halves,
    "swapped halves": _swapped_halves,
    "rolled halves": _rolled_halves,
}
INTERLEAVED_ROTATIONS: dict[str, Rotate] = {
    "strided": rotate_adjacent,
    "swapped neighbours": _swapped_neighbours,
    "pairs": _pairs,
    "complex numbers": _complex_numbers,
}


def torch_contenders(
    problem: Problem, given: Operands, interleaved: bool, layout: str, what: str
) -> Iterator[Contender]:
    """Torch, and the kernels of its peers, which take tables."""
    features = [torch.from_dlpack(x) for x in given.features]
    cotangents = tuple(torch.from_dlpack(x) for x in given.cotangents) if what == WITH_GRADIENT else None
    cos, sin = (torch.from_dlpack(x) for x in (given.cos, given.sin))
    positions = None if given.positions is None else torch.from_dlpack(given.positions).long()
    heads_first = layout == "BHSD"

    def gathered(table: Any) -> Any:
        """Rows of a table ``[B or 1, S, D / 2]``."""
        return table[None, : problem.length] if positions is None else table[positions]

    def eager(*features: Any) -> tuple[Any, ...]:
        of_heads = [gathered(table).unsqueeze(1 if heads_first else 2) for table in (cos, sin)]
        return tuple(_torch_rotate(interleaved, x.float(), *of_heads).to(x.dtype) for x in features)

    def fla(*features: Any) -> tuple[Any, ...]:
        if heads_first:
            raise UnsupportedError("heads before the sequence")
        offsets = 0 if given.offsets is None else torch.from_dlpack(given.offsets)
        return tuple(
            fla_rotary_embedding(x, fla_tables[0], fla_tables[1], interleaved=interleaved, seqlen_offsets=offsets)
            for x in features
        )

    def liger(*features: Any) -> tuple[Any, ...]:
        """liger takes the shape with heads first but memory with the sequence first, and writes to its operands."""
        if interleaved:
            raise UnsupportedError("adjacent pairs")
        q, k = features if heads_first else (x.transpose(1, 2) for x in features)
        q, k, *_ = LigerRopeFunction.apply(q, k, *liger_tables)
        return (q, k) if heads_first else (q.transpose(1, 2), k.transpose(1, 2))

    if problem.is_exhaustive or jax.default_backend() == "cpu":
        yield TorchContender("torch", "eager", eager, *features, cotangent=cotangents)
    if jax.default_backend() == "cpu":
        return
    if fla_rotary_embedding is not None:
        fla_tables = [table.to(features[0].dtype) for table in (cos, sin)]
        yield TorchContender("fla", "rotary_embedding", fla, *features, cotangent=cotangents, compiles=True)
    if LigerRopeFunction is not None and len(features) == 2:
        liger_tables = [torch.cat([gathered(table)] * 2, dim=-1) for table in (cos, sin)]
        yield TorchContender(
            "liger_kernel",
            "LigerRopeFunction",
            liger,
            *features,
            cotangent=cotangents,
            compiles=True,
            writes_to_operands=True,
        )


def _torch_rotate(interleaved: bool, x: Any, cos: Any, sin: Any) -> Any:
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    return torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)


# ----------------------------------------------------------------------------------------------------------------------
# Decoding


def decoding_contenders(op: str, decoding: Decoding) -> Iterator[Contender]:
    """Steps in a loop. In each step, several layers rotate at the same positions; each output is the next input."""
    interleaved = op == INTERLEAVED
    x = _normal(1, (decoding.examples, decoding.heads, 1, decoding.size), decoding.dtype)
    offsets = jax.random.randint(jax.random.key(5), (decoding.examples, 1), 0, LAST_OFFSET)
    cos, sin = _tables(LAST_OFFSET + DECODING_STEPS, decoding.size)

    def ours(features: tuple[jax.Array], positions: jax.Array, cos: Any, sin: Any) -> tuple[jax.Array]:
        return (jax_baracuda.rope(*features, positions, interleaved=interleaved, base=BASE),)

    rotations = INTERLEAVED_ROTATIONS if interleaved else HALF_SPLIT_ROTATIONS
    formulations = [
        (f"{name}, {how}", functools.partial(_rotate_all, rotate, angles, "BHSD"))
        for name, rotate in itertools.islice(rotations.items(), 2)
        for how, angles in (("tables", _from_tables), ("angles on the fly", _on_the_fly))
    ]
    repetitions = DECODING_STEPS * LAYERS
    for library, formulation, function in ((OURS, "", ours), *((XLA, *named) for named in formulations)):
        decode = functools.partial(_decode, function)
        yield JaxContender(library, formulation, decode, x, offsets, cos, sin, repetitions=repetitions)

    if torch_is_usable() and fla_rotary_embedding is not None and jax.default_backend() == "gpu":
        tables = [torch.from_dlpack(table).to(torch.from_dlpack(x).dtype) for table in (cos, sin)]
        first_offsets = torch.from_dlpack(offsets)[:, 0]

        def fla_decode(x: Any) -> Any:
            for step in range(DECODING_STEPS):
                for _ in range(LAYERS):
                    x = fla_rotary_embedding(x, *tables, interleaved=interleaved, seqlen_offsets=first_offsets + step)
            return x.transpose(1, 2)

        yield TorchGraphContender(
            "fla",
            "rotary_embedding in a CUDA graph",
            fla_decode,
            torch.from_dlpack(x).transpose(1, 2).contiguous(),
            repetitions=repetitions,
        )


def _decode(
    rotate: Callable[..., tuple[jax.Array]], x: jax.Array, offsets: jax.Array, cos: jax.Array, sin: jax.Array
) -> jax.Array:
    def step(i: jax.Array, features: tuple[jax.Array]) -> tuple[jax.Array]:
        return _in_layers(rotate, LAYERS)(features, offsets + i, cos, sin)

    return lax.fori_loop(0, DECODING_STEPS, step, (x,))[0]
