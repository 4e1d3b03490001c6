"""Builds the schedule of a graph: passes extract work that no XLA program can do, or that not every call needs. The rest is compiled.

The passes, in order:

late writes   after the program has succeeded, torch's in-place ops write its results into slices of large inputs
counters      Python computes numbers that no tensor depends on, so that one program serves all values of these numbers
freeze        a separate program computes the values that depend only on parameters and buffers, and only after one of these has changed
split         between programs, torch runs ops that no XLA program can contain; each program has one device
buckets       sizes are rounded up, so that one program serves many sizes (bucket.py)
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Node

from ..capture.graph import AtenGraph, OpenLayouts, Phase, copy_graph, graph_devices, tensors_of, written_inputs
from ..config import Options
from ..errors import CaptureError, DynaxlaError, UnsupportedOp
from ..lowering.graphs import describe_inputs, user_line
from ..observe import coverage, metrics
from ..passes import pipeline
from ..passes.aten.device_transfers import COPY, has_several_devices
from ..passes.aten.freeze import Frozen
from ..passes.aten.late_writes import LateWrites
from ..passes.aten.split import GraphPart
from ..passes.aten.unsupported_nodes import ASYNCHRONOUS, last_writes, nodes_without_lowering, unsupported_nodes
from ..passes.jaxpr.open_layouts import opens_layouts
from ..runtime import devices, eager_fallback
from .bucket import Bucket
from .frozen_values import FrozenValues
from .protocol import Engine, Runner
from .retrace import Retrace
from .schedule import FixedValue, Schedule, Step, StepKind
from .xla import Xla


def engine_for(options: Options, *, retrace: bool = False, collectives: bool = True, innermost: Engine | None = None) -> Scheduler:
    """Returns the engine that the options ask for.

    Args:
        options: The options of the compilation.
        retrace: True for an engine that traces at every call (see retrace.py).
        collectives: See `Scheduler`. False for the graph of a recorded training step, which must not contain any, and which is compiled as
            one program even if it has equal blocks.
        innermost: The engine that compiles programs; by default one for these options.
    """
    engine = innermost or (Retrace(options) if retrace else Xla(options, blocks=collectives))
    return Scheduler(engine if options.sizes == "exact" else Bucket(engine, options), options, collectives=collectives)


class Scheduler:
    """An engine that builds schedules. Another engine compiles the programs.

    Args:
        compiler: The engine that compiles the programs.
        options: The options of the compilation.
        collectives: True if collectives and other asynchronous work may run between the programs.
    """

    def __init__(self, compiler: Engine, options: Options, *, collectives: bool = True) -> None:
        self._compiler, self._options, self._collectives = compiler, options, collectives

    def runner(self, graph: AtenGraph) -> Runner:
        """Returns a runner for the graph.

        Raises: UnsupportedOp for an op that no program can contain if options.fallback is "error"; CaptureError for a collective that is
            not allowed; the compiler's errors.
        """
        # If the tensors are JAX arrays, the program itself writes to them in place.
        late = None if _is_in_xla(graph) else pipeline.LATE_WRITES(graph)
        if late is None:
            return self._without_counters(graph)
        count = len(graph.module.graph.find_nodes(op="placeholder"))  # before the graph is changed
        return _with_late_writes(count, self._without_counters(late.graph), late)

    def _without_counters(self, graph: AtenGraph) -> Runner:
        """Returns a runner in which a Python step computes the numbers that no tensor depends on."""
        counters = pipeline.PYTHON_COUNTERS(graph.module)
        if counters is None:
            return self._frozen(graph) if self._options.freeze else self.split(graph)
        # Positions among the inputs of the rest.
        static = tuple(counters.rest_inputs.index(position) for position in graph.static if position in counters.rest_inputs)
        rest = dataclasses.replace(graph, module=counters.rest, static=static, rederived_outputs=frozenset())
        run = self._frozen(rest) if self._options.freeze else self.split(rest)
        indices = range(len(graph.module.graph.output_node().args[0]))
        outputs = [("output", index) for index in indices]
        counted = [outputs[index] for index in indices if index not in counters.rest_outputs]
        count = Step(StepKind.PYTHON, lambda numbers: counters.counter_graph(*numbers), counters.counter_inputs, counted)
        program = Step(StepKind.PROGRAM, run, counters.rest_inputs, [outputs[index] for index in counters.rest_outputs], counters.rest)
        return Schedule(graph.name, range(len(graph.module.graph.find_nodes(op="placeholder"))), [count, program], outputs)

    def _frozen(self, graph: AtenGraph) -> Runner:
        """Returns a runner that keeps the values which depend only on parameters and buffers (option freeze)."""
        device = devices.main_device(graph_devices(graph.module, unsupported_nodes(graph.module)))
        frozen = pipeline.FREEZE(graph.module, graph.static, copy_weights=opens_layouts(device.type))
        return self.split(graph) if frozen is None else self.frozen_schedule(graph, frozen)

    def frozen_schedule(self, graph: AtenGraph, frozen: Frozen) -> Schedule:
        """Returns the schedule of an inference graph in two parts. The first computes values from parameters and buffers alone."""
        module, prepared, rest = frozen.module, frozen.prepared, frozen.rest
        placeholders = module.graph.find_nodes(op="placeholder")
        static = {placeholders[position] for position in graph.static} | set(prepared.outputs)
        prepare = self.split(
            AtenGraph(f"{graph.name}_prepared", prepared.module, tuple(range(len(prepared.inputs))), waits_for_checks=True)
        )
        positions = tuple(position for position, node in enumerate(rest.inputs) if node in static)
        waits = bool(written_inputs(module.graph))  # AOTAutograd writes the results of the second part to inputs, outside of its program
        prepared_positions = [rest.inputs.index(node) for node in prepared.outputs]
        open_inputs = OpenLayouts(prepared_positions)
        run = self.split(AtenGraph(graph.name, rest.module, positions, waits_for_checks=waits, open_inputs=open_inputs))
        steps = [
            Step(
                StepKind.PROGRAM, FrozenValues(prepare, open_inputs, prepared_positions), prepared.inputs, prepared.outputs, prepared.module
            ),
            Step(StepKind.PROGRAM, run, rest.inputs, rest.outputs, rest.module),
        ]
        return Schedule(graph.name, placeholders, steps, _outputs(module.graph.output_node().args[0]))

    def split(self, graph: AtenGraph) -> Runner:
        """Returns the runner of a graph which may have ops that no program can contain. These ops run between programs."""
        module = graph.module
        if has_several_devices(module):
            module = copy_graph(module)
            pipeline.DETOURS(module.graph)
        drawn: set[Node] = set()
        if self._options.exact_rng:
            module, drawn = pipeline.RANDOM_HOISTING(module)
        unsupported = unsupported_nodes(module)
        if _is_in_xla(graph):
            platform = devices.platform_of(devices.main_device(graph_devices(module, unsupported)))
            unsupported = {**nodes_without_lowering(module, platform), **unsupported}
        unreported = last_writes(module, unsupported) | drawn
        arranged = pipeline.DEVICE_ORDER(module, unsupported.keys() | drawn) if has_several_devices(module) else None
        if arranged is not None:
            unsupported |= arranged.multi_device_nodes
            unreported |= {node for node, reason in unsupported.items() if reason == COPY}
        self._report(unsupported, unreported)
        graph = dataclasses.replace(graph, module=module)
        between = unsupported.keys() | drawn
        if arranged is not None:
            return self.split_schedule(graph, pipeline.SPLIT(module, between.__contains__, arranged.devices.get))
        return self.split_schedule(graph, pipeline.SPLIT(module, between.__contains__)) if between else self._compiler.runner(graph)

    def _report(self, unsupported: dict[Node, str], unreported: Collection[Node]) -> None:
        """Counts and logs the ops that no program can contain.

        Args:
            unsupported: The reason why no program can contain a node, by node.
            unreported: The nodes of `unsupported` that are neither counted nor logged.

        Raises: see `runner`.
        """
        for node, reason in unsupported.items():
            if reason == ASYNCHRONOUS and not self._collectives:
                raise _error(CaptureError, node, reason, _COLLECTIVE_HINT)
            if node in unreported:
                continue
            if self._options.fallback == "error":
                raise _error(UnsupportedOp, node, reason, _SPLIT_HINT)
            coverage.count_fallback(str(node.target), f"the graph is split around it, since {reason}", user_line(node))

    def split_schedule(self, graph: AtenGraph, parts: list[GraphPart]) -> Schedule:
        """Returns the schedule of a graph's parts, in the order in which they run."""
        placeholders = graph.module.graph.find_nodes(op="placeholder")
        static = {placeholders[position] for position in graph.static}
        between = [node.target for part in parts if not part.compiled for node in part.module.graph.nodes]
        writes = any(isinstance(op, torch._ops.OpOverload) and op._schema.is_mutable for op in between)
        # The program of a part cannot protect inputs from writes of other parts or of AOTAutograd after the call.
        waits = writes or bool(written_inputs(graph.module.graph))
        # Results of a part of a forward graph must have the graph's strides, because torch's kernels may read them. The phase "forward"
        # would leave the strides of saved tensors open.
        phase: Phase = "inference" if graph.phase == "forward" else graph.phase
        steps = []
        for number, part in enumerate(parts):
            if part.compiled:
                positions = tuple(index for index, node in enumerate(part.inputs) if node in static)
                run: Any = self._compiler.runner(AtenGraph(f"{graph.name}_part{number}", part.module, positions, phase, waits))
                steps.append(Step(StepKind.PROGRAM, run, part.inputs, part.outputs, part.module))
            else:
                steps.append(
                    Step(StepKind.KERNELS, functools.partial(eager_fallback.run, part.module), part.inputs, part.outputs, part.module)
                )
        return Schedule(graph.name, placeholders, steps, _outputs(graph.module.graph.output_node().args[0]))


def _with_late_writes(inputs: int, run: Runner, late: LateWrites) -> Schedule:
    """Returns a schedule that runs a graph without its late writes, and then the late writes.

    Args:
        inputs: The number of the graph's inputs.
        run: The runner of the graph without its late writes.
        late: The late writes, and the graph without them.
    """
    module = late.graph.module
    results = [("result", index) for index in range(len(module.graph.output_node().args[0]))]

    def check(written: list[torch.Tensor]) -> tuple[()]:
        """Raises RuntimeError, as torch does, if an inference tensor is written to outside of inference mode. Nothing is written before."""
        if not torch.is_inference_mode_enabled() and any(tensor.is_inference() for tensor in written):
            raise RuntimeError("Inplace update to inference tensor outside InferenceMode is not allowed. Clone it first.")
        return ()

    def write(values: list[Any]) -> tuple[()]:
        metrics.add("late_writes")
        with eager_fallback.kernels():
            late.writes.forward(*values)
        return ()

    steps = [
        Step(StepKind.PYTHON, check, late.written, ()),
        Step(StepKind.PROGRAM, run, late.program_inputs, results, module),
        Step(StepKind.WRITE, write, [*late.write_inputs, *results[late.output_count :]], ()),
    ]
    return Schedule(run.name, range(inputs), steps, results[: late.output_count])


def _outputs(outputs: Any) -> list[Any]:
    """Returns the outputs of a graph as names for `Schedule`."""
    return [output if isinstance(output, Node) else FixedValue(output) for output in outputs]


def _is_in_xla(graph: AtenGraph) -> bool:
    """True if the graph's tensors are JAX arrays (device "jax")."""
    return devices.is_in_xla(devices.main_device(tensor.device for node in graph.module.graph.nodes for tensor in tensors_of(node)))


_SPLIT_HINT = "options={'fallback': 'kernel'} splits the graph here; or use an op with a result of fixed size, e.g. torch.where"
_COLLECTIVE_HINT = (
    "compile only the model, with torch.compile(model, backend='dynaxla'): backward, collectives and optimizer then run as usual"
)


def _error(error_type: type[DynaxlaError], node: Node, reason: str, hint: str) -> DynaxlaError:
    message = f"{node.target} cannot be part of an XLA program: {reason}"
    return error_type(message, op=str(node.target), inputs=describe_inputs(node), where=user_line(node), hint=hint)
