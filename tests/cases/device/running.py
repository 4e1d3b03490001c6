"""Helpers that run functions in each mode, compiled, or in several threads."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import torch

import dynaxla
from dynaxla.device import storages

MODES: dict[str, Callable[[], Any]] = {"eager": contextlib.nullcontext, "lazy": dynaxla.device.lazy}


def compile_anew(function: Callable[..., Any], **options: Any) -> Any:
    """Compiles a function after clearing TorchDynamo's caches."""
    torch._dynamo.reset()
    return torch.compile(function, backend="dynaxla", options=options)


def array_of(tensor: torch.Tensor) -> jax.Array:
    """Returns the array in a tensor's storage."""
    array = storages.array_of(tensor.untyped_storage())
    assert array is not None
    return array


def at_once(*jobs: Callable[[], Any]) -> list[Any]:
    """Runs jobs that start at the same time, each in its own thread. Returns their results, or raises an exception of a job."""
    results: dict[int, Any] = {}
    failed: list[BaseException] = []
    start = threading.Barrier(len(jobs))

    def work(index: int, job: Callable[[], Any]) -> None:
        try:
            start.wait()
            results[index] = job()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=item) for item in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return [results[index] for index in range(len(jobs))]


@contextlib.contextmanager
def quick_switches() -> Iterator[None]:
    """Inside, Python switches between threads as often as it can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
