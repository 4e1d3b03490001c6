"""Reports the collectives between the devices of a mesh, and the memory on each device, of compiled programs, from XLA's text of them."""

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
from ..runtime import meshes
from ..runtime.replica_groups import KINDS, groups_in
from ..training.step import CompiledStep
from .charts import draw
from .text_tables import table, text_of

_INSTRUCTION = re.compile(rf"^\s*(?:ROOT )?%?\S+ = (?P<type>.*?) (?P<kind>{KINDS})(?:-start)?\((?P<rest>.*)$", re.MULTILINE)
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
# The maximum length of the text for groups of devices that match no axes.
_MOST = 60
# The maximum number of instructions that are searched for a line.
_CONSUMERS = 16
_LINE = re.compile(r"at\[([^\]]*)\]")


@dataclass(frozen=True)
class CollectiveTraffic:
    """All collectives of one kind over the same axes, in all runs of the programs of one name.

    Attributes:
        program: The program's name; an eager op's name; "recorded_ops" for lazy mode.
        kind: XLA's name of the collective.
        axes: The mesh axes between whose devices it moves data; the groups of devices as text if they match no axes.
        count: The number of collectives.
        bytes: The size of all their results on one device.
        lines: The user's lines that caused them, as far as known; only one line for a collective into which XLA has combined several.
    """

    program: str
    kind: str
    axes: str
    count: int
    bytes: int
    lines: tuple[str, ...]


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a program on each device, in bytes; for several programs of one name (an eager op for several shapes), the largest.

    Attributes:
        program: The program's name.
        arguments: The bytes of its arguments.
        results: The bytes of its results, without those written in place.
        temporary: The bytes of its temporary buffers.
        runs: The number of runs.
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
        """Draws the bytes moved, by kind and axes, with the lines that move them, and the bytes that programs need on each device.

        Args:
            path: The file; its ending determines the format: .png, .svg, .pdf.

        Raises:
            ArgumentError: matplotlib is not installed, or does not know the ending.
        """
        draw(path, self.collectives, self.memory)

    def __str__(self) -> str:
        moved = table("program", "collective", "axes", "count", "bytes", "lines", title="Moved, by device")
        for item in self.collectives:
            moved.add_row(item.program, item.kind, item.axes, str(item.count), f"{item.bytes:,}", "\n".join(item.lines))
        kept = table("program", "runs", "arguments", "results", "temporary", title="Bytes on each device")
        for memory in self.memory:
            kept.add_row(
                memory.program, str(memory.runs), *(f"{value:,}" for value in (memory.arguments, memory.results, memory.temporary))
            )
        return text_of(moved, kept)


def report(function: Callable[..., Any], *args: Any, run: bool = True, **kwargs: Any) -> Report:
    """Calls a function, and returns the communication and memory of its programs: compiled graphs and steps, eager ops, lazy recordings.

    The call has all its effects: a training step trains. A lazy recording counts if it runs during the call. A step of
    `compile_step` that has no program yet is recorded at once, as with `fullgraph`.

    Args:
        function: The function or step.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        run: If False, programs are compiled, as quickly as possible, but do not run, for a virtual mesh too: tensors that they write to
            keep their values, and tensors that they create are zeros. Everything else in the function happens, including eager mode's ops.

    Raises:
        ArgumentError: The call runs no program on a mesh.
    """
    call = function.call_as_program if isinstance(function, CompiledStep) else function
    with executable.recorded_runs() as ran, contextlib.nullcontext() if run else meshes.planning():
        call(*args, **kwargs)
    on_mesh = [program for program in ran if program.program is not None and program.program.mesh is not None]
    if not on_mesh:
        raise ArgumentError(
            f"a call of {getattr(function, '__name__', function)!r} runs no program on several devices",
            hint="shard its tensors with dynaxla.sharding.mark_sharding; for a virtual mesh, compile the function and give run=False",
        )
    return Report(_together(on_mesh), _largest(on_mesh))


def _together(ran: Sequence[ProgramRun]) -> tuple[CollectiveTraffic, ...]:
    """Returns the collectives of all runs, combined by program name, kind and axes."""
    once: dict[int, list[CollectiveTraffic]] = {}
    found: dict[tuple[str, str, str], list[tuple[CollectiveTraffic, str]]] = {}
    for item in ran:
        if id(item.program) not in once:
            once[id(item.program)] = _collectives(item)
        for collective in once[id(item.program)]:
            found.setdefault((collective.program, collective.kind, collective.axes), []).append((collective, item.line))
    return tuple(
        CollectiveTraffic(
            *key,
            sum(collective.count for collective, _ in items),
            sum(collective.bytes for collective, _ in items),
            tuple(sorted({line for collective, called in items for line in collective.lines or (called,) if line})),
        )
        for key, items in found.items()
    )


def _largest(ran: Sequence[ProgramRun]) -> tuple[DeviceMemory, ...]:
    """Returns for each program name the memory of the program that needs most."""
    runs = Counter(item.name for item in ran)
    found: dict[str, DeviceMemory] = {}
    for memory in [_memory(item) for item in {id(item.program): item for item in ran}.values()]:
        if memory.program not in found or memory.total > found[memory.program].total:
            found[memory.program] = dataclasses.replace(memory, runs=runs[memory.program])
    return tuple(found.values())


def _collectives(ran: ProgramRun | Executable) -> list[CollectiveTraffic]:
    assert ran.program is not None
    mesh = ran.program.mesh
    found: dict[tuple[str, str], list[tuple[int, str]]] = {}
    text = ran.program.text()
    for match in _INSTRUCTION.finditer(text):
        rest = match["rest"]
        size = _bytes(match["type"], "-start(" in match[0])
        found.setdefault((match["kind"], _axes(rest, mesh)), []).append((size, _line(match[0], text)))
    return [
        CollectiveTraffic(
            ran.name, kind, axes, len(items), sum(size for size, _ in items), tuple(sorted({line for _, line in items if line}))
        )
        for (kind, axes), items in sorted(found.items())
    ]


def _line(instruction: str, text: str) -> str:
    """Returns the user's line of an instruction, or of the first consumer of its result that has one; "" if there is none.

    In jaxlib 0.12, a collective on a parameter has the parameter's name in place of a line.
    """
    found, left = {instruction.strip()}, [instruction.strip()]
    for current in itertools.islice(left, _CONSUMERS):  # bounded, since each step searches the whole text
        if line := _LINE.search(current):
            return line[1]
        name = re.escape(current.removeprefix("ROOT ").partition(" = ")[0])
        consumers = {match[0].strip() for match in re.finditer(rf"^.* = .*[( ]{name}[,)].*$", text, re.MULTILINE)}
        left += sorted(consumers - found)
        found |= consumers
    return ""


def _bytes(text: str, is_start: bool) -> int:
    """Returns the size of a collective's result in bytes.

    Args:
        text: The result's type in HLO.
        is_start: The instruction is an asynchronous start, whose type lists the operands before the results.
    """
    sizes = [-(-math.prod(map(int, filter(None, shape.split(",")))) * _bits(dtype) // 8) for dtype, shape in _ARRAY.findall(text)]
    return sum(sizes[len(sizes) // 2 :] if is_start and len(sizes) > 1 else sizes)


def _bits(dtype: str) -> int:
    """Returns the size of an element of an HLO dtype, in bits."""
    found = re.search(r"\d+", dtype)
    return 8 if found is None else int(found[0])


def _axes(text: str, mesh: Any) -> str:
    """Returns the mesh axes between whose devices a collective works. `text`: its attributes in HLO."""
    try:
        groups = groups_in(text)
    except ValueError:  # another release of XLA may use another notation
        return text.partition("replica_groups=")[2][:_MOST]
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
    return text if len(text) <= _MOST else f"{text[:_MOST]}..."


def _memory(ran: ProgramRun | Executable) -> DeviceMemory:
    assert ran.program is not None
    stats = ran.program.memory()
    return DeviceMemory(
        ran.name,
        stats.argument_size_in_bytes,
        stats.output_size_in_bytes - stats.alias_size_in_bytes,
        stats.temp_size_in_bytes,
    )
