"""Checks of programs that no call waits for: their results come to the host when the device has come to them.

A program on a GPU gives the number of its first check that failed. It is copied to pinned memory, and an event behind the copy says when
it is there. Every later call, of whatever program on that device, looks at those that are there, in their order, and raises what the
first failed one asks for, before it does anything itself. `finish_checks` waits for all; at the end of the process those that nobody has
seen are logged.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import forks

log = logging.getLogger("dynaxla")

_thread = threading.local()  # codes: see `collected`

Checks = Sequence[tuple[type[Exception], str]]

# Reports that may be under way at once on a device. A CUDA stream itself takes about as many kernels before it makes the host wait.
MOST = 1024


def failure(code: int, checks: Checks, name: str = "") -> Exception | None:
    """What to raise for a program's code: the index of its first check that failed, or the number of checks.

    name: of a program whose call came back long ago.
    """
    if code >= len(checks):
        return None
    error, message = checks[code]
    raised = error(message)
    if name:
        raised.add_note(f"An earlier call of {name} found this while it ran on the GPU. The inputs that it writes to are unchanged.")
    return raised


def pinned(count: int) -> torch.Tensor:
    """int32[count], in memory of the host that the device can write to by itself."""
    return torch.empty(count, dtype=torch.int32, pin_memory=True)


@contextlib.contextmanager
def collected() -> Iterator[list[tuple[torch.Tensor, int]]]:
    """Inside, the codes that this thread's programs give and that nobody waits for, each with the one that says that all checks hold."""
    outer = getattr(_thread, "codes", None)
    _thread.codes = []
    try:
        yield _thread.codes
    finally:
        _thread.codes = outer


def any_failed(codes: Sequence[tuple[torch.Tensor, int]]) -> torch.Tensor | None:
    """1 if one of these says that a check has failed, else 0: float32[], on their device. None if there are none.

    Optimizers' fused steps take such a number as `found_inf`.
    """
    if not codes:
        return None
    device = codes[0][0].device
    return torch.stack([(code != right).to(device) for code, right in codes]).any().to(torch.float32)


@dataclass(frozen=True)
class _Report:
    """A code on its way. Attributes: event (done when it is there); slot (where); checks, name (of its program)."""

    event: Any
    slot: int
    checks: Checks
    name: str


class Reports:
    """The codes of one CUDA device that are under way. Thread-safe. A failure is raised once, in whichever thread meets it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots = pinned(MOST)
        self._codes = self._slots.numpy()
        self._free = [(slot, torch.cuda.Event()) for slot in range(MOST)]
        self._under_way: deque[_Report] = deque()
        self._lock = forks.lock()
        forks.renew(self)

    def add(self, code: torch.Tensor, checks: Checks, name: str) -> None:
        """Have a program's code (int32[], on the device) looked at later. With MOST under way it waits for the first of them.

        Raises: what that one asks for.
        """
        with self._lock:
            while not self._free:
                self._under_way[0].event.synchronize()
                self._look()
            slot, event = self._free.pop()
            self._slots[slot].copy_(code, non_blocking=True)
            event.record(torch.cuda.current_stream(self._device))
            self._under_way.append(_Report(event, slot, checks, name))
        if (codes := getattr(_thread, "codes", None)) is not None:
            codes.append((code, len(checks)))

    def look(self) -> None:
        """Raises: what the first failed one of the codes that are there asks for."""
        if self._under_way:
            with self._lock:
                self._look()

    def finish(self) -> None:
        """See `finish_checks`."""
        with self._lock:
            for report in list(self._under_way):
                report.event.synchronize()
            self._look()

    def _look(self) -> None:
        while self._under_way and self._under_way[0].event.query():
            report = self._under_way.popleft()
            code = int(self._codes[report.slot])
            self._free.append((report.slot, report.event))
            if (error := failure(code, report.checks, report.name)) is not None:
                raise error

    def after_fork(self) -> None:
        """The parent looks at its own."""
        forks.leave(self._under_way)
        forks.leave(self._free)
        self._under_way = deque()

    def at_exit(self) -> None:
        """Log what nobody has seen. An exception would have no place to go to."""
        before = -1
        while len(self._under_way) != before:
            before = len(self._under_way)
            try:
                return self.finish()
            except Exception as error:
                log.error("%s", "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]))


_reports: dict[torch.device, Reports] = {}
_making = forks.lock()


def of(device: torch.device) -> Reports:
    """Those of a device."""
    with _making:
        if device not in _reports:
            _reports[device] = Reports(device)
            atexit.register(_reports[device].at_exit)
        return _reports[device]


def look(device: torch.device) -> None:
    """Raises: what the first failed one of a device's codes asks for, of those that are there."""
    if (reports := _reports.get(device)) is not None:
        reports.look()


def finish_checks() -> None:
    """Wait until the GPUs have come to all programs with checks that have been called (such as that of an index's range).

    Raises: what the first failed check asks for. What other calls' checks have found is raised by the next call, of this function or of a
    program. On the CPU there is nothing to wait for: a call raises by itself.
    """
    for reports in list(_reports.values()):
        reports.finish()
