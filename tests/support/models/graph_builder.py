"""Graphs that a test builds node by node."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node


@torch.library.custom_op("dynaxla_test::begin_sum", mutates_args=())
def begin_sum(x: torch.Tensor) -> torch.Tensor:
    """Stands for an asynchronous collective of a library, whose result must be awaited."""
    return x.clone()


begin_sum.register_fake(torch.empty_like)


class Builder:
    """Builds a graph. By default, results have the metadata of a vector with three elements.

    Attributes:
        graph: the graph.
        mode: the mode of its fake tensors.
        root: the module with its constants.
    """

    def __init__(self) -> None:
        self.graph = Graph()
        self.mode = FakeTensorMode()
        self.root = torch.nn.Module()

    def input(self, *shape: int) -> Node:
        node = self.graph.placeholder(f"x{len(self.graph.nodes)}")
        node.meta["val"] = self.fake(*shape)
        return node

    def call(self, op: Any, *args: Any, value: Any = None) -> Node:
        node = self.graph.call_function(op, args)
        node.meta["val"] = self.fake(3) if value is None else value
        return node

    def fake(self, *shape: int) -> torch.Tensor:
        with self.mode:
            return torch.empty(shape)

    def module(self, *outputs: Node) -> GraphModule:
        self.graph.output(outputs)
        return GraphModule(self.root, self.graph)
