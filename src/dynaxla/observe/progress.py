"""Reports of long compilations: a line on stderr after 10 seconds, and then one every 30 seconds.

Lines appear where a person reads them: on a terminal, or in a notebook. If the logger "dynaxla" has a level or a handler of its own, lines
go to this logger instead, with the level INFO. The environment variable DYNAXLA_PROGRESS=0 turns them off.

A *compilation* is a series of phases, such as tracing and lowering, without long pauses. It may have several graphs. A thread writes the
lines, since XLA compiles in a single call. The thread starts only if a phase begins when the compilation has already taken a while, or if a
large graph is captured. It ends when no phase is in progress.
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
FIRST_LINE, LINE_INTERVAL = 10.0, 30.0
# A compilation ends after this many seconds without a phase. The next phase begins another compilation.
_MAX_PAUSE = 5.0
# After this many seconds, a compilation also ends if phases took less than half of it, as in a loop whose calls compile now and then.
_SPARSE_AFTER = 5.0
# The thread starts at a phase only if the compilation has taken this many seconds before. XLA takes less than a hundred times as long as
# the earlier phases of a graph, so a compilation with shorter phases ends before its first line would be due.
_THREAD_AFTER = 0.1
# The capture of a graph of at least this many nodes may take seconds, so the thread starts at once.
_LARGE_CAPTURE = 500
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
        started: the time at which the phase began, by `time.monotonic`.
    """

    name: str
    graph: str
    started: float


class Progress:
    """The phases in progress in this process, and the thread that reports them. Thread-safe."""

    def __init__(self) -> None:
        self.after_fork()
        forks.call_after_fork(self)

    def after_fork(self) -> None:
        """Resets the state, because in a forked child the phases in progress are phases of the parent."""
        self._changed = threading.Condition(forks.lock())
        self._phases: dict[object, _Phase] = {}
        self._graphs: dict[str, int] = {}  # the graphs of this compilation, numbered in order
        self._started_at = self._ended_at = self._next_line_at = self._resumed_at = float("-inf")
        self._busy_seconds = 0.0  # seconds of this compilation with a phase in progress
        self._thread: threading.Thread | None = None

    def begin(self, name: str, graph: str, nodes: int = 0) -> object | None:
        """Adds a phase to the phases in progress.

        Args:
            name: the phase.
            graph: the graph's name, or "".
            nodes: the number of the graph's nodes, if the phase captures it; else 0.

        Returns: a token for `end`; None for a phase that is not in `_PHASES`, which is not reported.
        """
        if name not in _PHASES:
            return None
        token, now = object(), time.monotonic()
        with self._changed:
            if not self._phases:
                self._continue_or_begin(now)
            self._phases[token] = _Phase(name, graph, now)
            if graph:
                self._graphs.setdefault(_captured_graph(graph), len(self._graphs) + 1)
            if self._thread is None and (now - self._started_at > _THREAD_AFTER or nodes >= _LARGE_CAPTURE) and is_enabled():
                self._start()
        return token

    def end(self, token: object) -> None:
        """Removes a phase from the phases in progress."""
        with self._changed:
            self._phases.pop(token, None)
            if not self._phases:
                self._ended_at = time.monotonic()
                self._busy_seconds += self._ended_at - self._resumed_at
                self._changed.notify_all()

    def _continue_or_begin(self, now: float) -> None:
        """Continues the current compilation or begins a new one. Called for a phase that begins while no other phase is in progress."""
        passed = now - self._started_at
        if now - self._ended_at > _MAX_PAUSE or (passed > _SPARSE_AFTER and self._busy_seconds < passed / 2):
            self._started_at, self._next_line_at, self._busy_seconds = now, now + FIRST_LINE, 0.0
            self._graphs.clear()
        self._resumed_at = now

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
        """Waits until a line is due, and returns the line. Returns None when no phase is in progress: the thread must end."""
        with self._changed:
            while self._phases and threading.main_thread().is_alive():
                now = time.monotonic()
                if now >= self._next_line_at:
                    self._next_line_at = now + LINE_INTERVAL
                    return self._line(now)
                self._changed.wait(self._next_line_at - now)
            self._thread = None
        return None

    def _line(self, now: float) -> str:
        phase = list(self._phases.values())[-1]
        subject = (
            f"graph {self._graphs[_captured_graph(phase.graph)]} of {len(self._graphs)} so far, {phase.graph}" if phase.graph else "a graph"
        )
        return (
            f"dynaxla has been compiling for {now - self._started_at:.0f} s: {subject}: {_PHASES[phase.name]} ({now - phase.started:.0f} s)"
        )


def _captured_graph(graph: str) -> str:
    """Returns the name of the captured graph to which a graph belongs: dynaxla_3 for dynaxla_3_backward."""
    return "_".join(graph.split("_", 2)[:2])


_progress = Progress()
begin, end = _progress.begin, _progress.end


def is_enabled() -> bool:
    """True if lines are written: to a terminal, to a notebook, or to a log that the user has configured."""
    return os.environ.get("DYNAXLA_PROGRESS", "1") != "0" and (_is_configured() or _is_interactive(sys.stderr))


def write_line(line: str) -> None:
    """Writes a line to the log, if the user has configured the logger, or else to stderr."""
    if _is_configured():
        log.info(line)
    elif sys.stderr is not None:
        print(line, file=sys.stderr, flush=True)


def _is_configured() -> bool:
    """True if the user has configured the logger "dynaxla"."""
    return log.level != logging.NOTSET or bool(log.handlers)


def _is_interactive(stream: object) -> bool:
    """True for a terminal, and for the output stream of a notebook's kernel."""
    if type(stream).__module__.partition(".")[0] == "ipykernel":
        return True
    try:
        return bool(stream.isatty())  # type: ignore[attr-defined]
    except (AttributeError, ValueError):  # there is no stream, or it is closed
        return False
