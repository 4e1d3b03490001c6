"""What random numbers on the device come from: for each device a generator of torch's, on the CPU, that nobody else draws from."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import jax
import numpy as np
import torch

from .. import forks
from ..engine.executable import drawing_under_trace
from ..runtime import meshes

_lock = forks.lock()
_generators: dict[int, torch.Generator] = {}
_thread = threading.local()  # refuses: whether nothing may be drawn
_seed = [torch.initial_seed()]


def generator_of(index: int) -> torch.Generator:
    """That of a device. New ones begin with the seed that was given to all devices, else with torch's own."""
    with _lock:
        if index not in _generators:
            _generators[index] = torch.Generator().manual_seed(_seed[0])
        return _generators[index]


def manual_seed(index: int, seed: int) -> None:
    generator_of(index).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """For all devices, also those that are used later."""
    with _lock:
        _seed[0] = seed
        for generator in _generators.values():
            generator.manual_seed(seed)


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Inside, in this thread, what draws random numbers raises UnsupportedOp."""
    before = getattr(_thread, "refuses", False)
    _thread.refuses = True
    try:
        yield
    finally:
        _thread.refuses = before


def drawn(given: torch.Generator | None, index: int) -> np.ndarray:
    """uint32[2], another one at every call: what a program's key is made of. given: a generator that a user has passed."""
    if getattr(_thread, "refuses", False):
        raise drawing_under_trace("a torch function under JAX")
    found = torch.empty(2, dtype=torch.int32).random_(-(2**31), 2**31, generator=given or generator_of(index))
    return found.numpy().view(np.uint32)


def seed(given: torch.Generator | None, index: int, where: meshes.Where) -> jax.Array:
    """The same as an array."""
    return jax.device_put(drawn(given, index), where)
