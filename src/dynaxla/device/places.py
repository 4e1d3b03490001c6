"""The PJRT devices behind "jax:0", "jax:1", ...: those of JAX's default backend, in its order."""

from __future__ import annotations

import jax
import torch


def devices() -> list[jax.Device]:
    """Those of this process."""
    return jax.local_devices()


def jax_device(index: int) -> jax.Device:
    """Raises: RuntimeError if there is no such device."""
    found = devices()
    if not 0 <= index < len(found):
        names = f'"jax:0" to "jax:{len(found) - 1}"' if len(found) > 1 else '"jax:0"'
        raise RuntimeError(f'invalid device: there is no "jax:{index}", JAX has {names} here ({found[0].platform})')
    return found[index]


def with_index(device: torch.device) -> torch.device:
    """The device that is meant: "jax" alone is "jax:0". Raises: RuntimeError if there is no such device."""
    if device.index is None:
        return torch.device(device.type, 0)
    jax_device(device.index)
    return device
