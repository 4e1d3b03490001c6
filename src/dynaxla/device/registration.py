"""`dynaxla.enable_device`: torch learns of the device "jax". Nothing else in dynaxla registers anything."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch

from .. import forks
from ..buffers import device_kinds
from ..errors import UnsupportedVersion
from ..runtime import devices, private
from . import in_storages, kernels, module, places, storage_methods, storages

_lock = forks.lock()
_enabled: list[bool] = []


class _Hooks(private.DeviceHooks):
    def is_available(self) -> bool:
        return True

    def has_primary_context(self, device_index: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


def _in_this_thread(outputs: Any) -> contextlib.AbstractContextManager[Any]:
    """torch's autograd gives each device that it knew at the first backward pass a thread, and has none for ours. Where only the CPU and
    this device take part, the calling thread does it all, as for the CPU alone."""
    if any(isinstance(output, torch.Tensor) and output.device.type not in ("cpu", storages.NAME) for output in outputs):
        return contextlib.nullcontext()
    return torch.autograd.set_multithreading_enabled(False)


def enable_device() -> None:
    """Make `torch.device("jax")` work: tensors that live in XLA, on the devices of JAX's default backend ("jax:0", "jax:1", ...).

    It holds for the whole process and for its life: torch has one spare device, which gets this name. docs/device.md says what others see
    of it. A second call does nothing.

    Raises: RuntimeError if another library has taken the spare device; UnsupportedVersion; ForkError.
    """
    with _lock:
        if _enabled:
            return
        if forks.is_cut_off():
            raise forks.cut_off()
        name = private.spare_device_name()
        if name != "privateuseone":
            raise RuntimeError(f'torch has one spare device, and another library has named it "{name}": the device "jax" needs it')
        if not private.SWAPS_MEMORY:
            raise UnsupportedVersion(f"torch {torch.__version__} cannot make storages without memory, which the device jax needs")
        places.devices()
        private.register_device(storages.NAME, sys.modules[module.__name__], _Hooks())
        storage_methods.install()
        kernels.register()
        devices.register(storages.NAME, places.jax_device)
        device_kinds.register(storages.NAME, in_storages)
        if not private.before_backward(_in_this_thread):
            raise UnsupportedVersion(f"torch {torch.__version__} runs backward passes in another way, which the device jax needs to know")
        _enabled.append(True)
