"""Tests of passes/aten/split.py: a graph is split at nodes that a program cannot contain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from dynaxla.passes.aten.split import GraphPart, part_of, split

aten = torch.ops.aten


def traced(function: Callable[..., Any], *inputs: torch.Tensor, dynamic: bool = False) -> GraphModule:
    module = make_fx(function, tracing_mode="symbolic" if dynamic else "fake")(*inputs)
    module.graph.eliminate_dead_code()
    return module


def is_cos(node: Node) -> bool:
    return node.target is aten.cos.default


def run(module: GraphModule, parts: list[GraphPart], *args: Any) -> list[Any]:
    """Runs the parts of a graph in order, each with its declared inputs only. Returns the graph's outputs."""
    values = dict(zip(module.graph.find_nodes(op="placeholder"), args, strict=True))
    for part in parts:
        results = part.module(*[values[node] for node in part.inputs])
        values.update(zip(part.outputs, results, strict=True))
    return [values[node] for node in module.graph.output_node().args[0]]


def calls(part: GraphPart) -> list[Any]:
    return [node.target for node in part.module.graph.nodes if node.op == "call_function"]


def test_parts_alternate_and_compute_the_same() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        first = x.sin()
        between = first.cos()
        return [between.exp() + first, y.neg(), y.cos()]

    x, y = torch.randn(3), torch.randn(3)
    module = traced(function, x, y)
    parts = split(module, is_cos)
    assert [part.compiled for part in parts] == [True, False, True, False]
    assert [calls(part) for part in parts] == [
        [aten.sin.default], [aten.cos.default], [aten.exp.default, aten.add.Tensor, aten.neg.default], [aten.cos.default],
    ]  # fmt: skip
    assert [[node.name for node in part.outputs] for part in parts] == [["sin"], ["cos"], ["add", "neg"], ["cos_1"]]
    torch.testing.assert_close(run(module, parts, x, y), function(x, y))


def test_getitem_nodes_are_in_the_part_of_their_op() -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        values, indices = x.sort()
        return [values + 1, indices]

    x = torch.randn(5)
    module = traced(function, x)
    parts = split(module, lambda node: node.target is aten.sort.default)
    assert [part.compiled for part in parts] == [False, True]
    assert all(isinstance(node.meta["val"], torch.Tensor) for part in parts for node in part.outputs), "no tuple leaves a part"
    torch.testing.assert_close(run(module, parts, x), function(x))


def test_constants_are_copied_to_parts_that_read_them() -> None:
    table = torch.randn(3)

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        return [(x + table).cos() * table]

    x = torch.randn(3)
    module = make_fx(function)(x)
    parts = split(module, is_cos)
    assert [part.compiled for part in parts] == [True, False, True]
    assert [len(part.inputs) for part in parts] == [1, 1, 1]
    torch.testing.assert_close(run(module, parts, x), function(x))


def test_part_has_inputs_with_its_symbolic_sizes() -> None:
    """The last part expands to a size that none of its tensors has."""

    def function(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [y.cos().sum().expand(x.shape[0] * 2) + 1]

    x, y = torch.randn(3, 2), torch.randn(4)
    module = traced(function, x, y, dynamic=True)
    parts = split(module, is_cos)
    assert parts[-1].compiled
    symbols = {size.node.expr for size in module.graph.find_nodes(op="placeholder")[0].meta["val"].shape[:1]}
    given_sizes = {
        expression
        for node in parts[-1].inputs
        for size in (node.meta["val"].shape if isinstance(node.meta["val"], torch.Tensor) else [node.meta["val"]])
        if isinstance(size, torch.SymInt)
        for expression in [size.node.expr]
    }
    assert symbols <= given_sizes


def test_part_of_chosen_nodes() -> None:
    module = traced(lambda x: [x.sin().exp(), x.neg()], torch.randn(3))
    sine, exponential, negative = (node for node in module.graph.nodes if node.op == "call_function")
    assert part_of(module, [sine, exponential]).outputs == [exponential]
    part = part_of(module, [sine, negative], [sine])
    assert (part.compiled, part.outputs) == (True, [sine])
    x = torch.randn(3)
    assert torch.equal(part.module(x)[0], x.sin())
