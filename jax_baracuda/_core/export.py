"""What ``jax.export`` must be told of the ops."""

from __future__ import annotations

from collections.abc import Iterable

import jax.export

from jax_baracuda._core.native import target_name


def disabled_checks(ops: Iterable[str]) -> tuple[jax.export.DisabledSafetyCheck, ...]:
    """One for the native target of each op.

    JAX exports no custom call that its caller does not vouch for: only some of XLA's own keep their meaning in later
    versions.
    """
    return tuple(jax.export.DisabledSafetyCheck.custom_call(target_name(op)) for op in ops)
