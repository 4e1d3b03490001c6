"""Formats numbers, and the table rows that both the text and the HTML page show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .explanation import CapturedGraph, ChosenImplementation, CompiledProgram, Copy, Explanation, Fallback, Graph, Rewrite, Tensor

# The label of a graph that torch's kernels run because XLA would have nothing to fuse in it.
BY_TORCH = "torch's kernels, without a program"

# The largest number of inputs, outputs or ops that are listed.
MAX_ITEMS = 12


def seconds(value: float | None) -> str:
    """Formats seconds as `1.23 s`, `4.5 ms` or `67 µs`; "-" for None."""
    if value is None:
        return "-"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}" if value / size < 1000 else f"{value / size:.0f} {unit}"
    return f"{value / 1e-6:.3g} µs"


def size(count: int) -> str:
    """Formats bytes as `1.5 MiB`."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if value >= 100 or unit == "B" else f"{value:.1f} {unit}"


def number(count: int, noun: str) -> str:
    """Formats a count with a noun as `1 graph`, `2 graphs`."""
    many = noun[:-1] + "ies" if noun.endswith("y") else f"{noun}s"
    return f"{count} {noun if count == 1 else many}"


def summary(explanation: Explanation) -> list[tuple[str, str]]:
    """Returns the rows of the summary: name and value."""
    graphs = explanation.graphs
    compiled = [program for graph in graphs for program in graph.programs if not program.is_by_torch]
    by_torch = [graph for graph in graphs if any(program.is_by_torch for program in graph.programs)]
    ops = sum(graph.size for graph in graphs)
    copied = [copy for graph in graphs for copy in graph.copies if copy.later]
    rows = [
        ("the script took" if explanation.is_script else "first call", seconds(explanation.seconds)),
        ("a later call", seconds(explanation.later_seconds)),
        ("XLA's programs in all" if explanation.is_script else "of that, XLA's programs", seconds(explanation.xla_seconds)),
        (
            "torch's kernels without a program, in all" if explanation.is_script else "of that, torch's kernels without a program",
            seconds(explanation.torch_seconds) if explanation.torch_seconds else "-",
        ),
        ("captured", f"{number(len(explanation.captured), 'part')}, {number(len(graphs), 'ATen graph')}, {number(ops, 'op')}"),
        ("breaks", str(sum(item.count for item in explanation.breaks))),
        ("captured again", str(len(explanation.recompilations))),
        ("compiled", number(len(compiled), "program")),
        ("run by torch, with nothing to fuse", number(len(by_torch), "graph") if by_torch else "-"),
        ("by torch, without a lowering", str(sum(fallback.count for fallback in fallbacks(explanation)))),
        (
            "copied at later calls",
            f"{number(len(copied), 'argument')}, {size(sum(copy.bytes for copy in copied))} a call" if copied else "nothing",
        ),
    ]
    return [(name, value) for name, value in rows if value != "-"]


def fallbacks(explanation: Explanation) -> list[Fallback]:
    """Returns the fallbacks of all graphs, and the fallbacks that belong to no graph."""
    return [
        item
        for captured in explanation.captured
        for item in (*captured.fallbacks, *(f for graph in captured.graphs for f in graph.fallbacks))
    ]


def title(captured: CapturedGraph) -> str:
    """Returns a one-line title of a captured graph."""
    noun = "a step" if captured.is_step else "TorchDynamo's graph"
    return f"{noun} {captured.number}" + (f", from {captured.line}" if captured.line is not None else "")


def end_sentence(captured: CapturedGraph) -> str:
    """Returns a sentence with the place at which a captured graph ends, and the reason."""
    if captured.ended is None:
        return "It ends with its function." if not captured.is_step else "It is the whole recorded step."
    return f"It ends at {captured.ended.line}: {captured.ended.reason}"


def list_counts(counts: Mapping[str, int]) -> str:
    """Formats counts by name as `5 convolution, 3 elementwise`."""
    shown = [f"{count} {name}" for name, count in list(counts.items())[:MAX_ITEMS]]
    return ", ".join(shown) + (f", and {len(counts) - MAX_ITEMS} kinds more" if len(counts) > MAX_ITEMS else "")


def ops(counts: Mapping[str, int]) -> str:
    """Formats counts of ops as `list_counts` does, without the prefix "aten." and the suffix ".default"."""
    return list_counts({name.removeprefix("aten.").removesuffix(".default"): count for name, count in counts.items()})


def tensors(items: Sequence[Tensor]) -> str:
    """Formats tensors as `x f32[8, 3] (96 B)`, the larger ones first."""
    largest_first = sorted(items, key=lambda tensor: -tensor.bytes)
    shown = [f"{tensor.name} {tensor.text} ({size(tensor.bytes)})" for tensor in largest_first[:MAX_ITEMS]]
    rest = largest_first[MAX_ITEMS:]
    return "; ".join(shown) + (f"; and {len(rest)} more ({size(sum(tensor.bytes for tensor in rest))})" if rest else "") or "none"


def unplaced_sentence(explanation: Explanation) -> str:
    """Returns the note under the table of the costliest lines: the share of the time without a line, and the clocks."""
    unplaced = f"{explanation.unplaced_share:.1%} of this time cannot be attributed to a line of your code. XLA measures processor time"
    return unplaced + (f"; for {BY_TORCH}, the time is wall-clock time." if explanation.torch_seconds else ".")


def facts(graph: Graph) -> list[tuple[str, str]]:
    """Returns the rows of a graph's table: name and value."""
    parameters, parameter_bytes = graph.parameters
    rows = [
        ("ops", f"{graph.size}: {ops(graph.ops)}"),
        ("kinds", list_counts(graph.kinds)),
        ("parameters, buffers", f"{parameters} ({size(parameter_bytes)})" if parameters else ""),
        ("other inputs", tensors(graph.inputs)),
        ("outputs", tensors(graph.outputs)),
        ("engine", graph.engine + (f": {graph.engine_note}" if graph.engine_note else "")),
    ]
    return [(name, value) for name, value in rows if value]


PROGRAM = ("program", "sizes", "trace", "lower", "compile", "arguments", "results", "temporary", "runs", "first run", "later run")


def program_row(program: CompiledProgram) -> tuple[str, ...]:
    """Returns a row with the columns of `PROGRAM`."""
    memory = program.memory
    memory_sizes = [size(value) for value in (memory.arguments, memory.results, memory.temporary)] if memory is not None else ["-"] * 3
    phases = [seconds(program.seconds.get(phase)) for phase in ("trace", "lower", "compile")]
    times = seconds(program.first_seconds), seconds(program.later_seconds)
    name = BY_TORCH if program.is_by_torch else program.name
    return name, program.sizes or "-", *phases, *memory_sizes, str(program.runs), *times


IMPLEMENTATION = ("op", "problem", "computed by", "also possible")


def implementation_row(chosen: ChosenImplementation) -> tuple[str, ...]:
    """Returns a row with the columns of `IMPLEMENTATION`."""
    if chosen.seconds:
        others = ", ".join(f"{name} {seconds(value) if value is not None else 'refused'}" for name, value in chosen.seconds.items())
        others = f"measured: {others}"
    else:
        others = ", ".join(chosen.others) + (" (not measured)" if chosen.others and chosen.is_measurable else "")
    is_graph_by_torch = (chosen.op, chosen.implementation) == ("graph", "torch")
    name = BY_TORCH if is_graph_by_torch else NAMES.get(chosen.implementation, chosen.implementation)
    return chosen.op, chosen.problem, name, others or "-"


# Readable names of implementations.
NAMES = {"onednn": "oneDNN, called by XLA's program", "torch": "torch's kernel, called by XLA's program", "xla": "XLA"}

REWRITE = ("pass", "graph", "nodes before", "after")


def rewrite_row(rewrite: Rewrite) -> tuple[str, ...]:
    """Returns a row with the columns of `REWRITE`."""
    return rewrite.name, rewrite.level, str(rewrite.before), " + ".join(map(str, rewrite.after))


COPY = ("argument", "bytes", "why", "at first calls", "at later calls")


def copy_row(copy: Copy) -> tuple[str, ...]:
    """Returns a row with the columns of `COPY`."""
    return copy.argument, size(copy.bytes), copy.reason, str(copy.first), str(copy.later)


FALLBACK = ("op", "count", "by torch, because", "line")


def fallback_row(fallback: Fallback) -> tuple[str, ...]:
    """Returns a row with the columns of `FALLBACK`."""
    return fallback.op, str(fallback.count), fallback.reason, fallback.where


def tables(graph: Graph) -> list[tuple[Sequence[str], list[tuple[str, ...]]]]:
    """Returns the columns and the rows of a graph's tables that have rows."""
    found: list[tuple[Sequence[str], list[tuple[str, ...]]]] = [
        (PROGRAM, list(map(program_row, graph.programs))),
        (IMPLEMENTATION, list(map(implementation_row, graph.implementations))),
        (REWRITE, list(map(rewrite_row, graph.rewrites))),
        (COPY, list(map(copy_row, graph.copies))),
        (FALLBACK, list(map(fallback_row, graph.fallbacks))),
    ]
    return [(columns, rows) for columns, rows in found if rows]
