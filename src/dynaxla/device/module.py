"""torch.jax: what torch asks of a device's module, and what PyTorch's users know from torch.cuda."""

from __future__ import annotations

import contextlib
from typing import Any, TypeAlias

import jax
import torch

from .. import forks
from . import generators, places, recording, storages

Which: TypeAlias = torch.device | int | str | None


def _index(device: Which) -> int:
    """Raises: RuntimeError if there is no such device; ValueError for another kind of device."""
    if device is None:
        return 0
    if not isinstance(device, int):
        found = torch.device(device)
        if found.type != storages.NAME:
            raise ValueError(f'expected a device "jax" or an index, not {str(found)!r}')
        return places.with_index(found).index
    places.jax_device(device)
    return device


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
    return 0


def set_device(device: Which) -> None:
    """Raises: NotImplementedError for another device than "jax:0": torch takes that one wherever no number is given."""
    if _index(device):
        raise NotImplementedError(f'"jax" without a number is always "jax:0": write "jax:{_index(device)}" where that device is meant')


def device(which: Which) -> contextlib.AbstractContextManager[None]:
    """torch names its devices inside; "jax" without a number stays "jax:0" there. Raises: RuntimeError if there is no such device."""
    _index(which)
    return contextlib.nullcontext()


def get_device_name(device: Which = None) -> str:
    found = places.jax_device(_index(device))
    return f"{found.platform} {found.device_kind}"


def synchronize(device: Which = None) -> None:
    """Wait until all that has been given to a device is computed; what is recorded (lazy mode) runs first."""
    index = _index(device)
    recording.run_all()
    jax.block_until_ready([array for array in jax.live_arrays() if array.devices() == {places.jax_device(index)}])


def manual_seed(seed: int) -> None:
    """Seed the device "jax:0"."""
    generators.manual_seed(0, int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed all devices; `torch.manual_seed` does so, too."""
    generators.manual_seed_all(int(seed))


def seed() -> None:
    """Seed the device "jax:0" with a number that nobody knows."""
    generators.generator_of(0).seed()


def initial_seed() -> int:
    return generators.generator_of(0).initial_seed()


def get_rng_state(device: Which = None) -> torch.Tensor:
    """uint8 tensor on the CPU."""
    return generators.generator_of(_index(device)).get_state()


def set_rng_state(new_state: torch.Tensor, device: Which = None) -> None:
    generators.generator_of(_index(device)).set_state(new_state)


def memory_stats(device: Which = None) -> dict[str, Any]:
    """As PJRT gives them, in bytes. Empty where it counts nothing, as on the CPU."""
    return dict(places.jax_device(_index(device)).memory_stats() or {})


def memory_allocated(device: Which = None) -> int:
    """Bytes of all arrays on a device, those that are not tensors included."""
    found = places.jax_device(_index(device))
    known = memory_stats(device).get("bytes_in_use")
    return known if known is not None else sum(array.nbytes for array in jax.live_arrays() if array.devices() == {found})


def empty_cache() -> None:
    """Nothing to do: PJRT frees an array when nothing refers to it."""
