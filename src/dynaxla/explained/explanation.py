"""What an explanation holds: numbers and words, and no tensor, program or graph."""

from __future__ import annotations

import linecache
import os
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# What TorchDynamo calls what comes behind a break.
RESUMED = re.compile(r"torch_dynamo_resume_in_(?P<name>.*)_at_(?P<number>\d+)")
_FRAME = re.compile(r'\s*File "(?P<file>.*)", line (?P<number>\d+), in (?P<function>.*)')


@dataclass(frozen=True)
class Line:
    """A line of the user's code. Attributes: file; number; function; source (its text, "" where it cannot be had)."""

    file: str
    number: int
    function: str = ""
    source: str = ""

    @staticmethod
    def at(file: str, number: int, function: str = "") -> Line:
        resumed = RESUMED.fullmatch(function)
        return Line(file, number, resumed["name"] if resumed else function, linecache.getline(file, number).strip())

    @staticmethod
    def of_frame(frame: str) -> Line | None:
        """frame: as Python and fx show it. None for what is none."""
        found = _FRAME.match(frame)
        return Line.at(found["file"], int(found["number"]), found["function"].partition("\n")[0]) if found else None

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.number}" + (f", in {self.function}" if self.function else "")


@dataclass(frozen=True)
class Break:
    """A place where TorchDynamo had to stop capturing. Attributes: line; reason (in a line); explanation; hints (torch's own); count."""

    line: Line | None
    reason: str
    explanation: str = ""
    hints: tuple[str, ...] = ()
    count: int = 1


@dataclass(frozen=True)
class Recompilation:
    """A function that was captured once more. Attributes: line (where it begins); reason (the guard that failed)."""

    line: Line
    reason: str


@dataclass(frozen=True)
class Tensor:
    """An input or output. Attributes: name (the user's, as far as it is known); text (dtype and sizes); bytes."""

    name: str
    text: str
    bytes: int


@dataclass(frozen=True)
class Form:
    """How ops were computed. Attributes: op; problem; form; others (that would have fitted); seconds (by form, if measured); is_measurable
    (whether the option `tune` measures them)."""

    op: str
    problem: str
    form: str
    others: tuple[str, ...]
    seconds: Mapping[str, float | None] = field(default_factory=dict)
    is_measurable: bool = True


@dataclass(frozen=True)
class Fallback:
    """An op that torch's kernel computes for want of a lowering, or a graph that torch runs. Attributes: op; reason; where; count."""

    op: str
    reason: str
    where: str
    count: int


@dataclass(frozen=True)
class Copy:
    """An argument that is copied at the border. Attributes: argument; reason; bytes (of a call); first, later (how often, in calls of a
    program that were its first, and that were not)."""

    argument: str
    reason: str
    bytes: int
    first: int
    later: int


@dataclass(frozen=True)
class Memory:
    """What XLA says that a program needs, in bytes."""

    arguments: int
    results: int
    temporary: int


@dataclass(frozen=True)
class Program:
    """A compiled program. Attributes: name; sizes (of a dynamic graph, in words); seconds (by phase: trace, lower, compile, tune); memory
    (None: of several programs, or unknown); runs; first_seconds (of its first run); later_seconds (of a later run, the median; None if
    there was none); is_by_torch (whether there is none, since torch's kernels run the graph)."""

    name: str
    sizes: str
    seconds: Mapping[str, float]
    memory: Memory | None
    runs: int
    first_seconds: float | None
    later_seconds: float | None
    is_by_torch: bool = False


@dataclass(frozen=True)
class Graph:
    """A graph of ATen ops.

    Attributes: name; phase (forward, backward, inference); ops, kinds (how many, by name and by kind); parameters (how many, and their
    bytes); inputs (the others), outputs; programs; forms; fallbacks; copies; engine (what runs it); engine_note (why, if something is
    known).
    """

    name: str
    phase: str
    ops: Mapping[str, int]
    kinds: Mapping[str, int]
    parameters: tuple[int, int]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    programs: tuple[Program, ...]
    forms: tuple[Form, ...]
    fallbacks: tuple[Fallback, ...]
    copies: tuple[Copy, ...]
    engine: str = "dynaxla"
    engine_note: str = ""

    @property
    def size(self) -> int:
        """How many ops it has."""
        return sum(self.ops.values())


@dataclass(frozen=True)
class Captured:
    """What TorchDynamo, or a step, has given to the compiler at once. Attributes: number; line (the first of the user's in it); is_step;
    ended (why it ends where it does; None at the function's end); graphs; fallbacks (of the whole)."""

    number: int
    line: Line | None
    is_step: bool
    ended: Break | None
    graphs: tuple[Graph, ...]
    fallbacks: tuple[Fallback, ...] = ()


@dataclass(frozen=True)
class Cost:
    """What XLA spends on a line, or torch's kernels that run a graph in its place. Attributes: line; seconds (of processors, of a call; of
    torch's kernels, by the clock); share (of all that they spend); what (the costliest instructions, by kind)."""

    line: Line
    seconds: float
    share: float
    what: tuple[str, ...]


@dataclass(frozen=True)
class Advice:
    """What to do next. Attributes: what; why; line."""

    what: str
    why: str
    line: Line | None = None


@dataclass(frozen=True)
class Explanation:
    """What `dynaxla.explain` has found. Print it, save it, or let a notebook show it.

    Attributes: name (of what was called); captured; breaks; recompilations; phases (seconds of the first call, or of all of a script, by
    phase); seconds (of that call, or script); later_seconds (of a later call, neither the fastest nor the slowest; None if there was
    none); xla_seconds (of a later call inside of programs, or of all of a script); costs (of lines, the costliest first, ten at most);
    unplaced (the share of that time of no known line; None if nothing was measured); ways (what steps did besides, and why); notes (what
    is to be known of all this); advice; versions; is_script; error (what the call or the script failed with, or ""); torch_seconds (of a
    later call in graphs that torch's kernels run without a program, or of all of a script).
    """

    name: str
    captured: tuple[Captured, ...]
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
        """Of all that was captured."""
        return [graph for captured in self.captured for graph in captured.graphs]

    def __str__(self) -> str:
        state = random.getstate()
        from .as_text import text  # rich draws from Python's random numbers when it is imported

        random.setstate(state)
        return text(self)

    def html(self) -> str:
        """A whole page, which needs nothing from elsewhere."""
        from .page import page

        return page(self)

    def _repr_html_(self) -> str:
        """For a notebook: the page in a frame of its own, so that neither's styles reach the other."""
        from .page import framed

        return framed(self)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the page. Returns: its path. Raises: OSError."""
        written = Path(path)
        written.write_text(self.html(), encoding="utf-8")
        return written
