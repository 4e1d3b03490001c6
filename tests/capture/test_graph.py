"""Tests of the device of a graph."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from dynaxla.capture.graph import graph_device, graph_devices
from dynaxla.errors import DeviceMismatch, UnsupportedTensor

aten = torch.ops.aten
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class GraphBuilder:
    """Builds a graph with tensors on any device, which this machine need not have."""

    def __init__(self) -> None:
        self.graph, self.mode = Graph(), FakeTensorMode()

    def tensor(self, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        with self.mode:
            return torch.empty(shape, device=device, dtype=dtype)

    def input(self, value: object) -> Node:
        node = self.graph.placeholder(f"x{len(self.graph.nodes)}")
        node.meta["val"] = value
        return node

    def call(self, value: object, *args: Node) -> Node:
        node = self.graph.call_function(aten.clone.default, args)
        node.meta["val"] = value
        return node

    def module(self, *outputs: Node) -> GraphModule:
        self.graph.output(outputs)
        return GraphModule(torch.nn.Module(), self.graph)


def test_cpu_scalars_with_gpu_tensors_give_the_gpu() -> None:
    builder = GraphBuilder()
    number, tensor = builder.input(builder.tensor((), CPU)), builder.input(builder.tensor((3,), CUDA))
    several = builder.call((builder.tensor((2,), CUDA), None, builder.tensor((), CPU)), number, tensor)
    assert graph_device(builder.module(several)) == CUDA


def test_cpu_scalars_alone_give_the_cpu() -> None:
    builder = GraphBuilder()
    assert graph_device(builder.module(builder.input(builder.tensor((), CPU)), builder.input(3))) == CPU


@pytest.mark.parametrize("shape", [(3,), ()], ids=str)
def test_tensors_on_two_devices_are_refused(shape: tuple[int, ...]) -> None:
    """As in eager mode, a scalar on the GPU with tensors on the CPU is refused too."""
    builder = GraphBuilder()
    module = builder.module(builder.input(builder.tensor((3,), CPU)), builder.input(builder.tensor(shape, CUDA)))
    with pytest.raises(DeviceMismatch):
        graph_device(module)


def test_nodes_between_programs_may_have_unsupported_tensors() -> None:
    builder = GraphBuilder()
    x = builder.input(builder.tensor((3, 3), CPU))
    sparse = builder.call(torch.eye(3).to_sparse(), x)
    dense = builder.call(builder.tensor((3, 3), CPU), sparse)
    module = builder.module(dense)
    assert graph_devices(module, [sparse, dense]) == {CPU}
    assert graph_devices(module, [dense]) == {CPU}, "only a node between programs reads the sparse tensor"
    with pytest.raises(UnsupportedTensor, match="sparse"):
        graph_device(module)
