"""Compiles a graph with repeated equal blocks as several programs that run in turn: all equal blocks share one program.

XLA cannot compile a function once and call it twice in a program: it clones the function for each call. So the graph is split into segments
(`passes/aten/repeated_blocks.py`), and segments with the same structural key (such as the layers of a transformer) are traced, lowered and
compiled once. To callers the segments look like one program. Tensors are converted to arrays before the first segment, arrays to tensors
after the last one, and the segments pass arrays to each other.

Checks and random keys are numbered through all segments. Each segment gets the check code of the earlier segments, and returns the check
code so far. A seed yields the same random numbers as in a single program.

This is done only on the CPU, where compilation is slow and a call of another program is cheap. It is done only for inference, because with
gradients the values that blocks save for the backward pass cost more if the graph is split.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch
from jax import lax
from torch.fx import Node

from ..buffers.native import random_key
from ..buffers.protocol import Buffers
from ..lowering import Check, Interpreter, SymbolValues, dtypes
from ..lowering.function import Function
from ..lowering.graphs import is_tensor
from ..passes.aten.repeated_blocks import Segment, split_into_segments
from ..runtime import transfer
from ..runtime.layout import Layout
from ..runtime.programs import XlaProgram
from .compile import compile_lowered, lower, trace_graph
from .schedule import FixedValue, Step, StepKind, in_order
from .stored import load_recorded, record, record_key
from .trace_outputs import TracedOutputs, TraceMetadata
from .unit import CompilationUnit, SpecialisedGraph


def compile_blocks(unit: CompilationUnit, specialised: SpecialisedGraph) -> tuple[XlaProgram, Buffers, TraceMetadata] | None:
    """Compiles a graph with concrete sizes as segments that run in turn.

    Returns: the segments as one program, the graph's buffers, and its metadata. None if the graph cannot be split (on another platform than
    the CPU, or if a result is not the packed value of one op), or if it has no repeated blocks that are large enough.
    """
    buffers, symbols, numbers = specialised.buffers, specialised.symbols, specialised.numbers
    segment_buffers = buffers.for_segments() if unit.platform == "cpu" and unit.has_blocks else None
    if segment_buffers is None:
        return None
    needed = unit.interpreter.needed(buffers.nodes)
    nodes = [node for node in unit.interpreter.module.graph.nodes if node in needed and node.op == "call_function"]
    positions = {node: position for position, node in enumerate(unit.interpreter.placeholders)}

    def layout(node: Node) -> Hashable:
        """Returns the layout in which an operand enters a segment. For an input of the graph that is a number: its type and value."""
        position = positions.get(node)
        if not is_tensor(node):
            return None if position is None else (type(numbers[position]), repr(numbers[position]))
        return _layout(node, symbols) if position is None else segment_buffers.arguments.get(position)

    # No segment can return a graph input.
    if not set(buffers.nodes) <= set(nodes) or (segments := split_into_segments(nodes, symbols, layout)) is None:
        return None
    compiler = _SegmentCompiler(unit, specialised, segments, {node: numbers.get(position) for node, position in positions.items()})
    has_seed = len(segment_buffers.buffers.avals()) > len(segment_buffers.arguments)
    inputs = {unit.interpreter.placeholders[position]: layout for position, layout in segment_buffers.arguments.items()}
    compiled, metadata = compiler.compile(inputs, has_seed)
    return compiled, segment_buffers.buffers, TraceMetadata(metadata.checks, unit.numbers(buffers, symbols, numbers), metadata.kernels)


@dataclass(frozen=True)
class _CompiledSegment:
    """The compiled program of all segments with one structural key.

    Attributes:
        program: The program.
        metadata: The metadata of its trace.
        outputs: The positions in `Segment.nodes` of the nodes whose values the program returns.
        read: The positions in `Segment.inputs` of the operands that the program takes.
        takes_seed: True if the program takes the seed of random numbers.
    """

    program: XlaProgram
    metadata: TraceMetadata
    outputs: Sequence[int]
    read: Sequence[int]
    takes_seed: bool


class _SegmentCompiler:
    """Compiles the programs of a graph's segments.

    Args:
        unit: The graph.
        specialised: The graph with concrete sizes.
        segments: The segments of the graph.
        values: The values of the graph's inputs that are numbers, by placeholder; None for tensors.
    """

    def __init__(self, unit: CompilationUnit, specialised: SpecialisedGraph, segments: Sequence[Segment], values: dict[Node, Any]) -> None:
        self._unit, self._symbols, self._settings, self._segments = unit, specialised.symbols, specialised.settings, segments
        self._results, self._values = specialised.buffers.nodes, values
        results, read = set(self._results), {source for segment in segments for source in segment.inputs}
        # By program key, the positions in `Segment.nodes` of the nodes whose values the program must return.
        self._outputs: dict[Hashable, set[int]] = {}
        for index, segment in enumerate(segments):
            outputs = {position for position, node in enumerate(segment.nodes) if is_tensor(node) and (node in read or node in results)}
            self._outputs.setdefault(self._program_key(index), set()).update(outputs)

    def _program_key(self, index: int) -> Hashable:
        """Returns the key of a segment's program. Segments with equal keys share a program."""
        key = self._segments[index].structural_key
        return index if key is None else key

    def compile(self, inputs: dict[Node, Layout], has_seed: bool) -> tuple[XlaProgram, TraceMetadata]:
        """Compiles all segments.

        Args:
            inputs: The layouts of the graph's inputs, in the order of the arguments of the whole program.
            has_seed: True if a seed precedes these arguments.

        Returns: the segments as one program, and its metadata.
        """
        device = self._unit.jax_device
        arguments: list[Hashable] = [*(["seed"] if has_seed else []), *inputs]
        # The name of the latest check code. No check precedes the first segment.
        code: Hashable = FixedValue(transfer.import_tensor(torch.zeros((), dtype=torch.int32), device))
        programs: dict[Hashable, _CompiledSegment] = {}
        metadata = TraceMetadata()
        steps = []
        for number, segment in enumerate(self._segments):
            key = self._program_key(number)
            if key not in programs:
                programs[key] = self._compile_segment(segment, sorted(self._outputs[key]), inputs)
            compiled = programs[key]
            earlier_counts = FixedValue(
                transfer.import_tensor(torch.tensor([len(metadata.checks), metadata.draws], dtype=torch.int32), device)
            )
            operands = [segment.inputs[position] for position in compiled.read]
            taken = [earlier_counts, code, *(["seed"] if compiled.takes_seed else []), *operands]
            returned: list[Hashable] = [segment.nodes[position] for position in compiled.outputs]
            if compiled.metadata.checks:
                code = f"check code of segment {number}"
                returned.append(code)
            steps.append(Step(StepKind.PROGRAM, compiled.program.call, taken, returned))
            metadata = TraceMetadata(
                checks=(*metadata.checks, *compiled.metadata.checks),
                kernels=(*metadata.kernels, *compiled.metadata.kernels),
                draws=metadata.draws + compiled.metadata.draws,
            )
        run = in_order(arguments, steps, [*self._results, *([code] if metadata.checks else [])])
        xla_programs = [compiled.program for compiled in programs.values()]
        return XlaProgram(
            lambda arrays: run(list(arrays)),
            lambda: "\n".join(program.text() for program in xla_programs),
            any(program.is_large for program in xla_programs),
            any(program.calls_back for program in xla_programs),
        ), metadata

    def _compile_segment(self, segment: Segment, outputs: Sequence[int], inputs: dict[Node, Layout]) -> _CompiledSegment:
        """Compiles the program of a segment.

        Args:
            segment: The segment.
            outputs: The positions in `segment.nodes` of the nodes whose values the program returns.
            inputs: The layouts of the graph's inputs.
        """
        unit, symbols = self._unit, self._symbols
        module = segment.subgraph([segment.nodes[position] for position in outputs])
        graph = unit.interpreter
        interpreter = Interpreter(module, unit.platform, kernels=graph.kernels, is_lowered=graph.is_lowered)
        specs = {position: symbols.spec(source.meta["val"]) for position, source in enumerate(segment.inputs) if is_tensor(source)}
        numbers = {position: self._number(source) for position, source in enumerate(segment.inputs) if position not in specs}
        function = Function(
            interpreter, symbols, numbers, settings=self._settings, choose=unit.choose,
            reorders=unit.platform == "cpu" and interpreter.reorders(specs.values()),
        )  # fmt: skip
        # By position in `segment.inputs`: the layouts of the program's array arguments. As in NativeBuffers, inputs of the graph without
        # elements are not arguments but created inside the program.
        layouts = {
            position: inputs.get(source) or _layout(source, symbols)
            for position, source in enumerate(segment.inputs)
            if position in specs and (source in inputs or source not in self._values)
        }
        output_layouts = [_layout(segment.nodes[position], symbols) for position in outputs]
        draws = function.draws_random

        def run(earlier_counts: jax.Array, code: jax.Array, *arrays: jax.Array) -> TracedOutputs:
            key, arrays = (random_key(arrays[0]), arrays[1:]) if draws else (None, arrays)
            unpacked = {position: layout.unpack(array) for (position, layout), array in zip(layouts.items(), arrays, strict=True)}
            operands = [
                unpacked[position] if position in unpacked else lax.full(spec.shape, 0, spec.jax_dtype) for position, spec in specs.items()
            ]
            results = function(operands, key, lax.convert_element_type(earlier_counts[1], np.uint32) if draws else 0)
            packed = [layout.pack(value) for layout, value in zip(output_layouts, results.outputs, strict=True)]
            if results.checks:
                all_held = lax.eq(code, earlier_counts[0])
                packed.append(lax.select(all_held, earlier_counts[0] + Check.first_failed(results.checks), code))
            checks = tuple((check.error, check.message) for check in results.checks)
            return TracedOutputs(packed, TraceMetadata(checks, (), results.kernels, results.draws))

        avals = [jax.ShapeDtypeStruct((2,), np.int32), jax.ShapeDtypeStruct((), np.int32)]
        avals += [jax.ShapeDtypeStruct((2,), np.int32)] if draws else []
        avals += [jax.ShapeDtypeStruct(layout.packed_shape, dtypes.to_jax(specs[position].dtype)) for position, layout in layouts.items()]
        key = record_key(unit, module, self._settings, function, avals, ("part", list(layouts.items()), output_layouts))
        if (recorded := load_recorded(unit, key)) is not None:
            compiled, stored = recorded
            interpreter.count_lowered(interpreter.output_node.args[0])
            metadata = TraceMetadata(tuple(stored.checks), (), (), stored.draws)
        else:
            traced, orders = trace_graph(unit, run, unit.name, avals, interpreter, function.reorders)
            lowered, metadata = lower(unit, traced), traced.out_info.metadata
            compiled = compile_lowered(unit, lowered, traced, self._settings, module)
            record(unit, key, lowered, compiled, traced, self._settings, metadata, orders)
        return _CompiledSegment(compiled, metadata, outputs, list(layouts), draws)

    def _number(self, node: Node) -> Any:
        """Returns the value of a node that is a number: an input of the graph, or a function of the sizes."""
        return self._values[node] if node in self._values else self._symbols.concrete(node.meta["val"])


def _layout(node: Node, symbols: SymbolValues) -> Layout:
    """Returns the layout in which segments pass a value: eager mode's strides if these are dense, else row-major."""
    spec = symbols.spec(node.meta["val"])
    layout = Layout.of(spec.shape, spec.stride)
    return layout if layout.dense else Layout.ordered(spec.shape, tuple(range(len(spec.shape))))
