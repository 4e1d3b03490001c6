"""Tests of a graph's text, which is equal for equal graphs in any process, and different for different graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from dynaxla.capture.graph_text import graph_text
from dynaxla.lowering.graphs import FOR_CHECKS

base = torch.arange(6.0).reshape(2, 3)


def text(function: Callable[..., Any], *inputs: torch.Tensor, mode: str = "fake") -> str | None:
    return graph_text(make_fx(function, tracing_mode=mode)(*inputs))


def test_equal_graphs_have_equal_texts() -> None:
    texts = {text(lambda x: [x.t() @ x, x.sum(0)], base) for _ in range(2)}
    assert len(texts) == 1
    assert None not in texts


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda x: [x + 1], lambda x: [x + True]),
        (lambda x: [x + 0.0], lambda x: [x + -0.0]),
        (lambda x: [x.sum(0)], lambda x: [x.sum(1)]),
        (lambda x: [x[0:1]], lambda x: [x[1:2]]),
        (lambda x: [x + torch.tensor([1.0, 2.0, 3.0])], lambda x: [x + torch.tensor([1.0, 2.0, 4.0])]),
        (lambda x: [x.clone(), x.clone()], lambda x: [y := x.clone(), y]),
        (lambda x: [x.to(torch.float16)], lambda x: [x.to(torch.bfloat16)]),
    ],
)
def test_different_graphs_have_different_texts(first: Callable[..., Any], second: Callable[..., Any]) -> None:
    texts = text(first, base, mode="real"), text(second, base, mode="real")
    assert None not in texts
    assert texts[0] != texts[1]


@pytest.mark.parametrize("other", [torch.ones(3, 2).t(), torch.ones(2, 4)[:, :3], torch.ones(7)[1:].view(2, 3), torch.ones(2, 3).double()])
def test_text_depends_on_shape_strides_offset_and_dtype(other: torch.Tensor) -> None:
    assert text(lambda x: [x + 1], other) not in (text(lambda x: [x + 1], base), None)


def test_text_depends_on_marks_but_not_on_names_of_nodes() -> None:
    module = make_fx(lambda x: [x.sin()], tracing_mode="fake")(base)
    before = graph_text(module)
    node = next(node for node in module.graph.nodes if node.op == "call_function")
    node.meta[FOR_CHECKS] = True
    assert graph_text(module) != before
    node.name = "another"
    del node.meta[FOR_CHECKS]
    assert graph_text(module) == before


def test_graphs_without_a_text() -> None:
    assert text(lambda x: [x + 1], base, mode="symbolic") is None
    assert text(lambda x: [torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))], base) is None
    graph = torch.fx.Graph()
    drawn = graph.call_function(torch.ops.aten.randn.generator, ([3],), {"generator": None})
    graph.output((drawn,))
    module = torch.fx.GraphModule({}, graph)
    assert graph_text(module) is not None
    drawn.kwargs = {"generator": torch.Generator()}
    assert graph_text(module) is None
