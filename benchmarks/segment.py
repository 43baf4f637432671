"""The segment reductions and the segment softmax, over shapes of graphs, particles and recommenders."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_baracuda
from benchmarks.harness import Case, Contender, JaxContender, TorchContender, torch, with_gradient
from benchmarks.record import FORWARD, OURS, WITH_GRADIENT, XLA
from jax_baracuda._examples import examples_of

try:
    import torch_scatter
except ImportError:
    torch_scatter = None

F32_BF16 = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Problem:
    """Ops over one size of data; every combination of ids, dtype and order is a case."""

    name: str
    rows: int
    features: int
    segments: int
    ops: tuple[str, ...]
    ids: tuple[str, ...] = ("uniform",)
    dtypes: tuple[str, ...] = ("float32",)
    orders: tuple[str, ...] = ("unsorted", "sorted")
    with_gradient: bool = True

    @property
    def size(self) -> str:
        return f"{self.name} {short_count(self.rows)} × {self.features} → {short_count(self.segments)}"

    def quick(self) -> Problem:
        """A small version, to see that everything runs."""
        segments = max(self.segments // 64, min(self.segments, 64))
        return dataclasses.replace(self, rows=self.rows // 64, segments=segments, ids=self.ids[:1])


GPU_PROBLEMS = (
    Problem("arxiv", 1_166_243, 128, 169_343, ("segment_max", "segment_sum"), ("uniform", "power law"), F32_BF16),
    Problem("arxiv", 1_166_243, 128, 169_343, ("segment_mean", "segment_prod"), dtypes=F32_BF16),
    Problem("arxiv", 1_166_243, 128, 169_343, ("segment_min",)),
    Problem("arxiv", 1_166_243, 128, 169_343, ("segment_argmax",), ("uniform", "power law")),
    Problem("products", 61_859_140, 32, 2_449_029, ("segment_max", "segment_sum"), ("power law",)),
    Problem("scalars", 100_000_000, 1, 1_000_000, ("segment_max", "segment_sum"), with_gradient=False),
    Problem("few segments", 16_000_000, 16, 64, ("segment_max", "segment_sum")),
    Problem("hot row", 7_770_000, 128, 169_343, ("segment_max",), ("half in one",)),
    Problem("arxiv heads", 1_166_243, 8, 169_343, ("segment_softmax",), ("uniform", "power law"), F32_BF16),
    Problem("products heads", 61_859_140, 4, 2_449_029, ("segment_softmax",), ("power law",)),
    Problem("particles", 10_000, 64, 1_000, ("segment_softmax",)),
    Problem("particles", 10_000, 128, 1_000, ("segment_softmax",)),
    Problem("particles", 10_000, 256, 1_000, ("segment_softmax",)),
)
CPU_PROBLEMS = (
    Problem("graph", 292_000, 128, 42_000, ("segment_max", "segment_sum"), ("uniform", "power law"), F32_BF16),
    Problem("graph", 292_000, 128, 42_000, ("segment_mean", "segment_prod"), dtypes=F32_BF16),
    Problem("graph", 292_000, 128, 42_000, ("segment_min", "segment_argmax")),
    Problem("scalars", 5_000_000, 1, 50_000, ("segment_max", "segment_sum")),
    Problem("few segments", 1_000_000, 16, 64, ("segment_max", "segment_sum")),
    Problem("graph heads", 292_000, 8, 42_000, ("segment_softmax",), dtypes=F32_BF16),
    Problem("particles", 10_000, 128, 1_000, ("segment_softmax",)),
)


def cases(backend: str, quick: bool = False) -> Iterator[Case]:
    """All cases for a kind of device."""
    for problem in GPU_PROBLEMS if backend == "gpu" else CPU_PROBLEMS:
        problem = problem.quick() if quick else problem
        for ids, dtype, order in itertools.product(problem.ids, problem.dtypes, problem.orders):
            for op in problem.ops:
                has_gradient = problem.with_gradient and op != "segment_argmax"
                for what in (FORWARD, WITH_GRADIENT) if has_gradient else (FORWARD,):
                    yield Case(
                        op=op,
                        size=problem.size,
                        variant=f"{ids}, {order}, {dtype}",
                        what=what,
                        floor_bytes=floor_bytes(op, problem, dtype, what),
                        make_contenders=functools.partial(contenders, op, problem, ids, dtype, order, what),
                        tolerance=tolerance(op, dtype, what),
                    )


def tolerance(op: str, dtype: str, what: str) -> float:
    """The :attr:`Case.tolerance` for peers that compute the same thing."""
    if what == WITH_GRADIENT and op in ("segment_max", "segment_min"):
        return 0.5  # Some peers give the gradient of tied rows to one of them.
    if op == "segment_argmax":
        return 0.01  # Some peers return a different one of the tied rows.
    return 0.2 if dtype == "bfloat16" else 1e-3  # Some peers add or multiply in 16 bits.


def floor_bytes(op: str, problem: Problem, dtype: str, what: str) -> int:
    """Bytes of every operand and result, once each, in the forward and in the backward pass."""
    element_bytes = jnp.dtype(dtype).itemsize
    data = problem.rows * problem.features * element_bytes
    cells = problem.segments * problem.features * element_bytes
    ids = problem.rows * np.dtype(np.int32).itemsize
    if op == "segment_softmax":
        forward, backward = 2 * data + ids, 3 * data + ids
    elif op == "segment_argmax":
        return data + ids + problem.segments * problem.features * np.dtype(np.int32).itemsize
    else:
        forward = data + ids + cells
        # Gradients of sums need the cotangent and the ids; gradients of maxima and products also data and output.
        is_linear = op in ("segment_sum", "segment_mean")
        backward = data + ids + cells if is_linear else 2 * data + ids + 2 * cells
    return forward + (backward if what == WITH_GRADIENT else 0)


# ----------------------------------------------------------------------------------------------------------------------
# Operands, made on the device. The most recent ones are cached for the next case.


@functools.lru_cache(maxsize=1)
def make_ids(rows: int, segments: int, distribution: str, order: str) -> jax.Array:
    """Segment ids. "power law" gives segment k about 1 / (k + 1) ** 0.8 of the rows, in a shuffled order of k; "half in
    one" gives half of the rows to one segment."""
    key, other_key = jax.random.split(jax.random.key(0))
    if distribution == "power law":
        cumulative = np.cumsum(np.arange(1, segments + 1) ** -0.8)
        edges = jnp.asarray((cumulative[:-1] * (2**32 / cumulative[-1])).astype(np.uint32))
        shuffled = jnp.asarray(np.random.default_rng(0).permutation(segments).astype(np.int32))
        ids = shuffled[jnp.searchsorted(edges, jax.random.bits(key, (rows,), jnp.uint32), side="right")]
    else:
        ids = jax.random.randint(key, (rows,), 0, segments, jnp.int32)
    if distribution == "half in one":
        ids = jnp.where(jax.random.bernoulli(other_key, 0.5, (rows,)), segments // 3, ids)
    return jax.block_until_ready(jnp.sort(ids) if order == "sorted" else ids)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _normal(shape: tuple[int, ...], dtype: str, seed: int, near_one: bool = False) -> jax.Array:
    x = jax.random.normal(jax.random.key(seed), shape, dtype)
    return 1 + x / 100 if near_one else x


@functools.lru_cache(maxsize=1)
def make_data(rows: int, features: int, dtype: str, near_one: bool) -> jax.Array:
    """Normally distributed rows, near one for long products."""
    return jax.block_until_ready(_normal((rows, features), dtype, 1, near_one))


# ----------------------------------------------------------------------------------------------------------------------
# Contenders


def contenders(op: str, problem: Problem, distribution: str, dtype: str, order: str, what: str) -> Iterator[Contender]:
    """This package, and every formulation of every peer that is installed."""
    ids = make_ids(problem.rows, problem.segments, distribution, order)
    data = make_data(problem.rows, problem.features, dtype, op == "segment_prod")
    num_segments, is_sorted = problem.segments, order == "sorted"
    cotangent = None
    if what == WITH_GRADIENT:
        rows = problem.rows if op == "segment_softmax" else num_segments
        cotangent = _normal((rows, problem.features), dtype, 2)

    def ours(data: jax.Array, ids: jax.Array) -> jax.Array:
        return getattr(jax_baracuda, op)(data, ids, num_segments, indices_are_sorted=is_sorted)

    for library, formulation, function in (
        (OURS, "", ours),
        *((XLA, *named) for named in xla_formulations(op, problem, dtype, is_sorted)),
    ):
        if cotangent is None:
            yield JaxContender(library, formulation, function, data, ids)
        else:
            yield JaxContender(library, formulation, with_gradient(function), data, ids, cotangent)

    if torch is None or (jax.default_backend() == "gpu" and not torch.cuda.is_available()):
        return
    rows, row_ids = torch.from_dlpack(data), torch.from_dlpack(ids).long()
    cotangent = None if cotangent is None else torch.from_dlpack(cotangent)
    for library, formulation, function in torch_formulations(op, row_ids, num_segments, dtype, is_sorted):
        yield TorchContender(library, formulation, function, rows, cotangent=cotangent)


Formulation = tuple[str, Callable[[jax.Array, jax.Array], jax.Array]]


def xla_formulations(op: str, problem: Problem, dtype: str, is_sorted: bool) -> Iterator[Formulation]:
    """Ways to write the op with JAX's own functions; the fastest is the one to beat."""
    num_segments = problem.segments
    plain = functools.partial(examples_of(op)[0].plain_jax, num_segments=num_segments)
    formulations = [("plain", plain)]
    if is_sorted:
        sorted_function = functools.partial(plain, indices_are_sorted=True)
        formulations.append(("sorted flag", sorted_function))
    else:
        formulations.append(("sort first", functools.partial(_sort_first, op, num_segments)))
    if problem.features == 1:
        formulations.append(("rank 1", lambda data, ids: plain(data[:, 0], ids)[:, None]))
    elif problem.features <= 16 and op != "segment_softmax":
        formulations.append(("vmap over features", jax.vmap(plain, (1, None), 1)))
    if op in ("segment_sum", "segment_mean") and num_segments <= 128:
        formulations.append(("one-hot matmul", functools.partial(_one_hot_matmul, op, num_segments)))
    yield from formulations
    if dtype == "bfloat16" and op != "segment_argmax":
        yield from ((f"{name}, in float32", _in_float32(function)) for name, function in formulations)


def _in_float32(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    return lambda data, ids: function(data.astype(jnp.float32), ids).astype(data.dtype)


def _sort_first(op: str, num_segments: int, data: jax.Array, ids: jax.Array) -> jax.Array:
    order = jnp.argsort(ids)
    rows = data.at[order].get(unique_indices=True, mode="promise_in_bounds")
    result = examples_of(op)[0].plain_jax(rows, ids[order], num_segments, indices_are_sorted=True)
    if op == "segment_softmax":
        return jnp.zeros_like(result).at[order].set(result, unique_indices=True, mode="promise_in_bounds")
    if op == "segment_argmax":
        return jnp.append(order, data.shape[0])[result]
    return result


def _one_hot_matmul(op: str, num_segments: int, data: jax.Array, ids: jax.Array) -> jax.Array:
    one_hot = (ids == jnp.arange(num_segments)[:, None]).astype(data.dtype)
    total = jnp.matmul(one_hot, data, precision="highest", preferred_element_type=jnp.float32)
    if op == "segment_mean":
        total = total / jnp.maximum(jnp.sum(one_hot, axis=1, dtype=jnp.float32), 1)[:, None]
    return total.astype(data.dtype)


def torch_formulations(
    op: str, ids: Any, num_segments: int, dtype: str, is_sorted: bool
) -> Iterator[tuple[str, str, Callable[[Any], Any]]]:
    """Ways to write the op with torch and torch_scatter: library, name, function of the rows."""
    kind = op.removeprefix("segment_")
    torch_name = {"max": "amax", "min": "amin"}.get(kind, kind)
    offsets = None
    if is_sorted:
        counts = torch.bincount(ids, minlength=num_segments)
        offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))

    def full(rows: Any, value: float, dtype: Any = None) -> Any:
        return torch.full((num_segments, *rows.shape[1:]), value, dtype=dtype or rows.dtype, device=rows.device)

    def scatter_reduce(rows: Any, reduction: str = torch_name) -> Any:
        initial = {"amax": -math.inf, "amin": math.inf, "prod": 1}.get(reduction, 0)
        index = ids[:, None].expand_as(rows)
        return full(rows, initial).scatter_reduce(0, index, rows, reduction, include_self=reduction != "mean")

    def index_add(rows: Any) -> Any:
        return full(rows, 0).index_add(0, ids, rows)

    def segment_reduce(rows: Any) -> Any:
        initial = {"max": -math.inf, "min": math.inf, "prod": 1}.get(kind, 0)
        return torch.segment_reduce(rows, kind, offsets=offsets, axis=0, initial=initial, unsafe=True)

    def argmax(rows: Any) -> Any:
        row = torch.arange(len(rows), dtype=torch.int32, device=rows.device)[:, None]
        row = torch.where(rows == scatter_reduce(rows, "amax")[ids], row, len(rows))
        index = ids[:, None].expand_as(row)
        return full(rows, len(rows), torch.int32).scatter_reduce(0, index, row, "amin")

    def softmax(rows: Any) -> Any:
        exponentials = torch.exp(rows - scatter_reduce(rows.detach(), "amax")[ids])
        return exponentials / index_add(exponentials)[ids]

    def csr_softmax(rows: Any) -> Any:
        maxima = torch_scatter.segment_csr(rows.detach(), offsets, reduce="max")
        exponentials = torch.exp(rows - torch_scatter.gather_csr(maxima, offsets))
        total = torch_scatter.segment_csr(exponentials, offsets, reduce="sum")
        return exponentials / torch_scatter.gather_csr(total, offsets)

    if op == "segment_softmax":
        yield "torch", "scatter_reduce, index_add", softmax
    elif op == "segment_argmax":
        yield "torch", "two scatter_reduce", argmax
    else:
        yield "torch", "scatter_reduce", scatter_reduce
        if op == "segment_sum":
            yield "torch", "index_add", index_add
            if dtype == "bfloat16":
                yield "torch", "index_add, in float32", lambda rows: index_add(rows.float()).to(rows.dtype)
        if is_sorted:
            yield "torch", "segment_reduce", segment_reduce

    if torch_scatter is None:
        return
    if op == "segment_softmax":
        yield "torch_scatter", "scatter_softmax", lambda rows: torch_scatter.scatter_softmax(rows, ids, 0, num_segments)
        if is_sorted:
            yield "torch_scatter", "segment_csr, gather_csr", csr_softmax
        return
    pick = {"segment_max": 0, "segment_min": 0, "segment_argmax": 1}.get(op)
    name = {"argmax": "max", "prod": "mul"}.get(kind, kind)

    def scatter(rows: Any) -> Any:
        result = getattr(torch_scatter, f"scatter_{name}")(rows, ids, 0, None, num_segments)
        return result if pick is None else result[pick]

    def segment_csr(rows: Any) -> Any:
        result = getattr(torch_scatter, f"segment_{name}_csr")(rows, offsets)
        return result if pick is None else result[pick]

    yield "torch_scatter", f"scatter_{name}", scatter
    if is_sorted and name != "mul":
        yield "torch_scatter", "segment_csr", segment_csr


def short_count(count: int) -> str:
    """1,166,243 as 1.17M."""
    for unit, letter in ((1_000_000, "M"), (1_000, "k")):
        if count >= unit:
            return f"{count / unit:.3g}{letter}"
    return str(count)
