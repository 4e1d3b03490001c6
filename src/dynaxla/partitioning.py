"""Compiles a graph with DTensors under `options={"distributed": "spmd"}`.

AOTAutograd traces the graph with global tensors in place of DTensors (global_view.py), and XLA's partitioner splits the resulting programs.
The inputs and outputs of a program are the local shards of this process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._functorch.config
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.schemas import OutputType
from torch._guards import TracingContext
from torch.fx import GraphModule

from .capture.decompositions import decompositions
from .capture.graph import AtenGraph, Phase
from .config import Options
from .engine.partitioned import PartitionedProgram
from .errors import CaptureError, UnsupportedOp
from .lowering import Interpreter, registry
from .observe import dump, events, metrics
from .passes.aten.global_view import BoundaryTensor, GlobalView, NotPartitioned, has_distributed
from .passes.joint.partition import partition
from .runtime import capture_lock

if torch.distributed.is_available():
    from torch.distributed.tensor import DTensor, Replicate

__all__ = ["NotPartitioned", "compile_partitioned", "has_distributed", "report_not_partitioned"]


def compile_partitioned(captured: GraphModule, example_inputs: Sequence[Any], options: Options, number: int) -> Callable[..., Any]:
    """Compiles TorchDynamo's graph with DTensors to programs whose collectives XLA's partitioner chooses.

    Args:
        captured: the graph.
        example_inputs: the graph's inputs.
        options: the options.
        number: the number of the graph, which becomes part of its name.

    Raises: NotPartitioned for a graph that must be compiled as with distributed="xla".
    """
    view = GlobalView(captured, example_inputs)
    input_boundaries = list(view.inputs.values())
    saved_specs: dict[str, Any] = {}
    registry.fill()

    def compiler(phase: Phase) -> Callable[[GraphModule, Sequence[Any]], Any]:
        def compile_graph(module: GraphModule, _: Sequence[Any]) -> PartitionedProgram:
            interpreter = _interpreter(module)
            outputs = [boundary for boundary in view.outputs if boundary is not None]
            if phase != "backward":
                _check_wrapper(TracingContext.get().fw_metadata, len(input_boundaries), len(interpreter.placeholders))
            inputs, results = range(len(interpreter.placeholders)), range(len(interpreter.output_node.args[0]))
            if phase == "backward":  # a backward graph takes saved tensors, then tangents of outputs, and returns the inputs' gradients
                saved_count = len(inputs) - sum(_is_tangent(node) for node in interpreter.placeholders)
                tangents = [outputs[_output_of(node)] for node in interpreter.placeholders[saved_count:]]
                input_specs = {saved_count + index: boundary.spec for index, boundary in enumerate(tangents)}
                output_specs = {index: input_boundaries[index].spec for index in results if index < len(input_boundaries)}
            else:
                input_specs = {index: input_boundaries[index].spec for index in inputs}
                output_specs = {index: outputs[index].spec for index in results if index < len(outputs)}
            graph = AtenGraph(f"dynaxla_{number}_{phase}", module, (), phase)
            if events.has_listeners():
                events.emit(events.GraphFunctionalized.of(number, graph))
            return PartitionedProgram(graph, interpreter, options, view.mesh, input_specs, output_specs, saved_specs)

        return compile_graph

    def partition_joint(joint: GraphModule, inputs: Any, **settings: Any) -> tuple[GraphModule, GraphModule]:
        _interpreter(joint)
        return partition(joint, inputs, platform="cpu", **settings)

    # Otherwise AOTAutograd would expect tangents with the sizes of the global tensors that it traced, and tangents are local shards.
    with capture_lock.capturing(), torch._functorch.config.patch(guess_tangent_strides_as_outputs=False):
        compiled = aot_autograd(
            fw_compiler=compiler("forward"), bw_compiler=compiler("backward"), inference_compiler=compiler("inference"),
            partition_fn=partition_joint, decompositions=decompositions("cpu"),
        )(view.module, view.examples)  # fmt: skip
    return _LocalShards(view, compiled)


_logged_reasons: set[str] = set()


def report_not_partitioned(name: str, reason: NotPartitioned, options: Options) -> None:
    """Records that a graph is compiled as with distributed="xla": counts the graph, emits a `StepFellBack` event, logs each reason once.

    Raises: CaptureError if options.fallback is "error".
    """
    if options.fallback == "error":
        raise CaptureError(
            f"XLA does not partition {name}: {reason.message}",
            where=reason.where,
            hint=reason.hint or "leave out fallback='error', or use options={'distributed': 'torch'}",
        )
    metrics.add("not_partitioned")
    if events.has_listeners():
        events.emit(events.StepFellBack(name, "as with distributed='xla'", reason.message))
    if reason.message not in _logged_reasons:
        _logged_reasons.add(reason.message)
        location = f" (first at {reason.where})" if reason.where else ""
        hint = f"; {reason.hint}" if reason.hint else ""
        dump.log.warning("XLA does not partition %s, which runs as with distributed='xla': %s%s%s", name, reason.message, location, hint)


def _interpreter(module: GraphModule) -> Interpreter:
    """Returns the interpreter of a graph for the CPU, without torch's kernels.

    Raises: NotPartitioned for a graph with an op without a lowering, or with random numbers.
    """
    try:
        interpreter = Interpreter(module, "cpu", kernels=False)
    except UnsupportedOp as error:
        raise NotPartitioned(error.message, where=error.where) from error
    if interpreter.draws_random:
        raise NotPartitioned("it draws random numbers")
    return interpreter


def _check_wrapper(metadata: Any, input_count: int, placeholder_count: int) -> None:
    """Raises NotPartitioned for a graph whose AOTAutograd wrapper does more than call the program.

    Args:
        metadata: AOTAutograd's `ViewAndMutationMeta`.
        input_count: the number of inputs of the graph of global tensors.
        placeholder_count: the number of placeholders of the ATen graph.
    """
    if any(info.mutates_data or info.mutates_metadata for info in metadata.input_info):
        raise NotPartitioned("it writes to an input")
    aliases = [number for number, info in enumerate(metadata.output_info) if info.output_type is not OutputType.non_alias]
    if aliases or metadata.num_intermediate_bases:
        output = f"output {aliases[0]}" if aliases else "an output"
        raise NotPartitioned(f"{output} shares memory with an input or another output", hint="return output.clone() instead")
    if metadata.tokens or metadata.is_rng_op_functionalized or input_count != placeholder_count:
        raise NotPartitioned("it has other effects than its results")


def _is_tangent(node: torch.fx.Node) -> bool:
    return node.meta.get("desc") is not None and hasattr(node.meta["desc"], "output")


def _output_of(node: torch.fx.Node) -> int:
    return int(node.meta["desc"].output.idx)


class _LocalShards:
    """The function that TorchDynamo calls: converts DTensors to local shards, runs the programs, and converts the results to DTensors."""

    def __init__(self, view: GlobalView, compiled: Callable[..., Any]) -> None:
        self._inputs = list(view.inputs.items())
        self._compiled = getattr(compiled, "_torchdynamo_orig_callable", compiled)
        self._mesh = view.mesh
        self._outputs, self._constants = tuple(view.outputs), tuple(view.constants)

    def __call__(self, *args: Any) -> list[Any]:
        shards = [args[position].unsqueeze(0) if boundary.is_local else args[position].to_local() for position, boundary in self._inputs]
        results = iter(self._compiled(*shards))
        return [
            constant if boundary is None else self._to_output(next(results), boundary)
            for boundary, constant in zip(self._outputs, self._constants, strict=True)
        ]

    def _to_output(self, shard: torch.Tensor, boundary: BoundaryTensor) -> torch.Tensor:
        if boundary.placements is not None:
            return _ToDTensor.apply(shard, self._mesh.mesh, boundary.placements)
        return shard.squeeze(0) if boundary.is_local else shard


class _ToDTensor(torch.autograd.Function):
    """Wraps this process's local shard of a global tensor as a DTensor.

    For the placement Partial("sum") along a mesh axis, the first process keeps the full value and the other processes get zeros, so that
    the sum is exact in any dtype.
    """

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, mesh: Any, placements: tuple[Any, ...]) -> Any:
        ctx.mesh = mesh
        ctx.placements = tuple(Replicate() if placement.is_partial() else placement for placement in placements)
        for index, placement in enumerate(placements):
            if placement.is_partial() and placement.reduce_op == "sum" and mesh.get_local_rank(index):
                shard = torch.zeros_like(shard)
        return DTensor.from_local(shard.view_as(shard), mesh, placements, run_check=False)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad.redistribute(ctx.mesh, ctx.placements).to_local().contiguous(), None, None
