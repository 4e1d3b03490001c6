"""The source of random numbers on the device: one torch generator on the CPU for each device, used for nothing else."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import jax
import numpy as np
import torch

from .. import forks
from ..engine.executable import random_numbers_under_jit
from ..runtime import meshes

_lock = forks.lock()
_generators: dict[int, torch.Generator] = {}
_thread = threading.local()  # attribute refuses: True while drawing raises
_seed = [torch.initial_seed()]


def generator_of(index: int) -> torch.Generator:
    """Returns the generator of a device. A new one starts with the last seed for all devices, or else with torch's initial seed."""
    with _lock:
        if index not in _generators:
            _generators[index] = torch.Generator().manual_seed(_seed[0])
        return _generators[index]


def manual_seed(index: int, seed: int) -> None:
    generator_of(index).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seeds all devices, including those that are used later."""
    with _lock:
        _seed[0] = seed
        for generator in _generators.values():
            generator.manual_seed(seed)


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Makes ops that draw random numbers raise UnsupportedOp inside the block, in this thread."""
    before = getattr(_thread, "refuses", False)
    _thread.refuses = True
    try:
        yield
    finally:
        _thread.refuses = before


def drawn(given: torch.Generator | None, index: int) -> np.ndarray:
    """Returns a new seed at every call, uint32[2], from which a program makes its random key.

    Args:
        given: the generator that the user passed, or None for that of the device.
        index: of the device.
    """
    if getattr(_thread, "refuses", False):
        raise random_numbers_under_jit("a torch function under JAX")
    found = torch.empty(2, dtype=torch.int32).random_(-(2**31), 2**31, generator=given or generator_of(index))
    return found.numpy().view(np.uint32)


def seed(given: torch.Generator | None, index: int, where: meshes.DeviceOrMesh) -> jax.Array:
    """Returns a new seed, as `drawn` does, as an array on a device or a mesh."""
    return jax.device_put(drawn(given, index), where)
