"""The data classes of an explanation. They hold numbers and text only: no tensor, program or graph."""

from __future__ import annotations

import linecache
import os
import random
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# The name of the function that TorchDynamo generates for the code after a graph break.
RESUMED = re.compile(r"torch_dynamo_resume_in_(?P<name>.*)_at_(?P<number>\d+)")
_FRAME = re.compile(r'\s*File "(?P<file>.*)", line (?P<number>\d+), in (?P<function>.*)')


@dataclass(frozen=True)
class Line:
    """A line of the user's code, or a module that runs without such a line, such as the modules of a compiled nn.Sequential.

    Attributes:
        file: the path of the file; "" for a module.
        number: the line number in the file.
        function: the name of the function that contains the line, or "".
        source: the text of the line, or "" if it cannot be read.
        place: a readable name of the file, such as "Cell In[4]"; or the module, such as 'module "0" (Linear)'.
    """

    file: str
    number: int
    function: str = ""
    source: str = ""
    place: str = ""

    @staticmethod
    def at(file: str, number: int, function: str = "") -> Line:
        """Returns the line with this number in a file. `function` may be a name that TorchDynamo generated after a graph break."""
        resumed = RESUMED.fullmatch(function)
        return Line(file, number, resumed["name"] if resumed else function, linecache.getline(file, number).strip(), _cell(file))

    @staticmethod
    def of_frame(frame: str) -> Line | None:
        """Parses a frame as Python and fx format it, or a module as `lowering.graphs.user_frame_or_module` does. None for other text."""
        if frame.startswith("module "):
            return Line("", 0, place=frame)
        found = _FRAME.match(frame)
        return Line.at(found["file"], int(found["number"]), found["function"].partition("\n")[0]) if found else None

    def __str__(self) -> str:
        if not self.file:
            return self.place
        place = f"{self.place}, line {self.number}" if self.place else f"{os.path.basename(self.file)}:{self.number}"
        return place + (f", in {self.function}" if self.function and self.function != "<module>" else "")


def _cell(file: str) -> str:
    """Returns the name of a notebook's cell, such as "Cell In[4]"; "" for any other file."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    name = getattr(getattr(shell, "compile", None), "format_code_name", lambda _: None)(file)
    return " ".join(name) if name else ""


@dataclass(frozen=True)
class Break:
    """A graph break of TorchDynamo.

    Attributes:
        line: the line of the user's code at which the graph breaks.
        reason: the reason, in one line.
        explanation: torch's explanation.
        hints: torch's hints.
        count: the number of times that the break occurred.
    """

    line: Line | None
    reason: str
    explanation: str = ""
    hints: tuple[str, ...] = ()
    count: int = 1


@dataclass(frozen=True)
class Recompilation:
    """A function that was captured again.

    Attributes:
        line: the first line of the function.
        reason: the guard that failed.
    """

    line: Line
    reason: str


@dataclass(frozen=True)
class Tensor:
    """An input or output of a graph.

    Attributes:
        name: the user's name if it is known.
        text: dtype and shape.
        bytes: the tensor's size in bytes.
    """

    name: str
    text: str
    bytes: int


@dataclass(frozen=True)
class ChosenImplementation:
    """The implementation that was chosen for an op.

    Attributes:
        op: the op's name.
        problem: the problem's shapes and arguments, as text.
        implementation: the name of the chosen implementation.
        others: the names of other implementations that support the problem.
        seconds: the measured seconds by implementation, None for an implementation that XLA rejected; {} if not measured.
        is_measurable: True if the option `tune` measures the implementations of this problem.
    """

    op: str
    problem: str
    implementation: str
    others: tuple[str, ...]
    seconds: Mapping[str, float | None] = field(default_factory=dict)
    is_measurable: bool = True


@dataclass(frozen=True)
class Fallback:
    """An op without a lowering that torch's kernel computes, or a graph that torch runs.

    Attributes:
        op: the name of the op, or "a graph".
        reason: the reason for the fallback.
        where: the user's line, or "".
        count: the number of nodes.
    """

    op: str
    reason: str
    where: str
    count: int


@dataclass(frozen=True)
class Copy:
    """An argument that is copied when a program is called.

    Attributes:
        argument: the argument's name.
        reason: the reason for the copy.
        bytes: the number of bytes copied in one call.
        first: the number of copies in first calls of a program.
        later: the number of copies in later calls.
    """

    argument: str
    reason: str
    bytes: int
    first: int
    later: int


@dataclass(frozen=True)
class Rewrite:
    """A pass that rewrote the graph (see `passes/pipeline.py`).

    Attributes:
        name: the name of the pass.
        level: the kind of graph: "dynamo", "joint", "aten" or "jaxpr".
        before: the number of nodes before the pass.
        after: the number of nodes of each graph that the pass returned: two graphs for a partitioned joint graph, else one.
    """

    name: str
    level: str
    before: int
    after: tuple[int, ...]


@dataclass(frozen=True)
class MemoryUse:
    """The memory of a program as XLA reports it, in bytes."""

    arguments: int
    results: int
    temporary: int


@dataclass(frozen=True)
class CompiledProgram:
    """A compiled program.

    Attributes:
        name: the program's name.
        sizes: the values of the symbols of a dynamic graph, as text.
        seconds: the seconds of the phases trace, lower, compile and tune.
        memory: the program's memory; None if unknown, or if there are several XLA programs.
        runs: the number of runs.
        first_seconds: the duration of the first run; None without a run.
        later_seconds: the median duration of later runs; None without a later run.
        is_by_torch: True if there is no XLA program, and torch's kernels run the graph.
    """

    name: str
    sizes: str
    seconds: Mapping[str, float]
    memory: MemoryUse | None
    runs: int
    first_seconds: float | None
    later_seconds: float | None
    is_by_torch: bool = False


@dataclass(frozen=True)
class Graph:
    """A graph of ATen ops.

    Attributes:
        name: the graph's name.
        phase: "forward", "backward" or "inference".
        ops: the number of ops by name.
        kinds: the number of ops by kind.
        parameters: the number of parameters and buffers, and their size in bytes.
        inputs: all other inputs.
        outputs: the outputs.
        programs: the programs that were compiled for the graph.
        implementations: the chosen implementations of ops.
        fallbacks: the ops that torch's kernels compute.
        copies: the arguments that are copied.
        engine: the engine that runs the graph.
        engine_note: the reason for the choice of the engine, or "".
        rewrites: the passes that rewrote the graph, in order.
    """

    name: str
    phase: str
    ops: Mapping[str, int]
    kinds: Mapping[str, int]
    parameters: tuple[int, int]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    programs: tuple[CompiledProgram, ...]
    implementations: tuple[ChosenImplementation, ...]
    fallbacks: tuple[Fallback, ...]
    copies: tuple[Copy, ...]
    engine: str = "dynaxla"
    engine_note: str = ""
    rewrites: tuple[Rewrite, ...] = ()

    @property
    def size(self) -> int:
        """The number of ops."""
        return sum(self.ops.values())


@dataclass(frozen=True)
class CapturedGraph:
    """A graph that TorchDynamo, or a step of `compile_step`, gave to the backend.

    Attributes:
        number: the number of the captured graph.
        line: the first line of the user's code in the graph.
        is_step: True for a step of `compile_step`.
        ended: the graph break at the end of the graph; None if the graph ends with its function.
        graphs: the ATen graphs that AOTAutograd made from the graph.
        fallbacks: the fallbacks that belong to none of the ATen graphs.
        rewrites: the passes that ran before there were ATen graphs, in order.
    """

    number: int
    line: Line | None
    is_step: bool
    ended: Break | None
    graphs: tuple[Graph, ...]
    fallbacks: tuple[Fallback, ...] = ()
    rewrites: tuple[Rewrite, ...] = ()


@dataclass(frozen=True)
class Cost:
    """The time that XLA, or torch's kernels in place of a program, spend on a line of the user's code.

    Attributes:
        line: the line.
        seconds: the time in one call: processor seconds of XLA, wall-clock seconds of torch's kernels.
        share: the fraction of the time of all lines, 0 to 1.
        kinds: the kinds of the line's costliest HLO instructions, at most three, the costliest first.
    """

    line: Line
    seconds: float
    share: float
    kinds: tuple[str, ...]


@dataclass(frozen=True)
class Advice:
    """A recommendation.

    Attributes:
        action: the recommended action.
        reason: the reason for it.
        line: the line of the user's code, or None.
    """

    action: str
    reason: str
    line: Line | None = None


@dataclass(frozen=True, repr=False)
class Explanation:
    """The result of `dynaxla.explain`. Print it, save it, or let a notebook show it.

    Attributes:
        name: the name of the function or script.
        captured: the captured graphs.
        breaks: the graph breaks.
        recompilations: the functions that were captured again.
        phases: the seconds by phase, in the first call or in the whole script.
        seconds: the duration of the first call, or of the whole script.
        later_seconds: the median duration of later calls; None without a later call.
        xla_seconds: the time of XLA's programs in the median later call, or in the whole script.
        costs: the costs by line, the costliest first, ten at most.
        unplaced_share: the fraction of the measured time without a known line; None if nothing was measured.
        step_modes: sentences about the steps that did not run as one program: the mode in which each ran, and the reason.
        notes: remarks about the measurements.
        versions: the versions of dynaxla, torch, jax and Python, and the device.
        is_script: True for a script, False for a function.
        error: the exception of the call, or the exit status of a script that failed, or "".
        torch_seconds: the time of torch's kernels that run graphs without a program, in the same call as `xla_seconds`.
        advice: recommendations, the most important first.
    """

    name: str
    captured: tuple[CapturedGraph, ...]
    breaks: tuple[Break, ...]
    recompilations: tuple[Recompilation, ...]
    phases: Mapping[str, float]
    seconds: float
    later_seconds: float | None
    xla_seconds: float | None
    costs: tuple[Cost, ...]
    unplaced_share: float | None
    step_modes: tuple[str, ...]
    notes: tuple[str, ...]
    versions: str
    is_script: bool = False
    error: str = ""
    torch_seconds: float = 0.0
    advice: tuple[Advice, ...] = ()

    @property
    def graphs(self) -> Sequence[Graph]:
        """The ATen graphs of all captured graphs."""
        return [graph for captured in self.captured for graph in captured.graphs]

    def __repr__(self) -> str:
        counts = [(len(self.graphs), "graph"), (len(self.breaks), "break"), (len(self.recompilations), "recompilation")]
        summary = ", ".join(f"{count} {what}{'' if count == 1 else 's'}" for count, what in counts if count or what == "graph")
        failed = f", failed: {self.error.partition(chr(10))[0]}" if self.error else ""
        return f"<Explanation of {self.name}: {summary}, {len(self.advice)} advised{failed}; print it, or save('page.html')>"

    def __str__(self) -> str:
        state = random.getstate()
        from .as_text import text  # importing rich draws from Python's random generator, whose state is restored below

        random.setstate(state)
        return text(self)

    def html(self) -> str:
        """Returns a complete, self-contained HTML page."""
        from .page import page

        return page(self)

    def _repr_html_(self) -> str:
        """Returns the page in an iframe, so that its styles do not affect a notebook, nor the notebook's styles the page."""
        from .page import iframe

        return iframe(self)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the HTML page and returns its path. Raises: OSError."""
        target = Path(path)
        target.write_text(self.html(), encoding="utf-8")
        return target
