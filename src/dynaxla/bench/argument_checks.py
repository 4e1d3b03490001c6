"""Checks of a command's arguments. Each function raises BenchmarkError for an invalid value, and lists the valid values.

Importing this module imports neither torch nor JAX, and neither do the functions `check_names` and `check_device_name`.
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


def split(names: Iterable[str] | None) -> list[str]:
    return [name.strip() for part in names or () for name in part.split(",") if name.strip()]


def with_more(names: list[str], more: Iterable[str]) -> list[str]:
    """Returns these names and more. An empty list stays empty, since it means the default names."""
    return [*names, *more] if names else []


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
        raise BenchmarkError(f"no {kind} {', '.join(map(repr, unknown))}{where}; there are: {', '.join(valid)}")


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
        raise BenchmarkError(f"no device {name!r}; there are: cpu, cuda, cuda:N{', jax, jax:N' if with_jax else ''}")


def check_device(name: str, jax_threads: int | None = None) -> torch.device:
    """Returns the device with this name.

    Args:
        name: for example "cuda:1".
        jax_threads: threads for the device "jax", which is enabled if `name` names it; None if the command does not support it.
    """
    check_device_name(name, with_jax=jax_threads is not None)
    if jax_threads is not None and name.partition(":")[0] == "jax":
        return _device_of_jax(name, jax_threads)
    import torch

    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BenchmarkError(f"torch finds no device {name!r} here: it sees {torch.cuda.device_count()} CUDA devices")
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
        raise BenchmarkError(f"no device {name!r}: {error}") from error


def check_writable(directory: Path) -> None:
    """Creates a directory, and checks before the measurements that it can be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise BenchmarkError(f"cannot write to {directory}: {error}") from error
