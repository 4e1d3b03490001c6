"""Reports of long compilations: a line on stderr after 10 seconds, and then one every 30 seconds.

Lines appear where a person reads them: on a terminal, or in a notebook. If the logger "dynaxla" has a level or a handler of its own, lines
go there instead, with the level INFO. The environment variable DYNAXLA_PROGRESS=0 turns them off.

A thread writes the lines, since XLA compiles in a single call. The thread starts only if a phase begins when the compilation has already
taken a while, or if a large graph is captured, and it ends with the phase. Calls that compile nothing do not come here.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from typing import NamedTuple

from .. import forks

log = logging.getLogger("dynaxla")

# Seconds until the first line, and between two lines.
FIRST, EVERY = 10.0, 30.0
# Seconds without a phase that end a compilation: the next phase begins another one.
_PAUSE = 5.0
# Seconds after which a compilation also ends if phases were less than half of the time, as in a loop whose calls compile now and then.
_SPARSE = 5.0
# Seconds of a compilation before a phase gets a thread. XLA takes longer for a graph than the phases before it, but no hundred times.
_SHORT = 0.1
# Nodes of a graph whose capture may take seconds.
_LARGE = 500
_PHASES = {
    "capture": "AOTAutograd captures it",
    "trace": "JAX traces it",
    "lower": "JAX lowers it",
    "compile": "XLA compiles it",
    "tune": "its implementations are measured",
}


class _Phase(NamedTuple):
    """A phase in progress.

    Attributes:
        name: a key of _PHASES.
        graph: the graph's name, or "".
        begun: the time at which it began.
    """

    name: str
    graph: str
    begun: float


class Progress:
    """The phases in progress in this process, and the thread that reports them. Thread-safe."""

    def __init__(self) -> None:
        self.after_fork()
        forks.renew(self)

    def after_fork(self) -> None:
        """Resets the state. In a forked child: the phases are those of the parent."""
        self._changed = threading.Condition(forks.lock())
        self._phases: dict[object, _Phase] = {}
        self._graphs: dict[str, int] = {}  # the graphs of this compilation, numbered in order
        self._begun = self._ended = self._due = self._resumed = float("-inf")
        self._busy = 0.0  # seconds of this compilation with a phase in progress
        self._thread: threading.Thread | None = None

    def begin(self, name: str, graph: str, nodes: int = 0) -> object | None:
        """Notes the beginning of a phase. Returns a token for `end`; None for a phase that is not part of a compilation.

        Args:
            name: the phase.
            graph: the graph's name, or "".
            nodes: the number of the graph's nodes, if it is captured now.
        """
        if name not in _PHASES:
            return None
        token, now = object(), time.monotonic()
        with self._changed:
            if not self._phases:
                self._continue_or_begin(now)
            self._phases[token] = _Phase(name, graph, now)
            if graph:
                self._graphs.setdefault(_captured(graph), len(self._graphs) + 1)
            if self._thread is None and (now - self._begun > _SHORT or nodes >= _LARGE) and is_wanted():
                self._start()
        return token

    def end(self, token: object) -> None:
        """Notes the end of a phase."""
        with self._changed:
            self._phases.pop(token, None)
            if not self._phases:
                self._ended = time.monotonic()
                self._busy += self._ended - self._resumed
                self._changed.notify_all()

    def _continue_or_begin(self, now: float) -> None:
        """Decides whether a phase that begins now, when there is no other, belongs to the compilation so far or to a new one."""
        passed = now - self._begun
        if now - self._ended > _PAUSE or (passed > _SPARSE and self._busy < passed / 2):
            self._begun, self._due, self._busy = now, now + FIRST, 0.0
            self._graphs.clear()
        self._resumed = now

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="dynaxla progress", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the system cannot start a thread now, or Python is shutting down
            self._thread = None

    def _run(self) -> None:
        while (line := self._next()) is not None:
            write_line(line)

    def _next(self) -> str | None:
        """Waits until a line is due, and returns it; None when no phase is in progress."""
        with self._changed:
            while self._phases and threading.main_thread().is_alive():
                now = time.monotonic()
                if now >= self._due:
                    self._due = now + EVERY
                    return self._line(now)
                self._changed.wait(self._due - now)
            self._thread = None
        return None

    def _line(self, now: float) -> str:
        phase = list(self._phases.values())[-1]
        which = f"graph {self._graphs[_captured(phase.graph)]} of {len(self._graphs)} so far, {phase.graph}" if phase.graph else "a graph"
        return f"dynaxla has been compiling for {now - self._begun:.0f} s: {which}: {_PHASES[phase.name]} ({now - phase.begun:.0f} s)"


def _captured(graph: str) -> str:
    """Returns the name of the captured graph to which a graph belongs: dynaxla_3 for dynaxla_3_backward."""
    return "_".join(graph.split("_", 2)[:2])


_progress = Progress()
begin, end = _progress.begin, _progress.end


def is_wanted() -> bool:
    """True if somebody reads the lines: on a terminal, in a notebook, or in the log."""
    return os.environ.get("DYNAXLA_PROGRESS", "1") != "0" and (_is_configured() or _is_read(sys.stderr))


def write_line(line: str) -> None:
    """Writes a line to the log, if the user has configured the logger, or else to stderr."""
    if _is_configured():
        log.info(line)
    elif sys.stderr is not None:
        print(line, file=sys.stderr, flush=True)


def _is_configured() -> bool:
    """True if the user has configured the logger "dynaxla"."""
    return log.level != logging.NOTSET or bool(log.handlers)


def _is_read(stream: object) -> bool:
    """True for a terminal, and for the stream of a notebook's kernel."""
    if type(stream).__module__.partition(".")[0] == "ipykernel":
        return True
    try:
        return bool(stream.isatty())  # type: ignore[attr-defined]
    except (AttributeError, ValueError):  # there is no stream, or it is closed
        return False
