"""Tests of the detection of graphs and calls that must not run twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from dynaxla.autoselect import obstacles

aten = torch.ops.aten


def attention(dropout: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: aten._scaled_dot_product_flash_attention_for_cpu(x, x, x, dropout)[0]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x.relu() @ x.transpose(-1, -2), ""),
        (torch.rand_like, "the graph draws random numbers"),
        (torch.bernoulli, "the graph draws random numbers"),
        (attention(0.0), ""),
        (attention(0.5), "the graph draws random numbers"),
    ],
)
def test_obstacles_in_aten_graphs(function: Any, reason: str) -> None:
    obstacle = obstacles.obstacle_in_aten_graph(make_fx(function, tracing_mode="fake")(torch.rand(1, 2, 4, 8)))
    assert obstacle.startswith(reason)
    assert bool(obstacle) == bool(reason)


def captured(function: Any, *args: Any) -> str:
    """Returns the reason why TorchDynamo's graph of a function must not run twice."""
    reasons: list[str] = []

    def backend(module: Any, _: Any) -> Any:
        reasons.append(obstacles.obstacle_in_dynamo_graph(module))
        return module.forward

    torch.compile(function, backend=backend, fullgraph=True)(*args)
    (reason,) = reasons
    return reason


def test_obstacles_in_dynamo_graphs() -> None:
    x = torch.rand(3)
    assert captured(lambda x: torch.nn.functional.gelu(x).sum() + len(x), x) == ""
    assert captured(lambda x: torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,)), x) == ""
    with torch.library._scoped_library("planted_ops", "FRAGMENT") as library:
        library.define("one(Tensor x) -> Tensor")
        library.impl("one", torch.clone, "CompositeExplicitAutograd")
        assert "the graph calls a custom op: planted_ops.one" in captured(lambda x: torch.ops.planted_ops.one(x), x)
        nested = captured(lambda x: torch.cond(x.sum() > 0, torch.ops.planted_ops.one, lambda x: x.clone(), (x,)), x)
        assert "the graph calls a custom op" in nested
    allowed = torch.compiler.allow_in_graph(_user_function)
    assert "not part of torch" in captured(lambda x: allowed(x), x)


def _user_function(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def test_calls_with_special_tensors_hooks_or_modes_run_once() -> None:
    x = torch.rand(3)
    assert not obstacles.call_must_run_once([x, torch.nn.Parameter(x), 3, 2.0, None])
    assert obstacles.call_must_run_once([torch.eye(2).to_mkldnn()])
    assert obstacles.call_must_run_once([torch.view_as_complex(torch.rand(3, 2)).conj()])
    with torch.autograd.graph.saved_tensors_hooks(lambda item: item, lambda item: item):
        assert obstacles.call_must_run_once([x])
    with torch._subclasses.FakeTensorMode():
        assert obstacles.call_must_run_once([x])
