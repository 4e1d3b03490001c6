"""Reports each rewrite of a graph to listeners of events and to the dump: the number of nodes before and after the rewrite.

The graphs of level "jaxpr" are rewritten while JAX traces the program: a pass evaluates one jaxpr, and JAX traces the next one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from . import events


class _ThreadReports(threading.local):
    """The reports of a thread.

    Attributes:
        file: The dump file to which reports are appended; None without a dump.
        evaluations: For the program that is being traced, the name of each rewrite so far, and the number of equations before the rewrite.
            None if no program is being traced, or if rewrites are not reported.
    """

    file: Path | None = None
    evaluations: list[tuple[str, int]] | None = None


_thread = _ThreadReports()


def are_reported() -> bool:
    """True if this thread's rewrites are reported to a listener or a dump."""
    return _thread.file is not None or events.has_listeners()


@contextlib.contextmanager
def dumping_to(directory: Path | None, name: str) -> Iterator[None]:
    """Appends this thread's reports inside the context to NAME.passes.txt in the directory of the dump, if there is one."""
    before = _thread.file
    _thread.file = None if directory is None else directory / f"{name}.passes.txt"
    try:
        yield
    finally:
        _thread.file = before


def report(name: str, level: str, before: int, after: Sequence[int]) -> None:
    """Reports a rewrite.

    Args:
        name: The name of the rewrite.
        level: The kind of graph that it rewrites: "dynamo", "joint", "aten" or "jaxpr".
        before: The number of nodes or equations before the rewrite.
        after: This number for each graph that the rewrite returned.
    """
    event = events.GraphRewritten(name, level, before, tuple(after))
    if _thread.file is not None:
        with _thread.file.open("a") as file:
            file.write(f"{level:8}{name:24}{before} -> {event.sizes}\n")
    if events.has_listeners():
        events.emit(event)


@contextlib.contextmanager
def tracing() -> Iterator[Callable[[int], None]]:
    """Collects the rewrites of a program that is traced inside the context.

    Yields a function that reports these rewrites. Its argument is the number of equations of the final program.
    """
    before, evaluations = _thread.evaluations, list[tuple[str, int]]()
    _thread.evaluations = evaluations if are_reported() else None

    def finish(equations: int) -> None:
        for (name, before), after in zip(evaluations, [*(count for _, count in evaluations[1:]), equations], strict=False):
            report(name, "jaxpr", before, (after,))

    try:
        yield finish
    finally:
        _thread.evaluations = before


def note_evaluation(name: str, equations: int) -> None:
    """Notes that a pass evaluates a jaxpr, and so rewrites it. `equations`: the number of the jaxpr's equations before the rewrite."""
    if _thread.evaluations is not None:
        _thread.evaluations.append((name, equations))
