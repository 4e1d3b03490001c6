"""Which engine runs a graph, and why: what the option `engines` has decided, process-wide, as plain data."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .. import forks
from .dump import log


@dataclass(frozen=True)
class Verdict:
    """Which engine serves calls of a graph with sizes of one class.

    Attributes: graph (its name, as in dumps, without the phase); phase ("inference" or "training"); sizes (the bounds of the class, powers
    of two, for each size that may change; () for a graph with fixed sizes); chosen (the engine's name); why; seconds (of
    the engines that were timed: a call, in training with its backward pass); left_out (the others, and why); kept (whether an earlier
    process measured it).
    """

    graph: str
    phase: str
    sizes: tuple[Any, ...]
    chosen: str
    why: str
    seconds: Mapping[str, float] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    kept: bool = False

    def __str__(self) -> str:
        sizes = f" for sizes up to {list(self.sizes)}" if self.sizes else ""
        times = "".join(f"; {name} {seconds * 1e6:.1f} us" for name, seconds in self.seconds.items())
        others = "".join(f"; {name}: {reason}" for name, reason in self.left_out.items())
        return f"{self.graph} ({self.phase}){sizes} is run by {self.chosen}: {self.why}{times}{others}"


# The last ones.
_verdicts: deque[Verdict] = deque(maxlen=4096)
# The last graphs that engines compete for, each by its name with what it is.
_contents: deque[tuple[str, str]] = deque(maxlen=4096)
_lock = forks.lock()


def note(verdict: Verdict) -> None:
    """Keep a verdict, and log it."""
    with _lock:
        _verdicts.append(verdict)
    log.info("%s", verdict)


def verdicts() -> list[dict[str, Any]]:
    """What was decided since the process began or `reset()`, in its order, as plain data: see `Verdict`. A later one about the same graph
    and the same sizes takes the place of an earlier one."""
    with _lock:
        return [dataclasses.asdict(verdict) for verdict in _verdicts]


def introduce(graph: str, content: str) -> None:
    """Engines will compete for a graph. content: the same for graphs for which the same is right and fast."""
    with _lock:
        _contents.append((graph, content))


def last_about(graph: str) -> tuple[Verdict | None, bool]:
    """The last verdict about a graph, or else about another one of the same content; and whether it is about the other."""
    with _lock:
        content = dict(_contents).get(graph)
        alike = {name for name, known in _contents if known == content} - {graph}
        for names in ({graph}, alike):
            for verdict in reversed(_verdicts):
                if verdict.graph in names:
                    return verdict, names is alike
    return None, False


def reset() -> None:
    """Forget all."""
    with _lock:
        _verdicts.clear()
        _contents.clear()
