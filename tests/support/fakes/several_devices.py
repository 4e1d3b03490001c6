"""Graphs with tensors on several devices, on a machine with one: traced on the CPU, then labelled as on other devices."""

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
    """What `traced` takes for x.to(device)."""
    return x.clone()


@to_device.register_fake
def _(x: torch.Tensor, device: str, non_blocking: bool = False) -> torch.Tensor:
    return torch.empty_like(x)


def traced(function: Callable[..., Any], *inputs: torch.Tensor, on: Sequence[torch.device], dynamic: bool = False) -> GraphModule:
    """The graph of a function whose inputs are said to be on these devices, and what is copied by `to_device` on that one.

    All else is where its first operand is, or else on the CPU.
    """
    module = make_fx(function, tracing_mode="symbolic" if dynamic else "fake")(*inputs)
    module.graph.eliminate_dead_code()
    mode = next(value.fake_mode for node in module.graph.nodes if isinstance(value := node.meta.get("val"), FakeTensor))
    given = iter(on)
    for node in module.graph.nodes:
        if node.op == "get_attr":
            node.meta["val"] = mode.from_tensor(getattr(module, str(node.target)), static_shapes=True)
        elif node.op == "placeholder" and isinstance(node.meta["val"], torch.Tensor):
            node.meta["val"].fake_device = next(given)
        elif node.target is torch.ops.dynaxla_test.to_device.default:
            x, device, *non_blocking = node.args
            node.target, node.args, node.kwargs = aten._to_copy.default, (x,), {"device": torch.device(device)}
            if non_blocking:
                node.kwargs = {**node.kwargs, "non_blocking": non_blocking[0]}
            node.meta["val"].fake_device = torch.device(device)
        elif node.op == "call_function":
            operands = [tensor for source in node.all_input_nodes for tensor in _fakes(source)]
            found = [operand.fake_device for operand in operands if not is_device_agnostic(operand)]
            for value in _fakes(node):
                value.fake_device = found[0] if found else CPU
    module.recompile()
    return module


def _fakes(node: Node) -> list[Any]:
    return [value for value in pytree.tree_leaves(node.meta.get("val")) if isinstance(value, FakeTensor)]


class Devices:
    """Programs of XLA's for the CPU, instead of those for other devices. Attributes: found (the devices of all programs, as asked for)."""

    def __init__(self, options: Options | None = None) -> None:
        self.found: list[torch.device] = []
        self._options = options or Options()
        self._inner = Xla(self._options)

    def runner(self, graph: AtenGraph) -> Any:
        """A runner that is made when it is first called: by then the whole graph is said to be on the CPU."""
        self.found.append(graph_device(graph.module))
        made: list[Any] = []

        class Late:
            name = graph.name
            module = graph.module

            def __call__(late, args: list[Any]) -> Sequence[Any]:
                if not made:
                    made.append(self._inner.runner(graph))
                return made[0](args)

            def executables(late) -> list[Any]:
                return made[0].executables()

        return Late()

    def run(self, module: GraphModule, *args: Any) -> list[Any]:
        """The graph's results, computed part by part on the CPU."""
        program: Any = Scheduler(self, self._options).split(AtenGraph("graph", module))
        for part in [step.module for step in program.steps] if isinstance(program, Schedule) else [program.module]:
            _say_it_is_here(part)
        return list(program(list(args)))


def _say_it_is_here(module: GraphModule) -> None:
    for node in module.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": CPU}
        for value in _fakes(node):
            value.fake_device = CPU
    module.recompile()


def parts_of(module: GraphModule, options: Options | None = None) -> list[tuple[str, list[str]]]:
    """For each part of a graph its device, or that torch runs it, and the names of the ops."""
    engine = Devices(options)
    program: Any = Scheduler(engine, options or Options()).split(AtenGraph("graph", module))
    devices = iter(engine.found)
    steps = program.steps if isinstance(program, Schedule) else ()
    parts = [(step.kind is StepKind.PROGRAM, step.module) for step in steps] or [(True, program.module)]
    return [(str(next(devices)) if compiled else "torch", names(part.graph)) for compiled, part in parts]


def names(graph: Graph) -> list[str]:
    return [node.target.__name__.partition(".")[0] for node in graph.nodes if node.op == "call_function"]


def built(*shapes: tuple[tuple[int, ...], torch.device]) -> tuple[Graph, list[Node], Callable[..., Node]]:
    """A graph by hand with inputs of these shapes on these devices, and a way to call an op whose result has a shape, on a device."""
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
