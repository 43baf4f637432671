"""Which implementation serves a call of an op: its kernel, or plain JAX that XLA compiles.

:func:`decide` alone makes that choice, when a program is lowered for a platform. If the caller asks for neither, the
rules of the op say where plain JAX is faster. A rule is a physical reason and the conditions under which it holds; the
comment beside it gives the measurement.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jax_baracuda._core.call import OpCall
from jax_baracuda._core.functions import keyword_names
from jax_baracuda._core.selection import KERNEL_IF_ANY, Implementation

if TYPE_CHECKING:
    from jax_baracuda._core.op import Op

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


class Decision(NamedTuple):
    """The implementation that serves a call, and why."""

    implementation: Implementation
    reason: str


def decide(call: OpCall, site: Site, rules: Sequence[Rule] = ()) -> Decision:
    """Chooses the implementation of a call at a place in a program.

    Args:
      rules: where plain JAX is faster besides the rules of the op, for example because the call needs more than the op.

    Raises:
      ValueError: a kernel is asked for, and there is none. Or plain JAX and ``deterministic=True`` are asked for on a
        GPU, where XLA adds up rows in an order that varies from run to run.
    """
    is_deterministic = site.platform == "cuda" and call.params.get("deterministic") and _adds_up(call.op)
    if call.selection == "xla":
        if is_deterministic:
            raise ValueError(
                f"{call.name}: implementation='xla' is asked for and deterministic=True, but XLA adds up rows in an "
                "order that varies from run to run; leave one of the two out"
            )
        return Decision("xla", "asked for")
    problem = call.unsupported_reason(site.platform)
    if problem is not None and call.selection == "kernel":
        raise missing_kernel(call, [site.platform], problem)
    if problem is not None:
        return Decision("xla", problem)
    if site.loses_empty_calls:
        return Decision("xla", "XLA loses custom calls of empty arrays in shard_map")
    if call.selection == "kernel":
        return Decision("kernel", "asked for")
    if site.donated:
        return Decision("kernel", "it writes a donated argument in place, where plain JAX might need another array")
    if site.misreads:
        return Decision("kernel", "XLA might read a window after it has overwritten it")
    if is_deterministic:
        return Decision("kernel", "deterministic=True is asked for")
    if call.selection != KERNEL_IF_ANY:
        for rule in (*call.op.xla_rules, *rules):
            if rule.holds_for(call, site):
                return Decision("xla", rule.reason)
    return Decision("kernel", "expected to be faster")


def _adds_up(op: Op) -> bool:
    """Whether the op's guarantee depends on the param `deterministic`. Gradients that gather only pass the param on."""
    return callable(op.guarantee) and "deterministic" in (keyword_names(op.guarantee) or ())


def alternative_of(call: OpCall, site: Site) -> Callable[..., Any] | None:
    """The program of several kernels that serves in place of the kernel; None if the kernel does."""
    return next((program for rule, program in call.op.alternatives.items() if rule.holds_for(call, site)), None)


def missing_kernel(call: OpCall, platforms: Sequence[str], reason: str) -> ValueError:
    """The error for a call that asks for a missing kernel."""
    return ValueError(
        f"{call.name}: implementation='kernel' is asked for, but there is no kernel for this call of dtype "
        f"{call.dtype.name} on {' and '.join(platforms)}: {reason}"
    )


# ----------------------------------------------------------------------------------------------------------------------
# Rules.


class Traits(NamedTuple):
    """The properties of a call that conditions test."""

    params: Mapping[str, Any]
    measures: Mapping[str, int]
    """See :attr:`OpCall.measures`."""
    site: Site


Condition = Callable[[Traits], bool]


@dataclasses.dataclass(frozen=True)
class Rule:
    """On this platform, plain JAX or a program of several kernels is faster than the kernel if all conditions hold."""

    platform: str
    reason: str
    conditions: tuple[Condition, ...]

    def holds_for(self, call: OpCall, site: Site) -> bool:
        if self.platform != site.platform:
            return False
        return all(condition(Traits(call.params, call.measures, site)) for condition in self.conditions)


def on_cpu(reason: str, *conditions: Condition) -> Rule:
    return Rule("cpu", reason, conditions)


def on_gpu(reason: str, *conditions: Condition) -> Rule:
    return Rule("cuda", reason, conditions)


def fused(traits: Traits) -> bool:
    """XLA fuses the computation of an operand. For a kernel, the operand must first be written to memory."""
    return traits.site.fuses


def in_memory(traits: Traits) -> bool:
    """XLA has written the operands."""
    return not traits.site.fuses


def shares_sort(traits: Traits) -> bool:
    """Other calls of the program are likely to sort the same ids. See :attr:`Site.shares_sort`."""
    return traits.site.shares_sort


def unordered(traits: Traits) -> bool:
    """The call promises no order of additions. XLA's atomic additions have none."""
    return not any(traits.params.get(name) for name in ("deterministic", "indices_are_sorted", "has_plan"))


def unsorted(traits: Traits) -> bool:
    return not traits.params.get("indices_are_sorted")


MAX_ROWS_OF_AN_UNCONTENDED_SEGMENT = 1024


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
    """The call's measures are at most these. Names are from :attr:`OpCall.measures`."""
    return lambda traits: all(traits.measures[name] <= maximum for name, maximum in measures.items())


def at_least(**measures: int) -> Condition:
    return lambda traits: all(traits.measures[name] >= minimum for name, minimum in measures.items())


launch_bound = at_most(bytes=4 * MB)
"""On GPUs, a launch takes longer than the work on so few bytes."""
call_bound = at_most(bytes=MB)
"""On CPUs, calling a kernel takes longer than the work on so few bytes."""
in_cache = at_most(bytes=64 * MB)
"""All operands and results fit in the L2 cache of a GPU. This is the measured limit on an H100 and an H200."""
at_most_4_features = at_most(features=4)
"""Rows have so few numbers that kernels for GPUs leave lanes idle."""
at_most_16_features = at_most(features=16)
"""Rows have at most one vector of a CPU, and leave half of the lanes of a warp idle."""
at_most_64_features = at_most(features=64)
"""XLA adds the numbers of such rows in less time than a sort of the ids takes."""
