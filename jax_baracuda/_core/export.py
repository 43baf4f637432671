"""The safety checks of ``jax.export`` that a program with ops must disable."""

from __future__ import annotations

from collections.abc import Iterable

import jax.export

from jax_baracuda._core.native import target_name


def disabled_checks(ops: Iterable[str]) -> tuple[jax.export.DisabledSafetyCheck, ...]:
    """The check of each op's native target.

    By default, JAX exports only custom calls that keep their meaning in later versions: some of XLA's own.
    """
    return tuple(jax.export.DisabledSafetyCheck.custom_call(target_name(op)) for op in ops)
