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
from ..user_frames import is_user_file
from .explanation import RESUMED, Break, Line, Recompilation

_SECTION = re.compile(r"^ *(Explanation|Hint|Developer debug context|For more details)", re.MULTILINE)
_DATA_DEPENDENT_BRANCH = "Data-dependent branching"


def first_line(module: torch.fx.GraphModule) -> Line | None:
    """Returns the user's line of the first op in a graph that has a line; None if no op has one."""
    frames = (user_frame_or_module(node) for node in module.graph.nodes if node.op not in ("placeholder", "output"))
    return next((line for frame in frames if (line := Line.of_frame(frame)) is not None), None)


def break_of(module: torch.fx.GraphModule) -> Break | None:
    """Returns the graph break at the end of this graph; None if the graph ends with its function."""
    reason = getattr(module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    frames = [frame for frame in reason.user_stack if is_user_file(frame.filename)] or list(reason.user_stack)
    line = Line.at(frames[-1].filename, frames[-1].lineno or 0, frames[-1].name) if frames else None
    return parse_break(reason.reason, line)


def parse_break(text: str, line: Line | None) -> Break:
    """Parses torch's text about a graph break at a line."""
    parts = _SECTION.split(text)
    headline = parts[0].strip().partition("\n")[0]
    parsed: dict[str, list[str]] = {}
    for kind, rest in zip(parts[1::2], parts[2::2], strict=True):
        parsed.setdefault(kind, []).append(" ".join(rest.removeprefix(":").split()))
    if headline.startswith("generic_jump"):
        headline = _DATA_DEPENDENT_BRANCH
    return Break(line, headline, " ".join(parsed.get("Explanation", [])), tuple(parsed.get("Hint", [])))


def _function(name: str) -> str:
    """Returns the user's name of a function. TorchDynamo generates another name for the part of the function after a graph break."""
    resumed = RESUMED.fullmatch(name)
    return resumed["name"] if resumed else name


class DynamoMetrics:
    """TorchDynamo's metrics of the functions that it captures inside `listening`.

    Args:
        is_collected: returns True if captures of the current thread are collected.

    Attributes:
        seconds: the time of TorchDynamo itself, without the backend.
    """

    def __init__(self, is_collected: Callable[[], bool]) -> None:
        self._is_collected = is_collected
        self._ids: set[str] = set()
        self._metrics: dict[tuple[str, float], Any] = {}
        self._earlier_ids: set[int] = set()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        self._earlier_ids = {id(metric) for metric in get_compilation_metrics()}
        earlier_metrics = get_compilation_metrics()  # keeps these objects alive, so that their ids are not reused
        callback_handler.register_start_callback(self._on_start)
        try:
            yield
        finally:
            callback_handler.remove_start_callback(self._on_start)
            self.collect()
            del earlier_metrics

    def _on_start(self, args: Any) -> None:
        self.collect()
        if self._is_collected():
            self._ids.add(str(args.compile_id))

    def collect(self) -> None:
        """Stores torch's metrics here. torch itself keeps only a limited number of the latest ones."""
        for metric in get_compilation_metrics():
            if id(metric) not in self._earlier_ids and metric.co_name is not None:
                self._metrics.setdefault((str(metric.compile_id), metric.start_time or 0.0), metric)

    @property
    def metrics(self) -> Sequence[Any]:
        """torch's metrics of each capture, in order."""
        return [metric for (compile_id, _), metric in self._metrics.items() if compile_id in self._ids]

    @property
    def seconds(self) -> float:
        return sum(
            max(0.0, (metric.entire_frame_compile_time_s or 0.0) - (metric.backend_compile_time_s or 0.0)) for metric in self.metrics
        )

    def recompilations(self) -> list[Recompilation]:
        return [
            Recompilation(_first_line(metric), metric.recompile_reason.partition(": ")[2] or metric.recompile_reason)
            for metric in self.metrics
            if metric.recompile_reason
        ]

    def breaks(self, graph_ends: Sequence[Break]) -> list[Break]:
        """Returns the graph breaks that ended no graph, because there was no op before them, and the captures that failed.

        torch does not report the line of such a break. It is taken to be the first line at which the function was resumed.

        Args:
            graph_ends: the graph breaks that ended a graph.
        """
        break_places = {(brk.line.file, brk.line.number) for brk in graph_ends if brk.line is not None}
        breaks: list[Break] = []
        resumed = [(metric.co_filename, match) for metric in self.metrics if (match := RESUMED.fullmatch(metric.co_name))]
        for metric in self.metrics:
            name = _function(metric.co_name)
            for reason in sorted(metric.restart_reasons or ()):
                if "Explanation" not in reason:
                    continue
                if any(brk.reason == parse_break(reason, None).reason and brk.line and brk.line.function == name for brk in graph_ends):
                    continue
                after = [
                    int(match["number"])
                    for file, match in resumed
                    if file == metric.co_filename
                    and match["name"] == name
                    and (file, int(match["number"])) not in break_places
                    and int(match["number"]) >= (metric.co_firstlineno or 0)
                ]
                number = min(after, default=metric.co_firstlineno or 0)
                breaks.append(parse_break(reason, Line.at(metric.co_filename or "", number, name)))
            if metric.fail_type:
                line = Line.at(metric.fail_user_frame_filename or metric.co_filename or "", metric.fail_user_frame_lineno or 0, name)
                breaks.append(parse_break(f"{metric.fail_type}: {metric.fail_reason}", line))
        return breaks


def _first_line(metric: Any) -> Line:
    return Line.at(metric.co_filename or "", metric.co_firstlineno or 0, metric.co_name)
