"""The module torch.jax: the functions that torch requires of a device module, and the counterparts of torch.cuda's functions."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import torch

from .. import forks
from . import autocasting, generators, pjrt_devices, torch_streams
from .torch_streams import Event as Event
from .torch_streams import Stream as Stream

Which: TypeAlias = torch.device | int | str | None

# torch.utils.checkpoint saves random states only of devices that are initialized.
_initialized = True
_current = threading.local()
# By device index: the highest number of bytes that was observed. `_reset` has the devices for which it replaces PJRT's own peak.
_peaks: dict[int, int] = {}
_reset: set[int] = set()


def _index(device: Which) -> int:
    """Returns the index of a device. Raises: RuntimeError if there is no such device; ValueError for another device type."""
    return current_device() if device is None else pjrt_devices.named(device).index


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
    return getattr(_current, "index", 0)


def set_device(device: Which) -> None:
    """Accepts "jax:0" only. Raises: NotImplementedError for another device, since torch uses "jax:0" wherever no index is given."""
    if _index(device):
        raise NotImplementedError(
            f'the current device cannot change: "jax" always means "jax:0", so write "jax:{_index(device)}" for that device'
        )


@contextlib.contextmanager
def device(which: Which) -> Iterator[None]:
    """Sets the device that functions of this module use when they are called without a device.

    It does not change the meaning of "jax" without an index for torch, which stays "jax:0".

    Raises: RuntimeError if there is no such device.
    """
    before, index = current_device(), _index(which)
    _current.index = index
    try:
        yield
    finally:
        _current.index = before


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
        total_memory: in bytes.
    """

    name: str
    platform: str
    total_memory: int


def get_device_properties(device: Which = None) -> DeviceProperties:
    return DeviceProperties(get_device_name(device), pjrt_devices.jax_device(_index(device)).platform, mem_get_info(device)[1])


def get_device_name(device: Which = None) -> str:
    found = pjrt_devices.jax_device(_index(device))
    return f"{found.platform} {found.device_kind}"


def synchronize(device: Which = None) -> None:
    """Waits until all work submitted to a device is done. Recorded ops (lazy mode) run first."""
    torch_streams.wait(_index(device))


def current_stream(device: Which = None) -> Stream:
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
    """Seeds the device "jax:0" with a random number."""
    generators.generator_of(0).seed()


def seed_all() -> None:
    """Seeds all devices with one random number."""
    generators.manual_seed_all(torch.Generator().seed())


def initial_seed() -> int:
    return generators.generator_of(0).initial_seed()


def get_rng_state(device: Which = None) -> torch.Tensor:
    """Returns the state as a uint8 tensor on the CPU."""
    return generators.generator_of(_index(device)).get_state()


def set_rng_state(new_state: torch.Tensor, device: Which = None) -> None:
    generators.generator_of(_index(device)).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def memory_stats(device: Which = None) -> dict[str, Any]:
    """Returns PJRT's memory statistics, in bytes. Empty where PJRT has none, as on the CPU."""
    return dict(pjrt_devices.jax_device(_index(device)).memory_stats() or {})


def memory_allocated(device: Which = None) -> int:
    """Returns the bytes of all arrays on a device, including arrays that belong to no tensor."""
    index = _index(device)
    found = pjrt_devices.jax_device(index)
    known = memory_stats(device).get("bytes_in_use")
    now = known if known is not None else _bytes_of_arrays(found)
    _peaks[index] = max(_peaks.get(index, 0), now)
    return now


def _bytes_of_arrays(device: jax.Device) -> int:
    """Returns the bytes of all live arrays on a device. Arrays that another thread donates meanwhile are left out."""
    there = (array for array in jax.live_arrays() if array.sharding.device_set == {device})
    return sum(array.nbytes for array in there if not array.is_deleted())


def max_memory_allocated(device: Which = None) -> int:
    """Returns the peak of allocated bytes, as PJRT has counted it since the process began.

    Where PJRT does not count, as on the CPU, and after `reset_peak_memory_stats`: the highest number that this function and
    `memory_allocated` have observed.
    """
    index = _index(device)
    known = None if index in _reset else memory_stats(device).get("peak_bytes_in_use")
    memory_allocated(device)
    return _peaks[index] if known is None else known


def reset_peak_memory_stats(device: Which = None) -> None:
    index = _index(device)
    _reset.add(index)
    _peaks.pop(index, None)
    memory_allocated(device)


def memory_reserved(device: Which = None) -> int:
    """Returns the bytes that PJRT reserves for arrays, used or not; `memory_allocated` where PJRT does not report them."""
    stats = memory_stats(device)
    return stats.get("pool_bytes") or stats.get("bytes_reserved") or memory_allocated(device)


def mem_get_info(device: Which = None) -> tuple[int, int]:
    """Returns the free and the total bytes of the device, or of the machine where PJRT does not report them."""
    stats = memory_stats(device)
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0), stats["bytes_limit"]
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


def empty_cache() -> None:
    """Does nothing, since PJRT frees an array when the last reference to it goes."""


def ipc_collect() -> None:
    """Does nothing, since processes do not share arrays."""
