"""The module torch.jax: the functions that torch requires of a device module, and the counterparts of torch.cuda's functions."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from .. import forks
from . import autocasting, generators, pjrt_devices, torch_streams
from .torch_streams import Event as Event
from .torch_streams import Stream as Stream

DeviceLike: TypeAlias = torch.device | int | str | None

# Read by torch.utils.checkpoint, which saves random states only of initialized devices.
_initialized = True
# The highest number of allocated bytes that was observed, by device index.
_peaks: dict[int, int] = {}
# The indices of devices whose peak is the number in `_peaks`, not PJRT's peak, because the user has reset it. PJRT's peak cannot be reset.
_reset_devices: set[int] = set()


def _index(device: DeviceLike) -> int:
    """Returns the index of a device; None means the current device.

    Raises: RuntimeError if there is no such device; ValueError for another device type.
    """
    return pjrt_devices.parse_device(device).index


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return forks.has_lost_xla()


def init() -> None:
    """Does nothing, since `dynaxla.device.enable` has initialized the device."""


def device_count() -> int:
    return len(pjrt_devices.devices())


def current_device() -> int:
    return pjrt_devices.current_index()


def set_device(device: DeviceLike) -> None:
    """Accepts "jax:0" only, since torch uses "jax:0" wherever no index is given. Raises: NotImplementedError for another device."""
    if _index(device):
        raise NotImplementedError(
            f'the current device cannot change: "jax" always means "jax:0", so write "jax:{_index(device)}" for that device'
        )


@contextlib.contextmanager
def device(which: DeviceLike) -> Iterator[None]:
    """Inside the block, functions of this module that are called without a device use the device `which`.

    Seeding functions and torch itself still use "jax:0" if no index is given.

    Raises: RuntimeError if there is no such device.
    """
    before, index = current_device(), _index(which)
    pjrt_devices.set_current_index(index)
    try:
        yield
    finally:
        pjrt_devices.set_current_index(before)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return autocasting.supported_dtypes()


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


@dataclass(frozen=True)
class DeviceProperties:
    """Properties of a device.

    Attributes:
        name: JAX's platform and device kind.
        platform: JAX's platform, e.g. "cpu".
        total_memory: the device's memory, in bytes.
    """

    name: str
    platform: str
    total_memory: int


def get_device_properties(device: DeviceLike = None) -> DeviceProperties:
    return DeviceProperties(get_device_name(device), pjrt_devices.jax_device(_index(device)).platform, mem_get_info(device)[1])


def get_device_name(device: DeviceLike = None) -> str:
    pjrt_device = pjrt_devices.jax_device(_index(device))
    return f"{pjrt_device.platform} {pjrt_device.device_kind}"


def synchronize(device: DeviceLike = None) -> None:
    """Waits until all work submitted to a device is done. Recorded ops (lazy mode) run first."""
    torch_streams.wait(_index(device))


def current_stream(device: DeviceLike = None) -> Stream:
    return Stream(_index(device))


default_stream = current_stream


def set_stream(stream: Stream) -> None:
    """Does nothing, since a device has only one stream."""


def stream(stream: Stream | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if stream is None else stream


def manual_seed(seed: int) -> None:
    """Seeds the device "jax:0"."""
    generators.manual_seed(0, int(seed))


def manual_seed_all(seed: int) -> None:
    """Seeds all devices, as `torch.manual_seed` does too."""
    generators.manual_seed_all(int(seed))


def seed() -> None:
    """Seeds the device "jax:0" with a nondeterministic number."""
    generators.generator_of(0).seed()


def seed_all() -> None:
    """Seeds all devices with one nondeterministic number."""
    generators.manual_seed_all(torch.Generator().seed())


def initial_seed() -> int:
    return generators.generator_of(0).initial_seed()


def get_rng_state(device: DeviceLike = None) -> torch.Tensor:
    """Returns the state as a uint8 tensor on the CPU."""
    return generators.generator_of(_index(device)).get_state()


def set_rng_state(new_state: torch.Tensor, device: DeviceLike = None) -> None:
    generators.generator_of(_index(device)).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def memory_stats(device: DeviceLike = None) -> dict[str, Any]:
    """Returns PJRT's memory statistics, in bytes. Empty where PJRT has none, as on the CPU."""
    return dict(pjrt_devices.jax_device(_index(device)).memory_stats() or {})


def memory_allocated(device: DeviceLike = None) -> int:
    """Returns the bytes of all arrays on a device, with or without a tensor. Of an array on several devices, only its part there counts."""
    index = _index(device)
    pjrt_bytes = memory_stats(device).get("bytes_in_use")
    allocated = pjrt_bytes if pjrt_bytes is not None else _bytes_of_arrays(index)
    _peaks[index] = max(_peaks.get(index, 0), allocated)
    return allocated


def _bytes_of_arrays(index: int) -> int:
    """Returns the bytes of all live arrays on a device. Arrays that another thread donates meanwhile are left out."""
    arrays = [array for array in pjrt_devices.live_arrays(index) if not array.is_deleted()]
    return sum(math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize for array in arrays)


def max_memory_allocated(device: DeviceLike = None) -> int:
    """Returns the peak of allocated bytes, as PJRT has counted it since the process began.

    Where PJRT has no statistics, as on the CPU, and after `reset_peak_memory_stats`, returns the highest number of bytes at a call of this
    function or of `memory_allocated`.
    """
    index = _index(device)
    pjrt_peak = None if index in _reset_devices else memory_stats(device).get("peak_bytes_in_use")
    memory_allocated(device)
    return _peaks[index] if pjrt_peak is None else pjrt_peak


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    index = _index(device)
    _reset_devices.add(index)
    _peaks.pop(index, None)
    memory_allocated(device)


def memory_reserved(device: DeviceLike = None) -> int:
    """Returns the bytes that PJRT reserves for arrays, used or not. Where PJRT does not report them, returns `memory_allocated`."""
    stats = memory_stats(device)
    return stats.get("pool_bytes") or stats.get("bytes_reserved") or memory_allocated(device)


def mem_get_info(device: DeviceLike = None) -> tuple[int, int]:
    """Returns the free and the total bytes of a device. Where PJRT does not report them, returns the bytes of the host's main memory."""
    stats = memory_stats(device)
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0), stats["bytes_limit"]
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


def empty_cache() -> None:
    """Does nothing, since PJRT frees an array as soon as nothing refers to it."""


def ipc_collect() -> None:
    """Does nothing, since processes do not share arrays."""
