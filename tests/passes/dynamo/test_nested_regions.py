"""Tests of passes/dynamo/nested_regions.py: calls of regions that write to an operand are inlined; other calls stay."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from dynaxla.passes.dynamo.nested_regions import inline_writing_regions

region = torch.compiler.nested_compile_region


class Cached(nn.Module):
    """Writes a row to a buffer, and reads the buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("cache", torch.zeros(3, 4))

    @region
    def forward(self, x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.cache.index_copy_(0, index, x[:1])
        return self.linear(x) + self.cache.sum(), x * 2


class Normed(nn.Module):
    """Batch norm writes running statistics, without an in-place op."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    @region
    def forward(self, x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.norm(x).tanh(), x + 1


class Outer(nn.Module):
    """A region whose inner region writes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Cached()

    @region
    def forward(self, x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inner(x.sin(), index)


class Pure(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @region
    def forward(self, x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        own = x.clone()
        own[0] = 3.0  # a write, but not to an operand
        return self.linear(own), x * 2


class Model(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x, other = block(x, index)
            x = x + other
        return x


def count_calls(module: GraphModule) -> int:
    return sum(node.target is torch.ops.higher_order.invoke_subgraph for node in module.graph.nodes)


@pytest.mark.parametrize(("kind", "remaining"), [(Cached, 0), (Normed, 0), (Outer, 0), (Pure, 3)])
def test_only_writing_regions_are_inlined(kind: Callable[[], nn.Module], remaining: int) -> None:
    """torch runs the rewritten graph: its results and buffers equal eager mode's."""
    counts = []

    def backend(module: GraphModule, _: Sequence[Any]) -> Any:
        counts.append(count_calls(module))
        inline_writing_regions(module)
        counts.append(count_calls(module))
        module.graph.lint()
        return module

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model(kind)
    expected = copy.deepcopy(model)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for index in (1, 2):
        given = torch.randn(5, 4), torch.tensor([index])
        with torch.no_grad():
            torch.testing.assert_close(compiled(*given), expected(*given))
        for mine, theirs in zip(model.buffers(), expected.buffers(), strict=True):
            torch.testing.assert_close(mine, theirs)
    assert counts == [3, remaining], "the model is captured once"


def test_training_with_running_statistics(quick_xla: None) -> None:
    """Without the pass, AOTAutograd refuses regions that write if gradients are needed."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model(Normed)
    expected = copy.deepcopy(model)
    x, index = torch.randn(5, 4), torch.tensor([0])
    for each, run in ((model, torch.compile(model, backend="dynaxla")), (expected, expected)):
        each.zero_grad()
        run(x, index).square().sum().backward()
    for mine, theirs in zip((*model.parameters(), *model.buffers()), (*expected.parameters(), *expected.buffers()), strict=True):
        torch.testing.assert_close(mine, theirs)
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)


@region
def added(total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return total.add_(x.sin()) * 2


class WritesOwnTensor(nn.Module):
    """Calls another region, which writes to a tensor that this region has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @region
    def forward(self, x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = self.linear(x).clone()
        return added(total, x) + total, x * 2


class WritesTwice(WritesOwnTensor):
    """Calls the other region twice, so TorchDynamo does not inline the calls."""

    @region
    def forward(self, x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = self.linear(x).clone()
        return added(total, x) + added(total, x.cos()), x * 2


class WritesInCheckpoint(WritesTwice):
    """Calls the other region in a checkpoint, which is recomputed."""

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        def function(x: torch.Tensor) -> torch.Tensor:
            total = self.linear(x).clone()
            return added(total, x) + added(total, x.cos())

        return checkpoint(function, x, use_reentrant=False), x * 2


@pytest.mark.parametrize("kind", [WritesOwnTensor, WritesTwice, WritesInCheckpoint])
def test_writing_regions_inside_other_regions(kind: Callable[[], nn.Module], quick_xla: None) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model(kind)
    expected = copy.deepcopy(model)
    x, index = torch.randn(5, 4), torch.tensor([0])
    torch.compile(model, backend="dynaxla", fullgraph=True)(x, index).square().sum().backward()
    expected(x, index).square().sum().backward()
    for mine, theirs in zip((*model.parameters(), *model.buffers()), (*expected.parameters(), *expected.buffers()), strict=True):
        torch.testing.assert_close(mine, theirs)
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)
