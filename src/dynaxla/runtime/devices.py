"""From torch's devices to JAX's."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable

import jax
import torch

from ..errors import DeviceMismatch, UnsupportedTensor
from . import clients

# By a device's type: what gives the JAX device of an index, for tensors that live in XLA.
_in_xla: dict[str, Callable[[int], jax.Device]] = {}


def register(kind: str, jax_device: Callable[[int], jax.Device]) -> None:
    """From now on tensors on this kind of torch device are arrays on these JAX devices."""
    _in_xla[kind] = jax_device


def is_in_xla(device: torch.device) -> bool:
    """Whether tensors on a device are arrays, and have no memory of torch's."""
    return device.type in _in_xla


def drives(kind: str) -> bool:
    """Whether there are tensors on such a torch device, by its type, and they are arrays."""
    return kind in _in_xla


def platform_of(device: torch.device) -> str:
    """JAX's name for the platform of a torch device.

    Raises: UnsupportedTensor for a device whose memory JAX cannot share.
    """
    if device.type == "cpu":
        return "cpu"
    if device.type == "cuda":
        return "rocm" if torch.version.hip else "cuda"
    if is_in_xla(device):
        platform = jax_device(device).platform
        return "cuda" if platform == "gpu" else platform
    raise UnsupportedTensor(
        f"a tensor on device {str(device)!r} cannot be handed to XLA",
        hint="dynaxla takes tensors on cpu and cuda; move the model and its inputs there",
    )


def with_index(device: torch.device) -> torch.device:
    """The device that is meant, in the one way to write it: a GPU without an index is torch's current one, and there is one CPU."""
    if device.type == "cpu":
        return torch.device("cpu")
    if device.index is None and is_in_xla(device):
        return torch.device(device.type, 0)
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", current_gpu())


def current_gpu() -> int:
    """torch's, by its number; 0 while no GPU is in use."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else 0


def common_device(devices: Iterable[torch.device]) -> torch.device:
    """The one device of a program; cpu if it has no tensors.

    Raises: DeviceMismatch if there are several.
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
    """The first of a graph's devices that is not the CPU; cpu if there is none. What is on the meta device has no data, and no place."""
    others = {with_index(device) for device in devices if device.type not in ("cpu", "meta")}
    return min(others, key=str) if others else torch.device("cpu")


def jax_device(device: torch.device) -> jax.Device:
    """The JAX device that shares this torch device's memory, or has its tensors.

    Raises: UnsupportedTensor if JAX has no client for the platform.
    """
    if is_in_xla(device):
        return _in_xla[device.type](device.index or 0)
    platform = platform_of(device)
    return clients.cpu_device() if platform == "cpu" else _accelerator(platform, with_index(device))


@functools.cache
def users_cpu_device() -> jax.Device:
    """The CPU of JAX's own client, where a user's arrays are; `clients.cpu_device` is another one.

    Raises: UnsupportedTensor if JAX was told to do without it.
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
            hint="install JAX's plugin for it, e.g. pip install 'jax[cuda13]'; `dynaxla doctor` shows what is found",
        ) from error
    for candidate in candidates:
        if candidate.local_hardware_id == device.index:
            return candidate
    raise UnsupportedTensor(
        f"JAX does not see {device}: it sees {', '.join(map(str, candidates))}",
        hint="check CUDA_VISIBLE_DEVICES and jax_visible_devices",
    )


def _without_preallocation(start: Callable[[], list[jax.Device]]) -> list[jax.Device]:
    """Let JAX's GPU client, if `start` makes it, allocate as it needs instead of taking most of the memory at once.

    JAX reads these variables when it makes the client: one is set for that moment only, and never where the user has set any. The client is
    JAX's own, for the user's JAX too, and from then on JAX warns at every fork.
    """
    names = ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")
    if any(name in os.environ for name in names):
        return start()
    with clients.environment("XLA_PYTHON_CLIENT_PREALLOCATE", "false"):
        return start()
