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
    """A line of the user's code, or a module that runs without such a line, as those of a compiled nn.Sequential do.

    Attributes:
        file: its file; "" for a module.
        number: its number in the file.
        function: the function that it is in, or "".
        source: its text, or "" if it cannot be read.
        place: the name of its file for people, such as "Cell In[4]"; or the module, such as 'module "0" (Linear)'.
    """

    file: str
    number: int
    function: str = ""
    source: str = ""
    place: str = ""

    @staticmethod
    def at(file: str, number: int, function: str = "") -> Line:
        resumed = RESUMED.fullmatch(function)
        return Line(file, number, resumed["name"] if resumed else function, linecache.getline(file, number).strip(), _cell(file))

    @staticmethod
    def of_frame(frame: str) -> Line | None:
        """Parses a frame as Python and fx format it, or a module of `lowering.graphs.user_frame_or_module`. None for any other text."""
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
        line: where it is.
        reason: in one line.
        explanation: torch's own.
        hints: torch's own.
        count: how often it occurred.
    """

    line: Line | None
    reason: str
    explanation: str = ""
    hints: tuple[str, ...] = ()
    count: int = 1


@dataclass(frozen=True)
class Recompilation:
    """A function that was captured again. `line` is its first line, `reason` the guard that failed."""

    line: Line
    reason: str


@dataclass(frozen=True)
class Tensor:
    """An input or output of a graph.

    Attributes:
        name: the user's name if it is known.
        text: dtype and sizes.
        bytes: its size.
    """

    name: str
    text: str
    bytes: int


@dataclass(frozen=True)
class ChosenImplementation:
    """The implementation that was chosen for an op.

    Attributes:
        op: its name.
        problem: its shapes and arguments, as text.
        implementation: the chosen implementation.
        others: other implementations that support the problem.
        seconds: by implementation, if measured; None for an implementation that XLA rejected.
        is_measurable: the option `tune` measures the implementations of this problem.
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
        op: its name, or "a graph".
        reason: why it falls back.
        where: the user's line, or "".
        count: how often.
    """

    op: str
    reason: str
    where: str
    count: int


@dataclass(frozen=True)
class Copy:
    """An argument that is copied when a program is called.

    Attributes:
        argument: its name.
        reason: why it is copied.
        bytes: copied in one call.
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
        name: its name.
        level: the kind of graph: "dynamo", "joint", "aten" or "jaxpr".
        before: the number of nodes before it.
        after: the number of nodes of each graph that it returned.
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
        name: its name.
        sizes: the values of the symbols of a dynamic graph, as text.
        seconds: by phase: trace, lower, compile, tune.
        memory: None if unknown, or if it consists of several programs.
        runs: the number of runs.
        first_seconds: of its first run; None if there was none.
        later_seconds: the median of its later runs; None if there was none.
        is_by_torch: there is no XLA program: torch's kernels run the graph.
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
        name: its name.
        phase: forward, backward or inference.
        ops: the number of ops by name.
        kinds: the number of ops by kind.
        parameters: the number of parameters and buffers, and their bytes.
        inputs: all other inputs.
        outputs: the outputs.
        programs: the programs that were compiled for it.
        implementations: the chosen implementations of its ops.
        fallbacks: its ops that torch's kernels compute.
        copies: its arguments that are copied.
        engine: the engine that runs it.
        engine_note: why, if it is known.
        rewrites: the passes that ran on it, in order.
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
        """The number of its ops."""
        return sum(self.ops.values())


@dataclass(frozen=True)
class CapturedGraph:
    """A graph that TorchDynamo or a step gave to the compiler.

    Attributes:
        number: of the captured graph.
        line: the first line of the user's code in it.
        is_step: it is a step of `compile_step`.
        ended: the graph break at its end; None if it ends with its function.
        graphs: the ATen graphs that AOTAutograd made of it.
        fallbacks: those that belong to none of these graphs.
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
    """The time that XLA, or torch's kernels that run a graph in its place, spend on a line.

    Attributes:
        line: the line.
        seconds: in one call: processor seconds of XLA, wall-clock seconds of torch's kernels.
        share: of the time of all lines.
        what: the kinds of its costliest instructions.
    """

    line: Line
    seconds: float
    share: float
    what: tuple[str, ...]


@dataclass(frozen=True)
class Advice:
    """A recommendation.

    Attributes:
        what: what to do.
        why: the reason.
        line: the line of the user's code, or None.
    """

    what: str
    why: str
    line: Line | None = None


@dataclass(frozen=True, repr=False)
class Explanation:
    """The result of `dynaxla.explain`. Print it, save it, or let a notebook show it.

    Attributes:
        name: of the function or script.
        captured: the captured graphs.
        breaks: the graph breaks.
        recompilations: the functions that were captured again.
        phases: seconds by phase, of the first call or of the whole script.
        seconds: of the first call, or of the whole script.
        later_seconds: of a typical later call (the median); None if there was none.
        xla_seconds: the time of XLA's programs in that later call, or in the whole script.
        costs: by line, the costliest first, ten at most.
        unplaced: the share of that time without a known line; None if nothing was measured.
        ways: the steps that ran in another way than as one program, and why.
        notes: remarks about the measurements.
        versions: of dynaxla, torch, jax and Python, and the device.
        is_script: a script was explained, not a function.
        error: the exception of the call, or how the script failed, or "".
        torch_seconds: as `xla_seconds`, for graphs that torch's kernels run without a program.
        advice: what to do next, the most important first.
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
    unplaced: float | None
    ways: tuple[str, ...]
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
        counted = ", ".join(f"{count} {what}{'' if count == 1 else 's'}" for count, what in counts if count or what == "graph")
        failed = f", failed: {self.error.partition(chr(10))[0]}" if self.error else ""
        return f"<Explanation of {self.name}: {counted}, {len(self.advice)} advised{failed}; print it, or save('page.html')>"

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
        """Returns the page in a frame, for notebooks, so that its styles and the notebook's do not mix."""
        from .page import framed

        return framed(self)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the HTML page and returns its path. Raises: OSError."""
        written = Path(path)
        written.write_text(self.html(), encoding="utf-8")
        return written
