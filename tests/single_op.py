"""Run one ATen op through its lowering, whatever decomposition or dispatch would make of it under torch.compile."""

from __future__ import annotations

import operator
from typing import Any

import torch
from compare import assert_equal
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

from dynaxla.capture.aten_graph import AtenGraph
from dynaxla.config import Options
from dynaxla.engine.xla import Program


def run_op(op: torch._ops.OpOverload, *args: Any, expected: Any = None, **kwargs: Any) -> Any:
    """The op's results, computed by a program that holds nothing else.

    expected: what they look like, for an op without a kernel on the CPU.
    """
    graph = torch.fx.Graph()
    mode = FakeTensorMode()
    tensors: list[torch.Tensor] = []

    def placeholder(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        node = graph.placeholder(f"arg{len(tensors)}")
        node.meta["val"] = mode.from_tensor(value)
        tensors.append(value)
        return node

    node_args, node_kwargs = pytree.tree_map(placeholder, (args, kwargs))
    node = graph.call_function(op, node_args, node_kwargs)
    fake_args, fake_kwargs = pytree.tree_map(
        lambda leaf: leaf.meta["val"] if isinstance(leaf, torch.fx.Node) else leaf, (node_args, node_kwargs)
    )
    with mode:
        node.meta["val"] = (
            op(*fake_args, **fake_kwargs) if expected is None else pytree.tree_map_only(torch.Tensor, mode.from_tensor, expected)
        )
    if not isinstance(node.meta["val"], (tuple, list)):
        graph.output((node,))
        return Program(AtenGraph("single_op", torch.fx.GraphModule({}, graph)), Options(fallback="error"))(tensors)[0]
    results: list[Any] = []
    for index, value in enumerate(node.meta["val"]):
        if isinstance(value, torch.Tensor):
            result = graph.call_function(operator.getitem, (node, index))
            result.meta["val"] = value
            results.append(result)
        else:
            results.append(value)
    graph.output(tuple(results))
    return tuple(Program(AtenGraph("single_op", torch.fx.GraphModule({}, graph)), Options(fallback="error"))(tensors))


def check_op(op: torch._ops.OpOverload, *args: Any, tolerance: tuple[float, float] | None = None, **kwargs: Any) -> None:
    """Compare the lowering with the op's own kernel."""
    expected = op(*args, **kwargs)
    expected = tuple(expected) if isinstance(expected, list) else expected
    assert_equal(run_op(op, *args, **kwargs), expected, tolerance=tolerance)
