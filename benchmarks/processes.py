"""Runners in separate processes, with the interface of `dynaxla.bench.runner.BenchRunner`, and the memory that an engine needs."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import resource
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dynaxla.bench.engines import BenchEngine
from dynaxla.bench.runner import (
    AddedMemory,
    BenchTiming,
    Inputs,
    LocalRunner,
    ModelSetup,
    RemoteError,
    first_line,
    release_memory,
    with_empty_caches,
)
from dynaxla.bench.suites import BenchCase
from dynaxla.runtime.devices import jax_device

from . import engines


class Remote:
    """A runner in a separate process, which builds the same model from the same seed. That process idles while others are timed."""

    def __init__(self, engine: BenchEngine, case: BenchCase, setup: ModelSetup) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, engine.name, case, setup), daemon=True)
        self._process.start()
        theirs.close()

    def _ask(self, request: str, *arguments: Any) -> Any:
        try:
            self._connection.send((request, *arguments))
            answer = self._connection.recv()
        except (EOFError, BrokenPipeError) as error:
            self._process.join(10)
            raise RemoteError(f"the engine's process ended with exit code {self._process.exitcode}") from error
        if isinstance(answer, RemoteError):
            raise answer
        return answer

    def call(self, inputs: Inputs) -> Any:
        return self._ask("call", inputs)

    def time(self, batches: Sequence[Inputs]) -> BenchTiming:
        return self._ask("time", list(batches))

    def memory(self, batches: Sequence[Inputs]) -> AddedMemory:
        return self._ask("memory", list(batches))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(connection: Connection, engine_name: str, case: BenchCase, setup: ModelSetup) -> None:
    torch.set_num_threads(setup.threads)
    local: LocalRunner | None = None
    with torch.no_grad(), with_empty_caches():
        model = setup.model(case)
        while True:
            try:
                request, argument = connection.recv()
            except EOFError:
                return
            try:
                if request == "memory":
                    answer: Any = _measure_memory(engine_name, model, argument, setup)
                else:
                    if local is None:
                        first = argument if request == "call" else argument[0]
                        local = LocalRunner(engines.ENGINES[engine_name], model, first, setup)
                    answer = local.call(argument) if request == "call" else local.time(argument)
            except Exception as error:
                answer = RemoteError(first_line(error))
            connection.send(answer)


def measure_memory(engine: BenchEngine, case: BenchCase, setup: ModelSetup, batches: Sequence[Inputs]) -> AddedMemory:
    """Measures an engine's memory in a fresh process, without that of other engines. Raises: RemoteError if the engine fails."""
    remote = Remote(engine, case, setup)
    try:
        return remote.memory(batches)
    finally:
        remote.close()


def _measure_memory(engine_name: str, model: nn.Module, batches: Sequence[Inputs], setup: ModelSetup) -> AddedMemory:
    release_memory()
    before = resident_bytes()
    resettable = _reset_peak()
    local = LocalRunner(engines.ENGINES[engine_name], model, batches[0], setup)
    for inputs in batches:
        local.call(inputs)
    peak = _peak_bytes() if resettable else max(before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT)
    gc.collect()
    return AddedMemory(peak - before, resident_bytes() - before, device_peak_bytes(setup.device))


def device_peak_bytes(device: torch.device) -> int | None:
    """Returns the sum of the peak of torch's allocator since its statistics were reset, and of JAX's peak so far; None on the CPU.

    The two peaks need not be at the same time.
    """
    if device.type != "cuda":
        return None
    # `jax_device` keeps JAX from preallocating the GPU's memory if its client is only created now.
    statistics = jax_device(device).memory_stats() or {}
    return torch.cuda.max_memory_allocated(device) + statistics.get("peak_bytes_in_use", 0)


_MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024


def resident_bytes() -> int:
    """Returns the resident memory of this process in bytes; 0 on systems other than Linux."""
    return _status("VmRSS:")


def _peak_bytes() -> int:
    return _status("VmHWM:")


def _status(field: str) -> int:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    return 0


def _reset_peak() -> bool:
    """Resets the peak of resident memory. Returns: True if that is possible (Linux).

    The peak in getrusage cannot be reset, and a process inherits it across an exec.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True
