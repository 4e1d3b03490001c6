"""Tests of training/recorded_graph.py: graphs that write to their inputs, torch's updates in place, and graphs that share a program."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node

from dynaxla.config import Options
from dynaxla.observe import metrics
from dynaxla.runtime import late_checks
from dynaxla.training.recorded_graph import RecordedGraph
from dynaxla.training.traced_numbers import mark_number, op_with_traced_numbers
from support import internals

aten = torch.ops.aten


def graph_of(build: Callable[..., list[Node]], *values: torch.Tensor | float) -> RecordedGraph:
    """Returns a recorded graph.

    Args:
        build: takes the graph and its inputs, and returns the outputs.
        values: the inputs' values.
    """
    graph = Graph()
    placeholders = [graph.placeholder(f"x{index}") for index in range(len(values))]
    with FakeTensorMode() as mode:
        for node, value in zip(placeholders, values, strict=True):
            if isinstance(value, float):
                mark_number(node)
            node.meta["val"] = mode.from_tensor(torch.as_tensor(value))
    outputs = build(graph, *placeholders)
    for node in graph.nodes:
        if node.op == "call_function":
            node.meta["val"] = placeholders[0].meta["val"]
    return RecordedGraph(graph, placeholders, outputs, {})


def doubled(graph: Graph, x: Node, unread: Node, number: Node) -> list[Node]:
    product = graph.call_function(op_with_traced_numbers(aten.mul.Tensor), (x, number))
    graph.call_function(aten.add_.Tensor, (x, 1))
    return [product, product]


def test_graph_that_writes_to_an_input() -> None:
    x, unread = torch.ones(3), torch.ones(4)
    graph = graph_of(doubled, x, unread, 2.0)
    assert graph.used_positions == [0, 2]
    graph.compile(Options(), [x, unread, 2.0])
    for number in (2.0, 5.0):
        before = x.clone()
        first, second = graph.run([x, None, number])
        assert first.tolist() == second.tolist() == (before * number).tolist()
        assert torch.equal(x, before + 1)


def test_graphs_that_share_a_program() -> None:
    x = torch.ones(3)
    graphs = [graph_of(lambda graph, x, y: [graph.call_function(aten.mul.Tensor, (x, y))], x, x.clone()) for _ in range(3)]
    first, same, aliased = graphs
    first.compile(Options(), [x, x.clone()])
    first.run([x, x.clone()])
    before = metrics.snapshot().get("compile", 0)
    same.store_input_layouts([x + 1, x])
    assert same.reuse_executable(first)
    assert same.run([x, x * 3])[0].tolist() == [3, 3, 3]
    aliased.store_input_layouts([x, x])
    assert not aliased.reuse_executable(first), "inputs that share memory need another program"
    other = graph_of(lambda graph, x, y: [graph.call_function(aten.add.Tensor, (x, y))], x, x.clone())
    other.store_input_layouts([x, x.clone()])
    assert not other.reuse_executable(first)
    assert metrics.snapshot().get("compile", 0) == before


def test_constants_are_compared() -> None:
    def with_constant(value: float) -> RecordedGraph:
        graph = Graph()
        x = graph.placeholder("x")
        with FakeTensorMode() as mode:
            x.meta["val"] = mode.from_tensor(torch.ones(2))
        constant = graph.get_attr("constant")
        product = graph.call_function(aten.mul.Tensor, (x, constant))
        constant.meta["val"] = product.meta["val"] = x.meta["val"]
        return RecordedGraph(graph, [x], [product], {"constant": torch.full((2,), value)})

    first, same, other = with_constant(1.0), with_constant(1.0), with_constant(2.0)
    for graph in (first, same, other):
        graph.store_input_layouts([torch.ones(2)])
    first.compile(Options(), [torch.ones(2)])
    assert same.reuse_executable(first)
    assert not other.reuse_executable(first)


def written_in_place(graph: Graph, x: Node, gradient: Node, count: Node) -> list[Node]:
    graph.call_function(aten.zero_.default, (gradient,))
    graph.call_function(aten.add_.Tensor, (count, 1))
    return [graph.call_function(aten.mul.Tensor, (x, 2.0))]


@pytest.mark.parametrize("fails", [False, True])
def test_no_inplace_update_after_a_failure_on_the_device(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x, gradient, count = torch.ones(3), torch.tensor([float("nan"), 1.0, 2.0]), torch.tensor(5)
    graph = graph_of(written_in_place, x, gradient, count)
    internals.failed_checks(monkeypatch, fails)
    graph.compile(Options(), [x, gradient, count])
    assert graph.run([x, gradient, count])[0].tolist() == [2, 2, 2]
    torch.testing.assert_close(gradient, torch.tensor([float("nan"), 1.0, 2.0]) if fails else torch.zeros(3), equal_nan=True)
    assert count.item() == (5 if fails else 6)


def test_any_failed_checks_all_codes() -> None:
    passed, failed = torch.tensor(2, dtype=torch.int32), torch.tensor(0, dtype=torch.int32)
    assert late_checks.any_failed([]) is None
    assert [late_checks.any_failed([(passed, 2), (code, 2)]).item() for code in (passed, failed)] == [0.0, 1.0]
