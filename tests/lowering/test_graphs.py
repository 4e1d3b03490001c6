"""Functions of graph nodes: views, used results, and descriptions for users."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import nn
from torch.fx import Graph

from dynaxla.lowering.graphs import describe_inputs, is_result_used, is_view, user_line, view_source
from support.models.graph_builder import Builder

aten = torch.ops.aten


def test_views() -> None:
    """`is_view` follows the schema. The results of `unsafe_split` and of in-place ops share memory, too."""
    build = Builder()
    x = build.input(3)
    parts, unsafe, sums = (build.call(op, x, 1) for op in (aten.split.Tensor, aten.unsafe_split.Tensor, aten.var_mean.correction))
    cases = [
        (build.call(aten.t.default, x), True, x),
        (parts, True, x),
        (build.call(operator.getitem, parts, 0), True, x),
        (build.call(operator.getitem, unsafe, 0), False, x),
        (build.call(operator.getitem, sums, 0), False, None),
        (build.call(aten.add_.Tensor, x, x), False, x),
        (build.call(aten.add.Tensor, x, x), False, None),
        (build.call(operator.add, x, 1), False, None),
        (x, False, None),
    ]
    for node, by_schema, source in cases:
        assert (is_view(node), view_source(node)) == (by_schema, source), node


def test_unused_results() -> None:
    build = Builder()
    mean_and_variance = build.call(aten.var_mean.correction, build.input(3))
    assert not is_result_used(mean_and_variance, 0)
    build.call(operator.getitem, mean_and_variance, 0)
    assert is_result_used(mean_and_variance, 0)
    assert not is_result_used(mean_and_variance, 1)
    parts = build.call(aten.split.Tensor, build.input(3), 1)
    build.call(aten.cat.default, parts)
    assert is_result_used(parts, 2)


def test_description_of_inputs() -> None:
    build = Builder()
    x, size = build.input(8, 1024), build.call(operator.add, 1, 2, value=5)
    assert describe_inputs(build.call(aten.add.Tensor, x, x)) == "f32[8, 1024], f32[8, 1024]"
    assert describe_inputs(build.call(aten.view.default, x, [size, -1])) == "f32[8, 1024], size=[5, -1]"
    assert describe_inputs(build.call(aten.cat.default, [x, x], 1)) == "tensors=[f32[8, 1024], f32[8, 1024]], dim=1"
    assert describe_inputs(build.call(operator.mul, size, 3)) == "5, 3"
    total = build.graph.call_function(aten.sum.dim_IntList, (x, [1]), {"dtype": torch.float64})
    assert describe_inputs(total) == "f32[8, 1024], dim=[1], dtype=torch.float64"


TORCH_FRAME = f'  File "{nn.modules.linear.__file__}", line 134, in forward\n    return F.linear(x)'
MODEL_FRAME = '  File "/home/me/torch/my models/model.py", line 41, in forward\n    return self.layer(x)'
CALLER_FRAME = '  File "/home/me/train.py", line 7, in step\n    loss = model(x)'


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([CALLER_FRAME, MODEL_FRAME, TORCH_FRAME], "/home/me/torch/my models/model.py:41, in forward"),
        ([CALLER_FRAME, TORCH_FRAME], "/home/me/train.py:7, in step"),
        ([TORCH_FRAME], ""),
        ([], ""),
    ],
)
def test_user_line_is_the_innermost_outside_torch(lines: list[str], expected: str) -> None:
    node = Graph().placeholder("x")
    node.meta["stack_trace"] = "\n".join(lines)
    assert user_line(node) == expected
