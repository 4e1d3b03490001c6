"""Collects events while graphs are captured, compiled and run, and builds the parts of an explanation from them."""

from __future__ import annotations

import re
import statistics
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from ..engine.eager_executable import EagerExecutable
from ..lowering import dtypes
from ..lowering.registry import registry
from ..observe import engine_decisions, events
from ..tuning import measurements
from . import formatting
from .explanation import (
    Break,
    CapturedGraph,
    ChosenImplementation,
    CompiledProgram,
    Copy,
    Fallback,
    Graph,
    Line,
    MemoryUse,
    Rewrite,
    Tensor,
)
from .graph_breaks import break_of, first_line
from .line_costs import Profiler

Counts = Counter[tuple[str, str, str]]


@dataclass
class _ProgramEvents:
    """The events about a program, or about torch's kernels in place of a program.

    Attributes:
        executable: the executable; None before the compilation has ended.
        sizes: the values of the graph's size symbols, as text.
        seconds: the seconds by phase of the compilation.
        first: the seconds of first runs.
        later: the seconds of later runs.
        lines: for each later run by torch's kernels: the seconds by number of the user's line (`events.line_number`).
    """

    executable: Any = None
    sizes: str = ""
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    first: list[float] = field(default_factory=list)
    later: list[float] = field(default_factory=list)
    lines: list[Mapping[int, float]] = field(default_factory=list)

    @property
    def is_by_torch(self) -> bool:
        return isinstance(self.executable, EagerExecutable)


class _GraphEvents:
    """The events about an ATen graph. Only text and numbers are kept, since an engine changes the graph later."""

    def __init__(self, event: events.GraphFunctionalized, captured: _CaptureEvents) -> None:
        self._has_competitors, self._forced, names = captured.has_competitors, captured.forced, captured.names
        graph = event.graph
        nodes = graph.module.graph
        self.name, self.phase, self.ops = graph.name, graph.phase, Counter(event.ops)
        self.names: dict[str, str] = {}
        static = set(graph.static)
        self.inputs: list[Tensor] = []
        sizes = []
        for position, node in enumerate(nodes.find_nodes(op="placeholder")):
            self.names[node.name] = _input_user_name(node, names)
            if position in static:
                sizes.append(_tensor("", node).bytes)
            elif isinstance(node.meta.get("val"), torch.Tensor):
                self.inputs.append(_tensor(self.names[node.name], node))
        self.parameters = len(sizes), sum(sizes)
        outputs: Any = nodes.output_node().args[0]
        descriptions = dict(zip(outputs, nodes.output_node().meta.get("desc") or [None] * len(outputs), strict=False))
        tensors = [node for node in dict.fromkeys(outputs) if isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor)]
        self.outputs = [_tensor(self.names.get(node.name) or _output_name(node, descriptions[node], names), node) for node in tensors]
        self.kinds: Counter[str] = Counter()
        for node in nodes.nodes:
            if isinstance(node.target, torch._ops.OpOverload):
                self.kinds[_op_kind(node)] += 1
        self.programs: list[_ProgramEvents] = []
        self.implementations: dict[tuple[str, str, str, tuple[str, ...]], bool] = {}
        self.fallbacks: Counts = Counter()
        self.rewrites: list[Rewrite] = []
        self.copies: dict[tuple[str, str, int], list[int]] = defaultdict(lambda: [0, 0])

    def to_graph(self) -> Graph:
        measured = {(item.op, item.problem): item.seconds for item in measurements()}
        return Graph(
            self.name, self.phase, dict(self.ops.most_common()), dict(self.kinds.most_common()), self.parameters,
            tuple(self.inputs), tuple(self.outputs),
            tuple(map(_compiled_program, self.programs)),
            tuple(
                ChosenImplementation(*key, measured.get((key[0], key[1]), {}), is_measurable)
                for key, is_measurable in self.implementations.items()
            ),
            tuple(Fallback(*key, count) for key, count in self.fallbacks.most_common()),
            tuple(Copy(*key, first, later) for key, (first, later) in self.copies.items()),
            *self._engine(), tuple(self.rewrites),
        )  # fmt: skip

    def add_implementation(self, event: events.ImplementationChosen) -> None:
        """Adds a chosen implementation. An implementation that the user has forced is not measurable: measuring would change nothing."""
        is_measurable = event.is_measurable and self._forced.get(event.op) != event.implementation
        self.implementations[event.op, event.arguments, event.implementation, tuple(event.others)] = is_measurable

    def _engine(self) -> tuple[str, str]:
        """Returns the engine that runs the graph, and the reason."""
        # The name of an ATen graph is the name of its captured graph, with the phase appended.
        found, is_of_another = engine_decisions.latest_verdict(self.name.rpartition("_")[0])
        if found is None:
            return ("not decided yet", "the engines compete during more calls than these") if self._has_competitors else ("dynaxla", "")
        times = [f"{name} {formatting.seconds(seconds)}" for name, seconds in found.seconds.items()]
        others = [f"{name} is left out: {reason}" for name, reason in found.left_out.items()]
        before = ["decided in calls before these"] if is_of_another else []
        return found.chosen, "; ".join([*before, found.why, *times, *others])


@dataclass
class _CaptureEvents:
    """The events about a captured graph. `CapturedGraph` describes the attributes that are not listed here.

    Attributes:
        names: the user's names of the graph's inputs.
        has_competitors: True if other engines may run the graph.
        forced: by op, the name of the implementation that the user's options require.
    """

    number: int
    line: Line | None
    is_step: bool
    ended: Break | None
    names: list[str]
    has_competitors: bool
    forced: Mapping[str, str]
    graphs: list[_GraphEvents] = field(default_factory=list)
    fallbacks: Counts = field(default_factory=Counter)
    rewrites: list[Rewrite] = field(default_factory=list)


class _ThreadState:
    """The collector's state for one thread.

    Attributes:
        captured: the graph that was captured last.
        compiling: the compilations in progress, the innermost last: the graph, the program, and the graph's interpreter.
        copies: the copies of arguments for the program that runs next.
    """

    def __init__(self) -> None:
        self.captured: _CaptureEvents | None = None
        self.compiling: list[tuple[_GraphEvents | None, _ProgramEvents, Any]] = []
        self.copies: list[events.InputCopied] = []


class Collector:
    """A listener of `observe.events`. Events of threads that were already running when it was created are ignored, except its own thread's.

    Args:
        profiler: the profiler, whose `count_run` is called for each run of a program.
        arguments: the names of the function's positional arguments, if they are known.

    Attributes:
        phases: seconds by phase.
        step_fallbacks: the number of calls of steps that did not run as one program, by step, mode and reason.
    """

    def __init__(self, profiler: Profiler, arguments: Sequence[str] = ()) -> None:
        self.phases: defaultdict[str, float] = defaultdict(float)
        self.step_fallbacks: Counts = Counter()
        self._profiler, self._arguments = profiler, arguments
        self._captures: list[_CaptureEvents] = []
        self._graphs: dict[str, _GraphEvents] = {}
        self._programs: dict[int, tuple[_GraphEvents | None, _ProgramEvents, Any]] = {}
        self._threads: dict[int, _ThreadState] = defaultdict(_ThreadState)
        self._ignored_threads = {*threading.enumerate()} - {threading.current_thread()}
        self._lock = threading.RLock()
        self._handlers: dict[type, Callable[[Any, _ThreadState], None]] = {
            events.GraphCaptured: self._on_captured, events.GraphFunctionalized: self._on_functionalized,
            events.CompileStarted: self._on_compile_started, events.CompileEnded: self._on_compile_ended,
            events.ImplementationChosen: self._on_implementation_chosen, events.PhaseEnded: self._on_phase_ended,
            events.OpFellBack: self._on_fell_back, events.InputCopied: self._on_copied, events.ProgramRan: self._on_ran,
            events.StepFellBack: self._on_step_fell_back, events.GraphRewritten: self._on_rewritten,
        }  # fmt: skip

    def is_collected(self) -> bool:
        """True if events of the current thread are collected."""
        return threading.current_thread() not in self._ignored_threads

    def __call__(self, event: Any) -> None:
        if self.is_collected():
            with self._lock:
                self._handlers[type(event)](event, self._threads[threading.get_ident()])

    def captured(self) -> tuple[CapturedGraph, ...]:
        """Returns the captured graphs, in order."""
        with self._lock:
            return tuple(
                CapturedGraph(
                    item.number, item.line, item.is_step, item.ended, tuple(graph.to_graph() for graph in item.graphs),
                    tuple(Fallback(*key, count) for key, count in item.fallbacks.most_common()), tuple(item.rewrites),
                )
                for item in self._captures
            )  # fmt: skip

    def later_runs(self) -> list[tuple[Any, int]]:
        """Returns each executable with the number of its runs after the first."""
        with self._lock:
            return [(program.executable, len(program.later)) for _, program, _ in self._programs.values()]

    def run_seconds(self, by_torch: bool = False) -> float:
        """Returns the seconds of all runs so far: of XLA's programs, or with `by_torch` of torch's kernels in place of a program."""
        with self._lock:
            selected = [program for _, program, _ in self._programs.values() if program.is_by_torch == by_torch]
            return sum(sum(program.first) + sum(program.later) for program in selected)

    def torch_line_seconds(self) -> dict[int, Mapping[int, float]]:
        """Returns the median later run, as seconds by line number, for the id() of each executable that runs torch's kernels."""
        with self._lock:
            line_seconds = {id(program.executable): program.lines for _, program, _ in self._programs.values() if program.lines}
            return {key: sorted(runs, key=lambda run: sum(run.values()))[(len(runs) - 1) // 2] for key, runs in line_seconds.items()}

    def _graph_of(self, name: str) -> _GraphEvents | None:
        """Returns the graph of a program by the program's name: the graph's name, or this name followed by "_" and a suffix."""
        names = [graph_name for graph_name in self._graphs if name == graph_name or name.startswith(f"{graph_name}_")]
        return self._graphs[max(names, key=len)] if names else None

    def _on_captured(self, event: events.GraphCaptured, thread: _ThreadState) -> None:
        names = [_user_name(node, self._arguments) for node in event.module.graph.find_nodes(op="placeholder")]
        thread.captured = _CaptureEvents(
            event.number,
            first_line(event.module),
            event.is_step,
            break_of(event.module),
            names,
            event.has_competitors,
            event.options.implementations,
        )
        self._captures.append(thread.captured)

    def _on_functionalized(self, event: events.GraphFunctionalized, thread: _ThreadState) -> None:
        captured = next((item for item in reversed(self._captures) if item.number == event.number), None)
        if captured is None:  # it was captured before this listener was added
            return
        graph = self._graphs[event.graph.name] = _GraphEvents(event, captured)
        captured.graphs.append(graph)

    def _on_compile_started(self, event: events.CompileStarted, thread: _ThreadState) -> None:
        graph = self._graph_of(event.name)
        program = _ProgramEvents(sizes=", ".join(f"{symbol} = {value}" for symbol, value in event.symbols.values.items()))
        thread.compiling.append((graph, program, event.interpreter))
        thread.copies.clear()

    def _on_compile_ended(self, event: events.CompileEnded, thread: _ThreadState) -> None:
        graph, program, interpreter = thread.compiling.pop()
        if event.executable is not None:
            program.executable = event.executable
            self._programs[id(event.executable)] = graph, program, interpreter
            if graph is not None and (event.executable.program is not None or program.is_by_torch):
                graph.programs.append(program)

    def _on_implementation_chosen(self, event: events.ImplementationChosen, thread: _ThreadState) -> None:
        if thread.compiling and (graph := thread.compiling[-1][0]) is not None:
            graph.add_implementation(event)

    def _on_rewritten(self, event: events.GraphRewritten, thread: _ThreadState) -> None:
        captured = thread.captured
        graph = thread.compiling[-1][0] if thread.compiling else captured.graphs[-1] if captured is not None and captured.graphs else None
        found = graph.rewrites if graph is not None else captured.rewrites if captured is not None else []
        found.append(Rewrite(*event))

    def _on_phase_ended(self, event: events.PhaseEnded, thread: _ThreadState) -> None:
        self.phases[event.phase] += event.seconds
        if thread.compiling:
            thread.compiling[-1][1].seconds[event.phase] += event.seconds

    def _on_fell_back(self, event: events.OpFellBack, thread: _ThreadState) -> None:
        key = event.op, event.reason, event.where
        if thread.compiling and (graph := thread.compiling[-1][0]) is not None:
            graph.fallbacks[key] += 1
        elif thread.captured is not None:
            thread.captured.fallbacks[key] += 1

    def _on_copied(self, event: events.InputCopied, thread: _ThreadState) -> None:
        thread.copies.append(event)

    def _on_ran(self, event: events.ProgramRan, thread: _ThreadState) -> None:
        copies, thread.copies = thread.copies, []
        entry = self._programs.get(id(event.executable))
        if entry is None:  # it was compiled before this listener was added
            return
        graph, program, interpreter = entry
        (program.first if event.is_first else program.later).append(event.seconds)
        if event.lines is not None:
            if not event.is_first:
                program.lines.append(event.lines)
            return
        self.phases["first run" if event.is_first else "later runs"] += event.seconds
        if graph is not None:
            for copied in copies:
                position = event.executable.binding.positions[copied.position]
                node = interpreter.placeholders[position].name
                graph.copies[graph.names.get(node, node), copied.reason, copied.bytes][not event.is_first] += 1
        self._profiler.count_run(event.executable)

    def _on_step_fell_back(self, event: events.StepFellBack, thread: _ThreadState) -> None:
        self.step_fallbacks[event.subject, event.mode, event.reason] += 1


def _compiled_program(program: _ProgramEvents) -> CompiledProgram:
    compiled = program.executable.program
    stats = compiled.memory() if compiled is not None else None
    memory = None
    if stats is not None:
        results = stats.output_size_in_bytes - stats.alias_size_in_bytes
        memory = MemoryUse(stats.argument_size_in_bytes, results, stats.temp_size_in_bytes)
    later = statistics.median(program.later) if program.later else None
    runs = len(program.first) + len(program.later)
    first = program.first[0] if program.first else None
    return CompiledProgram(program.executable.name, program.sizes, dict(program.seconds), memory, runs, first, later, program.is_by_torch)


def _tensor(name: str, node: Node) -> Tensor:
    """Describes a tensor of a graph. For symbolic sizes, its bytes are computed with the sizes of the captured call."""
    value = node.meta["val"]
    shape = [size if isinstance(size, int) else size.node.hint if size.node.has_hint() else 0 for size in value.shape]
    text = dtypes.describe(value.dtype, tuple(value.shape))
    count = 1
    for size in shape:
        count *= int(size)
    return Tensor(name, text, count * value.element_size())


_ATTRIBUTES = re.compile(r"\._(?:modules|parameters|buffers)\['([^']*)'\]")


_POSITIONAL, _KEYWORD = re.compile(r"^args\[(\d+)\]"), re.compile(r"^kwargs\['([^']*)'\]")


def _user_name(node: Node, arguments: Sequence[str]) -> str:
    """Returns the user's name for an input of a captured graph.

    torch wraps one of its own modules, such as an nn.Sequential, in a function of *args and **kwargs. `arguments` has the names for *args.
    """
    source = getattr(node.meta.get("grapharg"), "source", None)
    name = getattr(source, "name", "")
    name = name() if callable(name) else name  # a method in torch 2.11
    name = _ATTRIBUTES.sub(r".\1", node.meta.get("path") or name or node.name)
    name = _KEYWORD.sub(r"\1", re.sub(r"^[LG]\['([^']*)'\]", r"\1", name))
    return _POSITIONAL.sub(lambda found: arguments[int(found[1])] if int(found[1]) < len(arguments) else found[0], name)


def _input_user_name(node: Node, names: Sequence[str]) -> str:
    """Returns the user's name of a graph's input, from AOTAutograd's description in `node.meta["desc"]` if there is one."""
    description = node.meta.get("desc")
    if type(description).__name__ == "TangentAOTInput":
        index = getattr(description.output, "idx", None)
        return "a gradient" if index is None else f"the gradient of output {index}"
    return _input_name(description, names) or node.name


def _output_name(node: Node, description: Any, names: Sequence[str]) -> str:
    """Returns the name of a graph's output: for an input's gradient, a name with the name of the input; else the node's name."""
    input_name = _input_name(getattr(description, "grad_of", None), names)
    return f"the gradient of {input_name}" if input_name else node.name


def _input_name(description: Any, names: Sequence[str]) -> str:
    """Returns the user's name of an input that AOTAutograd describes; "" for any other description."""
    index = getattr(description, "idx", None)
    is_input = type(description).__name__ == "PlainAOTInput" and isinstance(index, int) and index < len(names)
    return names[index] if is_input and isinstance(index, int) else ""


def _op_kind(node: Node) -> str:
    """Returns the kind of an op: the name of the module with its lowering."""
    rule = registry.find(node.target, "cpu")
    return "no lowering" if rule is None else rule.registered_by.rpartition(".")[2].replace("_", " ")
