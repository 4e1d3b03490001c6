"""The PJRT devices behind "jax:0", "jax:1", ...: the devices of JAX's default backend, in its order."""

from __future__ import annotations

import threading

import jax
import torch

# The attribute `index` is the index of the thread's current device (`torch.jax.device`).
_current = threading.local()


def current_index() -> int:
    """Returns the index of the thread's current device: 0, except in a block of `torch.jax.device`."""
    return getattr(_current, "index", 0)


def set_current_index(index: int) -> None:
    _current.index = index


def devices() -> list[jax.Device]:
    """Returns the JAX devices of this process. The device with index i is "jax:i"."""
    return jax.local_devices()


def jax_device(index: int) -> jax.Device:
    """Returns the PJRT device with this index. Raises: RuntimeError if there is no such device."""
    available = devices()
    if not 0 <= index < len(available):
        names = f'"jax:0" to "jax:{len(available) - 1}"' if len(available) > 1 else '"jax:0"'
        raise RuntimeError(f'invalid device: there is no "jax:{index}", JAX has {names} here ({available[0].platform})')
    return available[index]


def live_arrays(index: int) -> list[jax.Array]:
    """Returns the live arrays with elements on this device. Arrays that another thread donates meanwhile are among them."""
    device = jax_device(index)
    return [array for array in jax.live_arrays() if device in array.sharding.device_set]


def with_index(device: torch.device) -> torch.device:
    """Returns the device with an explicit index: "jax" means "jax:0". Raises: RuntimeError if there is no such device."""
    if device.index is None:
        return torch.device(device.type, 0)
    jax_device(device.index)
    return device


def parse_device(device: torch.device | int | str | None) -> torch.device:
    """Converts a user's argument to a torch device with an index.

    Args:
        device: A device, an index, a name, or None for the thread's current device.

    Raises: RuntimeError if there is no such device; ValueError for another device type.
    """
    if device is None or isinstance(device, int):
        return with_index(torch.device("jax", current_index() if device is None else device))
    parsed = torch.device(device)
    if parsed.type != "jax":
        raise ValueError(f'expected a device "jax" or an index, not {str(parsed)!r}')
    return with_index(parsed)
