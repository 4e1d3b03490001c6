"""Process-wide record of the decisions of the option `engines`: the engine that runs each graph, and the reason.

An *engine* is eager mode or a backend of torch.compile, such as dynaxla or Inductor. Engines compete for a graph in its first calls.
"""

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
    """The choice of an engine for a graph, for all dynamic sizes up to some bounds.

    Attributes:
        graph: The graph's name, as in dumps, without the phase.
        phase: "inference" or "training".
        sizes: The upper bound of each dynamic size, a power of two; () for a graph with static sizes.
        chosen: The name of the chosen engine.
        why: The reason for the choice.
        seconds: By engine, for those that were timed, the time of a call. In training, it includes the backward pass.
        left_out: By engine, for those that were left out, the reason.
        is_stored: True if an earlier process made the measurement, and stored it in the cache directory.
    """

    graph: str
    phase: str
    sizes: tuple[Any, ...]
    chosen: str
    why: str
    seconds: Mapping[str, float] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    is_stored: bool = False

    def __str__(self) -> str:
        sizes = f" for sizes up to {list(self.sizes)}" if self.sizes else ""
        times = "".join(f"; {name} {seconds * 1e6:.1f} us" for name, seconds in self.seconds.items())
        others = "".join(f"; {name}: {reason}" for name, reason in self.left_out.items())
        return f"{self.graph} ({self.phase}){sizes} is run by {self.chosen}: {self.why}{times}{others}"


# The latest verdicts.
_verdicts: deque[Verdict] = deque(maxlen=4096)
# The names and content keys of the latest graphs for which engines compete.
_content_keys: deque[tuple[str, str]] = deque(maxlen=4096)
_lock = forks.lock()


def record_verdict(verdict: Verdict) -> None:
    """Records a verdict, and logs it."""
    with _lock:
        _verdicts.append(verdict)
    log.info("%s", verdict)


def verdicts() -> list[dict[str, Any]]:
    """Returns the decisions since the process began or `reset()`, in order, as plain data (see `Verdict`).

    A later decision on the same graph and sizes supersedes an earlier one.
    """
    with _lock:
        return [dataclasses.asdict(verdict) for verdict in _verdicts]


def register_graph(graph: str, content: str) -> None:
    """Registers a graph for which engines will compete.

    Args:
        graph: The graph's name.
        content: A key that is equal for two graphs if the verdict on one graph applies to the other.
    """
    with _lock:
        _content_keys.append((graph, content))


def latest_verdict(graph: str) -> tuple[Verdict | None, bool]:
    """Returns the latest verdict on a graph, and False.

    If there is none, returns the latest verdict on another graph with equal content, and True. If there is none either, None and False.
    """
    with _lock:
        content = dict(_content_keys).get(graph)
        equal_graphs = {name for name, other in _content_keys if other == content} - {graph}
        for names in ({graph}, equal_graphs):
            for verdict in reversed(_verdicts):
                if verdict.graph in names:
                    return verdict, names is equal_graphs
    return None, False


def reset() -> None:
    """Clears all verdicts and graphs."""
    with _lock:
        _verdicts.clear()
        _content_keys.clear()
