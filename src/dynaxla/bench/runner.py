"""Runs one of the benchmark's engines on one model."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import nn

from ..autoselect import contest
from ..observe import metrics
from .engines import BenchEngine
from .suites import BenchCase, make_inputs, make_model
from .training import TrainingStep

Inputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class ModelSetup:
    """The setup of a model and its inputs.

    Attributes:
        batch: the batch size.
        dtype: the dtype of parameters and of floating-point inputs.
        device: the device of parameters and inputs.
        seed: the seed of the parameters.
        threads: the number of threads of torch, and of XLA's CPU pools unless PJRT_NPROC is set.
        training: the name of an optimizer if training steps are measured, else "".
    """

    batch: int = 1
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seed: int = 0
    threads: int = 1
    training: str = ""

    def model(self, case: BenchCase) -> nn.Module:
        model = make_model(case, self.seed, self.dtype, self.device)
        return TrainingStep(model, self.training) if self.training else model

    def inputs(self, case: BenchCase, generator: torch.Generator) -> Inputs:
        return make_inputs(case, self.batch, generator, self.dtype, self.device)

    @property
    def eager_setup(self) -> ModelSetup:
        """The setup of the eager-mode reference: this setup, with the CPU in place of the device "jax"."""
        return replace(self, device=torch.device("cpu")) if self.device.type == "jax" else self

    def synchronise(self) -> None:
        if self.device.type != "cpu":
            with metrics.timed("wait"):
                torch.get_device_module(self.device).synchronize(self.device)


@dataclass(frozen=True)
class BenchTiming:
    """The time of several calls together, including the device's work.

    Attributes:
        wall_seconds: the wall time.
        cpu_seconds: the CPU time of all threads of the process.
    """

    wall_seconds: float
    cpu_seconds: float


class BenchRunner(Protocol):
    """Runs calls of one engine for one model, in this process or in another one."""

    def call(self, inputs: Inputs) -> Any:
        """Returns the result of one call, after the device has finished."""
        ...

    def time(self, batches: Sequence[Inputs]) -> BenchTiming:
        """Times one call after the other, with one synchronization at the end."""
        ...

    def close(self) -> None: ...


class LocalRunner:
    """A runner in this process.

    A native engine runs on the CPU while other engines run on the device "jax": its model is on the CPU, and each call's inputs are copied
    there.
    """

    def __init__(self, engine: BenchEngine, model: nn.Module, inputs: Inputs, setup: ModelSetup) -> None:
        self._setup = setup
        self._native = engine.native
        self._call = engine.prepare_call(model, self._on_engine_device(inputs))

    def _on_engine_device(self, inputs: Inputs) -> Inputs:
        return tuple(tensor.cpu() for tensor in inputs) if self._native else inputs

    def call(self, inputs: Inputs) -> Any:
        result = self._call(*self._on_engine_device(inputs))
        self._setup.synchronise()
        return result

    def time(self, batches: Sequence[Inputs]) -> BenchTiming:
        call, batches = self._call, list(map(self._on_engine_device, batches))
        with _no_garbage_collection():
            self._setup.synchronise()
            cpu, wall = time.process_time(), time.perf_counter()
            for inputs in batches:
                call(*inputs)
            self._setup.synchronise()
            return BenchTiming(time.perf_counter() - wall, time.process_time() - cpu)

    def close(self) -> None:
        self._call = _raise_closed


def _raise_closed(*_: Any) -> Any:
    raise RuntimeError("the runner is closed")


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class RemoteError(RuntimeError):
    """An exception of another process, as one line of text, since not every exception can be pickled."""


@dataclass(frozen=True)
class AddedMemory:
    """Bytes that calls add to the memory of a process that already has the model and its inputs.

    Child processes (Inductor's compilers) are not included.

    Attributes:
        peak_bytes: the increase of memory at its peak during the first calls, which compile.
        kept_bytes: the increase of memory that remains after these calls.
        device_peak_bytes: on a GPU, the peak of the device memory of torch and JAX, with the model; else None.
    """

    peak_bytes: int
    kept_bytes: int
    device_peak_bytes: int | None = None


@contextlib.contextmanager
def with_empty_caches() -> Iterator[None]:
    """Inside the context, the caches of Inductor and dynaxla on disk are empty directories, so that first calls compile."""
    with contextlib.ExitStack() as stack:
        before = os.environ.get("DYNAXLA_CACHE")
        os.environ["DYNAXLA_CACHE"] = stack.enter_context(tempfile.TemporaryDirectory())
        stack.callback(_restore, "DYNAXLA_CACHE", before)
        with contextlib.suppress(ImportError, AttributeError):
            from torch._inductor.utils import fresh_cache

            stack.enter_context(fresh_cache())
        yield


def _restore(variable: str, value: str | None) -> None:
    if value is None:
        del os.environ[variable]
    else:
        os.environ[variable] = value


def release_memory() -> None:
    """Collects garbage, and returns free memory of torch's CUDA cache and of the C library to the system."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def first_line(error: BaseException) -> str:
    """Returns the line of a `RemoteError`, and `contest.first_line` of any other error."""
    return str(error) if isinstance(error, RemoteError) else contest.first_line(error)
