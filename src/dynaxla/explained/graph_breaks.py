"""Graph breaks and recompilations, as TorchDynamo reports them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._dynamo.callback import callback_handler
from torch._dynamo.utils import get_compilation_metrics

from ..lowering.graphs import user_frame_or_module
from .explanation import RESUMED, Break, Line, Recompilation

_PART = re.compile(r"^ *(Explanation|Hint|Developer debug context|For more details)", re.MULTILINE)
_BRANCH = "Data-dependent branching"


def first_line(module: torch.fx.GraphModule) -> Line | None:
    """Returns the user's line of the first op in a graph that has one."""
    frames = (user_frame_or_module(node) for node in module.graph.nodes if node.op not in ("placeholder", "output"))
    return next((line for frame in frames if (line := Line.of_frame(frame)) is not None), None)


def break_of(module: torch.fx.GraphModule) -> Break | None:
    """Returns the graph break at the end of this graph; None if the graph ends with its function."""
    reason = getattr(module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    own = [frame for frame in reason.user_stack if "/torch/" not in frame.filename] or list(reason.user_stack)
    line = Line.at(own[-1].filename, own[-1].lineno or 0, own[-1].name) if own else None
    return told(reason.reason, line)


def told(text: str, line: Line | None) -> Break:
    """Parses torch's text about a graph break."""
    parts = _PART.split(text)
    headline = parts[0].strip().partition("\n")[0]
    found: dict[str, list[str]] = {}
    for kind, rest in zip(parts[1::2], parts[2::2], strict=True):
        found.setdefault(kind, []).append(" ".join(rest.removeprefix(":").split()))
    if headline.startswith("generic_jump"):
        headline = _BRANCH
    return Break(line, headline, " ".join(found.get("Explanation", [])), tuple(found.get("Hint", [])))


def _function(name: str) -> str:
    resumed = RESUMED.fullmatch(name)
    return resumed["name"] if resumed else name


class Frames:
    """The functions that TorchDynamo captures inside `heard`, in the threads that count.

    Args:
        counts: returns True if the current thread counts.

    Attributes:
        seconds: the time of TorchDynamo itself, without the backend.
    """

    def __init__(self, counts: Callable[[], bool]) -> None:
        self._counts = counts
        self._ids: set[str] = set()
        self._found: dict[tuple[str, float], Any] = {}
        self._known: set[int] = set()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        self._known = {id(metric) for metric in get_compilation_metrics()}
        kept = get_compilation_metrics()  # keeps these objects alive, so that their ids are not reused
        callback_handler.register_start_callback(self._begin)
        try:
            yield
        finally:
            callback_handler.remove_start_callback(self._begin)
            self.take()
            del kept

    def _begin(self, args: Any) -> None:
        self.take()  # torch keeps only the last metrics
        if self._counts():
            self._ids.add(str(args.compile_id))

    def take(self) -> None:
        for metric in get_compilation_metrics():
            if id(metric) not in self._known and metric.co_name is not None:
                self._found.setdefault((str(metric.compile_id), metric.start_time or 0.0), metric)

    @property
    def all(self) -> Sequence[Any]:
        """torch's metrics of each capture, in order."""
        return [metric for (compile_id, _), metric in self._found.items() if compile_id in self._ids]

    @property
    def seconds(self) -> float:
        return sum(max(0.0, (metric.entire_frame_compile_time_s or 0.0) - (metric.backend_compile_time_s or 0.0)) for metric in self.all)

    def recompilations(self) -> list[Recompilation]:
        return [
            Recompilation(_begin_of(metric), metric.recompile_reason.partition(": ")[2] or metric.recompile_reason)
            for metric in self.all
            if metric.recompile_reason
        ]

    def breaks(self, known: Sequence[Break]) -> list[Break]:
        """Returns the graph breaks that ended no graph, since there was no op before them.

        Args:
            known: the graph breaks that ended a graph.
        """
        places = {(brk.line.file, brk.line.number) for brk in known if brk.line is not None}
        found: list[Break] = []
        resumed = [(metric.co_filename, match) for metric in self.all if (match := RESUMED.fullmatch(metric.co_name))]
        for metric in self.all:
            name = _function(metric.co_name)
            for reason in sorted(metric.restart_reasons or ()):
                if "Explanation" not in reason:
                    continue
                if any(brk.reason == told(reason, None).reason and brk.line and brk.line.function == name for brk in known):
                    continue
                after = [
                    int(match["number"])
                    for file, match in resumed
                    if file == metric.co_filename
                    and match["name"] == name
                    and (file, int(match["number"])) not in places
                    and int(match["number"]) >= (metric.co_firstlineno or 0)
                ]
                number = min(after, default=metric.co_firstlineno or 0)
                found.append(told(reason, Line.at(metric.co_filename or "", number, name)))
            if metric.fail_type:
                line = Line.at(metric.fail_user_frame_filename or metric.co_filename or "", metric.fail_user_frame_lineno or 0, name)
                found.append(told(f"{metric.fail_type}: {metric.fail_reason}", line))
        return found


def _begin_of(metric: Any) -> Line:
    return Line.at(metric.co_filename or "", metric.co_firstlineno or 0, metric.co_name)
