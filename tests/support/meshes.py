"""The mesh of the tests on several devices, and the arrays that a program exchanges over it."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

MESH_SHAPE = {1: (1, 1), 2: (2, 1), 4: (2, 2), 8: (4, 2)}[1 << min(len(jax.devices()), 8).bit_length() - 1]
"""The shape of a mesh of two axes: 8 simulated devices on CPUs, the available devices on GPUs."""


def make_mesh(axis_type: AxisType = AxisType.Auto, names: tuple[str, str] = ("x", "y")) -> Mesh:
    return jax.make_mesh(MESH_SHAPE, names, axis_types=(axis_type,) * 2)


COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


_BITS = {"pred": 8, "bf16": 16} | {f"{kind}{bits}": bits for kind in "sufc" for bits in (8, 16, 32, 64, 128)}


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One array that a collective of a compiled program exchanges."""

    collective: str
    dtype: str
    size: int
    """Elements per device after the collective; for a reduce-scatter, before it."""

    @property
    def bytes(self) -> int:
        return self.size * _BITS[self.dtype] // 8

    @property
    def traffic(self) -> int:
        """Approximate bytes that each device receives. An all-reduce is a reduce-scatter and an all-gather."""
        return self.bytes * (2 if self.collective == "all-reduce" else 1)


def exchanges(function: Callable[..., object], *operands: Any, **of_jit: Any) -> list[Exchange]:
    """The arrays that the compiled program exchanges. Keyword arguments are passed to ``jax.jit``."""
    return exchanges_in(jax.jit(function, **of_jit).lower(*operands).compile().as_text())


def exchanges_in(text: str) -> list[Exchange]:
    """The arrays that a compiled program exchanges, from the program's text."""
    found = []
    of_collectives = rf"= (\S+|\(.*?\)) ({'|'.join(COLLECTIVES)})(-start)?\(.*"
    for match in re.finditer(of_collectives, text):
        results, collective, starts = match.groups()
        arrays = [
            (dtype, math.prod(int(size) for size in shape.split(",") if size))
            for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", results)
        ]
        if starts and collective != "all-reduce":  # the tuple lists operands before results
            arrays = [x for x in arrays if x != ("u32", 1)]
            arrays = arrays[len(arrays) // 2 :]
        if collective == "all-to-all" and len(set(arrays)) == 1:  # lists the parts of one array
            arrays = [(arrays[0][0], len(arrays) * arrays[0][1])]
        group = 1
        if collective == "reduce-scatter":
            of_group = re.search(r"replica_groups=(?:\{\{([\d,]+)\}|\[\d+,(\d+)\])", match[0])
            listed, counted = of_group.groups() if of_group else (None, jax.device_count())  # none: all devices
            group = int(counted) if counted else len(listed.split(","))
        found += [Exchange(collective, dtype, size * group) for dtype, size in arrays]
    return found


def collectives(function: Callable[..., object], *operands: Any) -> dict[str, int]:
    """How often each collective occurs in the compiled program."""
    text = jax.jit(function).lower(*operands).compile().as_text()
    return {
        name: len(re.findall(rf"= \S+ {name}(?:-start)?\(|= \(.*\) {name}(?:-start)?\(", text)) for name in COLLECTIVES
    }
