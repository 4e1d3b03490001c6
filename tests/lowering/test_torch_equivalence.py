"""Which graphs torch's kernels and programs may run in turn."""

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
    "a mask of dropout": (lambda x: list(aten.native_dropout(x, 0.5, True)), [X], False),
    "logarithms of attention": (attention, [Q], True),
    "logarithms of attention, and their gradient": (attention_gradient, [Q], True),
    "such logarithms in float64": (attention, [Q.double()], False),
    "such logarithms in float64, that are given": (attention_gradient, [Q.double()], False),
    "attention alone in float64": (lambda q: attention(q)[:1], [Q.double()], True),
    "a workspace": (layer, LAYER, False),
    "a workspace that stays": (lambda *inputs: layer(*inputs)[:3], LAYER, True),
    "a workspace that is read in the graph": (layer_and_gradient, LAYER, True),
    "a view of a workspace": (lambda *inputs: [layer(*inputs)[3].view(-1)], LAYER, False),
    "where an embedding's bags are": (bag, [torch.randn(3, 4)], False),
    "an embedding alone": (lambda weight: bag(weight)[:1], [torch.randn(3, 4)], True),
}


@pytest.mark.parametrize("name", CASES)
def test_who_may_run_a_graph(name: str) -> None:
    function, inputs, expected = CASES[name]
    assert is_interchangeable(make_fx(function, tracing_mode="fake")(*inputs)) == expected


def test_what_another_graph_has_kept_is_not_for_everyone() -> None:
    def gradient(grad: torch.Tensor, out: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        return aten.log_sigmoid_backward(grad, out, kept)

    assert not is_interchangeable(make_fx(gradient, tracing_mode="fake")(X, X, X))


def test_graphs_of_control_flow_count() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.higher_order.cond(x.sum() > 0, lambda x: (x + torch.rand(4),), lambda x: (x * 2,), (x,))[0]

    assert not is_interchangeable(make_fx(function, tracing_mode="symbolic")(X))
