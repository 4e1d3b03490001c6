"""The PJRT devices behind "jax:0", "jax:1", ...: the devices of JAX's default backend, in its order."""

from __future__ import annotations

import jax
import torch


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
    """Returns the live arrays that are on this device alone. Arrays that another thread donates meanwhile are among them."""
    device = jax_device(index)
    return [array for array in jax.live_arrays() if array.sharding.device_set == {device}]


def with_index(device: torch.device) -> torch.device:
    """Returns the device with an explicit index: "jax" means "jax:0". Raises: RuntimeError if there is no such device."""
    if device.index is None:
        return torch.device(device.type, 0)
    jax_device(device.index)
    return device


def parse_device(device: torch.device | int | str | None) -> torch.device:
    """Converts a user's argument to a torch device with an index. The argument is a device, an index, a name, or None for "jax:0".

    Raises: RuntimeError if there is no such device; ValueError for another device type.
    """
    if device is None or isinstance(device, int):
        return with_index(torch.device("jax", device or 0))
    parsed = torch.device(device)
    if parsed.type != "jax":
        raise ValueError(f'expected a device "jax" or an index, not {str(parsed)!r}')
    return with_index(parsed)
