"""Rules: where plain JAX, or a program of several kernels, is faster than an op's kernel.

A rule is a physical reason and the conditions under which it holds; the comment beside it gives the measurement.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

KB, MB, GB = 1 << 10, 1 << 20, 1 << 30


@dataclasses.dataclass(frozen=True)
class Site:
    """Where a call stands in a program."""

    platform: str
    fuses: bool = False
    """Whether XLA can fuse the first operand, or one of the largest, with plain JAX."""
    donated: tuple[int, ...] = ()
    """The operands that are donated arguments of the program and may be written in place."""
    is_split: bool = False
    """Whether JAX's partitioner splits the call over devices."""
    misreads: bool = False
    """Whether this XLA might miscompile plain JAX, because a window may be computed from the array it overwrites."""
    shares_sort: bool = False
    """Whether the kernel would sort its ids, in a program whose calls are likely to share one sort."""
    loses_empty_calls: bool = False
    """Whether the call has an empty array inside ``shard_map``: XLA drops such custom calls."""


class Traits(NamedTuple):
    """The properties of a call that conditions test."""

    params: Mapping[str, Any]
    measures: Mapping[str, int]
    """See :attr:`.call.OpCall.measures`."""
    site: Site


Condition = Callable[[Traits], bool]


@dataclasses.dataclass(frozen=True)
class Rule:
    """On this platform, plain JAX or a program of several kernels is faster than the kernel if all conditions hold."""

    platform: str
    reason: str
    conditions: tuple[Condition, ...]


def on_cpu(reason: str, *conditions: Condition) -> Rule:
    return Rule("cpu", reason, conditions)


def on_gpu(reason: str, *conditions: Condition) -> Rule:
    return Rule("cuda", reason, conditions)


def fused(traits: Traits) -> bool:
    """XLA fuses the computation of an operand. For a kernel, the operand must first be written to memory."""
    return traits.site.fuses


def shares_sort(traits: Traits) -> bool:
    """Other calls of the program are likely to sort the same ids. See :attr:`Site.shares_sort`."""
    return traits.site.shares_sort


def unordered(traits: Traits) -> bool:
    """The call promises no order of additions. XLA's atomic additions have none."""
    return not any(traits.params.get(name) for name in ("deterministic", "indices_are_sorted", "has_plan"))


def unsorted(traits: Traits) -> bool:
    return not traits.params.get("indices_are_sorted")


MAX_ROWS_OF_AN_UNCONTENDED_SEGMENT = 2048


def uncontended(traits: Traits) -> bool:
    """There are enough segments that XLA's atomic operations on a cell seldom wait for each other."""
    measures = traits.measures
    return measures["rows"] <= MAX_ROWS_OF_AN_UNCONTENDED_SEGMENT * measures["batch"] * measures["segment"]


def mostly_empty_segments(traits: Traits) -> bool:
    return traits.measures["rows"] <= traits.measures["batch"] * traits.measures["segment"]


def few_numbers(traits: Traits) -> bool:
    """All rows, or those that edges gather, have at most 4M numbers, which GPUs reduce faster than they sort ids."""
    return traits.measures["rows"] * traits.measures["features"] <= 1 << 22


def single_feature(traits: Traits) -> bool:
    """Rows are single numbers. Kernels for CPUs vectorise along rows."""
    return traits.measures["features"] == 1


def param(name: str, value: Any) -> Condition:
    """A param of the op has this value."""
    return lambda traits: traits.params.get(name) == value


def at_most(**measures: int) -> Condition:
    """The call's measures are at most these. Names are from :attr:`.call.OpCall.measures`."""
    return lambda traits: all(traits.measures[name] <= maximum for name, maximum in measures.items())


def at_least(**measures: int) -> Condition:
    return lambda traits: all(traits.measures[name] >= minimum for name, minimum in measures.items())


launch_bound = at_most(bytes=4 * MB)
"""On GPUs, a launch takes longer than the work on so few bytes."""
call_bound = at_most(bytes=MB)
"""On CPUs, calling a kernel takes longer than the work on so few bytes."""
SHORT_COPY = on_cpu("calling a kernel takes longer than the copy", at_most(bytes=16 * KB))
in_cache = at_most(bytes=64 * MB)
"""All operands and results fit in the L2 cache of a GPU. This is the measured limit on an H100 and an H200."""
at_most_4_features = at_most(features=4)
"""Rows have so few numbers that kernels leave lanes of GPUs idle, and most of a vector of CPUs."""
at_most_16_features = at_most(features=16)
"""Rows have at most one vector of a CPU, and leave half of the lanes of a warp idle."""
at_most_64_features = at_most(features=64)
"""XLA adds the numbers of such rows in less time than a sort of the ids takes."""
