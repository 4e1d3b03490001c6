"""Values that are materialized because one reader needs them in memory and another reader would recompute them."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from dynaxla.lowering.cpu.shared_values import shared_values
from support.models.graph_builder import Builder

aten = torch.ops.aten


def product(build: Builder, node: Node) -> Node:
    return build.call(aten.mm.default, node, node)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_shared_values_of_a_graph(platform: str) -> None:
    build = Builder()
    x = build.input(3, 3)
    names = (
        "product and elementwise",
        "products alone",
        "elementwise alone",
        "returned",
        "product of a view",
        "a bias's gradient",
        "a weight's gradient",
    )
    values = {name: build.call(aten.relu.default, x) for name in names}
    more = build.call(aten.relu.default, x)
    outputs = [product(build, values["product and elementwise"]), build.call(aten.neg.default, values["product and elementwise"])]
    outputs += [product(build, values["products alone"]) for _ in range(2)]
    outputs += [build.call(aten.neg.default, values["elementwise alone"]) for _ in range(2)]
    outputs += [values["returned"], build.call(aten.neg.default, values["returned"])]
    view = build.call(aten.t.default, values["product of a view"])
    outputs += [product(build, view), build.call(aten.neg.default, values["product of a view"])]
    for name, has_bias in (("a bias's gradient", True), ("a weight's gradient", False)):
        grad = build.call(aten.view.default, values[name], [1, 1, 3, 3])
        weight = build.call(aten.view.default, x, [1, 1, 3, 3])
        settings = [[1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, has_bias]]
        outputs += [build.call(operator.getitem, build.call(aten.convolution_backward.default, grad, weight, weight, [1], *settings), 1)]
    outputs += [product(build, build.call(aten.add.Tensor, more, x))]  # an input is in memory, and `more` has one reader
    graph = build.module(*outputs).graph
    expected = (
        {values["product and elementwise"], values["returned"], values["product of a view"], values["a bias's gradient"]}
        if platform == "cpu"
        else set()
    )
    assert shared_values(graph, platform) == expected


@pytest.mark.parametrize(
    ("function", "size", "is_shared"),
    [
        (lambda x: x.exp().neg(), 32, True),  # the whole value is computed in one loop
        (lambda x: torch.polar(x, x).real + 1, 32, True),
        (lambda x: (x + 1) * 2, 32, False),  # cheap
        (lambda x: x.exp().neg(), 8, False),  # few elements
        (lambda x: x.exp().neg().view(-1, 1), 32, False),  # computed once for each row
        (lambda x: (x.exp() @ x).neg(), 32, False),  # the product is in memory
    ],
)
def test_expensive_values_that_are_broadcast_are_shared(function: Callable[..., torch.Tensor], size: int, is_shared: bool) -> None:
    """XLA would compute them again for each element that reads them."""

    def broadcast(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        value = function(x)
        return y.view(4, *value.shape) * value

    graph = make_fx(broadcast)(torch.rand(size, size), torch.rand(4, size, size)).graph
    product = next(reversed(graph.find_nodes(op="call_function", target=aten.mul.Tensor)))
    assert shared_values(graph, "cpu") == ({product.args[1]} if is_shared else set())
