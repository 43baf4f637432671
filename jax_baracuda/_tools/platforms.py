"""The devices that the tools run on."""

from __future__ import annotations

import os
from pathlib import Path

import jax

import jax_baracuda
from jax_baracuda._core.native import KERNEL_PLATFORMS, missing_target


class BackendError(RuntimeError):
    """There is no device for a tool, or there are no kernels for the device."""


def default_devices() -> list[jax.Device]:
    """The devices that JAX uses by default.

    Raises:
      BackendError: JAX cannot start a backend.
    """
    try:
        return jax.devices()
    except Exception as error:  # RuntimeError, AssertionError of a plug-in without a device, or a plug-in's own
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        platforms = os.environ.get("JAX_PLATFORMS")
        asked = "JAX_PLATFORMS is not set" if platforms is None else f"JAX_PLATFORMS is {platforms!r}"
        raise BackendError(f"JAX cannot start a backend ({asked}): {reason}") from error


def devices_by_platform() -> dict[str, jax.Device]:
    """The first device of each platform here that has kernels, "cpu" or "cuda".

    Raises:
      BackendError: there is none.
    """
    default = default_devices()
    devices = {}
    for platform in KERNEL_PLATFORMS:
        try:
            devices[platform] = jax.devices(platform)[0]
        except RuntimeError:  # there is no such backend
            continue
    if not devices:
        raise BackendError(f"There are kernels for {' and '.join(KERNEL_PLATFORMS)}; JAX has {default} only.")
    return devices


def require_kernels(device: jax.Device) -> None:
    """Checks that a device has kernels. Without them, a tool would compare plain JAX with itself.

    Raises:
      BackendError: the imported package has none.
    """
    platform = "cuda" if device.platform == "gpu" else device.platform
    problem = missing_target(platform, None)
    if problem is not None:
        raise BackendError(
            f"There are no kernels on {platform}: jax_baracuda is imported from "
            f"{Path(jax_baracuda.__file__).parent}, and {problem}. In a clone, pip install --editable . builds them "
            "where the clone's package finds them."
        )
