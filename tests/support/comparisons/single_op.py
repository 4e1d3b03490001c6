"""Runs single ATen ops through their lowerings, without the decompositions and dispatch of torch.compile."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from dynaxla.capture.graph import AtenGraph
from dynaxla.config import Options
from dynaxla.engine.unit import CompilationUnit
from dynaxla.engine.xla import CompiledGraph
from support.comparisons.compare import assert_equal


@dataclass
class Call:
    """One call of an op.

    Attributes:
        op: the op.
        args: the positional arguments.
        kwargs: the keyword arguments.
        expected: tensors with the metadata of the results, for an op without a kernel on the CPU.
    """

    op: torch._ops.OpOverload
    args: Sequence[Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    expected: Any = None

    def eagerly(self) -> Any:
        """Returns the results of eager mode, with tuples for lists."""
        return tuples(self.op(*self.args, **self.kwargs))


def tuples(results: Any) -> Any:
    """Returns the results with tuples for lists and named tuples."""
    return tuple(map(tuples, results)) if isinstance(results, (tuple, list)) else results


def run_op(op: torch._ops.OpOverload, *args: Any, expected: Any = None, **kwargs: Any) -> Any:
    """Returns the op's results, computed by a program of this op alone."""
    return run_ops([Call(op, args, kwargs, expected)])[0]


def run_ops(calls: Sequence[Call], options: Options | None = None) -> list[Any]:
    """Returns the results of each call, computed by one program.

    Args:
        calls: the calls.
        options: by default, an op without a lowering is an error.
    """
    module, tensors, results = graph_of(calls)
    outputs = iter(CompiledGraph(CompilationUnit(AtenGraph("ops", module), options or Options(fallback="error")))(tensors))
    return pytree.tree_map_only(torch.fx.Node, lambda _: next(outputs), results)


def graph_of(calls: Sequence[Call]) -> tuple[torch.fx.GraphModule, list[torch.Tensor], list[Any]]:
    """Returns a graph of these calls, its inputs, and the results of the calls: nodes, which are the graph's outputs, or other values."""
    graph = torch.fx.Graph()
    mode = FakeTensorMode()
    tensors: list[torch.Tensor] = []
    results: list[Any] = []

    def placeholder(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        node = graph.placeholder(f"arg{len(tensors)}")
        node.meta["val"] = mode.from_tensor(value)
        tensors.append(value)
        return node

    # All inputs come first in the graph.
    arguments = [pytree.tree_map(placeholder, (tuple(call.args), dict(call.kwargs))) for call in calls]
    for call, (args, kwargs) in zip(calls, arguments, strict=True):
        results.append(_add(graph, mode, call, args, kwargs))
    graph.output(tuple(node for node in pytree.tree_leaves(results) if isinstance(node, torch.fx.Node)))
    return torch.fx.GraphModule({}, graph), tensors, results


def _add(graph: torch.fx.Graph, mode: FakeTensorMode, call: Call, args: Any, kwargs: Any) -> Any:
    """Adds a call. Returns the nodes of its results."""
    node = graph.call_function(call.op, args, kwargs)
    fake_args, fake_kwargs = pytree.tree_map(lambda leaf: leaf.meta["val"] if isinstance(leaf, torch.fx.Node) else leaf, (args, kwargs))
    with mode:
        value = call.op(*fake_args, **fake_kwargs) if call.expected is None else call.expected
        node.meta["val"] = pytree.tree_map_only(torch.Tensor, lambda x: x if isinstance(x, FakeTensor) else mode.from_tensor(x), value)
    return _parts(graph, node)


def _parts(graph: torch.fx.Graph, node: torch.fx.Node) -> Any:
    """Returns the node, or the nodes of its parts if it has several results."""
    values = node.meta["val"]
    if not isinstance(values, (tuple, list)):
        return node
    parts: list[Any] = []
    for index, value in enumerate(values):
        if isinstance(value, (torch.Tensor, tuple, list)):
            part = graph.call_function(operator.getitem, (node, index))
            part.meta["val"] = value
            parts.append(_parts(graph, part))
        else:
            parts.append(value)
    return tuple(parts)


def check_op(op: torch._ops.OpOverload, *args: Any, tolerance: tuple[float, float] | None = None, **kwargs: Any) -> None:
    """Compares the lowering with the op's kernel in eager mode."""
    assert_equal(run_op(op, *args, **kwargs), Call(op, args, kwargs).eagerly(), tolerance=tolerance)
