"""torch.jax: what torch asks of a device's module, and what PyTorch's users know from torch.cuda."""

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
from . import autocasting, generators, places, work_order
from .work_order import Event as Event
from .work_order import Stream as Stream

Which: TypeAlias = torch.device | int | str | None

# torch.utils.checkpoint keeps random states only of devices that have begun.
_initialized = True
_current = threading.local()
# By device: the most bytes that anybody has seen; and for which of them that counts.
_peaks: dict[int, int] = {}
_reset: set[int] = set()


def _index(device: Which) -> int:
    """Raises: RuntimeError if there is no such device; ValueError for another kind of device."""
    return current_device() if device is None else places.named(device).index


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return forks.is_cut_off()


def init() -> None:
    """Nothing to do: `enable_device` has done it."""


def device_count() -> int:
    return len(places.devices())


def current_device() -> int:
    return getattr(_current, "index", 0)


def set_device(device: Which) -> None:
    """Raises: NotImplementedError for another device than "jax:0": torch takes that one wherever no number is given."""
    if _index(device):
        raise NotImplementedError(f'"jax" without a number is always "jax:0": write "jax:{_index(device)}" where that device is meant')


@contextlib.contextmanager
def device(which: Which) -> Iterator[None]:
    """What this module's functions mean where they are given no device. torch names its own devices inside: "jax" without a number stays
    "jax:0". Raises: RuntimeError if there is no such device."""
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
    """name; platform (JAX's); total_memory (bytes)."""

    name: str
    platform: str
    total_memory: int


def get_device_properties(device: Which = None) -> DeviceProperties:
    return DeviceProperties(get_device_name(device), places.jax_device(_index(device)).platform, mem_get_info(device)[1])


def get_device_name(device: Which = None) -> str:
    found = places.jax_device(_index(device))
    return f"{found.platform} {found.device_kind}"


def synchronize(device: Which = None) -> None:
    """Wait until all that has been given to a device is computed; what is recorded (lazy mode) runs first."""
    work_order.wait(_index(device))


def current_stream(device: Which = None) -> Stream:
    return Stream(_index(device))


default_stream = current_stream


def set_stream(stream: Stream) -> None:
    """Nothing to do: all streams of a device are one."""


def stream(stream: Stream | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if stream is None else stream


def manual_seed(seed: int) -> None:
    """Seed the device "jax:0"."""
    generators.manual_seed(0, int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed all devices; `torch.manual_seed` does so, too."""
    generators.manual_seed_all(int(seed))


def seed() -> None:
    """Seed the device "jax:0" with a number that nobody knows."""
    generators.generator_of(0).seed()


def seed_all() -> None:
    """Seed all devices with one number that nobody knows."""
    generators.manual_seed_all(torch.Generator().seed())


def initial_seed() -> int:
    return generators.generator_of(0).initial_seed()


def get_rng_state(device: Which = None) -> torch.Tensor:
    """uint8 tensor on the CPU."""
    return generators.generator_of(_index(device)).get_state()


def set_rng_state(new_state: torch.Tensor, device: Which = None) -> None:
    generators.generator_of(_index(device)).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def memory_stats(device: Which = None) -> dict[str, Any]:
    """As PJRT gives them, in bytes. Empty where it counts nothing, as on the CPU."""
    return dict(places.jax_device(_index(device)).memory_stats() or {})


def memory_allocated(device: Which = None) -> int:
    """Bytes of all arrays on a device, those that are not tensors included."""
    index = _index(device)
    found = places.jax_device(index)
    known = memory_stats(device).get("bytes_in_use")
    now = known if known is not None else _bytes_of_arrays(found)
    _peaks[index] = max(_peaks.get(index, 0), now)
    return now


def _bytes_of_arrays(device: jax.Device) -> int:
    """Without those that another thread donates meanwhile."""
    there = (array for array in jax.live_arrays() if array.sharding.device_set == {device})
    return sum(array.nbytes for array in there if not array.is_deleted())


def max_memory_allocated(device: Which = None) -> int:
    """The most bytes that there were at a time: what PJRT has counted since the process began. Where it counts nothing, as on the CPU, and
    after `reset_peak_memory_stats`: the most that this function and `memory_allocated` have seen."""
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
    """Bytes that PJRT keeps for arrays, used or not; `memory_allocated` where it does not say."""
    stats = memory_stats(device)
    return stats.get("pool_bytes") or stats.get("bytes_reserved") or memory_allocated(device)


def mem_get_info(device: Which = None) -> tuple[int, int]:
    """Bytes that are free, and all: of the device, or of the machine where PJRT does not say."""
    stats = memory_stats(device)
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0), stats["bytes_limit"]
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


def empty_cache() -> None:
    """Nothing to do: PJRT frees an array when nothing refers to it."""


def ipc_collect() -> None:
    """Nothing to do: processes share no arrays."""
