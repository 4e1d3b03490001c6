"""Reports the collectives of programs on a mesh, as read from the programs' HLO, and the memory of the programs on each device."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..engine import executable
from ..engine.executable import Executable, ProgramRun
from ..errors import ArgumentError
from ..runtime import meshes, topologies
from ..runtime.replica_groups import KINDS, groups_in
from ..training.step import CompiledStep
from .charts import draw
from .text_tables import table, text_of

# Matches the line of a collective in HLO, but not the end of an asynchronous collective (`-done`).
_INSTRUCTION = re.compile(rf"\s*(?:ROOT )?%?\S+ = (?P<type>.*?) (?P<kind>{KINDS})(?:-start)?\((?P<rest>.*)")
# Matches the first line of the fusion by which XLA:TPU scatters the result of an all-reduce, so that each device gets only its part.
_SCATTER_FUSION = re.compile(r"%?all-reduce-scatter\S* \(.*\) -> (?P<type>.*) \{")
# Matches the attributes of a collective that XLA:TPU has split into several fusions: a start, an end, and possibly a part that runs
# together with another operation. Each of these fusions contains the collective, with the same channel.
_SPLIT_COLLECTIVE = re.compile(r"channel_id=(\d+),.*frontend_attributes=\{[^}]*chain_id=")
# Matches the start of an asynchronous collective whose type lists the operands before the result. That of an all-reduce does not.
_HAS_OPERANDS = re.compile(r"(?<!all-reduce)-start\(")
# Matches the dtype and the sizes of an array in HLO, such as f32[8,16].
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
# The maximum length of the text for groups of devices that correspond to no axes.
_MAX_GROUPS_LENGTH = 60
# The maximum number of instructions that are searched for the user's line of a collective.
_MAX_CONSUMERS = 16
# Matches the user's line in the metadata of an instruction.
_LINE = re.compile(r"at\[([^\]]*)\]")


@dataclass(frozen=True)
class CollectiveTraffic:
    """All collectives of one kind over the same axes, in all runs of the programs of one name.

    Attributes:
        program: The program's name; an eager op's name; "recorded_ops" for lazy mode.
        kind: XLA's name of the collective.
        axes: The mesh axes along which the collectives move data, or the groups of devices as text if they correspond to no axes.
        count: The number of collectives.
        bytes: The size of all their results on one device.
        lines: The lines of the user's code that caused the collectives, as far as they are known. If XLA has combined several collectives,
            only one of their lines is known.
    """

    program: str
    kind: str
    axes: str
    count: int
    bytes: int
    lines: tuple[str, ...]


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a program on each device, or of the largest of several programs with one name (an eager op for several shapes).

    Attributes:
        program: The program's name.
        arguments: The bytes of its arguments.
        results: The bytes of its results, without results that are written in place.
        temporary: The bytes of its temporary buffers.
        runs: The number of runs of programs with this name.
    """

    program: str
    arguments: int
    results: int
    temporary: int
    runs: int = 1

    @property
    def total(self) -> int:
        return self.arguments + self.results + self.temporary


@dataclass(frozen=True)
class Report:
    """The communication and memory of programs. Its text is a table, and `picture` draws it.

    Attributes:
        collectives: The collectives, by program, kind and axes.
        memory: The memory, by program.
    """

    collectives: tuple[CollectiveTraffic, ...]
    memory: tuple[DeviceMemory, ...]

    def count(self, kind: str) -> int:
        """Returns the number of collectives of a kind in all programs."""
        return sum(item.count for item in self.collectives if item.kind == kind)

    def picture(self, path: str | Path) -> None:
        """Draws two charts: the bytes that collectives move, with the user's lines, and the bytes that programs need on each device.

        Args:
            path: The file. Its ending determines the format: .png, .svg, .pdf.

        Raises:
            ArgumentError: matplotlib is not installed, or does not know the ending.
        """
        draw(path, self.collectives, self.memory)

    def __str__(self) -> str:
        collective_table = table("program", "collective", "axes", "count", "bytes", "lines", title="Moved, by device")
        for item in self.collectives:
            collective_table.add_row(item.program, item.kind, item.axes, str(item.count), f"{item.bytes:,}", "\n".join(item.lines))
        memory_table = table("program", "runs", "arguments", "results", "temporary", title="Bytes on each device")
        for memory in self.memory:
            memory_table.add_row(
                memory.program, str(memory.runs), *(f"{value:,}" for value in (memory.arguments, memory.results, memory.temporary))
            )
        return text_of(collective_table, memory_table)


def report(
    function: Callable[..., Any], *args: Any, run: bool = True, platform: str = "tpu", topology: str | None = None, **kwargs: Any
) -> Report:
    """Calls a function, and returns the communication and memory of its programs: compiled graphs and steps, eager ops, lazy recordings.

    The call has all its effects: a training step trains. A lazy recording is included if it runs during the call. A step of `compile_step`
    that has no program yet is recorded at once, as with `fullgraph`.

    Args:
        function: The function or step.
        args: The positional arguments of the call.
        kwargs: The keyword arguments of the call.
        run: If False, programs are compiled, as quickly as possible, but do not run. Their mesh may be virtual. Tensors that the programs
            write to keep their values, and tensors that the programs create are zeros. All other code of the function runs, including ops
            in eager mode.
        platform: The platform of the topology; only "tpu".
        topology: With `run=False`: TPUs that need not exist, such as "v5e:16x16". XLA's compiler for TPUs, which is part of libtpu,
            compiles the programs for them, with all optimizations. The mesh must have as many devices as the topology. Programs on no mesh
            are compiled for one device, and are part of the report, too.

    Raises:
        ArgumentError: The call runs no program on a mesh; the topology is not known, or has another number of devices than the mesh.
        UnsupportedVersion: libtpu is not installed.
        OutOfMemory: A program needs more memory than a device of the topology has.
    """
    if topology is not None and run:
        raise ArgumentError("the programs of a topology cannot run", hint="give run=False")
    target = None if topology is None else topologies.topology(platform, topology)
    call = function
    if isinstance(function, CompiledStep):
        # For a topology, a new CompiledStep compiles the step again, and `function` keeps its programs for this machine.
        call = CompiledStep(function._function, function._options, False).call_as_program if target else function.call_as_program
    with executable.recorded_runs() as runs, contextlib.nullcontext() if run else meshes.compile_only(target):
        call(*args, **kwargs)
    on_mesh = [item for item in runs if item.program is not None and (item.program.mesh is not None or target is not None)]
    if not on_mesh:
        raise ArgumentError(
            f"a call of {getattr(function, '__name__', function)!r} runs no program on several devices",
            hint="shard its tensors with dynaxla.sharding.mark_sharding; for a virtual mesh, compile the function and give run=False",
        )
    return Report(_combined(on_mesh), _largest_memory(on_mesh))


def _combined(runs: Sequence[ProgramRun]) -> tuple[CollectiveTraffic, ...]:
    """Returns the collectives of all runs, summed by program name, kind and axes."""
    by_program: dict[int, list[CollectiveTraffic]] = {}
    groups: dict[tuple[str, str, str], list[tuple[CollectiveTraffic, str]]] = {}
    for item in runs:
        if id(item.program) not in by_program:
            by_program[id(item.program)] = collectives_of(item)
        for collective in by_program[id(item.program)]:
            groups.setdefault((collective.program, collective.kind, collective.axes), []).append((collective, item.line))
    return tuple(
        CollectiveTraffic(
            *key,
            sum(collective.count for collective, _ in items),
            sum(collective.bytes for collective, _ in items),
            tuple(sorted({line for collective, call_line in items for line in collective.lines or (call_line,) if line})),
        )
        for key, items in groups.items()
    )


def _largest_memory(runs: Sequence[ProgramRun]) -> tuple[DeviceMemory, ...]:
    """Returns for each program name the memory of the program that needs the most."""
    run_counts = Counter(item.name for item in runs)
    largest: dict[str, DeviceMemory] = {}
    for memory in [memory_of(item) for item in {id(item.program): item for item in runs}.values()]:
        if memory.program not in largest or memory.total > largest[memory.program].total:
            largest[memory.program] = dataclasses.replace(memory, runs=run_counts[memory.program])
    return tuple(largest.values())


def collectives_of(run: ProgramRun | Executable) -> list[CollectiveTraffic]:
    """Returns the collectives of one run of a program, summed by kind and axes."""
    assert run.program is not None
    mesh = run.program.mesh
    groups: dict[tuple[str, str], list[tuple[int, str]]] = {}
    text = run.program.text()
    scattered: str | None = None  # the result type of the current HLO computation, if that is a `_SCATTER_FUSION`
    channels: set[str] = set()  # the channels of the split collectives so far
    for line in text.splitlines():
        if line.endswith("{"):
            fusion = _SCATTER_FUSION.match(line)
            scattered = None if fusion is None else fusion["type"]
        match = _INSTRUCTION.match(line)
        if match is None:
            continue
        if (split := _SPLIT_COLLECTIVE.search(line)) is not None:
            if split[1] in channels:
                continue
            channels.add(split[1])
        kind, size = (
            ("reduce-scatter", _bytes(scattered))
            if scattered is not None
            else (match["kind"], _bytes(_type_of_result(match["type"]) if _HAS_OPERANDS.search(line) else match["type"]))
        )
        groups.setdefault((kind, _axes_of(match["rest"], mesh)), []).append((size, _line(line, text)))
    return [
        CollectiveTraffic(
            run.name, kind, axes, len(items), sum(size for size, _ in items), tuple(sorted({line for _, line in items if line}))
        )
        for (kind, axes), items in sorted(groups.items())
    ]


def _line(instruction: str, text: str) -> str:
    """Returns the user's line of an instruction; if it has none, that of the nearest consumer of its result that has one; or else "".

    In jaxlib 0.12, a collective on a parameter has the parameter's name in place of a line.

    Args:
        instruction: The instruction in HLO.
        text: The program in HLO.
    """
    seen, queue = {instruction.strip()}, [instruction.strip()]
    for current in itertools.islice(queue, _MAX_CONSUMERS):  # bounded, since each step searches the whole text
        if line := _LINE.search(current):
            return line[1]
        name = re.escape(current.removeprefix("ROOT ").partition(" = ")[0])
        consumers = {match[0].strip() for match in re.finditer(rf"^.* = .*[( ]{name}[,)].*$", text, re.MULTILINE)}
        queue += sorted(consumers - seen)
        seen |= consumers
    return ""


def _bytes(text: str) -> int:
    """Returns the bytes of all arrays in a type in HLO."""
    return sum(-(-math.prod(map(int, filter(None, shape.split(",")))) * _bits(dtype) // 8) for dtype, shape in _ARRAY.findall(text))


def _type_of_result(text: str) -> str:
    """Returns the type of the result of an asynchronous collective, in HLO.

    Args:
        text: The type of the collective's start: a tuple of the operands, the result and possibly further values, such as u32[].
    """
    items, depth = [""], 0
    for character in text[1:-1] if text.startswith("(") else text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            items.append("")
        else:
            items[-1] += character
    return items[1] if len(items) > 1 else text


def _bits(dtype: str) -> int:
    """Returns the size of an element of an HLO dtype, in bits."""
    digits = re.search(r"\d+", dtype)
    return 8 if digits is None else int(digits[0])


def _axes_of(text: str, mesh: Any) -> str:
    """Returns the mesh axes along which a collective moves data, or its groups of devices if they correspond to no axes.

    Args:
        text: The collective's attributes in HLO.
        mesh: The mesh.
    """
    try:
        groups = groups_in(text)
    except ValueError:  # another release of XLA may use another notation
        return text.partition("replica_groups=")[2][:_MAX_GROUPS_LENGTH]
    if groups is None:
        return ", ".join(mesh.axis_names)
    names = list(mesh.axis_names)
    grid = np.arange(mesh.size).reshape([mesh.shape[name] for name in names])
    for count in range(1, len(names) + 1):
        for chosen in itertools.combinations(range(len(names)), count):
            rest = [axis for axis in range(len(names)) if axis not in chosen]
            rows = grid.transpose([*rest, *chosen]).reshape(-1, math.prod(grid.shape[axis] for axis in chosen))
            if {frozenset(row.tolist()) for row in rows} == groups:
                return ", ".join(names[axis] for axis in chosen)
    text = " ".join(str(sorted(group)) for group in sorted(groups, key=min))
    return text if len(text) <= _MAX_GROUPS_LENGTH else f"{text[:_MAX_GROUPS_LENGTH]}..."


def memory_of(run: ProgramRun | Executable) -> DeviceMemory:
    """Returns the memory of a program, as XLA's memory analysis reports it."""
    assert run.program is not None
    stats = run.program.memory()
    return DeviceMemory(
        run.name,
        stats.argument_size_in_bytes,
        stats.output_size_in_bytes - stats.alias_size_in_bytes,
        stats.temp_size_in_bytes,
    )
