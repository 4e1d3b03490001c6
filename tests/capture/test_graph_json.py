"""Tests of graphs as JSON, including graphs of backward passes."""

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

from dynaxla.capture.graph_json import Unwritable, decoded, encoded
from dynaxla.capture.graph_text import graph_text


def graphs(function: Callable[..., Any], *inputs: torch.Tensor) -> list[GraphModule]:
    """Returns AOTAutograd's forward and backward graphs of a function."""
    modules: list[GraphModule] = []

    def compile(module: GraphModule, _: Any) -> Any:
        modules.append(module)
        return make_boxed_func(module.forward)

    torch.compile(function, backend=aot_autograd(fw_compiler=compile))(*inputs).sum().backward()
    return modules


def test_decoded_graphs_equal_the_encoded_graphs() -> None:
    modules = graphs(lambda x, y: (x.sin() * y).t()[1:], torch.randn(3, 4, requires_grad=True), torch.randn(4, requires_grad=True))
    assert len(modules) == 2
    for module in modules:
        decoded_module = decoded(json.loads(json.dumps(encoded(module))))
        assert graph_text(module) is not None
        assert graph_text(decoded_module) == graph_text(module)
        descriptions = [node.meta.get("desc") for node in module.graph.nodes]
        assert any(descriptions)
        assert [node.meta.get("desc") for node in decoded_module.graph.nodes] == descriptions
        assert [node.name for node in decoded_module.graph.nodes] == [node.name for node in module.graph.nodes]


def test_size_limit_of_constants() -> None:
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
def test_special_tensors_are_refused(function: Callable[..., Any], message: str | None) -> None:
    module = make_fx(function, tracing_mode="fake")(torch.ones(3))
    if message is None:
        torch.testing.assert_close(decoded(encoded(module))(torch.ones(3)), function(torch.ones(3)))
        return
    with pytest.raises(Unwritable, match=message):
        encoded(module)


def test_dynamic_sizes_are_refused() -> None:
    with pytest.raises(Unwritable, match="has dynamic sizes"):
        encoded(make_fx(lambda x: [x * 2], tracing_mode="symbolic")(torch.ones(3, 4)))
