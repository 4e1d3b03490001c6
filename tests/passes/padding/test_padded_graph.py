"""Tests of passes/padding/padded_graph.py: graphs that can run with rounded sizes, their masks, and the reasons why others cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from dynaxla.capture.graph import AtenGraph, Phase
from dynaxla.lowering.ops.valid_size_ops import masked
from dynaxla.passes.padding.padded_graph import ComputedOutput, InputOutput, NumberOutput, PaddedGraph, pad
from support.comparisons.compare import assert_equal
from support.comparisons.rounded_sizes import compiled, counts, poisoned

aten = torch.ops.aten


def graph(function: Callable[..., Any], *inputs: Any, phase: Phase = "inference") -> AtenGraph:
    module = make_fx(lambda *given: tuple(function(*given)), tracing_mode="symbolic")(*inputs)
    return AtenGraph("graph", module, phase=phase)


def masks(padded: Any) -> list[Any]:
    assert isinstance(padded, PaddedGraph), padded
    return [node for node in padded.module.graph.nodes if node.target is masked]


X = torch.zeros(5, 7)


def test_masks_are_only_on_operands_of_reductions() -> None:
    assert not masks(pad(graph(lambda x: [x.exp() * 2 + x.transpose(0, 1).unsqueeze(0).squeeze(0).t()], X)))
    # Both consumers of a value share one mask.
    assert len(masks(pad(graph(lambda x: [x.sum(1), x.sum(1, keepdim=True)], X)))) == 1
    assert len(masks(pad(graph(lambda x: [x @ x.t()], X)))) == 2


def test_graph_without_dynamic_sizes_is_not_padded() -> None:
    assert pad(AtenGraph("static", make_fx(lambda x: (x + 1,))(X))) is None


def test_kinds_of_outputs() -> None:
    def function(x: torch.Tensor, n: int) -> list[Any]:
        y = x + 1
        return [x, x[1:], y, x.shape[0] * 2, y]

    padded = pad(graph(function, X, 3))
    assert isinstance(padded, PaddedGraph)
    kinds = [type(output) for output in padded.outputs]
    assert kinds == [InputOutput, InputOutput, ComputedOutput, NumberOutput, ComputedOutput]
    assert padded.outputs[2] == padded.outputs[4]
    assert len(padded.module.graph.output_node().args[0]) == 1


def test_factors_of_flattened_sizes_have_one_order() -> None:
    def function(x: torch.Tensor) -> list[Any]:
        flat = x.view(-1, 3)
        return [flat.t() @ flat]

    assert len(masks(pad(graph(function, torch.zeros(5, 7, 3))))) == 2


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: [torch.rand_like(x) + x], "random numbers"),
        (lambda x: [x.mode(1).values], "aten.mode"),
        (lambda x: [torch.full((3,), x.shape[0])], "it uses a dynamic size as a number"),
        (lambda x: [x.reshape(-1).argmax()], "several dimensions"),
        (lambda x: [torch.fft.fft(x)], "dimension 1 of"),
        (lambda x: [x.histc(4)], "there is no rule for aten.histc"),
        (lambda x: (lambda y: [y, y[1:].view(torch.int32)])(x + 1), "two outputs share memory"),
        (lambda x: [x.view(x.shape[1], x.shape[0])], "a reshape splits a padded dimension"),
        (lambda x: [x.roll(1)], "dimension 0"),
        (lambda x: [x.flatten().flip(0)], "several dimensions"),
        (lambda x: [x.index_put((x > 0,), x[0, :5])], "elements of a mask"),
        (lambda x: [x.scatter_reduce(1, x.long(), x, "mean")], "no padding rule for reduce='mean'"),
        (lambda x: [torch.nn.functional.avg_pool1d(x[None], 2, ceil_mode=True)], "cross the end of a padded dimension"),
    ],
)
def test_reason_why_graph_needs_exact_sizes(function: Callable[..., Any], reason: str) -> None:
    found = pad(graph(function, X))
    assert isinstance(found, str)
    assert reason in found


def test_backward_output_that_views_an_input_needs_exact_sizes() -> None:
    found = pad(graph(lambda x: [x[1:]], X, phase="backward"))
    assert found == "an output shares memory with an input"


@pytest.mark.parametrize("shift", [0, 1])
def test_flattened_tensors_of_equal_batch_and_length_are_padded(shift: int) -> None:
    def loss(x: torch.Tensor, w: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy((x @ w)[:, : x.shape[1] - shift].reshape(-1, 5), n[:, shift:].reshape(-1))

    def check(batch: int, length: int) -> int:
        leaves = [torch.randn(batch, length, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)]
        n = torch.randint(0, 5, (batch, length))
        found, expected = (torch.autograd.grad(each(*leaves, n), leaves) for each in (run, loss))
        for mine, theirs in zip(found, expected, strict=True):
            assert_equal(mine, theirs)
        return counts()[0] - before[0]

    # Without `dynamic=True`, each size that changes is a separate symbol.
    run, before = compiled(loss, dynamic=None), counts()
    with poisoned():
        assert [check(*sizes) for sizes in ((4, 16), (3, 17), (5, 21), (6, 22), (5, 24))] == [2, 4, 6, 6, 6]
        # The same number of elements in another shape: another graph, with exact sizes.
        x, w, n = torch.randn(6, 4 + shift, 4), torch.randn(4, 5), torch.randint(0, 5, (3, 8 + shift))
        assert_equal(run(x, w, n), loss(x, w, n))
    assert counts()[1] == before[1]
