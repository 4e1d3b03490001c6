"""Tests of interop/effect_tokens.py: graphs take and return no tokens of linear-algebra checks."""

from __future__ import annotations

import torch
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._subclasses.fake_tensor import FakeTensorMode

from dynaxla.interop.effect_tokens import remove_tokens_of_checks, token_count
from dynaxla.runtime import capture_lock
from dynaxla.torch_ops import aten


def test_checks_stay_without_their_tokens() -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.linalg.inv(x), torch.linalg.inv(x + 1)]

    with FakeTensorMode():
        x = torch.empty(2, 2)
    with capture_lock.capturing():
        graph = aot_export_joint_simple(function, (x,), trace_joint=False).graph
    assert token_count(graph) == 1
    remove_tokens_of_checks(graph)
    assert token_count(graph) == 0
    assert len(graph.find_nodes(op="placeholder")) == 1
    assert len(graph.output_node().args[0]) == 2
    assert len(graph.find_nodes(op="call_function", target=aten._linalg_check_errors.default)) == 2
