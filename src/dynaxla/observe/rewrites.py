"""Reports what each rewrite of a graph did: the number of nodes before and after it, to listeners of events and to the dump."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from . import events


class _ThreadReports(threading.local):
    """The reports of a thread.

    Attributes:
        file: The file of the dump that reports are appended to; None for none.
        evaluations: The rewrites of the program that is being traced, each with the number of equations before it; None if no program is
            traced, or nothing is reported.
    """

    file: Path | None = None
    evaluations: list[tuple[str, int]] | None = None


_thread = _ThreadReports()


def are_reported() -> bool:
    """True if this thread's rewrites are reported to a listener or a dump."""
    return _thread.file is not None or events.has_listeners()


@contextlib.contextmanager
def dumped(directory: Path | None, name: str) -> Iterator[None]:
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
        before: The number of nodes or equations before it.
        after: This number for each graph that it returned.
    """
    event = events.Rewritten(name, level, before, tuple(after))
    if _thread.file is not None:
        with _thread.file.open("a") as file:
            file.write(f"{level:8}{name:24}{before} -> {event.sizes}\n")
    if events.has_listeners():
        events.emit(event)


@contextlib.contextmanager
def tracing() -> Iterator[Callable[[int], None]]:
    """Inside the context, a program is traced. Yields a function that takes its number of equations, and reports how it was rewritten."""
    before, noted = _thread.evaluations, list[tuple[str, int]]()
    _thread.evaluations = noted if are_reported() else None

    def finish(equations: int) -> None:
        for (name, before), after in zip(noted, [*(count for _, count in noted[1:]), equations], strict=False):
            report(name, "jaxpr", before, (after,))

    try:
        yield finish
    finally:
        _thread.evaluations = before


def evaluating(name: str, equations: int) -> None:
    """Notes that a pass evaluates a traced program with this number of equations."""
    if _thread.evaluations is not None:
        _thread.evaluations.append((name, equations))
