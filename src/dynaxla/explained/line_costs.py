"""Costs by line of the user's code, from an XLA profile of a few runs and the metadata of the HLO instructions.

XLA's profile has the time of each instruction. In the HLO text, the metadata of each instruction has the name scope under which the op was
traced. This name contains the number of the user's line (`events.line_scope`). A fusion consists of many instructions, possibly from
several lines, and XLA measures only the fusion: its time is divided among the instructions by the number of elements that each computes,
where an element counts more if the opcode is expensive (`_EXPENSIVE`).
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
from .formatting import BY_TORCH

# The number of later runs of each program to measure.
PROFILED_RUNS = 3
# The largest number of lines to report.
MAX_LINES = 10
# Seconds by kind of instruction.
SecondsByKind = Mapping[str, float]
# The times of one run of a program: seconds by name of the event in XLA's profile.
RunTimes = dict[str, float]
# An HLO module in XLA's profile: its name and its program id.
ModuleKey = tuple[str, int]
# A run is attributed to no program if the best `HloText.match_score` is below this value.
_MIN_MATCH_SCORE = 0.3

_HEADER = re.compile(r"^(?:ENTRY )?%?(?P<name>[^\s(]+) (?:\(.*\) -> .*)?\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?(?P<name>\S+) = (?P<type>.+?) (?P<opcode>[a-z][\w-]*)\((?P<rest>.*)$")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([^\s,)}]+)|branch_computations=\{([^}]*)\}")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_NUMBER = re.compile(r"line\[(\d+)\]")
_OPERAND = re.compile(r"%([^\s,()]+)")
_SHAPE = re.compile(r"\w+\[([\d,]*)\]")
# Opcodes that move or name elements without computing. A fusion or a call is a data movement if all its nested instructions are.
_NO_COMPUTATION = frozenset({"parameter", "constant", "broadcast", "bitcast", "tuple", "get-tuple-element", "reshape", "iota"})
_DATA_MOVEMENTS = _NO_COMPUTATION | {"copy", "transpose", "fusion", "call", "slice", "copy-start", "copy-done"}
# The largest number of operands that `_line` follows, one after another, to find a line for a data movement.
_MAX_DEPTH = 8
# Opcodes that take many machine instructions for each element.
_EXPENSIVE = frozenset(
    {"exponential", "exponential-minus-one", "log", "log-plus-one", "tanh", "sine", "cosine", "tan", "power", "logistic", "erf", "atan2"}
    | {"divide", "sqrt", "rsqrt", "cbrt"}
)
_EXPENSIVE_WEIGHT = 8
# Opcodes whose computations have events of their own in the profile.
_CONTROL_FLOW = frozenset({"while", "conditional", "call"})


@dataclass(frozen=True)
class _Instruction:
    """An instruction of an HLO module.

    Attributes:
        opcode: the opcode.
        target: the target of a custom call, or "".
        count: the number of elements of the result; of a tuple, of its largest part.
        line: the number of the user's line (`events.line_number`), or NO_LINE.
        called: the names of the computations that the instruction calls.
        operands: the names of the instructions that it reads.
    """

    opcode: str
    target: str
    count: int
    line: int
    called: tuple[str, ...]
    operands: tuple[str, ...]


class HloText:
    """The optimized HLO text of a module, parsed to find the user's line of each instruction."""

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
                    found["opcode"], target[1] if target else "", count, int(numbers[-1]) if numbers else events.NO_LINE, called,
                    tuple(_OPERAND.findall(rest.partition(")")[0])),
                )  # fmt: skip
                current.append(found["name"])

    def instruction_of(self, event: str) -> str | None:
        """Returns the name of the instruction that an event measures; None if this program does not have it."""
        name = event
        # XLA appends "__" and the function's name to an event of a called function.
        while name not in self._instructions and "__" in name:
            name = name.rpartition("__")[0]
        return name if name in self._instructions else None

    def match_score(self, event_names: Collection[str]) -> float:
        """Returns a score from 0 to 1; 1 if all events belong to this program and all its entry computation is measured."""
        measured_names = {name for event in event_names if (name := self.instruction_of(event)) is not None}
        entry_names = {name for name in self._entry if self._instructions[name].opcode not in _NO_COMPUTATION}
        return len(measured_names) / len(event_names) * min(1.0, len(measured_names) / max(1, len(entry_names)))

    def kind(self, name: str) -> str:
        """Returns the kind of an instruction in readable form, such as "fusion" or "oneDNN matmul"."""
        found = self._instructions[name]
        if found.opcode == "custom-call":
            return (
                "torch's kernel" if "callback" in found.target or "python" in found.target else found.target.replace("__onednn$", "oneDNN ")
            )
        return "fusion" if found.opcode == "fusion" else found.opcode

    def is_control_flow(self, name: str) -> bool:
        """True if the computations of an instruction have events of their own."""
        return self._instructions[name].opcode in _CONTROL_FLOW

    def line_shares(self, name: str) -> Mapping[int, float]:
        """Returns the share of each line in the time of an instruction, by line number; NO_LINE is the number of an unknown line."""
        found = self._instructions[name]
        weights: Counter[int] = Counter()
        if found.opcode == "fusion":
            for inner in self._nested(found.called, set()):
                if inner.line != events.NO_LINE and inner.opcode not in _NO_COMPUTATION:
                    weights[inner.line] += max(inner.count, 1) * (_EXPENSIVE_WEIGHT if inner.opcode in _EXPENSIVE else 1)
        if not weights:
            weights[self._line(found)] = 1
        total = sum(weights.values())
        return {line: weight / total for line, weight in weights.items()}

    def _line(self, found: _Instruction, depth: int = 0) -> int:
        """Returns the line number of an instruction. For a data movement without a line, takes the line of an operand."""
        nested = list(self._nested(found.called, set()))
        line = next((line for line in (found.line, *(other.line for other in nested)) if line != events.NO_LINE), events.NO_LINE)
        is_data_movement = all(other.opcode in _DATA_MOVEMENTS for other in (found, *nested))
        if line != events.NO_LINE or not is_data_movement or depth == _MAX_DEPTH:
            return line
        operand_lines = (self._line(self._instructions[name], depth + 1) for name in found.operands if name in self._instructions)
        return next((line for line in operand_lines if line != events.NO_LINE), events.NO_LINE)

    def _nested(self, computations: Sequence[str], seen: set[str]) -> Iterator[_Instruction]:
        for computation in computations:
            if computation in seen:
                continue
            seen.add(computation)
            for name in self._computations.get(computation, ()):
                yield self._instructions[name]
                yield from self._nested(self._instructions[name].called, seen)


class Profiler:
    """Profiles `PROFILED_RUNS` runs of each program, from the second run on, with XLA's profiler.

    Attributes:
        problem: the reason why there is no profile, or "".
    """

    def __init__(self) -> None:
        self.problem = ""
        self._stop: Callable[[], bytes] | None = None
        self._data: list[bytes] = []
        self._runs_to_profile: dict[int, int] = {}
        self._profiled_counts: Counter[int] = Counter()
        self._lock = threading.RLock()

    def count_run(self, executable: Any) -> None:
        """Counts a run of a program, and starts or stops the profiler accordingly."""
        with self._lock:
            to_profile = self._runs_to_profile.setdefault(id(executable), PROFILED_RUNS + 1)  # the first run is not profiled
            self._runs_to_profile[id(executable)] = max(0, to_profile - 1)
            if self._stop is not None:
                self._profiled_counts[id(executable)] += 1
            if not any(self._runs_to_profile.values()):
                self.end()
            elif self._stop is None and not self.problem:
                self._begin()

    def _begin(self) -> None:
        try:
            self._stop = private.profile()
        except Exception as error:  # for example because another profile is in progress
            self.problem = f"XLA's profiler did not start: {error}"
        if self._stop is None and not self.problem:
            self.problem = "dynaxla does not find the profiler of this jaxlib"

    def end(self) -> None:
        with self._lock:
            stop, self._stop = self._stop, None
            if stop is not None:
                try:
                    self._data.append(stop())
                except Exception as error:
                    self.problem = f"XLA's profiler returned nothing: {error}"

    def profiled_count(self, executable: Any) -> int:
        return self._profiled_counts[id(executable)]

    def times_by_module(self) -> dict[ModuleKey, list[RunTimes]]:
        """Returns the times of the profiled runs, by module."""
        found: dict[ModuleKey, dict[Any, RunTimes]] = defaultdict(lambda: defaultdict(lambda: defaultdict(float)))
        with warnings.catch_warnings():
            # jaxlib issues a DeprecationWarning when it creates the type of the first event. If warnings are errors, that ends the process.
            warnings.simplefilter("ignore", DeprecationWarning)
            for number, data in enumerate(self._data):
                for plane in jax.profiler.ProfileData.from_serialized_xspace(data).planes:
                    _add_events(plane, number, found)
        return {module: list(runs.values()) for module, runs in found.items()}


def _add_events(plane: Any, profile_number: int, found: dict[ModuleKey, dict[Any, RunTimes]]) -> None:
    """Adds the events of a plane of a profile to `found`, which has, for each module and each run, the seconds by event."""
    ends: dict[Any, float] = {}
    op_events: list[tuple[Any, RunTimes, str, float, float]] = []
    for line in plane.lines:
        for event in line.events:
            stats = dict(event.stats)
            if (op := stats.get("hlo_op")) is not None and "hlo_module" in stats:
                run = found[str(stats["hlo_module"]), int(stats.get("program_id", 0))][profile_number, stats.get("run_id")]
                op_events.append((stats.get("_p"), run, str(op), event.start_ns, event.duration_ns))
            elif event.name.startswith("end: ") and "_c" in stats:
                ends[stats["_c"]] = event.start_ns
    for flow, run, op, start, duration in op_events:
        # A thunk that continues in other threads returns early. XLA records an event "end: ..." when the work is done. The statistic "_c"
        # of that event equals "_p" of the thunk's event.
        run[op] += max(duration, ends.get(flow, start) - start) / 1e9


def costs(
    profiler: Profiler, runs: Sequence[tuple[Any, float]], by_torch: Mapping[int, Mapping[int, float]]
) -> tuple[tuple[Cost, ...], float | None]:
    """Returns the costliest lines of the user's code, and the fraction of the time without a known line.

    The fraction is None if nothing was measured.

    Args:
        profiler: the profiler of the runs.
        runs: each executable, with the number of its runs, possibly fractional, whose costs are returned.
        by_torch: the seconds of torch's kernels in one run, by `id()` of the executable, and then by line number.
    """
    texts: dict[str, list[tuple[HloText, float]]] = {f"jit_{executable.name}": [] for executable, _ in runs}
    for executable, count in runs:
        profiled_count = profiler.profiled_count(executable)
        if executable.program is None or not profiled_count:
            continue
        for module in executable.program.text().split("HloModule ")[1:]:  # a program may consist of several modules
            # The factor scales the time of the profiled runs to the time of `count` runs.
            texts[f"jit_{executable.name}"].append((HloText(module), count / profiled_count))
    seconds_by_line: defaultdict[int, float] = defaultdict(float)
    kinds_by_line: defaultdict[int, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for executable, count in runs:
        for line, seconds in by_torch.get(id(executable), {}).items():
            seconds_by_line[line] += seconds * count
            kinds_by_line[line][BY_TORCH] += seconds * count
    for (name, _), measured in sorted(profiler.times_by_module().items()):
        median = sorted(measured, key=lambda run: sum(run.values()))[(len(measured) - 1) // 2]
        found = _take_best_match(texts.get(name, []), median)
        if found is None:
            continue
        text, weight = found[0], found[1] * len(measured)
        for event, seconds in median.items():
            instruction = text.instruction_of(event)
            if instruction is None:
                seconds_by_line[events.NO_LINE] += seconds * weight
                continue
            if text.is_control_flow(instruction):
                continue
            for line, share in text.line_shares(instruction).items():
                seconds_by_line[line] += seconds * weight * share
                kinds_by_line[line][text.kind(instruction)] += seconds * weight * share
    return _costliest(seconds_by_line, kinds_by_line)


def _take_best_match(texts: list[tuple[HloText, float]], measured: RunTimes) -> tuple[HloText, float] | None:
    """Removes and returns the program to which a run belongs; None if none matches. `texts` has the programs with the run's module name.

    XLA numbers programs in the order of compilation, so among equal scores the first is taken.
    """
    scores = [text.match_score(measured) for text, _ in texts]
    if not scores or max(scores) < _MIN_MATCH_SCORE:
        return None
    return texts.pop(scores.index(max(scores)))


def _costliest(seconds_by_line: Mapping[int, float], kinds_by_line: Mapping[int, SecondsByKind]) -> tuple[tuple[Cost, ...], float | None]:
    total = sum(seconds_by_line.values())
    if not total:
        return (), None
    frames = events.lines()
    merged: dict[Line, tuple[float, SecondsByKind]] = {}
    unplaced = 0.0
    for number, seconds in seconds_by_line.items():
        line = Line.of_frame(frames[number]) if number != events.NO_LINE else None
        if line is None:
            unplaced += seconds
        else:
            before, kinds = merged.get(line, (0.0, {}))
            merged_kinds = {
                kind: kinds.get(kind, 0.0) + kinds_by_line[number].get(kind, 0.0) for kind in kinds.keys() | kinds_by_line[number].keys()
            }
            merged[line] = before + seconds, merged_kinds
    ordered = sorted(merged.items(), key=lambda item: -item[1][0])[:MAX_LINES]
    found = []
    for line, (seconds, kinds) in ordered:
        main_kinds = sorted(kinds, key=lambda kind: -kinds[kind])[:3]
        found.append(Cost(line, seconds, seconds / total, tuple(main_kinds)))
    return tuple(found), unplaced / total
