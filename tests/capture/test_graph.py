"""The device of a graph."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from dynaxla.capture.graph import graph_device, graph_devices
from dynaxla.errors import DeviceMismatch, UnsupportedTensor

aten = torch.ops.aten
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class Built:
    """A graph by hand, on devices that need not be here."""

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


def test_numbers_on_the_cpu_stand_beside_a_gpus_tensors() -> None:
    built = Built()
    number, tensor = built.input(built.tensor((), CPU)), built.input(built.tensor((3,), CUDA))
    several = built.call((built.tensor((2,), CUDA), None, built.tensor((), CPU)), number, tensor)
    assert graph_device(built.module(several)) == CUDA


def test_alone_they_decide() -> None:
    built = Built()
    assert graph_device(built.module(built.input(built.tensor((), CPU)), built.input(3))) == CPU


@pytest.mark.parametrize("shape", [(3,), ()], ids=str)
def test_two_devices_are_one_too_many(shape: tuple[int, ...]) -> None:
    """A GPU's number beside the CPU's tensors is no exception, as in eager mode."""
    built = Built()
    module = built.module(built.input(built.tensor((3,), CPU)), built.input(built.tensor(shape, CUDA)))
    with pytest.raises(DeviceMismatch):
        graph_device(module)


def test_what_runs_between_programs_may_be_anything() -> None:
    built = Built()
    x = built.input(built.tensor((3, 3), CPU))
    sparse = built.call(torch.eye(3).to_sparse(), x)
    dense = built.call(built.tensor((3, 3), CPU), sparse)
    module = built.module(dense)
    assert graph_devices(module, [sparse, dense]) == {CPU}
    assert graph_devices(module, [dense]) == {CPU}, "only a node between programs reads it"
    with pytest.raises(UnsupportedTensor, match="sparse"):
        graph_device(module)
