"""Values that are materialized because one reader needs them in memory and another reader would recompute them."""

from __future__ import annotations

import operator

import pytest
import torch
from torch.fx import Node

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


def test_graph_without_gradients_has_no_shared_values() -> None:
    build = Builder()
    value = build.call(aten.relu.default, build.input(3, 3))
    outputs = [product(build, value), build.call(aten.neg.default, value)]
    assert shared_values(build.module(*outputs).graph, "cpu") == set()
    gradient = build.call(aten.threshold_backward.default, value, value, 0)
    assert shared_values(build.module(*outputs, gradient).graph, "cpu") == {value}
