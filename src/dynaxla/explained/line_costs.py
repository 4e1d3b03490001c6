"""What XLA spends on which line of the user's code: its own profile of a few runs, and the names of its instructions.

XLA says for each instruction that it runs how long it took. In the program's text the instruction has the name that it was traced under,
with the number of the user's line (`events.line_scope`). A fused instruction stands for many, which are of several lines perhaps: its time
is divided among them by how many numbers each computes, since XLA measures the whole alone.
"""

from __future__ import annotations

import math
import re
import threading
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ..observe import events
from ..runtime import private
from .explanation import Cost, Line
from .words import BY_TORCH

# Later runs of each program that are measured.
RUNS = 3
# Of the lines that are told.
MOST = 10
# Seconds by what instructions are.
Kinds = Mapping[str, float]
# A run of a program: seconds by event. A module: its name, and XLA's number for it.
Run = dict[str, float]
Module = tuple[str, int]
# Events are of a program that has names for this part of them at least.
_LIKELY = 0.3

_HEADER = re.compile(r"^(?:ENTRY )?%?(?P<name>[^\s(]+) (?:\(.*\) -> .*)?\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?(?P<name>\S+) = (?P<type>.+?) (?P<opcode>[a-z][\w-]*)\((?P<rest>.*)$")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([^\s,)}]+)|branch_computations=\{([^}]*)\}")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_NUMBER = re.compile(r"line\[(\d+)\]")
_OPERAND = re.compile(r"%([^\s,()]+)")
_SHAPE = re.compile(r"\w+\[([\d,]*)\]")
# These move or name numbers, and compute none.
_FREE = frozenset({"parameter", "constant", "broadcast", "bitcast", "tuple", "get-tuple-element", "reshape", "iota"})
_MOVES = _FREE | {"copy", "transpose", "fusion", "call", "slice", "copy-start", "copy-done"}
# How far what moves numbers is followed to what made them.
_DEPTH = 8
# XLA computes these in many steps.
_LONG = frozenset(
    {"exponential", "exponential-minus-one", "log", "log-plus-one", "tanh", "sine", "cosine", "tan", "power", "logistic", "erf", "atan2"}
    | {"divide", "sqrt", "rsqrt", "cbrt"}
)
_LONG_WEIGHT = 8
# What these run has events of its own.
_CONTROL = frozenset({"while", "conditional", "call"})


@dataclass(frozen=True)
class _Instruction:
    opcode: str
    target: str
    count: int
    line: int
    called: tuple[str, ...]
    operands: tuple[str, ...]


class Text:
    """A program's text, as XLA optimized it: which line each of its instructions comes from."""

    def __init__(self, text: str) -> None:
        self._instructions: dict[str, _Instruction] = {}
        self._computations: dict[str, list[str]] = {}
        self._entry: Sequence[str] = ()
        current: list[str] = []
        for row in text.splitlines():
            if header := _HEADER.match(row):
                current = self._computations.setdefault(header["name"], [])
                if row.startswith("ENTRY"):
                    self._entry = current
            elif found := _INSTRUCTION.match(row):
                rest = found["rest"]
                numbers = _NUMBER.findall(rest.partition("metadata={")[2])
                called = tuple(name.strip(" %") for one, several in _CALLED.findall(rest) for name in (one or several).split(","))
                target = _TARGET.search(rest)
                count = max((math.prod(map(int, filter(None, shape.split(",")))) for shape in _SHAPE.findall(found["type"])), default=0)
                self._instructions[found["name"]] = _Instruction(
                    found["opcode"], target[1] if target else "", count, int(numbers[-1]) if numbers else events.UNPLACED, called,
                    tuple(_OPERAND.findall(rest.partition(")")[0])),
                )  # fmt: skip
                current.append(found["name"])

    def name_of(self, event: str) -> str | None:
        """The instruction that an event of XLA's profile is of; None if it is not of this program."""
        name = event
        while name not in self._instructions and "__" in name:  # behind it stands what it calls
            name = name.rpartition("__")[0]
        return name if name in self._instructions else None

    def likeness(self, events: Collection[str]) -> float:
        """From 0 to 1: whether these events are of this program, and are all that it has."""
        known = {name for event in events if (name := self.name_of(event)) is not None}
        timed = {name for name in self._entry if self._instructions[name].opcode not in _FREE}
        return len(known) / len(events) * min(1.0, len(known) / max(1, len(timed)))

    def kind(self, name: str) -> str:
        """What an instruction is, for people."""
        found = self._instructions[name]
        if found.opcode == "custom-call":
            return (
                "torch's kernel" if "callback" in found.target or "python" in found.target else found.target.replace("__onednn$", "oneDNN ")
            )
        return "fusion" if found.opcode == "fusion" else found.opcode

    def runs_others(self, name: str) -> bool:
        """Whether what it runs has events of its own."""
        return self._instructions[name].opcode in _CONTROL

    def shares(self, name: str) -> Mapping[int, float]:
        """The numbers of lines that an instruction comes from, with the share of each; -1 for none that is known."""
        found = self._instructions[name]
        weights: Counter[int] = Counter()
        if found.opcode == "fusion":
            for inner in self._inside(found.called, set()):
                if inner.line != events.UNPLACED and inner.opcode not in _FREE:
                    weights[inner.line] += max(inner.count, 1) * (_LONG_WEIGHT if inner.opcode in _LONG else 1)
        if not weights:
            weights[self._line(found)] = 1
        total = sum(weights.values())
        return {line: weight / total for line, weight in weights.items()}

    def _line(self, found: _Instruction, depth: int = 0) -> int:
        """Its own; else, as of what XLA has put in to move numbers, that of what it reads."""
        inside = list(self._inside(found.called, set()))
        own = next((line for line in (found.line, *(other.line for other in inside)) if line != events.UNPLACED), events.UNPLACED)
        moves = all(other.opcode in _MOVES for other in (found, *inside))
        if own != events.UNPLACED or not moves or depth == _DEPTH:
            return own
        read = (self._line(self._instructions[name], depth + 1) for name in found.operands if name in self._instructions)
        return next((line for line in read if line != events.UNPLACED), events.UNPLACED)

    def _inside(self, computations: Sequence[str], seen: set[str]) -> Iterator[_Instruction]:
        for computation in computations:
            if computation in seen:
                continue
            seen.add(computation)
            for name in self._computations.get(computation, ()):
                yield self._instructions[name]
                yield from self._inside(self._instructions[name].called, seen)


class Profiler:
    """Has XLA measure the first later runs of each program, as they come.

    Attributes: problem (why there is no profile; "").
    """

    def __init__(self) -> None:
        self.problem = ""
        self._stop: Callable[[], bytes] | None = None
        self._data: list[bytes] = []
        self._missing: dict[int, int] = {}
        self._runs: Counter[int] = Counter()
        self._lock = threading.RLock()

    def ran(self, executable: Any) -> None:
        """A program has run."""
        with self._lock:
            left = self._missing.setdefault(id(executable), RUNS + 1)
            self._missing[id(executable)] = max(0, left - 1)
            if self._stop is not None:
                self._runs[id(executable)] += 1
            if not any(self._missing.values()):
                self.end()
            elif self._stop is None and not self.problem:
                self._begin()

    def _begin(self) -> None:
        try:
            self._stop = private.profile()
        except Exception as error:  # somebody else measures
            self.problem = f"XLA's profiler did not start: {error}"
        if self._stop is None and not self.problem:
            self.problem = "this jaxlib has no profiler where dynaxla looks for it"

    def end(self) -> None:
        with self._lock:
            stop, self._stop = self._stop, None
            if stop is not None:
                try:
                    self._data.append(stop())
                except Exception as error:
                    self.problem = f"XLA's profiler gave nothing: {error}"

    def measured_runs(self, executable: Any) -> int:
        return self._runs[id(executable)]

    def runs(self) -> dict[Module, list[Run]]:
        """What was measured, by program."""
        found: dict[Module, dict[Any, Run]] = defaultdict(lambda: defaultdict(lambda: defaultdict(float)))
        with warnings.catch_warnings():
            # Python 3.12 deprecates the type that jaxlib makes for the first event; where warnings are errors, that ends the process.
            warnings.simplefilter("ignore", DeprecationWarning)
            for number, data in enumerate(self._data):
                for plane in jax.profiler.ProfileData.from_serialized_xspace(data).planes:
                    _read(plane, number, found)
        return {module: list(runs.values()) for module, runs in found.items()}


def _read(plane: Any, number: int, found: dict[Module, dict[Any, Run]]) -> None:
    ends: dict[Any, float] = {}
    begun: list[tuple[Any, Run, str, float, float]] = []
    for line in plane.lines:
        for event in line.events:
            stats = dict(event.stats)
            if (op := stats.get("hlo_op")) is not None and "hlo_module" in stats:
                run = found[str(stats["hlo_module"]), int(stats.get("program_id", 0))][number, stats.get("run_id")]
                begun.append((stats.get("_p"), run, str(op), event.start_ns, event.duration_ns))
            elif event.name.startswith("end: ") and "_c" in stats:
                ends[stats["_c"]] = event.start_ns
    for flow, run, op, start, duration in begun:
        # A thunk that goes on in other threads returns before it is done.
        run[op] += max(duration, ends.get(flow, start) - start) / 1e9


def costs(
    profiler: Profiler, runs: Sequence[tuple[Any, float]], by_torch: Mapping[int, Mapping[int, float]]
) -> tuple[tuple[Cost, ...], float | None]:
    """The costliest lines of the user's code, and the share of the time that no line is known for (None: nothing was measured).

    runs: executables, with how often each runs in what the costs are for. by_torch: of those that are torch's kernels, by their id(), a
    run's seconds by the number of the line.
    """
    texts: dict[str, list[tuple[Text, float]]] = {f"jit_{executable.name}": [] for executable, _ in runs}
    for executable, count in runs:
        measured_runs = profiler.measured_runs(executable)
        if executable.program is None or not measured_runs:
            continue
        for module in executable.program.text().split("HloModule ")[1:]:  # a program may consist of several
            texts[f"jit_{executable.name}"].append((Text(module), count / measured_runs))
    spent: defaultdict[int, float] = defaultdict(float)
    what: defaultdict[int, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for executable, count in runs:
        for line, seconds in by_torch.get(id(executable), {}).items():
            spent[line] += seconds * count
            what[line][BY_TORCH] += seconds * count
    for (name, _), measured in sorted(profiler.runs().items()):
        middle = sorted(measured, key=lambda run: sum(run.values()))[(len(measured) - 1) // 2]
        found = _best(texts.get(name, []), middle)
        if found is None:
            continue
        text, weight = found[0], found[1] * len(measured)
        for event, seconds in middle.items():
            instruction = text.name_of(event)
            if instruction is None:
                spent[events.UNPLACED] += seconds * weight
                continue
            if text.runs_others(instruction):
                continue
            for line, share in text.shares(instruction).items():
                spent[line] += seconds * weight * share
                what[line][text.kind(instruction)] += seconds * weight * share
    return _ordered(spent, what)


def _best(texts: list[tuple[Text, float]], measured: Run) -> tuple[Text, float] | None:
    """The program that these events are of, among those of one name. It is taken out: XLA numbers programs as they are compiled, and so
    programs that look alike come in turn."""
    scores = [text.likeness(measured) for text, _ in texts]
    if not scores or max(scores) < _LIKELY:
        return None
    return texts.pop(scores.index(max(scores)))


def _ordered(spent: Mapping[int, float], what: Mapping[int, Kinds]) -> tuple[tuple[Cost, ...], float | None]:
    total = sum(spent.values())
    if not total:
        return (), None
    frames = events.lines()
    merged: dict[Line, tuple[float, Kinds]] = {}
    unplaced = 0.0
    for number, seconds in spent.items():
        line = Line.of_frame(frames[number]) if number != events.UNPLACED else None
        if line is None:
            unplaced += seconds
        else:
            before, kinds = merged.get(line, (0.0, {}))
            together = {kind: kinds.get(kind, 0.0) + what[number].get(kind, 0.0) for kind in kinds.keys() | what[number].keys()}
            merged[line] = before + seconds, together
    ordered = sorted(merged.items(), key=lambda item: -item[1][0])[:MOST]
    found = []
    for line, (seconds, kinds) in ordered:
        mostly = sorted(kinds, key=lambda kind: -kinds[kind])[:3]
        found.append(Cost(line, seconds, seconds / total, tuple(mostly)))
    return tuple(found), unplaced / total
