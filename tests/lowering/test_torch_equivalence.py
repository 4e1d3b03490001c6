"""Graphs for which torch's kernels and XLA programs are interchangeable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from dynaxla.lowering.torch_equivalence import is_interchangeable

aten = torch.ops.aten
X, Q = torch.randn(2, 3, 4), torch.randn(1, 2, 3, 4)
LAYER = [torch.randn(5, 2, 3), torch.randn(8, 3), torch.randn(8, 2), torch.randn(8), torch.randn(8), torch.randn(2, 2), torch.randn(2, 2)]


def attention(q: torch.Tensor) -> list[torch.Tensor]:
    return list(aten._scaled_dot_product_flash_attention_for_cpu(q, q, q))


def attention_gradient(q: torch.Tensor) -> list[torch.Tensor]:
    out, logsumexp = q * 1, q[..., 0] * 1
    return list(aten._scaled_dot_product_flash_attention_for_cpu_backward(q, q, q, q, out, logsumexp, 0.0, False))


def layer(*inputs: torch.Tensor) -> list[torch.Tensor]:
    return list(aten.mkldnn_rnn_layer(*inputs, False, [], 2, 2, 1, True, False, False, True))


def bag(weight: torch.Tensor) -> list[torch.Tensor]:
    return list(aten._embedding_bag(weight, torch.tensor([0, 1]), torch.tensor([0])))


def layer_and_gradient(*inputs: torch.Tensor) -> list[Any]:
    out, hy, cy, workspace = layer(*inputs)
    grads = aten.mkldnn_rnn_layer_backward(
        *inputs, out, hy, cy, out, None, None, False, 2, 2, 1, True, True, False, [], False, workspace.view(-1)
    )
    return [out, *grads[:2]]


CASES: dict[str, tuple[Callable[..., Any], list[torch.Tensor], bool]] = {
    "nothing special": (lambda x: [x.sin() @ x.mT], [X], True),
    "random numbers": (lambda x: [x + torch.rand(4)], [X], False),
    "dropout mask": (lambda x: list(aten.native_dropout(x, 0.5, True)), [X], False),
    "log-sum-exps of attention": (attention, [Q], True),
    "gradient of attention": (attention_gradient, [Q], True),
    "log-sum-exps in float64": (attention, [Q.double()], False),
    "gradient of attention in float64": (attention_gradient, [Q.double()], False),
    "output of attention alone, in float64": (lambda q: attention(q)[:1], [Q.double()], True),
    "returned workspace": (layer, LAYER, False),
    "workspace that is not returned": (lambda *inputs: layer(*inputs)[:3], LAYER, True),
    "workspace that is read in the graph": (layer_and_gradient, LAYER, True),
    "returned view of a workspace": (lambda *inputs: [layer(*inputs)[3].view(-1)], LAYER, False),
    "offsets of embedding bags": (bag, [torch.randn(3, 4)], False),
    "output of embedding bags alone": (lambda weight: bag(weight)[:1], [torch.randn(3, 4)], True),
}


@pytest.mark.parametrize("name", CASES)
def test_is_interchangeable(name: str) -> None:
    function, inputs, expected = CASES[name]
    assert is_interchangeable(make_fx(function, tracing_mode="fake")(*inputs)) == expected


def test_graph_that_takes_a_saved_value_is_not_interchangeable() -> None:
    def gradient(grad: torch.Tensor, out: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
        return aten.log_sigmoid_backward(grad, out, saved)

    assert not is_interchangeable(make_fx(gradient, tracing_mode="fake")(X, X, X))


def test_graphs_of_branches_count() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.higher_order.cond(x.sum() > 0, lambda x: (x + torch.rand(4),), lambda x: (x * 2,), (x,))[0]

    assert not is_interchangeable(make_fx(function, tracing_mode="symbolic")(X))
