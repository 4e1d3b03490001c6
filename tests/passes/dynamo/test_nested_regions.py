"""Regions that write to what they get are put in place of their calls; the others stay."""

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
    """Writes a row, and reads what it has written."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("cache", torch.zeros(3, 4))

    @region
    def forward(self, x: torch.Tensor, place: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.cache.index_copy_(0, place, x[:1])
        return self.linear(x) + self.cache.sum(), x * 2


class Normed(nn.Module):
    """Its batch norm writes running statistics, without an op whose name says so."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    @region
    def forward(self, x: torch.Tensor, place: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.norm(x).tanh(), x + 1


class Outer(nn.Module):
    """The inner region writes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Cached()

    @region
    def forward(self, x: torch.Tensor, place: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inner(x.sin(), place)


class Pure(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @region
    def forward(self, x: torch.Tensor, place: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        own = x.clone()
        own[0] = 3.0  # a write, but not to what it gets
        return self.linear(own), x * 2


class Model(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x, other = block(x, place)
            x = x + other
        return x


def calls(module: GraphModule) -> int:
    return sum(node.target is torch.ops.higher_order.invoke_subgraph for node in module.graph.nodes)


@pytest.mark.parametrize(("kind", "left"), [(Cached, 0), (Normed, 0), (Outer, 0), (Pure, 3)])
def test_what_is_left_of_the_calls(kind: Callable[[], nn.Module], left: int) -> None:
    """torch runs the changed graph: its results, and what it has written, are eager mode's."""
    counts = []

    def backend(module: GraphModule, _: Sequence[Any]) -> Any:
        counts.append(calls(module))
        inline_writing_regions(module)
        counts.append(calls(module))
        module.graph.lint()
        return module

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model(kind)
    expected = copy.deepcopy(model)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for place in (1, 2):
        given = torch.randn(5, 4), torch.tensor([place])
        with torch.no_grad():
            torch.testing.assert_close(compiled(*given), expected(*given))
        for mine, theirs in zip(model.buffers(), expected.buffers(), strict=True):
            torch.testing.assert_close(mine, theirs)
    assert counts == [3, left], "captured once"


def test_training_with_running_statistics(quick_xla: None) -> None:
    """AOTAutograd itself refuses such regions where gradients are wanted."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model(Normed)
    expected = copy.deepcopy(model)
    x, place = torch.randn(5, 4), torch.tensor([0])
    for each, run in ((model, torch.compile(model, backend="dynaxla")), (expected, expected)):
        each.zero_grad()
        run(x, place).square().sum().backward()
    for mine, theirs in zip((*model.parameters(), *model.buffers()), (*expected.parameters(), *expected.buffers()), strict=True):
        torch.testing.assert_close(mine, theirs)
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)


@region
def added(total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return total.add_(x.sin()) * 2


class OfItsOwn(nn.Module):
    """Another region writes to what this one makes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @region
    def forward(self, x: torch.Tensor, place: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = self.linear(x).clone()
        return added(total, x) + total, x * 2


class Twice(OfItsOwn):
    """That region has two calls: TorchDynamo leaves them."""

    @region
    def forward(self, x: torch.Tensor, place: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = self.linear(x).clone()
        return added(total, x) + added(total, x.cos()), x * 2


class Checkpointed(Twice):
    """The regions are called in code that is computed again."""

    def forward(self, x: torch.Tensor, place: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        def function(x: torch.Tensor) -> torch.Tensor:
            total = self.linear(x).clone()
            return added(total, x) + added(total, x.cos())

        return checkpoint(function, x, use_reentrant=False), x * 2


@pytest.mark.parametrize("kind", [OfItsOwn, Twice, Checkpointed])
def test_regions_that_write_inside_what_a_graph_calls(kind: Callable[[], nn.Module], quick_xla: None) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model(kind)
    expected = copy.deepcopy(model)
    x, place = torch.randn(5, 4), torch.tensor([0])
    torch.compile(model, backend="dynaxla", fullgraph=True)(x, place).square().sum().backward()
    expected(x, place).square().sum().backward()
    for mine, theirs in zip((*model.parameters(), *model.buffers()), (*expected.parameters(), *expected.buffers()), strict=True):
        torch.testing.assert_close(mine, theirs)
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)
