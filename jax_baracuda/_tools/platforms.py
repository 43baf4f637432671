"""The devices that the tools run on."""

from __future__ import annotations

import jax

from jax_baracuda._core.native import KERNEL_PLATFORMS


def devices_by_platform() -> dict[str, jax.Device]:
    """The first device of each platform here that has kernels, "cpu" or "cuda"."""
    devices = {}
    for platform in KERNEL_PLATFORMS:
        try:
            devices[platform] = jax.devices(platform)[0]
        except RuntimeError:  # JAX's way to say that there is no such backend
            continue
    return devices
