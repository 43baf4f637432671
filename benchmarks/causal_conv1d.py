"""The depthwise causal convolution with bias and SiLU, over shapes of state-space models: training and decoding."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

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
from jax_baracuda._examples import causal_conv1d as plain_jax

try:
    import causal_conv1d
except ImportError:
    causal_conv1d = None
# fla's Gluon kernels are faster than its default Triton kernels, and need no tuning per shape.
os.environ.setdefault("FLA_CONV_GLUON", "1")
try:
    from fla.modules.causal_conv1d import causal_conv1d as fla_causal_conv1d
    from fla.ops.utils import prepare_chunk_indices
except ImportError:
    fla_causal_conv1d = None

CHANNELS_FIRST, CHANNELS_LAST = "causal_conv1d", "causal_conv1d channels_last"
"""Tables and plots show the layouts as separate ops."""
THOROUGH = Effort(samples=4, seconds_per_sample=0.1, seconds_per_contender=0.4)
ROWS_PER_SEQUENCE = 512
"""Mean length of packed sequences."""
DECODING_STEPS = 100
"""Steps in one call, because a single step is shorter than its launch from Python."""
STEPS_PER_ITERATION = 10
"""Steps per iteration of JAX's loop, because an iteration costs more than a step."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """One size of data; every combination of layout, dtype and packing is a case, forward and with gradient."""

    examples: int
    channels: int
    length: int
    width: int = 4
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    packings: tuple[str, ...] = ("",)
    is_exhaustive: bool = False
    """Whether much slower formulations take part, too."""
    layers: int = 1
    """Chained convolutions in one program. They amortise the call from Python, which takes longer than a small
    convolution."""
    effort: Effort = BRIEF

    @property
    def size(self) -> str:
        size = f"{self.examples} × {self.channels} × {self.length}, width {self.width}"
        return size if self.layers == 1 else f"{self.layers} layers of {size}"

    def quick(self) -> Problem:
        """A small version, to see that everything runs."""
        channels, length = max(8, self.channels // 512 * 8), self.length // 64 + self.length % 64
        return dataclasses.replace(self, channels=channels, length=length)

    @property
    def is_small(self) -> bool:
        """Whether other libraries' kernels take less time than Python and autograd do."""
        return self.examples * self.channels * self.length < 1 << 26


@dataclasses.dataclass(frozen=True)
class Decoding:
    """One step of every example, with a state of the given length."""

    examples: int
    channels: int
    state_length: int
    width: int = 4
    dtype: str = "bfloat16"

    @property
    def size(self) -> str:
        return f"{self.examples} × {self.channels} × 1, width {self.width}"

    def quick(self) -> Decoding:
        return dataclasses.replace(self, channels=self.channels // 64)


GPU_PROBLEMS = (
    Problem(8, 5120, 4096, packings=("", "packed"), effort=THOROUGH),
    Problem(8, 5120, 4099),
    Problem(8, 1536, 1024),
    Problem(8, 1536, 1026),
    Problem(8, 1536, 2048, is_exhaustive=True),
    Problem(4, 5120, 2048),
    Problem(8, 5376, 2048),
    Problem(1, 10240, 8192),
    Problem(1, 2048, 4096, width=3),
    Problem(1, 2048, 4096, width=3, layers=10),
    Problem(8, 1536, 1024, layers=10),
    Problem(8, 1536, 1026, layers=10),
    Problem(1, 8192, 32768),
    Problem(1, 64, 1048576),
)
CPU_PROBLEMS = (
    Problem(4, 1024, 2048, effort=Effort()),
    Problem(1, 512, 1026, dtypes=("float32",), is_exhaustive=True),
)
GPU_DECODINGS = (Decoding(128, 8192, 3), Decoding(128, 8192, 4))
CPU_DECODINGS = (Decoding(16, 2048, 4, dtype="float32"), Decoding(16, 2048, 4))


def cases(backend: str, quick: bool = False) -> Iterator[Case]:
    """All cases for a kind of device."""
    on_gpu = backend == "gpu"
    for problem in GPU_PROBLEMS if on_gpu else CPU_PROBLEMS:
        problem = problem.quick() if quick else problem
        for dtype, packing, op in itertools.product(problem.dtypes, problem.packings, (CHANNELS_FIRST, CHANNELS_LAST)):
            for what in (FORWARD, WITH_GRADIENT):
                yield Case(
                    op=op,
                    size=problem.size,
                    variant=", ".join(filter(None, (packing, dtype))),
                    what=what,
                    floor_bytes=floor_bytes(problem, dtype, packing, what),
                    make_contenders=functools.partial(contenders, op, problem, dtype, packing, what),
                    tolerance=tolerance(dtype) * math.sqrt(problem.layers),
                    effort=problem.effort,
                )
    for decoding in GPU_DECODINGS if on_gpu else CPU_DECODINGS:
        decoding = decoding.quick() if quick else decoding
        yield Case(
            op="causal_conv1d_update",
            size=decoding.size,
            variant=f"state of {decoding.state_length}, {decoding.dtype}",
            what=FORWARD,
            floor_bytes=decoding_floor_bytes(decoding),
            make_contenders=functools.partial(decoding_contenders, decoding),
            tolerance=tolerance(decoding.dtype),
            effort=BRIEF,
        )


def tolerance(dtype: str) -> float:
    """The :attr:`Case.tolerance` for peers that compute the same thing. Convolutions that reach from one packed
    sequence into another differ by more than the tolerance of float32."""
    return 0.005 if dtype == "bfloat16" else 1e-3


ADDING_IN_16_BITS = 0.05
"""The tolerance for formulations that add in 16 bits."""


def floor_bytes(problem: Problem, dtype: str, packing: str, what: str) -> int:
    """Bytes of every operand and result, once each, in the forward and in the backward pass."""
    element_bytes = jnp.dtype(dtype).itemsize
    x = problem.examples * problem.channels * problem.length * element_bytes
    parameters = problem.channels * (problem.width + 1) * element_bytes
    ids = problem.examples * problem.length * np.dtype(np.int32).itemsize if packing else 0
    forward = 2 * x + parameters + ids
    backward = 3 * x + 2 * parameters + ids
    return problem.layers * (forward + (backward if what == WITH_GRADIENT else 0))


def decoding_floor_bytes(decoding: Decoding) -> int:
    elements_per_channel = decoding.examples * 2 * (1 + decoding.state_length) + decoding.width + 1
    return decoding.channels * elements_per_channel * jnp.dtype(decoding.dtype).itemsize


# ----------------------------------------------------------------------------------------------------------------------
# Operands, made on the device. The most recent ones are cached for the next case.


class Operands(NamedTuple):
    x: jax.Array
    weights: tuple[jax.Array, ...]
    """One per layer."""
    biases: tuple[jax.Array, ...]
    dy: jax.Array
    ids: jax.Array | None


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(seed: int, count: int, dtype: str) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (count,), dtype)


def _parameters(layer: int, channels: int, width: int, dtype: str) -> tuple[jax.Array, jax.Array]:
    """Weights and biases for which signals neither grow nor vanish through many layers."""
    weight = _normal(10 + layer, channels * width, "float32").reshape(channels, width) * 0.3
    return weight.astype(dtype), _normal(100 + layer, channels, dtype)


@functools.lru_cache(maxsize=1)
def make_operands(op: str, problem: Problem, dtype: str, packing: str) -> Operands:
    shape = (problem.examples, problem.channels, problem.length)
    if op == CHANNELS_LAST:
        shape = (problem.examples, problem.length, problem.channels)
    x, dy = (_normal(seed, math.prod(shape), dtype).reshape(shape) for seed in (3, 4))
    ids = None
    if packing:
        starts = jax.random.bernoulli(jax.random.key(5), 1 / ROWS_PER_SEQUENCE, (problem.examples, problem.length))
        ids = jnp.cumsum(starts, axis=1, dtype=jnp.int32)
    parameters = (_parameters(i, problem.channels, problem.width, dtype) for i in range(problem.layers))
    operands = Operands(x, *zip(*parameters, strict=True), dy, ids)
    return jax.block_until_ready(operands)


# ----------------------------------------------------------------------------------------------------------------------
# Contenders


def contenders(op: str, problem: Problem, dtype: str, packing: str, what: str) -> Iterator[Contender]:
    """This package, and every formulation of every peer that is installed."""
    x, weights, biases, dy, ids = make_operands(op, problem, dtype, packing)
    channels_last = op == CHANNELS_LAST

    def ours(x: jax.Array, weight: jax.Array, bias: jax.Array, ids: jax.Array | None) -> jax.Array:
        return jax_baracuda.causal_conv1d(
            x, weight, bias, activation="silu", channels_last=channels_last, segment_ids=ids
        )

    for library, formulation, function in (
        (OURS, "", ours),
        *((XLA, *named) for named in xla_formulations(problem, dtype, packing, channels_last, what)),
    ):
        tolerance = ADDING_IN_16_BITS * math.sqrt(problem.layers) if library == XLA and dtype == "bfloat16" else 0.0
        function = _in_layers(function)
        if what == FORWARD:
            yield JaxContender(library, formulation, function, x, weights, biases, ids, tolerance=tolerance)
        else:
            function = with_gradient(function, num_differentiated=3)  # x, weights and biases
            yield JaxContender(library, formulation, function, x, weights, biases, ids, dy, tolerance=tolerance)

    if torch_is_usable():
        operands = [torch.from_dlpack(operand) for operand in (x, *weights, *biases)]
        torch_ids = None if ids is None else torch.from_dlpack(ids)
        cotangent = torch.from_dlpack(dy) if what == WITH_GRADIENT else None
        for library, formulation, function in torch_formulations(problem, torch_ids, channels_last):
            compiles = library == "fla"
            function = _in_torch_layers(function)
            yield TorchContender(library, formulation, function, *operands, cotangent=cotangent, compiles=compiles)
            if problem.is_small and x.device.platform == "gpu":
                formulation += " in a CUDA graph"
                yield TorchGraphContender(library, formulation, function, *operands, cotangent=cotangent)


def _in_layers(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Applies `function` in a chain, once per weight and bias."""

    def run(x: jax.Array, weights: Parameters, biases: Parameters, ids: jax.Array | None) -> jax.Array:
        for weight, bias in zip(weights, biases, strict=True):
            # Each layer writes its result to memory, as in a model with other layers in between.
            x = lax.optimization_barrier(function(x, weight, bias, ids))
        return x

    return run


def _in_torch_layers(function: Callable[[Any, Any, Any], Any]) -> Callable[..., Any]:
    """As :func:`_in_layers` for tensors: x, all weights, all biases."""

    def run(x: Any, *parameters: Any) -> Any:
        layers = len(parameters) // 2
        for weight, bias in zip(parameters[:layers], parameters[layers:], strict=True):
            x = function(x, weight, bias)
        return x

    return run


Parameters = tuple[jax.Array, ...]


Formulation = tuple[str, Callable[..., jax.Array]]


def xla_formulations(
    problem: Problem, dtype: str, packing: str, channels_last: bool, what: str
) -> Iterator[Formulation]:
    """Ways to write the op with JAX's own functions; the fastest is the one to beat."""
    yield "shifted adds", functools.partial(_shifted_adds, channels_last, dtype)
    if not problem.is_exhaustive and jax.default_backend() == "gpu":
        return
    if dtype != "float32":
        yield "shifted adds, in float32", functools.partial(_shifted_adds, channels_last, "float32")
    if packing:
        return
    if what == WITH_GRADIENT:
        yield "shifted adds, gradient by hand", functools.partial(_with_gradient_by_hand, channels_last)
    if problem.is_exhaustive:
        yield "lax.conv", functools.partial(_depthwise_convolution, channels_last)


def _linear(
    channels_last: bool, dtype: str, x: jax.Array, weight: jax.Array, bias: jax.Array, ids: jax.Array | None
) -> jax.Array:
    """The convolution without the activation."""
    operands = (operand.astype(dtype) for operand in (x, weight, bias))
    return plain_jax.causal_conv1d(*operands, channels_last=channels_last, segment_ids=ids)


def _shifted_adds(
    channels_last: bool, dtype: str, x: jax.Array, weight: jax.Array, bias: jax.Array, ids: jax.Array | None
) -> jax.Array:
    return jax.nn.silu(_linear(channels_last, dtype, x, weight, bias, ids)).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_gradient_by_hand(
    channels_last: bool, x: jax.Array, weight: jax.Array, bias: jax.Array, ids: None
) -> jax.Array:
    """In float32. The backward pass recomputes everything from the operands."""
    return _shifted_adds(channels_last, "float32", x, weight, bias, ids)


def _by_hand_forward(channels_last: bool, *operands: jax.Array | None) -> Any:
    return _with_gradient_by_hand(channels_last, *operands), operands


def _by_hand_backward(channels_last: bool, operands: Any, dy: jax.Array) -> Any:
    x, weight, bias, _ = operands
    time, width = 1 if channels_last else 2, weight.shape[1]
    _, activation_vjp = jax.vjp(jax.nn.silu, _linear(channels_last, "float32", *operands))
    [dz] = activation_vjp(dy.astype("float32"))
    dx = sum(
        plain_jax.along_channels(weight[:, width - 1 - steps], channels_last) * plain_jax.shifted(dz, -steps, time)
        for steps in range(width)
    )
    but_channels = (0, time)
    dweight = [jnp.sum(dz * plain_jax.shifted(x, width - 1 - k, time), but_channels) for k in range(width)]
    dbias = jnp.sum(dz, but_channels)
    return dx.astype(x.dtype), jnp.stack(dweight, 1).astype(weight.dtype), dbias.astype(bias.dtype), None


_with_gradient_by_hand.defvjp(_by_hand_forward, _by_hand_backward)


def _depthwise_convolution(
    channels_last: bool, x: jax.Array, weight: jax.Array, bias: jax.Array, ids: None
) -> jax.Array:
    layout = "NHC" if channels_last else "NCH"
    channels, width = weight.shape
    z = lax.conv_general_dilated(
        x,
        weight[:, None],
        (1,),
        [(width - 1, 0)],
        dimension_numbers=(layout, "OIH", layout),
        feature_group_count=channels,
    )
    return jax.nn.silu(z + (bias if channels_last else bias[:, None]))


def torch_formulations(
    problem: Problem, ids: Any, channels_last: bool
) -> Iterator[tuple[str, str, Callable[[Any, Any, Any], Any]]]:
    """Ways to write the op with torch and its peers: library, name, function of x, weight and bias."""

    def in_layout(function: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
        """`function` takes channels first; with `channels_last`, it gets transposed views."""
        if not channels_last:
            return function
        return lambda x, weight, bias: function(x.transpose(1, 2), weight, bias).transpose(1, 2)

    def depthwise(x: Any, weight: Any, bias: Any) -> Any:
        z = torch.nn.functional.conv1d(x, weight[:, None], bias, padding=problem.width - 1, groups=problem.channels)
        return torch.nn.functional.silu(z[..., : problem.length])

    def fused(x: Any, weight: Any, bias: Any) -> Any:
        if ids is not None and not channels_last:
            raise UnsupportedError("seq_idx with channels first")
        return causal_conv1d.causal_conv1d_fn(x, weight, bias, seq_idx=ids, activation="silu")

    on_gpu = jax.default_backend() == "gpu"
    if ids is None and (problem.is_exhaustive or not on_gpu):
        yield "torch", "conv1d", in_layout(depthwise)
    if not on_gpu:
        return
    if causal_conv1d is not None:
        yield "causal_conv1d", "causal_conv1d_fn", in_layout(fused)
    if fla_causal_conv1d is not None:
        sequences = _fla_sequences(ids) if channels_last and ids is not None else {}
        yield "fla", "causal_conv1d", functools.partial(_fla, channels_last, sequences)


def _fla_sequences(ids: Any) -> dict[str, Any]:
    """fla's description of packed sequences: the start of each among the rows of all examples, and their division into
    chunks, which is computed once for all layers of a model."""
    is_first = torch.ones_like(ids, dtype=torch.bool)
    is_first[:, 1:] = ids[:, 1:] != ids[:, :-1]
    bounds = torch.nn.functional.pad(torch.nonzero(is_first.flatten())[:, 0], (0, 1), value=ids.numel())
    return {"cu_seqlens": bounds, "chunk_indices": prepare_chunk_indices(bounds, 64)}


def _fla(channels_last: bool, sequences: dict[str, Any], x: Any, weight: Any, bias: Any) -> Any:
    if not channels_last:
        raise UnsupportedError("channels first")
    rows = x.flatten(0, 1)[None] if sequences else x
    y, _ = fla_causal_conv1d(rows, weight, bias, activation="silu", **sequences)
    return y.view(x.shape)


# ----------------------------------------------------------------------------------------------------------------------
# Decoding


def decoding_contenders(decoding: Decoding) -> Iterator[Contender]:
    """Many steps in one loop, where each output is the next input."""
    weight, bias = _parameters(0, decoding.channels, decoding.width, decoding.dtype)
    shape = (decoding.examples, decoding.channels, decoding.state_length)
    state = _normal(3, math.prod(shape), decoding.dtype).reshape(shape)
    x = _normal(4, math.prod(shape[:2]), decoding.dtype).reshape(shape[:2])

    def ours(x: jax.Array, state: jax.Array, weight: jax.Array, bias: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax_baracuda.causal_conv1d_update(x, state, weight, bias, activation="silu")

    for library, formulation, step in (
        (OURS, "", ours),
        (XLA, "concatenate, multiply, sum", _multiply_and_sum),
        (XLA, "multiply and add, then shift", _add_and_shift),
    ):
        function = functools.partial(_decode, step)
        yield JaxContender(library, formulation, function, x, state, weight, bias, repetitions=DECODING_STEPS)

    if torch_is_usable() and causal_conv1d is not None and jax.default_backend() == "gpu":
        operands = [torch.from_dlpack(operand) for operand in (x, state, weight, bias)]
        yield TorchGraphContender(
            "causal_conv1d",
            "causal_conv1d_update in a CUDA graph",
            _torch_decode,
            *operands,
            repetitions=DECODING_STEPS,
        )


def _decode(
    step: Callable[..., tuple[jax.Array, jax.Array]],
    x: jax.Array,
    state: jax.Array,
    weight: jax.Array,
    bias: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    def body(_: jax.Array, carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        # Each step writes its results to memory, as in a model with other layers in between.
        return lax.optimization_barrier(step(*carried, weight, bias))

    return lax.fori_loop(0, DECODING_STEPS, body, (x, state), unroll=STEPS_PER_ITERATION)


def _multiply_and_sum(
    x: jax.Array, state: jax.Array, weight: jax.Array, bias: jax.Array
) -> tuple[jax.Array, jax.Array]:
    inputs = jnp.concatenate([state, x[:, :, None]], axis=2)
    taps = inputs[:, :, -weight.shape[1] :].astype("float32") * weight.astype("float32")
    return jax.nn.silu(jnp.sum(taps, axis=2) + bias).astype(x.dtype), inputs[:, :, 1:]


def _add_and_shift(x: jax.Array, state: jax.Array, weight: jax.Array, bias: jax.Array) -> tuple[jax.Array, jax.Array]:
    width = weight.shape[1]
    z = bias + weight[:, -1].astype("float32") * x
    for steps in range(1, width):
        z = z + weight[:, width - 1 - steps].astype("float32") * state[:, :, -steps]
    return jax.nn.silu(z).astype(x.dtype), jnp.concatenate([state[:, :, 1:], x[:, :, None]], axis=2)


def _torch_decode(x: Any, state: Any, weight: Any, bias: Any) -> tuple[Any, Any]:
    state = state.clone()
    for _ in range(DECODING_STEPS):
        x = causal_conv1d.causal_conv1d_update(x, state, weight, bias, activation="silu")
    return x, state
