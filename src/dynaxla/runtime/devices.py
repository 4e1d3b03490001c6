"""Maps torch's devices to JAX's."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable

import jax
import torch

from ..errors import DeviceMismatch, UnsupportedTensor
from . import clients

# For each torch device type whose tensors are JAX arrays: a function from a device index to a JAX device.
_array_devices: dict[str, Callable[[int], jax.Device]] = {}


def register(device_type: str, jax_device: Callable[[int], jax.Device]) -> None:
    """Registers a torch device type whose tensors are JAX arrays.

    Args:
        device_type: The device type, such as "jax".
        jax_device: Returns the JAX device of a device index.
    """
    _array_devices[device_type] = jax_device


def is_in_xla(device: torch.device) -> bool:
    """True if tensors on this device are JAX arrays, so that they have no memory of torch's."""
    return device.type in _array_devices


def is_registered(device_type: str) -> bool:
    """True if `register` was called for this torch device type.

    Takes the name of the type, unlike `is_in_xla`, because `torch.device` raises for "jax" until the device is enabled.
    """
    return device_type in _array_devices


def platform_of(device: torch.device) -> str:
    """Returns JAX's name for the platform of a torch device, such as "cpu", "cuda", "rocm" or "tpu".

    Raises: UnsupportedTensor for a device whose memory JAX cannot share.
    """
    if device.type == "cpu":
        return "cpu"
    if device.type == "cuda":
        return "rocm" if torch.version.hip else "cuda"
    if is_in_xla(device):
        return platform_name(jax_device(device))
    raise UnsupportedTensor(
        f"a tensor on device {str(device)!r} cannot be handed to XLA",
        hint="move the model and its inputs to the CPU, to CUDA or to the device jax",
    )


def platform_name(device: jax.Device) -> str:
    """Returns the platform of a JAX device in the form of `platform_of`, such as "cpu", "cuda" or "tpu"."""
    return "cuda" if device.platform == "gpu" else device.platform


def with_index(device: torch.device) -> torch.device:
    """Returns the device in canonical form: the CPU without an index; a GPU and the device "jax" with one (default: the current GPU; 0)."""
    if device.type == "cpu":
        return torch.device("cpu")
    if device.index is None and is_in_xla(device):
        return torch.device(device.type, 0)
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", current_gpu())


def current_gpu() -> int:
    """Returns the index of torch's current GPU; 0 while no GPU is in use."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else 0


def common_device(devices: Iterable[torch.device]) -> torch.device:
    """Returns the one device of a program, given those of its tensors; the CPU if there are none.

    Raises: DeviceMismatch if the devices differ.
    """
    distinct = set(map(with_index, devices))
    if len(distinct) > 1:
        names = ", ".join(sorted(map(str, distinct)))
        raise DeviceMismatch(
            f"one program has tensors on several devices: {names}",
            hint="move them to one device, or keep the transfer out of the graph with torch.compiler.disable",
        )
    return distinct.pop() if distinct else torch.device("cpu")


def main_device(devices: Iterable[torch.device]) -> torch.device:
    """Returns the device, among those of a graph's tensors, on which the graph mainly runs.

    This is the first device, in alphabetical order, that is neither the CPU nor meta; the CPU if there is none.
    """
    others = {with_index(device) for device in devices if device.type not in ("cpu", "meta")}
    return min(others, key=str) if others else torch.device("cpu")


def jax_device(device: torch.device) -> jax.Device:
    """Returns the JAX device that shares this torch device's memory, or that holds the arrays of its tensors.

    Raises: UnsupportedTensor if JAX has no client for the platform.
    """
    if is_in_xla(device):
        return _array_devices[device.type](device.index or 0)
    platform = platform_of(device)
    return clients.cpu_device() if platform == "cpu" else _accelerator(platform, with_index(device))


@functools.cache
def users_cpu_device() -> jax.Device:
    """Returns the CPU device of JAX's own client, on which the user's JAX code has its arrays. `clients.cpu_device` is another device.

    Raises: UnsupportedTensor if JAX is configured without a CPU platform.
    """
    try:
        return _without_preallocation(lambda: jax.local_devices(backend="cpu"))[0]
    except RuntimeError as error:
        hint = "let the variable JAX_PLATFORMS name the CPU, too, e.g. cuda,cpu"
        raise UnsupportedTensor(f"JAX has no CPU here: {error}", hint=hint) from error


@functools.cache
def _accelerator(platform: str, device: torch.device) -> jax.Device:
    try:
        candidates = _without_preallocation(lambda: jax.local_devices(backend=platform))
    except RuntimeError as error:
        raise UnsupportedTensor(
            f"JAX has no {platform} backend here: {error}",
            hint="install JAX's plugin for it, e.g. pip install 'jax[cuda13]'; `dynaxla doctor` lists the devices that JAX sees",
        ) from error
    for candidate in candidates:
        if candidate.local_hardware_id == device.index:
            return candidate
    raise UnsupportedTensor(
        f"JAX does not see {device}: it sees {', '.join(map(str, candidates))}",
        hint="check CUDA_VISIBLE_DEVICES and jax_visible_devices",
    )


def _without_preallocation(start: Callable[[], list[jax.Device]]) -> list[jax.Device]:
    """Returns start(). A GPU client of JAX that this call creates allocates memory as needed, instead of reserving most of it at once.

    JAX reads the variables below when it creates the client. The first variable is set during the call only, and not at all if the user has
    set any of them. The client is JAX's own, and the user's JAX code shares it. Once the client exists, JAX warns at every fork.
    """
    names = ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")
    if any(name in os.environ for name in names):
        return start()
    with clients.environment("XLA_PYTHON_CLIENT_PREALLOCATE", "false"):
        return start()
