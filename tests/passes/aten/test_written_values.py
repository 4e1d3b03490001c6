"""Tests of passes/aten/written_values.py: a read of a part of a mutated input reads the written value, without unrelated writes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from dynaxla.passes.aten.write_chains import written_views
from dynaxla.passes.aten.written_values import read_written_values
from support import internals

aten = torch.ops.aten


def read(function: Callable[[Tensor, Tensor], Tensor]) -> str:
    """Returns the operand of the op `relu` in the rewritten graph of a function, as an expression."""
    module = make_fx(torch.func.functionalize(function, remove="mutations"), tracing_mode="fake")(
        torch.zeros(4, 4, 6, 5), torch.zeros(6, 5)
    )
    graph, copies = Graph(), dict[Node, Node]()
    graph.graph_copy(module.graph, copies)
    read_written_values(graph, copies, written_views(module.graph, {next(iter(module.graph.nodes))}))
    graph.lint()
    (reader,) = (node for node in graph.nodes if node.target is aten.relu.default)
    return text(reader.args[0])


def text(node: Any) -> str:
    if not isinstance(node, Node):
        return str(node)
    if node.op == "placeholder":
        return node.name[0]
    return f"{node.target.name()[6:].split('.')[0].removesuffix('_copy')}({', '.join(map(text, node.args))})"


def written(c: Tensor, x: Tensor) -> Tensor:
    c[0, 1] = x
    return c[0, 1].relu()


def other_parts_written(c: Tensor, x: Tensor) -> Tensor:
    c[0, 1] = x
    c[-1].fill_(2)
    c[1:3].fill_(1)
    return c[0, 2].relu()


def counted_from_the_end(c: Tensor, x: Tensor) -> Tensor:
    c[-1, 0] = x
    return c[3, 0].relu()


def after_written_part(c: Tensor, x: Tensor) -> Tensor:
    c[:3].fill_(1)
    return c[-1].relu()


def overlaps_written_part(c: Tensor, x: Tensor) -> Tensor:
    c[:3].fill_(1)
    return c[2:].relu()


def other_dimension(c: Tensor, x: Tensor) -> Tensor:
    """The parts that are written and read are selected along different dimensions."""
    c[0, 1] = x
    return c.select(1, 1).relu()


def changed_again(c: Tensor, x: Tensor) -> Tensor:
    c[0, 1] = x
    c[0, 1, 2].fill_(3)
    c[0, 3].fill_(4)
    return c[0, 1].relu()


PART, END = "select(select(c, 0, 0), 0, 1)", 2**63 - 1
CASES = [
    (written, f"copy({PART}, x)"),
    (other_parts_written, "select(select(c, 0, 0), 0, 2)"),
    (counted_from_the_end, "copy(select(select(c, 0, -1), 0, 0), x)"),
    (after_written_part, "select(c, 0, -1)"),
    (overlaps_written_part, f"slice(slice_scatter(c, fill(slice(c, 0, 0, 3), 1), 0, 0, 3), 0, 2, {END})"),
    (other_dimension, f"select(select_scatter(c, select_scatter(select(c, 0, 0), copy({PART}, x), 0, 1), 0, 0), 1, 1)"),
    (changed_again, f"select_scatter(copy({PART}, x), fill(select(copy({PART}, x), 0, 2), 3), 0, 2)"),
]


@pytest.mark.parametrize(("function", "expected"), CASES)
def test_rewritten_operand(function: Callable[[Tensor, Tensor], Tensor], expected: str) -> None:
    assert read(function) == expected


def layers(c: Tensor, d: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Reads parts of a cache of all layers before and after they change."""
    c[0, 1].index_copy_(0, torch.tensor([2]), x[:1])
    d[0, 0] = c[1, 1] * 2
    c[1, 1] = c[0, 1] + c[2, 0].t().contiguous().t()
    before = c[2, 2].t()
    d[1, :, :5] = before[:, :5]
    c[2, 2] = 5
    return before, c[0].unbind()[1].sum() + c[2, 2, 1:].mean(), torch.as_strided(c[0, 1], (2, 2), (5, 1), 37).cos()


def test_values(monkeypatch: pytest.MonkeyPatch) -> None:
    internals.late_writes_of(monkeypatch, 0)
    mine: Sequence[Tensor] = torch.randn(4, 4, 6, 5), torch.randn(4, 4, 6, 5), torch.randn(6, 5)
    theirs = copy.deepcopy(mine)
    with torch.no_grad():
        found, expected = torch.compile(layers, backend="dynaxla")(*mine), layers(*theirs)
    torch.testing.assert_close((found, mine), (expected, theirs))
