"""The random numbers of the device: each device has its own torch generator on the CPU."""

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
_thread = threading.local()  # its attribute draws_forbidden is True inside `forbid_draws`
# The seed of generators that do not exist yet.
_seed = [torch.initial_seed()]


def generator_of(index: int) -> torch.Generator:
    """Returns the generator of a device. A new generator gets the seed of the last `manual_seed_all`, or else `torch.initial_seed()`."""
    with _lock:
        if index not in _generators:
            _generators[index] = torch.Generator().manual_seed(_seed[0])
        return _generators[index]


def manual_seed(index: int, seed: int) -> None:
    """Seeds the generator of one device."""
    generator_of(index).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seeds all devices, including devices that are first used later."""
    with _lock:
        _seed[0] = seed
        for generator in _generators.values():
            generator.manual_seed(seed)


@contextlib.contextmanager
def forbid_draws() -> Iterator[None]:
    """Makes ops that draw random numbers raise UnsupportedOp inside the block, in this thread."""
    before = getattr(_thread, "draws_forbidden", False)
    _thread.draws_forbidden = True
    try:
        yield
    finally:
        _thread.draws_forbidden = before


def draw_seed(generator: torch.Generator | None, index: int) -> np.ndarray:
    """Draws a seed (uint32[2]), the data of a program's random key. Each call returns another seed.

    Args:
        generator: the user's generator; None for the device's generator.
        index: the index of the device.

    Raises: UnsupportedOp inside `forbid_draws`.
    """
    if getattr(_thread, "draws_forbidden", False):
        raise random_numbers_under_jit("a torch function under JAX")
    bits = torch.empty(2, dtype=torch.int32).random_(-(2**31), 2**31, generator=generator or generator_of(index))
    return bits.numpy().view(np.uint32)


def seed_array(generator: torch.Generator | None, index: int, device_or_mesh: meshes.DeviceOrMesh) -> jax.Array:
    """Draws a seed as `draw_seed` does, and copies it to a device or a mesh."""
    return jax.device_put(draw_seed(generator, index), device_or_mesh)
