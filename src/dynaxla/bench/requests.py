"""Checks of a command's arguments. Each function raises BenchmarkError for a value that is not possible, and lists the possible ones."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from ..device import registration
from ..errors import DynaxlaError
from .benchmark_error import BenchmarkError
from .choices import DTYPES
from .measure import pool_of


def split(names: Iterable[str] | None) -> list[str]:
    return [name.strip() for part in names or () for name in part.split(",") if name.strip()]


def with_more(names: list[str], more: Iterable[str]) -> list[str]:
    """Returns these names and more; an empty list stays empty, since it stands for the default names."""
    return [*names, *more] if names else []


def check_dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise BenchmarkError(f"no dtype {name!r}; there are: {', '.join(DTYPES)}")
    return getattr(torch, name)


def check_device(name: str, jax_threads: int | None = None) -> torch.device:
    """Returns the device with this name.

    Args:
        name: for example "cuda:1".
        jax_threads: threads for the device "jax", which is enabled if it is named; None if the command does not support it.
    """
    if jax_threads is not None and name.partition(":")[0] == "jax":
        return _device_of_jax(name, jax_threads)
    known = "cpu, cuda, cuda:N" + ("" if jax_threads is None else ", jax, jax:N")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise BenchmarkError(f"no device {name!r}; there are: {known}") from None
    if device.type not in ("cpu", "cuda"):
        raise BenchmarkError(f"dynaxla does not run on the device {name!r}; there are: {known}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BenchmarkError(f"torch finds no device {name!r} here: it sees {torch.cuda.device_count()} CUDA devices")
    return device


def _device_of_jax(name: str, threads: int) -> torch.device:
    try:
        with pool_of(threads):
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
