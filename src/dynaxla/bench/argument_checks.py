"""Reads and checks the arguments of a command. A check raises BenchmarkError for an invalid value, with the valid values.

Neither an import of this module nor a call of `check_names` or `check_device_name` imports torch or JAX.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from .benchmark_error import BenchmarkError
from .choices import DTYPES

if TYPE_CHECKING:
    import torch


def split_at_commas(names: Iterable[str] | None) -> list[str]:
    """Returns the names in comma-separated arguments, without empty names."""
    return [name.strip() for part in names or () for name in part.split(",") if name.strip()]


def with_extra_names(names: list[str], extra: Iterable[str]) -> list[str]:
    """Returns `names` followed by `extra`. An empty list stays empty, since it means the default names."""
    return [*names, *extra] if names else []


def check_names(kind: str, names: Iterable[str], valid: Iterable[str], where: str = "") -> None:
    """Checks names, such as those of engines.

    Args:
        kind: the noun for these names in messages, such as "engine".
        names: the names to check.
        valid: all valid names.
        where: the place where the names are valid, such as " on the device jax", or "".
    """
    valid = list(valid)
    if unknown := [name for name in dict.fromkeys(names) if name not in valid]:
        raise BenchmarkError(f"unknown {kind} {', '.join(map(repr, unknown))}{where}; the valid names are: {', '.join(valid)}")


def check_dtype(name: str) -> torch.dtype:
    check_names("dtype", [name], DTYPES)
    import torch

    return getattr(torch, name)


def check_device_name(name: str, *, with_jax: bool = False) -> None:
    """Checks the form of a device's name, such as "cuda:1".

    Args:
        name: the device's name.
        with_jax: True if the command supports the device "jax".
    """
    types = ("cpu", "cuda", "jax") if with_jax else ("cpu", "cuda")
    if not re.fullmatch(rf"({'|'.join(types)})(:\d+)?", name):
        raise BenchmarkError(f"unknown device {name!r}; the valid names are: cpu, cuda, cuda:N{', jax, jax:N' if with_jax else ''}")


def check_device(name: str, jax_threads: int | None = None) -> torch.device:
    """Checks a device's name, and returns the device. The device "jax" is enabled if it is named.

    Args:
        name: for example "cuda:1".
        jax_threads: the number of threads of the device "jax"; None if the command does not support that device.
    """
    check_device_name(name, with_jax=jax_threads is not None)
    if jax_threads is not None and name.partition(":")[0] == "jax":
        return _device_of_jax(name, jax_threads)
    import torch

    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BenchmarkError(f"there is no device {name!r}: the number of CUDA devices that torch finds is {torch.cuda.device_count()}")
    return device


def _device_of_jax(name: str, threads: int) -> torch.device:
    import torch

    from ..device import registration
    from ..errors import DynaxlaError
    from .measure import xla_thread_pool

    try:
        with xla_thread_pool(threads):
            registration.enable()
        return torch.zeros(0, device=name).device
    except (RuntimeError, DynaxlaError) as error:
        raise BenchmarkError(f"the device {name!r} cannot be used here: {error}") from error


def check_writable(directory: Path) -> None:
    """Creates a directory, and checks that it is writable. Call it before the measurements, so that no results are lost."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise BenchmarkError(f"cannot write to {directory}: {error}") from error
