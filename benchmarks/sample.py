"""A random sample of calls of every public function, at sizes that nobody has tuned for."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.timing import on_device
from jax_baracuda._examples import all_examples
from jax_baracuda._examples.example import Example, Sizes, distinct_slots, normal
from jax_baracuda._examples.segment import IDS, SORTED_IDS, with_ties

MIN_ROWS, MAX_ROWS = 10**3, 10**8
WIDTHS = (1, 2, 3, 4, 7, 8, 16, 32, 33, 64, 100, 128, 300, 1000)
SEGMENTS_PER_ROW = (0, 1e-3, 1e-2, 1 / 7, 1, 10)
"""0: two segments."""
POWER = 2.5
"""Ids of a power law are floor(S * u^POWER)."""
CHOICES = {"tap": (2, 3, 4, 8), "new": (1, 16, 64), "feature1": (16,)}
MIN_SCALED_SIZE = 16
MAX_HALVINGS = 5
MAX_BYTES = {"cpu": 2**24, "cuda": 2**30}
"""The maximum size of the largest operand."""
MAX_CONTENDED_ROWS = 10_000
SECONDS_OF_A_CONTENDED_ROW = 1e-5
"""On GPUs, XLA adds 16-bit numbers by compare-and-swap loops, and sums of a softmax are as slow in any dtype. Per row
of the largest segment, a call took 5 microseconds for 1,400 rows of 33 features, 12 for 11,000 of 128, and 36 for
36,000 of 64. Attention over 150,000 edges of one segment took minutes for 200 steps, and so did the gradient of a
variance of 4,000,000 rows."""
CONTENDED_IN_ANY_DTYPE = (
    "segment_var",
    "segment_std",
    "segment_softmax",
    "segment_logsumexp",
    "segment_attention",
    "graph_dot_product_attention",
    "graph_additive_attention",
)


def power_law_ids(rng: np.random.Generator, shape: tuple[int, ...], sizes: Sizes) -> np.ndarray:
    return np.floor(sizes["segment"] * rng.random(shape) ** POWER)


def sorted_power_law_ids(rng: np.random.Generator, shape: tuple[int, ...], sizes: Sizes) -> np.ndarray:
    return np.sort(power_law_ids(rng, shape, sizes), axis=-1)


POWER_LAW = {IDS.draw: power_law_ids, SORTED_IDS.draw: sorted_power_law_ids}
UNTIED = {with_ties: normal}
"""Replaces tied features: in practice, features hardly ever tie, and ties slow down the gradients of maxima."""


@dataclasses.dataclass(frozen=True)
class Case:
    """An example call with drawn sizes."""

    example: Example
    dtype: str
    ids: str
    """The distribution of ids; "" if there are none."""
    contended_rows: int
    """The rows of the largest segment if XLA adds them one by one, else 0."""

    @property
    def contended_seconds(self) -> float:
        """The approximate time of a call in plain JAX; wide rows take several times as long."""
        return self.contended_rows * SECONDS_OF_A_CONTENDED_ROW

    def sizes_text(self, platform: str) -> str:
        """Sizes and distribution."""
        sizes = self.example.sizes[platform].items()
        text = " ".join(f"{name}={size:,}" for name, size in sizes if name in self.example.dims)
        return ", ".join(filter(None, (text, self.ids)))


def add_functions_option(parser: argparse.ArgumentParser, help_text: str) -> None:
    """``--functions``: names of public functions that may be sampled."""
    names = sorted({example.function.__name__ for example in all_examples()})
    parser.add_argument("--functions", nargs="+", default=(), choices=names, metavar="FUNCTION", help=help_text)


def draw(platform: str, num_cases: int, seed: int, functions: Sequence[str] = ()) -> Iterator[Case]:
    """Cases in random order: every example call and dtype as often as any other.

    Args:
      functions: the names of functions to sample. Empty: all of them.
    """
    rng = np.random.default_rng(seed)
    calls = [
        (example, dtype)
        for example in all_examples()
        if platform in example.sizes or "row" in example.dims
        if not functions or example.function.__name__ in functions
        for dtype in example.dtypes
    ]
    order = itertools.chain.from_iterable(rng.permutation(len(calls)) for _ in itertools.count())
    for i in itertools.islice(order, num_cases if calls else 0):
        example, dtype = calls[i]
        sizes, is_power_law = draw_sizes(rng, example, platform), rng.random() < 0.5
        has_ids = any(operand.draw in POWER_LAW for operand in example.operands.values())
        replaced = UNTIED | (POWER_LAW if is_power_law else {})
        operands = {
            name: dataclasses.replace(operand, draw=replaced.get(operand.draw, operand.draw))
            for name, operand in example.operands.items()
        }
        is_contended = platform == "cuda" and adds_one_by_one(example, dtype)
        if is_contended:
            sizes = less_contended(sizes, is_power_law)
        drawn = dataclasses.replace(example, operands=operands, sizes={platform: sizes})
        ids = ("power law" if is_power_law else "uniform") if has_ids else ""
        yield Case(drawn, dtype, ids, rows_of_largest_segment(sizes, is_power_law) if is_contended else 0)


def adds_one_by_one(example: Example, dtype: str) -> bool:
    """Whether plain JAX adds rows one by one on GPUs: see SECONDS_OF_A_CONTENDED_ROW."""
    is_contended = example.function.__name__.startswith(CONTENDED_IN_ANY_DTYPE)
    return "row" in example.dims and (is_contended or np.dtype(dtype).itemsize == 2)


def rows_of_largest_segment(sizes: Mapping[str, int], is_power_law: bool) -> int:
    """The approximate number of rows of the largest segment."""
    return round(sizes["row"] / sizes["segment"] ** (1 / POWER if is_power_law else 1))


def less_contended(sizes: dict[str, int], is_power_law: bool) -> dict[str, int]:
    """Halves rows and segments (to at least two) until no segment has too many rows."""
    while rows_of_largest_segment(sizes, is_power_law) > MAX_CONTENDED_ROWS:
        halved = {name: max(sizes[name] // 2, 2) for name in ("row", "segment", "node")}
        sizes = sizes | halved
    return sizes


def draw_sizes(rng: np.random.Generator, example: Example, platform: str) -> dict[str, int]:
    draw = sizes_of_rows if "row" in example.dims else scaled_sizes
    sizes = shrunk(example, draw(rng, example, platform), platform)
    heads = [size for name, size in sizes.items() if name in ("head", "q_head", "k_head")]
    if sizes.get("sequence") in heads:
        sizes["sequence"] //= 2  # with equal sizes, rope would require a layout
    if "new" in example.dims:
        sizes["new"] = min(sizes["new"], sizes["time"])
    for operand in example.operands.values():
        if operand.draw is distinct_slots:
            sizes["slot"] = max(sizes["slot"], sizes[operand.dims[-1]])
    return sizes


def sizes_of_rows(rng: np.random.Generator, example: Example, platform: str) -> dict[str, int]:
    """Sizes for reductions of rows."""
    rows = round(math.exp(rng.uniform(math.log(MIN_ROWS), math.log(MAX_ROWS))))
    segments = max(round(rows * rng.choice(SEGMENTS_PER_ROW)), 2)
    width = int(rng.choice([1, 4, 8])) if "feature1" in example.dims else int(rng.choice(WIDTHS))
    return {"row": rows, "segment": segments, "node": max(segments, 2), "feature": width} | drawn_choices(rng, example)


def scaled_sizes(rng: np.random.Generator, example: Example, platform: str) -> dict[str, int]:
    """The example's own sizes, some of them halved a few times, and some made odd."""
    sizes = dict(example.sizes[platform])
    for name, size in sizes.items():
        if size >= MIN_SCALED_SIZE and name not in CHOICES:
            halved = max(size >> int(rng.integers(MAX_HALVINGS + 1)), MIN_SCALED_SIZE)
            is_odd = name not in ("feature", "q_head", "k_head", "head") and rng.random() < 0.25
            sizes[name] = halved - 1 if is_odd else halved
    sizes |= drawn_choices(rng, example)
    if "state" in example.dims:
        sizes["state"] = sizes["tap"] - 1
    if "entry" in example.dims:
        sizes["entry"] = max(sizes["entry"], sizes["tap"] - 1)
    return sizes


def drawn_choices(rng: np.random.Generator, example: Example) -> dict[str, int]:
    return {name: int(rng.choice(sizes)) for name, sizes in CHOICES.items() if name in example.dims}


def shrunk(example: Example, sizes: dict[str, int], platform: str) -> dict[str, int]:
    """Halves the largest dimension until the largest operand, as float32, fits."""
    while largest_elements(example, sizes) * 4 > MAX_BYTES[platform]:
        scalable = {name: size for name, size in sizes.items() if name in example.dims and name not in CHOICES}
        name = max(scalable, key=lambda name: scalable[name])
        sizes = {**sizes, name: sizes[name] // 2}
    return sizes


def largest_elements(example: Example, sizes: Mapping[str, int]) -> int:
    front = () if example.mapped is None else (example.mapped,)
    shapes: list[tuple[str, ...]] = [operand.dims for operand in example.operands.values()]
    if "row" in example.dims:
        shapes.append(("segment" if "num_segments" in example.options else "row", "feature"))  # of the result
    return max(math.prod(sizes[dim] for dim in (*front, *dims) if not dim.startswith("1")) for dims in shapes)


def types_of(case: Case, platform: str, device: jax.Device) -> tuple[Any, Any]:
    """The types of the operands of an example's call, and of the cotangents of its results."""
    operands = case.example.operand_types(case.dtype, platform)
    cotangents = jax.eval_shape(case.example.call(platform), **operands)
    return jax.tree.map(functools.partial(on_device, device), (operands, cotangents))


def operands_of(case: Case, types: tuple[Any, Any], platform: str, device: jax.Device) -> tuple[Any, Any]:
    """Operands and cotangents of these types, made on the host, so that nothing is compiled for them."""
    operands = case.example.make_operands(np.random.default_rng(0), case.dtype, platform)
    cotangents = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), types[1])
    return jax.device_put((operands, cotangents), device)
