"""Which implementation serves a call of an op: its kernel, or plain JAX that XLA compiles.

:func:`decide` alone makes that choice, when a program is lowered for a platform. If the caller asks for neither, the
rules of the op say where plain JAX is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from jax_baracuda._core.call import OpCall
from jax_baracuda._core.functions import keyword_names
from jax_baracuda._core.op import Op
from jax_baracuda._core.rules import Rule, Site, Traits
from jax_baracuda._core.selection import KERNEL_IF_ANY, Implementation


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
    is_deterministic = site.platform == "cuda" and call.params.get("deterministic") and adds_up(call.op)
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
    if call.selection != KERNEL_IF_ANY and (rule := _first_that_holds((*call.op.xla_rules, *rules), call, site)):
        return Decision("xla", rule.reason)
    return Decision("kernel", "expected to be faster")


def _first_that_holds(rules: Iterable[Rule], call: OpCall, site: Site) -> Rule | None:
    for rule in rules:
        if rule.platform == site.platform:
            traits = Traits(call.params, call.measures, site)
            if all(condition(traits) for condition in rule.conditions):
                return rule
    return None


def adds_up(op: Op) -> bool:
    """Whether the op's guarantee depends on the param `deterministic`. Gradients that gather only pass the param on."""
    return callable(op.guarantee) and "deterministic" in (keyword_names(op.guarantee) or ())


def alternative_of(call: OpCall, site: Site) -> Callable[..., Any] | None:
    """The program of several kernels that serves in place of the kernel; None if the kernel does."""
    rule = _first_that_holds(call.op.alternatives, call, site)
    return None if rule is None else call.op.alternatives[rule]


def missing_kernel(call: OpCall, platforms: Sequence[str], reason: str) -> ValueError:
    """The error for a call that asks for a missing kernel."""
    return ValueError(
        f"{call.name}: implementation='kernel' is asked for, but there is no kernel for this call of dtype "
        f"{call.dtype.name} on {' and '.join(platforms)}: {reason}"
    )
