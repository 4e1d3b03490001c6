"""Graphs with tensors on several devices, on a machine with one device: traced on the CPU, then marked as on other devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from dynaxla.capture.graph import AtenGraph, graph_device, is_device_agnostic
from dynaxla.config import Options
from dynaxla.engine.schedule import Schedule, StepKind
from dynaxla.engine.scheduler import Scheduler
from dynaxla.engine.xla import Xla

aten = torch.ops.aten

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@torch.library.custom_op("dynaxla_test::to_device", mutates_args=())
def to_device(x: torch.Tensor, device: str, non_blocking: bool = False) -> torch.Tensor:
    """Stands for x.to(device) in functions for `traced`."""
    return x.clone()


@to_device.register_fake
def _(x: torch.Tensor, device: str, non_blocking: bool = False) -> torch.Tensor:
    return torch.empty_like(x)


def traced(function: Callable[..., Any], *inputs: torch.Tensor, on: Sequence[torch.device], dynamic: bool = False) -> GraphModule:
    """Returns the graph of a function, with fake devices.

    Inputs are marked as on these devices, and results of `to_device` as on its device. Other results are on the device of their first
    operand, or on the CPU if they have none.
    """
    module = make_fx(function, tracing_mode="symbolic" if dynamic else "fake")(*inputs)
    module.graph.eliminate_dead_code()
    mode = next(value.fake_mode for node in module.graph.nodes if isinstance(value := node.meta.get("val"), FakeTensor))
    input_devices = iter(on)
    for node in module.graph.nodes:
        if node.op == "get_attr":
            node.meta["val"] = mode.from_tensor(getattr(module, str(node.target)), static_shapes=True)
        elif node.op == "placeholder" and isinstance(node.meta["val"], torch.Tensor):
            node.meta["val"].fake_device = next(input_devices)
        elif node.target is torch.ops.dynaxla_test.to_device.default:
            x, device, *non_blocking = node.args
            node.target, node.args, node.kwargs = aten._to_copy.default, (x,), {"device": torch.device(device)}
            if non_blocking:
                node.kwargs = {**node.kwargs, "non_blocking": non_blocking[0]}
            node.meta["val"].fake_device = torch.device(device)
        elif node.op == "call_function":
            operands = [tensor for source in node.all_input_nodes for tensor in _fakes(source)]
            devices = [operand.fake_device for operand in operands if not is_device_agnostic(operand)]
            for value in _fakes(node):
                value.fake_device = devices[0] if devices else CPU
    module.recompile()
    return module


def _fakes(node: Node) -> list[Any]:
    return [value for value in pytree.tree_leaves(node.meta.get("val")) if isinstance(value, FakeTensor)]


class Devices:
    """An engine that compiles all programs for the CPU.

    Attributes:
        found: the requested devices of all programs.
    """

    def __init__(self, options: Options | None = None) -> None:
        self.found: list[torch.device] = []
        self._options = options or Options()
        self._inner = Xla(self._options)

    def runner(self, graph: AtenGraph) -> Any:
        """Returns a runner that compiles in its first call, after `run` has marked the whole graph as on the CPU."""
        self.found.append(graph_device(graph.module))
        runners: list[Any] = []

        class LateRunner:
            name = graph.name
            module = graph.module

            def __call__(late_runner, args: list[Any]) -> Sequence[Any]:
                if not runners:
                    runners.append(self._inner.runner(graph))
                return runners[0](args)

            def executables(late_runner) -> list[Any]:
                return runners[0].executables()

        return LateRunner()

    def run(self, module: GraphModule, *args: Any) -> list[Any]:
        """Returns the graph's results, computed part by part on the CPU."""
        program: Any = Scheduler(self, self._options).split(AtenGraph("graph", module))
        for part in [step.module for step in program.steps] if isinstance(program, Schedule) else [program.module]:
            _mark_as_on_cpu(part)
        return list(program(list(args)))


def _mark_as_on_cpu(module: GraphModule) -> None:
    for node in module.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": CPU}
        for value in _fakes(node):
            value.fake_device = CPU
    module.recompile()


def parts_of(module: GraphModule, options: Options | None = None) -> list[tuple[str, list[str]]]:
    """Returns for each part of a graph its device, or "torch" if torch runs it, and the names of its ops."""
    engine = Devices(options)
    program: Any = Scheduler(engine, options or Options()).split(AtenGraph("graph", module))
    devices = iter(engine.found)
    steps = program.steps if isinstance(program, Schedule) else ()
    parts = [(step.kind is StepKind.PROGRAM, step.module) for step in steps] or [(True, program.module)]
    return [(str(next(devices)) if compiled else "torch", names(part.graph)) for compiled, part in parts]


def names(graph: Graph) -> list[str]:
    return [node.target.__name__.partition(".")[0] for node in graph.nodes if node.op == "call_function"]


def built(*shapes: tuple[tuple[int, ...], torch.device]) -> tuple[Graph, list[Node], Callable[..., Node]]:
    """Returns an empty graph, its inputs with these shapes and devices, and a function that adds a call of an op.

    The argument `like` of this function is the shape and the device of the result.
    """
    graph, mode = Graph(), FakeTensorMode()

    def fake(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
        with mode:
            return torch.empty(shape, device=device)

    inputs = []
    for shape, device in shapes:
        inputs.append(graph.placeholder(f"x{len(inputs)}"))
        inputs[-1].meta["val"] = fake(shape, device)

    def call(op: Any, *args: Any, like: tuple[tuple[int, ...], torch.device], **kwargs: Any) -> Node:
        node = graph.call_function(op, args, kwargs)
        node.meta["val"] = fake(*like)
        return node

    return graph, inputs, call
