"""Graphs of a backward pass, too, are what they were; what JSON would not give back is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from dynaxla.capture.fingerprint import fingerprint
from dynaxla.capture.graph_json import Unwritable, decoded, encoded


def graphs(function: Callable[..., Any], *inputs: torch.Tensor) -> list[GraphModule]:
    """What AOTAutograd makes of a function and of its gradients."""
    found: list[GraphModule] = []

    def keep(module: GraphModule, _: Any) -> Any:
        found.append(module)
        return make_boxed_func(module.forward)

    torch.compile(function, backend=aot_autograd(fw_compiler=keep))(*inputs).sum().backward()
    return found


def test_forward_and_backward_graphs_are_what_they_were() -> None:
    found = graphs(lambda x, y: (x.sin() * y).t()[1:], torch.randn(3, 4, requires_grad=True), torch.randn(4, requires_grad=True))
    assert len(found) == 2
    for module in found:
        again = decoded(json.loads(json.dumps(encoded(module))))
        assert fingerprint(module) is not None
        assert fingerprint(again) == fingerprint(module)
        descriptions = [node.meta.get("desc") for node in module.graph.nodes]
        assert any(descriptions)
        assert [node.meta.get("desc") for node in again.graph.nodes] == descriptions
        assert [node.name for node in again.graph.nodes] == [node.name for node in module.graph.nodes]


def test_what_has_a_limit_and_what_has_none() -> None:
    constant = torch.arange(100.0)
    module = make_fx(lambda x: [x + constant])(torch.ones(100))
    assert len(encoded(module, 400)) == len(encoded(module))
    with pytest.raises(Unwritable, match="400 bytes"):
        encoded(module, 399)
    torch.testing.assert_close(decoded(encoded(module))(torch.ones(100)), [constant + 1])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: [x.to(torch.complex64).conj()], "plain tensor"),
        (lambda x: [x.to_sparse()], "plain tensor"),
        (lambda x: [x + torch.arange(6.0).reshape(2, 3).t()[0, 0]], None),
    ],
    ids=["conjugate", "sparse", "view of a constant"],
)
def test_what_is_not_written(function: Callable[..., Any], message: str | None) -> None:
    module = make_fx(function, tracing_mode="fake")(torch.ones(3))
    if message is None:
        torch.testing.assert_close(decoded(encoded(module))(torch.ones(3)), function(torch.ones(3)))
        return
    with pytest.raises(Unwritable, match=message):
        encoded(module)


def test_sizes_that_change() -> None:
    with pytest.raises(Unwritable, match="has dynamic sizes"):
        encoded(make_fx(lambda x: [x * 2], tracing_mode="symbolic")(torch.ones(3, 4)))
