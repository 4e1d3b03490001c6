"""Compiles a graph with repeated equal blocks as several programs that run in turn: all equal blocks share one program.

XLA cannot compile a function once and call it twice in a program: it clones the function for each call. So the graph is split into segments
(`passes/aten/repeated_blocks.py`), and segments with the same structural key are traced, lowered and compiled once. To callers the parts
look like one program: tensors are converted to arrays once before the first part, arrays to tensors once after the last part, and the parts
pass arrays to each other.

The numbering of checks and of random keys continues from part to part. The code that a part receives says whether all earlier checks have
held, and a seed yields the same random numbers as in a single program.

This is done only on the CPU, where compilation is slow and a call of another program is cheap, and only for inference: with gradients, the
values that blocks save for the backward pass cost more in parts.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import jax
import numpy as np
import torch
from jax import lax
from torch.fx import Node

from ..buffers.native import key_of
from ..buffers.protocol import Buffers
from ..lowering import Check, Interpreter, SymbolValues, dtypes
from ..lowering.function import Function
from ..passes.aten.repeated_blocks import Segment, split_into_segments
from ..runtime import transfer
from ..runtime.layout import Layout
from ..runtime.programs import XlaProgram
from .compile import compile_lowered, lower, trace_graph
from .facts import Facts, Returned
from .stored import recalled, record, record_key
from .unit import CompilationUnit, Specialised

Arrays = Sequence[jax.Array]


def in_parts(unit: CompilationUnit, specialised: Specialised) -> tuple[XlaProgram, Buffers, Facts] | None:
    """Compiles a graph with concrete sizes as programs that run in turn.

    Returns: the parts as one program, the graph's buffers, and its facts. None if the graph cannot be split in this way (on another
    platform, or with results that are inputs or aliases), or has no repeated blocks that are large enough.
    """
    buffers, symbols, given = specialised.buffers, specialised.symbols, specialised.numbers
    plain = buffers.plain() if unit.platform == "cpu" and unit.has_blocks else None
    if plain is None:
        return None
    needed = unit.interpreter.needed(buffers.nodes)
    nodes = [node for node in unit.interpreter.module.graph.nodes if node in needed and node.op == "call_function"]
    positions = {node: position for position, node in enumerate(unit.interpreter.placeholders)}

    def layout(node: Node) -> Hashable:
        """Returns the layout with which an operand enters a part; for a number that is an input, its type and value."""
        position = positions.get(node)
        if not _is_tensor(node):
            return None if position is None else (type(given[position]), repr(given[position]))
        return _layout(node, symbols) if position is None else plain.arguments.get(position)

    # No part can return a graph input.
    if not set(buffers.nodes) <= set(nodes) or (cut := split_into_segments(nodes, symbols, layout)) is None:
        return None
    parts = _Parts(unit, specialised, cut, {node: given.get(position) for node, position in positions.items()})
    has_seed = len(plain.buffers.avals()) > len(plain.arguments)
    inputs = {unit.interpreter.placeholders[position]: layout for position, layout in plain.arguments.items()}
    compiled, facts = parts.compiled(inputs, has_seed)
    return compiled, plain.buffers, Facts(facts.checks, unit.numbers(buffers, symbols, given), facts.kernels)


@dataclass(frozen=True)
class _CompiledSegment:
    """The compiled program of all segments with one structural key.

    Attributes:
        program: The program.
        facts: The facts of its trace.
        outputs: The positions, in a segment, of the nodes whose values the program returns.
        read: The positions, among a segment's inputs, of the operands that the program takes.
        takes_seed: True if the program takes the seed of random numbers.
    """

    program: XlaProgram
    facts: Facts
    outputs: Sequence[int]
    read: Sequence[int]
    takes_seed: bool


@dataclass(frozen=True)
class _Turn:
    """A part's turn in a call.

    Attributes:
        run: Calls the part's program.
        take: Selects the part's arguments from the list of all arrays so far.
        dead: The places in that list of arrays that no later part reads.
    """

    run: Callable[[Arrays], Arrays]
    take: Callable[[Arrays], Arrays]
    dead: Sequence[int]


class _Parts:
    """Compiles the programs for the segments of a graph.

    Args:
        unit: The graph.
        specialised: The graph with concrete sizes.
        cut: The segments of the graph.
        values: The values of the graph's inputs; None for tensors.
    """

    def __init__(self, unit: CompilationUnit, specialised: Specialised, cut: Sequence[Segment], values: dict[Node, Any]) -> None:
        self._unit, self._symbols, self._settings, self._cut = unit, specialised.symbols, specialised.settings, cut
        self._results, self._values = specialised.buffers.nodes, values
        results, read = set(self._results), {source for segment in cut for source in segment.inputs}
        self._wanted: dict[Hashable, set[int]] = {}
        for index, segment in enumerate(cut):
            given = {place for place, node in enumerate(segment.nodes) if _is_tensor(node) and (node in read or node in results)}
            self._wanted.setdefault(self._kind(index), set()).update(given)

    def _kind(self, index: int) -> Hashable:
        key = self._cut[index].structural_key
        return index if key is None else key

    def compiled(self, inputs: dict[Node, Layout], has_seed: bool) -> tuple[XlaProgram, Facts]:
        """Compiles all parts.

        Args:
            inputs: The layouts of the graph's inputs, in the order of the program's arguments.
            has_seed: Whether a seed precedes these arguments.

        Returns: the parts as one program, and its facts.
        """
        seed = 1 if has_seed else 0
        first = {node: place + seed for place, node in enumerate(inputs)}
        count = len(first) + seed
        device = self._unit.jax_device
        # After the arguments: the code of no failed check and, for each part, the number of checks and of random draws before it.
        constants = [transfer.import_tensor(torch.zeros((), dtype=torch.int32), device)]
        code, made = count, count + 1 + len(self._cut)
        places = dict(first)
        parts: dict[Hashable, _CompiledSegment] = {}
        facts = Facts()
        taken: list[tuple[_CompiledSegment, list[int]]] = []
        for index, segment in enumerate(self._cut):
            kind = self._kind(index)
            if kind not in parts:
                parts[kind] = self._part(segment, sorted(self._wanted[kind]), inputs)
            part = parts[kind]
            before = torch.tensor([len(facts.checks), facts.draws], dtype=torch.int32)
            constants.append(transfer.import_tensor(before, device))
            operands = [places[segment.inputs[place]] for place in part.read]
            taken.append((part, [count + 1 + index, code, *([0] if part.takes_seed else []), *operands]))
            for place in part.outputs:
                places[segment.nodes[place]] = made
                made += 1
            if part.facts.checks:
                code, made = made, made + 1
            facts = Facts((*facts.checks, *part.facts.checks), (), (*facts.kernels, *part.facts.kernels), facts.draws + part.facts.draws)
        results = [places[node] for node in self._results] + ([code] if facts.checks else [])
        call = _in_turn(constants, _turns(taken, results, count + len(constants)), results)
        programs = [part.program for part in parts.values()]
        return XlaProgram(
            call,
            lambda: "\n".join(program.text() for program in programs),
            any(program.is_large for program in programs),
            any(program.calls_back for program in programs),
        ), facts

    def _part(self, segment: Segment, outputs: Sequence[int], inputs: dict[Node, Layout]) -> _CompiledSegment:
        unit, symbols = self._unit, self._symbols
        module = segment.subgraph([segment.nodes[place] for place in outputs])
        whole = unit.interpreter
        interpreter = Interpreter(module, unit.platform, kernels=whole.kernels, is_lowered=whole.is_lowered)
        specs = {place: symbols.spec(source.meta["val"]) for place, source in enumerate(segment.inputs) if _is_tensor(source)}
        numbers = {place: self._number(source) for place, source in enumerate(segment.inputs) if place not in specs}
        function = Function(
            interpreter, symbols, numbers, settings=self._settings, choose=unit.choose,
            reorders=unit.platform == "cpu" and interpreter.reorders(specs.values()),
        )  # fmt: skip
        # As in NativeBuffers, graph inputs without elements are not passed but created inside the unit.
        layouts = {
            place: inputs.get(source) or _layout(source, symbols)
            for place, source in enumerate(segment.inputs)
            if place in specs and (source in inputs or source not in self._values)
        }
        packed = [_layout(segment.nodes[place], symbols) for place in outputs]
        draws = function.draws_random

        def run(before: jax.Array, code: jax.Array, *arrays: jax.Array) -> Returned:
            key, arrays = (key_of(arrays[0]), arrays[1:]) if draws else (None, arrays)
            given = {place: layout.unpack(array) for (place, layout), array in zip(layouts.items(), arrays, strict=True)}
            operands = [given[place] if place in given else lax.full(spec.shape, 0, spec.jax_dtype) for place, spec in specs.items()]
            results = function(operands, key, lax.convert_element_type(before[1], np.uint32) if draws else 0)
            found = [layout.pack(value) for layout, value in zip(packed, results.outputs, strict=True)]
            if results.checks:
                held = lax.eq(code, before[0])
                found.append(lax.select(held, before[0] + Check.first_failed(results.checks), code))
            checks = tuple((check.error, check.message) for check in results.checks)
            return Returned(found, Facts(checks, (), results.kernels, results.draws))

        avals = [jax.ShapeDtypeStruct((2,), np.int32), jax.ShapeDtypeStruct((), np.int32)]
        avals += [jax.ShapeDtypeStruct((2,), np.int32)] if draws else []
        avals += [jax.ShapeDtypeStruct(layout.packed_shape, dtypes.to_jax(specs[place].dtype)) for place, layout in layouts.items()]
        key = record_key(unit, module, self._settings, function, avals, ("part", list(layouts.items()), packed))
        if (found := recalled(unit, key)) is not None:
            compiled, stored = found
            interpreter.count_lowered(interpreter.output_node.args[0])
            facts = Facts(tuple(stored.checks), (), (), stored.draws)
        else:
            traced, orders = trace_graph(unit, run, unit.name, avals, interpreter, function.reorders)
            lowered, facts = lower(unit, traced), traced.out_info.facts
            compiled = compile_lowered(unit, lowered, traced, self._settings, module)
            record(unit, key, lowered, compiled, traced, self._settings, facts, orders)
        return _CompiledSegment(compiled, facts, outputs, list(layouts), draws)

    def _number(self, node: Node) -> Any:
        return self._values[node] if node in self._values else self._symbols.concrete(node.meta["val"])


def _turns(taken: Sequence[tuple[_CompiledSegment, list[int]]], results: Sequence[int], first: int) -> list[_Turn]:
    """Returns the parts' turns.

    Args:
        taken: The parts in order, with the places of their arguments.
        results: The places of the whole graph's results.
        first: The place of the first array that a part returns.
    """
    last = {place: index for index, (_, places) in enumerate(taken) for place in places}
    turns = []
    made = first
    for index, (part, places) in enumerate(taken):
        made += len(part.outputs) + bool(part.facts.checks)
        dead = [place for place, turn in last.items() if turn == index and place >= first and place not in results]
        turns.append(_Turn(part.program.call, itemgetter(*places), dead))
    return turns


def _in_turn(constants: Arrays, turns: Sequence[_Turn], results: Sequence[int]) -> Callable[[Arrays], Arrays]:
    """Returns a function that calls the parts in turn and returns the arrays at the places `results`."""

    def call(arrays: Arrays) -> Arrays:
        values: list[Any] = [*arrays, *constants]
        for turn in turns:
            values += turn.run(turn.take(values))
            for place in turn.dead:
                values[place] = None
        return [values[place] for place in results]

    return call


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _layout(node: Node, symbols: SymbolValues) -> Layout:
    """Returns the layout in which parts pass a value: eager mode's strides if these are dense, else row-major."""
    spec = symbols.spec(node.meta["val"])
    layout = Layout.of(spec.shape, spec.stride)
    return layout if layout.dense else Layout.ordered(spec.shape, tuple(range(len(spec.shape))))
