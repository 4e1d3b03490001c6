"""Graphs of global tensors that XLA's SPMD partitioner splits among processes (`options={"distributed": "spmd"}`).

Every process traces and lowers the same program. The processes compare their programs before XLA compiles them. Each process runs its own
partition, on its own shards. XLA chooses the shardings of the values that a forward program saves for its backward program.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import torch
from jax.sharding import NamedSharding, PartitionSpec
from torch.fx import Node

from .. import forks
from ..capture.graph import AtenGraph
from ..config import Options
from ..lowering import Check, Interpreter, Settings, SymbolValues, registry
from ..lowering.function import Function
from ..lowering.graphs import user_line
from ..lowering.ops.process_values import partition_spec
from ..observe import dump, metrics
from ..passes import pipeline
from ..runtime import late_checks, private, process_networks, programs, transfer
from ..runtime.collective_agreement import Collective
from ..runtime.process_meshes import ProcessMesh
from ..runtime.replica_groups import all_groups_in
from .build import building_events
from .executable import Executable, compilation_error, execution_error, is_exhausted
from .options import options_for
from .trace_outputs import TracedOutputs, TraceMetadata

# The sharding of a tensor: for each of its dimensions, the mesh axes along which the dimension is sharded, separated by commas; "" for
# none.
Spec = Sequence[str]


class PartitionedProgram:
    """A graph's runner (see `protocol.Runner`) whose arguments and results are this process's shards.

    Args:
        graph: The graph of global tensors.
        interpreter: The graph's interpreter. It must have been made with `kernels=False`: torch's kernels cannot run on global tensors.
        options: The options of the compilation.
        mesh: The mesh of processes.
        input_specs: The shardings of inputs, by position.
        output_specs: The shardings of outputs, by position. XLA chooses the shardings of the other outputs.
        saved_specs: The shardings of values that a forward graph saves, by node name. The runner of the forward graph fills this dict. The
            runner of the backward graph reads it for inputs that are not in `input_specs`.
    """

    def __init__(
        self,
        graph: AtenGraph,
        interpreter: Interpreter,
        options: Options,
        mesh: ProcessMesh,
        input_specs: Mapping[int, Spec],
        output_specs: Mapping[int, Spec],
        saved_specs: dict[str, PartitionSpec],
    ) -> None:
        self._boxed_call = True
        self.name = graph.name
        self._interpreter, self._options, self._mesh = interpreter, options, mesh
        self._input_specs, self._output_specs, self._saved_specs = input_specs, output_specs, saved_specs
        self._outputs = list(interpreter.output_node.args[0])
        # The indices of the outputs that the program computes. An output that is an input is returned as the caller's own tensor.
        self._computed = [index for index, node in enumerate(self._outputs) if isinstance(node, Node) and node.op != "placeholder"]
        self._positions = {node: position for position, node in enumerate(interpreter.placeholders)}
        self._lock = forks.lock()
        self._executable: Executable | None = None
        # Identifies the process group for which the executable was compiled (see `process_networks.group_numbers`).
        self._group_numbers: tuple[int, ...] = ()
        forks.call_after_fork(self)
        metrics.add("graphs")
        metrics.add("partitioned")

    def __call__(self, args: list[Any]) -> list[Any]:
        """Runs this process's partition of the program.

        Raises: CollectiveMismatch if the processes' programs differ; CollectiveFailed; ExecutionError; the errors of the graph's checks.
        """
        if forks.has_lost_xla():
            raise forks.fork_error()
        with self._lock:
            numbers = process_networks.group_numbers([self._mesh.group])
            if self._executable is None or self._group_numbers != numbers:
                with programs.without_outer_frames():
                    self._executable, self._group_numbers = self._build_with_events(), numbers
            executable = self._executable
        return executable(executable.take(args))

    def after_fork(self) -> None:
        """In a forked child: drops the parent's program without calling or freeing it."""
        if self._executable is not None:
            forks.leak(self._executable)
            self._executable = None

    def _build_with_events(self) -> Executable:
        """Builds the executable. Emits `CompileStarted` before, and `CompileEnded` after."""
        with building_events(self.name, self._interpreter, SymbolValues()) as built:
            executable = self._build()
            built.append(executable)
        return executable

    def _sharding(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self._mesh.replicated.mesh, spec)

    def _build(self) -> Executable:
        interpreter, symbols, settings = self._interpreter, SymbolValues(), Settings.current("cpu")
        nodes = [self._outputs[index] for index in self._computed]
        function = Function(interpreter, symbols, {}, nodes, settings=settings, replicated=self._mesh.replicated)
        specs = {
            position: partition_spec(self._input_specs[position]) if position in self._input_specs else self._saved_specs[node.name]
            for position, node in enumerate(interpreter.placeholders)
        }
        avals = [
            jax.ShapeDtypeStruct(tensor_spec.shape, tensor_spec.jax_dtype, sharding=self._sharding(specs[position]))
            for position, tensor_spec in function.specs.items()
        ]
        # A forward graph may save an input itself for the backward graph.
        for position, node in enumerate(interpreter.placeholders):
            self._saved_specs.setdefault(node.name, specs[position])

        def program(*arrays: jax.Array) -> TracedOutputs:
            results = function(list(arrays))
            code = [Check.first_failed(results.checks)] if results.checks else []
            checks = tuple((check.error, check.message) for check in results.checks)
            return TracedOutputs([*results.outputs, *code], TraceMetadata(checks, results.numbers, results.kernels))

        program.__name__ = "partitioned"  # graph names have running numbers, but the program must be the same on all processes
        registry.fill()
        with metrics.timed("trace", self.name), jax.enable_x64(True):
            traced = jax.jit(pipeline.PARTITIONABLE(program), keep_unused=True).trace(*avals)
        checks = traced.out_info.metadata.checks
        requested = [partition_spec(self._output_specs[index]) if index in self._output_specs else None for index in self._computed]
        requested += [PartitionSpec()] if checks else []
        result_specs, compiled, device, collectives = self._compile(traced, avals, settings, requested)
        for index, spec in zip(self._computed, result_specs, strict=False):
            self._saved_specs[self._outputs[index].name] = spec
        binding = _Binding(self._outputs, self._computed, self._positions, device)
        return Executable(self.name, compiled, binding, checks, collectives=collectives)

    def _compile(self, traced: Any, avals: Any, settings: Settings, requested: Sequence[PartitionSpec | None]) -> Any:
        """Lowers and compiles the program.

        Args:
            traced: The traced program.
            avals: The shapes and dtypes that it was traced with.
            settings: torch's settings of precision and determinism.
            requested: The shardings of the results; None for a result whose sharding XLA chooses.

        Returns: the shardings of the results, the program, its device, and a function that returns the context for one run of the program
            (`ProgramCollectives.running`).
        Raises: CollectiveMismatch; CollectiveFailed; CompilationError.
        """
        shardings = [None if spec is None else self._sharding(spec) for spec in requested]
        traced = pipeline.SHARDED(traced, "partitioned", avals, shardings)
        with metrics.timed("lower", self.name), jax.enable_x64(True):
            lowered = private.lower(traced)
        participants = process_networks.Participants.of([self._mesh.group])
        participants.collectives.add(self._as_collective(lowered))
        options = {**options_for("cpu", traced.jaxpr, settings, True), **self._options.xla}
        network, compiled = self._compile_for(participants, lowered, options)
        dump.record(self.name, self._interpreter.module, lowered, compiled.text, self._options.dump_directory)
        chosen = compiled.result_shardings()
        specs = [spec if spec is not None else sharding.spec for spec, (_, sharding) in zip(requested, chosen, strict=True)]
        shapes = [info.shape for info in jax.tree.leaves(traced.out_info)]
        is_uneven = [not _divides_evenly(self._sharding(spec), shape) for spec, shape in zip(specs, shapes, strict=True)]
        if any(is_uneven):  # the partitioner pads uneven shards, and the next program would read the padding as data
            replicated = [PartitionSpec() if uneven else spec for uneven, spec in zip(is_uneven, specs, strict=True)]
            return self._compile(traced, avals, settings, replicated)
        return specs, compiled, network.device, functools.partial(participants.collectives.running, network.shut_down)

    def _compile_for(
        self, participants: process_networks.Participants, lowered: jax.stages.Lowered, options: Mapping[str, Any]
    ) -> tuple[process_networks.Network, programs.XlaProgram]:
        """Compiles the program for these processes.

        XLA's partitioner may use collectives over any subset of the processes. A compiled program shows which subsets these are. If the
        network lacks connections for some of them, the program is compiled again for a network that has these connections.

        Returns: the network, with connections for all of the program's collectives, and the program.
        """
        while True:
            network = participants.connected()
            with metrics.timed("compile", self.name):
                try:
                    mesh, keep = self._mesh.replicated.mesh, self._options.heap == "keep"
                    compiled = programs.compile_parts(lowered, network.device, network.devices, options, mesh, keep)
                except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
                    raise (execution_error if is_exhausted(error) else compilation_error)(self.name, error) from error
            needed = {group for group in all_groups_in(compiled.text()) if 1 < len(group) < self._mesh.size}
            if needed <= network.extra_cliques:
                return network, compiled
            participants.extra_cliques |= needed

    def _as_collective(self, lowered: jax.stages.Lowered) -> Collective:
        """Returns the whole program as one `Collective`, so that the processes compare their programs as they compare collectives."""
        specs = [SymbolValues().spec(node.meta["val"]) for node in self._interpreter.placeholders]
        first_line = next((line for node in self._interpreter.module.graph.nodes if (line := user_line(node))), "")
        settings = (programs.fingerprint(lowered).hex()[:16],)
        return Collective(self._mesh.group, "partitioned_program", settings, tuple(map(str, specs)), where=first_line, caller="by XLA")


class _Binding:
    """See `buffers.protocol.Binding`. Tensors are this process's shards. Arrays alias contiguous tensors. Other tensors are copied."""

    donates_inputs = False

    def __init__(self, outputs: Sequence[Any], computed: Sequence[int], positions: Mapping[Any, int], device: jax.Device) -> None:
        """Prepares the binding.

        Args:
            outputs: The graph's outputs.
            computed: The indices of the outputs that the program computes.
            positions: The positions of the graph's inputs, by placeholder.
            device: The device of the arrays.
        """
        self._computed, self._count, self._device = list(computed), len(outputs), device
        self._returned_inputs = {index: positions[node] for index, node in enumerate(outputs) if node in positions}
        self.positions = list(range(len(positions)))

    def take(self, args: list[Any]) -> list[torch.Tensor]:
        tensors = args.copy()
        args.clear()
        return tensors

    def arrays(self, tensors: Sequence[torch.Tensor]) -> Sequence[jax.Array]:
        return [transfer.import_tensor(tensor.detach().contiguous(), self._device) for tensor in tensors]

    def export(self, results: Sequence[jax.Array], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [transfer.export_array(result) for result in results]

    def abandon(self, out_of_memory: bool, tensors: Sequence[torch.Tensor]) -> bool:
        return False

    def outputs(self, results: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> list[Any]:
        outputs: list[Any] = [None] * self._count
        for index, result in zip(self._computed, results, strict=True):
            outputs[index] = result
        for index, position in self._returned_inputs.items():
            outputs[index] = tensors[position]
        return outputs

    def report(self, code: torch.Tensor, checks: late_checks.Checks, name: str) -> None:
        if (failed := late_checks.failure(int(code), checks)) is not None:
            raise failed


def _divides_evenly(sharding: NamedSharding, shape: Sequence[int]) -> bool:
    """True if all shards of an array of this shape are equal in size."""
    sizes = sharding.mesh.shape
    for size, axes in zip(shape, sharding.spec, strict=False):
        for axis in (axes,) if isinstance(axes, str) else axes or ():
            if size % sizes[axis]:
                return False
            size //= sizes[axis]
    return True
