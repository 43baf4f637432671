"""The segment reductions, over shapes of graphs, particles and recommenders."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_baracuda
from benchmarks.harness import Case, Contender, jax_contender

try:
    import torch
except ImportError:
    torch = None
try:
    import torch_scatter
except ImportError:
    torch_scatter = None


@dataclasses.dataclass(frozen=True)
class Shape:
    name: str
    num_rows: int
    num_features: int
    num_segments: int
    dtypes: tuple[str, ...]
    distributions: tuple[str, ...] = ("uniform",)
    with_gradient: bool = True


GPU_SHAPES = (
    Shape("arxiv", 1_166_243, 128, 169_343, ("float32", "bfloat16"), ("uniform", "power law")),
    Shape("products", 61_859_140, 32, 2_449_029, ("float32",), ("power law",)),
    Shape("scalars", 100_000_000, 1, 1_000_000, ("float32",), with_gradient=False),
    Shape("few segments", 16_000_000, 16, 64, ("float32",)),
    Shape("hot row", 7_770_000, 128, 169_343, ("float32",), ("half in one",)),
)
CPU_SHAPES = (
    Shape("292k x 128", 292_000, 128, 42_000, ("float32", "bfloat16"), ("uniform", "power law")),
    Shape("scalars", 5_000_000, 1, 50_000, ("float32",)),
    Shape("few segments", 1_000_000, 16, 64, ("float32",)),
)


def cases() -> Iterator[Case]:
    """All cases for the default device, made one at a time."""
    for shape in GPU_SHAPES if jax.default_backend() == "gpu" else CPU_SHAPES:
        for distribution in shape.distributions:
            for dtype in shape.dtypes:
                yield from _cases(shape, distribution, dtype)


def make_ids(shape: Shape, distribution: str, rng: np.random.Generator) -> np.ndarray:
    """Segment ids; "power law" gives segment k about 1 / (k + 1) ** 0.8 of the rows, in shuffled order of k."""
    if distribution == "uniform":
        return rng.integers(0, shape.num_segments, shape.num_rows, dtype=np.int32)
    if distribution == "half in one":
        ids = rng.integers(0, shape.num_segments, shape.num_rows, dtype=np.int32)
        return np.where(rng.random(shape.num_rows) < 0.5, np.int32(shape.num_segments // 3), ids)
    cumulative = np.cumsum(1.0 / np.arange(1, shape.num_segments + 1) ** 0.8)
    rank = np.searchsorted(cumulative, rng.random(shape.num_rows) * cumulative[-1])
    return rng.permutation(shape.num_segments).astype(np.int32)[np.minimum(rank, shape.num_segments - 1)]


def _cases(shape: Shape, distribution: str, dtype: str) -> Iterator[Case]:
    rng = np.random.default_rng(0)
    unsorted_ids = make_ids(shape, distribution, rng)
    key = jax.random.key(0)
    data = jax.jit(lambda key: jax.random.normal(key, (shape.num_rows, shape.num_features), dtype))(key)
    cotangent = jax.jit(lambda key: jax.random.normal(key, (shape.num_segments, shape.num_features), dtype))(key)
    for order in ("unsorted", "sorted"):
        ids = jnp.asarray(np.sort(unsorted_ids) if order == "sorted" else unsorted_ids)
        name = f"{shape.name} {distribution} {order} {dtype}"
        forward_bytes = data.nbytes + ids.nbytes + cotangent.nbytes
        backward_bytes = 2 * data.nbytes + ids.nbytes + 2 * cotangent.nbytes
        contenders = [*_jax_contenders(data, ids, None, order == "sorted"), *_torch_contenders(data, ids, None, order)]
        yield Case("segment_max", name, "forward", forward_bytes, contenders)
        if shape.with_gradient:
            contenders = [
                *_jax_contenders(data, ids, cotangent, order == "sorted"),
                *_torch_contenders(data, ids, cotangent, order),
            ]
            yield Case("segment_max", name, "forward + gradient", forward_bytes + backward_bytes, contenders)


def _jax_contenders(
    data: jax.Array, ids: jax.Array, cotangent: jax.Array | None, is_sorted: bool
) -> Iterator[Contender]:
    num_segments = None if cotangent is None else cotangent.shape[0]
    num_segments = num_segments or int(ids.max()) + 1
    for library, function in (("jax_baracuda", jax_baracuda.segment_max), ("XLA", jax.ops.segment_max)):
        yield jax_contender(library, *_jax_call(function, data, ids, cotangent, num_segments, is_sorted))


def _jax_call(
    function: Callable[..., jax.Array],
    data: jax.Array,
    ids: jax.Array,
    cotangent: jax.Array | None,
    num_segments: int,
    is_sorted: bool,
) -> tuple[Any, ...]:
    def forward(data: jax.Array, ids: jax.Array) -> jax.Array:
        return function(data, ids, num_segments, indices_are_sorted=is_sorted)

    def forward_and_gradient(data: jax.Array, ids: jax.Array, cotangent: jax.Array) -> Any:
        output, vjp = jax.vjp(lambda data: forward(data, ids), data)
        return output, vjp(cotangent)

    return (forward, data, ids) if cotangent is None else (forward_and_gradient, data, ids, cotangent)


def _torch_contenders(data: jax.Array, ids: jax.Array, cotangent: jax.Array | None, order: str) -> Iterator[Contender]:
    if torch is None or jax.default_backend() != "gpu":
        return
    rows, row_ids = torch.from_dlpack(data), torch.from_dlpack(ids).long()
    num_segments = int(row_ids.max()) + 1 if cotangent is None else cotangent.shape[0]
    index = row_ids[:, None].expand_as(rows)

    def scatter_reduce(rows: Any) -> Any:
        output = torch.full((num_segments, rows.shape[1]), -float("inf"), dtype=rows.dtype, device=rows.device)
        return output.scatter_reduce(0, index, rows, "amax")

    functions = {"torch": scatter_reduce}
    if torch_scatter is not None:
        functions["torch_scatter"] = lambda rows: torch_scatter.scatter_max(rows, row_ids, 0, None, num_segments)[0]
        if order == "sorted":
            counts = torch.bincount(row_ids, minlength=num_segments)
            offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
            functions["torch_scatter csr"] = lambda rows: torch_scatter.segment_csr(rows, offsets, reduce="max")
    for library, function in functions.items():
        yield _torch_contender(library, function, rows, None if cotangent is None else torch.from_dlpack(cotangent))


def _torch_contender(library: str, function: Callable[[Any], Any], rows: Any, cotangent: Any) -> Contender:
    def forward() -> Any:
        with torch.no_grad():
            return function(rows)

    leaf = rows.detach().requires_grad_() if cotangent is not None else None

    def forward_and_gradient() -> Any:
        output = function(leaf)
        return output, torch.autograd.grad(output, leaf, cotangent)

    call = forward if cotangent is None else forward_and_gradient
    return Contender(library, call, lambda _: torch.cuda.synchronize())
