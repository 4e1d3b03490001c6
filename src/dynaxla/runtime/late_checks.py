"""Asynchronous checks of programs on a GPU or TPU: no call waits for them.

A program with checks, such as range checks of indices, returns a *code*: the index of the first check that failed, or the number of checks
if all have held. The code is copied to the host without a wait. For CUDA tensors, the copy goes to pinned memory, and a CUDA event shows
when it has arrived. For tensors that are JAX arrays, JAX makes the copy. Every later call of any program on the device first reads the
codes that have arrived, in order, and raises the error of the first code that reports a failure. `finish` waits for all codes. Failures
that no call has raised are logged when the process ends.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

from .. import forks

log = logging.getLogger("dynaxla")

_thread = threading.local()  # attribute `codes`: the list of the innermost context `collected`

# The exception class and message of each check of a program.
Checks = Sequence[tuple[type[Exception], str]]

# The maximum number of codes in flight on a device, that is, of codes that the host has not read. A CUDA stream queues about this many
# kernels before it blocks the host.
MAX_IN_FLIGHT = 1024


def failure(code: int, checks: Checks, name: str = "") -> Exception | None:
    """Returns the error of a program's code; None if no check failed.

    Args:
        code: The index of the first check that failed, or the number of checks.
        checks: The exception class and message of each check.
        name: The program's name if its call has already returned; else "". With a name, a note of the error says which program failed.
    """
    if code >= len(checks):
        return None
    error, message = checks[code]
    exception = error(message)
    if name:
        exception.add_note(f"An earlier call of {name} found this while it ran on the device. The inputs that it writes to are unchanged.")
    return exception


def pinned(count: int) -> torch.Tensor:
    """Returns int32[count] in pinned host memory."""
    return torch.empty(count, dtype=torch.int32, pin_memory=True)


@contextlib.contextmanager
def collected() -> Iterator[list[tuple[torch.Tensor, int]]]:
    """Collects the codes of the programs that this thread calls inside the context.

    Yields: a list of pairs: the code (int32[], on the device), and the value that the code has if no check has failed.
    """
    outer = getattr(_thread, "codes", None)
    _thread.codes = []
    try:
        yield _thread.codes
    finally:
        _thread.codes = outer


def any_failed(codes: Sequence[tuple[torch.Tensor, int]]) -> torch.Tensor | None:
    """Returns 1.0 if one of the codes reports a failed check, else 0.0: float32[], on the device of the codes. None if there are no codes.

    torch's fused optimizers take this value as `found_inf`, which makes them skip the update.

    Args:
        codes: The pairs that `collected` yields.
    """
    if not codes:
        return None
    device = codes[0][0].device
    return torch.stack([(code != all_held).to(device) for code, all_held in codes]).any().to(torch.float32)


@dataclass(frozen=True)
class _Report:
    """A code in flight.

    Attributes:
        sent: The handle of the copy, from `Reports._send`.
        checks: The exception class and message of each of the program's checks.
        name: The program's name.
    """

    sent: Any
    checks: Checks
    name: str


class Reports(ABC):
    """The codes in flight on one device. Thread-safe. A failure is raised once, in the thread that reads its code."""

    def __init__(self) -> None:
        self._in_flight: deque[_Report] = deque()
        self._lock = forks.lock()
        forks.call_after_fork(self)

    @abstractmethod
    def _send(self, code: Any) -> Any:
        """Starts the copy of a code to the host. Returns: a handle of the copy."""

    @abstractmethod
    def _has_arrived(self, sent: Any) -> bool:
        """True if the copy is complete."""

    @abstractmethod
    def _wait(self, sent: Any) -> None:
        """Waits until the copy is complete."""

    @abstractmethod
    def _receive(self, sent: Any) -> int:
        """Returns the code of a complete copy. Called once for each copy."""

    def add(self, code: Any, checks: Checks, name: str) -> None:
        """Queues the code of a program that has been called. If MAX_IN_FLIGHT codes are in flight, first waits for the oldest of them.

        Args:
            code: The code, int32[], on the device.
            checks: The program's checks.
            name: The program's name.

        Raises: the error of an earlier code.
        """
        with self._lock:
            while len(self._in_flight) >= MAX_IN_FLIGHT:
                self._wait(self._in_flight[0].sent)
                self._raise_first()
            self._in_flight.append(_Report(self._send(code), checks, name))
        if (codes := getattr(_thread, "codes", None)) is not None:
            codes.append((code, len(checks)))

    def raise_if_failed(self) -> None:
        """Raises the error of the first code that has arrived and reports a failure."""
        if self._in_flight:
            with self._lock:
                self._raise_first()

    def finish(self) -> None:
        """Waits for all codes in flight. Raises: the error of the first code that reports a failure; see the function `finish`."""
        with self._lock:
            for report in list(self._in_flight):
                self._wait(report.sent)
            self._raise_first()

    def _raise_first(self) -> None:
        """Removes the codes that have arrived, in order. Raises: the error of the first code that reports a failure.

        The caller must hold the lock.
        """
        while self._in_flight and self._has_arrived(self._in_flight[0].sent):
            report = self._in_flight.popleft()
            if (error := failure(self._receive(report.sent), report.checks, report.name)) is not None:
                raise error

    def after_fork(self) -> None:
        """In a forked child: drops the parent's codes without freeing them."""
        forks.leak(self._in_flight)
        self._in_flight = deque()

    def at_exit(self) -> None:
        """At the end of the process: logs the failures that no call has raised."""
        before = -1
        while len(self._in_flight) != before:
            before = len(self._in_flight)
            try:
                return self.finish()
            except Exception as error:
                log.error("%s", "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]))


class _Slot(NamedTuple):
    """An element of the pinned memory, for one code.

    Attributes:
        position: The index of the element.
        event: A CUDA event that completes when the code has arrived.
    """

    position: int
    event: Any


class CudaReports(Reports):
    """The codes in flight on one CUDA device. The codes are tensors."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._slots = pinned(MAX_IN_FLIGHT)
        self._codes = self._slots.numpy()
        self._free = [_Slot(index, torch.cuda.Event()) for index in range(MAX_IN_FLIGHT)]

    def _send(self, code: torch.Tensor) -> _Slot:
        slot = self._free[-1]
        self._slots[slot.position].copy_(code, non_blocking=True)
        slot.event.record(torch.cuda.current_stream(self._device))
        return self._free.pop()  # only now, so that no slot is lost if CUDA raises above

    def _has_arrived(self, sent: _Slot) -> bool:
        return bool(sent.event.query())

    def _wait(self, sent: _Slot) -> None:
        sent.event.synchronize()

    def _receive(self, sent: _Slot) -> int:
        self._free.append(sent)
        return int(self._codes[sent.position])

    def after_fork(self) -> None:
        forks.leak(self._free)
        super().after_fork()


class ArrayReports(Reports):
    """The codes in flight on one device whose tensors are JAX arrays. The codes are JAX arrays."""

    def _send(self, code: jax.Array) -> jax.Array:
        code.copy_to_host_async()
        return code

    def _has_arrived(self, sent: jax.Array) -> bool:
        return sent.is_ready()

    def _wait(self, sent: jax.Array) -> None:
        sent.block_until_ready()

    def _receive(self, sent: jax.Array) -> int:
        return int(np.asarray(sent))


def is_asynchronous(platform: str) -> bool:
    """True if a program's call may return long before a device of the platform has run it."""
    return platform != "cpu"


_reports: dict[torch.device, Reports] = {}
_creation_lock = forks.lock()


def of(device: torch.device) -> Reports:
    """Returns the codes in flight on a device. The first call for a device creates the object."""
    with _creation_lock:
        if device not in _reports:
            _reports[device] = CudaReports(device) if device.type == "cuda" else ArrayReports()
            atexit.register(_reports[device].at_exit)
        return _reports[device]


def raise_if_failed(device: torch.device) -> None:
    """Raises the error of the first code of a device that has arrived and reports a failure."""
    if (reports := _reports.get(device)) is not None:
        reports.raise_if_failed()


def finish() -> None:
    """Waits until GPUs and TPUs have run all called programs that have checks, such as range checks of indices.

    Raises: the error of the first failed check. The next call, of this function or of a program on the device, raises the error of the next
    failed check. On the CPU there is nothing to wait for, because each call raises its own errors.
    """
    for reports in list(_reports.values()):
        reports.finish()
